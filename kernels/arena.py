"""The arena: one `memfd` that every rank of a host maps, and the board on its first pages.

Why a memfd: containers cap /dev/shm at 64 MB, and names there outlive a killed process. The file is sparse:
its size is address space, pages come with the first touch. Invariants:

* every word has one writer (a rank, or the driver), but for the abort flag, which all set to the same value;
* aligned 8-byte stores reach the other processes in program order (x86-64); elsewhere this module refuses;
* memory handed to users as a result is mapped copy-on-write, so an in-place change stays private.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import select
import struct
import weakref
from collections.abc import Callable

import numpy as np
import torch

from .errors import Aborted, MeshError, PeerLost, message
from .pages import PAGE, any_copied

_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE exists from Python 3.13 on
_STATUS = PAGE  # one page per participant
_DIRECTORY = 16 * PAGE
_TEXT, _REASON, _TEXT_BYTES = 64, 2048, 1984  # where a status page's texts start, and their length
_CORES, _CORES_BYTES = PAGE - 64, 64  # the cores that a participant may use, a bit each
_KEPT_FREE_BYTES = 256 << 20

# words of the first page
_ABORT, _GENERATION = 0, 1
# words of a status page
_ABORTED, _REGION, _ACTIVE, _PID, _TEXT_LENGTH, _QUIET, _REASON_LENGTH, _TOP = 0, 1, 2, 3, 4, 5, 6, 7


def supported() -> str | None:
    """Why shared memory can't be used here, or None if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"plain stores are not ordered between processes on {platform.machine()}"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return None


def create(size: int) -> int:
    """A new arena for `size` ranks (and a driver), as a file descriptor."""
    fd = os.memfd_create("spmd-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, _heap_start(size) + size * _heap_bytes())
    return fd


def _heap_bytes() -> int:
    # Address space, not memory: as much as the host has, so that one rank alone may fill it.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1 << 21) * (1 << 21)


def _heap_start(size: int) -> int:
    return _directory_start(size) + size * _DIRECTORY


def _directory_start(size: int) -> int:
    return PAGE + (size + 1) * _STATUS


class Heap:
    """Blocks of one rank's part of the arena: size classes with free lists above a rising top.

    Free blocks keep their memory up to a limit; past it they give it back and keep only their address.
    """

    def __init__(
        self,
        start: int,
        size: int,
        discard: Callable[[int, int], None],
        rising: Callable[[int], None] = lambda top: None,
    ):
        self._top, self._end = start, start + size
        self._rising = rising
        self._kept: dict[int, list[int]] = {}
        self._emptied: dict[int, list[int]] = {}
        self._kept_bytes = 0
        self._discard = discard

    @staticmethod
    def rounded(nbytes: int) -> int:
        """The size class: whole pages, and at most an eighth more than asked for."""
        step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
        return max(PAGE, -(-nbytes // step) * step)

    def allocate(self, nbytes: int) -> int:
        size = self.rounded(nbytes)
        kept, emptied = self._kept.get(size), self._emptied.get(size)
        if kept:
            self._kept_bytes -= size
            return kept.pop()
        if emptied:
            return emptied.pop()
        if self._top + size > self._end:
            raise MeshError(
                message(
                    "the shared arena is full",
                    got=f"{nbytes} bytes asked for",
                    remedy="drop references to tensors made by comm.empty, or use fewer ranks on this host",
                )
            )
        self._top += size
        self._rising(self._top)
        return self._top - size

    def free(self, offset: int, nbytes: int) -> None:
        size = self.rounded(nbytes)
        if self._kept_bytes + size > _KEPT_FREE_BYTES:
            self._discard(offset, size)
            self._emptied.setdefault(size, []).append(offset)
        else:
            self._kept_bytes += size
            self._kept.setdefault(size, []).append(offset)


class Arena:
    """A participant's mapping of the arena: `rank` in 0..size-1, or `size` for the driver."""

    def __init__(self, fd: int, size: int, rank: int):
        self.fd, self.size, self.rank = fd, size, rank
        length = os.fstat(fd).st_size
        self._shared = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        self._private = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self.words = memoryview(self._shared).cast("Q")
        self._bytes = memoryview(self._shared)
        self._base = torch.frombuffer(self._bytes[:PAGE], dtype=torch.uint8).data_ptr()
        self._private_base = torch.frombuffer(memoryview(self._private)[:PAGE], dtype=torch.uint8).data_ptr()
        self._length = length
        self.generation = self.words[_GENERATION]
        self._peers: dict[int, int] = {}
        self._leases: dict[int, tuple[weakref.ref, int, int, int]] = {}  # kept alive; offset, bytes, word
        if rank < size:
            start = _heap_start(size) + rank * _heap_bytes()
            # A rank that replaces a dead one begins above what that one had handed out: others may still read it.
            below = max(0, self.words[self._status(rank) + _TOP] - start)
            self.heap = Heap(start + below, _heap_bytes() - below, self._remove, self._rose)
            self._results = _Results(self)
            self.words[self._status(rank) + _PID] = os.getpid()
            self._say_cores()

    # -- memory ---------------------------------------------------------------------------------------------------

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The arena's own memory at `offset`; the caller sees to it that it stays allocated."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel, offset=offset)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this rank's heap; its block is free again when no tensor refers to it."""
        numel = int(np.prod(shape, dtype=np.int64))
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        offset = self.heap.allocate(nbytes)
        view = self._bytes[offset : offset + nbytes]
        weakref.finalize(view, self.heap.free, offset, nbytes).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the arena a contiguous tensor lies, or None if it does not."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._length and tensor.is_contiguous() else None

    def is_leased(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor reads memory that other ranks share or reuse, and must be copied to outlive the region."""
        pointer = tensor.data_ptr()
        return 0 <= pointer - self._private_base < self._length or 0 <= pointer - self._base < self._length

    def lease_offset(self, tensor: torch.Tensor) -> int | None:
        """Where in the arena a leased tensor lies, or None if it is none."""
        offset = tensor.data_ptr() - self._private_base
        return offset if 0 <= offset < self._length else None

    def lease(self, offset: int, numel: int, dtype: torch.dtype, release_word: int, users: int) -> torch.Tensor:
        """A copy-on-write view of a result block; dropping the last reference gives this rank's share of it back."""
        self.words[release_word + users] += 1
        nbytes = numel * dtype.itemsize
        view = memoryview(self._private)[offset : offset + nbytes]
        # A plain weak reference: weakref.finalize would cost as much as a small reduction.
        reference = weakref.ref(view, self._release)
        self._leases[id(reference)] = (reference, offset, nbytes, release_word)
        return torch.frombuffer(view, dtype=dtype)

    def _release(self, reference: weakref.ref) -> None:
        _, offset, nbytes, release_word = self._leases.pop(id(reference))
        self.forget_copies(offset, nbytes)
        self.words[release_word] += 1

    def forget_copies(self, offset: int, nbytes: int) -> None:
        """Show what all share again, where this rank has changed a lease."""
        if any_copied(self._private_base + offset, nbytes):
            self._private.madvise(mmap.MADV_DONTNEED, offset, -(-nbytes // PAGE) * PAGE)

    def result_block(self, nbytes: int, users: int) -> tuple[int, int]:
        """(offset of a free result block, index of its first release word); for the rank that leads a reduction."""
        return self._results.take(nbytes, users)

    def _rose(self, top: int) -> None:
        self.words[self._status(self.rank) + _TOP] = top

    def _remove(self, offset: int, nbytes: int) -> None:
        self._shared.madvise(mmap.MADV_REMOVE, offset, nbytes)

    # -- directory: each rank publishes (key -> offset), others look it up -----------------------------------------

    def publish(self, key: int, offset: int) -> None:
        base = (_directory_start(self.size) + self.rank * _DIRECTORY) // 8
        count = self.words[base]
        if 2 + 2 * count + 2 > _DIRECTORY // 8:
            raise MeshError(message("too many communicators on this mesh", remedy="keep and reuse communicators"))
        self.words[base + 2 + 2 * count] = key
        self.words[base + 3 + 2 * count] = offset
        self.words[base] = count + 1

    def lookup(self, owner: int, key: int) -> int | None:
        base = (_directory_start(self.size) + owner * _DIRECTORY) // 8
        for entry in range(self.words[base]):
            if self.words[base + 2 + 2 * entry] == key:
                return self.words[base + 3 + 2 * entry]
        return None

    # -- cores --------------------------------------------------------------------------------------------------------

    def _say_cores(self) -> None:
        cores = sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * _CORES_BYTES)
        start = PAGE + self.rank * _STATUS + _CORES
        self._bytes[start : start + _CORES_BYTES] = cores.to_bytes(_CORES_BYTES, "little")

    def crowded(self) -> bool:
        """Whether the ranks are more than the cores that they may use, all together."""
        cores = 0
        for rank in range(self.size):
            start = PAGE + rank * _STATUS + _CORES
            cores |= int.from_bytes(self._bytes[start : start + _CORES_BYTES], "little")
        return self.size > cores.bit_count()

    # -- board: who is in which region, who gave up and why ---------------------------------------------------------

    def _status(self, participant: int) -> int:
        return (PAGE + participant * _STATUS) // 8

    def say(self, text: str) -> None:
        """Publish what this participant is doing, for the messages of others."""
        self._write(_TEXT, _TEXT_LENGTH, text)

    def said(self, participant: int) -> str:
        return self._read(participant, _TEXT, _TEXT_LENGTH)

    def _write(self, start: int, length: int, text: str) -> None:
        data = text.encode()[:_TEXT_BYTES]
        start += PAGE + self.rank * _STATUS
        self.words[self._status(self.rank) + length] = 0
        self._bytes[start : start + len(data)] = data
        self.words[self._status(self.rank) + length] = len(data)

    def _read(self, participant: int, start: int, length: int) -> str:
        start += PAGE + participant * _STATUS
        size = self.words[self._status(participant) + length]
        return bytes(self._bytes[start : start + size]).decode(errors="replace")

    def enter(self, region: int) -> None:
        base = self._status(self.rank)
        self.words[base + _TEXT_LENGTH] = 0
        # In this order: a peer that saw the new number of a rank not yet active would take it to have left already.
        self.words[base + _ACTIVE] = 1
        self.words[base + _REGION] = region

    def leave(self) -> None:
        self.words[self._status(self.rank) + _ACTIVE] = 0

    def region(self, rank: int) -> tuple[int, bool]:
        """(the last region that a rank entered, whether it is still in it)."""
        base = self._status(rank)
        return self.words[base + _REGION], bool(self.words[base + _ACTIVE])

    def abort(self, text: str) -> None:
        """Make every waiting rank of the mesh give up; `text` says why, and leaves what was said as it is."""
        self._write(_REASON, _REASON_LENGTH, text)
        self.words[self._status(self.rank) + _ABORTED] = 1
        self.words[_ABORT] = 1

    def aborted(self) -> dict[int, str]:
        """The participants that gave up, and what they said."""
        if not self.words[_ABORT]:
            return {}
        gave_up = [who for who in range(self.size + 1) if self.words[self._status(who) + _ABORTED]]
        return {who: self._read(who, _REASON, _REASON_LENGTH) for who in gave_up}

    def check(self) -> None:
        """Raise if this rank is to give up: the driver says so, or a rank that is no further than this one.

        A rank that failed in a later region has done its part in this one, which may end.
        """
        if self.words[_ABORT]:
            at, words = self.words[self._status(self.rank) + _REGION], self.words
            reasons = [
                text
                for who, text in self.aborted().items()
                if who == self.size or words[self._status(who) + _REGION] <= at
            ]
            if reasons:
                raise Aborted("; ".join(reasons))

    def clear(self, generation: int) -> None:
        """Forget the abort; only when no rank is in a region (the driver, or the leader of a recovery)."""
        for who in range(self.size + 1):
            self.words[self._status(who) + _ABORTED] = 0
            self.words[self._status(who) + _TEXT_LENGTH] = 0
            self.words[self._status(who) + _REASON_LENGTH] = 0
        for rank in range(self.size):
            self.words[(_directory_start(self.size) + rank * _DIRECTORY) // 8] = 0
        self.words[_ABORT] = 0
        self.words[_GENERATION] = generation

    @property
    def shared_generation(self) -> int:
        return self.words[_GENERATION]

    def quiet(self, generation: int) -> None:
        """Say that this rank has left the failed region and is ready for `generation`."""
        self.words[self._status(self.rank) + _QUIET] = generation

    def quiet_generation(self, rank: int) -> int:
        return self.words[self._status(rank) + _QUIET]

    def watch_processes(self) -> None:
        """Watch the other ranks' processes (launched mode: there is no driver that would)."""
        for rank in range(self.size):
            pid = self.words[self._status(rank) + _PID]
            if rank != self.rank and pid:
                try:
                    self._peers[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._peers[rank] = -1

    def check_peers(self) -> None:
        for rank, pidfd in self._peers.items():
            if pidfd < 0 or ended(pidfd):
                raise PeerLost(
                    message(
                        f"rank {rank} died or exited while rank {self.rank} waited for it", remedy="see its output"
                    ),
                    rank,
                )

    def close(self) -> None:
        for pidfd in self._peers.values():
            if pidfd >= 0:
                os.close(pidfd)
        self._peers.clear()


def ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Wait for a process to end; whether it has."""
    waiting = select.poll()  # select() takes no descriptors from 1024 on
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


class _Results:
    """Result blocks of this rank's heap, each reused once every rank has given it back.

    A block starts with two counters per user: how often it gave the block back, and how often it leased it. The block
    is free when every user has given back as many leases as were due. When a region fails, some leases that were
    due are never taken; from the next generation on those that were taken count.
    """

    def __init__(self, arena: Arena):
        self._arena = weakref.ref(arena)
        self._blocks: dict[tuple[int, int], list[int]] = {}  # size class, users
        self._sizes: dict[tuple[int, int], list[int]] = {}  # the same lists by exact size
        self._due: dict[int, tuple[int, list[int]]] = {}  # block -> generation, leases due to each user

    def take(self, nbytes: int, users: int) -> tuple[int, int]:
        arena = self._arena()
        assert arena is not None
        head = -(-16 * users // PAGE) * PAGE
        blocks = self._sizes.get((nbytes, users))
        if blocks is None:
            if len(self._sizes) >= 4096:
                self._sizes.clear()
            key = Heap.rounded(nbytes + head), users
            blocks = self._sizes[nbytes, users] = self._blocks.setdefault(key, [])
        for index, block in enumerate(blocks):
            if self._is_free(arena, block, users):
                blocks.append(blocks.pop(index))
                break
        else:
            block = arena.heap.allocate(nbytes + head)
            for word in range(block // 8, block // 8 + 2 * users):
                arena.words[word] = 0
            self._due[block] = (arena.generation, [0] * users)
            blocks.append(block)
        due = self._due[block][1]
        for user in range(users):
            due[user] += 1
        return block + head, block // 8

    def _is_free(self, arena: Arena, block: int, users: int) -> bool:
        generation, due = self._due[block]
        word = block // 8
        if generation != arena.generation:
            due[:] = arena.words[word + users : word + 2 * users].tolist()
            self._due[block] = (arena.generation, due)
        words = arena.words
        for user in range(users):  # noqa: SIM110 (a generator expression costs three times as much)
            if words[word + user] != due[user]:
                return False
        return True


def open_inherited(path: str) -> int:
    """Open another process's arena by `/proc/<pid>/fd/<n>`."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def word_key(*parts: object) -> int:
    """A 63-bit number for a tuple of names and numbers, equal in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return struct.unpack("<Q", digest)[0] >> 1
