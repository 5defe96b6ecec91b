"""What a started operation gives: the caller's stream is made to wait for it, never the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operations import Work
from .nccl_channel import Channel


class DeviceWork:
    """A started collective: `wait()` lets the current stream wait for it and gives its value; the host goes on.

    Args:
        keepalive: the tensors that it works on; the channel keeps this work until the GPU is done.
    """

    def __init__(self, channel: Channel, what: str, event: Any, value: Any, keepalive: Sequence[torch.Tensor]):
        self._channel, self._what, self._event, self._value = channel, what, event, value
        self._generation, self.keepalive = channel.watch.generation, keepalive

    def is_completed(self) -> bool:
        self._check()
        return bool(self._event.query())

    def wait(self) -> Any:
        self._check()
        self._channel.streams.wait(self._event)
        if isinstance(self._value, torch.Tensor):
            self._channel.streams.hold(self._value)
        return self._value

    def _check(self) -> None:
        self._channel.check(self._what, self._generation)


class MessageWork:
    """A started message: `wait()` waits until the hosts have arranged it, and then lets the current stream wait for it.

    Args:
        work: the arrangement, which gives the source and the event after which the message is there.
        tensor: what is received into.
        buffer: where the bytes go, which is `tensor` itself if it is contiguous.
    """

    def __init__(
        self,
        channel: Channel,
        work: Work,
        tensor: torch.Tensor | None = None,
        buffer: torch.Tensor | None = None,
    ):
        self._channel, self._work, self._tensor, self._buffer = channel, work, tensor, buffer
        self._generation = channel.watch.generation

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        self._channel.check(self._work.what, self._generation)
        _, event = self._work.wait()
        return event is None or bool(event.query())

    def wait(self) -> Any:
        """The source of what was received; None of what was sent."""
        source, event = self._work.wait()
        self._channel.check(self._work.what, self._generation)
        if event is not None:
            self._channel.streams.wait(event)
        if self._buffer is not None and self._tensor is not None:
            if self._buffer.data_ptr() != self._tensor.data_ptr():
                self._tensor.detach().copy_(self._buffer)
            self._channel.streams.hold(self._buffer)
            self._buffer = None
        return source
