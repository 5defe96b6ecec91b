"""The Arrays that a shipped program captures: the driver passes their values with each call, as it does arguments.

So a program need not be sent again when the driver's variables hold other values, as they do after each step.
Invariant: the captured objects stay the same; before a call each gets that call's value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.errors import MeshError
from ..array import Array, meta
from ..spec import REPLICATED, P
from .local_values import LocalValues
from .session import RankSession


class HeldArrays:
    """Those of one program, by the numbers that the driver has given them."""

    def __init__(self, session: RankSession, mesh: Any):
        self._session, self._mesh = session, mesh
        self._arrays: dict[int, tuple[Array, tuple[int, ...]]] = {}

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def array(
        self, number: int, shape: tuple[int, ...], tensors: Sequence[Any] = (None,), specs: Sequence[P] = (REPLICATED,)
    ) -> Array:
        """The Array with a number, of a global shape, and its value before the first call if there is one."""
        if number not in self._arrays:
            values = self._values(tensors[0], shape, specs[0])
            self._arrays[number] = Array(self._mesh, values, 0, tensors[0]), shape
            values.hold(self._arrays[number][0])
        return self._arrays[number][0]

    def bind(self, tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> None:
        """Give each the value of this call; None for one that was donated.

        Raises:
            MeshError: a value has another shape than the driver could know.
        """
        for number, (array, shape) in self._arrays.items():
            tensor, spec = tensors[number], specs[number]
            if tensor is not None and tuple(tensor.shape) != self._session.layout.shard_shape(
                shape, spec, self._session.rank
            ):
                raise MeshError(
                    "an Array that the function captures has another shape than before",
                    got=f"{list(tensor.shape)} on this rank",
                    expected=f"its part of {list(shape)}",
                    where=self._session.where(),
                    remedy="call again, now that the shape is known",
                )
            values = self._values(tensor, shape, spec)
            array._source, array._index, array._shard = values, 0, tensor
            values.hold(array)

    def _values(self, tensor: torch.Tensor | None, shape: tuple[int, ...], spec: P) -> LocalValues:
        about = meta(shape, torch.float32 if tensor is None else tensor.dtype, spec)
        values = LocalValues(self._session, [], [about])
        if tensor is None:
            values.donated[0] = "an earlier call"
        return values
