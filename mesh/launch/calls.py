"""Calls of one signature, as a launched rank makes them.

Each rank runs its own part, and the ranks tell each other of their results only when these may have changed in kind.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from .. import agreement, trees
from ..array import Array, Meta
from ..program import CompiledCall, InputPlan, Outcome, Program
from ..rank.local_values import LocalValues
from ..rank.session import RankSession
from ..replication.values import check_of
from ..request import Span, passable
from ..run_state import Call
from . import inputs, launched


class LaunchedCall:
    """A program with arguments of one kind on a launched rank; call it with the leaves.

    Args:
        shipped: None: nothing is sent.
        treedef: of (args, kwargs).
        moves: Arrays that must be cut anew before each call, and how.
    """

    def __init__(
        self,
        mesh: Any,
        session: RankSession,
        program: Program,
        shipped: None,
        treedef: Any,
        plan: InputPlan,
        moves: list[tuple[int, Any]],
    ):
        self._mesh, self._session, self._name = mesh, session, program.name
        self.shipped, self.plan, self.moves = shipped, plan, moves
        self.cuts: list[int] = []
        self._call = CompiledCall(session, mesh, program, treedef, plan)
        self._found: tuple[Any, list[agreement.Result]] | None = None
        self._count = 0
        self._inputs = inputs.ReplicatedInputs(treedef, plan, program.name)
        self._metas: list[Meta] = []  # of those results that are tensors

    def accepts(self, mesh: Any, leaves: list[Any], spans: Sequence[Span]) -> bool:
        """Whether all Arrays among the arguments can be passed."""
        return passable(mesh, leaves, spans)

    def __call__(self, leaves: list[Any], spans: Sequence[Span], key: tuple, this: Call, *, check: str) -> Any:
        values: list[Any] = []
        specs = []
        theirs = set()
        for leaf in leaves:
            if type(leaf) is Array:
                source: Any = leaf._source
                values.append(source.value(leaf._index))
                specs.append(source.hints[leaf._index].spec)
                continue
            if isinstance(leaf, torch.Tensor):
                theirs.add(leaf.untyped_storage().data_ptr())
            values.append(leaf)
        try:
            outcome = launched.call(self._session, lambda: self._run(values, specs, key, check))
        except BaseException:
            self._call.forget()
            raise
        assert self._found is not None
        treedef, results = self._found
        tensors, shapes = [], []
        for value, result in zip(outcome.leaves, results, strict=True):
            if result.meta is not None:
                # The tensor passed is the caller's, who may change it.
                tensors.append(value.clone() if theirs and value.untyped_storage().data_ptr() in theirs else value)
                shapes.append(result.shapes)
        arrays = iter(LocalValues(self._session, tensors, self._metas, shapes).arrays(self._mesh))
        made = [
            value if result.meta is None else next(arrays)
            for value, result in zip(outcome.leaves, results, strict=True)
        ]
        return trees.unflatten(treedef, made)

    def _run(self, values: list[Any], specs: list[Any], key: tuple, check: str) -> Outcome:
        self._count += 1
        layout, where = self._mesh.layout, self._mesh.describe
        looked = check_of(check, self._count, layout.size, first=self._found is None)
        given = self._inputs.prints(values, looked)
        outcome = self._call(values, specs, key, check=looked)
        comm = self._session.comm()
        news = self._found is None or not outcome.unchanged
        number = inputs.number_of(given, outcome.prints)
        # All must know whether any rank has news, or that rank would wait for the others to hear them.
        most_news, most, least = comm.all_reduced(torch.tensor([int(news), number, -number]), "max").tolist()
        if most_news or most != -least:
            self._inputs.compare(comm.all_gather_bytes(pickle.dumps(given)), where())
            mine = pickle.dumps((outcome.prints, agreement.encode(outcome.treedef, outcome.metas)))
            gathered = [pickle.loads(data) for data in comm.all_gather_bytes(mine)]
            everyone = agreement.decode_all([encoded for _, encoded in gathered])
            outputs = {rank: (_as_here(its, outcome.treedef), metas) for rank, (its, metas) in everyone.items()}
            self._found = agreement.assemble(
                layout,
                outputs,
                name=self._name,
                where=where(),
                compare=looked > 0,
                prints=[prints for prints, _ in gathered],
                check=looked,
            )
            self._metas = [result.meta for result in self._found[1] if result.meta is not None]
        return outcome


def _as_here(theirs: Any, mine: Any) -> Any:
    """This rank's structure for one that differs in nothing but that a class of the script has arrived as a copy."""
    return mine if theirs != mine and str(theirs) == str(mine) else theirs
