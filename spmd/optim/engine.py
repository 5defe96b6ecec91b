"""What makes a torch optimizer pure: for the length of a call, an `Engine` lends it tensors that it may write to.

These are, block by block, copies that `blocks` made where the new values go, or memory that was donated.
Invariant: inputs keep their values unless they were donated, the bits are those of torch's own step on the whole, and
between two calls an engine holds no tensor of the caller's.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import transforms
from ..kernels import torch_private
from ..kernels.errors import SpecError, SpmdError
from ..mesh import trees
from .blocks import BLOCK, Block, FlatJob, Job, Piece, WholeJob, allocate_like, batches, shared_memory
from .hyper import is_numeric, lent, mentions, numbers_in, refuse_unknown, sees_classes, warn_of_own, written
from .leaves import Leaf, State, is_elementwise, is_torchs, refuse_leaf, refuse_step

# The dtypes for which torch's fused kernels start from the same state as the others (in half precision, SGD's start
# from arbitrary momentum).
_FUSED = (torch.float32, torch.float64)


class Engine:
    """Instances of one torch optimizer class, each lent to one call at a time."""

    def __init__(self, cls: type[torch.optim.Optimizer], options: dict[str, Any]):
        self.cls = cls
        self.options = options
        self._light = _light(cls)
        # For torch's own classes, `step` without the wrappers for hooks and the profiler that each instance adds anew.
        self._bare_step = inspect.unwrap(cls.step) if is_torchs(cls) else None
        # Whether any part of a parameter can be stepped alone.
        self._elementwise = is_elementwise(cls)
        self._idle: dict[bool, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {True: [], False: []}
        chosen = options.get("fused") is not None or options.get("foreach") is not None
        known = is_torchs(cls) and "fused" in inspect.signature(cls.__init__).parameters
        self._may_fuse = known and not chosen
        self._fuses: dict[str, bool] = {}  # by kind of device
        self._numeric: frozenset[str] | None = None  # the names of the numbers among the options
        # Classes from elsewhere may look at all parameters in a step, and count their steps in the group.
        self.looks_at_all = self._bare_step is None
        self._written: set[str] = set()  # names that steps have written in the group, besides the numbers
        self._own: dict[str, Any] | None = None  # numbers that a new instance from elsewhere keeps in itself
        # Classes from elsewhere may clip or scale gradients in place; of torch's own, foreach SGD with nesterov does.
        writes = cls is torch.optim.SGD and bool(options.get("nesterov"))
        self._keeps = is_torchs(cls) and not (writes and options.get("foreach"))
        self._keeps_on_gpu = self._keeps and not writes

    def __reduce__(self):
        return Engine, (self.cls, self.options)

    def hyper(self) -> dict[str, Any]:
        """The numeric hyper-parameters with their starting values."""
        instance, options = self._take(False)
        self._idle[False].append((instance, options))
        return {name: value for name, value in options.items() if is_numeric(value)}

    def create(self, leaves: Sequence[Leaf]) -> list[State]:
        """The state that the constructor makes; most classes make none before the first step."""
        if not leaves:
            return []
        params = [leaf.param.detach() for leaf in leaves]
        try:
            instance = self._construct(params)
        except SpecError:
            refuse_leaf(self.cls.__name__, functools.partial(self._light, **self.options), leaves)
            raise
        return [dict(instance.state.get(param, {})) for param in params]

    def update(
        self, leaves: Sequence[Leaf], states: Sequence[State], hyper: Mapping[str, Any], scale: Tensor | None = None
    ) -> tuple[list[Tensor], list[State], dict[str, Any]]:
        """One step: the new parameters, states and hyper-parameters. Leaves without gradient pass through."""
        jobs, by_kernel = self._jobs(leaves, states)
        new_hyper = dict(hyper)
        for (fused, _), some in by_kernel.items():
            if some or not (fused or jobs):
                new_hyper = self._run(some, hyper, fused, scale)
        return *_after(leaves, states, jobs), new_hyper

    def update_flat(
        self, out: Tensor, pieces: Sequence[Piece], state: State, hyper: Mapping[str, Any], scale: Tensor | None = None
    ) -> tuple[State, dict[str, Any]]:
        """One step of a flat parameter in pieces, written to `out`. Returns its new state and hyper-parameters."""
        fused = self._is_fused(out, pieces[0].grad)
        job = FlatJob(out, pieces, self._counted(state, out, fused))
        new_hyper = self._run([job], hyper, fused, scale)
        new_state = job.state
        self._check_flat(new_state)
        return new_state, new_hyper

    def _jobs(
        self, leaves: Sequence[Leaf], states: Sequence[State]
    ) -> tuple[dict[int, WholeJob | FlatJob], dict[tuple[bool, bool], list[Job]]]:
        """Of the leaves with a gradient, by index, and by whether a fused kernel does them and they have state.

        The fused kernel of SGD takes parameters that are all in their first step, or none.
        """
        jobs: dict[int, WholeJob | FlatJob] = {}
        by_kernel: dict[tuple[bool, bool], list[Job]] = {(False, False): []}
        for index, leaf in enumerate(leaves):
            if leaf.grad is not None:
                fused = self._is_fused(leaf.param, leaf.grad)
                jobs[index] = self._job(leaf.param, leaf.grad, self._counted(states[index], leaf.param, fused), fused)
                one_call = fused or bool(self.options.get("fused"))
                by_kernel.setdefault((fused, one_call and bool(states[index])), []).append(jobs[index])
        return jobs, by_kernel

    def _job(self, param: Tensor, grad: Tensor, state: State, fused: bool) -> WholeJob | FlatJob:
        arrays = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
        if self._elementwise:
            # Torch's fused kernels read past the end of state that is too short.
            for name, value in arrays.items():
                if value.shape != param.shape:
                    problem = f"opt_state has a {name!r} that does not fit its parameter"
                    got, expected = (f"shape {tuple(one.shape)}" for one in (value, param))
                    raise SpecError(problem, got=got, expected=expected)
        if not (
            self._elementwise
            and param.is_cpu
            and param.numel() > BLOCK
            and all(one.layout is torch.strided and one.is_contiguous() for one in (param, grad, *arrays.values()))
        ):
            return WholeJob(param, grad, state, fused=fused or bool(self.options.get("fused")))
        out = allocate_like(param, shared_memory())
        source = None if out.data_ptr() == param.data_ptr() else param.view(-1)
        return FlatJob(out.view(-1), [Piece(0, source, grad.view(-1))], state, param.shape)

    def _run(self, jobs: Sequence[Job], hyper: Mapping[str, Any], fused: bool, scale: Tensor | None) -> dict[str, Any]:
        """Do the jobs, block by block, and return the new hyper-parameters."""
        instance, options = self._take(fused)
        lent = self._lend(options, hyper)
        group = instance.param_groups[0]
        group.clear()
        group.update(options, params=[], **lent)
        # A fused kernel goes over everything once. On a GPU blocks would save no traffic, and cost a launch each.
        # A class from elsewhere may count its steps, or look at all parameters: it gets all of them, once.
        whole = self.looks_at_all or bool(options.get("fused")) or not all(job.is_cpu for job in jobs)
        length = None if whole else BLOCK
        for batch in batches(jobs, length):
            self._step(instance, [batch], scale)
        self._give_back(fused, instance, options)
        return self._read(group, options, lent, hyper) if jobs else dict(hyper)

    def _lend(self, options: dict[str, Any], hyper: Mapping[str, Any]) -> dict[str, Any]:
        if self._numeric is None:
            self._numeric = frozenset(name for name, value in options.items() if is_numeric(value))
        if not self.looks_at_all or hyper.keys() == self._numeric:
            return lent(options, self._numeric, hyper)
        # The rest is what an earlier step has written; a name that no step writes is refused after this one.
        numeric = {name: value for name, value in hyper.items() if name in self._numeric}
        more = {name: value for name, value in hyper.items() if name not in self._numeric}
        more = {name: value.clone() if isinstance(value, Tensor) else value for name, value in more.items()}
        return {**lent(options, self._numeric, numeric), **more}

    def _step(self, instance: Any, batch_of: Sequence[Sequence[Block]], scale: Tensor | None) -> None:
        """Step the blocks of each of the instance's groups."""
        batch = batch_of[0] if len(batch_of) == 1 else [block for some in batch_of for block in some]
        lent = [job.lend(start, stop) for job, start, stop in batch]
        together = [one for some in lent for one in some]
        for one in together:
            if scale is not None:
                one.param.grad = (one.grad * scale.to(one.grad.device)).to(one.grad.dtype)
            else:
                keeps = self._keeps if one.grad.is_cpu else self._keeps_on_gpu
                one.param.grad = one.grad.detach() if keeps else one.grad.detach().clone()
            if one.state:  # a copy: what a class from elsewhere writes there is told from what it was lent
                instance.state[one.param] = {**one.state} if self.looks_at_all else one.state
        if len(batch_of) == 1:
            instance.param_groups[0]["params"] = [one.param for one in together]
        else:
            rest = iter(lent)
            for group, blocks in zip(instance.param_groups, batch_of, strict=True):
                group["params"] = [one.param for _ in blocks for one in next(rest)]
        try:
            if self._bare_step is None or torch_private.has_step_hooks():
                instance.step()
            else:
                self._bare_step(instance)
        except (KeyError, RuntimeError) as error:
            refuse_step(self.cls, error, together)
            raise
        for one in together:
            one.param.grad = None
        for (job, start, stop), some in zip(batch, lent, strict=True):
            job.take_back(start, stop, some, [instance.state.pop(one.param, {}) for one in some])

    def _is_fused(self, param: Tensor, grad: Tensor) -> bool:
        """Whether torch's fused kernel steps this parameter, where the user leaves the choice to us.

        Not under `data_parallel(shards=)`, whose bits are those of torch's defaults.
        """
        if not self._may_fuse or param.dtype not in _FUSED or grad.layout is not torch.strided:
            return False
        if transforms.current_plan().virtual is not None:
            return False
        device = param.device.type
        if device not in self._fuses:
            self._fuses[device] = self._can_fuse(param.device)
        return self._fuses[device]

    def _can_fuse(self, device: torch.device) -> bool:
        """Whether the class takes these options together with `fused`, found by trying."""
        param = torch.zeros(1, device=device)
        param.grad = torch.zeros_like(param)
        try:
            self._light([param], **{**self.options, "fused": True}).step()
        except (ValueError, TypeError, RuntimeError):
            return False
        return True

    def _check_flat(self, state: State) -> None:
        """Refuse tensors within lists or dicts of the state: of these, only the last piece's would remain."""
        for name, value in state.items():
            if isinstance(value, Tensor | numbers.Number):
                continue
            if any(isinstance(leaf, Tensor) and leaf.ndim for leaf in trees.leaves(value)):
                raise SpecError(
                    f"optimizer cannot shard {self.cls.__name__}, whose state has tensors within other values",
                    got=f"state[{name!r}] of {trees.shown(value)}",
                    expected="a tensor of the parameter's shape under each name",
                    remedy="give each of these tensors a name of its own in the state, or leave shard out",
                )

    def _counted(self, state: State, param: Tensor, fused: bool) -> State:
        """The state with its step count on the device where torch reads it, wherever it was made."""
        step = state.get("step")
        if not isinstance(step, Tensor):
            return state
        beside = fused or self.options.get("capturable") or self.options.get("fused")
        device = param.device if beside else torch.device("cpu")
        return state if step.device == device else {**state, "step": step.to(device)}

    def _give_back(self, is_fused: bool, instance: Any, options: dict) -> None:
        """Keep the instance for the next call (not after an error)."""
        if instance.state:
            raise SpmdError(
                f"{self.cls.__name__} keeps state that belongs to no parameter",
                got=repr([*instance.state][:3]),
                remedy="keep it per parameter, or as a number in the defaults of its parameter group",
            )
        for group in instance.param_groups:
            group["params"] = []
        if self._own and warn_of_own(self.cls, self._own, instance):
            self._own = {}
        self._idle[is_fused].append((instance, options))

    def _read(self, group: dict[str, Any], options: dict, lent: dict, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters after a step."""
        after = {name: hyper[name] if group[name] is lent[name] else group[name] for name in hyper}
        if not self.looks_at_all:
            return after
        assert self._numeric is not None
        more = written(self.cls, group, options, lent, self._numeric)
        for name, value in more.items():
            is_unchanged = name in lent and type(value) in (int, float) and value is lent[name]
            if is_unchanged and name not in self._written and not mentions(self.cls, name):
                refuse_unknown(name, self._numeric)
        self._written.update(more)
        return {**after, **more}

    def _take(self, is_fused: bool) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        try:
            return self._idle[is_fused].pop()
        except IndexError:
            instance = self._construct([torch.zeros(1, 1, device="cpu")], **({"fused": True} if is_fused else {}))
            instance.state.clear()
            if self.looks_at_all and self._own is None:
                self._own = numbers_in(instance)
            return instance, {name: value for name, value in instance.param_groups[0].items() if name != "params"}

    def _construct(self, params: Sequence[Tensor], **more: Any) -> torch.optim.Optimizer:
        try:
            return self._light(params, **{**self.options, **more})
        except (ValueError, TypeError, RuntimeError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
            raise SpecError(f"{self.cls.__name__} refuses its arguments: {error}", got=given or None) from error


def update(
    engines: Sequence[Engine],
    members: Sequence[tuple[Sequence[Leaf], Sequence[State]]],
    hypers: Sequence[Mapping[str, Any]],
    scale: Tensor | None,
) -> list[tuple[list[Tensor], list[State], dict[str, Any]]]:
    """One step of some groups, as `Engine.update`: a class from elsewhere may look at all (a norm of all gradients)."""
    if len(engines) < 2 or not engines[0].looks_at_all:
        return [
            engine.update(*some, hyper, scale) for engine, some, hyper in zip(engines, members, hypers, strict=True)
        ]
    jobs = [engine._jobs(leaves, states)[0] for engine, (leaves, states) in zip(engines, members, strict=True)]
    taken = [engine._take(False) for engine in engines]
    lents = [engine._lend(options, hyper) for engine, (_, options), hyper in zip(engines, taken, hypers, strict=True)]
    instance = taken[0][0]
    groups = [{**options, "params": [], **lent} for (_, options), lent in zip(taken, lents, strict=True)]
    instance.param_groups = groups
    blocks = [[(job, *bounds) for job in some.values() for bounds in job.blocks(None)] for some in jobs]
    if any(jobs):
        engines[0]._step(instance, blocks, scale)
    instance.param_groups = groups[:1]
    for engine, (own, options) in zip(engines, taken, strict=True):
        engine._give_back(False, own, options)
    return [
        (*_after(leaves, states, done), engine._read(group, options, lent, hyper) if any(jobs) else dict(hyper))
        for engine, (leaves, states), done, group, (_, options), lent, hyper in zip(
            engines, members, jobs, groups, taken, lents, hypers, strict=True
        )
    ]


def _after(
    leaves: Sequence[Leaf], states: Sequence[State], jobs: Mapping[int, WholeJob | FlatJob]
) -> tuple[list[Tensor], list[State]]:
    """The parameters and states after a step; leaves without gradient as they were."""
    params, states = [leaf.param for leaf in leaves], list(states)
    for index, job in jobs.items():
        params[index] = job.param if isinstance(job, WholeJob) else job.out.view(params[index].shape)
        states[index] = job.state
    return params, states


def _light(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class without the wrappers that tell torch's compiler to leave these methods alone.

    At their first call they import that compiler: a second and 100 MB, on every rank, for nothing. The other things
    that they do, switching gradients off and calling hooks, the engine does itself or does not need. What a program has
    derived from such a class finds the methods without wrappers behind its own.
    """
    base = next(filter(is_torchs, cls.__mro__))
    plain = {name: inspect.unwrap(getattr(base, name)) for name in ("add_param_group", "step")}
    light = type(base.__name__, (base,), {**plain, "__module__": base.__module__})
    if base is cls:
        return light
    return cls if sees_classes(cls) else type(cls.__name__, (cls, light), {"__module__": cls.__module__})
