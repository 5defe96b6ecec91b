"""Who owns a block of shared memory, at each moment of a region.

A block is allocated from the heap of the rank whose part of the arena it lies in, and goes back there. In between:

    free ── comm.empty ──> owned: a tensor's ──────────────── the tensor is dropped ──> free
      │
      ├── comm.scratch ──> scratch: a rank's, to fill ── consumed by an all-reduction ─┬> result (the first rank's)
      │                                                                                └> staged (the others')
      ├── staging ───────> staged: read by the other ranks ── all have read the operation ──> free
      │
      └── result_block ──> result: written by all ranks, a slice each
                             │ each rank takes a view
                             v
                           viewed: read by all, by each through a copy-on-write view
                             │                          │
                             │ the last view is dropped │ a view leaves the region:
                             v                          │   of a small part of a block: copied, and dropped
                           free                         │   of most of it: stays the value's memory until it is dropped
                                                        v
                             donated by its caller: copied, never written in place, since other ranks read it

When a region has failed and all ranks have left it, blocks that were staged, scratch or being written are free again. A
view that was taken keeps its block until it is dropped, whatever happens.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from ..errors import MeshError
from ..processes import Owned
from .heap import Heap
from .pages import MAP_NORESERVE, PAGE, any_copied

KEPT_FREE_BYTES = 256 << 20  # so much memory of free result blocks is kept for any length of time


class Result(NamedTuple):
    """A result block: its offset in the arena, and the index of its first release word."""

    block: int
    release: int


class Extent(NamedTuple):
    """The memory of a tensor's storage: offset, bytes, and for a view this rank's release word, else 0."""

    offset: int
    nbytes: int
    release: int


def head_bytes(users: int) -> int:
    """Bytes of the counters at the start of a block: per user, how many views it dropped and took, and which it is."""
    return -(-24 * users // PAGE) * PAGE


class Register:
    """A list, in the arena, of the blocks with counters in one participant's heap; so it outlives that process.

    Args:
        start: the register's offset in the arena.
    """

    NBYTES = 1 << 21
    _MOST = (NBYTES // 8 - 1) // 3

    def __init__(self, words: memoryview, start: int):
        self._words, self._start = words, start // 8

    def add(self, block: int, nbytes: int, members: Sequence[int]) -> None:
        """Add a block, and set its counters to 0."""
        words, count, users = self._words, self._words[self._start], len(members)
        if count >= self._MOST:
            raise MeshError("too many results of reductions are kept", remedy="keep copies: tensor.clone()")
        first = block // 8
        for user, member in enumerate(members):
            words[first + user] = words[first + users + user] = 0
            words[first + 2 * users + user] = member
        at = self._start + 1 + 3 * count
        words[at], words[at + 1], words[at + 2] = block, nbytes, users
        words[self._start] = count + 1

    def __iter__(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Each block, its bytes, and the participants that use it."""
        for index in range(self._words[self._start]):
            at = self._start + 1 + 3 * index
            block, nbytes, users = self._words[at : at + 3].tolist()
            first = block // 8 + 2 * users
            yield block, nbytes, tuple(self._words[first : first + users].tolist())


class Generations(Protocol):
    """An object that knows the current generation."""

    generation: int


class ResultBlocks:
    """Result blocks of one rank's heap, each reused once every rank has dropped its views.

    A block starts with two counters per user: how many views it has dropped, and how many it took. The block is free
    when every user has dropped as many views as were due to it. When a region fails, some of these are never taken; so
    from the next generation on, the views that were taken count instead.

    Args:
        remove: gives the memory of (offset, bytes) back to the system.
    """

    def __init__(
        self,
        words: memoryview,
        heap: Heap,
        current: Generations,
        register: Register,
        remove: Callable[[int, int], None],
    ):
        self._words, self._heap, self._current, self._register = words, heap, current, register
        self._remove = remove
        self._lately: set[int] = set()  # blocks taken since the last `trim`
        self._emptied: set[int] = set()  # free blocks without memory
        self._blocks: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # by size class and users
        self._sizes: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # the same lists by exact size
        self._due: dict[int, tuple[int, list[int]]] = {}  # block -> generation, views due to each user

    def take(self, nbytes: int, members: tuple[int, ...]) -> Result:
        """A free block, of which each member (a participant of the arena) is due a view; called by their first."""
        users = len(members)
        head = head_bytes(users)
        blocks = self._sizes.get((nbytes, members))
        if blocks is None:
            if len(self._sizes) >= 4096:
                self._sizes.clear()
            key = Heap.rounded(nbytes + head), members
            blocks = self._sizes[nbytes, members] = self._blocks.setdefault(key, [])
        for index, block in enumerate(blocks):
            if self._is_free(block, users):
                blocks.append(blocks.pop(index))
                break
        else:
            block = self._heap.allocate(nbytes + head)
            self._register.add(block, nbytes + head, members)
            self._due[block] = (self._current.generation, [0] * users)
            blocks.append(block)
        self._lately.add(block)
        self._emptied.discard(block)
        due = self._due[block][1]
        for user in range(users):
            due[user] += 1
        return Result(block + head, block // 8)

    def trim(self) -> None:
        """Give back memory of free blocks that nobody has taken since the last call, but for `KEPT_FREE_BYTES`."""
        idle = [
            (block + head, size - head, block)
            for (size, members), blocks in self._blocks.items()
            for head in (head_bytes(len(members)),)
            for block in blocks
            if block not in self._lately and block not in self._emptied and self._is_free(block, len(members))
        ]
        surplus = sum(nbytes for _, nbytes, _ in idle) - KEPT_FREE_BYTES
        for offset, nbytes, block in idle:
            if surplus <= 0:
                break
            self._remove(offset, nbytes)
            self._emptied.add(block)
            surplus -= nbytes
        self._lately.clear()

    def adopt(self, heap: Heap) -> None:
        """Take over the blocks of the process that this one replaces; new blocks come from `heap`."""
        self._heap = heap
        for block, nbytes, members in self._register:
            self._blocks.setdefault((Heap.rounded(nbytes), members), []).append(block)
            self._due[block] = (-1, [0] * len(members))

    def _is_free(self, block: int, users: int) -> bool:
        generation, due = self._due[block]
        word, words = block // 8, self._words
        if generation != self._current.generation:
            due[:] = words[word + users : word + 2 * users].tolist()
            self._due[block] = (self._current.generation, due)
        for user in range(users):  # noqa: SIM110 (a generator expression costs three times as much)
            if words[word + user] != due[user]:
                return False
        return True


class Views(Owned):
    """This rank's views of result blocks: reference-counted, and copied page by page when they are written to."""

    def __init__(self, fd: int, length: int, words: memoryview):
        super().__init__()
        self._private = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        self.address = torch.frombuffer(memoryview(self._private)[:PAGE], dtype=torch.uint8).data_ptr()
        self._length, self._words = length, words
        self._taken: dict[int, tuple[weakref.ref, int, int, int]] = {}  # kept alive; offset, bytes, word
        self._extents: dict[int, Extent] = {}  # of the views last taken, by their offset

    def take(self, result: Result, numel: int, dtype: torch.dtype, *, user: int, users: int) -> torch.Tensor:
        """A copy-on-write view of a result block; dropping the last reference to it counts it as dropped."""
        return torch.frombuffer(self.show(result, numel * dtype.itemsize, user=user, users=users), dtype=dtype)

    def show(self, result: Result, nbytes: int, *, user: int, users: int) -> memoryview:
        """`take`, as bytes."""
        block, release = result
        self._words[release + user + users] += 1
        return self._shown(block, nbytes, release + user)

    def take_again(self, extent: Extent) -> torch.Tensor:
        """The bytes of a view that the process before this one had taken, which the counters already count."""
        return torch.frombuffer(self._shown(*extent), dtype=torch.uint8)

    def _shown(self, block: int, nbytes: int, word: int) -> memoryview:
        view = memoryview(self._private)[block : block + nbytes]
        # A plain weak reference: weakref.finalize would cost as much as a small reduction.
        reference = weakref.ref(view, self._dropped)
        self._taken[id(reference)] = (reference, block, nbytes, word)
        self._extents[block] = Extent(block, nbytes, word)
        return view

    def extent_of(self, address: int, *, written: bool = False) -> Extent | None:
        """The view that begins at an address and shows the shared bytes; None if this rank has written to it.

        Args:
            written: give a view that it has written to as well; the shared bytes are at the same place.
        """
        extent = self._extents.get(address - self.address)
        return None if extent is None or (not written and any_copied(address, extent.nbytes)) else extent

    def _dropped(self, reference: weakref.ref) -> None:
        _, offset, nbytes, release_word = self._taken.pop(id(reference))
        if self.foreign:  # the rank that this process was forked from still has its view
            return
        self.forget_copies(offset, nbytes)
        self._words[release_word] += 1

    def forget_copies(self, offset: int, nbytes: int) -> None:
        """Drop this rank's copies of pages, so that a view that it has changed shows the shared bytes again."""
        if any_copied(self.address + offset, nbytes):
            self._private.madvise(mmap.MADV_DONTNEED, offset, -(-nbytes // PAGE) * PAGE)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """A view's offset in the arena, or None if the tensor is not a view."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self._length else None


class Staging:
    """The memory of one communicator for operations under way: scratch, and bytes staged for peers."""

    def __init__(self, heap: Heap, results: ResultBlocks, *, leads: bool, members: tuple[int, ...]):
        self._heap, self._results, self._leads, self._members = heap, results, leads, members
        self._scratch: dict[int, int] = {}  # offset -> on the first rank its release word, on the others its size
        self.staged: deque[tuple[int, int, int]] = deque()  # operation, offset, bytes

    def scratch(self, nbytes: int) -> int:
        """Memory that a later reduction consumes; on the first rank, the result takes its place."""
        if self._leads:
            block, release = self._results.take(nbytes, self._members)
            self._scratch[block] = release
        else:
            block = self._heap.allocate(nbytes)
            self._scratch[block] = nbytes
        return block

    def consume(self, sequence: int, offset: int | None, nbytes: int) -> Result | None:
        """Consume the scratch at `offset`, if there is one; on the first rank, returns the block for the result."""
        known = None if offset is None else self._scratch.pop(offset, None)
        if self._leads:
            return (
                self._results.take(nbytes, self._members) if known is None or offset is None else Result(offset, known)
            )
        if known is not None and offset is not None:
            self.staged.append((sequence, offset, known))
        return None

    def stage(self, sequence: int, nbytes: int) -> int:
        """Memory for what peers read in an operation."""
        offset = self._heap.allocate(nbytes)
        self.staged.append((sequence, offset, nbytes))
        return offset

    def free_through(self, sequence: int) -> None:
        """Free what was staged up to an operation, which all ranks have read."""
        while self.staged and self.staged[0][0] <= sequence:
            _, offset, nbytes = self.staged.popleft()
            self._heap.free(offset, nbytes)

    def free_all(self) -> None:
        """Free everything, after a failure: all ranks have left. (The first rank's scratch is free without views.)"""
        for _, offset, nbytes in self.staged:
            self._heap.free(offset, nbytes)
        for offset, nbytes in () if self._leads else self._scratch.items():
            self._heap.free(offset, nbytes)
        self.staged.clear()
        self._scratch.clear()
