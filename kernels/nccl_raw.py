"""NCCL's own communicators: how they are made, split and ended.

Ranks that meet again on another channel do not meet anew: each channel beyond the first is split off the group's first
communicator. Ending is idempotent. Invariant: ranks enter NCCL's blocking calls together, after a barrier that notices
aborts, which those calls do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .communicator import Communicator
from .errors import MeshError, message
from .nccl_library import Library


def joined(library: Library, size: int, unique: bytes, rank: int) -> Any:
    """NCCL's communicator of those that have this unique id."""
    try:
        return library.nccl.NcclCommunicator(size, unique, rank)
    except RuntimeError as error:
        raise MeshError(
            message(
                "NCCL could not connect the GPUs",
                got=f"{error}; {library.describe()}",
                remedy="run with NCCL_DEBUG=INFO; ranks need a GPU each, and a driver as new as their CUDA version",
            )
        ) from None


def end(raw: Any, *, abort: bool) -> None:
    """End a communicator: in peace, or at once whatever it is doing."""
    with contextlib.suppress(RuntimeError):  # it may be broken already
        if abort:
            raw.abort()
        else:
            raw.destroy()


class Group:
    """What the channels of one group of ranks share: the first communicator, made through a unique id.

    Args:
        host: a communicator of the same ranks for the host, which carries the unique id.
    """

    def __init__(self, host: Communicator, library: Library):
        self.host, self.library = host, library
        self.generation = 0
        self._first: Any = None
        self._users: set[str] = set()

    def open(self, channel: str) -> Any:
        """NCCL's communicator for a channel, in the present generation; all ranks of the group call this."""
        generation = self.host._watch.generation
        if self.generation != generation:
            self.end(abort=True)
            self._first, self.generation = self._made(), generation
        self._users.add(channel)
        if channel == "main":
            return self._first
        self.host.barrier()
        return self._first.commSplit(0, self.host.rank)

    def _made(self) -> Any:
        host = self.host
        unique = torch.zeros(128, dtype=torch.uint8)
        if host.rank == 0:
            made = self.library.nccl.get_unique_id()
            unique[: len(made)] = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        host.broadcast(unique, src=0)
        host.barrier()
        return joined(self.library, host.size, unique.numpy().tobytes(), host.rank)

    def leave(self, channel: str, raw: Any, *, abort: bool) -> None:
        """A channel is done with its communicator; the first ends with its last user, or at once if by force."""
        self._users.discard(channel)
        if raw is not None and raw is not self._first:
            end(raw, abort=abort)
        elif raw is not None and abort:
            self.end(abort=True)
        if not self._users:
            self.end(abort=abort)

    def end(self, *, abort: bool) -> None:
        first, self._first = self._first, None
        if first is not None:
            end(first, abort=abort)


_groups: dict[tuple[int, tuple[int, ...]], Group] = {}


def group_of(make_host: Callable[[str], Communicator], watch: Any, ranks: tuple[int, ...], library: Library) -> Group:
    """The group of these ranks in one mesh; the same for all channels."""
    key = (id(watch), ranks)
    found = _groups.get(key)
    if found is None or found.host._watch is not watch:
        found = _groups[key] = Group(make_host("nccl"), library)
    return found


def forget(group: Group) -> None:
    """Drop a group that no channel uses any more."""
    for key in [key for key, known in _groups.items() if known is group and not group._users]:
        _groups.pop(key).host.close()
