"""The board: the arena's first pages, on which ranks and driver publish their state.

Each participant has a page: the region that it is in, its process, its cores, what it is doing, why it ended a region.
Invariant: every word has one writer (a rank, or the driver), except the abort flag, which all set to the same value.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..call import all_wait, other_calls
from ..callsite import call_site
from ..errors import Aborted, PeerLost
from ..processes import cores, ended, memory_kills, status_of
from .bells import Bells
from .pages import MAP_NORESERVE, PAGE
from .stalls import Stalls

_STATUS = PAGE  # one page per participant
_TEXT, _DISPUTE, _REASON, _TEXT_BYTES = 192, 1448, 2704, 1256  # where a status page's texts start, and their length
_CALLS, _CALL_BYTES = PAGE - 128, 32  # the last bytes of the names of the calls of the last two regions
_CORES, _CORES_BYTES = PAGE - 64, 64  # the cores that a participant may use, a bit each
# words of the first page
_ABORT, _GENERATION = 0, 1
# words of a status page
_ABORTED, _REGION, _ACTIVE, _PID, _TEXT_LENGTH, _QUIET, _REASON_LENGTH, _TOP, _BELL = 0, 1, 2, 3, 4, 5, 6, 7, 8
_DEBUGGED, _OVERWRITTEN, _STACKS = 10, 11, 12  # from 10 on, since a bell takes two words
_BEGUN, _DONE, _STALL, _DISPUTE_LENGTH, _FOUND = 13, 14, 15, 16, 17
_TRACED_SECONDS = 1.0  # between looks whether a rank is traced


def board_bytes(size: int) -> int:
    """How much of the arena the board of `size` ranks and a driver takes."""
    return PAGE + (size + 1) * _STATUS


class Board:
    """A participant's mapping of the arena, and its place on the board: 0..size-1, or `size` for the driver."""

    has_all_ranks = True  # of the mesh

    def __init__(self, fd: int, size: int, rank: int):
        self.fd, self.size, self.rank = fd, size, rank
        self._shared = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
        self.words = memoryview(self._shared).cast("Q")
        self._bytes = memoryview(self._shared)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
        self._own = self._status(rank)
        self.bells = Bells(self.words, self.address, [self._status(each) + _BELL for each in range(size + 1)], rank)
        pages = map(self._status, range(size))
        places = [(page + _STALL, page + _REGION, page + _ACTIVE, page + _FOUND) for page in pages]
        self.stalls = Stalls(self.words, places, rank)
        self.generation = self.words[_GENERATION]
        self._peers: dict[int, int] = {}  # participant -> pidfd
        self._calls = ["", ""]
        self._traced, self._next_look = False, 0.0
        if rank < size:
            base = self._own
            self.words[base + _STACKS] = 0  # before the process that it belongs to: one without would be killed
            self.words[base + _PID] = os.getpid()
            self.words[base + _BEGUN] = self.words[base + _DONE]  # of a rank that this one replaces
            self._publish_cores()

    @property
    def mesh_rank(self) -> int:
        """This participant's rank in the mesh."""
        return self.mesh_rank_of(self.rank)

    def mesh_rank_of(self, participant: int) -> int:
        """A participant's rank in the mesh."""
        return participant

    def participant(self, rank: int) -> int:
        """A rank's number on this board; the inverse of `mesh_rank_of`."""
        return rank

    def _status(self, participant: int) -> int:
        return (PAGE + participant * _STATUS) // 8

    # -- cores, memory handed out --------------------------------------------------------------------------------------

    def _publish_cores(self) -> None:
        usable = sorted(os.sched_getaffinity(0))[: cores()]  # with less processor time it might as well have fewer
        bits = sum(1 << core for core in usable if core < 8 * _CORES_BYTES)
        start = PAGE + self.rank * _STATUS + _CORES
        self._bytes[start : start + _CORES_BYTES] = bits.to_bytes(_CORES_BYTES, "little")

    def oversubscribed(self) -> bool:
        """Whether there are more ranks than cores that they may use, all together."""
        found = 0
        for rank in range(self.size):
            start = PAGE + rank * _STATUS + _CORES
            found |= int.from_bytes(self._bytes[start : start + _CORES_BYTES], "little")
        return self.size > found.bit_count()

    @property
    def top(self) -> int:
        """The end of the memory that this rank, or one that it replaces, has ever allocated."""
        return self.words[self._own + _TOP]

    @property
    def rose(self) -> Callable[[int], None]:
        """A function that notes a new `top`, and does not refer to this object."""
        return functools.partial(self.words.__setitem__, self._own + _TOP)

    # -- who is doing what ---------------------------------------------------------------------------------------------

    def set_status(self, text: str) -> None:
        """Publish what this participant is doing, for error messages of others."""
        self._write(_TEXT, _TEXT_LENGTH, text)

    def set_waiting(self, what: str) -> None:
        """Publish what this participant waits in."""
        if self.status(self.rank) != (text := f"waiting in {what}"):
            self.set_status(text)

    def status(self, participant: int) -> str:
        """What a participant is doing."""
        return self._read(participant, _TEXT, _TEXT_LENGTH)

    def dispute(self, group: int, text: str) -> None:
        """Publish which call this rank has made in the group of this key, whose ranks have made others."""
        self._write(_DISPUTE, _DISPUTE_LENGTH, f"{group} {text}")

    def disputed(self, participant: int, group: int) -> str:
        """What a participant has last published of a disagreement in this region, if it was in this group; else ""."""
        key, _, text = self._read(participant, _DISPUTE, _DISPUTE_LENGTH).partition(" ")
        return text if key == str(group) else ""

    def _write(self, start: int, length: int, text: str) -> None:
        data = text.encode(errors="backslashreplace")[:_TEXT_BYTES]
        start += PAGE + self.rank * _STATUS
        self.words[self._own + length] = 0
        self._bytes[start : start + len(data)] = data
        self.words[self._own + length] = len(data)

    def _read(self, participant: int, start: int, length: int) -> str:
        start, at = start + PAGE + participant * _STATUS, self._status(participant) + length
        before, found = None, b""
        while found != before:  # it may be written meanwhile
            before, found = found, bytes(self._bytes[start : start + self.words[at]])
        return found.decode(errors="replace")

    def enter(self, region: int, call: str = "") -> None:
        base = self._own
        if self._calls[region % 2] != call:
            self._calls[region % 2] = call
            self._call_at(self.rank, region)[:] = call.encode(errors="replace")[-_CALL_BYTES:].ljust(_CALL_BYTES, b"\0")
        self.words[base + _TEXT_LENGTH] = self.words[base + _DISPUTE_LENGTH] = 0
        self.stalls.end()
        # In this order: if a peer saw the new number while the rank is not active, it would think that it has left.
        self.words[base + _ACTIVE] = 1
        self.words[base + _REGION] = region

    def leave(self) -> None:
        self.words[self._own + _ACTIVE] = 0

    def _call_at(self, participant: int, region: int) -> memoryview:
        start = PAGE + participant * _STATUS + _CALLS + region % 2 * _CALL_BYTES
        return self._bytes[start : start + _CALL_BYTES]

    def check_calls(self, ranks: Sequence[int], waits_in: Callable[[], str]) -> None:
        """Raise if a rank that this one waits for has begun another call as the same region."""
        region, active = here = self.region(self.rank)
        ours = bytes(self._call_at(self.rank, region))
        for rank in ranks if active else ():
            peer = self.participant(rank)
            if self.region(peer) != here:
                continue  # checked first: until it is in this region, its text belongs to an earlier one
            theirs = bytes(self._call_at(peer, region))
            if ours != theirs and self.region(peer) == here:
                own, other = (name.rstrip(b"\0").decode(errors="replace") for name in (ours, theirs))
                raise other_calls({self.mesh_rank: f"{own}, waiting in {waits_in()}", rank: other})

    def opened(self, key: int, ranks: Sequence[int]) -> Any:
        """What other hosts are told of a group of ranks here; None, as there are none."""
        return None

    def check_all_wait(self, what: str, steps: int) -> None:
        """Note that this rank has waited in vain so far, for `what`, and raise if all ranks wait for each other."""
        self.set_waiting(what)
        if self.has_all_ranks and self.stalls.all_wait(steps):
            calls = {rank: self.status(rank) or "has found this out" for rank in range(self.size)}
            raise all_wait({**calls, self.rank: f"waiting in {what} at {call_site()}"})

    def begin_task(self) -> None:
        """Count a task that this rank begins, in a region or alone."""
        self.words[self._own + _BEGUN] += 1

    def end_task(self) -> None:
        self.words[self._own + _DONE] = self.words[self._own + _BEGUN]

    def tasks(self, rank: int) -> tuple[int, int]:
        """How many tasks a rank has begun, and how many it has done."""
        base = self._status(rank)
        return self.words[base + _BEGUN], self.words[base + _DONE]

    def introduce(self, title: str) -> None:
        """Publish this driver's process, and the name of its mesh."""
        self.words[self._own + _PID] = os.getpid()
        self.set_status(title)

    def region(self, rank: int) -> tuple[int, bool]:
        """(the last region that a rank entered, whether it is still in it)."""
        base = self._status(rank)
        return self.words[base + _REGION], bool(self.words[base + _ACTIVE])

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left the region that this rank is in."""
        (region, active), (at, inside) = self.region(self.rank), self.region(rank)
        return active and (at > region or (at == region and not inside))

    def lost(self, rank: int) -> PeerLost | None:
        """The error for a rank that has left because its process ended; None here, since the watch raises it."""
        return None

    def set_in_debugger(self, there: bool) -> None:
        """Publish whether this rank is at the prompt of a debugger."""
        self.words[self._own + _DEBUGGED] = int(there)

    def in_debugger(self) -> bool:
        """Whether some rank is at a debugger's prompt, or traced by one (gdb) that does not trace this process, too."""
        pages = [self._status(rank) for rank in range(self.size)]
        if any(self.words[page + _DEBUGGED] for page in pages):
            return True
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _TRACED_SECONDS
            found = [status_of("self"), *(status_of(self.words[page + _PID]) for page in pages)]
            own, *others = [None if status is None else status["TracerPid"] for status in found]
            self._traced = not {"0", None, own}.issuperset(others)
        return self._traced

    def overwrite(self) -> None:
        """Publish that this rank begins to overwrite what was donated to its region."""
        self.words[self._own + _OVERWRITTEN] = self.words[self._own + _REGION]

    def overwritten(self, region: int) -> bool:
        """Whether some rank has begun to overwrite donated values, in this region or in a later one."""
        return any(self.words[self._status(rank) + _OVERWRITTEN] >= region for rank in range(self.size))

    def publish_stacks(self, fd: int) -> None:
        """Publish the descriptor into which this process writes its stacks when it is asked to."""
        self.words[self._own + _STACKS] = fd + 1

    def process(self, rank: int) -> tuple[int, int]:
        """A rank's process, and the descriptor of its stacks; -1 if it has published none."""
        base = self._status(rank)
        return self.words[base + _PID], self.words[base + _STACKS] - 1

    # -- ending a region, and the next generation ----------------------------------------------------------------------

    def abort(self, text: str) -> None:
        """End the region for every rank of the mesh that waits; `text` says why, and does not overwrite the status."""
        self._write(_REASON, _REASON_LENGTH, text)
        self.words[self._own + _ABORTED] = 1
        self.words[_ABORT] = 1
        self.bells.ring(range(self.size))

    def aborted(self) -> dict[int, str]:
        """The participants that aborted the region, and their reasons."""
        if not self.words[_ABORT]:
            return {}
        found = [who for who in range(self.size + 1) if self.words[self._status(who) + _ABORTED]]
        return {who: self._read(who, _REASON, _REASON_LENGTH) for who in found}

    def check(self) -> None:
        """Raise if the region was aborted for this rank: by the driver, or by a rank that is not in a later region.

        A rank that failed in a later region has done its part in this one, so this one can end normally.
        """
        if self.words[_ABORT]:
            at, aborted = self.words[self._own + _REGION], self.aborted().items()
            reasons = [text for who, text in aborted if who == self.size or self.region(who)[0] <= at]
            if reasons:
                raise Aborted("; ".join(reasons))

    def clear(self, generation: int) -> None:
        """Forget the abort; only when no rank is in a region (the driver, or the leader of a recovery)."""
        for page in map(self._status, range(self.size + 1)):
            for word in (_ABORTED, _TEXT_LENGTH, _DISPUTE_LENGTH, _REASON_LENGTH, _DEBUGGED):
                self.words[page + word] = 0
        self.words[_ABORT] = 0
        self.words[_GENERATION] = generation

    @property
    def shared_generation(self) -> int:
        return self.words[_GENERATION]

    def quiet(self, generation: int) -> None:
        """Publish that this rank has left the failed region and is ready for `generation`."""
        self.words[self._own + _QUIET] = generation

    def quiet_generation(self, rank: int) -> int:
        return self.words[self._status(rank) + _QUIET]

    # -- processes -----------------------------------------------------------------------------------------------------

    def watch_processes(self) -> None:
        """Watch the other ranks' processes; for launched ranks, which have no driver that does it."""
        self._memory_kills = memory_kills()
        for rank in range(self.size):
            pid = self.words[self._status(rank) + _PID]
            if rank != self.rank and pid:
                try:
                    self._peers[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._peers[rank] = -1

    def check_peers(self) -> None:
        if any(map(self._if_dead, self._peers)):
            # Looked at again: one that had aborted, and ended because of another, may have been seen before that one.
            lost = {rank: each for rank in self._peers if (each := self._if_dead(rank)) is not None}
            raise lost[min(lost, key=lambda rank: self.words[self._status(rank) + _ABORTED])]

    def _if_dead(self, rank: int) -> PeerLost | None:
        """The error for a watched rank, if its process has ended."""
        pidfd = self._peers.get(rank)
        if pidfd is None or not (pidfd < 0 or ended(pidfd)):
            return None
        gone = self.mesh_rank_of(rank)
        problem = f"rank {gone} died or exited while rank {self.mesh_rank} waited for it"
        if memory_kills() > self._memory_kills:
            remedy = "see its output, and give the ranks more memory, or start fewer"
            return PeerLost(problem, got="a kill for memory, by all appearances", remedy=remedy, rank=gone)
        remedy = "see its output; if it was at its end, all ranks must make this call, also if one uses the result"
        return PeerLost(problem, remedy=remedy, rank=gone)

    def close(self) -> None:
        for pidfd in self._peers.values():
            if pidfd >= 0:
                os.close(pidfd)
        self._peers.clear()
