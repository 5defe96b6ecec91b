"""Placing values on a mesh: tensors that the program has become Arrays, cut as their specs say.

The same in the driver and on launched ranks, where each rank keeps its own part of what all have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.errors import SpecError, message
from . import tasks, trees
from .agreement import Result, assemble
from .array import Array, LocalSource
from .mesh import Mesh, resolve
from .resident import Outputs
from .spec import REPLICATED, P, dealt_sizes, is_spec, split_sizes


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


def put(tree: Any, spec: Any = REPLICATED, *, mesh: Mesh | None = None) -> Any:
    """Place a tree of tensors on a mesh.

    >>> with Mesh({"data": 2}) as mesh:
    ...     put(torch.arange(4), P("data"), mesh=mesh).shards()
    [tensor([0, 1]), tensor([2, 3])]

    Args:
        tree: of tensors, NumPy arrays, numbers or Arrays.
        spec: a P, or a prefix tree of P.
        mesh: None is the enclosing or default mesh.

    Returns:
        The tree with an Array for every leaf.

    Raises:
        SpecError: a spec does not fit the mesh, or a dimension is not divisible.
    """
    return place(resolve(mesh), tree, spec)


def place(mesh: Mesh, tree: Any, spec: Any) -> Any:
    leaves, treedef = trees.flatten(tree, is_leaf=is_array)
    specs = specs_for(spec, tree, "the specs given to put")
    placed: list[Any] = [None] * len(leaves)
    todo: list[tuple[int, torch.Tensor, P]] = []
    for index, (leaf, its_spec) in enumerate(zip(leaves, specs, strict=True)):
        its_spec = REPLICATED if its_spec is None else its_spec
        if isinstance(leaf, Array):
            if leaf.mesh is mesh and leaf.spec == its_spec:
                leaf._readable()
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
    if not mesh.is_driver:
        for index, leaf, its_spec in todo:
            local = mesh.session.placed(mesh.layout.take(leaf, its_spec, mesh.session.rank))
            placed[index] = Array(mesh, LocalSource(mesh.session, local, its_spec, tuple(leaf.shape)))
    elif todo:
        outputs = Outputs(mesh, mesh.driver)
        items = [((outputs.number, index), leaf, its_spec) for index, leaf, its_spec in todo]
        task = mesh.driver.submit(tasks.put_values, (items,))
        for index, leaf, its_spec in todo:
            placed[index] = outputs.array(index, task, Result(its_spec, tuple(leaf.shape), leaf.dtype).meta)
        outputs.taken()
    return trees.unflatten(treedef, placed)


@dataclasses.dataclass(frozen=True, slots=True)
class Deal:
    """How a `Loader` dealt a batch: where it stands in the run, and over how many virtual shards."""

    position: tuple[int, int]
    shards: int | None = None


def fill(mesh: Mesh, name: str, reader: Any, arguments: tuple, deal: Deal) -> Callable[[], Any]:
    """Have every rank read its part of a batch; a function that waits for it and gives the tree of Arrays.

    Args:
        name: what is read, for messages.
        reader: `reader(session, *arguments) -> (treedef, leaves, Leaving of each)`, called on every rank.
    """
    if not mesh.is_driver:
        session = mesh.session
        treedef, leaves, said = reader(session, *arguments)

        def shapes(about: Any) -> tuple[tuple[int, ...], ...] | None:
            """Of all ranks' parts, where virtual shards make them other than even."""
            if deal.shards is None or about.whole is None:
                return None
            parts = mesh.layout.parts(about.spec.dim_axes(0))
            sizes, owned = dealt_sizes(about.whole[0], deal.shards), split_sizes(deal.shards, parts)
            held = [sum(sizes[sum(owned[:part]) : sum(owned[: part + 1])]) for part in range(parts)]
            return tuple(
                (held[mesh.layout.part(rank, about.spec.dim_axes(0))], *about.whole[1:])
                for rank in range(mesh.layout.size)
            )

        def here() -> Any:
            made = [
                leaf
                if about.spec is None
                else Array(
                    mesh, LocalSource(session, leaf, about.spec, about.whole or about.shape, shapes(about)), deal
                )
                for leaf, about in zip(leaves, said, strict=True)
            ]
            return trees.unflatten(treedef, made)

        return here
    driver, outputs = mesh.driver, Outputs(mesh, mesh.driver)
    shipped = driver.shipped.ship_function(reader)
    task = driver.submit(tasks.fill, (shipped.key, arguments, outputs.number))

    def there() -> Any:
        treedef, results = assemble(
            mesh.layout, tasks.decode_all(driver.wait(task).values()), name=name, where=mesh.describe()
        )
        made = [
            result.value if result.spec is None else outputs.array(index, task, result.meta, deal=deal)
            for index, result in enumerate(results)
        ]
        outputs.taken()
        return trees.unflatten(treedef, made)

    return there
