"""The private parts of torch that process groups need: why, what was tried instead, and nothing else.

Like `kernels/torch_private.py`, for what only this folder uses.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


def begin_event(name: str, tensors: list[Tensor]) -> list[Any] | None:
    """Begin an event of the profiler, with the shapes of its inputs; None where no profiler listens.

    Public way: `torch.profiler.record_function`, which tells no shapes and costs 10 us where nobody listens.
    """
    if not torch.autograd._profiler_enabled():
        return None
    event = torch._C._profiler._RecordFunctionFast(name, tensors)
    event.__enter__()
    return [event]


def end_event(event: list[Any]) -> None:
    """End an event in another thread, as that of an operation that ran beside the program.

    Public way: none; a function whose future ends an event records no shapes.
    """
    thread = threading.Thread(target=event.clear)  # it ends in the thread that drops the last reference to it
    thread.start()
    thread.join()


def laid_out(dtensor: Any) -> tuple[type, Any]:
    """How a `DTensor` is laid out, for `with_layout`."""
    return type(dtensor), dtensor._spec


def with_layout(local: Tensor, layout: tuple[type, Any]) -> Any:
    """A `DTensor` without a history that is laid out as another one, from this rank's shard.

    Public way: `DTensor.from_local`, whose step on the tape and checks cost more than a small operation.
    """
    made, spec = layout
    return made(local, spec, requires_grad=False)
