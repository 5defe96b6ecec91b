"""`grad` and `value_and_grad`: the derivative of the mean over the mesh of a function's value.

Every rank seeds its backward with its weight (1/N, or its share of a batch's samples), and each argument's gradient
is summed over the axes along which that argument is the same on all ranks. Source: DESIGN section 4, which has the
five numbers that tell this calculus from others.

An outermost gradient runs torch's tape once and packs what comes out into buckets as it comes; one inside another
keeps its graph and sums leaf by leaf with differentiable collectives. Outside any region there is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..kernels.bucket import Buckets, Leaf
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.region import Region, current, digest, is_sharded, mark, marked
from ..mesh.spec import Sharded
from ._collectives import psum

_depth = threading.local()


@contextlib.contextmanager
def _deeper() -> Iterator[None]:
    _depth.value = getattr(_depth, "value", 0) + 1
    try:
        yield
    finally:
        _depth.value -= 1


@dataclasses.dataclass(slots=True)
class _Argument:
    """One leaf of the differentiated arguments.

    Attributes:
        twin: what the function is given in its place; None where there is nothing to differentiate.
        reduce: the axes to sum its gradient over.
    """

    leaf: Any
    twin: torch.Tensor | None = None
    reduce: tuple[str, ...] = ()


def grad(f: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, axes: Any = None) -> Callable:
    """The gradient of `f`'s mean over the mesh, as a function of the same arguments.

    >>> grad(lambda w, x: (w * x).sum())(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
    tensor(8.)

    Args:
        f: returns a scalar tensor, or with `has_aux` (scalar, anything).
        argnums: which positional arguments to differentiate by.
        has_aux: `f` also returns auxiliary values, whose floating-point leaves are averaged as the value is.
        axes: the mesh axes of the mean: None for all, a name, a tuple of names; () is the purely local gradient.

    Returns:
        A function that returns the gradient (a tuple for a tuple `argnums`), with the structure, shapes and dtypes of
        the argument, or (gradient, aux). Frozen, integer and unused leaves get zeros.

    Raises:
        SpecError: `f`'s value is not a scalar, an argument does not exist, an axis does not exist.
    """
    lift = getattr(f, "_spmd_lift", None)
    if lift is not None:
        return lift(functools.partial(grad, argnums=argnums, has_aux=has_aux, axes=axes), argnums, False, has_aux)

    @functools.wraps(f)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        _, found, aux = _differentiate(f, argnums, has_aux, axes, args, kwargs)
        return (found, aux) if has_aux else found

    return gradient


def value_and_grad(
    f: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False, axes: Any = None
) -> Callable:
    """`f`'s mean over the mesh and its gradient, as a function of the same arguments.

    >>> value_and_grad(lambda w, x: (w * x).sum())(torch.tensor(2.0), torch.tensor([3.0, 5.0]))
    (tensor(16.), tensor(8.))

    Args, Raises: as `grad`.

    Returns:
        A function that returns (value, gradient), or ((value, aux), gradient).
    """
    lift = getattr(f, "_spmd_lift", None)
    if lift is not None:
        return lift(
            functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, axes=axes), argnums, True, has_aux
        )

    @functools.wraps(f)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        value, found, aux = _differentiate(f, argnums, has_aux, axes, args, kwargs)
        return ((value, aux), found) if has_aux else (value, found)

    return value_and_gradient


def _differentiate(f: Callable, argnums: Any, has_aux: bool, axes: Any, args: tuple, kwargs: dict) -> tuple:
    name = getattr(f, "__name__", "the function")
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in chosen:
        if not -len(args) <= number < len(args):
            raise SpecError(
                message(
                    f"grad got a bad argnums for {name}",
                    got=argnums,
                    expected=f"below {len(args)} positional arguments",
                )
            )
    chosen = tuple(number % len(args) for number in chosen)
    region = current()
    over = () if region is None else _axes_of_mean(region, axes)
    arguments, treedef = _prepare(tuple(args[number] for number in chosen), region, over)
    nested = getattr(_depth, "value", 0) > 0 or any(
        a.twin is not None and a.leaf.grad_fn is not None for a in arguments
    )
    for argument in arguments:
        if argument.twin is not None:
            # Inside an outer gradient the twin must hang on the outer graph; on its own it is a fresh leaf.
            leaf = argument.leaf
            if nested and leaf.requires_grad:
                argument.twin = leaf.view_as(leaf)
            else:
                argument.twin = leaf.detach().requires_grad_()
            axes_known = marked(leaf)
            if axes_known is not None:
                mark(argument.twin, axes_known)
    twins = trees.unflatten(treedef, [a.leaf if a.twin is None else a.twin for a in arguments])
    twins = trees.map(lambda node: node.local if isinstance(node, Sharded) else node, twins, is_leaf=is_sharded)
    full = list(args)
    for number, twin in zip(chosen, twins, strict=True):
        full[number] = twin
    with _deeper(), torch.enable_grad():
        out = f(*full, **kwargs)
    value, aux = _split(out, has_aux, name)
    solve = _solve_nested if nested else _solve
    value, gradients, aux = solve(value, aux, arguments, region, over)
    gradients = [
        a.leaf.new_zeros(a.leaf.shape) if g is None and isinstance(a.leaf, torch.Tensor) else g
        for a, g in zip(arguments, gradients, strict=True)
    ]
    found = trees.unflatten(treedef, gradients)
    return value, found[0] if isinstance(argnums, int) else found, aux


def _axes_of_mean(region: Region, axes: Any) -> tuple[str, ...]:
    if axes is None:
        return region.session.layout.names
    return region.session.axes(axes if isinstance(axes, str) else tuple(axes), what="grad")


def _split(out: Any, has_aux: bool, name: str) -> tuple[torch.Tensor, Any]:
    value, aux = out, None
    if has_aux:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise SpecError(
                message(
                    f"{name} must return (value, aux) under has_aux=True", got=type(out).__name__, expected="a pair"
                )
            )
        value, aux = out
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise SpecError(
            message(
                f"{name} must return a scalar to be differentiated",
                expected="a floating-point tensor with one element",
                got=got,
                remedy="reduce it with .mean() or .sum(); with auxiliary values use has_aux=True",
            )
        )
    return value.reshape(()), aux


# -- which leaves, and over which axes ------------------------------------------------------------------------------------


def _prepare(chosen: tuple, region: Region | None, over: tuple[str, ...]) -> tuple[list[_Argument], Any]:
    leaves, treedef = trees.flatten(chosen)
    declared: list[Any] = []
    trees.map(
        lambda node: declared.extend(
            [node.spec.axes] * len(trees.leaves(node.local)) if isinstance(node, Sharded) else [None]
        ),
        chosen,
        is_leaf=is_sharded,
    )
    arguments = [_Argument(leaf) for leaf in leaves]
    unknown = []
    for argument, axes in zip(arguments, declared, strict=True):
        leaf = argument.leaf
        frozen = isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad
        if not isinstance(leaf, torch.Tensor) or frozen or not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            continue
        argument.twin = leaf
        axes = marked(leaf) if axes is None else axes
        if axes is None and over:
            unknown.append(argument)
        argument.reduce = tuple(name for name in over if name not in (axes or ()))
    if unknown and region is not None:
        _compare(unknown, region, over)
    return arguments, treedef


def _compare(unknown: list[_Argument], region: Region, over: tuple[str, ...]) -> None:
    """A tensor made in the region, of which nothing is known: along an axis where its bits agree, it is replicated."""
    mine = b"".join(digest(argument.leaf) for argument in unknown)
    for name in over:
        comm = region.session.comm(name)
        if comm.size == 1:
            continue
        everyone = comm.all_gather_bytes(mine)
        for index, argument in enumerate(unknown):
            part = slice(16 * index, 16 * index + 16)
            if any(other[part] != mine[part] for other in everyone):
                argument.reduce = tuple(axis for axis in argument.reduce if axis != name)


# -- the outermost gradient -----------------------------------------------------------------------------------------------------


def _solve(
    value: torch.Tensor, aux: Any, arguments: list[_Argument], region: Region | None, over: tuple[str, ...]
) -> tuple:
    weight, counts = (1.0, True) if region is None else region.weight(over)
    aux_leaves, aux_def = trees.flatten(aux)
    sums = _Sums(region)
    places: list[tuple[_Argument, Any]] = []
    for argument in arguments:
        if argument.twin is not None:
            places.append((argument, sums.add(argument.twin, argument.reduce)))
    value_place = sums.add(value, over)
    aux_places = {
        index: sums.add(leaf, over)
        for index, leaf in enumerate(aux_leaves)
        if _is_averaged(leaf) and region is not None
    }
    sums.open()
    if region is not None and over:
        _check_aux(aux_leaves, region, over)
    with torch.no_grad():
        if counts:
            sums.fill(value_place, value.detach() * weight)
            for index, place in aux_places.items():
                sums.fill(place, aux_leaves[index].detach() * weight)
    if value.requires_grad and places:
        handles = []
        for argument, place in places:
            assert argument.twin is not None
            handles.append(argument.twin.register_post_accumulate_grad_hook(_Hook(sums, place, counts)))
        torch.autograd.backward(value, torch.full_like(value, weight), inputs=[a.twin for a, _ in places])  # type: ignore[misc]
        for handle in handles:
            handle.remove()
    found = sums.finish()
    results = {id(argument): found[place] for argument, place in places}
    gradients = []
    for argument in arguments:
        result = results.get(id(argument))
        if result is not None:
            axes = marked(argument.leaf)
            mark(result, axes if axes is not None else _varying(region, argument))
        gradients.append(result)
    for index, leaf in enumerate(aux_leaves):
        if index in aux_places:
            aux_leaves[index] = found[aux_places[index]]
        elif isinstance(leaf, torch.Tensor):
            aux_leaves[index] = leaf.detach()
    mean = found[value_place]
    if region is not None:
        mark(mean, frozenset(region.session.layout.names) - set(over))
    return mean, gradients, trees.unflatten(aux_def, aux_leaves)


def _varying(region: Region | None, argument: _Argument) -> frozenset[str]:
    return frozenset() if region is None else frozenset(region.session.layout.names) - set(argument.reduce)


class _Hook:
    """Takes a leaf's gradient as soon as the backward pass has it."""

    __slots__ = ("counts", "place", "sums")

    def __init__(self, sums: _Sums, place: tuple, counts: bool):
        self.sums, self.place, self.counts = sums, place, counts

    def __call__(self, twin: torch.Tensor) -> None:
        gradient, twin.grad = twin.grad, None
        if self.counts and gradient is not None:
            self.sums.fill(self.place, gradient.to_dense() if gradient.is_sparse else gradient)


class _Sums:
    """Sums of many leaves over the axes that each asks for, in one set of buckets for each set of axes."""

    def __init__(self, region: Region | None):
        self._region = region
        self._groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
        self._open: dict[tuple[str, ...], Any] = {}
        self._local: dict[tuple, torch.Tensor] = {}

    def add(self, like: torch.Tensor, axes: tuple[str, ...]) -> tuple:
        """Announce a leaf; its place."""
        members = self._groups.setdefault(self._normal(axes), [])
        members.append(like)
        return self._normal(axes), len(members) - 1

    def _normal(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Without axes of size one: nothing to sum there."""
        sizes = {} if self._region is None else self._region.session.layout.axes
        return tuple(name for name in sizes if name in axes and sizes[name] > 1)

    def open(self) -> None:
        for axes, members in self._groups.items():
            if axes and self._region is not None:
                self._open[axes] = Buckets(
                    self._region.session.comm(axes, channel="buckets"),
                    [Leaf.of(member) for member in members],
                    bucket_bytes=int(self._region.bucket_mb * (1 << 20)),
                    wire_dtype=self._region.wire_dtype,
                )

    def fill(self, place: tuple, value: torch.Tensor) -> None:
        axes, index = place
        if axes:
            self._open[axes].fill(index, value)
        else:
            self._local[place] = value

    def finish(self) -> dict[tuple, torch.Tensor]:
        found = {}
        for axes, members in self._groups.items():
            if axes:
                for index, result in enumerate(self._open[axes].finish()):
                    found[axes, index] = result
            else:
                for index, member in enumerate(members):
                    local = self._local.get((axes, index))
                    found[axes, index] = torch.zeros_like(member).detach() if local is None else local
        return found


def _is_averaged(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def _check_aux(leaves: list[Any], region: Region, over: tuple[str, ...]) -> None:
    """Leaves of aux that are not averaged must be the same on all ranks of the mean."""
    rest = [leaf for leaf in leaves if not _is_averaged(leaf) and leaf is not None]
    comm = region.session.comm(over)
    if not rest or comm.size == 1:
        return
    digests = b"".join(digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode() for leaf in rest)
    everyone = comm.all_gather_bytes(digests)
    if any(other != digests for other in everyone):
        raise SpecError(
            message(
                "auxiliary values that are not floating-point differ between ranks and cannot be averaged",
                got=", ".join(
                    f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
                    if isinstance(leaf, torch.Tensor)
                    else repr(leaf)
                    for leaf in rest
                ),
                where=region.session.where(),
                remedy="return them as floats, or psum them first",
            )
        )


# -- a gradient inside a gradient ---------------------------------------------------------------------------------------------------


def _solve_nested(
    value: torch.Tensor, aux: Any, arguments: list[_Argument], region: Region | None, over: tuple[str, ...]
) -> tuple:
    weight, counts = (1.0, True) if region is None else region.weight(over)
    twins = [argument.twin for argument in arguments if argument.twin is not None]
    if value.requires_grad and twins:
        found = torch.autograd.grad(
            value, twins, torch.full_like(value, weight), create_graph=True, allow_unused=True, materialize_grads=True
        )
    else:
        found = tuple(torch.zeros_like(twin) for twin in twins)
    remaining = iter(found)
    gradients: list[Any] = []
    for argument in arguments:
        if argument.twin is None:
            gradients.append(None)
            continue
        gradient = next(remaining)
        if not counts:
            gradient = torch.zeros_like(gradient)
        gradient = _sum_over(gradient, argument.reduce)
        axes = marked(argument.leaf)
        gradients.append(mark(gradient, axes if axes is not None else _varying(region, argument)))

    def average(leaf: Any) -> Any:
        if region is None or not _is_averaged(leaf):
            return leaf
        return _sum_over(leaf * weight if counts else torch.zeros_like(leaf), over)

    if region is not None and over:
        _check_aux(trees.leaves(aux), region, over)
    return average(value), gradients, trees.map(average, aux)


def _sum_over(x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    return psum(x, axes) if axes else x
