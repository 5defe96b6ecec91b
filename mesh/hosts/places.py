"""Which hosts a mesh is on, how many ranks each has, and how a process is started there: `Mesh(hosts=...)`, checked.

A *launcher* starts the per-host process. It is any object with `hosts`, a list of "name:ranks", and two methods:

    start(name, command, stdin) -> handle    run a command on the host of that name, give it these bytes, do not wait
    stop(handle)                             see to it that the command has ended

Here are those for ssh, and for hosts that this machine pretends to be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from ...kernels.errors import MeshError, message
from ..rank.memory import tunables

FORMS = '"local:2x4", a list such as ["a:8", "b:8"], or an object with hosts, start and stop'
_END_SECONDS = 5.0


class Launcher(Protocol):
    """What starts the processes of a mesh's hosts, and ends them."""

    hosts: Sequence[str]

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any: ...
    def stop(self, handle: Any) -> None: ...


class LocalLauncher:
    """Hosts that this machine pretends to be: each a process of its own, with shared memory of its own."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        return started(command, stdin)

    def stop(self, handle: subprocess.Popen) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.wait(_END_SECONDS)  # it ends with the connection
        handle.kill()
        handle.wait()


class SshLauncher(LocalLauncher):
    """Hosts that ssh reaches without asking for anything."""

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        return started(["ssh", *options, name, shlex.join(command)], stdin)


def started(command: Sequence[str], stdin: bytes) -> subprocess.Popen:
    """A process that has been given its input, and that Ctrl-C in this terminal does not reach."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, as will be seen
        process.stdin.write(stdin)
        process.stdin.flush()
    process.stdin.close()
    return process


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The hosts of a mesh.

    Attributes:
        names: of the hosts, in the order of their ranks.
        counts: how many ranks each has.
        launcher: starts the processes there.
        local: this machine pretends to be all of them.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    launcher: Launcher
    local: bool

    @property
    def size(self) -> int:
        return sum(self.counts)

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host.

        >>> Places(("a", "b"), (2, 3), LocalLauncher([]), True).ranks()
        ((0, 1), (2, 3, 4))
        """
        ends = [sum(self.counts[:place]) for place in range(len(self.counts) + 1)]
        return tuple(tuple(range(start, end)) for start, end in itertools.pairwise(ends))

    def only(self, places: Sequence[int]) -> Places:
        """Some of them."""
        names, counts = [self.names[place] for place in places], [self.counts[place] for place in places]
        return dataclasses.replace(self, names=tuple(names), counts=tuple(counts))

    def by_rank(self) -> list[str]:
        """Each rank's host."""
        return [name for name, count in zip(self.names, self.counts, strict=True) for _ in range(count)]

    def command(self) -> list[str]:
        """What runs on each host: this Python, at the same path; here with this program's modules."""
        python = ["env", f"GLIBC_TUNABLES={tunables(os.environ.get('GLIBC_TUNABLES'))}", sys.executable]
        if not self.local:
            return [*python, "-m", "spmd", "host"]
        code = "import sys; sys.path[:] = sys.argv[1:]; from spmd.mesh.hosts.process import main; main()"
        return [*python, "-c", code, *sys.path]


def places_of(hosts: Any) -> Places:
    """What `Mesh(hosts=)` means.

    >>> places_of("local:2x4").ranks()
    ((0, 1, 2, 3), (4, 5, 6, 7))

    Raises:
        MeshError: it means nothing.
    """
    if isinstance(hosts, str):
        kind, _, counts = hosts.partition(":")
        number, _, each = counts.partition("x")
        if kind != "local" or not _is_count(number) or not _is_count(each):
            raise _not_understood(hosts)
        hosts = LocalLauncher([f"local{place}:{each}" for place in range(int(number))])
        return _checked(hosts, True)
    if isinstance(hosts, list | tuple):
        return _checked(SshLauncher(hosts), False)
    if all(hasattr(hosts, name) for name in ("hosts", "start", "stop")):
        return _checked(hosts, False)
    raise _not_understood(hosts)


def _checked(launcher: Launcher, local: bool) -> Places:
    names, counts = [], []
    for host in launcher.hosts:
        name, _, count = host.rpartition(":") if isinstance(host, str) else ("", "", "")
        if not name or name.startswith("-") or not _is_count(count):
            raise _not_understood(launcher.hosts)
        names.append(name)
        counts.append(int(count))
    if not names:
        raise _not_understood(launcher.hosts)
    if len(set(names)) < len(names):
        raise MeshError(message("a host is named twice", got=list(launcher.hosts), remedy="name each host once"))
    return Places(tuple(names), tuple(counts), launcher, local)


def _is_count(text: str) -> bool:
    return text.isdecimal() and text.isascii() and int(text) > 0


def _not_understood(hosts: Any) -> MeshError:
    return MeshError(message("Mesh got hosts that are not understood", got=repr(hosts), expected=FORMS))
