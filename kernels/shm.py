"""The shared-memory communicator: ranks of one host, talking through the arena.

Each rank has a line of words: how far it has posted, reduced and read (`POSTED`, `REDUCED`, `READ`, all counting
operations of this communicator), and for each of the last few operations a slot with its signature, where its
data lies, and for the first rank where the result goes. A rank writes its slot, then `POSTED`; it uses a slot
again only when every peer has read past its last use. Source: DESIGN of this library, section 7.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arena import Arena, word_key
from .communicator import ONE_PHASE_BYTES, WAITING, Call, Communicator, Ready, Steps, Work
from .errors import CollectiveMismatch
from .prepared import SPINS, Key, Reduction, key_of, prepare
from .reduction import reduce_in_order, slice_bounds
from .waiting import wait_until

_SLOTS = 16
_INLINE = ONE_PHASE_BYTES  # bytes of staging that each slot brings along
_PREPARED = 256  # kinds of reductions kept ready
_RING = 32  # messages under way from one rank to another

# words of a rank's line
_POSTED, _REDUCED, _READ, _LINE = 0, 1, 2, 8
# words of a slot
_SIGNATURE, _OFFSET, _RESULT, _RELEASE, _TABLE = 0, 1, 2, 3, 4
# words of a message in a ring, of the ring's own head (one cache line a writer), bytes before a message's data
_TAG, _AT, _NBYTES, _MESSAGE = 0, 1, 2, 4
_SENT, _PULLED, _RING_HEAD = 0, 8, 16
_BLOCK_HEAD = 64
_WORD = (1 << 64) - 1


class ShmCommunicator(Communicator):
    """A group of ranks on one host; see `Communicator`."""

    backend = "shm"
    starts_early = True

    def __init__(
        self, arena: Arena, ranks: Sequence[int], *, timeout: float, channel: str = "main", crowded: bool | None = None
    ):
        rank = list(ranks).index(arena.rank)
        crowded = arena.size > len(os.sched_getaffinity(0)) if crowded is None else crowded
        super().__init__(ranks, rank, arena, timeout=timeout, crowded=crowded)
        self.arena, self.channel = arena, channel
        self.words = arena.words
        self._slot_words = _TABLE + 2 * self.size
        self._owned: list[tuple[int, int]] = []  # (offset, bytes) of the blocks behind this communicator
        self._retired: deque[tuple[int, int, int]] = deque()  # (operation, offset, bytes) staged for peers to read
        self._unread: deque[tuple[int, int]] = deque()  # (block, bytes) of messages not yet received
        self._open()

    # -- where things lie ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find this group's block, which its first rank allocates; again after every recovery."""
        arena, leader = self.arena, self.ranks[0]
        # All ranks have left the region that failed: nobody reads what was there.
        for offset, nbytes in (*self._owned, *(staged[1:] for staged in self._retired), *self._unread):
            arena.heap.free(offset, nbytes)
        for old in (self._owned, self._retired, self._unread):
            old.clear()
        self._key = word_key("comm", arena.generation, self.ranks, self.channel)
        line_words = _LINE + _SLOTS * self._slot_words
        self._stage_start = self.size * line_words * 8
        nbytes = self._stage_start + self.size * _SLOTS * _INLINE
        if self.rank == 0:
            block = arena.heap.allocate(nbytes)
            self._owned.append((block, nbytes))
            arena.tensor(block, self._stage_start, torch.uint8).zero_()
            arena.publish(self._key, block)
        else:
            found: list[int] = []

            def opened() -> bool:
                block = arena.lookup(leader, self._key)
                if block is not None:
                    found.append(block)
                return bool(found)

            def late() -> None:
                if self._has_left(0) and not opened():
                    raise self.absent(0, "a collective")

            wait_until(
                opened,
                arena,
                timeout=self.timeout,
                crowded=self._crowded,
                overdue=lambda: self.mismatch("opens a communicator", {0: "never opened it"}),
                late=late,
            )
            block = found[0]
        self._block = block
        self._lines = [block // 8 + rank * line_words for rank in range(self.size)]
        self._line = self._lines[self.rank]
        self._sequence = 0
        self._rings: dict[tuple[int, int], int] = {}
        self._sent: dict[int, int] = {}
        self._arrived: list[tuple[int, int, int, int]] = []  # (source, tag, block, bytes) not yet asked for
        self._prepared: dict[Key | None, Reduction] = {}
        self._seen: set[Key] = set()

    def _slot(self, rank: int, sequence: int) -> int:
        return self._lines[rank] + _LINE + (sequence % _SLOTS) * self._slot_words

    def stage(self, sequence: int, rank: int) -> int:
        """Where a rank puts what fits into its slot."""
        return self._block + self._stage_start + (rank * _SLOTS + sequence % _SLOTS) * _INLINE

    # For `prepared`: the words of a rank, and how many slots it has.

    slots = _SLOTS

    def word_posted(self, rank: int) -> int:
        return self._lines[rank] + _POSTED

    def word_reduced(self, rank: int) -> int:
        return self._lines[rank] + _REDUCED

    def word_read(self, rank: int) -> int:
        return self._lines[rank] + _READ

    def word_of_signature(self, rank: int, sequence: int) -> int:
        """The first word of a slot: its signature, followed by offset, result and release word."""
        return self._slot(rank, sequence) + _SIGNATURE

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return self.arena.empty(sizes, dtype or torch.get_default_dtype())

    # -- posting and waiting -------------------------------------------------------------------------------------------

    def _all_past(self, word: int, sequence: int) -> bool:
        words = self.words
        for line in self._lines:  # noqa: SIM110 (a generator expression costs three times as much)
            if words[line + word] < sequence:
                return False
        return True

    def begin(self, what: str = "a collective") -> int:
        """The next operation's number, once its slot is free."""
        self._sequence += 1
        sequence = self._sequence
        if sequence > _SLOTS and not self._all_past(_READ, sequence - _SLOTS):

            def free() -> bool:
                self._progress_all()
                return self._all_past(_READ, sequence - _SLOTS)

            def first() -> Work:
                return self._queue[0] if self._queue else Work(self, what, _waiting(free), range(self.size))

            wait_until(
                free,
                self.arena,
                timeout=self.timeout,
                crowded=self._crowded,
                overdue=lambda: self._overdue(first()),
                late=lambda: self._late(first()),
            )
        while self._retired and self._all_past(_READ, self._retired[0][0]):
            _, offset, nbytes = self._retired.popleft()
            self.arena.heap.free(offset, nbytes)
        return sequence

    def _post(self, sequence: int, call: Call | None, offset: int) -> None:
        slot = self._slot(self.rank, sequence)
        self.words[slot + _SIGNATURE] = call.signature if call is not None else 0
        self.words[slot + _OFFSET] = offset
        self.words[self._line + _POSTED] = sequence

    def _posted(self, sequence: int, call: Call | None) -> Ready:
        """A condition: every peer has posted this operation; raises if one has posted another."""
        words, signature = self.words, call.signature if call is not None else 0

        def ready() -> bool:
            complete = True
            for rank, line in enumerate(self._lines):
                if words[line + _POSTED] < sequence:
                    complete = False
                elif words[self._slot(rank, sequence)] != signature:
                    raise self.disagreement(sequence, call)
            return complete

        return ready

    def disagreement(self, sequence: int, call: Call | None) -> CollectiveMismatch:
        """Tell the others what this rank called, and wait a moment to learn what they did."""
        mine = f"{call.text if call else 'the second half of an operation'}, call {sequence}, at {self.site()}"
        self.arena.say(mine)
        end = time.monotonic() + 0.5
        others: dict[int, str] = {}
        while time.monotonic() < end and len(others) < self.size - 1:
            for rank, member in enumerate(self.ranks):
                said = self.arena.said(member)
                if rank != self.rank and said and not said.startswith(WAITING):  # left from an earlier wait
                    others[rank] = said
            time.sleep(1e-3)
        for rank in range(self.size):
            if rank != self.rank:
                others.setdefault(rank, f"is at call {self.words[self._lines[rank] + _POSTED]}, and did not say which")
        return self.mismatch(mine, others)

    def _late(self, work: Work) -> None:
        self._poll_messages()  # so that no sender waits for room while this rank waits for something else
        super()._late(work)

    def _took_part(self, rank: int, work: Work) -> bool:
        if work in self._messages:
            self._progress_messages()  # what it sent before it left is here by now
            return work.done
        first = self._sequence - len(self._queue) + 1  # the operation that is waited for
        # In the second half of a large reduction the others' sums are needed, before it only their posts.
        word = _REDUCED if self.words[self._line + _REDUCED] >= first else _POSTED
        return self.words[self._lines[rank] + word] >= first

    def _overdue(self, work: Work) -> BaseException:
        error = super()._overdue(work)
        lines = []
        for rank, member in enumerate(self.ranks):
            if rank != self.rank:
                doing = self.arena.said(member) or "computing, not in a collective"
                lines.append(f"\n  rank {member}: {doing} ({self.words[self._lines[rank] + _POSTED]} calls so far)")
        return type(error)(f"{error.args[0]}{''.join(lines)}")

    def await_word(self, word: int, value: int, call: Call) -> None:
        """Wait, in a call that does not go through the queue, until a peer's word has reached a value."""
        words = self.words
        if not self._crowded:
            for _ in range(SPINS):
                if words[word] >= value:
                    return
        work = Work(self, call.text, _waiting(lambda: words[word] >= value), range(self.size))
        self._queue.append(work)
        self.finish(work)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        sequence, words = self.begin(), self.words
        slot = self._slot(self.rank, sequence)
        pieces = {id(piece): piece for piece in sends if piece is not None}
        total = sum(piece.numel() + 63 & ~63 for piece in pieces.values())
        offset = self.stage(sequence, self.rank)
        if total > _INLINE:
            offset = self.arena.heap.allocate(total)
            self._retired.append((sequence, offset, total))
        placed: dict[int, int] = {}
        for key, piece in pieces.items():
            self.arena.tensor(offset, piece.numel(), torch.uint8).copy_(piece)
            placed[key] = offset
            offset += piece.numel() + 63 & ~63
        for rank, sent in enumerate(sends):
            words[slot + _TABLE + 2 * rank] = 0 if sent is None else placed[id(sent)]
            words[slot + _TABLE + 2 * rank + 1] = 0 if sent is None else sent.numel()
        self._post(sequence, call, 0)
        yield self._posted(sequence, call)
        for rank, target in enumerate(recvs):
            entry = self._slot(rank, sequence) + _TABLE + 2 * self.rank
            nbytes = words[entry + 1]
            expected = 0 if target is None else target.numel()
            if nbytes != expected:
                raise self.wrong_piece(call.text if call else "a collective", rank, nbytes, expected)
            if target is not None:
                target.copy_(self.arena.tensor(words[entry], nbytes, torch.uint8))
        words[self._line + _READ] = sequence

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not async_op and not self._debug and not self._queue and self._generation == self.arena.generation:
            key = key_of(self, tensor, op)
            reduction = self._prepared.get(key)
            if reduction is not None:
                return reduction(tensor.detach() if tensor.requires_grad else tensor)
            if key is not None:
                self._prepare(key, tensor, op)
        return super().all_reduced(tensor, op, async_op=async_op)

    def _prepare(self, key: Key, tensor: torch.Tensor, op: str) -> None:
        """Prepare a reduction that is made a second time; forget all when there are many."""
        if key in self._seen:
            if len(self._prepared) >= _PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepare(self, tensor, op)
            return
        if len(self._seen) >= 4 * _PREPARED:
            self._seen.clear()
        self._seen.add(key)

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str) -> Steps:
        arena, words, numel, dtype = self.arena, self.words, flat.numel(), flat.dtype
        nbytes = numel * dtype.itemsize
        sequence = self.begin()
        if nbytes <= ONE_PHASE_BYTES:
            offset = self.stage(sequence, self.rank)
            if nbytes:
                arena.tensor(offset, numel, dtype).copy_(flat)
            self._post(sequence, call, offset)
            yield self._posted(sequence, call)
            parts = [arena.tensor(words[self._slot(r, sequence) + _OFFSET], numel, dtype) for r in range(self.size)]
            result = reduce_in_order(parts, op, torch.empty_like(flat))
            words[self._line + _REDUCED] = sequence
            words[self._line + _READ] = sequence
            return result

        resident = arena.offset_of(flat)
        if resident is None:
            resident = arena.heap.allocate(nbytes)
            arena.tensor(resident, numel, dtype).copy_(flat)
            self._retired.append((sequence, resident, nbytes))
        if self.rank == 0:
            block, release = arena.result_block(nbytes, self.size)
            slot = self._slot(0, sequence)
            words[slot + _RESULT], words[slot + _RELEASE] = block, release
        self._post(sequence, call, resident)
        yield self._posted(sequence, call)
        first = self._slot(0, sequence)
        block, release = words[first + _RESULT], words[first + _RELEASE]
        bounds = slice_bounds(numel, self.size)
        start, end = bounds[self.rank], bounds[self.rank + 1]
        parts = [
            arena.tensor(words[self._slot(r, sequence) + _OFFSET] + start * dtype.itemsize, end - start, dtype)
            for r in range(self.size)
        ]
        reduce_in_order(parts, op, arena.tensor(block + start * dtype.itemsize, end - start, dtype))
        result = arena.lease(block, numel, dtype, release + self.rank, self.size)
        words[self._line + _REDUCED] = sequence
        yield lambda: self._all_past(_REDUCED, sequence)
        words[self._line + _READ] = sequence
        return result

    def all_gathered(self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None]) -> torch.Tensor:
        if length * dtype.itemsize <= ONE_PHASE_BYTES:
            return super().all_gathered(length, dtype, write)
        call = Call("all_gather", dtype, (length,), "written in place")
        return self._start(call.text, self._all_gathered(call, length, dtype, write), False)

    def _all_gathered(
        self, call: Call, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None]
    ) -> Steps:
        arena, words, nbytes = self.arena, self.words, length * dtype.itemsize
        sequence = self.begin()
        if self.rank == 0:
            slot = self._slot(0, sequence)
            words[slot + _RESULT], words[slot + _RELEASE] = arena.result_block(self.size * nbytes, self.size)
        self._post(sequence, call, 0)
        yield self._posted(sequence, call)
        first = self._slot(0, sequence)
        block, release = words[first + _RESULT], words[first + _RELEASE]
        write(arena.tensor(block + self.rank * nbytes, length, dtype))
        result = arena.lease(block, self.size * length, dtype, release + self.rank, self.size)
        words[self._line + _REDUCED] = sequence
        yield lambda: self._all_past(_REDUCED, sequence)
        words[self._line + _READ] = sequence
        return result

    # -- point to point ------------------------------------------------------------------------------------------------

    def _ring(self, src: int, dst: int) -> int | None:
        """First word of the ring of messages from `src` to `dst`, or None while the sender has not made it."""
        ring = self._rings.get((src, dst))
        if ring is None:
            key = word_key("ring", self._key, src, dst)
            found = self.arena.lookup(self.ranks[src], key)
            if found is None and src == self.rank:
                nbytes = (_RING_HEAD + _RING * _MESSAGE) * 8
                found = self.arena.heap.allocate(nbytes)
                self._owned.append((found, nbytes))
                self.arena.tensor(found, nbytes, torch.uint8).zero_()
                self.arena.publish(key, found)
            if found is None:
                return None
            ring = self._rings[src, dst] = found // 8
        return ring

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        """Copy the bytes into the arena and post where they lie; the receiver marks the block as taken."""
        words, nbytes = self.words, tensor.numel()
        ring = self._ring(self.rank, dst)
        assert ring is not None
        number = self._sent.get(dst, 0)  # messages to one destination keep their order
        self._sent[dst] = number + 1
        # A few in turn, as some may never be asked for; all of them before memory is taken for a large one.
        for _ in range(len(self._unread) if nbytes > _INLINE else min(2, len(self._unread))):
            taken, its_bytes = self._unread.popleft()
            if words[taken // 8]:
                self.arena.heap.free(taken, its_bytes)
            else:
                self._unread.append((taken, its_bytes))
        block = self.arena.heap.allocate(_BLOCK_HEAD + nbytes)
        words[block // 8] = 0
        self.arena.tensor(block + _BLOCK_HEAD, nbytes, torch.uint8).copy_(tensor)
        yield lambda: words[ring + _SENT] == number and number - words[ring + _PULLED] < _RING
        at = ring + _RING_HEAD + (number % _RING) * _MESSAGE
        words[at + _TAG], words[at + _AT], words[at + _NBYTES] = tag & _WORD, block, nbytes
        words[ring + _SENT] = number + 1
        self._unread.append((block, _BLOCK_HEAD + nbytes))

    def _poll_messages(self) -> None:
        """Note what has arrived, so that the senders' rings never fill up with messages nobody asks for yet."""
        words = self.words
        for src in range(self.size):
            ring = self._ring(src, self.rank)
            if ring is None:
                continue
            for number in range(words[ring + _PULLED], words[ring + _SENT]):
                at = ring + _RING_HEAD + (number % _RING) * _MESSAGE
                self._arrived.append((src, words[at + _TAG], words[at + _AT], words[at + _NBYTES]))
                words[ring + _PULLED] = number + 1

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        matched: list[tuple[int, int, int, int]] = []

        def arrived() -> bool:
            for index, (source, its_tag, _, _) in enumerate(self._arrived):
                if its_tag == tag & _WORD and src in (None, source):
                    matched.append(self._arrived.pop(index))
                    return True
            return False

        yield arrived
        source, _, block, nbytes = matched[0]
        if nbytes != tensor.numel():
            raise self.wrong_size(source, tag, nbytes, tensor.numel())
        tensor.copy_(self.arena.tensor(block + _BLOCK_HEAD, nbytes, torch.uint8))
        self.words[block // 8] = 1
        return source


def _waiting(ready: Ready) -> Steps:
    """An operation that consists of waiting."""
    yield ready
