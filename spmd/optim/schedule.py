"""Learning-rate schedules as pure functions: torch's schedulers, or functions of the step's number.

A torch scheduler writes to the optimizer that it is made for; here that is a dummy with nothing to step, and the
scheduler is stepped up to the step that is asked for. Invariant: what a schedule gives depends on the step's number
alone, so that a resumed run continues it.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from ..kernels.callsite import warn
from ..kernels.errors import SpecError

_FORMS = (
    "a number, a function of the step's number that gives one, a class of torch.optim.lr_scheduler, or a function of "
    "an optimizer that makes one, as in schedule=lambda opt: StepLR(opt, step_size=30)"
)


class Schedule:
    """The hyper-parameters of every group at every step.

    Args:
        given: what the user gave; see `optimizer`.
        starts: for each group, the hyper-parameters that it starts with.
        own: for each group, the names of those that it sets itself.
    """

    def __init__(self, given: Any, starts: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]):
        self._given, self._starts, self._own = given, [dict(start) for start in starts], own
        self._played: _Played | None = None
        self._function: Callable[[int], Any] | None = None
        if isinstance(given, numbers.Real) and not isinstance(given, bool):
            self._function = lambda step: given
        elif callable(given):
            self._choose(given)
        else:
            raise SpecError("optimizer got an unexpected argument 'schedule'", got=repr(given), expected=_FORMS)
        if self._function is not None and any("lr" in names for names in own[1:]):
            raise SpecError(
                "a group has a learning rate of its own, which a schedule= that gives one for all does not know",
                got=f"schedule={given!r}",
                remedy="take a scheduler that scales what each group starts with, such as "
                "schedule=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, factor)",
            )

    def __reduce__(self) -> Any:
        return Schedule, (self._given, self._starts, self._own)

    def warn_of_factor(self, rate: Any) -> None:
        """Warn if it begins above the `lr=` beside it, as a factor for torch's `LambdaLR` does that decays from 1."""
        first = None if self._function is None else self._function(0)
        if isinstance(first, int | float) and isinstance(rate, int | float) and 0 < rate < first:
            problem = "schedule= gives the learning rate itself, no factor for that of lr="
            remedy = (
                "leave out lr=; or, for a factor, schedule=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, factor)"
            )
            warn(problem, got=f"lr={rate!r}, and {first!r} for step 0", remedy=remedy)

    def at(self, step: int, hypers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The hyper-parameters for a step, counted from 0; those that are not scheduled as in `hypers`."""
        if self._function is not None:
            rate = self._function(step)
            return [{**hyper, "lr": _checked(rate, step)} for hyper in hypers]
        assert self._played is not None
        return [{**hyper, **new} for hyper, new in zip(hypers, self._played.at(step), strict=True)]

    def _choose(self, given: Callable[..., Any]) -> None:
        """Find out by a call whether a callable is a function of the step or makes a scheduler."""
        errors: list[Exception] = []
        is_class = isinstance(given, type) and issubclass(given, lr_scheduler.LRScheduler)
        if not is_class:
            try:
                _checked(given(0), 0)
            except Exception as error:
                errors.append(error)
            else:
                self._function = given
                return
        try:
            self._played = _Played(given, self._starts)
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(
                f"schedule= takes neither a step nor an optimizer: {type(error).__name__}: {error}",
                got=repr(given) + (f", which gave {errors[0]!r} for step 0" if errors else ""),
                expected=_FORMS,
            ) from error


class _Played:
    """A torch scheduler, and what it has set for every step so far: the rate, and other numbers if it writes them."""

    def __init__(self, factory: Callable[[torch.optim.Optimizer], Any], starts: Sequence[Mapping[str, Any]]):
        self._optimizer = _Groups(starts)
        self._before = [{**group} for group in self._optimizer.param_groups]
        self._scheduler = factory(self._optimizer)
        if isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau):
            raise SpecError(
                "ReduceLROnPlateau looks at a metric, and a schedule= at the number of the step alone",
                remedy='set opt_state["hyper"]["lr"] between steps, where the metric is known',
            )
        if not isinstance(self._scheduler, lr_scheduler.LRScheduler):
            got = type(self._scheduler).__name__
            raise SpecError("schedule= made no scheduler of an optimizer", got=got, expected=_FORMS)
        self._starts = starts
        self._scheduled = [{"lr"} for _ in starts]
        self._steps = [self._now()]

    def at(self, step: int) -> list[dict[str, Any]]:
        while len(self._steps) <= step:
            self._optimizer.step()
            self._scheduler.step()
            self._steps.append(self._now())
        return self._steps[step]

    def _now(self) -> list[dict[str, Any]]:
        """For each group, those of its numbers that the scheduler has written by now: the rest may be changed."""
        now: list[dict[str, Any]] = []
        groups = zip(self._optimizer.param_groups, self._before, self._starts, self._scheduled, strict=True)
        for group, before, start, scheduled in groups:
            scheduled.update(name for name in start if group[name] is not before[name])
            now.append({name: _plain(group[name]) for name in start if name in scheduled})
        return now


class _Groups(torch.optim.Optimizer):
    """Parameter groups and nothing to step."""

    def __init__(self, starts: Sequence[Mapping[str, Any]]):
        # Schedulers write to a rate that is a tensor, and this one is the user's.
        own = [{name: _copied(value) for name, value in start.items()} for start in starts]
        super().__init__([{"params": [_parameter()], **start} for start in own], dict(own[0]))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the schedulers count these calls."""


def _parameter() -> Tensor:
    """With a gradient: in a step, torch's optimizers are refused on parameters that have none."""
    parameter = torch.zeros((), device="cpu")
    parameter.grad = parameter.clone()
    return parameter


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _checked(rate: Any, step: int) -> Any:
    if isinstance(rate, numbers.Real | Tensor) and not isinstance(rate, bool):
        return rate
    raise SpecError(f"schedule= gave no number for step {step}", got=repr(rate), expected=_FORMS)
