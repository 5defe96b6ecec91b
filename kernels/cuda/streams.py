"""The CUDA streams and events that communication needs, in one place; tests put something else there.

NCCL may deadlock when two communicators run on a GPU at once: each fills the GPU while it waits for a peer that runs
the other first. So what they launch takes turns (`in_turn`), in the order in which the host launches it, which is the
same on all ranks. Side streams are this library's own: torch has 32 of a device, and gives the same ones out again,
which would put into one order what nobody ordered. Invariant: nothing here makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# By device, of all communicators: the stream of the newest launch, and the event after it.
_newest: dict[torch.device, tuple[int, Any]] = {}
# By device: streams that nobody uses at present. None is ever ended, since torch knows memory by its stream.
_spare: dict[torch.device, list[Any]] = {}
_kept: list[Any] = []  # CuPy ends a stream that nobody refers to


class Streams:
    """The current stream of a device, and side streams that run beside it."""

    def __init__(self, device: torch.device):
        self.device = device
        self._side: dict[str, Any] = {}

    def enter(self) -> None:
        """Make the device the current one of this thread: each thread has one of its own, and begins with the first."""
        torch.cuda.set_device(self.device)

    def pointer(self) -> int:
        """The current stream, as NCCL takes it."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def new(self) -> Any:
        """A stream that nobody else uses, until it is given back."""
        spare = _spare.setdefault(self.device, [])
        return spare.pop() if spare else _made(self.device)

    def give_back(self, stream: Any) -> None:
        """Let others use a stream."""
        _spare.setdefault(self.device, []).append(stream)

    def close(self) -> None:
        """Give the side streams back."""
        while self._side:
            self.give_back(self._side.popitem()[1])

    @contextlib.contextmanager
    def on(self, stream: Any, after: Any = None) -> Iterator[None]:
        """Make a stream the current one; it goes on once the event `after` (None: what is under way) is over."""
        stream.wait_event(self.event() if after is None else after)
        with torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def beside(self, name: str = "") -> Iterator[None]:
        """Make a side stream the current one, which goes on once what is under way is over."""
        if name not in self._side:
            self._side[name] = self.new()
        with self.on(self._side[name]):
            yield

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let what is launched within run after all that was launched so before, on this device on whichever stream.

        In a stream that is being captured there are no turns: it could not wait for what is not captured.
        """
        if self.capturing():
            yield
            return
        stream, (of, before) = self.pointer(), _newest.get(self.device, (0, None))
        if before is not None and of != stream:
            self.wait(before)
        yield
        _newest[self.device] = stream, self.event()

    def event(self) -> Any:
        """An event after all that the current stream was given so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream go on once an event is over."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from another use until the current stream is past this point."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


def _made(device: torch.device) -> Any:
    import cupy

    with cupy.cuda.Device(device.index):
        stream = cupy.cuda.Stream(non_blocking=True)
    external = torch.cuda.ExternalStream(stream.ptr, device=device)
    _kept.append(stream)
    return external


class Home:
    """The stream that is current where a backward pass begins; its hooks may run on others.

    Autograd runs each node on the stream of its forward: so leaves may come from several streams, and what sums them
    waits for one.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device)

    @contextlib.contextmanager
    def taking(self, tensor: torch.Tensor) -> Iterator[None]:
        """Make it the current stream, once it is past what the stream that is current made: a tensor."""
        maker = torch.cuda.current_stream(tensor.device)
        if maker == self._stream:
            yield
            return
        self._stream.wait_stream(maker)
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
