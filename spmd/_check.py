"""`check`: a step's types on a mesh of any size, in this process: shapes, specs, and a forgotten `psum`.

The step runs once as the first rank and once as the last, on fake tensors, which have shapes but no values, under the
net of `mesh.replication`. Its communicators only work out shapes. What it takes out of a tensor is made up: a number is
1, a condition is true unless it looks for faults, and the step takes the branch that follows from that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ._spmd import Spmd, spmd
from .kernels.arguments import check_function, is_whole
from .kernels.callsite import public, user_line
from .kernels.errors import SpecError, add_note
from .kernels.torch_private import (
    FAKES_LOG,
    FakeTensors,
    PretendedArrays,
    PretendedNumbers,
    UnknownShape,
    operation_name,
)
from .mesh import trees
from .mesh.ambient import ambient
from .mesh.array import Array, meta
from .mesh.program import CompiledCall
from .mesh.put import is_array
from .mesh.rank.planned import PlannedSession
from .mesh.replication.agreement import called, refuse_apart, refuse_varying
from .mesh.replication.reports import OutputMeta
from .mesh.replication.values import Check
from .mesh.request import Request
from .mesh.spec import RAGGED, REPLICATED, Layout

_MOST_RANKS = 1 << 20  # none of which is started; a typing error would take all memory


class _PlannedMesh:
    """Stands in for a mesh, without ranks: it has what arguments and bodies look at."""

    is_driver, device, backend = False, "cpu", "planned"

    def __init__(self, layout: Layout):
        self.layout, self.axes, self.size = layout, layout.axes, layout.size

    def describe(self) -> str:
        return f"Mesh({self.axes}), checked only"

    def same_as(self, other: Any) -> bool:
        return True


@public
def check(step: Callable, axes: Mapping[str, int], *args: Any) -> Any:
    """What a step returns on a mesh of up to a million ranks, or the error that it raises there, without starting any.

    >>> step = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"))
    >>> check(step, {"data": 4096}, torch.empty(8192, 3, device="meta"))
    Meta(shape=(), dtype=torch.float32, spec=P())

    Args:
        step: what `spmd` returned, whatever its mesh, or a plain function.
        axes: the axes and their sizes, as for `Mesh`.
        args: the arguments of a call. Of tensors only shapes and dtypes matter (and an Array's spec), so that they may
            be on torch's meta device.

    Returns:
        The tree of the results: for a tensor its global `shape` (-1 where ranks differ), `dtype` and `spec`.

    Raises:
        SpecError: a spec does not fit, a replicated result may differ between ranks, or a shape depends on values, as
            that of `x[x > 0]`. Whatever the step raises.

    The step runs once as the first rank and once as the last. Values are not seen: a number that it takes out of a
    tensor is 1, an array of NumPy all ones, and a condition true, or false if it comes from `any`, `isnan` or `isinf`,
    which look for faults. An error that is raised after that has a note that says so.
    """
    if not isinstance(axes, Mapping):
        got, remedy = type(axes).__name__, 'check(step, {"data": 8}, ...), or check(step, mesh.axes, ...)'
        raise SpecError("check takes the axes of a mesh", got=got, expected="a dict of sizes", remedy=remedy)
    for name, size in axes.items():
        if not is_whole(size) or size < 1:
            raise SpecError("check got a bad axis", got=f"{name!r}: {size!r}", expected="sizes of at least 1")
    if (ranks := math.prod(axes.values())) > _MOST_RANKS:
        raise SpecError("check got a mesh of too many ranks", got=str(ranks), expected=f"at most {_MOST_RANKS}")
    check_function("check", step, "check(step, axes, *args)")
    wrapped: Any = step if isinstance(step, Spmd) else spmd(step)
    mesh: Any = _PlannedMesh(Layout(tuple(axes.items())))
    fakes = FakeTensors()
    wanted = wrapped.request(mesh, trees.map(lambda leaf: _plain(leaf, fakes), args), {})
    _keep_specs(wanted, trees.leaves(args, is_leaf=is_array))
    first = _run(wrapped, mesh, wanted, 0, fakes)
    shapes = [[about.shape for about in first.metas]]
    if mesh.size > 1:
        last = _run(wrapped, mesh, wanted, mesh.size - 1, fakes)
        if last.treedef != first.treedef:
            got = f"{first.treedef} and {last.treedef}"
            raise SpecError(
                f"{wrapped.program.name} returns other trees on other ranks", got=got, where=mesh.describe()
            )
        for index, (about, other) in enumerate(zip(first.metas, last.metas, strict=True)):
            refuse_apart(about, other, called(first.treedef, index, wrapped.program.name), mesh.describe())
        shapes.append([about.shape for about in last.metas])
    results = [
        leaf if about.spec is None else _whole(mesh.layout, about, [each[index] for each in shapes])
        for index, (leaf, about) in enumerate(zip(first.leaves, first.metas, strict=True))
    ]
    return trees.unflatten(first.treedef, results)


def _plain(leaf: Any, fakes: FakeTensors) -> Any:
    if isinstance(leaf, Array):
        about = leaf.hint()
        return fakes.empty(about.shape, about.dtype)
    return fakes.like(leaf) if isinstance(leaf, Tensor) else leaf


def _keep_specs(wanted: Request, leaves: Sequence[Any]) -> None:
    """Give leaves that were Arrays their own specs again, unless in_specs name others."""
    for index, leaf in enumerate(leaves):
        spec = leaf.hint().spec if isinstance(leaf, Array) else REPLICATED
        if spec.entries and wanted.specs[index] is None:
            wanted.mesh.layout.check_shape(leaf.hint().shape, spec, where=wanted.where(index))
            wanted.specs[index] = spec


def _run(step: Spmd, mesh: Any, wanted: Request, rank: int, fakes: FakeTensors) -> Any:
    session = PlannedSession(mesh.layout, rank, mesh.describe())
    call = CompiledCall(session, mesh, step.program, wanted.treedef, wanted.plan(ambient()))
    places: list[str] = []
    pretended = PretendedNumbers(lambda: places.append(user_line()))
    with warnings.catch_warnings(), _quiet(), fakes, pretended, PretendedArrays():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # where memory may be shared
        try:
            outcome = call(wanted.leaves, [], (0, "check"), check=Check.TYPES, total=wanted.total)
        except UnknownShape as error:
            problem = SpecError(
                f"check cannot follow {step.program.name}: the shape of a result depends on values",
                got=operation_name(error.func),
                where=mesh.describe(),
                remedy="torch.where(mask, x, 0) has the shape of x, unlike x[mask]",
            )
            raise problem.with_traceback(error.__traceback__) from None
        except Exception as error:
            if places:
                add_note(error, f"[check sees no values: a number or condition at {places[-1]} was 1 or True to it]")
            raise
    for index, about in enumerate(outcome.metas):
        refuse_varying(about, called(outcome.treedef, index, step.program.name), mesh.describe())
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of errors in fake tensors: the caller gets them as exceptions."""
    logger = logging.getLogger(FAKES_LOG)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _whole(layout: Layout, about: OutputMeta, shapes: Sequence[tuple[int, ...]]) -> Any:
    """The global value whose parts on the first and the last rank have these shapes."""
    spec = about.spec or REPLICATED
    sizes = [
        size * layout.parts(spec.dim_axes(dim)) if all(shape[dim] == size for shape in shapes) else RAGGED
        for dim, size in enumerate(shapes[0])
    ]
    assert about.dtype is not None
    return meta(tuple(sizes), about.dtype, spec)
