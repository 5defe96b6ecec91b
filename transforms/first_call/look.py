"""Checks that run when a function is first differentiated in a region, for mistakes with silently wrong results.

This file checks for captured parameters and for chunks of the batch; `samples` checks what depends on the samples.
Invariant: functions that communicate are evaluated only once, or ranks would wait for each other.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...kernels import torch_private
from ...kernels.callsite import warn
from ...kernels.errors import SpecError
from ...kernels.torch_private import hooks_gradient, saved
from ...mesh.pickling.references import SCALARS, content_of
from ...mesh.purity.captured import NOT_REENTRANT
from ...mesh.spec import REPLICATED
from .._auxiliary import Auxiliary
from .._call import Call, Output
from .._mean_of import warn_of_weights
from .given import warn_of_chosen, warn_of_single_samples, warn_of_statistics
from .repeated import given_to
from .samples import look_at_samples, may_have_rows, nodes

_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_MOST = 4096  # how many functions are remembered as checked
_looked_at: set[Any] = set()  # for regions without a signature, those of `mesh.run`
_SIGNATURES = 8  # how many signatures of a function are judged; every batch may have its own
_ALIKE = 64  # and how many of functions with the same code, which may be defined anew for each call
_judged: collections.Counter[Any] = collections.Counter()  # by code
# By the body of a region, so that what only the captured values distinguish is judged, too.
_judged_in: weakref.WeakKeyDictionary[Any, collections.Counter[Any]] = weakref.WeakKeyDictionary()
_structures: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def look(call: Call, out: Output, aux: Auxiliary, batch: Sequence[Any], *, communicates: bool, hooked: bool) -> None:
    """Check what a function returned, unless a function with the same code was checked at this signature.

    The dimensions of aux count as part of the signature, and whether it is as long as the samples are many: it may have
    a row for each of them in some calls only. Hooks of parameters, which a function may register at a later call only,
    are looked for until some are found. A value that is not finite can't be judged, and the next ones are.

    Args:
        batch: those of its arguments' leaves that have a row for each sample.
        hooked: whether the function registered hooks.

    Raises:
        SpecError: the function captures parameters, its value is a sum over samples, a leaf of aux has a row for each
            sample, or it is given a chunk of the samples that is not the same share of them on all ranks.
    """
    if call.region is None:
        return
    looked_at = call.region.noted.looked_at if call.region.pure else _looked_at
    sizes = call.region.session.layout.axes
    split = {name for name in call.plan.samples if name in call.over and _is_split(call, name, sizes[name])}
    shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in aux.leaves)
    code = _code(call.function)
    key = (*code, call.nested, call.over, *call.plan.samples.items())
    lookup: Any = None
    if not batch and not call.nested and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in aux.leaves):
        call.region.looks += 1
        # Which arguments are cut follows from the signature of the call, so it is determined once.
        lookup = (call.region.looks, *key, shapes)
        if lookup in call.region.noted.looked_at and not hooked:
            return
        batch, split = _cut_by_specs(call, sizes)
    rows = batch[0].shape[0] if batch and (split or not call.nested) else 0
    dims = tuple(None if shape is None else len(shape) for shape in shapes)
    key = (*key, dims, rows > 0 and may_have_rows(aux, rows, split), *sorted(split))
    with_hooks = ("hooks", *key)
    if hooked and not call.nested and with_hooks not in looked_at and _look_at_hooks(call, split):
        looked_at.add(with_hooks)
    if key in looked_at:
        call.region.noted.note_checked(lookup)
        return
    was_warned, is_judged = _look_at_given(call, out, split, rows), False
    if split and rows and not communicates:
        is_judged = not was_warned and _is_judged(call, out, code)
        if look_at_samples(call, out, aux, batch, split, is_judged=is_judged):
            _note_warned(call, code)
    if is_judged and not bool(out.value.isfinite().all()):
        return
    if len(looked_at) >= _MOST:
        looked_at.clear()
    looked_at.add(key)


def _look_at_given(call: Call, out: Output, split: set[str], rows: int) -> bool:
    """Check the function's graph, and what it is given; returns whether it warned that this is no mean over samples."""
    if call.nested:
        if split and call.plan.samples:
            warn_of_single_samples(call)
        return False
    was_warned = _look_at_tape(call, out, bool(split) or call.plan.virtual is not None, rows)
    if split and call.plan.samples:
        if out.count is None and call.plan.virtual is None:
            _check_parts(call, split)
        was_warned = warn_of_statistics(call, out, min(split)) or was_warned
        was_warned = was_warned or warn_of_chosen(call, out)
    return was_warned


def _is_split(call: Call, axis: str, size: int) -> bool:
    """Whether the batch is in parts along an axis: those of its ranks, or virtual shards, which one rank may have."""
    virtual = call.plan.virtual
    return size > 1 or (virtual is not None and virtual.axis == axis and len(virtual.sizes) > 1)


def _is_judged(call: Call, out: Output, code: tuple[Any, ...]) -> bool:
    """Whether to find out now if a step's function is a mean over samples."""
    if call.nested or not call.plan.samples or torch_private.is_fake(out.value):
        return False
    judged = _judged_with(call)
    if len(_judged) >= _MOST:
        _judged.clear()
    judged[code] += 1
    _judged[code] += 1
    return judged[code] <= _SIGNATURES and _judged[code] <= _ALIKE


def _note_warned(call: Call, code: tuple[Any, ...]) -> None:
    """No second warning at the next signature, and few of functions with the same code."""
    _judged_with(call)[code] = _SIGNATURES
    _judged[code] += _ALIKE // _SIGNATURES


def _judged_with(call: Call) -> collections.Counter[Any]:
    """How often functions were judged in regions with the same body, by their code."""
    body = None if call.region is None else call.region.body
    try:
        return _judged_in.setdefault(look if body is None else body, collections.Counter())
    except TypeError:  # it can't be hashed, or not be referred to weakly
        return _judged_in.setdefault(look, collections.Counter())


def _code(function: Any, depth: int = 2) -> tuple[Any, ...]:
    """A key of what a function computes: its code, and the strings, flags, modules and functions that it holds."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(function, types.FunctionType):
        held += [content_of(cell) for cell in function.__closure__ or ()]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    else:
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        held += [owner, *getattr(owner, "__dict__", {}).values()]
    return getattr(function, "__code__", type(function)), tuple(_words(held, depth))


def _words(held: Iterable[Any], depth: int) -> Iterator[Any]:
    """What a loss may depend on of what it holds, and of what that holds; numbers may count calls."""
    for one in held:
        cls: Any = type(one)
        kind = _kind(cls)
        if kind == "word":
            yield one
        elif kind == "function":
            yield _code(one, depth - 1) if depth else getattr(one, "__code__", None)
        elif kind == "module":
            yield _structure_of(one), _word(vars(one).get("reduction"))
        elif kind == "holder" and depth:
            yield from _words(vars(one).values(), 0)
        elif kind == "reduction":
            with contextlib.suppress(Exception):  # a property, which may raise anything
                yield _word(one.reduction)


def _structure_of(module: nn.Module) -> int:
    """A hash of a module's parts, numbers and shapes: the same for one that was sent again with what captures it."""
    known = _structures.get(module)
    if known is None:
        parts = [type(one).__qualname__ for one in module.modules()]
        parts += [repr(value) for one in module.modules() for value in vars(one).values() if isinstance(value, SCALARS)]
        known = _structures[module] = hash((*parts, *(tensor.shape for tensor in module.parameters())))
    return known


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@functools.lru_cache(maxsize=1024)
def _kind(cls: type[Any]) -> str:
    """What an object of a class may tell of a loss that holds it; empty if nothing."""
    if issubclass(cls, str | bool):
        return "word"
    if issubclass(cls, types.FunctionType | types.MethodType | functools.partial):
        return "function"
    if issubclass(cls, nn.Module):
        return "module"
    if hasattr(cls, "reduction"):
        return "reduction"
    return "holder" if getattr(cls, "__dictoffset__", 0) and not issubclass(cls, Tensor | type) else ""


# -- the tape ----------------------------------------------------------------------------------------------------------


def _look_at_tape(call: Call, out: Output, has_part: bool, rows: int) -> bool:
    """Refuse mistakes that the autograd graph shows; returns whether it warned of a mean with weights."""
    has_weights = False
    given = {id(argument.primal) for argument in call.arguments}
    held = frozenset() if call.region is None else call.region.captured
    for node in nodes(out.value.grad_fn):
        name = type(node).__name__
        if name == "CheckpointFunctionBackward":
            raise SpecError(
                f"{call.name} uses reentrant activation checkpointing, which can't be differentiated by arguments",
                remedy=NOT_REENTRANT,
            )
        if name == "RedistributeBackward":
            raise SpecError(
                f"{call.name} moves a DTensor (by redistribute or full_tensor), whose gradient torch takes of one "
                "value of the whole mesh, where grad takes that of the mean over ranks",
                remedy="use psum, all_gather and this library's other collectives; or torch's backward in mesh.run",
            )
        if has_part and name in _EMBEDDINGS and saved(node, "scale_grad_by_freq"):
            raise SpecError(
                f"{call.name} scales an embedding's gradient by how often an index is in the batch",
                got="a part of the batch on each rank, or in each virtual shard",
                remedy="make the embedding with scale_grad_by_freq=False, and weigh samples in the loss",
            )
        if has_part and call.plan.samples and out.count is None:
            has_weights = warn_of_weights(call.name, node, rows) or has_weights
        leaf = getattr(node, "variable", None) if name == "AccumulateGrad" else None
        if leaf is None or id(leaf) in given or not call.plan.samples:  # checked in train steps only
            continue
        if isinstance(leaf, nn.Parameter) or id(leaf) in held:
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor with requires_grad=True"
            raise captured(call, f"a {kind} of shape {list(leaf.shape)} that is none of its arguments")
    return has_weights


def _look_at_hooks(call: Call, split: set[str]) -> bool:
    """Warn of a hook for a parameter's gradient, which gets that of a part of the batch; returns whether there is one.

    Over virtual shards it is refused: each registers it once more, and the next one's gradient goes through it twice.
    """
    in_turn = call.in_shards
    for argument in call.arguments:
        primal = argument.primal
        # A batch that is tracked does not show its hooks.
        if primal is None or type(primal) not in (Tensor, nn.Parameter) or not hooks_gradient(primal):
            continue
        parts = "each virtual shard" if in_turn else "this rank's samples, times their share of the batch"
        problem = f"{call.name} registers a hook for a parameter's gradient, which gets that of {parts}"
        got = f"one of shape {list(argument.leaf.shape)}"
        remedy = "change grads in the step, which are of the whole batch"
        if in_turn:
            raise SpecError(problem, got=got, remedy=remedy)
        if call.plan.samples and split & set(argument.reduce):
            ignore = 'warnings.filterwarnings("ignore", ".*registers a hook for a parameter")'
            warn(problem, got=got, remedy=f"{remedy}; or, if it only scales it, as a mask does, {ignore}")
        return True
    return False


def captured(call: Call, got: str) -> SpecError:
    """The error for a function that computes with parameters of its own."""
    return SpecError(
        f"{call.name} computes with parameters that it captures, which no gradient is taken by",
        got=got,
        expected="all that is trained as arguments",
        remedy="apply, params = functional(model), and apply(params, x) instead of model(x); what is not to be "
        "trained has requires_grad_(False), or is called under torch.no_grad()",
    )


def check_trains(call: Call, differentiable: bool, gradients: Sequence[Tensor]) -> None:
    """Refuse gradients that are zero for every leaf, where this rank's value depends on none of them.

    Args:
        differentiable: whether the value requires gradients.
    """
    within_step = call.region is not None and bool(call.plan.samples) and not call.plan.without_samples
    if gradients and (within_step or differentiable) and not any(bool(g.any()) for g in gradients):
        raise captured(
            call,
            "gradients that are zero for every leaf: its value depends on none of them, or was cut off from them by "
            "detach() or no_grad()",
        )


def _check_parts(call: Call, split: set[str]) -> None:
    """Refuse gradient accumulation over chunks of the batch if ranks or chunks have unequal numbers of samples."""
    assert call.region is not None
    sizes = call.region.session.layout.axes
    rows = {(torch_private.storage(leaf), leaf.shape[1:]) for leaf in call.plan.batch}
    parts = [
        leaf
        for leaf in given_to(call)
        if isinstance(leaf, Tensor) and leaf.dim() and (torch_private.storage(leaf), leaf.shape[1:]) in rows
    ]
    for name in split:
        here, total = call.plan.samples[name]
        for leaf in parts:
            if 0 < leaf.shape[0] < here and (total % sizes[name] or here % leaf.shape[0]):
                raise SpecError(
                    f"{call.name} is given a part of the batch in a step whose parts are not equal, so that the "
                    "mean of their means is not that of the whole batch",
                    got=f"{leaf.shape[0]} of {here} samples on this rank, {total} on {sizes[name]} ranks",
                    where=call.where,
                    remedy="accumulate with data_parallel(shards=) and one value_and_grad over the whole batch, "
                    "return mean_of(total, count), or have equal parts (Loader(drop_last=True))",
                )


def _cut_by_specs(call: Call, sizes: Mapping[str, int]) -> tuple[list[Tensor], set[str]]:
    """The leaves, given to or held by a function, that in_specs cut into rows over axes of the mean; and these axes.

    Only leaves as long as the first one are taken: others may be anything, such as a sharded parameter.
    """
    found: list[Tensor] = []
    axes: set[str] = set()
    for leaf in given_to(call):
        names = getattr(leaf, "_spmd_spec", REPLICATED).dim_axes(0)
        over = {name for name in names if name in call.over and sizes[name] > 1}
        if over and isinstance(leaf, Tensor) and (not found or leaf.shape[0] == found[0].shape[0]):
            found.append(leaf)
            axes |= over
    return found, axes
