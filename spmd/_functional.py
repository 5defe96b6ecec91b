"""Modules as pure functions: the weights leave the module and come back as arguments.

What is shipped to other processes is a skeleton: the module's code and structure with every parameter on the meta
device, so that it weighs nothing and cannot be trained by mistake.
Invariant: a call leaves no trace. Whatever `forward` rebinds (parameters, buffers, attributes) is put back after it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ._batch_norm import decays, synced
from ._copied_modules import copied, skeleton_of, without_parametrized_classes
from ._functional_checks import (
    Lent,
    Origin,
    check_module,
    check_names,
    check_state_dict,
    fetched,
    warn_of_dropped,
    warn_of_frozen,
    warn_of_kept,
    warn_of_training,
)
from ._runner import Runner
from .kernels import torch_private
from .kernels.callsite import public
from .kernels.errors import no_attribute
from .mesh.purity.captured_state import CapturedState
from .mesh.region import current, note_carry
from .transforms import after_gradient, current_plan, in_gradient


@public
def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor]]:
    """Split a module into a pure function of its parameters, and those parameters.

    >>> apply, params = functional(nn.Linear(3, 1))
    >>> {name: tuple(value.shape) for name, value in params.items()}
    {'weight': (1, 3), 'bias': (1,)}
    >>> apply({"weight": torch.ones(1, 3), "bias": torch.zeros(1)}, torch.tensor([1.0, 2.0, 3.0]))
    tensor([6.])

    Args:
        module: any module; it stays as it is. `apply` keeps the train/eval mode that every submodule has now, and what
            `module.compile()` compiled is compiled there, too.

    Returns:
        `apply(params, *args, **kwargs)`, which gives what `module(*args, **kwargs)` would, and can be pickled; and the
        parameters by name: copies, a tied one once under its first name, a frozen one (`requires_grad=False`) still an
        `nn.Parameter`. Buffers are constants of `apply`: batch norm in train mode normalises by the batch and updates
        nothing (`functional_with_buffers` does). `apply.to_module(params)` and `apply.state_dict(params)` turn
        parameters back into a module or its state_dict, and `apply.params(state_dict)` makes parameters of one.

    Raises:
        SpecError: `module` is no module, or has uninitialised lazy parameters; later, `params` has other names.
        SpmdError: `module` cannot be copied.

    Source: `torch.func.functional_call`, and the Flax/Haiku `init`/`apply` pair.
    """
    check_module(module)
    skeleton = skeleton_of(module, dict(module.named_parameters()))
    params = _values(module)
    return Apply(skeleton, torch_private.compiled_parts(module), Origin(module, params)), params


@public
def functional_with_buffers(
    module: nn.Module, *, sync: bool = False
) -> tuple[ApplyWithBuffers, dict[str, Tensor], dict[str, Tensor]]:
    """Split a module into a pure function of its parameters and buffers, those parameters, and those buffers.

    >>> apply, params, buffers = functional_with_buffers(nn.BatchNorm1d(2, momentum=0.5))
    >>> out, new = apply(params, buffers, torch.tensor([[0.0, 2.0], [4.0, 2.0]]))
    >>> buffers["running_mean"], new["running_mean"]
    (tensor([0., 0.]), tensor([1., 1.]))

    Args:
        module: any module; it stays as it is. `apply` keeps the train/eval mode that every submodule has now.
        sync: batch norms use the statistics of the whole batch of a `data_parallel` step, as on one device, which takes
            exchanges in the forward and the backward pass. Without it they use those of their rank's part.

    Returns:
        `apply(params, buffers, *args, **kwargs) -> (out, new_buffers)`, which leaves `buffers` as they are; the
        parameters as in `functional`; and the buffers by name, persistent or not: copies, a tied one once.

    Raises:
        SpecError: `module` is no module, or has uninitialised lazy parameters; later, `params` or `buffers` have other
            names.
        SpmdError: `module` cannot be copied.

    Source: `torch.func.functional_call`, and the mutable collections of Flax.
    """
    check_module(module, sync=sync)
    params = _values(module)
    origin = Origin(module, params)
    if sync:
        module = synced(module)
    buffers = dict(module.named_buffers())
    skeleton = skeleton_of(module, dict(module.named_parameters()), buffers)
    apply = ApplyWithBuffers(skeleton, torch_private.compiled_parts(module), origin)
    return apply, params, {name: b.detach().clone() for name, b in buffers.items()}


_INSTEAD = {  # of what modules have
    **dict.fromkeys(("train", "eval"), "it keeps the mode of its module: functional(model.eval()) for another"),
    **dict.fromkeys(("to", "cuda", "half", "double"), "functional(model.half()) for a dtype; the device is the mesh's"),
    **dict.fromkeys(("parameters", "named_parameters"), "they are what functional returned beside it"),
}


class Apply:
    """The function that `functional` returns: a skeleton, and runnable copies of it made on demand.

    Args:
        compiled: by name, the parts on which `compile()` was called, and its options.
        origin: the module that it was made from; in another process, what `_evaluates` was when the function was sent.
    """

    def __init__(self, skeleton: nn.Module, compiled: Mapping[str, dict[str, Any]], origin: Origin | bool):
        self.skeleton, self._compiled, self._origin = skeleton, compiled, origin and skeleton.training and origin
        self._made_from = origin if isinstance(origin, Origin) else None
        # There is one at once: to make it would break a graph, if the first call is compiled.
        self._was_looked_at, self._idle = False, [Runner(skeleton, compiled)]
        # Else the first call shows if it computes with the weights that it is given; of compiled code it can't.
        self._has_run = bool(compiled) or any("_orig_mod" in name for name, _ in skeleton.named_modules())

    def __reduce__(self):
        if self._made_from is not None:
            self._made_from.warn_of_changes()
        if any(parametrize.is_parametrized(submodule) for submodule in self.skeleton.modules()):
            skeleton = without_parametrized_classes(self.skeleton)
            return _load_parametrized, (type(self), skeleton, *self._changing()[1:])
        return type(self), tuple(self._changing())

    def _changing(self) -> list[Any]:
        """What a function that captures this is sent again for: not what calls of it leave here."""
        return [self.skeleton, self._compiled, self._evaluates]

    @property
    def _evaluates(self) -> bool:
        """Whether this function is in train mode while its module is in eval mode by now."""
        return self._origin.evaluates if isinstance(self._origin, Origin) else self._origin

    if not TYPE_CHECKING:  # for type checkers a name that is not there is an error

        @public
        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _INSTEAD) from None

    def __repr__(self) -> str:
        return f"apply({type(self.skeleton).__name__})"

    @public
    def __call__(self, params: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        return self._call(params, None, args, kwargs)[0]

    @public
    def to_module(self, params: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> nn.Module:
        """The module with these parameters, and buffers if they are given; tied ones are tied again.

        >>> apply, params = functional(nn.Linear(2, 1))
        >>> apply.to_module({name: torch.ones_like(value) for name, value in params.items()}).weight
        Parameter containing:
        tensor([[1., 1.]], requires_grad=True)

        Args:
            params: as `functional` gave them, tensors or `Array`s.
            buffers: as `functional_with_buffers` gave them; without them the module has its initial ones.

        Returns:
            A new module, with copies of the tensors.

        Raises:
            SpecError: `params` or `buffers` have other names.
        """
        own, constants = dict(self.skeleton.named_parameters()), dict(self.skeleton.named_buffers())
        check_names("params", params, own)
        if buffers is not None:
            check_names("buffers", buffers, constants)
        memo: dict[int, Any] = {}
        for name, replica in own.items():
            memo[id(replica)] = nn.Parameter(fetched(params[name]), requires_grad=replica.requires_grad)
        for name, value in (buffers or {}).items():
            memo[id(constants[name])] = fetched(value)
        return torch_private.compile_parts(copied(self.skeleton, memo), self._compiled)

    @public
    def state_dict(self, params: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The `state_dict` of the module with these parameters, tied names included."""
        return dict(self.to_module(params, buffers).state_dict())

    @public
    def params(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters for this function from a module's plain `state_dict()`: copies, tied ones once.

        Args:
            state_dict: that of a module like the one which `functional` was given; buffers in it are left out.

        Raises:
            SpecError: parameters are missing.
        """
        own = dict(self.skeleton.named_parameters())
        check_state_dict(state_dict, own)
        return {
            name: fetched(state_dict[name])
            if replica.requires_grad
            else nn.Parameter(fetched(state_dict[name]), requires_grad=False)
            for name, replica in own.items()
        }

    def _call(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None, args: tuple, kwargs: dict):
        traced = torch.compiler.is_compiling()
        if self._origin and not traced and self._evaluates and not in_gradient():
            self._origin = False
            warn_of_training(self.skeleton)
        # A runner serves one call at a time: another thread, or a call from within the call, gets its own.
        try:
            runner = self._idle.pop()
        except IndexError:
            runner = Runner(self.skeleton, self._compiled)
        if traced:
            try:
                return runner.traced(params, buffers, args, kwargs)
            finally:
                self._idle.append(runner)
        compiled = torch_private.is_traced()
        looks = not (self._was_looked_at or compiled) and current() is not None and in_gradient()
        try:
            kept = CapturedState([(runner.module, type(runner.module).__name__)], (), buffers=False) if looks else None
            if self._has_run or compiled:
                out, new = runner.run(params, buffers, args, kwargs)
            else:
                made_from = self._made_from
                if made_from is not None:
                    made_from.warn_of_changes()
                original = None if made_from is None else made_from.module()
                with torch_private.eagerly(), Lent(self.skeleton, params, original):
                    out, new = runner.run(params, buffers, args, kwargs)
                self._has_run = True
            if kept is not None:
                self._was_looked_at = True
                warn_of_frozen(self.skeleton, params)
                if buffers is not None or not warn_of_dropped(self.skeleton, new):
                    warn_of_kept(self.skeleton, kept)
            return out, new
        finally:
            # torch.utils.checkpoint computes layers again in the backward pass, and needs the same parameters there.
            # Tensors of a transform of torch.func must not outlive it.
            keeps = torch.is_grad_enabled() and not torch_private.in_torch_func()
            if not keeps or not after_gradient(functools.partial(self._reclaim, runner)):
                self._reclaim(runner)

    def _reclaim(self, runner: Runner) -> None:
        runner.put_back()
        self._idle.append(runner)


class ApplyWithBuffers(Apply):
    """The function that `functional_with_buffers` returns."""

    @public
    def __call__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        out, new = self._call(params, buffers, args, kwargs)
        if current_plan().in_shard:
            # Virtual shards all begin with the same running statistics; this notes how to combine their results.
            for name, decay in decays(self.skeleton).items():
                if name in new:
                    note_carry(new[name], buffers[name], decay)
        return out, new


def _load_parametrized(
    apply: type[Apply], skeleton: nn.Module, compiled: Mapping[str, dict[str, Any]], evaluates: bool
) -> Apply:
    for submodule in list(skeleton.modules()):
        names = dict(submodule.named_children()).get("parametrizations")
        if isinstance(names, nn.ModuleDict):
            torch_private.inject_parametrizations(submodule, names)
    return apply(skeleton, compiled, evaluates)


def _values(module: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, param in module.named_parameters():
        value = param.detach().clone()
        values[name] = value if param.requires_grad else nn.Parameter(value, requires_grad=False)
    return values
