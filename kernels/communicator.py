"""`Communicator`: the message-passing interface of a group of ranks, and the seam for new transports.

Every operation is a generator of *steps*: it yields a condition to wait for and goes on when that holds. So one
piece of code serves the blocking call, the asynchronous one and the wait that must notice aborts. A transport
implements `_exchange` (each rank gives one piece of bytes to each other) and point to point; all collectives
follow from these, in rank order, for every dtype. A faster transport overrides what it can do better.

Ranks (`src`, `dst`, list positions) count within the group, 0 to size-1.
"""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import torch

from . import debug
from .arena import Arena, word_key
from .attendance import Attendance
from .callsite import call_site
from .errors import CollectiveMismatch, PeerLost, SpecError, SpmdError, message
from .reduction import check_op, reduce_in_order, slice_bounds
from .waiting import PEER_CHECK_SECONDS, Watch, wait_until

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]

# Up to here a rank sends its whole contribution to all: one exchange instead of two.
ONE_PHASE_BYTES = 1 << 15


# How a rank's text on the board begins while it waits.
WAITING = "waiting in"

# Communicators of this process with operations under way.
_active: set[Communicator] = set()


class Work:
    """A started operation: `wait()` finishes it and gives its value, `is_completed()` asks without waiting."""

    __slots__ = ("_comm", "_error", "_ready", "_steps", "_value", "done", "peers", "site", "what")

    def __init__(self, comm: Communicator, what: str, steps: Steps, peers: Sequence[int], site: str = ""):
        self._comm, self.what, self._steps, self.peers, self.site = comm, what, steps, peers, site
        self._ready: Ready | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = False

    def is_completed(self) -> bool:
        self._comm.progress()
        if not self.done:
            self._comm.look(self)
        return self.done

    def wait(self) -> Any:
        self._comm.finish(self)
        if self._error is not None:
            raise self._error
        return self._value

    def start(self) -> None:
        """Take the first step, which tells the peers."""
        self._ready = None
        self._step()

    def advance(self) -> bool:
        """Go on as far as no waiting is needed; whether the operation is over."""
        if self._steps.gi_running:  # type: ignore[attr-defined]
            return False  # it is further up the stack, waiting for room
        while not self.done and (self._ready is None or self._ready()):
            self._step()
        return self.done

    def give_up(self, error: BaseException) -> None:
        """End with an error, for who waits for it."""
        self._error, self.done = error, True

    def _step(self) -> None:
        try:
            self._ready = next(self._steps)
        except StopIteration as end:
            self._value, self.done = end.value, True
        except BaseException as error:
            self._error, self.done = error, True
            raise


class Communicator(abc.ABC):
    """What `mesh.comm()` gives inside a rank.

    Args:
        ranks: the global ranks of the group, in group order.
        rank: this process's position in it.
        watch: where aborts and deaths are noticed.
        timeout: seconds of silence after which a wait ends in an error.
    """

    backend = "abstract"
    # Whether an operation tells its peers when it is started, or only when those before it are over.
    starts_early = False

    def __init__(self, ranks: Sequence[int], rank: int, watch: Watch, *, timeout: float, crowded: bool = True):
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.timeout = timeout
        self._watch, self.crowded, self._debug = watch, crowded, debug.enabled()
        self._generation = watch.generation
        self._next_look = 0.0
        self._attendance: Attendance | None = None  # set by a transport that can't tell otherwise who took part
        self._queue: deque[Work] = deque()
        self._messages: list[Work] = []
        self.plans: dict[Any, Any] = {}  # of buckets, kept from step to step

    # -- for transports ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        """Give `sends[i]` to rank i and fill `recvs[i]` from it; flat uint8 tensors, None where nothing goes.

        With a `call`, first see that all ranks of the group make the same one, else raise `mismatch`.
        """

    @abc.abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        """Send flat uint8 bytes."""

    @abc.abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive into flat uint8 bytes; returns the source."""

    def _open(self) -> None:  # noqa: B027 (not every transport needs it)
        """Meet the peers; called again after every recovery, when nothing is under way any more."""

    def close(self) -> None:  # noqa: B027
        """Give back what the operating system holds for this communicator."""

    def reclaim(self) -> None:  # noqa: B027
        """Free the memory that peers have read by now; called as a region ends, without waiting for anybody."""

    def check(self) -> None:  # noqa: B027
        """Raise what went wrong in an operation that returned before it was over, as those on GPUs do."""

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor where this transport reduces fastest (shared memory, if it has any)."""
        return torch.empty(shape, dtype=dtype)

    def scratch(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """A flat uninitialised tensor for one `all_reduced`, which may reuse its memory: don't use it after that."""
        return torch.empty(numel, dtype=dtype)

    # -- driving -------------------------------------------------------------------------------------------------------

    def abort(self, reason: str = "no reason given") -> NoReturn:
        """End the region on every rank of the mesh; raises here, and in the driver.

        Raises:
            SpmdError: always.
        """
        self._watch.abort(f"rank {self.ranks[self.rank]}: {reason}")
        raise SpmdError(message(f"rank {self.ranks[self.rank]} aborted the region", got=reason))

    def progress(self) -> None:
        """Advance what can be advanced without waiting."""
        if self._generation != self._watch.generation:
            self._forget()
            return
        self._watch.check()
        self._progress_collectives()
        self._progress_messages()
        if not self._queue and not self._messages:
            _active.discard(self)

    def look(self, work: Work) -> None:
        """What a wait does now and then, for who asks instead of waiting."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PEER_CHECK_SECONDS
            self._watch.check_peers()
            self._late(work)

    def _progress_all(self) -> None:
        """Advance all that this process has started: whom we wait for may wait for our part in something else."""
        self._progress_messages()
        self._progress_collectives()
        for other in tuple(_active):
            if other is not self:
                other.progress()

    def _progress_collectives(self) -> None:
        while self._queue and self._queue[0].advance():
            self._finished()

    def _finished(self) -> None:
        """Go on to the next operation in the queue."""
        self._queue.popleft()
        if self._attendance is not None:
            self._attendance.finish()

    def _progress_messages(self) -> None:
        if self._messages:
            self._poll_messages()
            self._messages = [work for work in self._messages if not work.advance()]

    def _poll_messages(self) -> None:  # noqa: B027
        """Look once for what has arrived; receives then match it in the order in which they were posted."""

    def finish(self, work: Work) -> None:
        """Wait for one operation, and so for those started before it."""
        if self._generation != self._watch.generation:
            self._forget()
        while not work.done:
            first = work if work in self._messages or not self._queue else self._queue[0]

            def ready(first: Work = first) -> bool:
                self._progress_all()
                return first.done

            try:
                wait_until(
                    ready,
                    self._watch,
                    timeout=self.timeout,
                    crowded=self.crowded,
                    overdue=lambda first=first: self._overdue(first),  # type: ignore[misc]
                    late=lambda first=first: self._late(first),  # type: ignore[misc]
                )
            finally:
                if self._queue and self._queue[0].done:
                    self._finished()

    def _late(self, work: Work) -> None:
        """Called now and then while a wait for `work` lasts: a peer that has left the region won't do its part."""
        if not isinstance(self._watch, Arena):
            return
        if not self._watch.said(self._watch.rank):
            self._watch.say(f"{WAITING} {work.what}")
        left = [rank for rank in work.peers if self._has_left(rank) and not self._took_part(rank, work)]
        if left and (len(left) == len(work.peers) or work not in self._messages):
            raise self.absent(left[0], work.what)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of the group is past the region that this one is in."""
        if not isinstance(self._watch, Arena):
            return False
        region, active = self._watch.region(self._watch.rank)
        at, inside = self._watch.region(self.ranks[rank])
        return active and (at > region or (at == region and not inside))

    def _took_part(self, rank: int, work: Work) -> bool:
        """Whether a rank has done all that an operation needs of it, as far as this transport can tell."""
        if self._attendance is None or work in self._messages:
            return True
        return self._attendance.finished_by(rank) > self._attendance.finished

    def _overdue(self, work: Work) -> BaseException:
        return PeerLost(
            message(
                f"{work.what} on rank {self.ranks[self.rank]} got no answer for {self.timeout:g} s",
                where=f"group {self.ranks}",
                remedy="see what the other ranks do, or raise Mesh(timeout=)",
            )
        )

    @property
    def stale(self) -> bool:
        """Whether the mesh has recovered from a failure since this was opened."""
        return self._generation != self._watch.generation

    def renew(self) -> None:
        """Open the communicator afresh if the mesh has recovered from a failure since it was last used."""
        if self.stale:
            self._forget()
            self._open()
            self._generation = self._watch.generation

    def _forget(self) -> None:
        """Drop what was under way when a region failed: nobody will answer it."""
        for work in (*self._queue, *self._messages):
            work.give_up(
                PeerLost(
                    message(
                        f"{work.what} was under way when a region failed",
                        where=f"group {self.ranks}",
                        remedy="start it again",
                    )
                )
            )
        self._queue.clear()
        self._messages.clear()
        self.plans.clear()
        _active.discard(self)

    def _start(self, what: str, steps: Steps, async_op: bool) -> Any:
        self.renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        # Where a blocking call stands is found on the stack when it is asked for.
        work = Work(self, what, steps, range(self.size), call_site() if async_op else "")
        self._queue.append(work)
        if self.starts_early:
            work.start()
        if async_op:
            _active.add(self)
        return work if async_op else work.wait()

    def _start_message(self, what: str, steps: Steps, peers: Sequence[int]) -> Work:
        self.renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        work = Work(self, what, steps, peers)
        self._messages.append(work)
        _active.add(self)
        self._progress_messages()
        return work

    # -- point to point ------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to rank `dst`; returns when the tensor may be reused."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: from any); returns the source."""
        return self.irecv(tensor, src, tag).wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start sending; the tensor must not change before `wait()`."""
        self._check_rank("isend", "dst", dst)
        return self._start_message(f"send to {dst}", self._send(as_bytes(tensor), dst, tag), (dst,))

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Start receiving; `wait()` returns the source."""
        if src is not None:
            self._check_rank("irecv", "src", src)

        def steps() -> Steps:
            buffer = _like(tensor)
            source = yield from self._recv(as_bytes(buffer), src, tag)
            _copy_back([tensor], [buffer])
            return source

        others = [rank for rank in range(self.size) if rank != self.rank]
        return self._start_message(
            f"recv from {'any rank' if src is None else src}", steps(), others if src is None else (src,)
        )

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here."""
        call = Call("barrier")
        nothing: list[torch.Tensor | None] = [None] * self.size
        return self._start(call.text, self._exchange(call, nothing, nothing), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Any:
        """Overwrite `tensor` on all ranks with that of rank `src`."""
        self._check_rank("broadcast", "src", src)
        call = Call("broadcast", tensor.dtype, tuple(tensor.shape), f"src={src}")

        def steps() -> Steps:
            mine = self.rank == src
            buffer = _contiguous(tensor) if mine else _like(tensor)
            data = as_bytes(buffer)
            sends = [data if mine and rank != src else None for rank in range(self.size)]
            recvs = [data if not mine and rank == src else None for rank in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            if not mine:
                _copy_back([tensor], [buffer])

        return self._start(call.text, steps(), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Overwrite `tensor` with the reduction of all ranks' tensors, combined in rank order."""
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            flat = _contiguous(tensor).view(-1)
            # Only the tensor's own memory may be overwritten: a contiguous copy of it, and the result comes back.
            in_place = flat.data_ptr() == tensor.data_ptr()
            result = yield from self._all_reduce(call, flat, op, in_place=in_place)
            if result is not None:
                tensor.detach().copy_(result.view(tensor.shape))

        return self._start(call.text, steps(), async_op)

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """The reduction of all ranks' tensors as a new tensor; on shared memory all ranks read one copy of it.

        A tensor made by `empty` is reduced where it lies. The result behaves as private (a change of it stays on
        this rank), but must be copied to outlive the region.
        """
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            result = yield from self._all_reduce(call, _contiguous(tensor).view(-1), op)
            return result.view(tensor.shape)

        return self._start(call.text, steps(), async_op)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        """Overwrite rank `dst`'s tensor with the reduction of all; the others' stay as they are."""
        self._check_rank("reduce", "dst", dst)
        check_op(op, tensor.dtype)
        call = Call("reduce", tensor.dtype, tuple(tensor.shape), f"{op}, dst={dst}")

        def steps() -> Steps:
            flat = _contiguous(tensor).view(-1)
            parts = [torch.empty_like(flat) if self.rank == dst and r != dst else flat for r in range(self.size)]
            sends = [as_bytes(flat) if r == dst and self.rank != dst else None for r in range(self.size)]
            recvs = [as_bytes(parts[r]) if self.rank == dst and r != dst else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            if self.rank == dst:
                tensor.detach().copy_(reduce_in_order(parts, op, torch.empty_like(flat)).view(tensor.shape))

        return self._start(call.text, steps(), async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Fill rank `dst`'s `gather_list` with the tensors of all ranks (shapes may differ between ranks)."""
        self._check_rank("gather", "dst", dst)
        mine = self.rank == dst
        outs = self._check_list("gather", "gather_list", gather_list, tensor.dtype, wanted=mine)
        call = Call("gather", tensor.dtype, None, f"dst={dst}", shown=tensor.shape)

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            sends = [as_bytes(_contiguous(tensor)) if r == dst else None for r in range(self.size)]
            recvs = [as_bytes(buffers[r]) if mine else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Overwrite each rank's `tensor` with its entry of rank `src`'s `scatter_list` (shapes may differ)."""
        self._check_rank("scatter", "src", src)
        mine = self.rank == src
        ins = self._check_list("scatter", "scatter_list", scatter_list, tensor.dtype, wanted=mine)
        call = Call("scatter", tensor.dtype, None, f"src={src}", shown=tensor.shape)

        def steps() -> Steps:
            buffer = _like(tensor)
            sends = [as_bytes(_contiguous(ins[r])) if mine else None for r in range(self.size)]
            recvs = [as_bytes(buffer) if r == src else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            _copy_back([tensor], [buffer])

        return self._start(call.text, steps(), async_op)

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Fill every rank's `tensor_list` with the tensors of all ranks (shapes may differ between ranks)."""
        outs = self._check_list("all_gather", "tensor_list", tensor_list, tensor.dtype)
        call = Call("all_gather", tensor.dtype, None, "", shown=tensor.shape)

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            data = as_bytes(_contiguous(tensor))
            yield from self._exchange(call, [data] * self.size, [as_bytes(buffer) for buffer in buffers])
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Overwrite rank i's `output` with the reduction of all ranks' `input_list[i]`."""
        check_op(op, output.dtype)
        ins = self._check_list("reduce_scatter", "input_list", input_list, output.dtype)
        call = Call("reduce_scatter", output.dtype, None, op, shown=output.shape)

        def steps() -> Steps:
            parts = [torch.empty(output.numel(), dtype=output.dtype) for _ in range(self.size)]
            sends = [as_bytes(_contiguous(piece)) for piece in ins]
            yield from self._exchange(call, sends, [as_bytes(part) for part in parts])
            output.detach().copy_(reduce_in_order(parts, op, torch.empty_like(parts[0])).view(output.shape))

        return self._start(call.text, steps(), async_op)

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], *, async_op: bool = False
    ) -> Any:
        """Rank i's `output_list[j]` becomes rank j's `input_list[i]` (shapes may differ)."""
        ins = self._check_list("all_to_all", "input_list", input_list)
        ins = self._check_list("all_to_all", "input_list", input_list, ins[0].dtype)
        outs = self._check_list("all_to_all", "output_list", output_list, ins[0].dtype)
        # Pieces may differ in shape: what is shown is the one that stays here.
        call = Call("all_to_all", ins[0].dtype, None, "", shown=ins[self.rank].shape)

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            sends = [as_bytes(_contiguous(piece)) for piece in ins]
            yield from self._exchange(call, sends, [as_bytes(buffer) for buffer in buffers])
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The slices of all ranks, `length` elements each, end to end in a new tensor; `write(out)` makes this rank's.

        On shared memory each rank writes into the one copy that all read; as that of `all_reduced`, the result
        behaves as private.

        Args:
            into: an earlier result that all ranks are done with, to be overwritten and returned (see `can_rewrite`);
                `write` then gets what this rank's slice has.
        """
        mine = torch.empty(length, dtype=dtype)
        if into is not None:
            mine.copy_(into[self.rank * length : (self.rank + 1) * length])
        write(mine)
        out = torch.empty(self.size * length, dtype=dtype) if into is None else into
        self.all_gather(list(out.split(length)) if length else [out] * self.size, mine)
        return out

    def can_rewrite(self, result: torch.Tensor | None) -> bool:
        """Whether all ranks have the same earlier result of `all_gathered` to give up; a collective call."""
        place = self._place_of(result)
        least, negated_most = self.all_reduced(torch.tensor([place, -place]), "min").tolist()
        return least == -negated_most != -1

    def _place_of(self, result: torch.Tensor | None) -> int:
        """What ranks that can rewrite a result agree on; -1 where there is none."""
        return -1 if result is None else 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.all_gather(lengths, torch.tensor([len(data)]))
        pieces = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self.all_gather(pieces, torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)])
        return [bytes(piece.numpy().tobytes()) for piece in pieces]

    # -- the algorithm behind all_reduce -------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str, *, in_place: bool = False) -> Steps:
        """Reduce a flat contiguous tensor; returns a result that the caller may keep.

        With `in_place` the result may be written to the tensor instead; None is returned then.

        Small: everybody sends everything to all and adds for itself. Large: rank i adds slice i and sends it round,
        2(n-1)/n of the bytes per rank, as a ring does, but in rank order.
        """
        if flat.numel() * flat.element_size() <= ONE_PHASE_BYTES:
            parts = [torch.empty_like(flat) if rank != self.rank else flat for rank in range(self.size)]
            sends = [as_bytes(flat) if rank != self.rank else None for rank in range(self.size)]
            recvs = [as_bytes(part) if rank != self.rank else None for rank, part in enumerate(parts)]
            yield from self._exchange(call, sends, recvs)
            return reduce_in_order(parts, op, torch.empty_like(flat))
        bounds = slice_bounds(flat.numel(), self.size)
        slices = [flat[bounds[rank] : bounds[rank + 1]] for rank in range(self.size)]
        parts = [torch.empty_like(slices[self.rank]) for _ in range(self.size)]
        parts[self.rank] = slices[self.rank]
        others = [rank != self.rank for rank in range(self.size)]
        yield from self._exchange(
            call,
            [as_bytes(slices[rank]) if others[rank] else None for rank in range(self.size)],
            [as_bytes(parts[rank]) if others[rank] else None for rank in range(self.size)],
        )
        result = torch.empty_like(flat)
        pieces = [result[bounds[rank] : bounds[rank + 1]] for rank in range(self.size)]
        reduce_in_order(parts, op, pieces[self.rank])
        yield from self._exchange(
            None,  # the same call goes on: nothing more to compare
            [as_bytes(pieces[self.rank]) if others[rank] else None for rank in range(self.size)],
            [as_bytes(pieces[rank]) if others[rank] else None for rank in range(self.size)],
        )
        return result

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_rank(self, name: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise SpecError(
                message(
                    f'{name} got a bad "{argument}"', got=rank, expected=f"a rank of the group, 0 to {self.size - 1}"
                )
            )

    def _check_list(
        self,
        name: str,
        argument: str,
        tensors: list[torch.Tensor] | None,
        dtype: torch.dtype | None = None,
        wanted: bool = True,
    ) -> list[torch.Tensor]:
        if not wanted:
            return []
        if tensors is None or len(tensors) != self.size:
            got = "None" if tensors is None else f"{len(tensors)} tensors"
            raise SpecError(
                message(f'{name} got a bad "{argument}"', got=got, expected=f"{self.size} tensors, one per rank")
            )
        for index, tensor in enumerate(tensors if dtype is not None else ()):
            if tensor.dtype != dtype:
                raise SpecError(
                    message(f'{name} got a bad "{argument}"', got=f"{tensor.dtype} at {index}", expected=f"{dtype}")
                )
        return list(tensors)

    def wrong_size(self, source: int, tag: int, got: int, expected: int) -> CollectiveMismatch:
        """The error for a message that does not fit the tensor it is received into."""
        return CollectiveMismatch(
            message(
                f"recv on rank {self.ranks[self.rank]} from rank {self.ranks[source]} with tag {tag}: sizes differ",
                got=f"a message of {got} bytes",
                expected=f"{expected} bytes",
                remedy="receive into a tensor of the sent shape and dtype",
            )
        )

    def site(self) -> str:
        """Where the user's code called the operation that is at work."""
        return (self._queue[0].site if self._queue else "") or call_site()

    def absent(self, rank: int, what: str) -> CollectiveMismatch:
        """The error for a rank that has left the region while this one waits for its part in `what`."""
        return CollectiveMismatch(
            message(
                f"rank {self.ranks[rank]} left the region without its part in {what}, "
                f"for which rank {self.ranks[self.rank]} waits at {call_site()}",
                where=f"group {self.ranks}",
                remedy="every rank of the group must make the same calls, and wait for them, in the same region",
            )
        )

    def wrong_piece(self, what: str, source: int, got: int, expected: int) -> CollectiveMismatch:
        """The error for a piece that does not fit where it is to go; its sender can't see that."""
        return CollectiveMismatch(
            message(
                f"{what}: rank {self.ranks[source]} sends {got} bytes, "
                f"rank {self.ranks[self.rank]} expects {expected}, at {self.site()}",
                where=f"group {self.ranks}",
                remedy="make the shapes of both sides agree",
            )
        )

    def mismatch(self, mine: str, others: dict[int, str]) -> CollectiveMismatch:
        """The error for ranks that disagree; `others` maps group ranks to what they called."""
        sides = {self.ranks[self.rank]: mine, **{self.ranks[rank]: text for rank, text in others.items()}}
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(sides.items()))
        return CollectiveMismatch(
            message(
                f"ranks disagree on the next collective of group {self.ranks}:{lines}\n"
                "every rank of the group must make the same calls, in the same order, with the same shapes and dtypes"
            )
        )


class Call:
    """What a rank says about a collective: peers compare `signature`, people read `text`.

    Args:
        shape: the tensor's shape where it must be the same on all ranks.
        shown: this rank's shape where ranks may differ: it is in the text and is not compared.
    """

    __slots__ = ("signature", "text")
    _known: dict[tuple, tuple[int, str]] = {}  # noqa: RUF012 (a cache, shared on purpose)

    def __init__(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        detail: str = "",
        *,
        shown: Sequence[int] | None = None,
    ):
        sizes = shape if shown is None else tuple(shown)
        key = (name, dtype, shape, detail, sizes)
        known = self._known.get(key)
        if known is None:
            kind = "" if dtype is None else " " + str(dtype).removeprefix("torch.")
            text = f"{name}{kind}{'' if sizes is None else list(sizes)}{f' ({detail})' if detail else ''}"
            known = self._known[key] = (word_key(*map(str, key[:4])), text)
        self.signature, self.text = known


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 view of it (of a copy, if it is not contiguous)."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # an empty tensor may have strides that view() refuses
    flat = _contiguous(tensor).detach().view(-1)
    # A single element may have any stride, and view() wants 1.
    return (flat if flat.numel() > 1 else flat.as_strided((1,), (1,))).view(torch.uint8)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if bytes can be written into it, else a contiguous stand-in."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _copy_back(outs: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for out, buffer in zip(outs, buffers, strict=True):
        if buffer.data_ptr() != out.data_ptr():
            out.detach().copy_(buffer)
