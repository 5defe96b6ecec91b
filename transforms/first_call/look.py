"""What is looked at when a function is first differentiated in a region: mistakes that would go on without a word.

A loss that is a sum, per-sample aux, parameters that the function has besides its arguments. The tape and the shapes
raise a suspicion; where they can't prove it, the function is evaluated again, on every sample twice (`Repeated`).
Invariant: functions that communicate are evaluated once only, or ranks would wait for each other.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...kernels import torch_private
from ...kernels.errors import SpecError, message
from ...kernels.torch_private import Node
from ...mesh import trees
from ...mesh.purity.captured import NOT_REENTRANT
from ...mesh.put import as_tensor
from ...mesh.rank.references import content_of
from ...mesh.replication.net import differs_over
from .._arguments import Argument
from .._auxiliary import Auxiliary
from .._call import Call, Output
from .._mean_of import warn_of_weights
from .repeated import Repeated, holding

_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_MOST = 4096  # functions that are remembered of those that were looked at
_looked_at: set[Any] = set()  # in regions that have no signature: of `mesh.run`


def look(
    call: Call, args: Any, kwargs: Any, out: Output, aux: Auxiliary, batch: Sequence[Any], communicates: bool
) -> None:
    """Look at what a function returned, unless one with the same code has been looked at in calls of this signature.

    Args:
        args, kwargs: what it was called with.
        batch: those of their leaves that have a row for each sample.

    Raises:
        SpecError: it captures parameters, its value is a sum over samples, a leaf of aux has a row for each, or it is
            given a part of the samples, and such parts are not the same share of them on all ranks.
    """
    if call.region is None:
        return
    looked_at = call.region.looked_at if call.region.pure else _looked_at
    sizes = call.region.session.layout.axes
    split = {name for name in call.plan.samples if name in call.over and sizes[name] > 1}
    lookup: Any = None
    if not batch and not call.nested and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in aux.leaves):
        call.region.looks += 1
        # What is cut of the arguments follows from the signature of the call, and is looked for once.
        lookup = (call.region.looks, *_code(call.function), call.over, len(aux.leaves))
        if lookup in call.region.looked_at:
            return
        batch, split = _cut_by_specs(call, args, kwargs, sizes)
    key = (*_code(call.function), call.nested, call.over, len(aux.leaves), *call.plan.samples.items(), *sorted(split))
    if key in looked_at:
        call.region.looked_at.add(lookup)
        return
    if not call.nested:
        _look_at_tape(call, out, bool(split) or call.plan.virtual is not None)
        if split and call.plan.samples and out.count is None and call.plan.virtual is None:
            _check_parts(call, args, kwargs, split)
    if split and batch and batch[0].shape[0] and not communicates:
        _look_at_samples(call, args, kwargs, out, aux, batch, split)
    if len(looked_at) >= _MOST:
        looked_at.clear()
    looked_at.add(key)


def _look_at_samples(
    call: Call, args: Any, kwargs: Any, out: Output, aux: Auxiliary, batch: Sequence[Tensor], split: set[str]
) -> None:
    rows = batch[0].shape[0]
    with_rows = [] if call.plan.virtual is not None else [a for a in call.arguments if _has_rows(a, rows)]
    own = [argument.leaf for argument in with_rows if not split & set(argument.reduce)]
    alike = [a.leaf for a in with_rows if split & set(a.reduce) and differs_over(a.leaf) is None]
    again = Repeated(call, args, kwargs, [*batch, *own], split)
    may_be_sum = bool(call.plan.samples) and out.count is None and _may_be_sum(out.value.grad_fn, rows)
    has_rows = not call.nested and _may_have_rows(aux, rows, split)
    once = again.times(1) if may_be_sum or has_rows or alike else None
    twice = again.times(2) if once is not None else None
    if alike and once is not None and twice is None and again.times(2, alike) is not None:
        raise _made_alike(call, alike[0], rows, split)
    if may_be_sum and once is not None and twice is not None and _moves(once, twice):
        _check_sum(call, once, twice, again.times(3), by_samples=bool(own))
    if has_rows and twice is not None:
        _check_rows(call, out, aux, twice, split)


def _has_rows(argument: Argument, rows: int) -> bool:
    return argument.primal is not None and argument.leaf.dim() > 0 and argument.leaf.shape[0] == rows


def _made_alike(call: Call, leaf: Tensor, rows: int, split: set[str]) -> SpecError:
    return SpecError(
        message(
            f"{call.name} is differentiated by a tensor with a row for each sample that was made in the step and has "
            "the same values on all ranks, so that the gradients of their samples would be summed",
            got=f"shape {list(leaf.shape)}, for {rows} samples on this rank",
            where="" if call.region is None else call.region.session.where(),
            remedy=f'say that each rank has rows of its own: grad(f)(Sharded(tensor, P("{min(split)}"))).local',
        )
    )


def _code(function: Any) -> tuple[Any, ...]:
    """What functions have in common that compute alike: their code, and the words that they were given."""
    words: list[Any] = []
    while isinstance(function, functools.partial):
        words += [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(function, types.FunctionType):
        held = [content_of(cell) for cell in function.__closure__ or ()]
        words += [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        words.append(function)
    words = [getattr(word, "reduction", word) for word in words]  # of a module like nn.MSELoss
    words = [getattr(word, "__code__", None) if callable(word) else word for word in words]
    constants = tuple(word for word in words if isinstance(word, str | bool | types.CodeType))
    return getattr(function, "__code__", type(function)), constants


# -- the tape ----------------------------------------------------------------------------------------------------------


def _look_at_tape(call: Call, out: Output, has_part: bool) -> None:
    given = {id(argument.primal) for argument in call.arguments}
    held = frozenset() if call.region is None else call.region.captured
    for node in _nodes(out.value.grad_fn):
        name = type(node).__name__
        if name == "CheckpointFunctionBackward":
            raise SpecError(
                message(
                    f"{call.name} uses reentrant activation checkpointing, which can't be differentiated by arguments",
                    remedy=NOT_REENTRANT,
                )
            )
        if has_part and name in _EMBEDDINGS and torch_private.saved(node, "scale_grad_by_freq"):
            raise SpecError(
                message(
                    f"{call.name} scales an embedding's gradient by how often an index is in the batch",
                    got="a part of the batch on each rank, or in each virtual shard",
                    remedy="make the embedding with scale_grad_by_freq=False, and weigh samples in the loss",
                )
            )
        if has_part and call.plan.samples and out.count is None:
            warn_of_weights(call.name, node)
        leaf = getattr(node, "variable", None) if name == "AccumulateGrad" else None
        if leaf is None or id(leaf) in given or not call.plan.samples:  # else in a train step
            continue
        if isinstance(leaf, nn.Parameter) or id(leaf) in held:
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor with requires_grad=True"
            raise captured(call, f"a {kind} of shape {list(leaf.shape)} that is none of its arguments")


def captured(call: Call, got: str) -> SpecError:
    """The error for a function that computes with parameters of its own."""
    return SpecError(
        message(
            f"{call.name} computes with parameters that it captures, which no gradient is taken by",
            got=got,
            expected="all that is trained as arguments",
            remedy="apply, params = functional(model), and apply(params, x) instead of model(x); what is not to be "
            "trained has requires_grad_(False), or is called under torch.no_grad()",
        )
    )


def check_trains(call: Call, differentiable: bool, gradients: Sequence[Tensor]) -> None:
    """Refuse gradients that are zero for every leaf, where this rank's value depends on none of them.

    Args:
        differentiable: whether the value depends on anything that requires gradients.
    """
    within_step = call.region is not None and bool(call.plan.samples) and not call.plan.without_samples
    if gradients and (within_step or differentiable) and not any(bool(g.any()) for g in gradients):
        raise captured(
            call,
            "gradients that are zero for every leaf: its value depends on none of them, or was cut off from them by "
            "detach() or no_grad()",
        )


def _nodes(end: Node | None) -> Iterator[Node]:
    left, seen = [end], {end}
    while left:
        node = left.pop()
        if node is None:
            continue
        yield node
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                left.append(below)


def _may_be_sum(end: Node | None, rows: int) -> bool:
    """Whether something that may have so many rows is added up anywhere on the way to a value."""
    for node in _nodes(end):
        name = type(node).__name__
        if name in ("SumBackward0", "SumBackward1"):
            if any(size and size % rows == 0 for size in torch_private.saved(node, "self_sym_sizes")):
                return True
        elif name in _ADD_UP or (("Loss" in name or "CrossEntropy" in name) and torch_private.sums_up(node)):
            return True
    return False


_ADD_UP = {"DotBackward0", "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1"}


def _may_have_rows(aux: Auxiliary, rows: int, split: set[str]) -> bool:
    """Whether a leaf of aux may have something for each of so many samples, going by its shape."""
    if rows > 1 and aux.leaves and len(aux.leaves) % rows == 0:
        return True
    return any(
        isinstance(leaf, Tensor)
        and (axes is None or split & set(axes))
        and any(size == rows or (rows > 1 and size and size % rows == 0) for size in leaf.shape)
        for leaf, axes in zip(aux.leaves, aux.over, strict=True)
    )


def _check_parts(call: Call, args: Any, kwargs: Any, split: set[str]) -> None:
    """Refuse a chunk of the batch, for accumulation, where ranks or chunks differ in their number of samples."""
    assert call.region is not None
    sizes, parts = call.region.session.layout.axes, list[Tensor]()
    rows = {(torch_private.storage(leaf), leaf.shape[1:]) for leaf in call.plan.batch}

    def look_at(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and (torch_private.storage(leaf), leaf.shape[1:]) in rows:
            parts.append(leaf)
        return leaf

    trees.map(look_at, (tuple(args), kwargs))
    holding(call.function, look_at)
    for name in split:
        here, total = call.plan.samples[name]
        for leaf in parts:
            if 0 < leaf.shape[0] < here and (total % sizes[name] or here % leaf.shape[0]):
                raise SpecError(
                    message(
                        f"{call.name} is given a part of the batch in a step whose parts are not equal, so that the "
                        "mean of their means is not that of the whole batch",
                        got=f"{leaf.shape[0]} of {here} samples on this rank, {total} on {sizes[name]} ranks",
                        where=call.region.session.where(),
                        remedy="accumulate with data_parallel(shards=) and one value_and_grad over the whole batch, "
                        "return mean_of(total, count), or have equal parts (Loader(drop_last=True))",
                    )
                )


# -- the function again, with every sample several times ---------------------------------------------------------------


def _cut_by_specs(call: Call, args: Any, kwargs: Any, sizes: Mapping[str, int]) -> tuple[list[Tensor], set[str]]:
    """What in_specs cut into rows, of all that a function is given or holds; and the axes of the mean that it is over.

    Of those as long as the first: others may be anything, a sharded parameter for instance.
    """
    found: list[Tensor] = []
    axes: set[str] = set()

    def look_at(leaf: Any) -> Any:
        spec = getattr(leaf, "_spmd_spec", None)
        over = (
            {name for name in spec.dim_axes(0) if name in call.over and sizes[name] > 1} if spec is not None else set()
        )
        if over and isinstance(leaf, Tensor) and (not found or leaf.shape[0] == found[0].shape[0]):
            found.append(leaf)
            axes.update(over)
        return leaf

    trees.map(look_at, (tuple(args), kwargs))
    holding(call.function, look_at)
    return found, axes


def _moves(once: Output, twice: Output) -> bool:
    """Whether a value is another one for every sample twice, by more than rounding makes it."""
    value = float(once.value)
    return abs(float(twice.value) - value) > 1e-3 * abs(value)


def _check_sum(call: Call, once: Output, twice: Output, thrice: Output | None, by_samples: bool) -> None:
    """Refuse a value to which every sample adds: it grows by as much from once to twice as from twice to thrice."""
    if thrice is None:
        return
    first, second, third = float(once.value), float(twice.value), float(thrice.value)
    if abs((third - second) - (second - first)) <= 1e-3 * abs(second - first):
        raise SpecError(
            message(
                f"{call.name} returns a sum over its samples, and the mean over ranks of sums is not that of the "
                "whole batch",
                got=f"{first:.6g}, and {second:.6g} for every sample twice",
                where="" if call.region is None else call.region.session.where(),
                remedy="return the mean over samples, or mean_of(total, count)"
                + ("; for the gradient of each sample by itself take grad(f, axes=())" if by_samples else ""),
            )
        )


def _check_rows(call: Call, out: Output, aux: Auxiliary, twice: Output, split: set[str]) -> None:
    """Refuse leaves of aux that have more for every sample twice, but for those that say whose rows they are."""
    where = "" if call.region is None else call.region.session.where()
    again, paths = [as_tensor(leaf) for leaf in trees.leaves(twice.aux)], trees.paths(out.aux)
    remedy = f'return Sharded(value, P("{min(split)}")), whose rows stay those of the samples, or reduce it, '
    if len(again) != len(aux.leaves):
        raise SpecError(
            message(
                f"aux of {call.name} has a leaf for each sample, and would be averaged over different samples",
                got=f"{len(aux.leaves)} leaves, and {len(again)} for every sample twice",
                where=where,
                remedy=f"{remedy}value.mean() for instance",
            )
        )
    for leaf, more, axes, path in zip(aux.leaves, again, aux.over, paths, strict=True):
        both = isinstance(leaf, Tensor) and isinstance(more, Tensor) and leaf.shape != more.shape
        if both and (axes is None or split & set(axes)):
            raise SpecError(
                message(
                    f"aux{path} of {call.name} has a row for each sample, and would be averaged over different samples",
                    got=f"shape {list(leaf.shape)}, and {list(more.shape)} for every sample twice",
                    where=where,
                    remedy=f"{remedy}value.mean(0) for instance",
                )
            )
