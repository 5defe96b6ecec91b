"""The NCCL communicator: tensors of GPUs go through NCCL, all others through a communicator of the host.

An operation is put on the current stream (with `async_op` on a side stream) and returns: what follows on that stream
sees its result, and the host waits for nothing. The host's communicator carries the unique id, and lets ranks agree on
each call where that is cheap. Invariants: a thread that waits inside NCCL holds no lock, so that the watchdog can end
that; and what a started operation works on lives until it is over.
NCCL adds in an order of its own: bits may differ from those of CPUs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import debug, nccl_watchdog
from .communicator import Call, Communicator, Steps, Work, _contiguous, as_bytes
from .errors import CollectiveMismatch, MeshError, PeerLost, SpecError, message
from .nccl_arithmetic import as_signed, brought_back, carried, nccl_type, way
from .nccl_library import Library
from .nccl_messages import Messages
from .nccl_raw import forget, group_of
from .reduction import check_op, reduce_in_order
from .waiting import wait_until

_CLOSE_SECONDS = 1.0
_ON_DEVICE = 1 << 61  # tells the signature of a call on GPUs from that of the same call on the host


@dataclasses.dataclass(slots=True)
class _Started:
    """An operation that the GPU may not have finished, and what it works on."""

    what: str
    event: Any
    since: float
    kept: Any


class DeviceWork:
    """A started operation: `wait()` lets the current stream wait for it and gives its value; the host goes on."""

    def __init__(self, comm: NcclCommunicator, event: Any, value: Any):
        self._comm, self._event, self._value = comm, event, value

    def is_completed(self) -> bool:
        self._comm.check()
        return bool(self._event.query())

    def wait(self) -> Any:
        self._comm.check()
        self._comm.streams.wait(self._event)
        if isinstance(self._value, torch.Tensor):
            self._comm.streams.hold(self._value)
        return self._value


class NcclCommunicator(Communicator):
    """A group of ranks with a GPU each; see `Communicator`.

    Args:
        make_host: makes a communicator of the same ranks for the host, by a name that keeps several apart.
        device: this rank's.
        library: what `nccl_library.load` found.
        checked: let the ranks agree on every call before it starts (a barrier of the hosts, not of the GPUs).
        streams: a `cuda_streams.Streams`.
    """

    backend = "nccl"

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
        self.host = make_host(channel)
        host = self.host
        super().__init__(host.ranks, host.rank, host._watch, timeout=host.timeout, crowded=host.crowded)
        self.device, self.library, self.streams, self.channel = device, library, streams, channel
        self.failure: BaseException | None = None
        self.launch: Any = None  # how kernels are started; None is CuPy's way
        self._checked = checked or debug.enabled()
        self._make_host = make_host
        self._group = group_of(make_host, self._watch, self.ranks, library)
        self._closed = False
        self._nccl: Any = None
        self._messages_between: Messages | None = None
        self._inside: tuple[str, float] | None = None  # what of NCCL this thread is in, and since when
        self._started: deque[_Started] = deque()
        self._lock = threading.RLock()
        self._open()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._end()
        raw = self._group.open(self.channel)
        with self._lock:
            self.failure, self._nccl = None, raw
        nccl_watchdog.watch(self)

    def _end(self) -> None:
        """End NCCL's communicator: in peace if all it was given is over, else by force."""
        nccl_watchdog.unwatch(self)
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.failure is None and self._nccl is not None and self._pending() and time.monotonic() < deadline:
            time.sleep(1e-3)
        with self._lock:
            raw, self._nccl = self._nccl, None
            abort = self.failure is not None or bool(self._started) or self._generation != self._watch.generation
            self._started.clear()
        if raw is not None:
            self._group.leave(self.channel, raw, abort=abort)
        if self._messages_between is not None:
            self._messages_between.close(abort=abort)
            self._messages_between = None

    def close(self) -> None:
        """End what there is; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end()
            forget(self._group)
            self.host.close()

    def check(self) -> None:
        """Raise what has gone wrong since the last operation was started, if anything has."""
        if self._generation == self._watch.generation and self.failure is not None:
            raise self.failure

    def look_after(self) -> None:
        """The watchdog's look: see `nccl_watchdog`."""
        with self._lock:
            inside = self._inside
            if self._nccl is None or self.failure is not None or not (self._pending() or inside):
                return
            try:
                self._watch.check()
                self._watch.check_peers()
                self._nccl.check_async_error()
                what, since = inside or (self._started[0].what, self._started[0].since)
                if time.monotonic() - since > self.timeout:
                    raise self._silence(what)
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End by force, so that what waits for the GPU goes on."""
        if isinstance(error, RuntimeError) and not isinstance(error, (PeerLost, MeshError, CollectiveMismatch)):
            error = PeerLost(
                message(
                    f"NCCL failed on rank {self.ranks[self.rank]} in {self._started[0].what if self._started else '?'}",
                    got=str(error),
                    where=f"group {self.ranks}, {self.library.describe()}",
                    remedy="run with NCCL_DEBUG=INFO, and see the output of the other ranks",
                )
            )
        self.failure = error
        if isinstance(error, PeerLost):
            self._watch.abort(f"rank {self.ranks[self.rank]}: {error}")
        raw, self._nccl = self._nccl, None
        if raw is not None:
            self._group.leave(self.channel, raw, abort=True)
        if self._messages_between is not None:
            self._messages_between.abort()

    def _silence(self, what: str) -> PeerLost:
        return PeerLost(
            message(
                f"{what} on rank {self.ranks[self.rank]} was not over after {self.timeout:g} s",
                where=f"group {self.ranks}",
                remedy="see what the other ranks do, or raise Mesh(timeout=)",
            )
        )

    def _pending(self) -> int:
        """How many operations may not be over; forgets the others."""
        while self._started and self._started[0].event.query():
            self._started.popleft()
        return len(self._started)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, what: str, steps: Steps, async_op: bool) -> Any:
        self.check()
        self._renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        # The operation's tensors are what its generator has enclosed; the GPU works on them after Python is done.
        frame = steps.gi_frame  # type: ignore[attr-defined]
        kept = dict(frame.f_locals) if async_op and frame is not None else None
        with self.streams.beside() if async_op else contextlib.nullcontext():
            value = self._through(steps)
            if not async_op and self.streams.capturing():
                return value
            event = self.streams.event()
        self.note(what, event, kept)
        return DeviceWork(self, event, value) if async_op else value

    def note(self, what: str, event: Any, kept: Any) -> None:
        """An operation was started that is over when `event` is, and works on `kept`."""
        with self._lock:
            self._pending()
            self._started.append(_Started(what, event, time.monotonic(), kept))

    def _through(self, steps: Steps) -> Any:
        """Go through steps, none of which waits for anything but the host's peers."""
        try:
            while True:
                ready = next(steps)
                wait_until(
                    ready, self._watch, timeout=self.timeout, crowded=self.crowded, overdue=lambda: self._silence("it")
                )
        except StopIteration as end:
            return end.value

    def _agree(self, call: Call, sends: Sequence[Any] = (), recvs: Sequence[Any] = ()) -> None:
        """See that all ranks make the same call, with pieces that fit; the hosts wait for each other, no GPU does."""
        if not self._checked or self.size == 1:
            return
        call = copy.copy(call)
        call.signature, call.text = call.signature ^ _ON_DEVICE, f"{call.text} on {self.device.type}"
        nothing: list[torch.Tensor | None] = [None] * self.size
        self.host._start(call.text, self.host._exchange(call, nothing, nothing), False)
        if not sends:
            return
        sizes = [torch.tensor([0 if piece is None else piece.numel()]) for piece in sends]
        theirs = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.host.all_to_all(theirs, sizes)
        for rank, (their, piece) in enumerate(zip(theirs, recvs, strict=True)):
            if int(their) != (0 if piece is None else piece.numel()):
                raise self.wrong_piece(call.text, rank, int(their), 0 if piece is None else piece.numel())

    def _call(self, name: str, *arguments: Any) -> None:
        """One of NCCL's functions, on the current stream."""
        with self._lock:
            raw = self._nccl
        if raw is None:
            raise self.failure or PeerLost(message(f"{name} on a closed communicator", where=f"group {self.ranks}"))
        with self._entered(name):
            getattr(raw, name)(*arguments, self.streams.pointer())

    @contextlib.contextmanager
    def _entered(self, what: str) -> Any:
        """While this thread is inside NCCL, which may wait there for a peer, the watchdog can end that."""
        self._inside = what, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            with self._lock:
                if self.failure is None:
                    self._fail(error)
            raise self.failure from None  # type: ignore[misc]
        finally:
            self._inside = None

    @contextlib.contextmanager
    def _grouped(self) -> Any:
        """Have NCCL start what is called within all at once; an error in between leaves no group open."""
        self.library.nccl.groupStart()
        try:
            yield
        finally:
            with self._entered("a group of sends and receives"):
                self.library.nccl.groupEnd()

    def _type(self, dtype: torch.dtype) -> int:
        return nccl_type(self.library.nccl, dtype)

    # -- what the collectives are made of ------------------------------------------------------------------------------

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        if call is not None:
            self._agree(call, sends, recvs)
        mine, target = sends[self.rank], recvs[self.rank]
        if mine is not None and target is not None and mine.data_ptr() != target.data_ptr():
            target.copy_(mine)
        byte = self._type(torch.uint8)
        with self._grouped():
            for rank in range(self.size):
                piece, place = sends[rank], recvs[rank]
                if rank != self.rank and piece is not None and piece.numel():
                    self._call("send", piece.data_ptr(), piece.numel(), byte, rank)
                if rank != self.rank and place is not None and place.numel():
                    self._call("recv", place.data_ptr(), place.numel(), byte, rank)
        return
        yield  # a generator like all operations, though it waits for nothing

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str, *, in_place: bool = False) -> Steps:
        self._agree(call)
        return self._reduced(flat, op, None)
        yield

    def _reduced(self, flat: torch.Tensor, op: str, out: torch.Tensor | None) -> torch.Tensor:
        """The reduction of a flat contiguous tensor: in `out`, if it is given and can be, else in a new tensor."""
        chosen = way(op, flat.dtype)
        if not flat.numel() or self.size == 1:
            return flat.clone() if out is None else out
        if chosen.op is None:
            return self._combined(flat, op)
        source = carried(flat, chosen)
        target = carried(out, chosen) if out is not None and chosen.same else torch.empty_like(source)
        number = int(getattr(self.library.nccl, chosen.op))
        self._call("allReduce", source.data_ptr(), target.data_ptr(), source.numel(), self._type(chosen.dtype), number)
        return brought_back(target, flat.dtype, chosen, self.size)

    def _combined(self, flat: torch.Tensor, op: str) -> torch.Tensor:
        """What NCCL can't reduce: gathered, and combined in rank order on every rank."""
        data = as_bytes(flat)
        everything = torch.empty(self.size * data.numel(), dtype=torch.uint8, device=flat.device)
        self._call("allGather", data.data_ptr(), everything.data_ptr(), data.numel(), self._type(torch.uint8))
        parts = [as_signed(part.view(flat.dtype)) for part in everything.split(data.numel())]
        return reduce_in_order(parts, op, torch.empty_like(parts[0])).view(flat.dtype)

    # -- collectives that NCCL has -------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here, and the GPU past what it was given before."""
        self.check()
        self._renew()
        event = self.streams.event()
        wait_until(
            event.query,
            self._watch,
            timeout=self.timeout,
            crowded=True,
            overdue=lambda: self._silence("barrier"),
            late=self.check,
        )
        return self.host.barrier(async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Any:
        if not self._here("broadcast", tensor):
            return self.host.broadcast(tensor, src, async_op=async_op)
        self._check_rank("broadcast", "src", src)
        call = Call("broadcast", tensor.dtype, tuple(tensor.shape), f"src={src}")

        def steps() -> Steps:
            self._agree(call)
            data = as_bytes(_contiguous(tensor))
            if data.numel():
                pointer = data.data_ptr()
                self._call("broadcast", pointer, pointer, data.numel(), self._type(torch.uint8), src)
            if self.rank != src and data.data_ptr() != tensor.data_ptr() and data.numel():
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("all_reduce", tensor):
            return self.host.all_reduce(tensor, op, async_op=async_op)
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            self._agree(call)
            flat = _contiguous(tensor).view(-1)
            result = self._reduced(flat, op, flat)
            if result.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(result.view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("all_reduce", tensor):
            return self.host.all_reduced(tensor, op, async_op=async_op)
        return super().all_reduced(tensor, op, async_op=async_op)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("reduce", tensor):
            return self.host.reduce(tensor, dst, op, async_op=async_op)
        self._check_rank("reduce", "dst", dst)
        check_op(op, tensor.dtype)
        call = Call("reduce", tensor.dtype, tuple(tensor.shape), f"{op}, dst={dst}")

        def steps() -> Steps:
            self._agree(call)
            flat, chosen = _contiguous(tensor).view(-1), way(op, tensor.dtype)
            if chosen.op is None or not flat.numel() or self.size == 1:
                result = self._reduced(flat, op, None)
            else:
                source = carried(flat, chosen)
                target = torch.empty_like(source) if self.rank == dst else source
                numbers = self._type(chosen.dtype), int(getattr(self.library.nccl, chosen.op))
                self._call("reduce", source.data_ptr(), target.data_ptr(), source.numel(), *numbers, dst)
                result = brought_back(target, flat.dtype, chosen, self.size)
            if self.rank == dst:
                tensor.detach().copy_(result.view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        if not self._here("all_gather", tensor, *(tensor_list or ())):
            return self.host.all_gather(tensor_list, tensor, async_op=async_op)
        outs = self._check_list("all_gather", "tensor_list", tensor_list, tensor.dtype)
        if any(out.shape != tensor.shape for out in outs) or not tensor.numel():
            return super().all_gather(tensor_list, tensor, async_op=async_op)
        call = Call("all_gather", tensor.dtype, None, "", shown=tensor.shape)

        def steps() -> Steps:
            self._agree(call, [tensor] * self.size, outs)
            data = as_bytes(_contiguous(tensor))
            together = _side_by_side(outs)
            if together is None:
                together = torch.empty(self.size * data.numel(), dtype=torch.uint8, device=tensor.device)
            self._call("allGather", data.data_ptr(), together.data_ptr(), data.numel(), self._type(torch.uint8))
            for out, piece in zip(outs, together.split(data.numel()), strict=True):
                if out.data_ptr() != piece.data_ptr():
                    out.detach().copy_(piece.view(tensor.dtype).view(out.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        if not self._here("reduce_scatter", output, *(input_list or ())):
            return self.host.reduce_scatter(output, input_list, op, async_op=async_op)
        check_op(op, output.dtype)
        ins = self._check_list("reduce_scatter", "input_list", input_list, output.dtype)
        call = Call("reduce_scatter", output.dtype, None, op, shown=output.shape)

        def steps() -> Steps:
            self._agree(call, ins, [output] * self.size)
            chosen, count = way(op, output.dtype), output.numel()
            even = all(piece.numel() == count for piece in ins) and count > 0 and self.size > 1
            if even and chosen.op is not None:
                source = carried(torch.cat([_contiguous(piece).view(-1) for piece in ins]), chosen)
                target = torch.empty(source.numel() // self.size, dtype=source.dtype, device=source.device)
                numbers = self._type(chosen.dtype), int(getattr(self.library.nccl, chosen.op))
                self._call("reduceScatter", source.data_ptr(), target.data_ptr(), target.numel(), *numbers)
                result = brought_back(target, output.dtype, chosen, self.size)
            else:
                sizes = [piece.numel() for piece in ins]
                whole = self._reduced(torch.cat([_contiguous(piece).view(-1) for piece in ins]), op, None)
                result = whole.split(sizes)[self.rank]
            output.detach().copy_(result.view(output.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    # -- collectives made of sends and receives ------------------------------------------------------------------------

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        side: Any = super() if self._here("gather", tensor, *(gather_list or ())) else self.host
        return side.gather(tensor, gather_list, dst, async_op=async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        side: Any = super() if self._here("scatter", tensor, *(scatter_list or ())) else self.host
        return side.scatter(tensor, scatter_list, src, async_op=async_op)

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], *, async_op: bool = False
    ) -> Any:
        side: Any = super() if self._here("all_to_all", *(output_list or ()), *(input_list or ())) else self.host
        return side.all_to_all(output_list, input_list, async_op=async_op)

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.empty(self.size * length, dtype=dtype) if into is None else into
        mine = out[self.rank * length : (self.rank + 1) * length]
        write(mine)
        self.all_gather(list(out.split(length)) if length else [out] * self.size, mine)
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.host.all_gather_bytes(data)

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # -- point to point ------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        self.check()
        return super().isend(tensor, dst, tag) if self._here("send", tensor) else self.host.isend(tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Work:
        self.check()
        return super().irecv(tensor, src, tag) if self._here("recv", tensor) else self.host.irecv(tensor, src, tag)

    def _post(self) -> Messages:
        if self._messages_between is None:
            self._messages_between = Messages(self, self._make_host(f"{self.channel}/messages"))
        return self._messages_between

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        return self._post().send(tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        return self._post().recv(tensor, src, tag)

    # -- which side ----------------------------------------------------------------------------------------------------

    def _here(self, what: str, *tensors: torch.Tensor) -> bool:
        """Whether an operation is NCCL's; refuses tensors of several devices."""
        devices = {tensor.device for tensor in tensors}
        if len({device.type for device in devices}) > 1 or any(
            device.type == self.device.type and device != self.device for device in devices
        ):
            raise SpecError(
                message(
                    f"{what} got tensors of other devices than its own",
                    got=", ".join(sorted(map(str, devices))),
                    expected=f"all on {self.device}, or all on the CPU",
                    remedy="move them with .to()",
                )
            )
        return any(device.type == self.device.type for device in devices)


def _side_by_side(outs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of contiguous tensors that lie one after the other in one storage, as one tensor; None if not so."""
    first = outs[0]
    step = first.numel() * first.element_size()
    if any(
        not out.is_contiguous()
        or out.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or out.data_ptr() != first.data_ptr() + index * step
        for index, out in enumerate(outs)
    ):
        return None
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    start = first.data_ptr() - storage.data_ptr()
    return storage[start : start + len(outs) * step]
