"""What `functional` refuses, such as non-modules and parameters under other names, and what it warns of."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .kernels.arguments import checked_flag
from .kernels.callsite import warn
from .kernels.errors import SpecError, SpmdError
from .kernels.flat import strided_parts
from .kernels.torch_private import DispatchMode, has_hooks, in_torch_func, is_exported, versions
from .mesh.array import Array
from .mesh.purity.captured_state import CapturedState
from .mesh.purity.writes import tensors_in
from .mesh.region import current, planned_session
from .mesh.strides import is_frozen


def check_module(module: Any, *, sync: bool = False) -> None:
    checked_flag("functional_with_buffers", "sync", sync)
    if not isinstance(module, nn.Module):
        hint = f"call it first, functional({module.__name__}(...))" if isinstance(module, type) else "pass a module"
        hint = "pass the module from before torch.export" if is_exported(module) else hint
        raise SpecError(
            "functional got an unexpected type for argument 'module'",
            expected="a torch.nn.Module",
            got=repr(module) if isinstance(module, type) else type(module).__name__,
            remedy=hint,
        )
    if any(isinstance(submodule, torch.jit.ScriptModule) for submodule in module.modules()):
        raise SpmdError(
            "functional cannot empty a scripted module", remedy="pass the module from before torch.jit.script"
        )
    for name, submodule in module.named_modules():
        max_norm = getattr(submodule, "max_norm", None)
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and max_norm is not None:
            weight = f"{name}.weight" if name else "weight"
            raise SpecError(
                f"functional got {name!r}, an embedding that shrinks its weights in place in each forward pass",
                got=f"max_norm={max_norm}",
                remedy="make it without max_norm, and begin the step with params = {**params, "
                f"{weight!r}: torch.renorm(params[{weight!r}], {submodule.norm_type}, 0, {max_norm})}}",
            )
        if isinstance(submodule, nn.SyncBatchNorm) and submodule.training and not sync:
            raise SpecError(
                f"functional got {name!r}, a SyncBatchNorm, which would take each rank's own statistics here",
                remedy="apply, params, buffers = functional_with_buffers(model, sync=True)",
            )
    if planned_session() is not None and any(True for _ in module.buffers()):
        # Copying a fake tensor's storage corrupts memory in torch.
        raise SpecError(
            "functional was called on a module with buffers in a step that is only checked",
            got=type(module).__name__,
            remedy="call functional(model) before the step, and pass it the parameters",
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise SpecError(
                f"functional got a module whose {name!r} is not initialised yet",
                remedy="run the module once on a sample batch, so that its lazy layers learn their shapes",
            )
        if has_hooks(tensor):
            raise SpecError(
                f"functional got a module whose {name!r} has a hook for its gradient, which would never be called",
                remedy=f"remove it, and change the gradient in the step: grads[{name!r}] = grads[{name!r}] * mask",
            )


def check_names(argument: str, given: Any, expected: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise SpecError(
            f"apply got an unexpected type for argument {argument!r}",
            expected=f"a dictionary with the {len(expected)} names that functional returned",
            got=type(given).__name__,
            remedy=f"pass what functional returned as {argument}, before the module's own arguments",
        )
    if given.keys() == expected.keys():
        return
    missing = [name for name in expected if name not in given]
    extra = [name for name in given if name not in expected]
    problem = f"misses {missing[0]!r}" if missing else f"has an unexpected {extra[0]!r}"
    raise SpecError(
        f"argument {argument!r} of apply {problem}",
        got=f"{len(missing)} missing: {missing[:5]}, {len(extra)} unexpected: {extra[:5]}",
        remedy="pass the dictionary that functional returned, with every value under its own name",
    )


def check_state_dict(given: Any, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse what is not the state_dict of a module with these parameters."""
    if not isinstance(given, Mapping):
        got, expected = type(given).__name__, "what a module's state_dict() gives"
        raise SpecError("apply.params got no state_dict", got=got, expected=expected)
    missing = next((name for name in own if name not in given), None)
    if missing is not None:
        longer = next((name for name in given if str(name).endswith(f".{missing}")), missing)
        prefix = longer.removesuffix(missing)
        stripped = f"apply.params({{name.removeprefix({prefix!r}): value for name, value in state_dict.items()}})"
        remedy = f"write {stripped}" if prefix else "pass that of a module like the one that functional was given"
        raise SpecError(f"apply.params got no {missing!r}", got=f"names {[*given][:5]}", remedy=remedy)
    for name, replica in own.items():
        if (shape := getattr(given[name], "shape", replica.shape)) != replica.shape:
            problem = f"apply.params got another shape for {name!r} than its module has"
            raise SpecError(problem, got=str([*shape]), expected=str([*replica.shape]))


def no_tensor(value: Any) -> SpecError:
    """The error for a parameter or a buffer that is no tensor."""
    problem, remedy = "apply got a parameter or a buffer that is no tensor", "pass what functional returned"
    return SpecError(problem, got=repr(value)[:60], expected="a tensor or an Array", remedy=remedy)


def fetched(value: Any) -> torch.Tensor:
    """A copy of a parameter, which may be on a mesh."""
    value = value.full() if isinstance(value, Array) else value
    if not isinstance(value, torch.Tensor):
        raise no_tensor(value)
    return value.detach().clone()


class Lent(DispatchMode):
    """Refuses a module that computes with other parameters than those that it is lent, during a call.

    Either with emptied ones, which it keeps where they can't be exchanged, such as in a list: torch's kernels would
    read memory at random. Or with those of the module that it was made from, as a hook has that names it as a global.
    """

    def __init__(self, skeleton: nn.Module, params: Any, original: nn.Module | None):
        super().__init__()
        values = list(params.values()) if isinstance(params, Mapping) else []
        lent = {id(value) for value in values}
        old = {} if original is None else dict(original.named_parameters())
        self._old = {id(value): name for name, value in old.items() if value.requires_grad and id(value) not in lent}
        on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in values)
        own = () if on_meta else (*skeleton.named_parameters(), *skeleton.named_buffers())
        self._emptied = {id(tensor): name for name, tensor in own if tensor.is_meta}
        self._skeleton = skeleton

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in tensors_in([*args, *kwargs.values()]):
            if id(tensor) in self._old:
                raise SpecError(
                    f"{type(self._skeleton).__name__} computes with a parameter of the module that functional was "
                    "given, and not with its value in params",
                    got=f"{self._old[id(tensor)]!r}, perhaps of a global variable",
                    remedy="have hooks and functions read it from the module that they are given, or capture it "
                    "as a local variable",
                )
            if id(tensor) in self._emptied:
                raise SpecError(
                    f"{type(self._skeleton).__name__} computes with a parameter that it keeps outside of its "
                    "place, such as in a list or a function, where functional can't give it another value",
                    got=repr(self._emptied[id(tensor)]),
                    remedy="let forward read it from its module, as in self.layer.weight; parameters without a "
                    "module belong in nn.ParameterList or nn.ParameterDict",
                )
        return func(*args, **kwargs)


@dataclasses.dataclass
class _Taken:
    """In what states functions were made of a module.

    Attributes:
        weights: numbers that tell apart the weights that it had the last time.
        frozen: each time, the names of the parameters that were frozen.
    """

    modes: set[bool] = dataclasses.field(default_factory=set)
    weights: list[int] = dataclasses.field(default_factory=list)
    frozen: set[frozenset[str]] = dataclasses.field(default_factory=set)


class Origin:
    """The module that a function was made from, which may have changed since.

    Torch's modules change in place, but the function keeps the mode that its module had, and its parameters are copies.

    Args:
        params: these.
    """

    def __init__(self, module: nn.Module, params: Mapping[str, torch.Tensor]):
        self._module, self._frozen = weakref.ref(module), _frozen(module)
        self._params: list[weakref.ref[torch.Tensor]] = list(map(weakref.ref, params.values()))
        self._taken = _taken.setdefault(module, _Taken())
        self._taken.modes.add(module.training)
        self._taken.frozen.add(self._frozen)
        self._taken.weights = _weights_of(module)

    def module(self) -> nn.Module | None:
        """The module, if there is still one."""
        return self._module()

    @property
    def evaluates(self) -> bool:
        """Whether the module is in eval mode now, and no function was ever made from it in eval mode."""
        module = self._module()
        return module is not None and not module.training and False not in self._taken.modes

    def warn_of_changes(self) -> None:
        """Warn if the module has got other weights, before the function is used first, or was frozen or thawed."""
        module, params, self._params = self._module(), self._params, []
        if module is None or _others_warn():
            return
        if self._taken.weights != _weights_of(module) and any(refer() is not None for refer in params):
            warn(
                f"the parameters of {type(module).__name__} were changed after functional had copied them, and those "
                "that it returned are as before",
                remedy="load or initialise weights first, and call functional(module) then; or "
                "params = apply.params(module.state_dict())",
            )
        if (now := _frozen(module)) in self._taken.frozen:
            return
        every = [name for name, _ in module.named_parameters()]
        names = [name for name in every if (name in now) != (name in self._frozen)]
        if not now.issuperset(every):  # else it is on purpose: nobody is to train the module itself
            warn(
                f"{type(module).__name__} was frozen in part, or thawed, after functional was called, and params, "
                "which are copies, do not follow",
                got=f"{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}",
                remedy="freeze them first: model[0].requires_grad_(False), then apply, params = functional(model)",
            )


_taken: weakref.WeakKeyDictionary[nn.Module, _Taken] = weakref.WeakKeyDictionary()


def _weights_of(module: nn.Module) -> list[int]:
    tensors = list(module.parameters())
    return [*map(id, tensors), *versions(tensors)]


def _frozen(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, own in module.named_parameters() if not own.requires_grad)


def warn_of_training(skeleton: nn.Module) -> None:
    """Warn when a function in train mode is called to evaluate, while its module is in eval mode."""
    if _others_warn():
        return
    warn(
        f"apply of {type(skeleton).__name__} is in training mode (dropout, batch norm), as its module was when "
        "functional was called, and the module is in evaluation mode now",
        remedy="predict, _ = functional(model.eval()) for evaluation, with the same params",
    )


def warn_of_frozen(skeleton: nn.Module, params: Mapping[str, torch.Tensor]) -> None:
    """Warn of parameters that are frozen while the module's are not, or the other way round.

    If all parameters of either are frozen, that is on purpose: a teacher that uses its student's function, say.
    """
    if _others_warn():
        return
    frozen = {name for name, own in skeleton.named_parameters() if not own.requires_grad}
    given = {name for name, value in params.items() if is_frozen(value)}
    stay = given - frozen if len(given) < len(params) else set()
    train = {name for name in frozen - given if params[name].requires_grad} if len(frozen) < len(params) else set()
    for names, are, were in (stay, "frozen", "trainable"), (train, "trained", "frozen"):
        if names:
            first = [name for name in params if name in names][:3]
            warn(
                f"params given to apply of {type(skeleton).__name__} are {are}, and were {were} in its module when "
                "functional was called",
                got=f"{', '.join(map(repr, first))}{', ...' if len(names) > 3 else ''}",
                remedy="params = apply.params(fetch(params)) are frozen as the module was, and opt_state = "
                "opt.init(params) begins anew; or leave all trainable, and give those that are to stay for a while "
                "gradients of None (docs/how_to.md)",
            )


def _others_warn() -> bool:
    """Whether this is a rank other than 0: rank 0 gives the same warning."""
    region = current()
    return region is not None and region.session.rank != 0


def warn_of_kept(skeleton: nn.Module, kept: CapturedState) -> None:
    """Warn when a call changes what the module keeps besides parameters and buffers: it is as before at the next."""
    change = None if _others_warn() or planned_session() is not None or in_torch_func() else kept.first_change()
    if change is not None:
        problem = f"{type(skeleton).__name__} changes what it keeps, which its apply drops: the module stays as it is"
        warn(problem, got=change[0], remedy=change[1])


def warn_of_dropped(skeleton: nn.Module, buffers: Mapping[str, torch.Tensor]) -> bool:
    """Warn when a call changes buffers, as batch norm does: `functional` drops the new values. Whether it does."""
    if planned_session() is not None or in_torch_func():
        return False
    changed = [name for name, before in skeleton.named_buffers() if not _are_equal(before, buffers[name])]
    if changed:
        warn(
            f"apply of {type(skeleton).__name__} drops what its module makes of its buffers in training, and the "
            "trained module will have those of its start",
            got=f"{', '.join(map(repr, changed[:3]))}{', ...' if len(changed) > 3 else ''}",
            remedy="apply, params, buffers = functional_with_buffers(model), whose apply returns the new ones; "
            "or, if these are to stay, functional(model.eval()), or BatchNorm2d(..., track_running_stats=False)",
        )
    return bool(changed)


def _are_equal(before: torch.Tensor, after: Any) -> bool:
    if not isinstance(after, torch.Tensor) or before.dtype != after.dtype or before.layout != after.layout:
        return False
    pairs = zip(strided_parts(before), strided_parts(after), strict=True)  # torch.equal takes no sparse tensors
    return before.shape == after.shape and all(torch.equal(old, new) for old, new in pairs)
