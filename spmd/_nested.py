"""A call of an `@spmd` function within a region, and its gradient: tensors are cut, joined and declared by its specs.

Invariant: nothing is cut twice over one axis.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import torch

from .kernels.arguments import check_value
from .kernels.errors import SpecError, message
from .mesh import trees
from .mesh.agreement import path_in
from .mesh.launch.alike import given_argument, refuse_differing
from .mesh.program import describe_path
from .mesh.put import specs_for
from .mesh.region import Region
from .mesh.replication.net import active, mark, marked
from .mesh.replication.values import Check
from .mesh.spec import P, Sharded, is_sharded
from .transforms import all_gather


def check_alike(name: str, tree: Any, region: Region, looked: Check) -> None:
    """Refuse arguments that ranks give differently to a call in `mesh.run`, where each gives all of them.

    Args:
        name: of what is called.
        tree: (args, kwargs).
        looked: how much of the call is checked, on all ranks the same.
    """
    leaves, treedef = trees.flatten(tree, is_leaf=is_sharded)
    given: list[Any] = [(trees.keys_text(treedef), None)]

    def called(number: int) -> str:
        return f"{describe_path(path_in(treedef, number))} of {name}"

    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            check_value(leaf, functools.partial(called, number), cut=False)
        given.append(given_argument(leaf, looked))
    refuse_differing(
        region.session.comm().all_gather_bytes(pickle.dumps(tuple(given))),
        f"the arguments of {name}",
        called,
        region.session.where(),
        "give every rank the whole value; call in mesh.run what @spmd wraps, to compute with each rank's own",
    )


def cut_here(leaf: Any, spec: P, region: Region, where: str) -> Any:
    """This rank's part of a tensor that is the same on all ranks; a tensor that is already cut this way stays as it is.

    Which tensors came in cut is known on every call. A tensor computed from one is recognised only on a call in which
    replication is followed, and is refused there.
    """
    if not isinstance(leaf, torch.Tensor):
        raise SpecError(
            message(f"an argument cannot be cut by {spec}", got=type(leaf).__name__, expected="a tensor", where=where)
        )
    known, net = marked(leaf) or frozenset(), active()
    if spec.axes <= known:
        return leaf
    differs = known if net is None else known | net.of(leaf).axes
    if differs & spec.axes:
        raise SpecError(
            message(
                f"an argument cannot be cut by {spec}",
                got=f"a tensor that differs over {sorted(differs)} already",
                where=where,
                remedy="leave @spmd off a function that is given parts, or pass a tensor that is the same on all ranks "
                "of the axes it is cut over",
            )
        )
    region.session.layout.check_shape(tuple(leaf.shape), spec, where=where)
    part = mark(region.session.layout.cut(leaf, spec, region.session.rank), known | spec.axes)
    if net is not None:
        net.override(part, differs | spec.axes, "")
    return part


def join_here(leaf: Any, spec: P, shared: set[str]) -> Any:
    """Gather a result along the axes of its spec, except those that are shared with the caller."""
    for dim in range(len(spec.entries)):
        axes = tuple(name for name in spec.dim_axes(dim) if name not in shared)
        if axes:
            leaf = all_gather(leaf, axes, dim=dim, tiled=True)
    return leaf


def declared_like(gradient: Any, argument: Any) -> Any:
    """A gradient's tree with the specs of its argument's leaves declared."""

    def one(leaf: Any, like: Any) -> Any:
        spec = getattr(like, "_spmd_spec", None)
        return Sharded(leaf, spec) if spec is not None and spec.entries else leaf

    return trees.map(one, gradient, argument)


def declared_aux(result: Any, out_specs: Any, what: str) -> Any:
    """(value, aux) with the specs of aux declared, so that a sharded aux is not averaged over ranks."""
    if out_specs is None or not isinstance(result, tuple) or len(result) != 2:
        return result
    specs = iter(specs_for(out_specs, result, what)[len(trees.leaves(result[0])) :])

    def one(node: Any) -> Any:
        own = [next(specs) for _ in trees.leaves(node)]
        cut = isinstance(node, torch.Tensor) and own[0] is not None and own[0].entries
        return Sharded(node, own[0]) if cut else node

    return result[0], trees.map(one, result[1], is_leaf=is_sharded)
