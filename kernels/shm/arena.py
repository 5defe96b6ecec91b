"""The arena: one `memfd` that every rank of a host maps, the region of shared memory that blocks are allocated from.

Why a memfd: containers cap /dev/shm at 64 MB, and names there outlive a killed process. The file is sparse: its size is
only address space, and pages get memory when they are first touched. It holds the board, the directory, for each rank
its answers to the driver, a ledger and a heap, and a heap for the driver. It exists as long as any process holds its
descriptor, so its content outlives every rank.
Invariants:

* aligned 8-byte stores reach the other processes in program order (x86-64); on other machines this module refuses;
* memory handed to users as a result is mapped copy-on-write, so an in-place change stays private.

`blocks` describes who owns a block of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import platform
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import PeerLost
from ..waiting import turn
from .answers import Answers, answers_bytes
from .blocks import Register, ResultBlocks, Views
from .board import Board, board_bytes
from .directory import Directory, directory_bytes
from .given import GivenBlocks
from .heap import Heap
from .lasting import Lasting
from .ledger import Entries, Ledger
from .pages import PAGE, populate

_NAME = "spmd-arena"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def supported() -> str | None:
    """Why shared memory can't be used here, or None if it can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"plain stores are not ordered between processes on {platform.machine()}"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return None


def create(size: int) -> int:
    """A new arena for `size` ranks (and a driver), as a file descriptor; sealed, so that nobody can change its size."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _layout(size).end)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_of(pid: int, number: int, size: int) -> int:
    """Open another process's arena for `size` ranks, which that process has as descriptor `number`.

    Raises:
        OSError: there is no such file, or it is not an arena of this user.
    """
    # O_PATH first: whatever the file is, that neither reads nor blocks.
    named = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    try:
        found, link = os.fstat(named), os.readlink(f"/proc/self/fd/{named}")
        # All memfds, and nothing else, are on one device; a name alone proves nothing, since any file may have it.
        memfd = stat.S_ISREG(found.st_mode) and found.st_dev == _device_of_memfds()
        if not memfd or link != f"/memfd:{_NAME} (deleted)" or found.st_uid != os.getuid():
            raise OSError(errno.EPERM, "no arena of this user's", link)
        if found.st_size != _layout(size).end:
            raise OSError(errno.EPERM, f"no arena of {size} ranks", link)
        fd = os.open(f"/proc/self/fd/{named}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(named)
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        os.close(fd)
        raise OSError(errno.EPERM, "an arena that could be cut short", link)
    return fd


def bytes_of(pid: int, number: int, size: int) -> torch.Tensor:
    """The bytes of another process's arena; see `open_of`."""
    fd = open_of(pid, number, size)
    try:
        return torch.frombuffer(mmap.mmap(fd, _layout(size).end), dtype=torch.uint8)
    finally:
        os.close(fd)


def found_in(pid: int) -> dict[tuple[int, int], tuple[int, int]]:
    """The arenas that a process of this user has open: (device, inode) -> (number of its descriptor, ranks)."""
    found = {}
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir(f"/proc/{pid}/fd")):
            with contextlib.suppress(OSError):
                found.update({place: (number, size) for place, size in _opened(f"/proc/{pid}/fd/{number}")})
    return found


def _opened(path: str) -> Iterator[tuple[tuple[int, int], int]]:
    """If a descriptor is an arena's: its (device, inode), and for how many ranks it is."""
    if os.readlink(path) == f"/memfd:{_NAME} (deleted)":
        one = os.stat(path)
        sizes = range(1, one.st_size // _layout(1).heap_bytes)
        yield from (((one.st_dev, one.st_ino), size) for size in sizes if _layout(size).end == one.st_size)


def _device_of_memfds() -> int:
    fd = os.memfd_create("spmd-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


class _Layout(NamedTuple):
    """Where the parts of an arena begin, behind the board, where it ends, and the size of each ledger and heap."""

    directory: int
    answers: int
    registers: int
    ledgers: int
    heaps: int
    end: int
    ledger_bytes: int
    heap_bytes: int


@functools.lru_cache(maxsize=64)
def _layout(size: int) -> _Layout:
    # Address space, not memory: each heap is as large as the host's memory, so that one rank alone may use all of it.
    heap = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1 << 21) * (1 << 21)
    ledger = heap // 8 // PAGE * PAGE
    directory = board_bytes(size)
    answers = directory + directory_bytes(size)
    registers = answers + answers_bytes(size)
    ledgers = registers + (size + 1) * Register.NBYTES
    heaps = ledgers + size * ledger
    return _Layout(directory, answers, registers, ledgers, heaps, heaps + (size + 1) * heap, ledger, heap)


class Arena(Board):
    """A participant's mapping of the arena: `rank` in 0..size-1, or `size` for the driver."""

    def __init__(self, fd: int, size: int, rank: int):
        super().__init__(fd, size, rank)
        self._length, at = len(self._bytes), _layout(size)
        self.directory = Directory(self.words, at.directory, size, rank)
        self.answers = Answers(self.words, self._bytes, self.bells, at.answers, size, rank)
        self.views = Views(fd, self._length, self.words)
        # Not a method, to avoid a reference cycle: the mapping is to go with its arena, not at a garbage collection.
        self._remove = functools.partial(_give_back, self._shared)
        # For each closed communicator, a function that frees what it can, and returns whether that is everything.
        self.closing: list[Callable[[], bool]] = []
        self.registers = [Register(self.words, at.registers + each * Register.NBYTES) for each in range(size + 1)]
        self.heap_start, self._heap_end = (at.heaps + (rank + more) * at.heap_bytes for more in (0, 1))
        # A rank that replaces a dead one begins above all that the dead one had allocated: others may still read it.
        self.heap = self._new_heap(())
        if rank < size:
            self.results = ResultBlocks(self.words, self.heap, self, self.registers[rank], self._remove)
            self.lasting = Lasting(fd, self.heap_start, at.heap_bytes, self.heap)
            ledger = at.ledgers + rank * at.ledger_bytes
            self.ledger = Ledger(self._bytes, fd, self.address, ledger, at.ledger_bytes, self._remove)
        else:
            self.given = GivenBlocks(self.words, self._bytes, self.heap, size, self.registers[rank], self._remove)

    def entries_of(self, rank: int) -> Entries:
        """A rank's ledger, for other participants to read."""
        at = _layout(self.size)
        return Entries(self._bytes, at.ledgers + rank * at.ledger_bytes, at.ledger_bytes)

    def _new_heap(self, holes: Sequence[tuple[int, int]], used: int = 0) -> Heap:
        start = max(self.top, self.heap_start)
        return Heap(start, self._heap_end - start, self._remove, self.rose, holes, used=used)

    def restart_heap(self, holes: Sequence[tuple[int, int]]) -> None:
        """Free `holes` of (offset, bytes); all else is allocated, by the process that this one replaces."""
        for offset, nbytes in holes:
            self._remove(offset, nbytes)
        self.heap = self._new_heap(holes, self.top - self.heap_start - sum(nbytes for _, nbytes in holes))
        self.results.adopt(self.heap)
        self.lasting.adopt(self.heap)

    def clear(self, generation: int) -> None:
        self.directory.clear()
        super().clear(generation)

    def sweep(self) -> None:
        """Free the memory of closed communicators, as far as all their ranks have closed them."""
        self.closing = [given_back for given_back in self.closing if not given_back()]

    def trim(self) -> None:
        """On a rank, give back memory that nobody has taken since the last call; to be called now and then."""
        with turn:
            self.heap.trim()
            self.results.trim()

    def populate(self, at: int, nbytes: int) -> None:
        """Map memory in advance for this participant's next blocks: `nbytes`, from `at` bytes behind the last block."""
        start, left = self.heap.untouched
        nbytes = max(0, min(nbytes, left - at))
        populate(self.address + start + at, nbytes)
        if self.rank < self.size:
            self.lasting.populate(start + at, nbytes)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of the arena's memory at `offset`; the caller must keep it allocated."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel, offset=offset)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this rank's heap; its block is freed when no tensor refers to it."""
        numel = int(np.prod(shape, dtype=np.int64))
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        offset = self.heap.allocate(nbytes)
        view = self._bytes[offset : offset + nbytes]
        weakref.finalize(view, self.heap.free, offset, nbytes).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """A contiguous tensor's offset in the arena, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self._length and tensor.is_contiguous() else None

    def borrowed(self, leaves: Sequence[Any]) -> list[int]:
        """The indexes of leaves that are tensors for which `is_borrowed`."""
        length, own, views = self._length, self.address, self.views.address
        try:
            # All addresses in one go: mostly no leaf is borrowed, and asking each by itself is slow for many leaves.
            addresses = list(map(torch.Tensor.data_ptr, leaves))
        except (RuntimeError, TypeError):  # some have no memory, or are no tensors
            return [
                index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and self.is_borrowed(leaf)
            ]
        return [index for index, at in enumerate(addresses) if own <= at < own + length or views <= at < views + length]

    def is_borrowed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor reads memory that other ranks share or reuse, and must be copied to outlive the region."""
        if tensor.layout is not torch.strided:  # it has no storage
            return False
        return 0 <= tensor.data_ptr() - self.address < self._length or self.views.offset_of(tensor) is not None


class StandingArena(Arena):
    """An `Arena` for ranks that run outside of regions: they are together from `begin` to `end`, or to a process's end.

    Nobody tells them that a rank died: a rank that waits for another one checks whether its process still exists.
    Invariant: an operation does not fail because of a rank that had done its part in it before it ended or died.
    """

    def begin(self) -> None:
        """Call this when all ranks have mapped the arena."""
        self.watch_processes()
        self.enter(1)

    def end(self) -> None:
        """Call this when this rank takes part in nothing any more."""
        self.leave()
        super().close()

    def check_peers(self) -> None:
        """Do nothing: a rank's death concerns only ranks that wait for it; see `lost`."""

    def has_left(self, rank: int) -> bool:
        return super().has_left(rank) or self.lost(rank) is not None

    def lost(self, rank: int) -> PeerLost | None:
        return self._if_dead(rank)


def _give_back(shared: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give pages back to the system."""
    shared.madvise(mmap.MADV_REMOVE, offset, nbytes)
