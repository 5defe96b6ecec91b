"""The shared-memory communicator: ranks of one host, talking through the arena.

Ranks publish their operations in slots (`slots`), messages go through rings (`rings`), and `all_reduce` does
reductions. This file opens these for a group, and makes the other collectives from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import check_tensor, checked_kind
from ..call import Call, check_pieces, disagreement, labels, shut_down, word_key
from ..collectives import ONE_PHASE_BYTES
from ..communicator import Communicator
from ..copying import copy, copy_bytes
from ..flat import as_bytes, contiguous, copy_back, overlap, sizes, spans, without_own, writable
from ..operations import Steps, Work
from ..reduction import Op, reduce_in_order
from ..waiting import turn, wait_until
from .all_reduce import AllReduce
from .arena import Arena
from .native import NativeSum, all_reduction
from .products import Given, sum_of_products
from .rings import Rings
from .slots import Slots, block_bytes

_KINDS = 256  # how many kinds of reductions are cached
_ALIGN = 64

Pieces = Sequence[torch.Tensor | None]  # flat bytes for, or from, each rank
Own = tuple[torch.Tensor, torch.Tensor]  # target, source


class ShmCommunicator(Communicator):
    """A group of ranks on one host; see `Communicator`."""

    backend = "shm"
    stamped = True

    def __init__(self, arena: Arena, ranks: Sequence[int], *, timeout: float, channel: str = "main"):
        rank = list(ranks).index(arena.mesh_rank)
        super().__init__(ranks, rank, arena, timeout=timeout, oversubscribed=arena.oversubscribed())
        self.arena, self.channel, self.sleep = arena, channel, arena.bells.sleep
        self._participants = tuple(arena.participant(member) for member in ranks)
        self._block: int | None = None  # on the first rank, the group's block
        self._closed = 0  # how far closing has got on this rank: see `Slots.close`
        self._meet()

    def _open(self) -> None:
        # All ranks have left the failed region, so nobody reads this memory any more.
        self._slots.staging.free_all()
        self._rings.free_all()
        if self._block is not None:
            self.arena.heap.free(self._block, block_bytes(self.size)[1])
        self._meet()

    def _meet(self) -> None:
        """Find this group's block, which its first rank allocates."""
        arena = self.arena
        arena.sweep()
        self._key = word_key("comm", arena.generation, self.ranks, self.channel)
        progress = self._progress = arena.opened(self._key, self.ranks)
        lines, whole = block_bytes(self.size)
        if self.rank == 0:
            block = self._block = arena.heap.allocate(whole)
            arena.tensor(block, lines, torch.uint8).zero_()
            arena.directory.publish(self._key, block)
        else:
            block = self._first_ranks_block()
        how: Any = {"operations": self._operations, "site": self.site, "spin": not self.oversubscribed}
        slots = self._slots = Slots(arena, self.ranks, self.rank, block, self._key, **how)
        self.may_begin = lambda: slots.is_free(slots.begun[0] + 1)
        self._rings = Rings(arena, self.ranks, self.rank, self._key)
        if progress is not None:
            progress.open(self._operations.queue, self._slots.begun)
        self._kinds: dict[tuple, AllReduce] = {}
        self._last: NativeSum | None = None  # the last small sum: most often the next one is of the same kind
        self._gathered: set[int] = set()  # blocks with results of this group's `all_gathered`

    def _first_ranks_block(self) -> int:
        found: list[int] = []

        def opened() -> bool:
            self._operations.progress_all()
            block = self.arena.directory.lookup(self._participants[0], self._key)
            found.extend([] if block is None else [block])
            return bool(found)

        def on_stall() -> None:
            if self._has_left(0) and not opened():
                raise self._absence([0], "a collective")
            what = f"the first operation of group {self.ranks}"
            self.arena.check_all_wait(what, Work.steps_taken)
            if self._progress is not None:
                self._progress.check_wait(what, [0])

        wait_until(
            opened,
            self.arena,
            timeout=self.timeout,
            oversubscribed=self.oversubscribed,
            on_timeout=lambda: disagreement(self.ranks, {self.rank: "opens a communicator", 0: "never opened it"}),
            on_stall=on_stall,
        )
        self.on_waited()
        return found[0]

    # -- memory --------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.empty(*checked_kind("empty", shape, dtype))

    def scratch(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes <= self._slots.small_bytes:
            return torch.empty(numel, dtype=dtype, device="cpu")
        return self.arena.tensor(self._slots.staging.scratch(nbytes), numel, dtype)

    def reclaim(self) -> None:
        with turn:
            self._slots.reclaim()

    def close(self) -> None:
        """Stop using the group; its memory in the arena is freed when all ranks have closed it."""
        with turn:
            if self._closed or self.arena.heap.foreign:
                return
            self._closed = 1
            self._operations.drop("its group was shut down on this rank", "make a new group")
            self._slots.close(1)
            self.arena.closing.append(self._given_back)
            self.arena.sweep()

    def _given_back(self) -> bool:
        """Free the memory that no other rank reads any more; returns whether that is everything."""
        stale = self.stale  # after a failed region, nobody reads what was before it
        if self._closed == 1 and (stale or self._all_closed(1)):
            self._slots.staging.free_all()
            self._rings.free_all()
            self._closed = 2
            self._slots.close(2)  # from now on the first rank may free the lines
        if self._closed < 2 or self._block is None:
            return self._closed == 2
        if not (stale or self._all_closed(2)):
            return False
        self.arena.directory.forget(self._key)
        self.arena.heap.free(self._block, block_bytes(self.size)[1])
        return True

    def _all_closed(self, stage: int) -> bool:
        return all(
            self._slots.closed(rank) >= stage or self.arena.lost(participant) is not None
            for rank, participant in enumerate(self._participants)
        )

    # -- what ends a wait ----------------------------------------------------------------------------------------------

    def on_stall(self, work: Work) -> None:
        self.poll_messages()  # so that no sender waits for room in a ring while this rank waits for something else
        gone = [rank for rank in work.peers if self._slots.closed(rank) and not self._took_part(rank, work)]
        if self._closed or (gone and (len(gone) == len(work.peers) or not self._is_message(work))):
            raise shut_down(self.ranks, self.rank, self.rank if self._closed else gone[0], work.what)
        super().on_stall(work)
        if not work.is_bounded:
            self.arena.check_all_wait(work.what, Work.steps_taken)

    def on_waited(self) -> None:
        super().on_waited()
        self.arena.stalls.end()

    def _took_part(self, rank: int, work: Work) -> bool:
        if self._is_message(work):
            self._operations.progress_messages()  # what the peer sent before it left has arrived by now
            return work.done
        # The awaited operation is the first in the queue, or a blocking call that is not in the queue.
        begun = sum(each.begun for each in self._operations.queue) if self._operations.queue else 1
        first = self._slots.begun[0] - begun + 1
        return self._slots.took_part(rank, first)

    def on_timeout(self, work: Work, seconds: float) -> BaseException:
        error = super().on_timeout(work, seconds)
        lines = []
        for rank, member in enumerate(self.ranks):
            if rank != self.rank:
                doing = self.arena.status(self._participants[rank]) or "computing, not in a collective"
                lines.append(f"\n  rank {member}: {doing} ({self._slots.calls_of(rank)} calls so far)")
        return type(error)(f"{error.args[0]}{''.join(lines)}")

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _exchange(self, call: Call | None, sends: Pieces, recvs: Pieces) -> Steps:
        sends, recvs, own = without_own(sends, recvs, self.rank)
        sequence, entries = yield from self._staged(call, sends, recvs, own)
        for (at, nbytes), target in zip(entries, recvs, strict=True):
            if target is not None:
                copy(target, self.arena.tensor(at, nbytes, torch.uint8))
        self._slots.read(sequence)

    def _staged(self, call: Call | None, sends: Pieces, recvs: Pieces, own: Own | None = None) -> Steps:
        """Stage pieces for others to read; returns the operation, and (offset, bytes) of each rank's piece for us."""
        slots, arena = self._slots, self.arena
        sequence = slots.begin("a collective")
        pieces = {id(piece): piece for piece in sends if piece is not None}
        total = sum(-(-piece.numel() // _ALIGN) * _ALIGN for piece in pieces.values())
        offset = slots.reserve(sequence, total)
        lies: dict[int, int] = {}
        for key, piece in pieces.items():
            copy(arena.tensor(offset, piece.numel(), torch.uint8), piece)
            lies[key] = offset
            offset += -(-piece.numel() // _ALIGN) * _ALIGN
        slots.post_table(sequence, [(0, 0) if sent is None else (lies[id(sent)], sent.numel()) for sent in sends])
        slots.post(sequence, call)
        if own is not None and own[0].data_ptr() != own[1].data_ptr():
            copy_bytes(*own)  # while other ranks are still posting
        yield slots.posted(sequence, call)
        entries = [slots.entry(sequence, rank) for rank in range(self.size)]
        what = call.text if call else "a collective"
        check_pieces(self, what, [nbytes for _, nbytes in entries], sizes(recvs))
        return sequence, entries

    def _reduce_scatter(self, call: Call, output: torch.Tensor, ins: Sequence[torch.Tensor], op: Op) -> Steps:
        """Each rank adds the others' pieces right where these are staged."""
        mine = contiguous(ins[self.rank]).view(-1)
        sends = [as_bytes(contiguous(piece)) if rank != self.rank else None for rank, piece in enumerate(ins)]
        expected = [as_bytes(mine) if rank != self.rank else None for rank in range(self.size)]
        check_pieces(self, call.text, [mine.nbytes], [output.nbytes], first=self.rank)
        sequence, entries = yield from self._staged(call, sends, expected)
        parts = [
            mine if rank == self.rank else self.arena.tensor(at, mine.numel(), mine.dtype)
            for rank, (at, _) in enumerate(entries)
        ]
        # Write directly into the output, unless it shares memory with this rank's input.
        buffer = writable(output)
        if overlap(spans([output]), spans([ins[self.rank]])):
            buffer = torch.empty_like(buffer)
        reduce_in_order(parts, op, buffer.view(-1))
        self._slots.read(sequence)
        copy_back([output], [buffer])

    def all_reduced(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        # If nothing is under way, a blocking call skips the queue, which would cost more than a small reduction.
        operations = self._operations
        if async_op or self._debug or operations.queue or operations.generation != self.arena.generation:
            return super().all_reduced(tensor, op, async_op=async_op)
        with turn:
            last = self._last
            if last is not None and (source := last.address(tensor, op, labels.current)):
                return last.summed(tensor, source, in_place=False)
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
                check_tensor("all_reduced", "tensor", tensor)
            return self._kind(tensor, op)(tensor)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        operations = self._operations
        if async_op or self._debug or operations.queue or operations.generation != self.arena.generation:
            return super().all_reduce(tensor, op, async_op=async_op)
        with turn:
            last = self._last
            if last is not None and (source := last.address(tensor, op, labels.current)):
                return last.summed(tensor, source, in_place=True)
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
            if not plain or not tensor.is_contiguous():
                check_tensor("all_reduce", "tensor", tensor, written=True)
            result = self._kind(tensor, op)(tensor, in_place=True)
            if result is not None:
                tensor.detach().copy_(result)
            return None

    def _kind(self, tensor: torch.Tensor, op: Op) -> AllReduce:
        key = tensor.shape, tensor.dtype, op, labels.current
        kind = self._kinds.get(key) or self._keep(key, all_reduction(self._slots, tensor.shape, tensor.dtype, op))
        self._last = kind if isinstance(kind, NativeSum) else None
        return kind

    def _keep(self, key: tuple, kind: AllReduce) -> AllReduce:
        if len(self._kinds) >= _KINDS:
            self._kinds.clear()
        self._kinds[key] = kind
        return kind

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: Op, *, in_place: bool = False) -> Steps:
        key = call.signature, flat.numel(), flat.dtype, op
        kind = self._kinds.get(key) or self._keep(key, AllReduce(self._slots, call, flat.shape, flat.dtype, op))
        return kind.steps(flat, in_place=in_place)

    def sum_of_products(self, rows: int, columns: int, dtype: torch.dtype, given: Given, async_op: bool = False) -> Any:
        """The flat sum of matrices that ranks give as a `scratch` or as factors; a result like `all_reduced`'s."""
        return self._start("sum_of_products", sum_of_products(self._slots, rows, columns, dtype, given), async_op)

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        if length * dtype.itemsize <= ONE_PHASE_BYTES:
            return super().all_gathered(length, dtype, write, into)
        call = Call("all_gather", dtype, (length,), "written in place" if into is None else "rewritten in place")
        steps = self._all_gathered(call, length, dtype, write, into)
        return self._start(call.text, steps, False)

    def _rewritable_at(self, result: torch.Tensor | None) -> int:
        if result is None:
            return -1
        at = self.arena.views.offset_of(result)
        # A result of another group may still be read by ranks of that group.
        return 0 if at is None else at if at in self._gathered else -1

    def _all_gathered(
        self,
        call: Call,
        length: int,
        dtype: torch.dtype,
        write: Callable[[torch.Tensor], None],
        into: torch.Tensor | None = None,
    ) -> Steps:
        slots, arena, nbytes = self._slots, self.arena, length * dtype.itemsize
        sequence = slots.begin(call.text)
        if self.rank == 0 and into is None:
            slots.announce(sequence, call, arena.results.take(self.size * nbytes, self._participants))
        slots.post(sequence, call)
        yield slots.posted(sequence, call)  # now no rank reads the old values any more
        if into is None:
            made, numel = slots.result(sequence), self.size * length
            self._gathered.add(block := made.block)
            result = arena.views.take(made, numel, dtype, user=self.rank, users=self.size)
        else:
            at = arena.views.offset_of(into)
            assert at is not None
            block, result = at, into
        write(arena.tensor(block + self.rank * nbytes, length, dtype))
        slots.reduced(sequence)
        yield slots.all_reduced_by(sequence)
        if into is not None:
            arena.views.forget_copies(block, self.size * nbytes)
        slots.read(sequence)
        return result

    # -- point to point ------------------------------------------------------------------------------------------------

    def poll_messages(self) -> None:
        self._rings.poll()

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int = 0) -> Steps:
        return self._rings.send(tensor, dst, tag, stamp)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int = 0) -> Steps:
        return self._rings.recv(tensor, src, tag, stamp)
