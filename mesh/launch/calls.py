"""Calls of one signature, as a launched rank makes them.

Each rank runs its own part, and the ranks describe their results to each other only if these may have changed in kind.
Arguments that must be the same on all ranks are compared like results (`replication.values`), since each rank has made
its own: a `DataLoader` that shuffles without a seed gives every rank other batches.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import hashlib
import operator
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.call import other_calls, word_key
from ...kernels.flat import storages
from ...kernels.torch_private import holders, in_torch_func, without_torch_function
from .. import trees
from ..ambient import made_within_torch_func
from ..array import Array
from ..batch import Deal
from ..program import CompiledCall, InputPlan, Outcome, Program, describe_path
from ..rank.local_values import LocalValues
from ..rank.session import RankSession
from ..replication import agreement
from ..replication.agreement import path_in
from ..replication.reports import decode_all
from ..replication.values import Check, check_of
from ..request import Settled, Span, donate, passable
from ..run_state import Call
from ..strides import frozen_as
from . import launched
from .alike import PLAIN, SEED, Given, given_argument, refuse_differing, refuse_other_batches


@dataclasses.dataclass(slots=True)
class _Last:
    """The last results of a compiled call, which calls with other numbers and names share."""

    results: agreement.Assembled | None = None


class LaunchedCall:
    """A program with arguments of one kind on a launched rank; call it with the leaves.

    Args:
        values: a hash of the numbers and names among the leaves, which may be flags.

    Attributes:
        key: equal for calls whose body is checked once: their arguments differ in shapes and dtypes.
    """

    def __init__(self, mesh: Any, session: RankSession, program: Program, settled: Settled, values: int):
        self._mesh, self._session, self._name, self.settled = mesh, session, program.name, settled
        treedef, plan = settled.treedef, settled.plan
        self._call = CompiledCall(session, mesh, program, treedef, plan)
        self._last, self._followed = _Last(), False
        self.key = treedef, plan, values
        self._count, self._number = 0, word_key(self._name) >> 1
        self._inputs = ReplicatedInputs(treedef, plan, program.name)

    def is_of(self, shipped: None) -> bool:
        """As a driver's call says; nothing is sent."""
        return True

    def for_other_values(self, *, flags: bool) -> LaunchedCall:
        """The same for other numbers and names; with other `flags`, the results are compared by value."""
        other = copy.copy(self)
        other._count = 0 if flags else self._count
        return other

    def for_other_shapes(self, settled: Settled) -> LaunchedCall:
        """The same for arguments of other shapes, for which the body is not checked again, as in a driver's call."""
        other = copy.copy(self)
        other.settled, other._call = settled, self._call.for_other_shapes()
        other._last, other._followed, other._count = _Last(), True, 0
        return other

    def accepts(self, mesh: Any, leaves: list[Any], spans: Sequence[Span]) -> bool:
        """Whether all Arrays among the arguments can be passed."""
        return passable(mesh, leaves, spans)

    def __call__(
        self, leaves: list[Any], spans: Sequence[Span], given: Sequence[Span], key: tuple, this: Call, *, check: str
    ) -> Any:
        values: list[Any] = []
        specs = []
        theirs: set[int] = set()
        deal = next((one.deal for one, *_ in spans if one is not None and one.deal is not None), None)
        for leaf in leaves:
            if type(leaf) is Array:
                source: Any = leaf._source
                values.append(source.value(leaf._index))
                specs.append(source.hints[leaf._index].spec)
                continue
            if isinstance(leaf, torch.Tensor):
                try:
                    theirs |= storages(leaf)
                except NotImplementedError:
                    if in_torch_func():
                        raise made_within_torch_func(self._mesh.describe()) from None
                    raise
            values.append(leaf)
        on_mesh = [span for span in spans if span.source is not None]
        try:
            run = functools.partial(self._run, values, specs, key, check, deal, on_mesh)
            outcome = launched.call(self._session, run, self._name, pure=True)
        except BaseException:
            self._call.forget()
            raise
        finally:  # a call that fails may have begun to overwrite them
            donate(given, self.settled.plan, self._name)
        found = self._last.results
        assert found is not None
        theirs |= _held_elsewhere(outcome.tensors, [values[index] for index in self._inputs.on_mesh])
        tensors, shapes = [], []
        for value, result in zip(outcome.leaves, found.leaves, strict=True):
            if result.meta is not None:
                # A copy of what shares memory with something of the program's, which may change it.
                tensors.append(frozen_as(value, value.clone()) if theirs and theirs & storages(value) else value)
                shapes.append(result.shapes)
        local = LocalValues(self._session, tensors, found.metas, shapes, region=self._session.regions)
        arrays = iter(local.arrays(self._mesh))
        made = [  # what is no tensor as this rank has it
            value if result.meta is None else next(arrays)
            for value, result in zip(outcome.leaves, found.leaves, strict=True)
        ]
        return trees.unflatten(found.treedef, made)

    def _run(
        self, values: list[Any], specs: list[Any], key: tuple, check: str, deal: Deal | None, on_mesh: list[Span]
    ) -> Outcome:
        self._count += 1
        layout, where = self._mesh.layout, self._mesh.describe
        first = self._last.results is None and not self._followed
        looked = check_of(check, self._count, layout.size, first=first)
        given = self._inputs.prints(values, looked)
        outcome = self._call(values, specs, key, check=looked, total=self.settled.total)
        comm = self._session.comm()
        news = self._last.results is None or not outcome.unchanged
        number = number_of(given, outcome.prints) ^ self._number ^ number_of_values(deal, on_mesh)
        # All must learn whether any rank has news, since all ranks then exchange descriptions.
        most_news, most, least = comm.all_reduced(
            torch.tensor([int(news), number, -number], device="cpu"), "max"
        ).tolist()
        if most_news or most != -least:
            told = [pickle.loads(data) for data in comm.all_gather_bytes(pickle.dumps((self._name, deal)))]
            if any(name != self._name for name, _ in told):
                raise other_calls({rank: name for rank, (name, _) in enumerate(told)})
            refuse_other_batches([its for _, its in told], self._name, where())
            described = self._inputs.described(given, on_mesh)
            self._inputs.compare(comm.all_gather_bytes(pickle.dumps(described)), where())
            mine = pickle.dumps((outcome.prints, outcome.encoded(self._session.where())))
            gathered = [pickle.loads(data) for data in comm.all_gather_bytes(mine)]
            everyone = decode_all([encoded for _, encoded in gathered])
            outputs = {rank: (_as_here(its, outcome.treedef), metas) for rank, (its, metas) in everyone.items()}
            self._last.results = agreement.assemble(
                layout,
                outputs,
                name=self._name,
                where=where(),
                prints=[prints for prints, _ in gathered],
                check=looked,
            )
        return outcome


def _held_elsewhere(results: Sequence[Any], on_mesh: Sequence[Any]) -> set[int]:
    """The addresses of those memories of results that others may hold, too: what the body captures, say.

    Among these are memories that torch has not allocated (arrays'), but not those of values on the mesh, which nobody
    changes.
    """
    times: collections.Counter[int] = collections.Counter()
    found, elsewhere = dict[int, torch.Tensor](), set[int]()
    for result in results:
        if type(result) is torch.Tensor and result.layout is torch.strided:
            where = result.untyped_storage().data_ptr()
            times[where], found[where] = times[where] + 1, result
        else:
            elsewhere |= storages(result)
    for where, result in found.items():
        if holders(result) > times[where] or not result.untyped_storage().resizable():
            elsewhere.add(where)
    if elsewhere:
        with without_torch_function():  # which donated tensors refuse
            elsewhere.difference_update(*map(storages, on_mesh))
    return elsewhere


def _as_here(theirs: Any, mine: Any) -> Any:
    """This rank's structure, if the other differs only because a class of the script has arrived as a copy."""
    return mine if theirs != mine and str(theirs) == str(mine) else theirs


class ReplicatedInputs:
    """The arguments that every rank passes whole, in calls of one signature.

    Attributes:
        on_mesh: the indices of the others.
    """

    def __init__(self, treedef: Any, plan: InputPlan, name: str):
        self._treedef, self._name, self._keys = treedef, name, trees.keys_text(treedef)
        self._tensors = [index for index, leaf in enumerate(plan.leaves) if leaf.kind == "tensor"]
        self._values = [index for index, leaf in enumerate(plan.leaves) if leaf.kind == "value"]
        self.on_mesh = [index for index, leaf in enumerate(plan.leaves) if leaf.kind == "array"]
        self._before: tuple[list[Any], Given] = [], ()  # last values, if plain and without tensors

    def prints(self, values: list[Any], check: Check) -> Given:
        """What ranks compare of a call's arguments."""
        if not check:
            return ()
        given = [values[index] for index in self._values]
        before, known = self._before
        if known and len(before) == len(given) and all(map(operator.is_, given, before)) and not self._tensors:
            return known
        tensors = [values[index] for index in self._tensors]
        found = [(self._keys, None), *(given_argument(leaf, check) for leaf in (*tensors, *given))]
        if not self._tensors and all(type(value) in PLAIN for value in given):  # other objects may hold much memory
            self._before = given, tuple(found)
        return tuple(found)

    def described(self, given: Given, on_mesh: Sequence[Span]) -> Given:
        """The keys, then of each argument what `prints` gave, and of values on the mesh which ones they are."""
        keys, *prints = given or (("", None),)
        found = dict(zip([*self._tensors, *self._values], prints, strict=bool(prints)))
        for source, at, start, stop in on_mesh:
            found.update({at + index - start: (source.origin(index), None) for index in range(start, stop)})
        return keys, *(found.get(index, ("", None)) for index in range(self._treedef.num_leaves))

    def compare(self, gathered: list[bytes], where: str) -> None:
        """Refuse arguments that differ between ranks, according to what `described` gave on each, pickled."""

        def leaf(index: int) -> str:
            return f"{describe_path(path_in(self._treedef, index))} of {self._name}"

        refuse_differing(gathered, f"the arguments of {self._name}", leaf, where, SEED)


def number_of(given: Given, prints: bytes) -> int:
    """A number from what a rank compares: if ranks' numbers differ, so does that."""
    if not given and not prints:
        return 0
    return int.from_bytes(hashlib.blake2b(prints + _bytes_of(given), digest_size=8).digest(), "little") >> 2


def number_of_values(deal: Deal | None, on_mesh: Sequence[Span]) -> int:
    """The same for values on the mesh: of which call each is, and of a batch where it is in the run."""
    which = [(at, source.region, start, stop) for source, at, start, stop in on_mesh]
    return zlib.crc32(f"{which} {deal and (deal.position, deal.source)}".encode())


@functools.lru_cache(maxsize=4)  # few, since strings may be large
def _bytes_of(given: Given) -> bytes:
    return b"".join(repr(kind).encode() + (printed or b"") for kind, printed in given)
