"""Beyond some hosts the driver tells a few of them what it says to all, and these relay it to the others.

A host that can't reach its relay, or has lost it, is told by the driver itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import protocol
from ..rank_host import RankHost

DIRECT_HOSTS = 32  # up to which the driver tells each host itself
RELAYED_BYTES = 1 << 16  # of what more would be kept of messages until hosts have had them


class Tree:
    """The hosts of a mesh: about as many are relays as each relays to.

    >>> branch_size(33), branch_size(64), branch_size(1000)
    (6, 8, 32)
    """

    def __init__(self) -> None:
        self._heads: list[RankHost] = []

    def grow(self, hosts: Sequence[RankHost]) -> None:
        """Have these hosts relayed to, some of which may have been before."""
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
        """Send a message, with its content in pieces of bytes, to all hosts, if there are relays; whether it was."""
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
    """How many hosts a relay and those that it relays to are."""
    return math.isqrt(hosts - 1) + 1
