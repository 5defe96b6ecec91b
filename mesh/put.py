"""Placing values on a mesh: the program's tensors become Arrays, cut as their specs say.

It works alike in the driver and on launched ranks, where all have the whole value, and each keeps its part.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import torch

from ..kernels.arguments import check_value
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from . import trees
from .array import Array, meta
from .driver.pending import Pure, made_for_its_size
from .driver.sending import put_message
from .launch import launched
from .launch.alike import WHOLE, Given, given_tensor, refuse_differing
from .mesh import Mesh, resolve
from .rank.local_values import LocalValues
from .region import current
from .replication.net import active
from .spec import REPLICATED, P, is_spec
from .wire import INLINE_BYTES


def is_array(x: Any) -> bool:
    return isinstance(x, Array)


_EXTENDED = (np.dtype(np.longdouble), np.dtype(np.clongdouble))


def as_tensor(leaf: Any) -> Any:
    """NumPy arrays of numbers as tensors; anything else as it is."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    if np.ma.is_masked(leaf):
        problem = "a masked array would lose its mask, which torch's tensors have not"
        raise SpecError(problem, got=f"shape {leaf.shape}", remedy="pass array.filled(value), and array.mask")
    if leaf.dtype in _EXTENDED:
        remedy = f"write array.astype({'complex' if leaf.dtype.kind == 'c' else 'float'})"
        raise SpecError("torch has no dtype for a NumPy array", got=str(leaf.dtype), remedy=remedy)
    odd = any(stride < 0 or stride % leaf.itemsize for stride in leaf.strides)  # the latter of a field of records
    if not leaf.flags.writeable or odd or not leaf.dtype.isnative:
        leaf = np.array(leaf, dtype=leaf.dtype.newbyteorder("="))  # torch takes none of these as they are
    return torch.from_numpy(leaf)


def number_or_tensor(leaf: Any) -> torch.Tensor:
    """A tensor as it is; a number or an array as a tensor on the CPU, whatever torch's default device is."""
    return leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf, device="cpu")


def check_specs(specs: Any, problem: str, expected: str) -> None:
    """Refuse a tree of specs in which there is something else than a P or None."""
    for one in trees.leaves(specs, is_leaf=is_spec):
        if one is not None and not isinstance(one, P):
            remedy = f"write P({one!r})" if isinstance(one, str) else "give a P, or a tree of them"
            raise SpecError(problem, got=repr(one), expected=expected, remedy=remedy)


def specs_for(specs: Any, tree: Any, what: str) -> list[Any]:
    """One spec (or None) for every leaf of a tree, from a prefix tree of specs."""
    try:
        return trees.broadcast_prefix(specs, tree, is_leaf=is_spec)
    except ValueError:
        raise SpecError(
            f"{what} do not fit the arguments",
            got=f"{specs!r} for {trees.shown(tree, is_leaf=is_array)}",
            remedy="give a prefix of their tree",
        ) from None


@public
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
        SpecError: a spec does not fit the mesh, a dimension is not divisible, or launched ranks give different values
            (each has to give the same whole value).
    """
    check_specs(spec, "the specs given to put are not all specs", "P(...)")
    return put_on(resolve(mesh), tree, spec, compared=True)


@public
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
        the error of a call that failed to make one of the values.
    """
    leaves, treedef = trees.flatten(tree, is_leaf=is_array)
    found = list(leaves)
    for run in _runs(leaves):
        first = leaves[run[0]]
        found[run[0] : run[-1] + 1] = first._source.full([leaves[place]._index for place in run])
    return trees.unflatten(treedef, found)


def _runs(leaves: list[Any]) -> list[list[int]]:
    """The places of Arrays, next to each other in one list if they are fetched by one message: small values of one
    call, cut alike. A large value is alone: its tensor is to have memory of its own."""
    runs: list[list[int]] = []
    alike: Any = None
    room, indexes = 0, set[int]()
    for place, leaf in enumerate(leaves):
        before, alike = alike, None
        if not isinstance(leaf, Array):
            continue
        leaf.check_readable()
        is_jagged = not all(isinstance(size, int) for size in leaf.shape)
        count = INLINE_BYTES if is_jagged else leaf.numel()
        alike, size = (id(leaf._source), leaf.spec), -(-count * leaf.dtype.itemsize // 64) * 64
        if alike != before or size > room or leaf._index in indexes:
            runs.append([])
            indexes, room = set(), INLINE_BYTES
        runs[-1].append(place)
        indexes.add(leaf._index)
        room -= size
    return runs


@made_for_its_size
def put_on(mesh: Mesh, tree: Any, spec: Any, *, compared: bool = False) -> Any:
    """`put` with checked arguments; `compared` makes launched ranks compare what they give."""
    layout = mesh.layout
    leaves, treedef = trees.flatten(tree, is_leaf=is_array)
    specs = specs_for(spec, tree, "the specs given to put")
    places = trees.places(treedef)
    found: list[Any] = [None] * len(leaves)
    todo: list[tuple[int, torch.Tensor, P]] = []
    for index, (leaf, its_spec) in enumerate(zip(leaves, specs, strict=True)):
        if leaf is None and len(leaves) > 1:
            continue
        its_spec = REPLICATED if its_spec is None else its_spec
        if isinstance(leaf, Array) and leaf.mesh is mesh and leaf.spec == its_spec:
            leaf.check_readable()
            found[index] = leaf
            continue
        where = f"put, leaf {places[index]}" if places[index] else "put"
        leaf = _tensor_of(leaf, where, cut=bool(its_spec.entries))
        if compared:
            _refuse_parts(leaf, where)
        layout.check_shape(tuple(leaf.shape), its_spec, where=where)
        todo.append((index, leaf, its_spec))
    metas = [meta(tuple(leaf.shape), leaf.dtype, its_spec) for _, leaf, its_spec in todo]
    if not mesh.is_driver:
        session, region = mesh.session, 0
        if compared and todo and session.launched and session.layout.size > 1 and current() is None:
            given = ((trees.keys_text(treedef), None), *(given_tensor(leaf) for _, leaf, _ in todo))
            _refuse_differing(mesh, given, [places[index] for index, _, _ in todo])
            region = session.regions
        tensors = [session.on_device(session.layout.take(leaf, its_spec, session.rank)) for _, leaf, its_spec in todo]
        arrays = LocalValues(session, tensors, metas, region=region).arrays(mesh)
    elif todo:
        driver, values = mesh.driver, mesh.driver.new_values()
        cuts = tuple(its_spec for _, _, its_spec in todo)
        make, content = put_message(driver, values, [leaf for _, leaf, _ in todo], cuts)
        task = driver.submit(make, content, layout=layout, pure=Pure("put", values=(values,)))
        arrays = values.arrays(task, metas)
    else:
        arrays = []
    for (index, _, _), array in zip(todo, arrays, strict=True):
        found[index] = array
    return trees.unflatten(treedef, found)


def _tensor_of(leaf: Any, where: str, *, cut: bool) -> torch.Tensor:
    if isinstance(leaf, Array):
        leaf = leaf.full()
    if isinstance(leaf, int | float | complex | np.generic):
        leaf = number_or_tensor(leaf)
    leaf = as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor):
        raise SpecError(
            "put got a leaf that is not a tensor",
            got=type(leaf).__name__,
            expected="a tensor, a NumPy array, a number or an Array",
            where=where,
        )
    check_value(leaf, functools.partial(str, where), cut=cut)
    return leaf


def _refuse_parts(leaf: torch.Tensor, where: str) -> None:
    """In a region, if its types are followed, refuse a value that may differ between ranks: each has another whole."""
    net = active()
    differs = None if net is None else net.uncovered(leaf, frozenset())
    if differs is not None:
        axes, why = differs
        raise SpecError(
            f"put takes a whole value, the same on all ranks, and what it got in a region may differ along "
            f"{', '.join(axes)}: it {why}",
            got=list(leaf.shape),
            where=where,
            remedy=f'return Sharded(x, P("{axes[0]}")) for what each rank has of its own',
        )


def _refuse_differing(mesh: Mesh, given: Given, places: list[str]) -> None:
    """Refuse values that differ between launched ranks: each would keep its part of another whole."""
    session = mesh.session

    def compare() -> None:
        gathered = session.comm().all_gather_bytes(pickle.dumps(given))
        what = "what put got"
        refuse_differing(gathered, what, lambda number: what + places[number], mesh.describe(), WHOLE)

    launched.call(session, compare, "put")
