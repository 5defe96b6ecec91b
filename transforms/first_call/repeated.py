"""Evaluates a function again with other samples: each one several times, some of them, or all in another order.

A mean over samples does not change if every sample comes twice, and is the mean of its parts; a sum grows, and rows
become more. Invariant: nothing of this is visible outside. Prints, logs and warnings are suppressed, no other rank is
talked to, random generators go on as if nothing had been drawn, and samples get the random numbers that they had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.torch_private import DispatchMode, eagerly, operation_name
from ...mesh import trees
from ...mesh.pickling.references import content_of
from ...mesh.region import generators, restore_generators
from ...mesh.replication.following import is_random
from ...mesh.replication.net import active, mark, marked, unfollowed
from ...mesh.replication.operators import Operation, operator_of
from .._call import Call, Output


class Repeated:
    """What a function returns for other samples.

    Args:
        call: the call that differentiates the function.
        rows: tensors among its arguments, or leaves to differentiate by, with a row for each sample. Other tensors of
            the same length count as rows, too, if a net knows that they were computed from the batch.
        split: the axes that the batch is cut over.

    Attributes:
        count: number of samples.
        seen: what the function did when it got every sample once.
        knows_count: whether it is given the number of samples as a plain integer, which does not change with them.
    """

    def __init__(self, call: Call, rows: Sequence[Tensor], split: Set[str]):
        self._call, self._rows, self._split = call, rows, split
        self.count = rows[0].shape[0]
        self._state: tuple[Any, ...] = generators(), _numpy_state(), random.getstate()
        self.seen, self.knows_count, self._with_grad = Seen(), False, False

    def times(self, count: int, more: Sequence[Tensor] = ()) -> Output | None:
        """What it returns if every sample comes `count` times (call it with 1 first); None if it can't be evaluated.

        Args:
            more: further leaves to differentiate by that have a row for each sample.
        """
        return self.of(torch.arange(self.count, device="cpu").repeat(count), more, record=count == 1)

    def of(
        self,
        samples: Tensor,
        more: Sequence[Tensor] = (),
        *,
        record: bool = False,
        alike: bool = False,
        backward: Callable[[Output, list[Tensor]], None] | None = None,
    ) -> Output | None:
        """What it returns for the samples of these indexes; None if it can't be evaluated.

        Args:
            record: these are all samples in their order; record the random numbers that later evaluations get.
            alike: all samples get the random numbers of the first one, so that it doesn't matter whose is which.
            backward: is given what it returned, with its graph, and the leaves without rows that it is differentiated
                by, to take their gradients.
        """
        rows = {id(leaf) for leaf in (*self._rows, *more)}
        rows |= {id(argument.primal) for argument in self._call.arguments if id(argument.leaf) in rows}
        primals = {id(argument.primal) for argument in self._call.arguments} - rows
        net = active()
        used: set[int] = set()
        replicas: dict[int, Tensor] = {}

        def replace(leaf: Any) -> Any:
            if id(leaf) in primals and isinstance(leaf, Tensor):  # else a hook for its gradient would be there twice
                if id(leaf) not in replicas:
                    replica, axes = leaf.detach().requires_grad_(), marked(leaf)
                    replicas[id(leaf)] = replica if axes is None else mark(replica, axes)
                return replicas[id(leaf)]
            if id(leaf) not in rows:
                self.knows_count = self.knows_count or (type(leaf) is int and leaf == self.count)
                has_rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.count
                if net is None or not has_rows or not net.of(leaf).axes & self._split:
                    return leaf
            used.add(id(leaf))
            chosen, axes = leaf.detach().index_select(0, samples.to(leaf.device)), marked(leaf)
            return chosen if axes is None else mark(chosen, axes)  # unmarked, an @spmd function would cut them again

        if record:
            self.seen = Seen()
        drawn_for = torch.zeros_like(samples) if alike else samples
        mode: _Draws = _Records(self.seen) if record else _Replays(self.seen, drawn_for, self.count)
        try:
            with self._unseen(), unfollowed():
                args, kwargs = trees.map(replace, (tuple(self._call.args), self._call.kwargs))
                function = holding(self._call.function, replace)
                if not used:
                    return None
                with eagerly(), mode:
                    call = dataclasses.replace(self._call, function=function)
                    out = call.evaluate(list(args), kwargs, grad=self._with_grad or backward is not None)
                    if backward is not None:
                        backward(out, list(replicas.values()))
                    if not mode.is_over:  # it drew fewer times (it loops over samples?): the numbers were not theirs
                        return None
                    return dataclasses.replace(out, value=out.value.detach(), aux=trees.map(_detached, out.aux))
        except Exception as error:  # it may work for one number of samples only
            if not record or self._with_grad or not isinstance(error, RuntimeError):
                return None
        finally:
            mode.restore_generators()
        self._with_grad = True  # it may take a gradient itself (gradient penalty, force, differential equation)
        return self.of(samples, more, record=True)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Hide what is done inside from the user and from other ranks, and put random generators back afterwards."""
        region = self._call.region
        assert region is not None
        keys, ask, logged = region.keys, sys.breakpointhook, logging.root.manager.disable
        sys.breakpointhook = lambda *_, **__: None
        logging.disable()
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with region.session.mute():
                    yield
        finally:
            sys.breakpointhook = ask
            logging.disable(logged)
            restore_generators(self._state[0])
            before, now = self._state[1], _numpy_state()
            moved = now[2] != before[2] or not np.array_equal(now[1], before[1]) or region.keys != keys
            self.seen.draws_elsewhere = self.seen.draws_elsewhere or moved or random.getstate() != self._state[2]
            np.random.set_state(self._state[1])
            random.setstate(self._state[2])


def _numpy_state() -> Any:
    return np.random.get_state()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@dataclasses.dataclass(slots=True)
class Seen:
    """What a function did.

    Attributes:
        drawn: the results of random operations, in order.
        by_sample: for each of these the dimensions with an entry for each sample, known once samples were left out.
        normalises: whether a batch norm used the statistics of the batch.
        draws_elsewhere: whether it also drew from NumPy's or Python's generator, or took a `random_key`.
        is_coarse: whether anything was computed in fewer than 32 bits, or on a GPU, which may multiply in fewer.
    """

    drawn: list[Tensor] = dataclasses.field(default_factory=list)
    by_sample: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    normalises: bool = False
    draws_elsewhere: bool = False
    is_coarse: bool = False

    def may_order(self, count: int) -> bool:
        """Whether what was drawn may be a random order of `count` samples: integers, or one number for each sample."""
        whole_numbers = (not one.is_floating_point() and one.dtype is not torch.bool for one in self.drawn)
        return self.draws_elsewhere or any(whole_numbers) or any(one.numel() == count for one in self.drawn)


class _Draws(DispatchMode):
    """Notes the states of generators that the user passes to random operations, to restore them."""

    is_over = True  # whether everything recorded was drawn again

    def __init__(self) -> None:
        super().__init__()
        self._states: list[tuple[torch.Generator, Tensor]] = []

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            self._states.append((generator, generator.get_state()))
        return func(*args, **kwargs)

    def restore_generators(self) -> None:
        for generator, state in reversed(self._states):
            generator.set_state(state)


class _Records(_Draws):
    """Records what a function does, in `Seen`."""

    def __init__(self, seen: Seen):
        super().__init__()
        self._seen = seen

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().operation(func, args, kwargs)
        seen, drawn = self._seen, is_random(func, args, kwargs)
        seen.normalises = seen.normalises or _normalises(func, args, kwargs)
        for one in _tensors_in(result):
            seen.is_coarse = seen.is_coarse or (one.is_floating_point() and (one.dtype.itemsize < 4 or one.is_cuda))
        if drawn:
            seen.drawn += [one.clone() for one in _drawn_by(func, args, kwargs, result)]
        return result


def _tensors_in(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, Tensor)]


def _drawn_by(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The results of a random operation, and what it has written to besides, which its gradient may need."""
    operator = operator_of(func)
    given = Operation(operator, args, kwargs).given()
    written = [given[argument.name] for argument in operator.arguments if argument.is_written]
    results = _tensors_in(result)
    return results + [one for one in written if isinstance(one, Tensor) and all(one is not its for its in results)]


def _normalises(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is a batch norm in training."""
    if "batch_norm" not in operation_name(func):
        return False
    if args[0].shape[0] == 1:  # an instance norm, to which samples are channels
        return False
    given = Operation(operator_of(func), args, kwargs).given()
    return bool(given.get("training", "no_training" not in operation_name(func)))


class _Replays(_Draws):
    """Gives samples the random numbers that were drawn for them before.

    Args:
        seen: what was drawn when every sample came once.
        samples: the indexes of the present samples.
        count: how many samples there were then.
    """

    def __init__(self, seen: Seen, samples: Tensor, count: int):
        super().__init__()
        self._seen, self._samples, self._count, self._next = seen, samples, count, 0

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        return self._next == len(self._seen.drawn)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().operation(func, args, kwargs)
        if is_random(func, args, kwargs):
            for one in _drawn_by(func, args, kwargs, result):
                one.copy_(self._drawn(list(one.shape)))
        return result

    def _drawn(self, shape: list[int]) -> Tensor:
        seen, index = self._seen, self._next
        self._next += 1
        drawn = seen.drawn[index]
        sizes = list(zip(shape, drawn.shape, strict=True))
        rows = [dim for dim, (now, once) in enumerate(sizes) if now != once]
        if len(self._samples) == self._count:  # all, in another order
            rows = seen.by_sample[index]
        elif len(self._samples) < self._count:
            seen.by_sample[index] = rows
        for dim in rows:
            now, once = sizes[dim]
            if once == self._count:
                drawn = drawn.index_select(dim, self._samples.to(drawn.device))
            else:
                drawn = drawn.repeat([now // once if at == dim else 1 for at in range(drawn.dim())])
        return drawn


def given_to(call: Call) -> list[Any]:
    """The leaves of everything that a call's function is given or holds."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    trees.map(note, (tuple(call.args), call.kwargs))
    holding(call.function, note)
    return found


def holding(function: Any, replace: Callable[[Any], Any], depth: int = 4) -> Any:
    """A copy of a function with the leaves that it holds replaced: in functools.partial, closures and defaults.

    Args:
        depth: how deep to follow functions that hold functions; they may do so in a circle.
    """

    def replaced(value: Any) -> Any:
        return holding(value, replace, depth - 1) if callable(value) else trees.map(replace, value)

    if not depth:
        return function

    if isinstance(function, functools.partial):
        function, args, kwargs = function.func, function.args, function.keywords
        return functools.partial(replaced(function), *map(replaced, args), **trees.map(replace, kwargs))
    if not isinstance(function, types.FunctionType):
        return function
    defaults, keyword_defaults = function.__defaults__, function.__kwdefaults__
    if not function.__closure__ and not defaults and not keyword_defaults:
        return function
    cells = tuple(types.CellType(replaced(content_of(cell))) for cell in function.__closure__ or ())
    again = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    again.__defaults__ = None if defaults is None else tuple(map(replaced, defaults))
    again.__kwdefaults__ = {name: replaced(value) for name, value in (keyword_defaults or {}).items()}
    return again
