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
from ..spec import P
from .local_values import LocalValues
from .session import RankSession


class _Held:
    """One of them: an Array, and what its last value was like, with the global shape."""

    __slots__ = ("array", "dtype", "part", "shape", "spec")

    def __init__(self, mesh: Any, shape: tuple[int, ...]):
        self.array, self.shape = Array(mesh, None, 0), shape  # type: ignore[arg-type]  # a value is bound to it at once
        self.dtype: torch.dtype | None = None
        self.spec: P | None = None
        self.part: tuple[int, ...] = ()  # the shape of this rank's part

    def bind(self, session: RankSession, tensor: torch.Tensor | None, spec: P) -> None:
        """Give the Array a value of another kind than the last; None for one that was donated."""
        if tensor is None:
            self.dtype = self.spec = None
            values = LocalValues(session, [], [meta(self.shape, torch.float32, spec)])
            values.donated[0] = "an earlier call"
        else:
            if not spec.entries:  # the driver may not have known better, if the call that made it was under way
                self.shape = tuple(tensor.shape)
            part = session.layout.shard_shape(self.shape, spec, session.rank)
            if tuple(tensor.shape) != part:
                raise MeshError(
                    "an Array that the function captures has another shape than the last result of its kind",
                    got=f"{list(tensor.shape)} on this rank",
                    expected=f"{list(part)}, its part of {list(self.shape)}",
                    where=session.where(),
                    remedy="ask for its .shape before the call, which waits until it is known",
                )
            self.dtype, self.spec, self.part = tensor.dtype, spec, part
            values = LocalValues(session, [], [meta(self.shape, tensor.dtype, spec)])
        self.array._source, self.array._shard = values, tensor
        values.hold(self.array)


class HeldArrays:
    """Those of one program, by the numbers that the driver has given them."""

    def __init__(self, session: RankSession, mesh: Any):
        self._session, self._mesh = session, mesh
        self._held: dict[int, _Held] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def array(self, number: int, shape: tuple[int, ...], tensor: torch.Tensor | None, spec: P) -> Array:
        """The Array with a number, of a global shape, and its value before the first call if there is one."""
        if number not in self._held:
            self._held[number] = _Held(self._mesh, shape)
            self._held[number].bind(self._session, tensor, spec)
        return self._held[number].array

    def bind(self, tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> None:
        """Give each the value of this call; None for one that was donated.

        Raises:
            MeshError: a value has another shape than the driver could know.
        """
        for number, held in self._held.items():
            tensor = tensors[number]
            if (
                tensor is not None
                and specs[number] == held.spec
                and tensor.dtype is held.dtype
                and tensor.shape == held.part
            ):
                held.array._shard = tensor
            else:
                held.bind(self._session, tensor, specs[number])
