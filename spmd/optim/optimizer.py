"""Any `torch.optim` optimizer as two pure functions: `init` makes its state, `step` makes new parameters and state.

The torch optimizer itself does the arithmetic, so the bits are torch's own (`flat` sees to it); `Engine` lends it the
tensors that it works on.
Invariant: inputs keep their values, and outputs are new tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .._spmd import spmd
from ..kernels.call import labelled
from ..kernels.callsite import public
from ..kernels.errors import SpecError, SpmdError, no_attribute
from ..kernels.torch_private import untraced
from ..mesh import donation, trees
from ..mesh.array import Array
from ..mesh.purity.updates import Update
from ..mesh.region import current, noted_updates
from ..mesh.strides import frozen_as
from . import clipping, parts
from . import groups as grouping
from .engine import Engine
from .given import HasArrays, Kinds, is_trainable, settle
from .groups import Groups
from .hyper import instead_of
from .leaves import FROM_TORCH, Leaf, is_elementwise, mixing, refuse_cut
from .schedule import Schedule
from .slices import Axis


class Optimizer(NamedTuple):
    """A pair: `init(params) -> opt_state` and `step(params, grads, opt_state) -> (params, opt_state)`."""

    init: Callable[[Any], dict[str, Any]]
    step: Callable[[Any, Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]

    @public
    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, _INSTEAD) from None


_INSTEAD = {  # of what torch's optimizers have
    "zero_grad": "gradients are values, loss, grads = value_and_grad(loss_fn)(params, batch): there is none to reset",
    "param_groups": 'the numbers of a step are in opt_state["hyper"] and opt_state["groups"], and '
    "optimizer(cls, schedule=) takes torch's schedulers",
    "lr": 'it is opt_state["hyper"]["lr"], which any step may have of its own',
    "add_param_group": "write optimizer(cls, groups=[...])",
    "state": "opt_state is the state, a value",
    "train": "of a schedule-free class pass a subclass whose __init__ calls self.train() (docs/how_to.md)",
    "eval": "the parameters to evaluate with are made of params and opt_state (docs/how_to.md)",
    "state_dict": 'opt_state is the state, a value: save("run", {"params": params, "opt_state": opt_state})',
    "load_state_dict": "opt_state is the state, a value: pass what restore gave to the step",
}


@public
def optimizer(
    cls: type[torch.optim.Optimizer],
    *,
    shard: Axis | None = "auto",
    groups: Groups | None = None,
    schedule: Any = None,
    clip: float | None = None,
    **hyper: Any,
) -> Optimizer:
    """Make pure `init` and `step` functions of a torch optimizer class.

    >>> opt = optimizer(torch.optim.SGD, lr=0.5, momentum=0.5)
    >>> params = {"w": torch.tensor([1.0, 2.0]), "name": "linear"}
    >>> opt_state = opt.init(params)
    >>> params, opt_state = opt.step(params, {"w": torch.tensor([2.0, 0.0]), "name": None}, opt_state)
    >>> params
    {'w': tensor([0., 2.]), 'name': 'linear'}
    >>> opt_state["state"]
    {"['w']": {'momentum_buffer': tensor([2., 0.])}}
    >>> opt_state["hyper"]["lr"] = 0.25  # any step may have its own
    >>> opt.step(params, {"w": torch.tensor([0.0, 4.0]), "name": None}, opt_state)[0]
    {'w': tensor([-0.2500,  1.0000]), 'name': 'linear'}

    Args:
        cls: a subclass of `torch.optim.Optimizer` whose `step` needs no closure.
        shard: a mesh axis (or several). Inside a region each rank then updates one slice of the flattened parameters,
            keeps the state of that slice only, and gathers the new parameters from all ranks. For optimizers that
            treat every element alike. Outside a region it changes nothing. "auto": all axes over which a parameter and
            its gradient are known to be the same (gradients as `value_and_grad` gives them), if `cls` is one of
            torch's that treats every element alike, the ranks share one host's memory, and there are more than 8192
            elements to share: with fewer, each rank updates all of them, which is faster than an exchange. None: each
            rank updates everything, and keeps all state.
        groups: dictionaries, each with "params" (a function of a parameter's name and tensor, a list of names, or a
            tree of booleans) and the options of these parameters: `{"params": is_bias, "weight_decay": 0.0}`. A
            parameter belongs to the first group that names it; the rest are stepped with `hyper`. Numbers start out in
            `opt_state["groups"]`, one dictionary for each group.
        schedule: the learning rate of every step, instead of `lr`: a number, or a function of the step's number, from
            0, that gives the rate itself, no factor; or a class of `torch.optim.lr_scheduler`, or a function of an
            optimizer that makes one, such as `lambda opt: CosineAnnealingLR(opt, T_max=100)`, which begin with `lr`.
            A scheduler's lists have an entry for each group: first for the rest of the parameters, then for `groups`.
            Steps are counted in `opt_state["count"]`.
        clip: the largest norm of all gradients together; they are scaled down to it, as
            `torch.nn.utils.clip_grad_norm_` does. (That function itself has no effect in a step, where no tensor has
            `.grad`.)
        hyper: keyword arguments of `cls`. Without `fused` and `foreach`, torch's fused implementation is taken where
            there is one (float32 and float64; not under `data_parallel(shards=)`). Numbers and tuples of numbers start
            out in `opt_state["hyper"]`, from which every step reads them; the others (`maximize`, ...) are fixed.

    Returns:
        `Optimizer(init, step)`. `params` is any tree and `grads` a tree like it. Frozen parameters (`nn.Parameter` with
        `requires_grad=False`), integer tensors and leaves that are no tensors come back as they are, and so does a
        leaf whose gradient is `None`. `opt_state` is `{"state": {path: {name: value}}, "hyper": {name: number}}`; its
        state is filled when torch fills it, at the first step for most classes.

    Raises:
        SpecError: `cls` is no optimizer class, does not take these keywords or values, or cannot be sharded; groups,
            schedule or clip have another form; later, parameters, gradients and state do not fit one another.
        SpmdError: the `step` of `cls` needs a closure (LBFGS).

    Source: the `init`/`update` pair of optax; for `shard`, ZeRO stage 1, https://arxiv.org/abs/1910.02054.
    """
    _check_class(cls)
    if shard == "auto":
        shard = "auto" if is_elementwise(cls) else None
    elif shard is not None:
        parts.check(cls, shard, hyper)
    chosen = [] if groups is None else grouping.check(groups)
    for own in (hyper, *(own for _, own in chosen)):
        _check_keywords(cls, {**hyper, **own})
    engines = tuple(Engine(cls, {**hyper, **own}) for own in ({}, *(own for _, own in chosen)))
    # Makes an instance of each, so that torch refuses a bad value here and not in the first step.
    starts = [engine.hyper() for engine in engines]
    owned = [[], *([name for name in start if name in own] for start, (_, own) in zip(starts[1:], chosen, strict=True))]
    if clip is not None:
        clipping.check(clip)
    scheduled = None if schedule is None else Schedule(schedule, starts, owned)
    if scheduled is not None and "lr" in hyper:
        scheduled.warn_of_factor(hyper["lr"])
    recipe = Recipe(
        engines,
        shard,
        tuple(which for which, _ in chosen),
        tuple(map(tuple, owned)),
        scheduled,
        clip,
        mixing(cls),
    )
    return Optimizer(functools.partial(_init, recipe), functools.partial(_step, recipe))


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What an optimizer was asked for.

    Attributes:
        engines: one for each group; the first is for parameters in none of `groups`.
        groups: for each of the other groups, what names its parameters.
        owned: for each group, the names of its own hyper-parameters.
        mixing: how the class mixes elements of one parameter, if it is known to.
        kinds: what was worked out for the steps so far.
    """

    engines: tuple[Engine, ...]
    shard: Axis | None
    groups: tuple[Any, ...]
    owned: tuple[tuple[str, ...], ...]
    schedule: Schedule | None
    clip: float | None
    mixing: str | None
    kinds: Kinds = dataclasses.field(default_factory=Kinds)


@public
def _init(recipe: Recipe, params: Any) -> dict[str, Any]:
    grouping.check_params(params, [*_arguments(recipe.engines[0].cls.__init__)])
    leaves, treedef = trees.flatten(params)
    # In the driver a parameter may live on the ranks; state of one that is cut is made where it is.
    cut = [leaf for leaf in leaves if isinstance(leaf, Array) and leaf.spec.entries]
    if cut and current() is None:
        return spmd(functools.partial(_init, recipe), mesh=cut[0].mesh)(params)
    leaves = [leaf.full() if isinstance(leaf, Array) else leaf for leaf in leaves]
    groups = grouping.numbers_of(recipe.groups, trees.unflatten(treedef, leaves))
    grouping.warn_of_empty(len(recipe.groups), groups, treedef)
    given = [
        Leaf(path, leaf, None, group)
        for path, leaf, group in zip(trees.places(treedef), leaves, groups, strict=True)
        if is_trainable(leaf)
    ]
    with torch.set_grad_enabled(False):
        created = parts.create(recipe.shard, recipe.engines, given)
    state = {
        "state": created,
        **_written(recipe, [engine.hyper() for engine in recipe.engines]),
    }
    return (
        {**state, "count": torch.zeros((), dtype=torch.int64, device="cpu")} if recipe.schedule is not None else state
    )


@public
def _step(recipe: Recipe, params: Any, grads: Any, opt_state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    # A compiler would trace writes to memory that it knows nothing of.
    return untraced(_stepped)(recipe, params, grads, opt_state)


def _stepped(recipe: Recipe, params: Any, grads: Any, opt_state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    if type(params) is not dict or "hyper" in params:
        grouping.refuse_module("opt.step", params)
    leaves, treedef = trees.flatten(params)
    state, hypers, count = _read(recipe, opt_state)
    # The new count stays on the host: reading it from a GPU, at the next step, would wait for all of the GPU's work.
    count = count.cpu() if isinstance(count, torch.Tensor) else count
    try:
        step = settle(recipe.kinds, recipe.shard, recipe.groups, (leaves, treedef), grads, state)
    except HasArrays:
        return _stepped(recipe, *trees.map(_local, (params, grads, opt_state)))
    if recipe.mixing is not None:
        named = trees.places(treedef)
        refuse_cut(recipe.engines[0].cls, recipe.mixing, ((named[i], leaves[i]) for i in step.known.indexes))
    donation.spare_repeated(step.params)
    now = hypers if count is None or recipe.schedule is None else recipe.schedule.at(int(count), hypers)
    scale = None if recipe.clip is None else clipping.scale_of(recipe.clip, step.params, step.grads)
    try:
        with torch.set_grad_enabled(False), labelled(step.known.label):
            new_params, new_state, new_hypers = step.update(recipe.engines, now, scale)
    finally:
        donation.close()
    step.mark(new_params)
    for index, new in zip(step.known.indexes, new_params, strict=True):
        leaves[index] = new
    if count is not None:
        # A value that the schedule set for this step alone must not be what the next step starts from.
        new_hypers = [
            {name: hyper[name] if name in hyper and value is scheduled[name] else value for name, value in new.items()}
            for hyper, scheduled, new in zip(hypers, now, new_hypers, strict=True)
        ]
    new_opt_state = {"state": new_state, **_written(recipe, new_hypers, hypers, opt_state)}
    if count is not None:
        new_opt_state["count"] = count + 1
    updates = noted_updates()
    if updates is not None:
        updates.append(Update(step.params, step.grads, opt_state, new_params, trees.leaves(new_state)))
    return trees.unflatten(treedef, leaves), new_opt_state


def _local(leaf: Any) -> Any:
    """A rank's shard of an Array, as it is where the Array is an argument."""
    if not isinstance(leaf, Array):
        return leaf
    shard = frozen_as(leaf.local, leaf.local.detach())
    shard._spmd_spec = leaf.spec  # type: ignore[attr-defined]
    return shard


def _written(recipe: Recipe, hypers: list[dict[str, Any]], before: Any = None, given: Any = None) -> dict[str, Any]:
    """The hyper-parameters as a state holds them: all of the default group's, and each other group's own.

    Args:
        before: the hyper-parameters that the step began with.
        given: the state that they came from; a group keeps its own, even if they did not change.
    """
    if not recipe.groups:
        return {"hyper": hypers[0]}
    own = []
    for number, (hyper, names) in enumerate(zip(hypers[1:], recipe.owned[1:], strict=True), 1):
        had = () if given is None else given["groups"][number - 1]
        changed = () if before is None else [name for name in hyper if hyper[name] is not before[number].get(name)]
        own.append({name: hyper[name] for name in hyper if name in names or name in had or name in changed})
    return {"hyper": hypers[0], "groups": own}


def _read(recipe: Recipe, opt_state: Mapping[str, Any]) -> tuple[Any, list[dict[str, Any]], Any]:
    """A state's tensors, the hyper-parameters of every group, and the number of steps taken, if it is counted."""
    try:
        state, hyper = opt_state["state"], opt_state["hyper"]
        own = opt_state["groups"] if recipe.groups else []
        count = None if recipe.schedule is None else opt_state["count"]
        fits = len(own) == len(recipe.groups) and all(isinstance(each, Mapping) for each in (state, hyper, *own))
        if len(opt_state) > 2:  # more than what every state has
            _refuse_unread(opt_state, hyper)
    except (TypeError, KeyError, IndexError):
        fits = False
    if not fits:
        more = {"groups": "[...]"} if recipe.groups else {}
        more |= {"count": "..."} if recipe.schedule is not None else {}
        form = ", ".join(f"{name!r}: {form}" for name, form in {"state": "...", "hyper": "...", **more}.items())
        raise SpecError(
            "opt_state has an unexpected form",
            got=repr([*opt_state]) if isinstance(opt_state, Mapping) else type(opt_state).__name__,
            expected=f"{{{form}}}",
            remedy="pass what opt.init or opt.step returned"
            + (f"; {FROM_TORCH}" if isinstance(opt_state, Mapping) and "param_groups" in opt_state else ""),
        )
    return state, [hyper, *({**hyper, **one} for one in own)], count


def _refuse_unread(opt_state: Mapping[str, Any], hyper: Any) -> None:
    """Refuse an entry that the user added to a state, since no step would read it."""
    name = next((name for name in opt_state if name not in _READ), None)
    if name is not None:
        known = isinstance(hyper, Mapping) and name in hyper
        remedy = f'write opt_state["hyper"][{name!r}] = ...' if known else "pass what opt.init or opt.step returned"
        problem = f"opt_state has an entry {name!r}, which no step reads"
        raise SpecError(problem, expected=f"some of {[*_READ]}", remedy=remedy)


_READ = ("state", "hyper", "groups", "count", "ema")


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
        raise SpecError(
            "optimizer got an unexpected argument 'cls'",
            got=repr(cls),
            expected="a subclass of torch.optim.Optimizer",
            remedy="pass the class and its keywords, as in optimizer(torch.optim.AdamW, lr=1e-3)",
        )


def _check_keywords(cls: type[torch.optim.Optimizer], hyper: dict[str, Any]) -> None:
    if any(argument.default is argument.empty for argument in _arguments(cls.step).values()):
        raise SpmdError(
            f"{cls.__name__} evaluates a closure in its step, which a pure step(params, grads, state) has not",
            remedy="take an optimizer that needs one gradient a step, such as AdamW, or call torch's own in the "
            "program, with a closure that calls a step for the loss and its gradients (docs/how_to.md)",
        )
    if held := next((name for name, value in hyper.items() if isinstance(value, Array)), None):
        raise SpecError(f"{cls.__name__} got a {held} that is on a mesh", remedy=f"pass float({held})")
    accepted = _arguments(cls.__init__)
    accepted.pop("params", None)
    open_ended = any(a.kind is a.VAR_KEYWORD for a in inspect.signature(cls.__init__).parameters.values())
    unknown = next((name for name in hyper if name not in accepted and not open_ended), None)
    missing = next((name for name, a in accepted.items() if a.default is a.empty and name not in hyper), None)
    if unknown or missing:
        problem = f"does not take {unknown!r}" if unknown else f"needs a value for {missing!r}"
        expected, remedy = f"some of {[*accepted]}", instead_of(unknown, accepted) if unknown else ""
        raise SpecError(f"{cls.__name__} {problem}", expected=expected, got=f"{[*hyper]}", remedy=remedy)


def _arguments(method: Callable) -> dict[str, inspect.Parameter]:
    """The named arguments after `self`."""
    _, *rest = inspect.signature(method).parameters.values()
    return {a.name: a for a in rest if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)}
