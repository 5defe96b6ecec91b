"""A rank that does not exist: its communicators give results of the right shape, without communicating."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..run_state import RunState
from ..spec import Layout
from .session import RankSession


class PlannedSession(RankSession):
    """A rank of a mesh that is only planned; see `RankSession`."""

    def __init__(self, layout: Layout, rank: int, where: str):
        self.layout, self.rank, self.backend, self.watch = layout, rank, "planned", None
        self.launched = True  # so that the state of torch's generators is restored
        self.timeout, self.seed, self.regions, self.closed = 0.0, 0, 0, False
        self.device, self.mesh_text, self.run_state = torch.device("cpu"), where, RunState()
        self.apart = threading.local()
        self._alone, self._comms, self._groups, self.lasting = False, {}, {}, None

    def comm_of(self, ranks: tuple[int, ...], channel: str = "main") -> Any:
        return PlannedCommunicator(ranks, self.rank)


class PlannedCommunicator:
    """A group of ranks that don't exist; see `kernels.communicator.Communicator`."""

    backend = "planned"

    def __init__(self, ranks: tuple[int, ...], rank: int):
        self.ranks, self.rank, self.size = ranks, ranks.index(rank), len(ranks)

    def all_reduced(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        result = x.new_empty(x.shape)
        return Done(result) if async_op else result

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        return [mine] * self.size

    def _nothing(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        """Outputs are left as they are: their shape is right."""
        return Done(None) if async_op else None

    all_gather = reduce_scatter = all_to_all = broadcast = reduce = all_reduce = gather = scatter = barrier = _nothing
    send = _nothing

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> int:
        return (self.rank + 1) % self.size if src is None else src

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Done:
        return Done(None)

    def irecv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Done:
        return Done(self.recv(tensor, src, tag))

    def empty(self, shape: Any, *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def all_gathered(self, length: int, dtype: torch.dtype, write: Callable, into: Tensor | None = None) -> Tensor:
        write(torch.empty(length, dtype=dtype, device="cpu"))
        return torch.empty(self.size * length, dtype=dtype, device="cpu")

    def can_rewrite(self, result: Tensor | None) -> bool:
        return False


class Done:
    """An operation that is over as soon as it is started; see `kernels.operations.Work`."""

    def __init__(self, value: Any):
        self._value = value

    def is_completed(self) -> bool:
        return True

    def wait(self) -> Any:
        return self._value


class PlannedBuckets:
    """Sums over ranks that don't exist; see `kernels.bucket.Buckets`."""

    def __init__(self, comm: Any, leaves: Sequence[Any], **_: Any):
        self._sums = [torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu") for leaf in leaves]

    def fill(self, index: int, value: Tensor) -> None:
        self._sums[index].copy_(value)

    def grad_view(self, index: int) -> Tensor:
        return self._sums[index]

    def mark_ready(self, index: int) -> None:
        pass

    def finish(self) -> list[Tensor]:
        return self._sums
