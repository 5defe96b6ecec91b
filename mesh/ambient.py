"""Torch's settings around a call: grad mode, autocast, anomaly detection, default dtype, determinism, precision.

These belong to a thread or a process. A step should do what it would do on one device, so the ranks run its body under
the caller's settings. Invariant: only settings that differ from those of a fresh process are sent, so that an ordinary
call carries none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from ..kernels.errors import SpecError
from ..kernels.overlapping import Overlapping
from .array import WAY
from .rank import counted

_DEVICES = ("cpu", "cuda")
_HIGHEST = "highest"  # float32 itself, which a fresh process has


@dataclasses.dataclass(frozen=True, slots=True)
class Autocast:
    """How `torch.autocast` was entered for one type of device."""

    device: str
    dtype: torch.dtype
    cached: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Ambient:
    """The settings around a call.

    Attributes:
        grad: whether gradients are recorded.
        autocast: for each type of device under autocast.
        anomaly: None, or whether anomaly detection also looks for NaN.
        dtype: torch's default dtype.
        counting: the thread for which the ranks are to count their collectives; 0 for none.
        deterministic: None, or whether torch's deterministic algorithms only warn where there is none. None leaves a
            rank as it is, since the program may have set it there with `mesh.run`.
        precision: of products in float32 (`torch.set_float32_matmul_precision`); None as for `deterministic`.
    """

    grad: bool
    autocast: tuple[Autocast, ...]
    anomaly: bool | None
    dtype: torch.dtype
    counting: int = 0
    deterministic: bool | None = None
    precision: str | None = None


_USUAL = Ambient(grad=True, autocast=(), anomaly=None, dtype=torch.float32)


def ambient() -> Ambient | None:
    """The settings here and now; None for the usual ones."""
    autocast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    counting = threading.get_ident() if counted.thread.asked else 0
    anomaly = torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else None
    deterministic = None
    if torch.are_deterministic_algorithms_enabled():
        deterministic = torch.is_deterministic_algorithms_warn_only_enabled()
    precision = _reduced_precision()
    usual = grad and not autocast and anomaly is None and deterministic is None and precision is None
    if usual and dtype is _USUAL.dtype and not counting:
        return None
    cached = torch.is_autocast_cache_enabled()
    entered = tuple(Autocast(device, torch.get_autocast_dtype(device), cached) for device in autocast)
    return Ambient(grad, entered, anomaly, dtype, counting, deterministic, precision)


def _reduced_precision() -> str | None:
    """That of products in float32; None if it is float32's own, or was set for single backends in `torch.backends`."""
    try:
        found = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's, where both ways of setting it were used
        return None
    return None if found == _HIGHEST else found


def under(settings: Ambient | None) -> contextlib.AbstractContextManager[Any]:
    """Run a block under a caller's settings."""
    if settings is None and torch.get_default_dtype() is _USUAL.dtype:
        return torch.enable_grad()
    return _under(settings or _USUAL)


def made_within_torch_func(where: str) -> SpecError:
    """What to raise for a call within a transform of `torch.func`, whose tensors have no memory to send or keep."""
    return SpecError(
        "a call for the ranks was made within a transform of torch.func (grad, vmap, ...), which it can't follow",
        where=where,
        remedy=f"vmap within the @spmd function, and {WAY}",
    )


def has_tangent(leaf: Any) -> bool:
    """Whether it is a tensor with a tangent of `torch.autograd.forward_ad`; to be asked in forward mode only."""
    return isinstance(leaf, torch.Tensor) and unpack_dual(leaf).tangent is not None


def refuse_tangents(what: str, leaves: Iterable[Any]) -> None:
    """Refuse tensors with a tangent, where only their values would be sent; call it in forward mode only."""
    if any(map(has_tangent, leaves)):
        raise SpecError(
            f"{what} was given a tensor with a tangent (torch.autograd.forward_ad), which it would drop",
            remedy="make it dual in the @spmd function, and return the tangent of what comes out",
        )


@contextlib.contextmanager
def _under(settings: Ambient) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(settings.grad))
        for one in settings.autocast:
            stack.enter_context(torch.autocast(one.device, one.dtype, cache_enabled=one.cached))
        if settings.anomaly is not None:
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=settings.anomaly))
        if settings.counting:
            stack.enter_context(counted.body_counted(settings.counting))
        if settings.deterministic is not None:
            stack.enter_context(_of_process(_deterministic, settings.deterministic))
        if settings.precision is not None:
            stack.enter_context(_of_process(_with_precision, settings.precision))
        stack.enter_context(_of_process(_with_default, settings.dtype))
        yield


@functools.cache
def _of_process(setting: Callable[[Any], contextlib.AbstractContextManager[None]], value: Any) -> Overlapping:
    """A setting that calls of objects share with the tasks that run meanwhile."""
    return Overlapping(functools.partial(setting, value))


@contextlib.contextmanager
def _deterministic(warn_only: bool) -> Iterator[None]:
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(was, warn_only=warned)


@contextlib.contextmanager
def _with_precision(precision: str) -> Iterator[None]:
    before = _reduced_precision() or _HIGHEST
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _with_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)
