"""A call of an `@spmd` function within a region, and its gradient: tensors are cut, joined and declared by its specs.

Invariant: nothing is cut twice over one axis.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .kernels.arguments import check_value
from .kernels.errors import SpecError
from .mesh import trees
from .mesh.launch.alike import given_argument, refuse_differing
from .mesh.program import describe_path
from .mesh.put import specs_for
from .mesh.region import Region
from .mesh.replication.agreement import path_in, refuse_varying
from .mesh.replication.following import follow
from .mesh.replication.net import Net, active, mark, marked, plain_number
from .mesh.replication.reports import OutputMeta
from .mesh.replication.values import Check, check_of
from .mesh.spec import REPLICATED, P, Sharded, is_sharded
from .transforms import all_gather

_SIGNATURES = 256  # of calls in `mesh.run` that are remembered


def call_in_run(name: str, f: Callable, tree: Any, region: Region, check: str, run: Callable[[Check], Any]) -> Any:
    """A call of an `@spmd` function in `mesh.run`, by all ranks with the same arguments.

    The first call of a signature that succeeds is followed: its results may not be what differs between ranks.

    Args:
        name: of the function `f`.
        tree: (args, kwargs).
        check: as given to `spmd`.
        run: makes the call; it is given how much is checked, on all ranks the same.
    """
    calls, same = region.session.calls_in_run, _signature(name, f, tree)
    count = calls.get(same, 0) + 1
    if count == 1 and len(calls) >= _SIGNATURES:
        del calls[next(iter(calls))]  # on all ranks the same
    calls[same] = count
    try:
        looked = check_of(check, count, region.session.layout.size, first=count == 1)
        _check_arguments(name, tree, region, looked)
        with region.session.step():
            if looked is Check.TYPES and active() is None:
                with _following(name, region) as check_types:
                    return check_types(run(looked))
            return run(looked)
    except BaseException:
        if count == 1:
            calls.pop(same, None)  # calls within it may have been more than are remembered
        raise


def check_results(name: str, result: Any, region: Region, looked: Check) -> None:
    """Refuse whole results of a call in `mesh.run` that ranks have differently; see `_check_arguments`."""
    remedy = "psum or pmean it, or give it a spec such as out_specs=P(...); call in mesh.run what @spmd wraps, to have "
    remedy += "each rank's own"
    _check_alike(result, f"the results of {name}", lambda path: f"result {path} of {name}", region, looked, remedy)


def _signature(name: str, f: Callable, tree: Any) -> tuple:
    """What calls in `mesh.run` have in common of which only the first is followed."""
    leaves, treedef = trees.flatten(tree, is_leaf=is_sharded)
    return name, getattr(f, "__code__", None), treedef, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if leaf is None or type(leaf) in (bool, str) else type(leaf)


def _check_arguments(name: str, tree: Any, region: Region, looked: Check) -> None:
    """Refuse arguments that ranks give differently to a call in `mesh.run`, where each gives all of them.

    Args:
        name: of what is called.
        tree: (args, kwargs).
        looked: how much of the call is checked, on all ranks the same.
    """
    remedy = "give every rank the whole value; call in mesh.run what @spmd wraps, to compute with each rank's own"
    _check_alike(
        tree, f"the arguments of {name}", lambda path: f"{describe_path(path)} of {name}", region, looked, remedy
    )


@contextlib.contextmanager
def _following(name: str, region: Region) -> Iterator[Callable[[Any], Any]]:
    """In the block of a call in `mesh.run`, follow what may differ between ranks; gives what refuses such results."""
    net = Net(region.session.layout.axes)

    def checked(result: Any) -> Any:
        leaves, treedef = trees.flatten(result, is_leaf=is_sharded)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                about = OutputMeta(REPLICATED, tuple(leaf.shape), leaf.dtype, varying=net.uncovered(leaf, frozenset()))
                what = f"result {path_in(treedef, index)} of {name}"
                refuse_varying(about, what, region.session.where())
        return trees.unflatten(treedef, [plain_number(leaf) for leaf in leaves])

    with follow(net, None):
        yield checked


def _check_alike(
    tree: Any, all_of_them: str, name_of: Callable[[str], str], region: Region, looked: Check, remedy: str
) -> None:
    leaves, treedef = trees.flatten(tree, is_leaf=is_sharded)
    given: list[Any] = [(trees.keys_text(treedef), None)]

    def called(number: int) -> str:
        return name_of(path_in(treedef, number))

    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            check_value(leaf, functools.partial(called, number), cut=False)
        given.append(given_argument(plain_number(leaf), looked))
    gathered = region.session.comm().all_gather_bytes(pickle.dumps(tuple(given)))
    refuse_differing(gathered, all_of_them, called, region.session.where(), remedy)


def cut_here(leaf: Any, spec: P, region: Region, name: str) -> Any:
    """This rank's part of a tensor that is the same on all ranks; a tensor that is already cut this way stays as it is.

    Which tensors came in cut is known on every call. A tensor computed from one is recognised only on a call in which
    replication is followed, and is refused there. `name` is that of the function which is called.
    """
    where = f"a call of {name} within a region"
    if not isinstance(leaf, torch.Tensor):
        raise SpecError(
            f"an argument cannot be cut by {spec}", got=type(leaf).__name__, expected="a tensor", where=where
        )
    known, net = marked(leaf) or frozenset(), active()
    if spec.axes <= known:
        return leaf
    differs = known if net is None else known | net.of(leaf).axes
    if differs & spec.axes:
        raise SpecError(
            f"an argument cannot be cut by {spec}",
            got=f"a tensor that differs over {sorted(differs)} already",
            where=where,
            remedy="leave @spmd off a function that is given parts, or pass a tensor that is the same on all ranks "
            "of the axes it is cut over",
        )
    region.session.layout.check_shape(tuple(leaf.shape), spec, where=where)
    part = mark(region.session.layout.cut(leaf, spec, region.session.rank), known | spec.axes)
    if net is not None:
        net.override(part, differs | spec.axes, f"an argument of {name}")
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
