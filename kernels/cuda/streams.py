"""The CUDA streams and events that communication needs, in one place, which tests can replace.

NCCL may deadlock if two communicators run on a GPU at once: each occupies the GPU while it waits for a peer that runs
the other one first. So their launches take turns (`in_turn`), in the order in which the host launches them, which is
the same on all ranks. Side streams are this library's own: torch has 32 per device and hands them out repeatedly, so
unrelated work could end up on one stream, and wait for each other. Invariant: nothing here makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# By device, over all communicators: the stream of the newest launch, and the event after it.
_newest: dict[torch.device, tuple[int, Any]] = {}
# By device: streams that nobody uses at present. None is ever destroyed: torch's allocator refers to memory by stream.
_spare: dict[torch.device, list[Any]] = {}
_kept: list[Any] = []  # CuPy destroys a stream that nobody refers to


class Streams:
    """The current stream of a device, and side streams that run beside it."""

    def __init__(self, device: torch.device):
        self.device = device
        self._side: dict[str, Any] = {}

    def enter(self) -> None:
        """Make the device the current one of this thread: each thread has its own, and starts with GPU 0."""
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
        """Make a stream the current one; it first waits for the event `after` (None: for the present stream)."""
        stream.wait_event(self.event() if after is None else after)
        with torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def beside(self, name: str = "") -> Iterator[None]:
        """Make a side stream the current one; it first waits for what the present stream was given."""
        if name not in self._side:
            self._side[name] = self.new()
        with self.on(self._side[name]):
            yield

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Make launches inside this block run after all earlier ones in such blocks, on any stream of the device.

        In a stream that is being captured there are no turns: it can't wait for work that isn't captured.
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
        """An event after all work that the current stream was given so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: Any) -> None:
        """Make the current stream wait for an event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from being reused until the current stream has passed this point."""
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
    """The stream that is current where a backward pass begins; its hooks may run on other streams.

    Autograd runs each node on the stream of its forward pass, so gradients may come from several streams, while the
    sums wait for one.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device)

    @contextlib.contextmanager
    def taking(self, tensor: torch.Tensor) -> Iterator[None]:
        """Make it the current stream, after it has waited for the stream that made `tensor`, the current one."""
        maker = torch.cuda.current_stream(tensor.device)
        if maker == self._stream:
            yield
            return
        self._stream.wait_stream(maker)
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
