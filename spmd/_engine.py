"""What makes a torch optimizer pure: an `Engine` lends it what it may write to for the length of a call.

That is a copy of each parameter and its state, or the memory itself where the step may take it (`mesh.donation`). A
large parameter is stepped block by block, each block while it is in the cache, as most optimizers go over it many
times; the fused ones go once. Invariant: inputs keep their values unless they were donated, the bits are those of
torch's own step on the whole, and between two calls an engine holds no tensor of the caller's.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._sharded_optimizer import REFUSED, Leaf, State
from .kernels.arena import Arena
from .kernels.copying import copy
from .kernels.errors import SpecError, SpmdError, message
from .mesh import donation, trees
from .mesh.region import current

# Elements: 1 MB of each array in float32. Smaller blocks save less traffic than their calls cost.
BLOCK = 1 << 18


class Engine:
    """Instances of one torch optimizer class, each lent to one call at a time."""

    def __init__(self, cls: type[torch.optim.Optimizer], options: dict[str, Any]):
        self.cls = cls
        self.options = options
        self._light = _light(cls)
        # Whether any part of a parameter can be stepped alone.
        self._elementwise = cls.__module__.startswith("torch.optim") and cls.__name__ not in REFUSED
        self._idle: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []

    def __reduce__(self):
        return Engine, (self.cls, self.options)

    def hyper(self) -> dict[str, Any]:
        """The numeric hyper-parameters with their starting values."""
        instance, options = self._take()
        self._idle.append((instance, options))
        return {name: value for name, value in options.items() if _is_numeric(value)}

    def create(self, leaves: Sequence[Leaf]) -> list[State]:
        """The state that the constructor makes; most classes make none before the first step."""
        if not leaves:
            return []
        params = [leaf.param.detach() for leaf in leaves]
        instance = self._construct(params)
        return [dict(instance.state.get(param, {})) for param in params]

    def update(
        self, leaves: Sequence[Leaf], states: Sequence[State], hyper: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[State], dict[str, Any]]:
        """One step: the new parameters, states and hyper-parameters. Leaves without gradient pass through."""
        instance, options = self._take()
        lent = _lent(options, hyper)
        states, params = list(states), [leaf.param for leaf in leaves]
        active = [index for index, leaf in enumerate(leaves) if leaf.grad is not None]
        long = [index for index in active if self._in_blocks(leaves[index], states[index])]
        short = [index for index in active if index not in long]
        group = instance.param_groups[0]
        group.clear()
        group.update(options, params=[], **lent)
        with torch.no_grad():
            shared = _shared_memory()
            for index in active:
                params[index] = _own(params[index], shared)
                states[index] = self._counted(_own_all(states[index], shared))
            for index in long:
                shape, grad = params[index].shape, leaves[index].grad
                assert grad is not None
                flat = {
                    name: value.view(-1) if _is_laid_out_as(value, params[index]) else value
                    for name, value in states[index].items()
                }
                new = self._step_blocks(instance, params[index].view(-1), [grad.view(-1)], flat)
                states[index] = {
                    name: value.view(shape) if isinstance(value, Tensor) and value.ndim else value
                    for name, value in new.items()
                }
            grads = [leaves[index].grad for index in short]
            stepped = self._step_whole(
                instance, [params[index] for index in short], grads, [states[index] for index in short]
            )
            for index, state in zip(short, stepped, strict=True):
                states[index] = state
        return params, states, self._give_back(instance, options, lent, hyper)

    def update_pieces(
        self,
        params: Sequence[Tensor] | None,
        grads: Sequence[Tensor],
        state: State,
        hyper: Mapping[str, Any],
        out: Tensor,
    ) -> tuple[State, dict[str, Any]]:
        """One step of a flat parameter that lies in pieces, written to `out`; its new state and the hyper-parameters.

        Args:
            params, grads: flat pieces, as long as `out` when laid end to end; without `params`, `out` has them already.
            state: of the whole.
        """
        instance, options = self._take()
        lent = _lent(options, hyper)
        group = instance.param_groups[0]
        group.clear()
        group.update(options, params=[], **lent)
        with torch.no_grad():
            at = 0
            for param in params or ():
                copy(out[at : at + param.numel()], param)
                at += param.numel()
            new = self._step_blocks(instance, out, grads, self._counted(_own_all(state, _shared_memory())))
        self._check_flat(new)
        return new, self._give_back(instance, options, lent, hyper)

    def _check_flat(self, state: State) -> None:
        """Refuse state that is not known to be of a part of the parameter, and so would be that of its last piece."""
        for name, value in state.items():
            nested = () if isinstance(value, Tensor | numbers.Number) else trees.leaves(value)
            if any(isinstance(leaf, Tensor) and leaf.ndim for leaf in nested):
                raise SpecError(
                    message(
                        f"optimizer cannot shard {self.cls.__name__}, whose state has tensors within other values",
                        got=f"state[{name!r}] of {trees.shown(value)}",
                        expected="a tensor of the parameter's shape under each name",
                        remedy="give each of these tensors a name of its own in the state, or leave shard out",
                    )
                )

    def _counted(self, state: State) -> State:
        """With the count of steps where torch reads it: state that was put on a GPU has it there, too."""
        step = state.get("step")
        if not isinstance(step, Tensor) or step.is_cpu or self.options.get("capturable") or self.options.get("fused"):
            return state
        return {**state, "step": step.cpu()}

    def _in_blocks(self, leaf: Leaf, state: State) -> bool:
        param, grad = leaf.param, leaf.grad
        return (
            self._elementwise
            and not self.options.get("fused")
            and not donation.is_offered(param)
            and param.is_cpu
            and param.numel() > BLOCK
            and param.is_contiguous()
            and grad is not None
            and not grad.is_sparse
            and grad.is_contiguous()
            and all(
                value.numel() == 1 or (_is_laid_out_as(value, param) and value.is_contiguous())
                for value in state.values()
                if isinstance(value, Tensor)
            )
        )

    def _step_blocks(self, instance: Any, param: Tensor, grads: Sequence[Tensor], state: State) -> State:
        """Step a flat parameter and its state in place, block by block; the state that it has then."""
        made = {name: value for name, value in state.items() if _is_laid_out_as(value, param)}
        last: State = state
        # A GPU has no cache to keep a block in, and a launch for each.
        length = param.numel() if self.options.get("fused") or not param.is_cpu else BLOCK
        for blocks in _blocks(grads, length):
            params = [param[start:stop] for _, start, stop in blocks]
            lent = [{name: value[start:stop] for name, value in made.items()} for _, start, stop in blocks]
            before: list[State] = [
                {
                    name: own[name] if name in own else value.clone() if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
                for own in lent
            ]
            after = self._step_whole(instance, params, [grad for grad, _, _ in blocks], before)
            for (_, start, stop), block, own, last in zip(blocks, params, lent, after, strict=True):
                for name, value in last.items():
                    if not isinstance(value, Tensor) or value.shape != block.shape or not value.ndim:
                        continue
                    if name not in made:  # torch made it in this step, the first
                        made[name] = value.new_empty(param.numel())
                    if name not in own or value.data_ptr() != own[name].data_ptr():
                        made[name][start:stop].copy_(value)
        return {name: made.get(name, value) for name, value in last.items()}

    def _step_whole(
        self, instance: Any, params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[State]
    ) -> list[State]:
        """Step whole parameters in place, all in one call; their new states."""
        if not params:
            return []
        for param, grad, state in zip(params, grads, states, strict=True):
            param.grad = self._private(grad)
            if state:
                instance.state[param] = state
        instance.param_groups[0]["params"] = list(params)
        instance.step()
        for param in params:
            param.grad = None
        return [instance.state.pop(param, {}) for param in params]

    def _give_back(self, instance: Any, options: dict, lent: dict, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the instance for the next call (not after an error); the new hyper-parameters."""
        if instance.state:
            raise SpmdError(
                message(
                    f"{self.cls.__name__} keeps state that belongs to no parameter",
                    got=repr([*instance.state][:3]),
                    remedy="keep it per parameter, or as a number in the defaults of its parameter group",
                )
            )
        group = instance.param_groups[0]
        group["params"] = []
        self._idle.append((instance, options))
        return {name: hyper[name] if group[name] is lent[name] else group[name] for name in hyper}

    def _private(self, grad: Any) -> Tensor:
        # A class from elsewhere may clip or scale gradients in place; of torch's own, foreach SGD with nesterov does.
        if self.cls is torch.optim.SGD and self.options.get("nesterov"):
            keeps = not self.options.get("foreach") and grad.is_cpu
        else:
            keeps = self.cls.__module__.startswith("torch.optim")
        return grad.detach() if keeps else grad.detach().clone()

    def _take(self) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        try:
            return self._idle.pop()
        except IndexError:
            instance = self._construct([torch.zeros(1, 1)])
            instance.state.clear()
            return instance, {name: value for name, value in instance.param_groups[0].items() if name != "params"}

    def _construct(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            return self._light(params, **self.options)
        except (ValueError, TypeError, RuntimeError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
            raise SpecError(
                message(f"{self.cls.__name__} refuses its arguments: {error}", got=given or None)
            ) from error


def _light(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class without the wrappers by which torch tells its compiler to keep off these methods.

    At their first call they import that compiler: a second and 100 MB, on every rank, for nothing. What they do
    besides, switching gradients off and calling hooks, the engine does or has no use for.
    """
    if not cls.__module__.startswith("torch.optim"):
        return cls
    plain = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "step")}
    return type(cls.__name__, (cls,), {**plain, "__module__": cls.__module__})


def _blocks(grads: Sequence[Tensor], length: int) -> Iterator[list[tuple[Tensor, int, int]]]:
    """(gradient, start, stop) of the blocks of every piece, at most `length` long; as many together as make up one."""
    at, size, together = 0, 0, list[tuple[Tensor, int, int]]()
    for grad in grads:
        for start in range(0, grad.numel(), length):
            part = grad[start : start + length]
            if size + part.numel() > length:
                yield together
                size, together = 0, []
            together.append((part, at + start, at + start + part.numel()))
            size += part.numel()
        at += grad.numel()
    if together:
        yield together


def _own_all(state: State, shared: Arena | None) -> State:
    """The values of a state, as `_own` has them."""
    return {
        name: _own(value, shared)
        if isinstance(value, Tensor)
        else trees.map(functools.partial(_own, shared=shared), value)
        for name, value in state.items()
    }


def _own(value: Any, shared: Arena | None) -> Any:
    """A tensor that may be written to in the place of this one."""
    if not isinstance(value, Tensor):
        return value
    # What other ranks read stays as it is.
    if donation.is_offered(value) and not (shared is not None and shared.is_leased(value)):
        return donation.take(value)
    if value.is_cpu and value.is_contiguous():
        return copy(torch.empty_like(value), value)
    return value.clone()


def _shared_memory() -> Arena | None:
    """Where tensors may lie that other ranks read."""
    region = current()
    return None if region is None else region.session.leases


def _is_laid_out_as(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == param.shape


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(item is None or _is_numeric(item) for item in value)
    return isinstance(value, numbers.Real | Tensor) and not isinstance(value, bool)


def _lent(options: dict[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters as torch wants them: the user may have put a tensor for a number, a list for a tuple."""
    expected = [name for name, value in options.items() if _is_numeric(value)]
    if hyper.keys() != set(expected):
        name = min(hyper.keys() ^ set(expected))
        problem = f"opt_state['hyper'] {'misses' if name in expected else 'has an unknown'} {name!r}"
        raise SpecError(message(problem, expected=f"the names {expected}", remedy="pass what opt.init returned"))

    def lend(name: str, default: Any, value: Any) -> Any:
        if isinstance(default, tuple) and isinstance(value, tuple | list) and len(value) == len(default):
            return tuple(lend(name, *pair) for pair in zip(default, value, strict=True))
        if isinstance(value, Tensor) and value.numel() == 1 and not isinstance(default, Tensor):
            return value.item()
        if value is not default and (isinstance(default, tuple) or isinstance(value, tuple) or not _is_numeric(value)):
            problem = f"opt_state['hyper'][{name!r}] has an unexpected value"
            raise SpecError(message(problem, got=repr(value), expected=f"something like {default!r}"))
        return value

    return {name: lend(name, options[name], value) for name, value in hyper.items()}
