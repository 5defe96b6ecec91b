"""The shared-memory communicator: ranks of one host, talking through the arena.

Each rank has a line of words: how far it has posted, reduced and read (`POSTED`, `REDUCED`, `READ`, all counting
operations of this communicator), and for each of the last few operations a slot with its signature, where its
data lies, and for the first rank where the result goes, which it may announce (`ANNOUNCED`) before it has posted.
A rank writes its slot, then `POSTED`; it uses a slot again only when every peer has read past its last use.
Source: DESIGN of this library, section 7.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import shared_result
from .arena import Arena, word_key
from .communicator import ONE_PHASE_BYTES, WAITING, Call, Communicator, Ready, Steps, Work
from .errors import CollectiveMismatch
from .prepared import SPINS, Key, Reduction, prepare
from .reduction import reduce_in_order
from .waiting import wait_until

_SLOTS = 16
_INLINE = ONE_PHASE_BYTES  # bytes of staging that each slot brings along
_PREPARED = 256  # kinds of reductions kept ready
_RING = 32  # messages under way from one rank to another

# words of a rank's line
_POSTED, _REDUCED, _READ, _ANNOUNCED, _LINE = 0, 1, 2, 3, 8
# words of a slot
_SIGNATURE, _OFFSET, _STAGING, _RESULT, _RELEASE, _TABLE = 0, 1, 2, 3, 4, 5
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
        crowded = arena.crowded() if crowded is None else crowded
        super().__init__(ranks, rank, arena, timeout=timeout, crowded=crowded)
        self.arena, self.channel = arena, channel
        self.words = arena.words
        self._slot_words = _TABLE + 2 * self.size
        self._owned: list[tuple[int, int]] = []  # (offset, bytes) of the blocks behind this communicator
        self._retired: deque[tuple[int, int, int]] = deque()  # (operation, offset, bytes) staged for peers to read
        self._unread: deque[tuple[int, int]] = deque()  # (block, bytes) of messages not yet received
        # Where a `scratch` lies -> its release word on the first rank, its size elsewhere.
        self._scratch: dict[int, int] = {}
        self._open()

    # -- where things lie ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find this group's block, which its first rank allocates; again after every recovery."""
        arena, leader = self.arena, self.ranks[0]
        # All ranks have left the region that failed: nobody reads what was there.
        blocks = (*self._owned, *(staged[1:] for staged in self._retired), *self._unread, *self._scratch.items())
        for offset, nbytes in blocks if self.rank else blocks[: len(blocks) - len(self._scratch)]:
            arena.heap.free(offset, nbytes)
        for old in (self._owned, self._retired, self._unread, self._scratch):
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
                crowded=self.crowded,
                overdue=lambda: self.mismatch("opens a communicator", {0: "never opened it"}),
                late=late,
            )
            block = found[0]
        self._block = block
        self._lines = [block // 8 + rank * line_words for rank in range(self.size)]
        self._line = self._lines[self.rank]
        self._sequence = 0
        self._free_through = _SLOTS  # operations whose slots are known to be free
        self._rings: dict[tuple[int, int], int] = {}
        self._sent: dict[int, int] = {}
        self._arrived: list[tuple[int, int, int, int]] = []  # (source, tag, block, bytes) not yet asked for
        self._prepared: dict[Key, Reduction] = {}
        self._seen: set[Key] = set()
        self._gathered: set[int] = set()  # blocks that this group has written its slices to
        self.reductions: dict[tuple[int, torch.dtype], shared_result.Plan] = {}

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

    def scratch(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes <= ONE_PHASE_BYTES:
            return torch.empty(numel, dtype=dtype)
        if self.rank == 0:
            block, release = self.arena.result_block(nbytes, self.size)
            self._scratch[block] = release
        else:
            block = self.arena.heap.allocate(nbytes)
            self._scratch[block] = nbytes
        return self.arena.tensor(block, numel, dtype)

    def spend(self, sequence: int, resident: int | None, nbytes: int) -> tuple[int, int]:
        """Take what an operation needs of a `scratch` that lies at `resident`, if one does.

        On the first rank: (where the result goes, its release word). Elsewhere the memory is free once all have read.
        """
        known = None if resident is None else self._scratch.pop(resident, None)
        if self.rank == 0:
            return self.arena.result_block(nbytes, self.size) if known is None else (resident or 0, known)
        if known is not None and resident is not None:
            self._retired.append((sequence, resident, known))
        return 0, 0

    def staging(self, sequence: int, nbytes: int) -> int:
        """Memory of this rank's for an operation, free once all have read."""
        offset = self.arena.heap.allocate(nbytes)
        self._retired.append((sequence, offset, nbytes))
        return offset

    # -- posting and waiting -------------------------------------------------------------------------------------------

    def _all_past(self, word: int, sequence: int) -> bool:
        words = self.words
        for line in self._lines:  # noqa: SIM110 (a generator expression costs three times as much)
            if words[line + word] < sequence:
                return False
        return True

    def begin(self, what: str = "a collective") -> int:
        """The next operation's number, once its slot is free."""
        self._sequence = sequence = self._sequence + 1
        if sequence <= self._free_through and not self._retired:
            return sequence

        def free() -> bool:
            self._free_through = _SLOTS + min(self.words[line + _READ] for line in self._lines)
            return sequence <= self._free_through

        if not free():

            def progressed() -> bool:
                self._progress_all()
                return free()

            def first() -> Work:
                return self._queue[0] if self._queue else Work(self, what, _waiting(progressed), range(self.size))

            wait_until(
                progressed,
                self.arena,
                timeout=self.timeout,
                crowded=self.crowded,
                overdue=lambda: self._overdue(first()),
                late=lambda: self._late(first()),
            )
        self.reclaim()
        return sequence

    def reclaim(self) -> None:
        while self._retired and self._all_past(_READ, self._retired[0][0]):
            _, offset, nbytes = self._retired.popleft()
            self.arena.heap.free(offset, nbytes)

    def post(self, sequence: int, call: Call | None, offset: int, staging: int = 0) -> None:
        slot, words = self._slot(self.rank, sequence), self.words
        words[slot + _SIGNATURE] = call.signature if call is not None else 0
        words[slot + _OFFSET] = offset
        words[slot + _STAGING] = staging
        words[self._line + _POSTED] = sequence

    def announce(self, sequence: int, call: Call, block: int, release: int) -> None:
        """The first rank: say where the result goes, before it posts."""
        slot, words = self._slot(self.rank, sequence), self.words
        words[slot + _SIGNATURE] = call.signature
        words[slot + _RESULT], words[slot + _RELEASE] = block, release
        words[self._line + _ANNOUNCED] = sequence

    def announced(self, sequence: int, call: Call) -> Ready:
        """A condition: the first rank has said where the result goes; raises if it makes another call."""
        words, leader, slot = self.words, self._lines[0], self._slot(0, sequence)

        def ready() -> bool:
            # A call of another kind is posted without an announcement.
            if words[leader + _ANNOUNCED] < sequence and words[leader + _POSTED] < sequence:
                return False
            if words[slot + _SIGNATURE] != call.signature:
                self.post(sequence, call, 0)
                raise self.disagreement(sequence, call)
            return True

        return ready

    def announced_block(self, sequence: int) -> tuple[int, int]:
        """(where the result goes, index of its first release word)."""
        slot = self._slot(0, sequence)
        return self.words[slot + _RESULT], self.words[slot + _RELEASE]

    def posted_places(self, sequence: int) -> tuple[int, ...]:
        """For every rank where its tensor lies, or 0, and where the slices lie that it has copied for others, or 0."""
        words, at = self.words, _LINE + (sequence % _SLOTS) * self._slot_words
        places: list[int] = []
        for line in self._lines:
            places += (words[line + at + _OFFSET], words[line + at + _STAGING])
        return tuple(places)

    def reduced(self, sequence: int) -> None:
        self.words[self._line + _REDUCED] = sequence

    def all_reduced_by(self, sequence: int) -> Ready:
        """A condition: every rank has written its slice of the result."""
        return lambda: self._all_past(_REDUCED, sequence)

    def over(self, sequence: int) -> None:
        self.words[self._line + _READ] = sequence

    def all_over(self, sequence: int) -> Ready:
        """A condition: no rank reads another's memory for this operation any more."""
        return lambda: self._all_past(_READ, sequence)

    def posted(self, sequence: int, call: Call | None) -> Ready:
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

    def await_ready(self, ready: Ready, call: Call) -> None:
        """Wait for a condition, in a call that does not go through the queue."""
        if not self.crowded:
            for _ in range(SPINS):
                if ready():
                    return
        work = Work(self, call.text, _waiting(ready), range(self.size))
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
            offset = self.staging(sequence, total)
        placed: dict[int, int] = {}
        for key, piece in pieces.items():
            self.arena.tensor(offset, piece.numel(), torch.uint8).copy_(piece)
            placed[key] = offset
            offset += piece.numel() + 63 & ~63
        for rank, sent in enumerate(sends):
            words[slot + _TABLE + 2 * rank] = 0 if sent is None else placed[id(sent)]
            words[slot + _TABLE + 2 * rank + 1] = 0 if sent is None else sent.numel()
        self.post(sequence, call, 0)
        yield self.posted(sequence, call)
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
        reduction = None if async_op else self._reduction(tensor, op)
        if reduction is not None:
            return reduction(tensor)
        return super().all_reduced(tensor, op, async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        reduction = None if async_op else self._reduction(tensor, op)
        if reduction is None:
            return super().all_reduce(tensor, op, async_op=async_op)
        tensor = tensor.detach()
        result = reduction(tensor, in_place=True)
        if result is not None:
            tensor.copy_(result)
        return None

    def _reduction(self, tensor: torch.Tensor, op: str) -> Reduction | None:
        """The prepared reduction for a blocking call, if there is one; from the second call of its kind on."""
        if self._queue or self._generation != self.arena.generation or self._debug:
            return None
        key = tensor.shape, tensor.dtype, op
        reduction = self._prepared.get(key)
        if reduction is None:
            self._prepare(key, tensor, op)
        return reduction

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

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str, *, in_place: bool = False) -> Steps:
        arena, words, numel, dtype = self.arena, self.words, flat.numel(), flat.dtype
        if numel * dtype.itemsize > ONE_PHASE_BYTES:
            return (yield from shared_result.all_reduce(self, call, flat, op, in_place=in_place))
        sequence = self.begin()
        offset = self.stage(sequence, self.rank)
        if numel:
            arena.tensor(offset, numel, dtype).copy_(flat)
        self.post(sequence, call, offset)
        yield self.posted(sequence, call)
        parts = [arena.tensor(words[self._slot(r, sequence) + _OFFSET], numel, dtype) for r in range(self.size)]
        result = reduce_in_order(parts, op, torch.empty_like(flat))
        self.reduced(sequence)
        self.over(sequence)
        return result

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        if length * dtype.itemsize <= ONE_PHASE_BYTES:
            return super().all_gathered(length, dtype, write, into)
        call = Call("all_gather", dtype, (length,), "written in place" if into is None else "rewritten in place")
        steps = (
            self._all_gathered(call, length, dtype, write)
            if into is None
            else self._rewritten(call, length, write, into)
        )
        return self._start(call.text, steps, False)

    def _place_of(self, result: torch.Tensor | None) -> int:
        if result is None:
            return -1
        place = self.arena.lease_offset(result)
        # What another group has leased, its ranks may still read.
        return 0 if place is None else place if place in self._gathered else -1

    def _rewritten(self, call: Call, length: int, write: Callable[[torch.Tensor], None], into: torch.Tensor) -> Steps:
        place = self.arena.lease_offset(into)
        assert place is not None
        nbytes = length * into.dtype.itemsize
        sequence = self.begin()
        self.post(sequence, call, 0)
        yield self.posted(sequence, call)  # all are done with the old values
        write(self.arena.tensor(place + self.rank * nbytes, length, into.dtype))
        self.reduced(sequence)
        yield self.all_reduced_by(sequence)
        self.arena.forget_copies(place, self.size * nbytes)
        self.over(sequence)
        return into

    def _all_gathered(
        self, call: Call, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None]
    ) -> Steps:
        arena, nbytes = self.arena, length * dtype.itemsize
        sequence = self.begin()
        if self.rank == 0:
            self.announce(sequence, call, *arena.result_block(self.size * nbytes, self.size))
        self.post(sequence, call, 0)
        yield self.posted(sequence, call)
        block, release = self.announced_block(sequence)
        self._gathered.add(block)
        write(arena.tensor(block + self.rank * nbytes, length, dtype))
        result = arena.lease(block, self.size * length, dtype, release + self.rank, self.size)
        self.reduced(sequence)
        yield self.all_reduced_by(sequence)
        self.over(sequence)
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
