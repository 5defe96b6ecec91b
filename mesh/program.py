"""A program on one rank, compiled for one signature: cut what came whole, run the body, give each result its spec.

`CompiledCall` does the same in a driver's rank and in a launched one. It is made at the first call of a signature, and
later calls look up what the first has settled. Invariant: the body's tensors share memory with the values that were
passed, and may not be written to. But they are new objects, so attributes set on them do not last.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..kernels.errors import SpecError
from ..kernels.torch_private import draw_as_eager, has_compiler, version, versions
from . import donation, trees
from .ambient import Ambient
from .array import Array
from .batch import BatchSplit
from .purity.captured import Captured
from .purity.first_call import FirstCall
from .purity.writes import Watched
from .rank.held import HeldArrays
from .rank.session import RankSession
from .region import Noted, Region, run_body
from .remote.handle import Remote
from .replication.agreement import path_in
from .replication.first_calls import CHOICES
from .replication.following import follow
from .replication.net import NOTHING, Net, Varying, marked
from .replication.values import Check
from .results import Outcome, Results
from .spec import REPLICATED, P
from .strides import frozen_as, is_frozen


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is shipped to the ranks once: a body, and how its results are cut.

    Attributes:
        body: called with the arguments' local parts.
        out_specs: prefix tree of P for the results.
        name: for messages.
        instead: what a message says to do instead of writing to an argument.
    """

    body: Callable[..., Any]
    out_specs: Any
    name: str
    instead: str = "a step must be pure: write x = x + y instead of x += y, or clone the input first"


@dataclasses.dataclass(frozen=True, slots=True)
class InputLeaf:
    """A leaf of the arguments.

    Attributes:
        kind: "array" (a value on the mesh), "tensor" (one that comes whole) or "value".
        spec: how the body wants it cut; None leaves it as it is.
        donated: the caller gives its memory up.
    """

    kind: str
    spec: P | None = None
    donated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class InputPlan:
    """What all calls of one program with the same kinds of arguments have in common.

    Attributes:
        leaves: of (args, kwargs).
        batch: how their batch was split.
        ambient: torch's settings around them.
    """

    leaves: tuple[InputLeaf, ...]
    batch: BatchSplit
    ambient: Ambient | None

    @property
    def donating(self) -> bool:
        return any(leaf.donated for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedCall:
    """What is shipped for `CallProgram`, once for each signature.

    Attributes:
        program, tree: keys of the shipped program and of its arguments' structure.
        first: the key of the first such plan for the same function, if it captured other data then.
    """

    program: str
    tree: str
    plan: InputPlan
    first: str | None = None


_Input = tuple[P, frozenset[str], bool, bool]  # of a tensor: its spec, the spec's axes, must it be cut, is it donated


class CompiledCall:
    """A program and arguments of one kind on this rank; call it with the leaves.

    Args:
        treedef: of (args, kwargs).
        noted: what such calls have noted on this rank before.
        held: the Arrays that the program captures, whose values come with each call.
    """

    def __init__(
        self,
        session: RankSession,
        mesh: Any,
        program: Program,
        treedef: Any,
        plan: InputPlan,
        noted: Noted | None = None,
        held: HeldArrays | None = None,
    ):
        self._session, self._mesh, self._program, self._treedef, self._plan = session, mesh, program, treedef, plan
        self._donating = plan.donating
        self.held, self._arrays = held, sum(leaf.kind == "array" for leaf in plan.leaves)
        self._has_values = any(leaf.kind == "value" for leaf in plan.leaves)
        self._array_specs: list[P] | None = None  # of the arguments on the mesh, in the last call
        self._inputs: list[_Input | None] = []
        self._results = Results(session, program.name, program.out_specs)
        self._noted = Noted() if noted is None else noted
        self._notes_differing = not self._noted.differing
        self._whole = (type(mesh), Array, Remote)  # not looked into
        self._captured: Captured  # what the body refers to, as it was before the first call

    def for_other_shapes(self) -> CompiledCall:
        """The same for arguments of other shapes: what is checked on a first call was checked."""
        other = copy.copy(self)
        other._results = copy.copy(self._results)
        other.forget()
        return other

    def forget(self) -> None:
        """Describe the next results in full, even if they are like the last."""
        self._results.forget()

    def bind(self, tensors: list[Any], specs: list[P]) -> tuple[list[Any], list[P]]:
        """Of a call's values the arguments; the others are bound to the Arrays that the program captures (`held`)."""
        assert self.held is not None
        self.held.bind(tensors[self._arrays :], specs[self._arrays :])
        return tensors[: self._arrays], specs[: self._arrays]

    def together(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """All leaves in order, merged from those on the mesh and the others."""
        if not others:
            return list(tensors)
        on_mesh, beside = iter(tensors), iter(others)
        return [next(on_mesh if leaf.kind == "array" else beside) for leaf in self._plan.leaves]

    def __call__(
        self, values: list[Any], specs: list[P], key: tuple, *, check: Check, again: int = 0, total: int | None = None
    ) -> Outcome:
        """Run the program on this rank.

        Args:
            values: the leaves, those on the mesh as this rank's shards.
            specs: of the leaves on the mesh.
            key: what its random numbers are made from.
            check: how thoroughly to check what should be the same on several ranks.
            again, total: as in `CallProgram`.
        """
        if specs != self._array_specs:
            self._inputs = self._inputs_of(specs)
            own = [leaf.spec is None for leaf in self._plan.leaves]
            self._cut = [index for index, one in enumerate(self._inputs) if one and one[0].entries and own[index]]
            self._array_specs = specs  # the last, since Ctrl-C may come at any moment
        local = self._enter(values)
        entered = versions(tensors := [x for x in local if isinstance(x, torch.Tensor)])
        for tensor, count in zip(tensors, entered, strict=True):
            tensor._spmd_version = count  # type: ignore[attr-defined]  # what `mark` does, for all at once
        args, kwargs = trees.unflatten(self._treedef, local)
        if is_new := not self._results.known:
            self._captured = Captured([self._program.body, *values], self._whole)
            draw_as_eager()
        net = self._net_over(local) if check is Check.TYPES else None
        first = None
        if is_new and not (again and (has_compiler() or self._noted.checked)):  # others run compiled, checks eagerly
            its = self._program.name, self._program.body, local, self._treedef, self._whole, describe_path
            first = FirstCall(*its, copied=not self._session.launched)
        choices = self._new_choices(values) if self._has_values else []
        watched = self._watched(local) if first is not None or (choices and again < 2) else None
        if watched is not None:
            self._noted.looked_at.clear()
        region = Region(
            *(self._session, key, self._mesh, self._program.body, self._plan.batch, total),
            pure=True,
            captured=self._captured.trainable,
            noted=self._noted,
            notes_differing=is_new and self._notes_differing,
            updates=None if first is None else [],
        )
        looks = NOTHING if net is None and watched is None else follow(net, watched)
        result = run_body(region, self._plan.ambient, self._program.body, args, kwargs, looks)
        # A donated tensor whose memory was taken has become a DonatedTensor; that memory may have been written to.
        if donation.DonatedTensor in map(type, tensors) or versions(tensors) != entered:
            self._check_unwritten(local, tensors, entered)
        if watched is not None:
            watched.compare()
        for known, choice in choices:
            known.add(choice)
        if first is not None:
            first.check(region, self._captured, (args, kwargs), result)
            self._noted.checked = True
        outcome = self._results.kept(result, net, check, [local[index] for index in self._cut])
        donation.settle(values, local, outcome.leaves, self._captured.memory if self._donating else None)
        return outcome

    def _new_choices(self, values: list[Any]) -> list[tuple[set[Any], tuple[Any, ...]]]:
        """Combinations of flags that are new, each with the set to add it to: the body may take another branch.

        Integers have a set of their own: they may be flags, but if they count calls, they soon fill it.
        """
        names = tuple(value for value in values if isinstance(value, bool | str | enum.Enum))
        numbers = tuple(value for value in values if type(value) is int)
        return [
            (known, choice)
            for known, choice in zip(self._noted.choices, (names, numbers), strict=True)
            if choice and choice not in known and len(known) < CHOICES
        ]

    def _inputs_of(self, specs: list[P]) -> list[_Input | None]:
        found: list[_Input | None] = []
        own = iter(specs)
        for leaf in self._plan.leaves:
            if leaf.kind == "value":
                found.append(None)
            elif leaf.kind == "tensor":
                spec = leaf.spec or REPLICATED
                found.append((spec, spec.axes, True, False))
            else:
                its_spec = next(own)
                cut = leaf.spec is not None and leaf.spec != its_spec
                if cut and its_spec.entries:
                    raise SpecError(
                        f"an argument of {self._program.name} came back with another spec than before",
                        got=str(its_spec),
                        expected=str(leaf.spec),
                        remedy="declare the same specs at every call",
                    )
                spec = its_spec if leaf.spec is None else leaf.spec
                found.append((spec, spec.axes, cut, leaf.donated))
        return found

    def _enter(self, values: list[Any]) -> list[Any]:
        """This rank's part of every leaf, with its spec noted on it; a tensor that is passed twice stays one tensor."""
        plain = torch.Tensor
        ids = [id(value) for value, leaf in zip(values, self._inputs, strict=True) if leaf is not None]
        times = None if len(set(ids)) == len(ids) else collections.Counter(ids)
        found: dict[Any, torch.Tensor] = {}
        local: list[Any] = []
        for value, leaf in zip(values, self._inputs, strict=True):
            if leaf is not None:
                spec, axes, cut, donated = leaf
                whose = value
                if times is not None and (id(whose), leaf) in found:
                    local.append(found[id(whose), leaf])
                    continue
                if cut:
                    value = self._taken(value, spec)
                elif type(value) is plain or not is_frozen(value):  # writes to donated ones count for them alone
                    value = value.data if donated else value.detach()
                value._spmd_spec, value._spmd_axes = spec, axes
                if donated and value is not whose:
                    alone = times is None or times[id(whose)] == 1
                    owned = alone and donation.is_owner(whose) and not self._session.copied
                    donation.mark_donated(value, owned=owned, value=whose)
                if times is not None:
                    found[id(whose), leaf] = value
            local.append(value)
        return local

    def _taken(self, value: torch.Tensor, spec: P) -> torch.Tensor:
        """This rank's part of a tensor that came whole."""
        session = self._session
        if spec.entries:
            # The caller has checked this with the last call's shape if the value was not there yet.
            uneven, where = self._plan.batch.axis is not None, f"an argument of {self._program.name}"
            session.layout.check_shape(tuple(value.shape), spec, uneven=uneven, where=where)
            return session.on_device(session.layout.take(value, spec, session.rank))
        if value.device != session.device:
            return frozen_as(value, session.on_device(value.detach()))
        return value if is_frozen(value) else value.detach()

    def _check_unwritten(self, local: list[Any], tensors: list[torch.Tensor], entered: list[int]) -> None:
        """Refuse a body that has written to its arguments, except donated ones."""
        for tensor, before in zip(tensors, entered, strict=True):
            if type(tensor) is not donation.DonatedTensor and version(tensor) != before:
                self._refuse_write(next(index for index, leaf in enumerate(local) if leaf is tensor))

    def _watched(self, local: list[Any]) -> Watched:
        """What the body may not write to; watched at the first call of a signature, and when flags are new."""
        inputs = [
            (leaf, functools.partial(self._refuse_write, index))
            for index, leaf in enumerate(local)
            if isinstance(leaf, torch.Tensor) and not donation.may_take(leaf)
        ]
        return Watched([*inputs, *self._captured.watched(self._program.name, self._session.where())])

    def _called(self, index: int) -> str:
        """What a leaf of the arguments is called."""
        return describe_path(path_in(self._treedef, index))

    def _refuse_write(self, index: int) -> NoReturn:
        problem = f"{self._program.name} changed its input {self._called(index)} in place"
        raise SpecError(problem, where=self._session.where(), remedy=self._program.instead)

    def _net_over(self, local: list[Any]) -> Net:
        """A net that knows along which axes each argument is cut, and each Array that the body captures."""
        net, known = Net(self._session.layout.axes), []
        for index, value in enumerate(local):
            if isinstance(value, torch.Tensor):
                axes = net.axes & (marked(value) or frozenset())
                known.append((value, Varying(dict.fromkeys(axes, self._called(index) if axes else ""))))
        for shard, spec in self._captured.shards():
            known.append((shard, Varying(dict.fromkeys(net.axes & spec.axes, "an Array that it captures"))))
        net.enter(known)
        return net


def describe_path(path: str) -> str:
    """`argument 0['w']` from a path into (args, kwargs).

    >>> describe_path("[0][1]['w']"), describe_path("[1]['batch'][0]")
    ("argument 1['w']", 'argument batch[0]')
    """
    which, _, rest = path[4:].partition("]")
    return f"argument {which.strip(chr(39))}{rest}" if path.startswith(("[0][", "[1][")) else path
