"""`Mesh(hosts=...)`, checked: which hosts a mesh is on, how many ranks each has, and how a process is started there."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.processes import python_command
from ..rank.environment import environment
from .launchers import DialledHosts, Launcher, LocalLauncher, RayLauncher, SlurmLauncher, SshLauncher, dialled_address

FORMS = (
    '"local:2x4", a list such as ["a:8", "b:8"] or ["tcp://10.0.0.5:7000:8"], "slurm", "ray", '
    "or an object with hosts, start and stop"
)
_DIALLED = "tcp://"


@dataclasses.dataclass(frozen=True, slots=True)
class HostList:
    """The hosts of a mesh.

    Attributes:
        names: of the hosts, in the order of their ranks.
        counts: how many ranks each has.
        launcher: starts the processes there.
        local: whether all of them are simulated on this machine.
        given: the original hosts, if the mesh was resized since.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    launcher: Launcher
    local: bool
    given: HostList | None = None

    @property
    def dialled(self) -> bool:
        """Whether they listen for the driver, and may not be able to reach it."""
        return isinstance(self.launcher, DialledHosts)

    @property
    def size(self) -> int:
        return sum(self.counts)

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host.

        >>> HostList(("a", "b"), (2, 3), LocalLauncher([]), True).ranks()
        ((0, 1), (2, 3, 4))
        """
        ends = [sum(self.counts[:index]) for index in range(len(self.counts) + 1)]
        return tuple(tuple(range(start, end)) for start, end in itertools.pairwise(ends))

    def only(self, indexes: Sequence[int]) -> HostList:
        """The hosts with these indices."""
        names, counts = [self.names[index] for index in indexes], [self.counts[index] for index in indexes]
        return dataclasses.replace(self, names=tuple(names), counts=tuple(counts))

    def spread(self, size: int) -> HostList:
        """The hosts for `size` ranks: each has a number in proportion to its original one, at least one.

        If there are fewer ranks than hosts, the last hosts are left out.

        >>> two = HostList(("a", "b"), (4, 2), LocalLauncher([]), True)
        >>> [two.spread(size).counts for size in (12, 7, 6, 5, 3, 2, 1)]
        [(8, 4), (5, 2), (4, 2), (3, 2), (2, 1), (1, 1), (1,)]

        Raises:
            MeshError: Slurm or Ray has granted fewer.
        """
        given = self.given or self
        counts = [0] * len(given.names)
        for _ in range(size):
            counts[min(range(len(counts)), key=lambda index: counts[index] / given.counts[index])] += 1
        if size > given.size and isinstance(self.launcher, SlurmLauncher | RayLauncher):
            raise MeshError(
                "the hosts have no more ranks to give",
                got=f"{size} ranks, and {given.size} that were asked for when the mesh was made",
                remedy="save, and restore on a mesh of the larger size",
            )
        return given._with(counts)

    def without(self, ranks: Collection[int]) -> HostList:
        """The hosts that are left without these ranks."""
        left = [sum(rank not in ranks for rank in its) for its in self.ranks()]
        return self._with(left)

    def _with(self, counts: Sequence[int]) -> HostList:
        having = [index for index, count in enumerate(counts) if count]
        return dataclasses.replace(
            self.only(having), counts=tuple(counts[index] for index in having), given=self.given or self
        )

    def by_rank(self) -> list[str]:
        """Each rank's host."""
        return [name for name, count in zip(self.names, self.counts, strict=True) for _ in range(count)]

    def command(self) -> list[str]:
        """The command for each host: this Python, at the same path; on this machine with the program's module path."""
        tuned = ["env", *(f"{name}={value}" for name, value in environment(os.environ).items())]
        python = [*tuned, "sh", "-c", 'exec "$0" "$@"', *python_command()]  # env takes a path with = for a variable
        if not self.local:
            return [*python, "-m", "spmd", "host"]
        code = "import sys; sys.path[:] = sys.argv[1:]; from spmd.mesh.hosts.process import main; main()"
        return [*python, "-c", code, *sys.path]


def host_list_of(hosts: Any) -> HostList:
    """What `Mesh(hosts=)` means.

    >>> host_list_of("local:2x4").ranks()
    ((0, 1, 2, 3), (4, 5, 6, 7))

    Raises:
        MeshError: it is not understood.
    """
    if isinstance(hosts, str):
        kind, _, counts = hosts.partition(":")
        if kind in ("slurm", "ray") and (hosts == kind or _is_count(counts)):
            return _checked((SlurmLauncher if kind == "slurm" else RayLauncher)(int(counts) if counts else None), False)
        number, _, each = counts.partition("x")
        if kind != "local" or not _is_count(number) or not _is_count(each):
            raise _not_understood(hosts)
        hosts = LocalLauncher([f"local{index}:{each}" for index in range(int(number))])
        return _checked(hosts, True)
    if isinstance(hosts, list | tuple):
        dialled = [isinstance(host, str) and host.startswith(_DIALLED) for host in hosts]
        if any(dialled) and not all(dialled):
            raise _not_understood(hosts)
        return _checked(DialledHosts(hosts) if any(dialled) else SshLauncher(hosts), False)
    if all(hasattr(hosts, name) for name in ("hosts", "start", "stop")):
        return _checked(hosts, False)
    raise _not_understood(hosts)


def _checked(launcher: Launcher, local: bool) -> HostList:
    names, counts = [], []
    for host in launcher.hosts:
        name, _, count = host.rpartition(":") if isinstance(host, str) else ("", "", "")
        wrong = name.startswith(_DIALLED) and dialled_address(name.removeprefix(_DIALLED)) is None
        if not name or name.startswith("-") or wrong or not _is_count(count):
            raise _not_understood(launcher.hosts)
        names.append(name)
        counts.append(int(count))
    if not names:
        raise _not_understood(launcher.hosts)
    if len(set(names)) < len(names):
        raise MeshError("a host is named twice", got=list(launcher.hosts), remedy="name each host once")
    return HostList(tuple(names), tuple(counts), launcher, local)


def _is_count(text: str) -> bool:
    return text.isdecimal() and text.isascii() and int(text) > 0


def _not_understood(hosts: Any) -> MeshError:
    return MeshError("Mesh got hosts that are not understood", got=repr(hosts), expected=FORMS)
