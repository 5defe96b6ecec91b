"""Process groups of `torch.distributed`: options of Gloo, failed futures, and events of the profiler."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gloo_options(timeout: float, hostname: str) -> Any:
    """Options of a Gloo group that listens at an address of our choice. Public way: `init_process_group`, which makes
    the user's default group and takes the address from the environment.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
    return options


def set_timeout(group: Any, timeout: datetime.timedelta) -> None:
    """Set a Gloo group's timeout. Public way: `group.set_timeout`, which torch 2.8 lacks."""
    (getattr(group, "set_timeout", None) or group._set_default_timeout)(timeout)


class _Failure:
    """What a future that has failed holds. Code in C++ pickles it, to find tensors in it, and so gets the error."""

    def __init__(self, error: Exception):
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


def fail_future(future: torch.futures.Future, error: Exception) -> None:
    """Complete a future with an error. Public way: `set_exception`, which for C++ completes it with a value that is an
    exception: DDP then reads tensors where there are none, and the process ends.
    """

    def raise_error(failure: _Failure) -> None:
        raise failure.error

    torch._C.Future._set_unwrap_func(future, raise_error)
    future.set_result(_Failure(error))


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
