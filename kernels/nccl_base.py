"""What NCCL's collectives stand on: the communicator's life, and how an operation is started and ended.

An operation is put on the current stream (with `async_op` on a side stream) and returns: what follows on that stream
sees its result, and the host waits for nothing. The host's communicator carries the unique id, and lets ranks agree on
each call where that is cheap. Invariants: a thread that waits inside NCCL holds no lock, so that the watchdog can end
that; and what a started operation works on lives until it is over.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import debug, nccl_watchdog
from .communicator import Call, Communicator, Steps
from .errors import CollectiveMismatch, MeshError, PeerLost, SpecError, message
from .nccl_arithmetic import nccl_type
from .nccl_group import forget, group_of
from .nccl_library import Library
from .nccl_messages import Messages
from .nccl_raw import await_endings
from .nccl_started import DeviceWork, UnderWay
from .waiting import wait_until

_CLOSE_SECONDS = 1.0
_ON_DEVICE = 1 << 61  # tells the signature of a call on GPUs from that of the same call on the host
Launch = Callable[..., None]


class NcclBase(Communicator):
    """What `NcclCommunicator` is made on.

    Args:
        make_host: makes a communicator of the same ranks for the host, by a name that keeps several apart.
        device: this rank's.
        library: what `nccl_library.load` found.
        checked: let the ranks agree on every call before it starts (a barrier of the hosts, not of the GPUs).
        streams: a `cuda_streams.Streams`.
    """

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
        self.under_way = UnderWay()
        self._opened_in = -1  # the generation
        self._lock = threading.RLock()
        self._open()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._end()
        generation = self._watch.generation
        raw = self._group.open(self)
        with self._lock:
            self.failure, self._nccl, self._opened_in = None, raw, generation
        nccl_watchdog.watch(self)

    def _end(self) -> None:
        """End NCCL's communicator: in peace if all it was given is over, else by force; after a failure at once."""
        nccl_watchdog.unwatch(self)
        failed = self.failure is not None or self._opened_in != self._watch.generation
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            while not failed and self._nccl is not None and not self.quiet() and time.monotonic() < deadline:
                time.sleep(1e-3)
        except RuntimeError:  # of CUDA, which then goes on saying so
            failed = True
        with self._lock:
            raw, self._nccl = self._nccl, None
            abort = failed or self.failure is not None or self.under_way.oldest() is not None
            self.under_way.clear()
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
            await_endings()
            forget(self._group)
            self.host.close()

    def quiet(self) -> bool:
        """Whether all that NCCL was given here is over."""
        with self._lock:
            return not self.under_way.count()

    def check(self) -> None:
        """Raise what has gone wrong since the last operation was started, if anything has."""
        if self._generation == self._watch.generation and self.failure is not None:
            raise self.failure

    def look_after(self) -> None:
        """The watchdog's look: see `nccl_watchdog`."""
        with self._lock:
            inside = self._inside
            if self._nccl is None or self.failure is not None:
                return
            try:
                self.streams.enter()
                if self._opened_in != self._watch.generation:
                    raise PeerLost(message("a region failed", where=f"group {self.ranks}", remedy="start afresh"))
                self.under_way.count()
                oldest = self.under_way.oldest()
                waits = (oldest.what, oldest.since) if inside is None and oldest is not None else inside
                if waits is None:
                    return
                self._watch.check()
                self._watch.check_peers()
                self._nccl.check_async_error()
                if self._messages_between is not None:
                    self._messages_between.check_async_error()
                if time.monotonic() - waits[1] > self.timeout:
                    raise self._silence(waits[0])
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End by force, so that what waits for the GPU goes on."""
        if isinstance(error, (RuntimeError, KeyError)) and not isinstance(error, (MeshError, CollectiveMismatch)):
            oldest, inside = self.under_way.oldest(), self._inside
            what = oldest.what if oldest is not None else "?" if inside is None else inside[0]
            error = PeerLost(
                message(
                    f"NCCL failed on rank {self.ranks[self.rank]} in {what}",
                    got=str(error),
                    where=f"group {self.ranks}, {self.library.describe()}",
                    remedy="run with NCCL_DEBUG=INFO, and see the output of the other ranks",
                )
            )
        self.failure = error
        if isinstance(error, PeerLost) and self._opened_in == self._watch.generation:  # a later one goes on
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

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, what: str, steps: Steps, async_op: bool) -> Any:
        self.check()
        self.renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        # The operation's tensors are what its generator has enclosed; the GPU works on them after Python is done.
        frame = steps.gi_frame  # type: ignore[attr-defined]
        kept = dict(frame.f_locals) if async_op and frame is not None else None
        with self.streams.beside() if async_op else contextlib.nullcontext():
            value = self._through(steps)
            capturing = self.streams.capturing()
            if not async_op and capturing:
                return value
            event = self.streams.event()
        if not capturing:  # an event of a graph can be waited for in the graph, but not asked about
            self.note(what, event, kept)
        return DeviceWork(self, what, event, value) if async_op else value

    def note(self, what: str, event: Any, kept: Any) -> None:
        """An operation was started that is over when `event` is, and works on `kept`."""
        with self._lock:
            self.under_way.add(what, event, kept)

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
        with self._launching(name) as launch:
            launch(name, *arguments)

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[Launch]:
        """Have NCCL start what is called within all at once; an error in between leaves no group open."""
        with self._launching("a group of sends and receives") as launch:
            self.library.nccl.groupStart()
            try:
                yield launch
            finally:
                self.library.nccl.groupEnd()

    @contextlib.contextmanager
    def _launching(self, what: str) -> Iterator[Launch]:
        """A function that calls NCCL on the current stream, in turn with what other communicators launch."""
        with self._lock:
            raw = self._nccl
        if raw is None:
            raise self.failure or PeerLost(message(f"{what} on a closed communicator", where=f"group {self.ranks}"))
        with self.streams.in_turn(), self.inside(what):
            stream = self.streams.pointer()
            yield lambda name, *arguments: getattr(raw, name)(*arguments, stream)

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """While this thread is inside NCCL, which may wait there for a peer, the watchdog can end that."""
        self._inside = what, time.monotonic()
        try:
            yield
        except Exception as error:
            with self._lock:
                if self.failure is None:
                    self._fail(error)
            raise self.failure from None  # type: ignore[misc]
        finally:
            self._inside = None

    def _type(self, dtype: torch.dtype) -> int:
        return nccl_type(self.library.nccl, dtype)

    def _post(self) -> Messages:
        if self._messages_between is None:
            self._messages_between = Messages(self, self._make_host(f"{self.channel}/messages"))
        return self._messages_between

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
