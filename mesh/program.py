"""A program on one rank, compiled for one signature: cut what came whole, run the body, give each result its spec.

`CompiledCall` does the same in a driver's rank and in a launched one. It is made at the first call of a signature,
and what that settles is only looked up afterwards. Invariant: the body's tensors share memory with the values that were
passed, which may not be written to, but are objects of their own: nothing set on them lasts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.errors import SpecError, message
from ..kernels.torch_private import version, versions
from . import donation, trees
from .agreement import OutputMeta, path_in, same
from .ambient import Ambient, under
from .array import Array
from .batch import BatchSplit
from .frozen import frozen_as, is_frozen
from .rank.captured import Captured
from .rank.session import RankSession
from .region import Region, generators, inside, reseed, restore_generators
from .replication.following import follow
from .replication.net import Net, Varying, mark, marked
from .replication.numbers import plain_number
from .replication.values import Check, prints_of_all, prints_of_scalars, scalars_among
from .spec import REPLICATED, P, is_sharded, is_spec


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is shipped to the ranks once: a body and how its results are read.

    Attributes:
        body: called with the arguments' local parts.
        out_specs: prefix tree of P for the results.
        name: for messages.
    """

    body: Callable[..., Any]
    out_specs: Any
    name: str


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
    """What calls of one program have in common whose arguments are of the same kinds.

    Attributes:
        leaves: of (args, kwargs).
        batch: how their batch was split.
        ambient: what torch was told around them.
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
    """

    program: str
    tree: str
    plan: InputPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave on this rank.

    Attributes:
        treedef, leaves: the results, as they are kept.
        metas: of each leaf.
        unchanged: structure, kinds and values that are no tensors are those of the call before.
        prints: what is to be compared of the tensors (see `replication.values`).
    """

    treedef: Any
    leaves: list[Any]
    metas: list[OutputMeta]
    unchanged: bool
    prints: bytes


class CompiledCall:
    """A program and arguments of one kind on this rank; call it with the leaves.

    Args:
        treedef: of (args, kwargs).
    """

    def __init__(self, session: RankSession, mesh: Any, program: Program, treedef: Any, plan: InputPlan):
        self._session, self._mesh, self._program, self._treedef, self._plan = session, mesh, program, treedef, plan
        self._donating = plan.donating
        self._array_specs: list[P] | None = None  # of the arguments on the mesh, as they were last
        self._inputs: list[tuple[P, bool, bool] | None] = []  # of each tensor: its spec, is it to be cut, is it donated
        self._raw: Any = None  # the last results' structure, with its Sharded nodes
        self._outputs: tuple[Any, list[P]] = (None, [])  # that without them, and the spec of each leaf
        self._before: tuple[Any, list[OutputMeta]] | None = None  # of the last call
        self._captured: Captured  # what the body refers to, as it was before the first call
        self._scalars: list[int] = []  # which of them are numbers that all ranks should have the same

    def forget(self) -> None:
        """Tell everything of the next results."""
        self._before = None

    def together(self, tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The leaves, from those on the mesh and the others, each in order."""
        if not others:
            return list(tensors)
        on_mesh, beside = iter(tensors), iter(others)
        return [next(on_mesh if leaf.kind == "array" else beside) for leaf in self._plan.leaves]

    def __call__(self, values: list[Any], specs: list[P], key: tuple, *, check: Check) -> Outcome:
        """Run the program on this rank.

        Args:
            values: the leaves, those on the mesh as this rank's shards.
            specs: of the leaves on the mesh.
            key: what its random numbers are made from.
            check: what should be the same on several ranks is looked at so far.
        """
        session = self._session
        if specs != self._array_specs:
            self._inputs, self._array_specs = self._inputs_of(specs), specs
        local = self._enter(values)
        net = _net_over(session, self._treedef, local) if check is Check.TYPES else None
        tensors = [x for x in local if isinstance(x, torch.Tensor)]
        entered = versions(tensors)
        args, kwargs = trees.unflatten(self._treedef, local)
        first = self._raw is None
        if first:
            self._captured = Captured([self._program.body, *values], (type(self._mesh), Array))
        region = Region(session, key, self._mesh, self._plan.batch, captured=self._captured.trainable, pure=True)
        state = generators() if session.launched else None
        reseed(region, session.rank)
        try:
            with inside(region), under(self._plan.ambient), follow(net):
                result = self._program.body(*args, **kwargs)
        finally:
            if state is not None:
                restore_generators(state)
        # A donated one whose memory was taken is no plain tensor any more, and may have been written to.
        if donation.DonatedTensor in map(type, tensors) or versions(tensors) != entered:
            self._check_unwritten(local, tensors, entered)
        if first:
            self._captured.check(self._program.name, session.where())
        outcome = self._leave(result, net, check)
        donation.settle(values, local, outcome.leaves, donating=self._donating)
        return outcome

    def _inputs_of(self, specs: list[P]) -> list[tuple[P, bool, bool] | None]:
        found: list[tuple[P, bool, bool] | None] = []
        own = iter(specs)
        for leaf in self._plan.leaves:
            if leaf.kind == "value":
                found.append(None)
            elif leaf.kind == "tensor":
                found.append((leaf.spec or REPLICATED, True, False))
            else:
                its_spec = next(own)
                cut = leaf.spec is not None and leaf.spec != its_spec
                if cut and its_spec.entries:
                    raise SpecError(
                        message(
                            f"an argument of {self._program.name} came back with another spec than before",
                            got=str(its_spec),
                            expected=str(leaf.spec),
                            remedy="declare the same specs at every call",
                        )
                    )
                found.append((its_spec if leaf.spec is None else leaf.spec, cut, leaf.donated))
        return found

    def _enter(self, values: list[Any]) -> list[Any]:
        """This rank's part of every leaf; a tensor that comes twice stays one tensor."""
        ids = [id(value) for value, leaf in zip(values, self._inputs, strict=True) if leaf is not None]
        if len(set(ids)) == len(ids):
            return [
                value if leaf is None else self._local(value, *leaf, alone=True)
                for value, leaf in zip(values, self._inputs, strict=True)
            ]
        local: list[Any] = []
        times = collections.Counter(ids)
        found: dict[Any, torch.Tensor] = {}
        for value, leaf in zip(values, self._inputs, strict=True):
            if leaf is not None:
                which = (id(value), leaf)
                if which not in found:
                    found[which] = self._local(value, *leaf, alone=times[id(value)] == 1)
                value = found[which]
            local.append(value)
        return local

    def _local(self, value: torch.Tensor, spec: P, whole: bool, donated: bool, *, alone: bool) -> torch.Tensor:
        """This rank's part of a leaf, with what is known of it noted on it."""
        session = self._session
        if whole and spec.entries:
            value = session.placed(session.layout.take(value, spec, session.rank))
        elif whole and value.device != session.device:
            value = frozen_as(value, session.placed(value.detach()))
        elif not is_frozen(value):
            whose = value
            value = value.detach()
            if donated:
                donation.mark_donated(value, owned=alone and donation.is_owner(whose))
        value._spmd_spec = spec  # type: ignore[attr-defined]
        return mark(value, spec.axes)

    def _check_unwritten(self, local: list[Any], tensors: list[torch.Tensor], entered: list[int]) -> None:
        """Refuse a body that has written to its arguments, but for donated ones."""
        for tensor, before in zip(tensors, entered, strict=True):
            if type(tensor) is not donation.DonatedTensor and version(tensor) != before:
                index = next(index for index, leaf in enumerate(local) if leaf is tensor)
                where = describe_path(path_in(self._treedef, index))
                raise SpecError(
                    message(
                        f"{self._program.name} changed its input {where} in place",
                        where=self._session.where(),
                        remedy="a step must be pure: write x = x + y instead of x += y, or clone the input first",
                    )
                )

    def _leave(self, result: Any, net: Net | None, check: Check) -> Outcome:
        """Results as they are kept, and what the other side must know of them."""
        session, before = self._session, self._before
        leaves, raw = trees.flatten(result)
        if self._raw is None or raw != self._raw:
            self._outputs, self._raw = self._outputs_of(result, raw, leaves), raw
        treedef, specs = self._outputs
        if any(type(leaf) is Array for leaf in leaves):
            specs = [leaf.spec if type(leaf) is Array else spec for leaf, spec in zip(leaves, specs, strict=True)]
            leaves = [leaf.local if type(leaf) is Array else leaf for leaf in leaves]
        unchanged = net is None and before is not None and before[0] == treedef
        known: Sequence[Any] = before[1] if unchanged and before is not None else [None] * len(leaves)
        metas: list[OutputMeta] = []
        for index, (leaf, spec, last) in enumerate(zip(leaves, specs, known, strict=True)):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
                leaf = torch.from_numpy(leaf)
            if not isinstance(leaf, torch.Tensor):
                leaves[index] = leaf = plain_number(leaf)
                about = OutputMeta(None, value=leaf)
                if last is not None and last.spec is None and same(about, last):
                    about = last
            else:
                varying = None if net is None else net.uncovered(leaf, spec.axes)
                leaves[index] = leaf = leaf if is_frozen(leaf) else leaf.detach()
                if last is not None and last.dtype is leaf.dtype and last.shape == leaf.shape and last.spec == spec:
                    metas.append(last)
                    continue
                if spec.entries:
                    self._check_result(treedef, index, leaf, spec)
                about = OutputMeta(spec, tuple(leaf.shape), leaf.dtype, varying=varying)
            unchanged = unchanged and about is last
            metas.append(about)
        session.lay_out(leaves)
        if not unchanged:
            self._before, self._scalars = (treedef, metas), scalars_among(metas)
        if check >= Check.VALUES:
            prints = prints_of_all(leaves, metas, len(session.layout.names))
        else:
            prints = prints_of_scalars(leaves, self._scalars) if check else b""
        return Outcome(treedef, leaves, metas, unchanged, prints)

    def _outputs_of(self, result: Any, raw: Any, leaves: list[Any]) -> tuple[Any, list[P]]:
        """The results' structure without the nodes that say how leaves are cut, and the spec of each leaf."""
        # Of the leaves themselves: classes may check what they are made of.
        nodes, outer = trees.flatten(trees.unflatten(raw, leaves), is_leaf=is_sharded)
        declared: list[P | None] = []
        for node in nodes:
            declared.extend([node.spec] * len(trees.leaves(node.local)) if is_sharded(node) else [None])
        local = [node.local if is_sharded(node) else node for node in nodes]
        treedef = trees.flatten(trees.unflatten(outer, local))[1]
        try:
            specs = trees.broadcast_to(self._program.out_specs, treedef, is_leaf=is_spec)
        except ValueError:
            raise SpecError(
                message(
                    f"out_specs of {self._program.name} do not fit what it returned",
                    got=f"{self._program.out_specs!r} for {trees.shown(result)}",
                    expected="a prefix of the result's tree",
                    remedy="give one P for all results, or one per result",
                )
            ) from None
        return treedef, [own or spec or REPLICATED for own, spec in zip(declared, specs, strict=True)]

    def _check_result(self, treedef: Any, index: int, leaf: torch.Tensor, spec: P) -> None:
        self._session.layout.check(spec, where=f"out_specs of {self._program.name}")
        if len(spec.entries) > leaf.dim():
            raise SpecError(
                message(
                    f"result {path_in(treedef, index)} of {self._program.name} has fewer dimensions than its spec",
                    got=f"shape {tuple(leaf.shape)} with {spec}",
                    where=self._session.where(),
                    remedy="reshape it, or give it a shorter spec",
                )
            )


def _net_over(session: RankSession, treedef: Any, local: list[Any]) -> Net:
    """A net that knows of the arguments along which axes they are cut."""
    net, known = Net(session.layout.axes), []
    for index, value in enumerate(local):
        if isinstance(value, torch.Tensor):
            axes = net.axes & (marked(value) or frozenset())
            origin = describe_path(path_in(treedef, index)) if axes else ""
            known.append((value, Varying(dict.fromkeys(axes, origin))))
    net.enter(known)
    return net


def describe_path(path: str) -> str:
    """`argument 0['w']` from a path into (args, kwargs).

    >>> describe_path("[0][1]['w']"), describe_path("[1]['batch'][0]")
    ("argument 1['w']", 'argument batch[0]')
    """
    which, _, rest = path[4:].partition("]")
    return f"argument {which.strip(chr(39))}{rest}" if path.startswith(("[0][", "[1][")) else path
