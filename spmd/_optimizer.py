"""Any `torch.optim` optimizer as two pure functions: `init` makes its state, `step` makes new parameters and state.

The torch optimizer itself does the arithmetic, so the bits are its own; `Engine` lends it what it works on.
Invariant: inputs keep their values, and outputs are new tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from . import _sharded_optimizer as sharded
from ._engine import Engine
from ._sharded_optimizer import Axis, Leaf, State
from ._spmd import spmd
from .kernels.errors import SpecError, SpmdError, message
from .mesh import donation, trees
from .mesh.array import Array
from .mesh.region import current
from .transforms._named_axes import differs_over, note


class Optimizer(NamedTuple):
    """A pair: `init(params) -> opt_state` and `step(params, grads, opt_state) -> (params, opt_state)`."""

    init: Callable[[Any], dict[str, Any]]
    step: Callable[[Any, Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


def optimizer(cls: type[torch.optim.Optimizer], *, shard: Axis | None = None, **hyper: Any) -> Optimizer:
    """Make pure `init` and `step` functions of a torch optimizer class.

    >>> opt = optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0]), "name": "linear"}
    >>> opt_state = opt.init(params)
    >>> params, opt_state = opt.step(params, {"w": torch.tensor([2.0, 0.0]), "name": None}, opt_state)
    >>> params
    {'w': tensor([0., 2.]), 'name': 'linear'}
    >>> opt_state["state"]
    {"['w']": {'momentum_buffer': tensor([2., 0.])}}
    >>> opt_state["hyper"]["lr"] = 0.25  # a schedule: any step may have its own
    >>> opt.step(params, {"w": torch.tensor([0.0, 4.0]), "name": None}, opt_state)[0]
    {'w': tensor([-0.2500,  1.0000]), 'name': 'linear'}

    Args:
        cls: a subclass of `torch.optim.Optimizer` whose `step` needs no closure.
        shard: a mesh axis (or several). Inside a region each rank then updates one slice of the flattened parameters,
            keeps the state of that slice only, and gathers the new parameters from all ranks. For optimizers that
            treat every element alike. Outside a region it changes nothing.
        hyper: keyword arguments of `cls`. Numbers and tuples of numbers start out in `opt_state["hyper"]`, from which
            every step reads them; the others (`foreach`, `maximize`, ...) are fixed.

    Returns:
        `Optimizer(init, step)`. `params` is any tree and `grads` a tree like it. Frozen parameters (`nn.Parameter` with
        `requires_grad=False`), integer tensors and leaves that are no tensors come back as they are, and so does a
        leaf whose gradient is `None`. `opt_state` is `{"state": {path: {name: value}}, "hyper": {name: number}}`; its
        state is filled when torch fills it, at the first step for most classes.

    Raises:
        SpecError: `cls` is no optimizer class, does not take these keywords or values, or cannot be sharded; later,
            parameters, gradients and state do not fit one another.
        SpmdError: the `step` of `cls` needs a closure (LBFGS).

    Source: the `init`/`update` pair of optax; for `shard`, ZeRO stage 1, https://arxiv.org/abs/1910.02054.
    """
    _check_class(cls)
    if shard is not None:
        sharded.check(cls, shard)
    _check_keywords(cls, hyper)
    engine = Engine(cls, hyper)
    engine.hyper()  # makes an instance, so that torch refuses a bad value here and not in the first step
    return Optimizer(functools.partial(_init, engine, shard), functools.partial(_step, engine, shard))


def _init(engine: Engine, shard: Axis | None, params: Any) -> dict[str, Any]:
    leaves, treedef = trees.flatten(params)
    # In the driver a parameter may live on the ranks; state of one that is cut is made where it is.
    cut = [leaf for leaf in leaves if isinstance(leaf, Array) and leaf.spec.entries]
    if cut and current() is None:
        return spmd(functools.partial(_init, engine, shard), mesh=cut[0].mesh)(params)
    leaves = [leaf.full() if isinstance(leaf, Array) else leaf for leaf in leaves]
    given = [Leaf(path, leaf) for path, leaf in zip(_paths(treedef), leaves, strict=True) if _is_trainable(leaf)]
    if shard is not None:
        return {"state": sharded.create(shard, engine, given), "hyper": engine.hyper()}
    state = {leaf.path: own for leaf, own in zip(given, engine.create(given), strict=True)}
    return {"state": _declared(given, state), "hyper": engine.hyper()}


def _step(
    engine: Engine, shard: Axis | None, params: Any, grads: Any, opt_state: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    leaves, treedef = trees.flatten(params)
    given, places = [], []
    for index, (path, leaf, grad) in enumerate(zip(_paths(treedef), leaves, _matched(treedef, grads), strict=True)):
        if isinstance(leaf, Array):
            remedy = "pass it as an argument of an @spmd function, and step there"
            raise SpecError(message("opt.step works on a rank's tensors", got=f"an Array, params{path}", remedy=remedy))
        if _is_trainable(leaf):
            _check_grad(path, leaf, grad)
            given.append(Leaf(path, leaf, grad))
            places.append(index)
    try:
        state, hyper = opt_state["state"], opt_state["hyper"]
    except (TypeError, KeyError, IndexError):
        raise SpecError(
            message(
                "opt_state has an unexpected form",
                got=repr([*opt_state]) if isinstance(opt_state, Mapping) else type(opt_state).__name__,
                expected="{'state': ..., 'hyper': ...}",
                remedy="pass what opt.init or opt.step returned",
            )
        ) from None
    update = _update if shard is None else functools.partial(sharded.update, shard)
    new_params, new_state, new_hyper = update(engine, given, state, hyper)
    for index, leaf, new in zip(places, given, new_params, strict=True):
        leaves[index] = new
        _mark(new, leaf)
    donation.close([leaf.param for leaf in given] + trees.leaves(state))
    return trees.unflatten(treedef, leaves), {"state": new_state, "hyper": new_hyper}


def _update(
    engine: Engine, leaves: Sequence[Leaf], state: Mapping[str, State], hyper: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, State], dict[str, Any]]:
    """Step every leaf whole."""
    sharded.check_state(state, {leaf.path for leaf in leaves})
    given = [sharded.localized(state.get(leaf.path, {}), leaf.param, sharded.layout_of(leaf.param)) for leaf in leaves]
    new_params, states, new_hyper = engine.update(leaves, given, hyper)
    new_state = {leaf.path: own for leaf, own in zip(leaves, states, strict=True)}
    return new_params, _declared(leaves, new_state), new_hyper


def _declared(leaves: Sequence[Leaf], state: Mapping[str, State]) -> dict[str, State]:
    """State of parameters that are cut says so, since a step's results are otherwise taken for replicated."""
    specs = {leaf.path: (leaf.param.shape, sharded.layout_of(leaf.param)) for leaf in leaves}
    return {
        path: sharded.declared(own, *specs[path]) if specs[path][1].entries else own
        for path, own in state.items()
        if own
    }


def _mark(new: Tensor, leaf: Leaf) -> None:
    """Carry over how a parameter is cut, and along which axes it differs, for `value_and_grad`.

    That is where it or its gradient did. Of a gradient that the step has worked on nothing is known, nor of what it
    is added to.
    """
    if new is leaf.param:
        return
    spec = getattr(leaf.param, "_spmd_spec", None)
    if spec is not None:
        new._spmd_spec = spec  # type: ignore[attr-defined]
    axes, others = differs_over(leaf.param), differs_over(leaf.grad)
    if axes is not None and others is not None:
        note(new, axes | others)


def _is_trainable(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or (isinstance(leaf, nn.Parameter) and not leaf.requires_grad):
        return False
    return leaf.is_floating_point() or leaf.is_complex()


@functools.lru_cache(maxsize=64)
def _paths(treedef: optree.PyTreeSpec) -> list[str]:
    return [accessor.codify("") for accessor in treedef.accessors()]


def _matched(treedef: optree.PyTreeSpec, grads: Any) -> list[Any]:
    """The gradients, in the order of the parameters."""
    try:
        return treedef.flatten_up_to(grads)
    except (ValueError, TypeError) as error:
        expected, got = _paths(treedef), trees.paths(grads)
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
            message(
                f"grads has another structure than params: {problem}",
                got=f"{len(got)} leaves",
                expected=f"{len(expected)} leaves",
                remedy="pass what value_and_grad gave for these parameters",
            )
        ) from None


def _check_grad(path: str, param: Tensor, grad: Any) -> None:
    if grad is None:
        return
    if not isinstance(grad, Tensor):
        expected = "a tensor like its parameter, or None"
        raise SpecError(message(f"grads{path} is no tensor", got=type(grad).__name__, expected=expected))
    if grad.shape != param.shape or grad.dtype != param.dtype or grad.device != param.device:
        got, expected = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (grad, param))
        raise SpecError(message(f"grads{path} does not fit its parameter", got=got, expected=expected))


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
        raise SpecError(
            message(
                "optimizer got an unexpected argument 'cls'",
                got=repr(cls),
                expected="a subclass of torch.optim.Optimizer",
                remedy="pass the class and its keywords, as in optimizer(torch.optim.AdamW, lr=1e-3)",
            )
        )


def _check_keywords(cls: type[torch.optim.Optimizer], hyper: dict[str, Any]) -> None:
    if any(argument.default is argument.empty for argument in _arguments(cls.step).values()):
        raise SpmdError(
            message(
                f"{cls.__name__} evaluates a closure in its step, which a pure step(params, grads, state) has not",
                remedy="take an optimizer that needs one gradient a step, such as AdamW, or use this one without spmd",
            )
        )
    accepted = _arguments(cls.__init__)
    accepted.pop("params", None)
    open_ended = any(a.kind is a.VAR_KEYWORD for a in inspect.signature(cls.__init__).parameters.values())
    unknown = next((name for name in hyper if name not in accepted and not open_ended), None)
    missing = next((name for name, a in accepted.items() if a.default is a.empty and name not in hyper), None)
    if unknown or missing:
        problem = f"does not take {unknown!r}" if unknown else f"needs a value for {missing!r}"
        raise SpecError(message(f"{cls.__name__} {problem}", expected=f"some of {[*accepted]}", got=f"{[*hyper]}"))


def _arguments(method: Callable) -> dict[str, inspect.Parameter]:
    """The named arguments after `self`."""
    _, *rest = inspect.signature(method).parameters.values()
    return {a.name: a for a in rest if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)}
