"""`Communicator`: the message-passing interface of a group of ranks, and the base class of transports.

A transport implements `_exchange` (each rank gives one piece of bytes to each other rank) and point-to-point messages;
all collectives are built on these (see `collectives`). A faster transport overrides what it can do better. Ranks
(`src`, `dst`, list positions) are numbered within the group, 0 to size-1.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from . import collectives, debug
from .arguments import check_list, check_message, check_tensor
from .call import Call, absent, no_answer, stamp_of
from .callsite import call_site
from .errors import SpmdError
from .flat import spans
from .operations import Operations, Ready, Sleep, Steps, Work
from .progress import Counters, Waits
from .reduction import Op, check_op
from .shm.board import Board
from .waiting import Watch, turn

Tensors = list[torch.Tensor]


class Communicator(abc.ABC):
    """What `mesh.comm()` gives inside a rank.

    Args:
        ranks: the global ranks of the group, in group order.
        rank: this process's position in it.
        watch: tells of aborts and of ranks that died.
        timeout: seconds of silence after which a wait ends in an error.
        oversubscribed: there are more ranks than cores, so that a waiting rank must not spin.
    """

    backend = "abstract"
    stamped = False  # whether messages carry a `stamp_of`; then `_send` and `_recv` take it as their last argument
    device = torch.device("cpu")  # where it reduces
    may_begin: Ready | None = None  # whether an operation's first step can run now, before earlier ones are over
    sleep: Sleep | None = None  # how a waiting rank sleeps, if its peers can wake it

    def __init__(self, ranks: Sequence[int], rank: int, watch: Watch, *, timeout: float, oversubscribed: bool = True):
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.timeout, self.oversubscribed = timeout, oversubscribed
        self._watch, self._debug = watch, debug.enabled()
        self._board = watch if isinstance(watch, Board) else None
        self._counters: Counters | None = None  # for transports with no other way to know who took part
        self._progress: Waits | None = None  # with ranks on several hosts
        self._operations = Operations(self, ranks, watch, timeout=timeout, oversubscribed=oversubscribed)
        self.plans: dict[Any, Any] = {}  # plans of buckets, kept from step to step

    # -- for transports ------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        """Give `sends[i]` to rank i and fill `recvs[i]` from it; flat uint8 tensors, or None for nothing.

        With a `call`, first check that all make the same (else raise `call.disagreement`), and fit (`check_pieces`).
        """

    @abc.abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        """Send flat uint8 bytes."""

    @abc.abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive into flat uint8 bytes; returns the source."""

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: Op, *, in_place: bool = False) -> Steps:
        """Reduce a flat contiguous tensor; returns a result that the caller may keep.

        With `in_place` the result may be written to the tensor instead; None is returned then.
        """
        return collectives.in_slices(self, call, flat, op)

    _broadcast = collectives.broadcast
    _reduce = collectives.reduce
    _gather_all = collectives.all_gather
    _reduce_scatter = collectives.reduce_scatter

    def _open(self) -> None:  # noqa: B027 (not every transport needs it)
        """Connect to the peers, as the constructor does; after every recovery, when nothing is under way."""

    def close(self) -> None:  # noqa: B027
        """Release this communicator's resources."""

    def reclaim(self) -> None:  # noqa: B027
        """Free the memory that peers have read by now, without waiting; called at the end of a region."""

    def end_call(self) -> None:
        """At the end of a call of an @spmd function: see `Operations.end_call`."""
        self._operations.end_call()

    def check(self) -> None:  # noqa: B027
        """Raise the error of an operation that returned before it was over, as those on GPUs do."""

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor in the memory that this transport reduces fastest (shared memory, if it has any)."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def scratch(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """A flat uninitialised tensor for one `all_reduced`, which consumes it: it must not be used after that."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def poll_messages(self) -> None:  # noqa: B027
        """Check once for arrived messages; receives then match them in the order in which they were posted."""

    # -- what ends a wait ----------------------------------------------------------------------------------------------

    def abort(self, reason: str = "no reason given") -> NoReturn:
        """End the region on every rank of the mesh; raises here, and in the driver.

        Raises:
            SpmdError: always.
        """
        self._watch.abort(f"rank {self.ranks[self.rank]}: {reason}")
        raise SpmdError(f"rank {self.ranks[self.rank]} aborted the region", got=reason)

    def on_finished(self) -> None:
        """A collective is over."""
        if self._counters is not None:
            self._counters.finish()

    def on_stall(self, work: Work) -> None:
        """Called now and then while a wait for `work` lasts: a peer that has left the region won't do its part."""
        if self._board is not None:
            self._board.set_waiting(work.what)
            self._board.check_calls([self.ranks[rank] for rank in work.peers], lambda: f"{work.what} at {call_site()}")
        left = [rank for rank in work.peers if self._has_left(rank) and not self._took_part(rank, work)]
        if left and (len(left) == len(work.peers) or not self._is_message(work)):
            raise self._absence(left, work.what)
        if self._progress is not None and not work.is_bounded and not self._is_message(work):
            self._progress.check_wait(work.what, work.peers)

    def _absence(self, gone: Sequence[int], what: str) -> BaseException:
        self._watch.check()  # others left because of one that failed after the wait's last look, or of one that died
        lost = (self._board.lost(self._board.participant(self.ranks[each])) for each in gone if self._board is not None)
        return next(filter(None, lost), None) or absent(self.ranks, self.rank, gone[0], what, call_site())

    def on_waited(self) -> None:
        """Clear the status that `on_stall` published for others, now that the wait is over."""
        if self._board is not None:
            self._board.set_status("")
        if self._progress is not None:
            self._progress.end_wait()

    def on_timeout(self, work: Work, seconds: float) -> BaseException:
        """The error for a wait that lasts too long."""
        return no_answer(self.ranks, self.rank, work.what, seconds)

    def _is_message(self, work: Work) -> bool:
        return work in self._operations.messages

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of the group has left the region that this rank is in."""
        return self._board is not None and self._board.has_left(self._board.participant(self.ranks[rank]))

    def _took_part(self, rank: int, work: Work) -> bool:
        """Whether a rank has done its part in an operation, as far as this transport can tell."""
        counters = self._counters
        return counters is None or self._is_message(work) or counters.finished_by(rank) > counters.finished

    # -- driving -------------------------------------------------------------------------------------------------------

    stale = property(lambda self: self._operations.stale, doc="Whether the mesh has recovered since this was opened.")

    def renew(self) -> None:
        """Open the communicator afresh if the mesh has recovered from a failure since it was last used."""
        if self.stale:
            self._operations.drop()
            self.plans.clear()
            self._open()
            self._operations.generation = self._watch.generation

    def progress(self) -> None:
        """Advance operations as far as possible without waiting."""
        with turn:
            self._operations.progress()

    def wait_for(self, ready: Ready, what: str) -> None:
        """Wait, without spinning, for a condition that operations under way make true."""
        with turn:
            self._operations.wait_until(ready, what, gently=True)

    def set_timeout(self, seconds: float) -> None:
        """Change the timeout of later waits."""
        self.timeout = self._operations.timeout = seconds

    def site(self) -> str:
        """Where the user's code called the operation that is running."""
        queue = self._operations.queue  # from there to here the stack is the transport's, which may not be ours
        return (queue[0].site if queue else "") or call_site(Communicator._start.__code__)

    def _start(self, what: str, steps: Steps, async_op: bool, tensors: Sequence[torch.Tensor] = ()) -> Any:
        with turn:
            steps, site = self._renewed(what, steps, tensors), call_site() if async_op else ""
            memory = spans(tensors) if self.may_begin and (async_op or self._operations.queue) else ()
            return self._operations.start(what, steps, self.may_begin, site=site, async_op=async_op, memory=memory)

    def _start_message(self, what: str, steps: Steps, peers: Sequence[int], tensor: torch.Tensor) -> Work:
        with turn:
            return self._operations.start_message(what, self._renewed(what, steps, (tensor,)), peers)

    def _renewed(self, what: str, steps: Steps, tensors: Sequence[torch.Tensor]) -> Steps:
        self.renew()
        steps = collectives.in_one_mode(steps, tensors)
        return debug.traced(steps, self.ranks[self.rank], what, self.backend) if self._debug else steps

    # -- point to point ------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to rank `dst`; returns when the tensor may be reused."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor`, of the sent dtype and as many elements, from `src` (None: any); returns the source."""
        return self.irecv(tensor, src, tag).wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start sending; the tensor must not change before `wait()`. The tag is a whole number of up to 62 bits."""
        check_message("isend", "dst", dst, self.size, tensor, tag)
        return self._start_message(f"send to {dst}", collectives.send(self, tensor, dst, tag), (dst,), tensor)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Start receiving; `wait()` returns the source, and the tensor is the sent one only after it."""
        check_message("irecv", "src", 0 if src is None else src, self.size, tensor, tag, written=True)
        peers = [rank for rank in range(self.size) if rank != self.rank] if src is None else (src,)
        what = f"recv from {'any rank' if src is None else src}"
        return self._start_message(what, collectives.recv(self, tensor, src, tag, *self.stamp(tensor)), peers, tensor)

    def stamp(self, tensor: torch.Tensor) -> Sequence[int]:
        return [stamp_of(tensor.dtype)] if self.stamped else ()

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here."""
        call = Call("barrier")
        return self._start(call.text, collectives.barrier(self, call), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Any:
        """Overwrite `tensor` on all ranks with that of rank `src`."""
        check_message("broadcast", "src", src, self.size, tensor, written=self.rank != src)
        call = Call("broadcast", tensor.dtype, tuple(tensor.shape), f"src={src}")
        return self._start(call.text, self._broadcast(call, tensor, src), async_op, (tensor,))

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Overwrite `tensor` with the reduction of all ranks' tensors, combined in rank order."""
        check_tensor("all_reduce", "tensor", tensor, written=True)
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)
        return self._start(call.text, collectives.all_reduce(self, call, tensor, op), async_op, (tensor,))

    def all_reduced(self, tensor: torch.Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        """The reduction of all ranks' tensors as a new tensor; on shared memory all ranks read one copy of it.

        A tensor made by `empty` is reduced where it lies. The result behaves like private memory (an in-place change
        stays on this rank), but must be copied to outlive the region.
        """
        check_tensor("all_reduced", "tensor", tensor)
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)
        return self._start(call.text, collectives.all_reduced(self, call, tensor, op), async_op, (tensor,))

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum", *, async_op: bool = False) -> Any:
        """Overwrite rank `dst`'s tensor with the reduction of all; the others' stay as they are."""
        check_message("reduce", "dst", dst, self.size, tensor, written=self.rank == dst)
        check_op(op, tensor.dtype)
        call = Call("reduce", tensor.dtype, tuple(tensor.shape), f"{op}, dst={dst}")
        return self._start(call.text, self._reduce(call, tensor, dst, op), async_op, (tensor,))

    def gather(
        self, tensor: torch.Tensor, gather_list: Tensors | None = None, dst: int = 0, *, async_op: bool = False
    ) -> Any:
        """Fill rank `dst`'s `gather_list` with the tensors of all ranks (shapes may differ between ranks)."""
        check_message("gather", "dst", dst, self.size, tensor)
        kind, here = tensor.dtype, self.rank == dst
        outs = check_list("gather", "gather_list", gather_list, self.size, dtype=kind, wanted=here, written=True)
        call = Call("gather", tensor.dtype, None, f"dst={dst}", shown=tensor.shape)
        return self._start(call.text, collectives.gather(self, call, tensor, outs, dst), async_op, (tensor, *outs))

    def scatter(
        self, tensor: torch.Tensor, scatter_list: Tensors | None = None, src: int = 0, *, async_op: bool = False
    ) -> Any:
        """Overwrite each rank's `tensor` with its entry of rank `src`'s `scatter_list` (shapes may differ)."""
        check_message("scatter", "src", src, self.size, tensor, written=True)
        kind, here = tensor.dtype, self.rank == src
        ins = check_list("scatter", "scatter_list", scatter_list, self.size, dtype=kind, wanted=here)
        call = Call("scatter", tensor.dtype, None, f"src={src}", shown=tensor.shape)
        return self._start(call.text, collectives.scatter(self, call, tensor, ins, src), async_op, (tensor, *ins))

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Fill every rank's `tensor_list` with the tensors of all ranks (shapes may differ between ranks)."""
        check_tensor("all_gather", "tensor", tensor)
        outs = check_list("all_gather", "tensor_list", tensor_list, self.size, dtype=tensor.dtype, written=True)
        call = Call("all_gather", tensor.dtype, None, "", shown=tensor.shape)
        return self._start(call.text, self._gather_all(call, outs, tensor), async_op, (tensor, *outs))

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: Op = "sum", *, async_op: bool = False
    ) -> Any:
        """Overwrite rank i's `output` with the reduction of all ranks' `input_list[i]`."""
        check_tensor("reduce_scatter", "output", output, written=True)
        check_op(op, output.dtype)
        ins = check_list("reduce_scatter", "input_list", input_list, self.size, dtype=output.dtype)
        call = Call("reduce_scatter", output.dtype, None, op, shown=output.shape)
        return self._start(call.text, self._reduce_scatter(call, output, ins, op), async_op, (output, *ins))

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], *, async_op: bool = False
    ) -> Any:
        """Rank i's `output_list[j]` becomes rank j's `input_list[i]` (shapes may differ)."""
        ins = check_list("all_to_all", "input_list", input_list, self.size)
        outs = check_list("all_to_all", "output_list", output_list, self.size, dtype=ins[0].dtype, written=True)
        # Pieces may differ in shape; the message shows the one that stays on this rank.
        call = Call("all_to_all", ins[0].dtype, None, "", shown=ins[self.rank].shape)
        return self._start(call.text, collectives.all_to_all(self, call, outs, ins), async_op, (*outs, *ins))

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The slices of all ranks, `length` elements each, end to end in a new tensor; `write(out)` fills this rank's.

        On shared memory each rank writes into the one copy that all read, which behaves like private memory. `into` is
        an earlier result to overwrite (see `can_rewrite`); `write` then gets this rank's slice with its old values.
        """
        out = torch.empty(self.size * length, dtype=dtype, device=self.device) if into is None else into
        return collectives.slices_of_all(self.all_gather, self.size, self.rank, length, write, out)

    def can_rewrite(self, result: torch.Tensor | None) -> bool:
        """Whether all ranks have the same earlier result of `all_gathered`, to be overwritten; a collective call."""
        where = self._rewritable_at(result)
        least, negated_most = self.all_reduced(torch.tensor([where, -where], device="cpu"), "min").tolist()
        return least == -negated_most != -1

    def _rewritable_at(self, result: torch.Tensor | None) -> int:
        """A number for a result that can be rewritten, the same on all ranks that have it; -1 if it can't be."""
        return -1 if result is None else 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        return collectives.bytes_of_all(self.all_gather, self.size, data)
