"""With many hosts, the driver sends a message for all of them to a few relays, which pass it on to the others.

To a host that can't reach its relay, or has lost it, the driver sends directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import protocol
from ..rank_host import RankHost

DIRECT_HOSTS = 32  # up to so many hosts, there are no relays
RELAYED_BYTES = 1 << 16  # larger messages are not relayed, since relayed ones are kept until acknowledged


class Tree:
    """The hosts of a mesh: there are about as many relays as each has hosts below it.

    >>> branch_size(33), branch_size(64), branch_size(1000)
    (6, 8, 32)
    """

    def __init__(self) -> None:
        self._heads: list[RankHost] = []

    def grow(self, hosts: Sequence[RankHost]) -> None:
        """Build the tree for these hosts, some of which may have been in it before."""
        self._heads = []
        if len(hosts) <= DIRECT_HOSTS:
            return
        size = branch_size(len(hosts))
        for at in range(0, len(hosts), size):
            head, *below = hosts[at : at + size]
            head.below = {host.number: host for host in below}
            self._heads.append(head)
            if below:
                head.link.send(protocol.OpenRelay())

    def send(self, msg: bytes, pieces: Sequence[Any]) -> bool:
        """Send a message to all hosts through relays, its content in pieces of bytes; False if it can't be relayed."""
        if not self._heads or sum(map(len, pieces)) > RELAYED_BYTES:
            return False
        content = b"".join(pieces)
        for head in self._heads:
            numbers = []
            for host in head.below.values():
                if number := host.ordered.relayed(msg, (content,)):
                    numbers.append((host.number, number))
                else:
                    host.ordered.send_encoded(msg, (content,))
            if numbers:
                head.ordered.send(protocol.Forward(tuple(numbers), msg), content)
            else:
                head.ordered.send_encoded(msg, (content,))
        return True


def branch_size(hosts: int) -> int:
    """The number of hosts in a branch: a relay and the hosts below it."""
    return math.isqrt(hosts - 1) + 1
