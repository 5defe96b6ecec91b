"""The NCCL communicator: tensors on GPUs go through NCCL, all others through a communicator for the host.

An operation is put on the current stream (with `async_op` on a side stream) and returns at once: later work on that
stream sees its result, and the host doesn't wait. Collectives that NCCL lacks are grouped sends and receives of bytes,
as `Communicator` composes them. NCCL adds in its own order, so bits may differ from those of CPUs. Invariant: all
tensors of one call are on the GPU, or all on the host.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .. import debug
from ..call import Call, check_pieces
from ..communicator import Communicator
from ..flat import as_bytes, contiguous, sizes, writable
from ..operations import Steps
from ..reduction import Op
from ..waiting import wait_until
from .nccl_arithmetic import nccl_type
from .nccl_channel import Channel
from .nccl_library import Library
from .nccl_messages import Messages
from .nccl_reduction import Reductions
from .nccl_work import DeviceWork, MessageWork
from .placement import is_on, side_by_side

_ON_DEVICE = 1 << 61  # a bit by which the signature of a call on GPUs differs from that of the call on the host
F = TypeVar("F", bound=Callable[..., Any])


def _or_on_host(collective: F) -> F:
    """A collective on tensors of the GPU that, given tensors of the host, calls the host's communicator instead."""
    name = collective.__name__

    @functools.wraps(collective)
    def called(self: NcclCommunicator, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        for one in (*args, *kwargs.values()):
            if isinstance(one, list | tuple):
                tensors += [x for x in one if isinstance(x, torch.Tensor)]
            elif isinstance(one, torch.Tensor):
                tensors.append(one)
        if not is_on(self.device, name, *tensors):
            return getattr(self.host, name)(*args, **kwargs)
        return collective(self, *args, **kwargs)

    return called  # type: ignore[return-value]


def _at_once(do: Callable[..., Any]) -> Callable[..., Steps]:
    """Turn a function that waits for nothing into an operation."""

    @functools.wraps(do)
    def steps(*args: Any, **kwargs: Any) -> Steps:
        return do(*args, **kwargs)
        yield

    return steps


class NcclCommunicator(Communicator):
    """A group of ranks with a GPU each.

    Args:
        make_host: makes a communicator of the same ranks for the host; its argument names it.
        device: this rank's GPU.
        library: the result of `nccl_library.load`.
        checked: have the ranks agree on every call before it starts (a barrier of the hosts, not of the GPUs).
        streams: a `streams.Streams`.
    """

    backend = "nccl"
    stamped = True

    def __init__(
        self,
        make_host: Callable[[str], Communicator],
        device: torch.device,
        library: Library,
        *,
        streams: Any,
        channel: str = "main",
        checked: bool = True,
    ):
        self.host = host = make_host(channel)
        super().__init__(host.ranks, host.rank, host._watch, timeout=host.timeout, oversubscribed=host.oversubscribed)
        self.device, self.library, self.streams = device, library, streams
        self.launch: Any = None  # how kernels are started; None is CuPy's way
        self._checked, self._closed = checked or debug.enabled(), False
        self._post = make_host(f"{channel}/messages")  # made here, on all ranks: the group's first opens it
        advance = self._operations.progress_messages
        self.channel = Channel(host, make_host, library, streams, channel, advance, agreed=self._checked)
        self._reductions, self._byte = Reductions(self.channel), nccl_type(library.nccl, torch.uint8)
        self._messages_between: Messages | None = None
        self._open()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._close_messages()
        self.host.renew()  # before NCCL's group: a rank that replaces a dead one makes them in this order, too
        self._post.renew()
        self.channel.open()

    def close(self) -> None:
        """End everything; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.channel.close()
            self._close_messages()
            self._post.close()
            self.host.close()

    def _close_messages(self) -> None:
        if self._messages_between is not None:
            self._messages_between.close()
            self._messages_between = None

    def end_call(self) -> None:
        super().end_call()
        self.host.end_call()
        self._post.end_call()

    def check(self) -> None:
        """Raise the error that has occurred since the last operation was started, if any."""
        if not self.stale:
            self.channel.check()

    def set_timeout(self, seconds: float) -> None:
        super().set_timeout(seconds)
        self._post.set_timeout(seconds)
        self.channel.set_timeout(seconds)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, what: str, steps: Steps, async_op: bool, tensors: Sequence[torch.Tensor] = ()) -> Any:
        self.check()
        self.renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        with self.streams.beside() if async_op else contextlib.nullcontext():
            value = self._through(what, steps)
            capturing = self.streams.capturing()
            if not async_op and capturing:
                return value
            event = self.streams.event()
        work = DeviceWork(self.channel, what, event, value, tensors) if async_op else None
        if not capturing:  # an event of a graph being captured can be waited for in the graph, but not queried
            self.channel.note(self.channel.collectives, what, event, work)
        return value if work is None else work

    def _through(self, what: str, steps: Steps) -> Any:
        """Run an operation's steps; they wait for nothing but the hosts of peers."""
        try:
            while True:
                self._operations.wait_until(next(steps), what)
        except StopIteration as end:
            return end.value

    def _agree(self, call: Call, sends: Sequence[Any] = (), recvs: Sequence[Any] = ()) -> None:
        """Have the hosts check that all make the same call, with fitting pieces: errors come before any GPU waits."""
        host = self.host
        if not self._checked or self.size == 1:
            return
        call = copy.copy(call)
        call.signature, call.text = call.signature ^ _ON_DEVICE, f"{call.text} on {self.device.type}"
        nothing: list[torch.Tensor | None] = [None] * self.size
        host._start(call.text, host._exchange(call, nothing, nothing), False)
        if sends:
            theirs = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            host.all_to_all(theirs, [torch.tensor([size], device="cpu") for size in sizes(sends)])
            check_pieces(host, call.text, [int(their) for their in theirs], sizes(recvs))

    # -- what the collectives are made of ------------------------------------------------------------------------------

    @_at_once
    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> None:
        if call is not None:
            self._agree(call, sends, recvs)
        mine, theirs = sends[self.rank], recvs[self.rank]
        what = "exchange" if call is None else call.text
        check_pieces(self, what, sizes([mine]), sizes([theirs]), first=self.rank)  # NCCL would not notice
        if mine is not None and theirs is not None and mine.data_ptr() == theirs.data_ptr():
            mine = theirs = None  # it already is where it is to go
        sends, recvs = list(sends), list(recvs)
        sends[self.rank], recvs[self.rank] = mine, theirs
        calls: list[tuple[Any, ...]] = []
        for rank, (piece, target) in enumerate(zip(sends, recvs, strict=True)):
            if piece is not None and piece.numel():
                calls.append(("send", piece.data_ptr(), piece.numel(), self._byte, rank))
            if target is not None and target.numel():
                calls.append(("recv", target.data_ptr(), target.numel(), self._byte, rank))
        self.channel.launch(what, calls, (*sends, *recvs), grouped=True)

    # -- collectives that NCCL has -------------------------------------------------------------------------------------

    @_at_once
    def _all_reduce(self, call: Call, flat: torch.Tensor, op: Op, *, in_place: bool = False) -> torch.Tensor | None:
        self._agree(call)
        result = self._reductions.everywhere(flat, op, flat if in_place else None)
        return None if in_place and result.data_ptr() == flat.data_ptr() else result

    @_at_once
    def _broadcast(self, call: Call, tensor: torch.Tensor, src: int) -> None:
        self._agree(call)
        data = as_bytes(contiguous(tensor))
        if data.numel():
            pointer = data.data_ptr()
            self.channel.launch(call.text, [("broadcast", pointer, pointer, data.numel(), self._byte, src)], (data,))
        if self.rank != src and data.data_ptr() != tensor.data_ptr() and data.numel():
            tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))

    @_at_once
    def _reduce(self, call: Call, tensor: torch.Tensor, dst: int, op: Op) -> None:
        self._agree(call)
        result = self._reductions.at(dst, contiguous(tensor).view(-1), op)
        if self.rank == dst:
            tensor.detach().copy_(result.view(tensor.shape))

    @_at_once
    def _reduce_scatter(self, call: Call, output: torch.Tensor, ins: Sequence[torch.Tensor], op: Op) -> None:
        self._agree(call, ins, [output] * self.size)
        output.detach().copy_(self._reductions.scattered(ins, op, output.numel()).view(output.shape))

    def _gather_all(self, call: Call, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        if any(out.shape != tensor.shape for out in outs) or not tensor.numel():
            yield from super()._gather_all(call, outs, tensor)
            return
        self._agree(call, [tensor] * self.size, outs)
        data = as_bytes(contiguous(tensor))
        together = side_by_side(outs)
        if together is None:
            together = torch.empty(self.size * data.numel(), dtype=torch.uint8, device=tensor.device)
        gather = "allGather", data.data_ptr(), together.data_ptr(), data.numel(), self._byte
        self.channel.launch(call.text, [gather], (data, together))
        for out, piece in zip(outs, together.split(data.numel()), strict=True):
            if out.data_ptr() != piece.data_ptr():
                out.detach().copy_(piece.view(tensor.dtype).view(out.shape))

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here, and the GPU has done all that it was given before."""
        self.check()
        self.renew()
        event = self.streams.event()
        wait_until(
            event.query,
            self._watch,
            timeout=self.timeout,
            oversubscribed=True,
            on_timeout=lambda: self.channel.silence("barrier"),
            on_stall=self.check,
        )
        return self.host.barrier(async_op=async_op)

    broadcast = _or_on_host(Communicator.broadcast)
    all_reduce = _or_on_host(Communicator.all_reduce)
    all_reduced = _or_on_host(Communicator.all_reduced)
    reduce = _or_on_host(Communicator.reduce)
    gather = _or_on_host(Communicator.gather)
    scatter = _or_on_host(Communicator.scatter)
    all_gather = _or_on_host(Communicator.all_gather)
    reduce_scatter = _or_on_host(Communicator.reduce_scatter)
    all_to_all = _or_on_host(Communicator.all_to_all)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.host.all_gather_bytes(data)

    # -- point to point ------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Any:
        self.check()
        if not is_on(self.device, "send", tensor):
            return self.host.isend(tensor, dst, tag)
        return MessageWork(self.channel, super().isend(tensor, dst, tag))

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Any:
        self.check()
        if not is_on(self.device, "recv", tensor):
            return self.host.irecv(tensor, src, tag)
        buffer = writable(tensor)
        return MessageWork(self.channel, super().irecv(buffer, src, tag), tensor, buffer)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int = 0) -> Steps:
        return self._messages_of().send(tensor, dst, tag, stamp, self.streams.event())

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int = 0) -> Steps:
        return self._messages_of().recv(tensor, src, tag, stamp, self.streams.event())

    def _messages_of(self) -> Messages:
        if self._messages_between is None:
            self._messages_between = Messages(self.channel, self._post)
        return self._messages_between
