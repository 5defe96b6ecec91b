"""The tensors that a function captures, and a refusal of bodies that change them in place.

On the ranks a captured module is a copy: what a body does to it never reaches the caller, and differs between ranks.
At the first call of each signature, its tensors are compared before and after the body; an optimizer that takes a step
in a later call is found by torch's own hook. Invariant: a repeated call pays nothing for this.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...kernels.errors import SpecError
from ...kernels.flat import storages
from ...kernels.torch_private import clipping_functions, version
from .. import trees
from ..array import Array
from ..pickling.references import CONTAINERS, SCALARS, inside_of, parts_of_data
from ..region import current
from ..spec import P

_LOOKED_AT = 4096  # objects at most
NOT_REENTRANT = (
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); for a model of Transformers "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
)
_TRAIN = (
    "apply, params = functional(model), then in the step loss, grads = value_and_grad(loss_fn)(params, batch), "
    "params, opt_state = opt.step(params, grads, opt_state) with spmd's optimizer, and return them"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """The state of a captured tensor.

    Attributes:
        kind, what: "parameter", "buffer" or "tensor", and which one, for messages.
        version: torch's count of its changes.
        grad, grad_version: its `.grad`, and that one's version.
    """

    tensor: Tensor
    kind: str
    what: str
    version: int
    grad: Tensor | None
    grad_version: int

    @staticmethod
    def of(tensor: Tensor, kind: str, what: str) -> _Known:
        grad = tensor.grad if tensor.is_leaf else None
        return _Known(tensor, kind, what, version(tensor), grad, 0 if grad is None else version(grad))


class Captured:
    """The state of the tensors that a function refers to, by themselves and in modules.

    Args:
        functions: functions (also wrapped, bound or partial) and objects, whose contents are searched, too. Tensors
            in this list are arguments, and not captured.
        whole: types whose instances are not searched.

    Attributes:
        trainable: ids of the tensors that require gradients.
    """

    def __init__(self, functions: Sequence[Any], whole: tuple[type, ...]):
        _watch_clipping()
        _watch_checkpointing()
        tensors, self._arrays, self._entries, optimizes = _tensors(functions, whole)
        self._known = [_Known.of(*found) for found in tensors]
        self.trainable = frozenset(id(known.tensor) for known in self._known if known.tensor.requires_grad)
        if self.trainable or optimizes:
            _watch_optimizers()

    @property
    def memory(self) -> frozenset[int]:
        """The addresses of the storages of the tensors, and of what this rank has of captured Arrays just now."""
        shards = [shard for shard, _ in self.shards()]
        return self._memory | _storages_of(shards) if shards else self._memory

    def shards(self) -> list[tuple[Tensor, P]]:
        """What this rank has of captured Arrays just now, and how these are cut."""
        return [(array._shard, array.hint().spec) for array in self._arrays if array._shard is not None]

    @functools.cached_property
    def _memory(self) -> frozenset[int]:
        return _storages_of([known.tensor for known in self._known])

    def check(self, name: str, where: str) -> None:
        """Refuse a body that has changed one of them.

        Raises:
            SpecError: it has.
        """
        for entries, key, value in self._entries:
            if entries.get(key) is not value:
                what = "gives what it captures another value, which stays on its rank: the caller never sees it"
                raise SpecError(f"{name} {what}", got=f"another {key!r}", where=where, remedy=_RETURN)
        for before in self._known:
            now = _Known.of(before.tensor, before.kind, before.what)
            trained = now.grad is not None and (now.grad is not before.grad or now.grad_version != before.grad_version)
            if trained:
                what = "calls backward() on what it captures: the gradients stay on their rank, and train nothing"
                raise SpecError(f"{name} {what}", got=f"a gradient of {before.what}", where=where, remedy=_TRAIN)
            if now.version != before.version:
                _refuse_change(name, where, before)

    def watched(self, name: str, where: str) -> list[tuple[Tensor, Callable[[], NoReturn]]]:
        """The tensors, each with a function that raises the error for a change of it."""
        return [(known.tensor, functools.partial(_refuse_change, name, where, known)) for known in self._known]


def _storages_of(tensors: Sequence[Tensor]) -> frozenset[int]:
    plain = (one for one in tensors if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided)
    return frozenset[int]().union(*map(storages, plain))  # others, such as a DTensor, have no address


def _refuse_change(name: str, where: str, changed: _Known) -> NoReturn:
    what = "changes what it captures in place: the change stays on its rank, and the caller never sees it"
    raise SpecError(f"{name} {what}", got=f"a change of {changed.what}", where=where, remedy=_remedy(changed))


def _remedy(changed: _Known) -> str:
    if changed.kind == "buffer":
        return (
            "apply, params, buffers = functional_with_buffers(model), whose apply returns the new ones; or, if running "
            "statistics are to stay, model.eval()"
        )
    return _TRAIN if changed.kind == "parameter" else _RETURN


_RETURN = "pass it as an argument, and return its new value"
_Entry = tuple[dict[Any, Any], Any, Any]  # of an entry, or an attribute: the dictionary, the key, the value


def _tensors(
    functions: Sequence[Any], whole: tuple[type, ...]
) -> tuple[list[tuple[Tensor, str, str]], list[Array], list[_Entry], bool]:
    """The tensors and Arrays that functions refer to, each once, the entries that hold tensors, and whether there is an
    optimizer.

    Meta tensors, which have no memory, are left out.
    """
    depths: dict[int, int] = {}
    held: list[Any] = []  # alive, since ids are unique only among live objects
    todo: list[tuple[Any, int]] = [(one, 0) for one in functions if not isinstance(one, Tensor)]
    found: dict[int, tuple[Tensor, str, str]] = {}
    arrays: dict[int, Array] = {}
    entries: list[_Entry] = []
    most = _LOOKED_AT  # entries of long containers
    while todo and len(held) < _LOOKED_AT:
        obj, depth = todo.pop()
        if isinstance(obj, Array):
            arrays[id(obj)] = obj
        if isinstance(obj, (*SCALARS, *whole)) or depths.get(id(obj), depth + 1) <= depth:
            continue
        depths[id(obj)] = depth
        held.append(obj)
        if isinstance(obj, nn.Module):
            owner = f"of the module {type(obj).__name__}"
            for name, parameter in obj.named_parameters():
                found.setdefault(id(parameter), (parameter, "parameter", f"{name!r} {owner}"))
            for name, buffer in obj.named_buffers():
                found.setdefault(id(buffer), (buffer, "buffer", f"{name!r} {owner}"))
        elif isinstance(obj, Tensor):
            kind = "parameter" if isinstance(obj, nn.Parameter) else "tensor"
            found.setdefault(id(obj), (obj, kind, f"a {kind} of shape {list(obj.shape)}"))
        inside = inside_of(obj, depth)
        todo.extend(inside or ())
        if inside is None and isinstance(obj, CONTAINERS) and len(obj) <= most:  # a long or a deep one
            parts = parts_of_data(obj) or ()
            todo.extend((part, depth) for part in parts if not isinstance(part, SCALARS))
            most -= len(parts)
        if inside is not None and not isinstance(obj, (nn.Module, Tensor, type, types.FunctionType)):
            named = obj if isinstance(obj, dict) else getattr(obj, "__dict__", {})
            entries += [(named, key, value) for key, value in list(named.items()) if _has_tensors(value)]
    optimizes = any(isinstance(obj, torch.optim.Optimizer) for obj in held)
    return [entry for entry in found.values() if not entry[0].is_meta], list(arrays.values()), entries, optimizes


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in trees.leaves(value))


@functools.cache
def _watch_optimizers() -> None:
    """From now on, refuse steps of torch's optimizers on what a running function captures, or without gradients."""
    register_optimizer_step_pre_hook(_refuse_captured)


def _refuse_captured(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    region = current()
    if region is None or not region.pure:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(id(param) in region.captured for param in params):
        what = (
            "on parameters that the step captures: each rank would train a copy of its own, and the caller's module "
            "would stay as it is"
        )
    elif len(args) == 1 and not kwargs and params and all(param.grad is None for param in params):  # and no closure
        what = "on parameters that have no gradients in them, and would change nothing"
    else:
        return
    problem = f"{type(optimizer).__name__}.step() was called in a step {what}"
    raise SpecError(problem, where=region.session.where(), remedy=_TRAIN)


@functools.cache
def _watch_clipping() -> None:
    """From now on, refuse to clip `.grad` in an @spmd function, where there is none."""
    for cell in clipping_functions():
        cell.cell_contents = _watched(cell.cell_contents)


def _watch_checkpointing() -> None:
    """From now on, refuse reentrant checkpointing if no input needs gradients: the parameters in it would get none.

    Torch itself only warns of that. Its module takes long to import: if nothing has imported it, it is left alone.
    """
    module = sys.modules.get("torch.utils.checkpoint")
    if module is None or hasattr(module.check_backward_validity, "__wrapped__"):
        return
    look = module.check_backward_validity

    @functools.wraps(look)
    def watched(inputs: Iterable[Any]) -> None:
        region, inputs = current(), list(inputs)
        if region is not None and region.pure and not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            raise SpecError(
                "reentrant activation checkpointing of inputs that need no gradients, as before the first layer "
                "that is trained: the parameters in it would get none",
                where=region.session.where(),
                remedy=NOT_REENTRANT,
            )
        look(inputs)

    module.check_backward_validity = watched  # type: ignore[attr-defined]


def _watched(clip: Callable) -> Callable:
    @functools.wraps(clip)
    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _refuse_clipping(clip.__name__, tensors)
        is_generator = isinstance(parameters, types.GeneratorType)  # torch warns of one, so it must get one
        return clip((tensor for tensor in tensors) if is_generator else tensors, *args, **kwargs)

    return watched


def _refuse_clipping(name: str, tensors: list[Tensor]) -> None:
    region = current()
    if region is None or not region.pure or not tensors or any(tensor.grad is not None for tensor in tensors):
        return
    raise SpecError(
        f"{name} was called in a step on tensors that have no gradients in them, and would clip nothing: here "
        "gradients are values, loss, grads = value_and_grad(loss_fn)(params, batch)",
        got=f"{len(tensors)} tensors with .grad None",
        where=region.session.where(),
        remedy="optimizer(torch.optim.AdamW, lr=..., clip=1.0) clips by the global norm; for another rule change "
        "grads, as in {name: g.clamp(-1, 1) for name, g in grads.items()}",
    )
