"""The values that live on a rank of a driver's mesh: the results of each call, under the call's number."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.errors import MeshError, message
from ..protocol import ALL, Spans
from ..spec import REPLICATED, P


class _Kept:
    """What is left of a call's results: None where a value was freed, or never came here."""

    __slots__ = ("live", "specs", "tensors")

    def __init__(self, tensors: list[Any], specs: list[P]):
        self.tensors, self.specs, self.live = tensors, specs, len(tensors)


class Values:
    """Tensors and their specs, by (number of the call that made them, index).

    Args:
        where: says which rank this is, for messages.
    """

    def __init__(self, where: str):
        self._where = where
        self._calls: dict[int, _Kept] = {}

    def keep(self, call: int, tensors: list[torch.Tensor], specs: list[P]) -> None:
        if tensors:
            self._calls[call] = _Kept(tensors, specs)

    def store(self, call: int, index: int, tensor: torch.Tensor, spec: P) -> None:
        """Keep one value of a call whose others are elsewhere."""
        kept = self._calls.setdefault(call, _Kept([], []))
        while len(kept.tensors) <= index:
            kept.tensors.append(None)
            kept.specs.append(REPLICATED)
        kept.live += kept.tensors[index] is None
        kept.tensors[index], kept.specs[index] = tensor, spec

    def gather(self, spans: Spans) -> tuple[list[torch.Tensor], list[P]]:
        """The values that spans name, one after another."""
        tensors: list[Any] = []
        specs: list[P] = []
        for at in range(0, len(spans), 3):
            call, start, stop = spans[at : at + 3]
            kept = self._calls.get(call)
            if kept is None:
                raise self._lost()
            found = kept.tensors[start:stop]
            if kept.live < len(kept.tensors) and any(tensor is None for tensor in found):
                raise self._lost()
            tensors += found
            specs += kept.specs[start:stop]
        return tensors, specs

    def _lost(self) -> MeshError:
        return MeshError(
            message(
                "a value was lost with the rank that this one has replaced",
                where=self._where,
                remedy="run the call again",
            )
        )

    def free(self, spans: Spans) -> None:
        for at in range(0, len(spans), 3):
            call, start, stop = spans[at : at + 3]
            kept = self._calls.get(call)
            if kept is None:
                continue
            if stop == ALL:
                del self._calls[call]
                continue
            for index in range(start, min(stop, len(kept.tensors))):
                kept.live -= kept.tensors[index] is not None
                kept.tensors[index] = None
            if not kept.live:
                del self._calls[call]

    def __len__(self) -> int:
        return sum(kept.live for kept in self._calls.values())
