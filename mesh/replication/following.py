"""How the net of `replication` sees a body: every operation of torch below autograd and its transforms, and numbers.

`follow` runs a body under two of torch's modes. The dispatch mode sees forward, backward, views, in-place and `out=`
operations alike, also under torch.func and checkpointing, and joins the marks of each operation's inputs. The function
mode sees Python numbers that depend on the rank (`VaryingInt`), which are plain numbers further down. What leaves
torch, as by `.item()`, is lost, but for statistics; comparing values may find that.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from ...kernels.call import word_key
from ...kernels.torch_private import (
    Argument,
    DispatchMode,
    eagerly,
    storage,
    version,
    without_torch_function,
)
from .. import trees
from ..purity.writes import Watched, tensors_in, written_by
from ..region import current, running_within
from .net import NOWHERE, RANDOM, Net, Varying, activate, joined, nbytes, numbers_in
from .operators import Operation, operator_of
from .statistics import (
    chooses,
    is_batch,
    joins_samples,
    note_average,
    note_statistic,
    put_together,
    rows_of,
    without_order,
)

_PROBABILITIES = ("dropout_p", "dropout", "p")


@contextlib.contextmanager
def follow(net: Net | None, watched: Watched | None) -> Iterator[None]:
    """Follow what a `with` block computes, or only refuse writes to what is watched; one of the two must be given."""
    if net is not None:
        with activate(net), eagerly(), _Operations(net, watched), _Numbers(net):
            yield
    elif watched is not None:
        with eagerly(), _Writes(watched), _Conditions():
            yield


class _Writes(DispatchMode):
    """Refuses writes to what is watched, if nothing is followed."""

    def __init__(self, watched: Watched):
        super().__init__()
        self._watched = watched

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        with without_torch_function():
            for name, value in written_by(func, args, kwargs):
                if not _only_scales(name, kwargs):
                    self._watched.check_all(value)
        return func(*args, **kwargs)


class _Operations(DispatchMode):
    def __init__(self, net: Net, watched: Watched | None):
        super().__init__()
        self._net, self._watched = net, watched

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._net.paused:
            return func(*args, **kwargs)
        with without_torch_function():
            joins = _Join(self._net, func, args, kwargs)
            if self._watched is not None:
                self._watched.check_all(joins.changed)
        result = func(*args, **kwargs)
        with without_torch_function():
            joins.settle(result)
        return result

    def with_functions(self, func: Any, args: Any, kwargs: Any) -> Any:
        varying = joined(self._net.of(tensor) for tensor in tensors_in([*args, *kwargs.values()]))
        result = func(*args, **kwargs)
        if not self._net.paused:
            for tensor in tensors_in(result):
                self._net.made(tensor, varying)
        return result


class _Join:
    """One operation: what it read and wrote, found before it runs."""

    def __init__(self, net: Net, func: Any, args: tuple, kwargs: dict):
        operator = operator_of(func)
        self._net, self._operation = net, Operation(operator, args, kwargs)
        self.reads: list[tuple[Varying, list[Varying] | None]] = []  # for a list, also each entry's
        self._inputs: dict[int, int | None] = {}  # with their versions, which autograd gives to views of them
        # Not counts of steps: fused optimizers compute each from itself only.
        written = {name: value for name, value in written_by(func, args, kwargs) if name != "state_steps"}
        self.written = [*written.values()]
        self.changed = [value for name, value in written.items() if not _only_scales(name, kwargs)]
        rows, moved = set(), False
        for index, argument in enumerate(operator.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            self._inputs.update((_key(tensor), version(tensor)) for tensor in tensors_in(value))
            if operator.overwrites and argument.name in written:
                continue
            if isinstance(value, Tensor):
                varying = self._of(argument, value)
                self.reads.append((varying, None))
                if varying.origins and (varying.row is not None or is_batch(value, net.samples)):
                    rows.add(varying.row)
            elif isinstance(value, list | tuple):
                each = [self._of(argument, item) for item in value]
                whole = joined(each)
                if operator.name in ("cat", "stack") and not (*args, 0)[1]:
                    whole, moved = put_together(operator.name, list(zip(value, each, strict=True)), net.samples)
                self.reads.append((whole, each))
        self._all = NOWHERE if operator.shapes_only else joined([whole for whole, _ in self.reads])
        if self._all.origins and (moved or len(rows - {-1}) > 1):
            self._all = self._all._replace(statistic=f"{operator.name} at {self._all.line}")
        if operator.seeded and _draws(self._operation.given()):
            self._all = joined([self._all, _of_random_numbers(net)])

    def _of(self, argument: Argument, item: Any) -> Varying:
        """How an argument, or an entry of a list that it is, varies; an index without the order it puts samples in."""
        net = self._net
        if not isinstance(item, Tensor):
            return joined(net.of(tensor) for tensor in tensors_in(item))
        varying = net.of(item)
        return without_order(varying, item, net.samples) if self._operation.operator.is_index(argument) else varying

    def _at(self, index: int, count: int) -> Varying:
        """How entry `index` of a list of `count` results varies."""
        if not self._operation.operator.by_index or self._all is NOWHERE:
            return self._all
        return joined(each[index] if each is not None and len(each) == count else whole for whole, each in self.reads)

    def _joins_samples(self, index: int, result: Tensor, varying: Varying) -> bool:
        operation, of_batch = self._operation, self._is_of_batch
        all_differ = all(of_batch(whole) for whole, _ in self.reads[operation.operator.adds :])
        samples = self._net.samples
        return joins_samples(operation, samples, index, result, all_differ=all_differ, of_batch=of_batch(varying))

    def _is_of_batch(self, varying: Varying) -> bool:
        """Whether something differs because the batch does, not only by random numbers."""
        return any(varying.origins.get(axis, RANDOM) != RANDOM for axis in self._net.split)

    def settle(self, result: Any) -> None:
        """Note how what the operation wrote, and what it returned, varies."""
        net, operation = self._net, self._operation
        name, overwrites = operation.name, operation.operator.overwrites
        if isinstance(result, float) and self._all.statistic and _is_no_constant(result):
            net.numbers[result] = self._all.statistic
        for value in self.written:
            for index, count, tensor in _entries(value):
                varying = self._at(index, count) if isinstance(value, list | tuple) else self._all
                if net.samples > 1 and varying.origins and self._joins_samples(index, tensor, varying):
                    varying = note_statistic(varying, name, index)
                if overwrites and tensor.numel() * tensor.element_size() >= nbytes(tensor):
                    net.made(tensor, varying)
                elif varying.origins or not overwrites:
                    net.written(tensor, varying)
        changed = {id(tensor) for value in self.written for tensor in tensors_in(value)}
        for index, count, tensor in _entries(result):
            if id(tensor) in changed:
                continue
            varying = self._at(index, count)
            if net.samples > 1 and varying.origins and not isinstance(varying.row, int):
                if self._joins_samples(index, tensor, varying):
                    varying = note_statistic(varying, name, index)
                if self._is_of_batch(varying):
                    varying = varying._replace(row=rows_of(operation, net.samples, index, tensor, varying.row))
                if chooses(operation):
                    varying = varying._replace(chosen=f"{name} at {varying.line}")
                elif varying.chosen and tensor.shape[:1] == (net.samples,):  # put back, or summed by sample
                    varying = varying._replace(chosen="")
            key = _key(tensor)
            if key in self._inputs:
                net.view(tensor, varying, self._inputs[key])
            else:  # a collective of torch.distributed has noted it already
                net.made(tensor, getattr(tensor, "_spmd_varying", (net, 0, varying))[2])
            if net.samples > 1 and varying.origins and not index:
                note_average(net, operation, varying.line, tensor)


def _entries(value: Any) -> Iterator[tuple[int, int, Tensor]]:
    """Each tensor in a value, with the index of its entry and how many entries there are, if that is a list."""
    items = value if isinstance(value, list | tuple) else [value]
    return ((index, len(items), tensor) for index, item in enumerate(items) for tensor in tensors_in(item))


def _is_no_constant(number: float) -> bool:
    """Whether a program has hardly written this number, as it may 0.5, 2 or infinity."""
    return math.isfinite(number) and not (1024 * number).is_integer()


def _only_scales(argument: str, kwargs: dict) -> bool:
    """Whether an argument is the gradients that fused optimizers scale in place, and there is no scale."""
    return argument == "grads" and kwargs.get("grad_scale") is None


def _key(tensor: Tensor) -> int:
    return storage(tensor) or id(tensor)


def is_random(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation draws random numbers; attention and recurrent layers do so for their dropout alone."""
    operator = operator_of(func)
    return operator.seeded and not _drops_nothing(Operation(operator, args, kwargs).given())


def _drops_nothing(given: dict[str, Any]) -> bool:
    return any(
        (name in _PROBABILITIES and isinstance(value, float) and value == 0.0)
        or (name in ("train", "training") and not value)
        for name, value in given.items()
    )


def _draws(given: dict[str, Any]) -> bool:
    """Whether an operation that may be random draws from the generator that the region has seeded on each rank."""
    if _drops_nothing(given) or given.get("generator") is not None:
        return False  # a generator of the body's own has a seed that is not known
    region = current()
    return region is None or torch.default_generator.initial_seed() == word_key("rng", *region.random)


def _of_random_numbers(net: Net) -> Varying:
    region = current()
    axes = net.axes if region is None else net.axes - region.alike
    return Varying(dict.fromkeys(axes, RANDOM))


class _Layers:
    """Answers `has_torch_function` for threads in a `_Numbers` mode; if none is, torch's own function is in place."""

    def __init__(self) -> None:
        self._lock, self._within = threading.Lock(), Counter[int]()
        self._asks: Any = None

    def enter(self) -> None:
        with self._lock:
            if not self._within:
                self._asks, torch.overrides.has_torch_function = torch.overrides.has_torch_function, self._answer
            self._within[threading.get_ident()] += 1

    def leave(self) -> None:
        with self._lock:
            thread = threading.get_ident()
            self._within[thread] -= 1
            if not self._within[thread]:
                del self._within[thread]
            if not self._within:
                torch.overrides.has_torch_function = self._asks

    def _answer(self, args: Iterable[Any]) -> bool:
        asks, within = self._asks, threading.get_ident() in self._within
        takes_functions = any(map(callable, args))  # and is no layer, but an operator that itself comes to modes
        return bool(asks(args) and (not within or takes_functions or handle_torch_function(asks, args, args)))


_layers = _Layers()


class _Conditions(TorchFunctionMode):
    """Chooses between the functions given to `torch.cond` as an `if` does, and runs that of a `scan` as a `for` does.

    In eager mode torch's own silently have no gradient for tensors that the functions capture; `cond` has one for
    results only if they are tuples, and `scan` takes no trees.

    Some of torch's layers ask whether a function is overridden, and then compute in another way, with zeros in other
    places (`nn.TransformerEncoder` in evaluation, at padding). This mode changes no other function, so they get the
    answer that they would get without it.
    """

    def __enter__(self) -> Any:
        _layers.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _layers.leave()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.higher_order.cond:
            condition, if_true, if_false, operands = args
            with self, running_within("torch.cond"):  # of itself torch leaves the mode here
                return (if_true if condition else if_false)(*operands)
        if func is torch.ops.higher_order.scan and "spec_xs" in getattr(args[0], "keywords", ()):
            with self, running_within("scan"):
                return _scanned(args[0].keywords, args[1], args[2])
        return func(*args, **(kwargs or {}))


def _scanned(given: dict[str, Any], init: list[Tensor], xs: list[Tensor]) -> tuple[Any, Any]:
    """What torch's `scan` computes of the leaves of its arguments; `given` is what it says of them to its operator."""
    carry, outs = given["spec_init"].unflatten(init), []
    for index in range(len(xs[0])):
        carry, out = given["combine_fn"](carry, given["spec_xs"].unflatten([x[index] for x in xs]))
        outs.append(out)
    return carry, trees.map(lambda *each: torch.stack(each) if isinstance(each[0], Tensor) else each[0], *outs)


class _Numbers(_Conditions):
    """Also marks what torch computes from a number, or chooses by a condition, that depends on the rank."""

    def __init__(self, net: Net):
        super().__init__()
        self._net = net

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        numbers = () if self._net.paused else (*args, *(kwargs or {}).values())
        found = [number.varying for number in numbers_in(numbers)]
        if func is torch.ops.higher_order.cond:
            found += map(self._net.of, tensors_in(args[0]))
        if found and not self._net.paused:
            with without_torch_function():
                self._join(joined(found), args, result)
        return result

    def _join(self, varying: Varying, args: Any, result: Any) -> None:
        net = self._net
        inputs = {_key(tensor) for tensor in tensors_in(list(args))}
        if result is None and args and isinstance(args[0], Tensor):  # `x[i] = y`
            net.written(args[0], varying)
        for tensor in tensors_in(result):
            if any(tensor is value for value in args):
                net.written(tensor, varying)
            elif _key(tensor) in inputs:
                net.view(tensor, joined([net.of(tensor), varying]))
            else:
                net.made(tensor, joined([net.of(tensor), varying]))
