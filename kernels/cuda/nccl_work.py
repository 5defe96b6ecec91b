"""Handles of started operations: `wait()` makes the caller's stream wait for them; the host never waits for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..operations import Work
from .nccl_channel import Channel


class DeviceWork:
    """A started collective: `wait()` makes the current stream wait for it and returns its value; the host goes on.

    Args:
        keepalive: the tensors that it works on; the channel keeps this object until the GPU is done.
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
    """A started message: `wait()` waits until the hosts have arranged it, then makes the current stream wait for it.

    Args:
        work: the arrangement; returns the source and the event after which the message has arrived.
        tensor: the tensor to receive into.
        buffer: the memory that the bytes go to; `tensor` itself if it is contiguous.
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
        """The source of a received message; None for a sent one."""
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
