"""Placing values on a mesh: tensors that the program has become Arrays, cut as their specs say.

The same in the driver and on launched ranks, where each rank keeps its own part of what all have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.callsite import shows_only_users
from ..kernels.errors import SpecError, message
from . import agreement, protocol, trees
from .array import Array, Meta, meta
from .batch import Deal
from .driver import giving
from .driver.functions import ShippedOnce
from .mesh import Mesh, resolve
from .rank.local_values import LocalValues
from .spec import RAGGED, REPLICATED, Layout, P, is_spec, split_sizes, strided_sizes


def is_array(x: Any) -> bool:
    return isinstance(x, Array)


def as_tensor(leaf: Any) -> Any:
    """NumPy arrays of numbers as tensors; anything else as it is."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    if not leaf.flags.writeable or any(stride < 0 for stride in leaf.strides) or not leaf.dtype.isnative:
        leaf = np.array(leaf, dtype=leaf.dtype.newbyteorder("="))  # torch takes none of these as they are
    return torch.from_numpy(leaf)


def specs_for(specs: Any, tree: Any, what: str) -> list[Any]:
    """One spec (or None) for every leaf of a tree, from a prefix tree of specs."""
    try:
        return trees.broadcast_prefix(specs, tree, is_leaf=is_spec)
    except ValueError:
        raise SpecError(
            message(
                f"{what} do not fit the arguments",
                got=f"{specs!r} for {trees.shown(tree, is_leaf=is_array)}",
                remedy="give a prefix of their tree",
            )
        ) from None


@shows_only_users
def put(tree: Any, spec: Any = REPLICATED, *, mesh: Mesh | None = None) -> Any:
    """Place a tree of tensors on a mesh.

    >>> with Mesh({"data": 2}) as mesh:
    ...     put(torch.arange(4), P("data"), mesh=mesh).shards()
    [tensor([0, 1]), tensor([2, 3])]

    Args:
        tree: of tensors, NumPy arrays, numbers or Arrays; None stays None.
        spec: a P, or a prefix tree of P.
        mesh: None is the enclosing or default mesh.

    Returns:
        The tree with an Array for every leaf.

    Raises:
        SpecError: a spec does not fit the mesh, or a dimension is not divisible.
    """
    for one in trees.leaves(spec, is_leaf=is_spec):
        if one is not None and not isinstance(one, P):
            remedy = f"write P({one!r})" if isinstance(one, str) else "give a P, or a tree of them"
            problem = "the specs given to put are not all specs"
            raise SpecError(message(problem, got=repr(one), expected="P(...)", remedy=remedy))
    return place(resolve(mesh), tree, spec)


@shows_only_users
def fetch(tree: Any) -> Any:
    """The values of a tree's Arrays as plain tensors; other leaves stay as they are.

    >>> with Mesh({"data": 2}) as mesh:
    ...     fetch({"x": put(torch.arange(4), P("data"), mesh=mesh), "name": "x"})
    {'x': tensor([0, 1, 2, 3]), 'name': 'x'}

    Args:
        tree: with Arrays among its leaves.

    Returns:
        The tree, each Array replaced by its `full()`. On launched ranks a collective call.

    Raises:
        what went wrong in the calls that made the values.
    """
    return trees.map(lambda leaf: leaf.full() if isinstance(leaf, Array) else leaf, tree, is_leaf=is_array)


def place(mesh: Mesh, tree: Any, spec: Any) -> Any:
    leaves, treedef = trees.flatten(tree, is_leaf=is_array)
    specs = specs_for(spec, tree, "the specs given to put")
    placed: list[Any] = [None] * len(leaves)
    todo: list[tuple[int, torch.Tensor, P]] = []
    for index, (leaf, its_spec) in enumerate(zip(leaves, specs, strict=True)):
        if leaf is None and len(leaves) > 1:
            continue
        its_spec = REPLICATED if its_spec is None else its_spec
        if isinstance(leaf, Array):
            if leaf.mesh is mesh and leaf.spec == its_spec:
                leaf.check_readable()
                placed[index] = leaf
                continue
            leaf = leaf.full()
        if isinstance(leaf, int | float | complex | np.generic):
            leaf = torch.as_tensor(leaf)
        leaf = as_tensor(leaf)
        path = trees.paths(tree, is_leaf=is_array)[index]
        where = f"put, leaf {path}" if path else "put"
        if not isinstance(leaf, torch.Tensor):
            raise SpecError(
                message(
                    "put got a leaf that is not a tensor",
                    got=type(leaf).__name__,
                    expected="a tensor, a NumPy array, a number or an Array",
                    where=where,
                )
            )
        mesh.layout.check_shape(tuple(leaf.shape), its_spec, where=where)
        todo.append((index, leaf, its_spec))
    metas = [meta(tuple(leaf.shape), leaf.dtype, its_spec) for _, leaf, its_spec in todo]
    if not mesh.is_driver:
        session = mesh.session
        tensors = [session.placed(session.layout.take(leaf, its_spec, session.rank)) for _, leaf, its_spec in todo]
        arrays = LocalValues(session, tensors, metas).arrays(mesh)
    elif todo:
        driver, values = mesh.driver, mesh.driver.new_values()
        cuts = tuple(its_spec for _, _, its_spec in todo)
        task = giving.put(driver, values, [leaf for _, leaf, _ in todo], cuts)
        arrays = values.arrays(task, metas)
    else:
        arrays = []
    for (index, _, _), array in zip(todo, arrays, strict=True):
        placed[index] = array
    return trees.unflatten(treedef, placed)


def fill(
    mesh: Mesh,
    name: str,
    reader: ShippedOnce,
    arguments: tuple,
    deal: Deal | None,
    *,
    ragged: bool = False,
    remedy: str,
) -> Callable[[], Any]:
    """Have every rank read its part of a batch; a function that waits for it and gives the tree of Arrays.

    Args:
        name: what is read, for messages.
        reader: of `reader(session, *arguments) -> (treedef, leaves, OutputMeta of each)`, called on every rank.
        ragged: the parts may differ in more than dimension 0.
        remedy: what to do where they do and may not.
    """
    if not mesh.is_driver:
        made = _read_here(mesh, reader.obj, arguments, deal, ragged)
        return lambda: made
    driver, values = mesh.driver, mesh.driver.new_values()
    shipped, out = reader.to(driver.shipped), values.number  # and not the values, which will have `read`

    def read(
        number: int, region: int, freed: protocol.Spans, forgotten: tuple[str, ...], brief: bool = False
    ) -> protocol.FillValues:  # and keeps what it reads with shipped
        return protocol.FillValues(number, region, freed, forgotten, shipped.key, arguments, out, brief)

    values.read, layout = read, mesh.layout  # which is another by then, perhaps
    first = functools.partial(read, brief=True)
    task = driver.submit(first, told=shipped.told, name="a batch", values=values, layout=layout)
    task.reported = True  # what fails is told who comes to this batch, and nobody if the loop was left before

    def there() -> Any:
        told = tuple(driver.wait(task).values())
        treedef, results = agreement.of_batch(
            layout, told, name=name, where=mesh.describe(), ragged=ragged, remedy=remedy
        )
        arrays = iter(values.arrays(None, [result.meta for result in results if result.meta is not None], deal=deal))
        made = [result.value if result.meta is None else next(arrays) for result in results]
        return trees.unflatten(treedef, made)

    return there


def _read_here(mesh: Mesh, reader: Any, arguments: tuple, deal: Deal | None, ragged: bool) -> Any:
    """A launched rank's part of a batch, as Arrays."""
    session = mesh.session
    treedef, leaves, outputs = reader(session, *arguments)
    of_tensors = [about for about in outputs if about.spec is not None]
    metas = [meta(about.whole or about.shape, about.dtype, about.spec) for about in of_tensors]
    shards = None if deal is None else deal.shards
    shapes = None if shards is None else [_shapes(mesh.layout, about, shards) for about in of_tensors]
    hints = [_unsure(about) for about in metas] if ragged and mesh.layout.size > 1 else metas
    tensors = leaves if len(of_tensors) == len(leaves) else agreement.tensors_among(leaves, outputs)
    arrays: list[Any] = LocalValues(session, tensors, metas, shapes, hints=hints, deal=deal).arrays(mesh)
    if tensors is not leaves:
        rest = iter(arrays)
        arrays = [leaf if about.spec is None else next(rest) for leaf, about in zip(leaves, outputs, strict=True)]
    return trees.unflatten(treedef, arrays)


def _shapes(layout: Layout, about: agreement.OutputMeta, shards: int) -> tuple[tuple[int, ...], ...] | None:
    """Of all ranks' parts, which virtual shards make other than even."""
    if about.whole is None or about.spec is None:
        return None
    axes = about.spec.dim_axes(0)
    parts = layout.parts(axes)
    sizes, owned = strided_sizes(about.whole[0], shards), split_sizes(shards, parts)
    held = [sum(sizes[sum(owned[:part]) : sum(owned[: part + 1])]) for part in range(parts)]
    return tuple((held[layout.part(rank, axes)], *about.whole[1:]) for rank in range(layout.size))


def _unsure(about: Meta) -> Meta:
    """What all ranks know of a part that may be padded, without asking each other."""
    shape = (about.shape[0], *(RAGGED for _ in about.shape[1:])) if about.spec.entries else about.shape
    return meta(shape, about.dtype, about.spec)
