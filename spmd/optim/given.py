"""A step: every parameter with its gradient, checked; how they are divided; and the engines' work on each part.

Checks and division depend on the leaves' shapes, dtypes and specs, not on their values, so they are worked out once for
each kind of step. Invariant: steps of one kind are checked alike and divided alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import optree
from torch import Tensor

from .. import transforms
from ..kernels.errors import SpecError
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.region import current
from ..mesh.replication.net import all_differ_over, differs_over, mark_all
from ..mesh.spec import P
from ..mesh.strides import is_frozen
from . import groups as grouping
from .engine import Engine, update
from .leaves import Leaf, State, declared_as
from .parts import Parts, divide
from .slices import Axis, Slice

KINDS = 16  # of steps of one optimizer that are remembered
_kind_of_leaf = attrgetter("__class__", "shape", "dtype", "device", "layout", "requires_grad")


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """For one kind of step: which leaves are stepped, the slices they lie in, and how the new parameters are cut.

    Attributes:
        specs, axes: how the new parameters are cut, and the axes over which they differ; None where that isn't known.
        label: the parameters' keys, compared between ranks that update a slice each.
    """

    indexes: tuple[int, ...]
    slices: tuple[Slice, ...]
    specs: tuple[P | None, ...]
    axes: tuple[frozenset[str] | None, ...]
    label: str


class Kinds:
    """What was worked out for each kind of step in this process."""

    def __init__(self) -> None:
        self.known: dict[Any, Known] = {}

    def __reduce__(self) -> Any:
        return Kinds, ()

    def note(self, kind: Any, known: Known) -> None:
        if len(self.known) >= KINDS:
            del self.known[next(iter(self.known))]
        self.known[kind] = known


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """What one step works on.

    Attributes:
        params, grads: of the leaves that are trained.
    """

    params: list[Tensor]
    grads: list[Tensor | None]
    parts: Parts
    known: Known

    def mark(self, new_params: Sequence[Tensor]) -> None:
        """Carry over how parameters are cut, and along which axes they differ, for `value_and_grad`.

        A new parameter differs where the old one or its gradient did. A gradient that the step itself changed carries
        no mark, and neither does anything it is added to.
        """
        known = self.known
        for new, spec in zip(new_params, known.specs, strict=True):
            if spec is not None:
                new._spmd_spec = spec  # type: ignore[attr-defined]
        mark_all(new_params, known.axes)

    def update(
        self, engines: Sequence[Engine], hypers: Sequence[Mapping[str, Any]], scale: Tensor | None
    ) -> tuple[list[Tensor], dict[str, State], list[dict[str, Any]]]:
        """The new parameters, state, and hyper-parameters of each group; to be called without gradients.

        A leaf without gradient is stepped whole, and stays.

        Args:
            engines, hypers: of each group.
            scale: what gradients are multiplied by, if anything.
        """
        new_params = list(self.params)
        new_state: dict[str, State] = {}
        new_hypers = [dict(hyper) for hyper in hypers]
        states = self.parts.states
        if self.parts.whole or not self.params:
            members = [[one for one in self.parts.whole if one[1].group == group] for group in range(len(engines))]
            groups = [group for group, some in enumerate(members) if some or not self.params]
            leaves = [[leaf for _, leaf in members[group]] for group in groups]
            given = [(some, [states[leaf.path] for leaf in some]) for some in leaves]
            done = update([engines[group] for group in groups], given, [hypers[group] for group in groups], scale)
            for group, (stepped, after, new_hypers[group]) in zip(groups, done, strict=True):
                for (index, leaf), param, own in zip(members[group], stepped, after, strict=True):
                    new_params[index] = param
                    if own:
                        new_state[leaf.path] = declared_as(leaf, own)
        for part in self.parts.slices:
            params = [self.params[i] for i in part.members]
            grads: list[Any] = [self.grads[i] for i in part.members]
            stepped, own, new_hypers[part.group] = part.step(
                engines[part.group], params, grads, states[part.key], hypers[part.group], scale
            )
            for index, param in zip(part.members, stepped, strict=True):
                new_params[index] = param
            if own:
                new_state[part.key] = part.declare(own)
        return new_params, new_state, new_hypers


def settle(
    kinds: Kinds,
    shard: Axis | None,
    groups: tuple[Any, ...],
    tree: tuple[list[Any], optree.PyTreeSpec],
    grads: Any,
    state: Mapping[str, State],
) -> Given:
    """Check a step and divide it, or look up how that was done.

    Args:
        tree: the parameters, flattened.

    Raises:
        SpecError: they do not fit one another.
    """
    leaves, treedef = tree
    found = _matched(treedef, grads)
    kind = None if groups else _kind(leaves, treedef, found, state)
    known = None if kind is None else kinds.known.get(kind)
    if known is not None and not _has_arrays([state[part.key] for part in known.slices]):
        parts = Parts(known.slices, (), {part.key: part.localize(state[part.key]) for part in known.slices}, True)
    else:
        _refuse_arrays(leaves, treedef, found, state)
        numbers = grouping.numbers_of(groups, trees.unflatten(treedef, leaves))
        checked = [
            _checked(path, leaf, grad, group)
            for path, leaf, grad, group in zip(trees.places(treedef), leaves, found, numbers, strict=True)
        ]
        given = [leaf for leaf in checked if leaf is not None]
        parts = divide(shard, given, state)
        known = Known(
            tuple(index for index, leaf in enumerate(checked) if leaf is not None),
            parts.slices,
            tuple(getattr(leaf.param, "_spmd_spec", None) for leaf in given),
            tuple(
                None if leaf.axes is None or leaf.grad_axes is None else leaf.axes | leaf.grad_axes for leaf in given
            ),
            f"of {trees.keys_text(treedef)}",
        )
        if kind is not None and parts.are_kept:
            kinds.note(kind, known)
    return Given([leaves[index] for index in known.indexes], [found[index] for index in known.indexes], parts, known)


def _kind(leaves: list[Any], treedef: optree.PyTreeSpec, grads: list[Any], state: Mapping[str, State]) -> Any:
    """What must be equal for a later step to be of the same kind; None if that can't be told."""
    region = current()
    try:
        kinds = tuple(map(_kind_of_leaf, leaves)), tuple(map(_kind_of_leaf, grads))
        axes = all_differ_over([*leaves, *grads])
    except AttributeError:  # a leaf that is no tensor
        return None
    if region is None or axes is None:
        return None
    session = region.session
    specs = tuple([getattr(leaf, "_spmd_spec", None) for leaf in leaves])
    virtual = transforms.current_plan().virtual is None
    return treedef, kinds, specs, axes, tuple(state), session.layout, session.rank, session.backend, virtual


class HasArrays(Exception):
    """A step of a rank, of Arrays that it captures: their shards are to be stepped."""


def _has_arrays(tree: Any) -> bool:
    return any(isinstance(value, Array) for value in trees.leaves(tree))


def _refuse_arrays(leaves: list[Any], treedef: optree.PyTreeSpec, grads: list[Any], state: Mapping[str, Any]) -> None:
    """Refuse Arrays, which live on the ranks, among parameters, gradients and state."""
    if not _has_arrays((leaves, grads, state)):
        return
    if current() is not None:
        raise HasArrays
    named = [(f"params{path}", leaf) for path, leaf in zip(trees.places(treedef), leaves, strict=True)]
    named += [(f"grads{path}", grad) for path, grad in zip(trees.places(treedef), grads, strict=True)]
    named += zip((f"opt_state['state']{path}" for path in trees.paths(state)), trees.leaves(state), strict=True)
    for name, value in named:
        if isinstance(value, Array):
            raise SpecError(
                "opt.step works on a rank's tensors",
                got=f"an Array, {name}",
                remedy="step in an @spmd function, with params, grads and opt_state as its arguments; or fetch() "
                "all three, and step with plain tensors",
            )


def _checked(path: str, leaf: Any, grad: Any, group: int) -> Leaf | None:
    """A leaf to be stepped; None for one that is not trained."""
    if not is_trainable(leaf):
        return None
    _check_grad(path, leaf, grad)
    return Leaf(path, leaf, grad, group, differs_over(leaf), differs_over(grad))


def is_trainable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not is_frozen(leaf) and (leaf.is_floating_point() or leaf.is_complex())


def _matched(treedef: optree.PyTreeSpec, grads: Any) -> list[Any]:
    """The gradients, in the order of the parameters."""
    try:
        return treedef.flatten_up_to(grads)
    except (ValueError, TypeError) as error:
        expected, got = trees.places(treedef), trees.paths(grads)
        missing = next((path for path in expected if path not in got), None)
        extra = next((path for path in got if path not in expected), None)
        problem = (
            f"grads{missing} is missing"
            if missing is not None
            else f"grads{extra} belongs to no parameter"
            if extra is not None
            else str(error)
        )
        raise SpecError(
            f"grads has another structure than params: {problem}",
            got=f"a {type(grads).__name__} of {len(got)} leaves",
            expected=f"{len(expected)} leaves",
            remedy="pass the grads of loss, grads = value_and_grad(loss_fn)(params, batch), in this order",
        ) from None


def _check_grad(path: str, param: Tensor, grad: Any) -> None:
    if grad is None:
        return
    if not isinstance(grad, Tensor):
        expected = "a tensor like its parameter, or None"
        raise SpecError(f"grads{path} is no tensor", got=type(grad).__name__, expected=expected)
    if grad.shape != param.shape or grad.dtype != param.dtype or grad.device != param.device:
        got, expected = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (grad, param))
        raise SpecError(f"grads{path} does not fit its parameter", got=got, expected=expected)
