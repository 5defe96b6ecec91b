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

from ...kernels.torch_private import eagerly
from ...mesh import trees
from ...mesh.pickling.references import content_of
from ...mesh.region import generators, restore_generators
from ...mesh.replication.net import active, mark, marked, unfollowed
from .._call import Call, Output
from .draws import Draws, Records, Replays, Seen


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
        chosen = _Chosen(self._call, [*self._rows, *more], self.count, samples, self._split)
        if record:
            self.seen = Seen()
        drawn_for = torch.zeros_like(samples) if alike else samples
        mode: Draws = Records(self.seen) if record else Replays(self.seen, drawn_for, self.count)
        try:
            with self._unseen(), unfollowed():
                args, kwargs = trees.map(chosen, (tuple(self._call.args), self._call.kwargs))
                function = holding(self._call.function, chosen)
                self.knows_count = self.knows_count or chosen.has_count
                if not chosen.has_rows:
                    return None
                with eagerly(), mode:
                    call = dataclasses.replace(self._call, function=function)
                    out = call.evaluate(list(args), kwargs, grad=self._with_grad or backward is not None)
                    if backward is not None:
                        backward(out, list(chosen.replicas.values()))
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


class _Chosen:
    """What a function gets instead of a leaf: of what has a row for each sample, those of some samples.

    Args:
        call: the call that differentiates the function.
        rows: leaves with a row for each sample; others have one if they have the same length, and a net knows that they
            were computed from the batch.
        count: the number of samples.
        samples: the indexes of those to choose.
        split: the axes that the batch is cut over.

    Attributes:
        replicas: of the leaves without rows that it is differentiated by.
        has_rows: whether any leaf has them.
        has_count: whether one is the number of samples.
    """

    def __init__(self, call: Call, rows: Sequence[Tensor], count: int, samples: Tensor, split: Set[str]):
        self._rows = {id(leaf) for leaf in rows}
        self._rows |= {id(argument.primal) for argument in call.arguments if id(argument.leaf) in self._rows}
        self._primals = {id(argument.primal) for argument in call.arguments} - self._rows
        self._count, self._samples, self._split, self._net = count, samples, split, active()
        self.replicas: dict[int, Tensor] = {}
        self.has_rows = self.has_count = False

    def __call__(self, leaf: Any) -> Any:
        if id(leaf) in self._primals and isinstance(leaf, Tensor):  # else a hook for its gradient would be there twice
            if id(leaf) not in self.replicas:
                replica, axes = leaf.detach().requires_grad_(), marked(leaf)
                self.replicas[id(leaf)] = replica if axes is None else mark(replica, axes)
            return self.replicas[id(leaf)]
        if id(leaf) not in self._rows:
            self.has_count = self.has_count or (type(leaf) is int and leaf == self._count)
            is_as_long = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self._count
            if self._net is None or not is_as_long or not self._net.of(leaf).axes & self._split:
                return leaf
        self.has_rows = True
        chosen, axes = leaf.detach().index_select(0, self._samples.to(leaf.device)), marked(leaf)
        return chosen if axes is None else mark(chosen, axes)  # unmarked, an @spmd function would cut them again


def _numpy_state() -> Any:
    return np.random.get_state()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


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
