"""The values that live on a rank of a driver's mesh: the results of each call, under the call's number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...kernels.errors import MeshError, message
from ..hosts.copier import Copier
from ..protocol import ALL, Spans
from ..spec import REPLICATED, P
from .lasting_values import KnownLayout, LastingValues


class _Kept:
    """What is left of a call's results: None where a value was freed, or never came here."""

    __slots__ = ("lasts", "live", "specs", "tensors")

    def __init__(self, tensors: list[Any], specs: list[P], lasts: bool = True):
        self.tensors, self.specs, self.lasts = tensors, specs, lasts
        self.live = sum(tensor is not None for tensor in tensors)


class Values:
    """Tensors and their specs, by (number of the call that made them, index).

    Args:
        where: says which rank this is, for messages.
        lasting: notes what is kept here for a process that takes this one's place.

    Attributes:
        copier: copies what is kept here to other hosts, if they are to have it.
    """

    def __init__(self, where: str, lasting: LastingValues | None = None):
        self._where, self._lasting = where, lasting
        self._calls: dict[int, _Kept] = {}
        self.copier: Copier | None = None

    def take_over(self) -> None:
        """Have what the process before this one kept."""
        if self._lasting is not None:
            self._calls = {call: _Kept(*kept) for call, kept in self._lasting.take_over().items()}

    def keep(
        self,
        call: int,
        tensors: list[torch.Tensor],
        specs: list[P],
        *,
        lasts: bool = True,
        known: KnownLayout | None = None,
    ) -> None:
        """Keep what a call has made.

        Args:
            lasts: it is needed after this process; else it can be had again.
            known: how the tensors lie, where that is known.
        """
        if tensors:
            if lasts and self._lasting is not None:
                self._lasting.keep(call, tensors, specs, known)
            self._calls[call] = _Kept(tensors, specs, lasts)
            if lasts and self.copier is not None:
                self.copier.keep(call, tensors, specs)

    def kept(self) -> list[tuple[int, list[Any], list[P]]]:
        """What is here that can't be had again, by the number of its call."""
        return [(call, list(kept.tensors), kept.specs) for call, kept in self._calls.items() if kept.lasts]

    def store(self, call: int, index: int, tensor: torch.Tensor, spec: P) -> None:
        """Keep one value of a call whose others are elsewhere."""
        kept = self._calls.setdefault(call, _Kept([], []))
        while len(kept.tensors) <= index:
            kept.tensors.append(None)
            kept.specs.append(REPLICATED)
        kept.live += kept.tensors[index] is None
        kept.tensors[index], kept.specs[index] = tensor, spec
        if self._lasting is not None:
            found = [tensor]
            self._lasting.lay_out(found)
            kept.tensors[index] = found[0]
            self._lasting.keep(call, kept.tensors, kept.specs)

    def keep_only(self, calls: Iterable[int]) -> None:
        """Forget the values of all other calls."""
        wanted = set(calls)
        for call in [call for call in self._calls if call not in wanted]:
            self._forget(call)

    def gather(self, spans: Spans) -> tuple[list[torch.Tensor], list[P]]:
        """The values that spans name, one after another."""
        tensors: list[Any] = []
        specs: list[P] = []
        for at in range(0, len(spans), 3):
            call, start, stop = spans[at : at + 3]
            kept = self._calls.get(call)
            if kept is None:
                raise self._lost(call)
            found = kept.tensors[start:stop]
            if kept.live < len(kept.tensors) and any(tensor is None for tensor in found):
                raise self._lost(call)
            tensors += found
            specs += kept.specs[start:stop]
        return tensors, specs

    def _lost(self, call: int) -> MeshError:
        return MeshError(
            message(
                "a value was lost with the rank that this one has replaced",
                got=f"the results of call {call}",
                where=self._where,
                remedy="run the call again",
            )
        )

    def free(self, spans: Spans) -> None:
        if self.copier is not None:
            self.copier.free(spans)
        shrunk = set[int]()
        dropped: list[Any] = []  # until the ledger knows
        for at in range(0, len(spans), 3):
            call, start, stop = spans[at : at + 3]
            kept = self._calls.get(call)
            if kept is None:
                continue
            found = kept.tensors if stop == ALL else kept.tensors[start:stop]
            kept.live -= sum(tensor is not None for tensor in found)
            if stop == ALL or not kept.live:
                self._forget(call)
                shrunk.discard(call)
                continue
            dropped += found
            kept.tensors[start:stop] = [None] * len(found)
            shrunk.add(call)
        for call in shrunk:
            if self._lasting is not None:
                self._lasting.shrink(call, self._calls[call].tensors, self._calls[call].specs)

    def _forget(self, call: int) -> None:
        if self._lasting is not None:
            self._lasting.forget(call)
        del self._calls[call]

    def __len__(self) -> int:
        return sum(kept.live for kept in self._calls.values())
