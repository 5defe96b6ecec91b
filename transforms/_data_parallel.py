"""`data_parallel`: split the batch over an axis, and make the step mean what it says on one device.

All it does is to cut the argument called `batch` (unless that was done on the way in) and to record how much this
rank's samples weigh; `grad` does the rest.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from ..kernels.arguments import check_function, is_number
from ..kernels.callsite import public
from ..kernels.errors import SpecError, SpmdError, add_note
from ..mesh.batch import BatchArgument
from ..mesh.failure import text_of
from ..mesh.region import require
from ..mesh.replication.net import active, marked
from ._batch import Part, note_samples, part_of
from ._grad import Transformable
from ._plan import Plan, plan_of
from ._tokens import in_gradient
from .exact.virtual_shards import agreed, check_count, stepping, without_batch

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:  # typing would keep them, and with them this module, beyond the end of the program

    @overload
    def data_parallel(
        f: F,
        *,
        axis: str | tuple[str, ...] = "data",
        batch: str = "batch",
        shards: int | None = None,
        bucket_mb: float = 25.0,
        wire_dtype: torch.dtype | None = None,
    ) -> F: ...
    @overload
    def data_parallel(
        f: None = None,
        *,
        axis: str | tuple[str, ...] = "data",
        batch: str = "batch",
        shards: int | None = None,
        bucket_mb: float = 25.0,
        wire_dtype: torch.dtype | None = None,
    ) -> Callable[[F], F]: ...


@public
def data_parallel(
    f: Callable | None = None,
    *,
    axis: str | tuple[str, ...] = "data",
    batch: str = "batch",
    shards: int | None = None,
    bucket_mb: float = 25.0,
    wire_dtype: torch.dtype | None = None,
) -> Any:
    """Run a step on each rank's part of the batch; its gradients are those of the whole batch on one device.

    Uneven and empty parts are exact: means are weighted by the number of samples. A rank without samples contributes
    nothing; there the function may even fail on the empty batch, unless it communicates. Values that the step computes
    outside of `value_and_grad` are local to the rank: `psum` or `pmean` them before you return them. Plain batch norm
    in train mode normalises over the samples of its own rank, as under DDP;
    `functional_with_buffers(model, sync=True)` normalises over the whole batch, as one device does.

    Args:
        f: the step; one of its arguments is the batch.
        axis: the mesh axis to split over; or a tuple of them, over which the batch is split into equal parts.
        batch: the name of the argument to split, each leaf along dimension 0 (all leaves have the same length).
        shards: cut the global batch into this many virtual shards, and compute the same bits on any number of ranks:
            `value_and_grad` runs the shards of a rank one after another, each at its own fixed shape with random
            numbers of its own, and sums in a binary tree over all of them. More shards than ranks is gradient
            accumulation (a loop over chunks of the batch is refused where they are not all equal). Return metrics as
            aux (`has_aux=True`); the step can't use the batch in any other way. Pass a batch of `Loader(shards=)` with
            the same number of shards, or a whole batch.
        bucket_mb: largest gradient bucket, in MiB.
        wire_dtype: dtype in which gradients travel, such as torch.bfloat16; None for the gradients' own dtype.

    Returns:
        A function of the same arguments, to be called in a region or wrapped by `spmd`. Also a decorator, with or
        without arguments.

    Raises:
        SpecError: `f` has no such argument, the batch's leaves differ in length, or the length does not divide over
            several axes.
    """
    if f is None:
        return functools.partial(
            data_parallel, axis=axis, batch=batch, shards=shards, bucket_mb=bucket_mb, wire_dtype=wire_dtype
        )
    check_function("data_parallel", f, "@data_parallel above def step(params, batch)")
    if isinstance(f, Transformable) and not isinstance(f, DataParallel):
        raise SpecError(
            f"data_parallel was put around {f!r}, which begins the region that it has to be called in",
            remedy="swap them: @spmd above @data_parallel above the step",
        )
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        expected = "the name of a mesh axis, or a tuple of them"
        raise SpecError("data_parallel got a bad axis", got=repr(axis), expected=expected)
    if len(set(names)) < len(names):
        raise SpecError("data_parallel got an axis twice", got=repr(axis))
    if len(names) > 1 and shards is not None:
        problem = f"data_parallel(shards={shards}) cuts a batch over one axis only"
        remedy = f"axis={names[0]!r}: ranks along other axes then compute the same"
        raise SpecError(problem, got=f"axis={axis!r}", remedy=remedy)
    if not is_number(bucket_mb) or not 0 < bucket_mb < math.inf:
        raise SpecError("data_parallel got a bad bucket_mb", got=repr(bucket_mb), expected="MiB, more than 0")
    if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
        raise SpecError(
            "data_parallel got a bad wire_dtype",
            got=repr(wire_dtype),
            expected="a floating-point torch.dtype, such as torch.bfloat16, or None",
        )
    position = _position(f, batch, getattr(f, "__name__", "the step"))
    plan, count = Plan(bucket_mb=bucket_mb, wire_dtype=wire_dtype), check_count(shards)
    for name in reversed(names):
        f = DataParallel(f, BatchArgument(batch, position, name, count), plan)
    return f


class DataParallel(Transformable):
    """What `data_parallel` returns: call it like the step that it wraps, in a region.

    Args:
        step: the function.
        batch: which of its arguments is split, and how.
        plan: how gradients travel.
    """

    def __init__(self, step: Callable, batch: BatchArgument, plan: Plan):
        functools.update_wrapper(self, step)
        self._step, self.batch, self._plan = step, batch, plan
        self._name = getattr(step, "__name__", "the step")

    def __reduce__(self) -> Any:
        return DataParallel, (self._step, self.batch, self._plan)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that change the bits of the results."""
        wire = self._plan.wire_dtype
        return {"shards": self.batch.shards, "wire dtype": None if wire is None else str(wire)}

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region, argument = require("a data_parallel function"), self.batch
        region.session.axes(argument.axis, what="data_parallel")
        key = argument.key(args, kwargs, self._name)
        around = plan_of(region)
        if around.virtual is not None and agreed(around.virtual, argument.axis, argument.shards):
            return self._step(*args, **kwargs)
        if argument.shards is not None and region.session.device.type != "cpu":
            raise SpecError(
                "data_parallel(shards=) computes on CPUs only",
                got=f"a mesh of device {region.session.device.type!r}",
                where=region.session.where(),
                remedy='leave shards= out, or use Mesh(device="cpu")',
            )
        part = part_of(region, kwargs[key] if isinstance(key, str) else args[key], argument, self._name)
        if isinstance(key, str):
            kwargs[key] = part.tree
        else:
            args = (*args[:key], part.tree, *args[key + 1 :])
        sizes, samples = region.session.layout.axes, around.splitting(argument.axis, part.here, part.total)
        _check_weights(around, part, argument.axis, sizes[argument.axis], self._name)
        if around.samples:
            _check_equal(samples, part, sizes, self._name)
        net = active()
        if net is not None:
            net.samples, net.split = part.here, tuple(samples)
            if part.virtual is not None and len(part.virtual.sizes) > 1:
                net.axes |= {part.virtual.axis}  # along it shards differ, on a single rank, too
        before, region.plan = region.plan, self._plan.of_batch(samples, part.virtual, part.leaves)
        try:
            if part.virtual is None:
                return self._step(*args, **kwargs)
            with stepping(region, part.virtual):
                return without_batch(self._step(*args, **kwargs), self._name)
        except Exception as error:
            if not isinstance(error, SpmdError):
                note_samples(error, (args, kwargs), part)
                _note_gradients(error)
            raise
        finally:
            region.plan = before

    def transformed(self, transform: Callable, argnums: Any, with_value: bool, has_aux: bool) -> DataParallel:
        return DataParallel(transform(self._step), self.batch, self._plan)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: bound to its object, like any function."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"data_parallel({self._name})"


def _note_gradients(error: Exception) -> None:
    """Add to torch's error about a backward pass that arguments have no history what to write instead of it."""
    if "does not require grad and does not have a grad_fn" in text_of(error):
        add_note(
            error,
            "[in a step gradients are values, and not those of backward() or torch.autograd.grad: "
            "loss, grads = value_and_grad(loss_fn)(params, batch)]",
        )


def _check_weights(around: Plan, part: Part, axis: str, size: int, name: str) -> None:
    """Refuse an uneven batch inside a gradient that began without knowing the weights of its parts."""
    if in_gradient() and part.total % size and around.samples.get(axis) != (part.here, part.total):
        raise SpecError(
            f"{name}, a data_parallel function, splits an uneven batch within a function that is differentiated",
            got=f"{part.total} samples over {size} ranks",
            remedy="differentiate it itself, or in the body of the data_parallel function",
        )


def _check_equal(samples: Mapping[str, tuple[int, int]], part: Part, sizes: Mapping[str, int], name: str) -> None:
    """Refuse unequal parts of a batch that is split over several axes: rows of ranks would have other totals."""
    over = [axis for axis in samples if any(axis in (marked(leaf) or ()) for leaf in part.leaves)]
    if len(over) > 1 and any(samples[axis][1] % sizes[axis] for axis in over):
        total, ranks = samples[over[0]][1], math.prod(sizes[axis] for axis in over)
        raise SpecError(
            f"the batch of {name} is split over several axes, into parts that are not equal",
            got=f"{total} samples for {' * '.join(str(sizes[axis]) for axis in over)} ranks along {tuple(over)}",
            remedy=f"have batches of a multiple of {ranks} samples (Loader(drop_last=True)), or make one axis of "
            f'these, Mesh({{"data": {ranks}}})',
        )


def parallel_step(f: Any) -> DataParallel | None:
    """The data_parallel function that `f` is, or wraps (by `functools.wraps`); None if there is none."""
    while f is not None and not isinstance(f, DataParallel):
        f = getattr(f, "__wrapped__", None)
    return f


def _position(f: Callable, batch: str, name: str) -> int | None:
    """The position of the batch among a function's arguments; None if it is keyword-only."""
    try:
        signature = inspect.signature(f)
    except ValueError:  # of some functions written in C
        remedy = "give data_parallel a function made by def, which calls it"
        raise SpecError(f"{name} has arguments whose names Python does not know", got=repr(f), remedy=remedy) from None
    for index, parameter in enumerate(signature.parameters.values()):
        if isinstance(batch, str) and parameter.name == batch:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                break
            return None if parameter.kind is parameter.KEYWORD_ONLY else index
    raise SpecError(
        f"{name} has no argument named {batch!r} to split",
        got=f"({', '.join(signature.parameters)})",
        remedy="take what is split as one argument, step(params, batch) with batch = (x, y) or a dict; "
        'data_parallel(batch="...") gives it another name',
    )
