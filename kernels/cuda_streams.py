"""The CUDA streams and events that communication needs, in one place; tests put something else there."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Streams:
    """The current stream of a device, and side streams that run beside it.

    Invariant: nothing here makes the host wait.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._side: dict[str, Any] = {}

    def enter(self) -> None:
        """Make the device the current one of this thread: each thread has one of its own, and begins with the first."""
        torch.cuda.set_device(self._device)

    def pointer(self) -> int:
        """The current stream, as NCCL takes it."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    @contextlib.contextmanager
    def beside(self, name: str = "", after: Any = None) -> Any:
        """Make a side stream the current one; it goes on once the event `after` (None: what is under way) is over."""
        side = self._side.get(name)
        if side is None:
            side = self._side[name] = torch.cuda.Stream(self._device)
        side.wait_event(self.event() if after is None else after)
        with torch.cuda.stream(side):
            yield

    def event(self) -> Any:
        """An event after all that the current stream was given so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream go on once an event is over."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from another use until the current stream is past this point."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()
