"""The collectives as operations on one tensor, each with its transpose: the table of docs/architecture.md, section 4.

All but the extremes are linear, so their transposes are operations of the same kind, which can be differentiated again.
Where an operation takes or gives one entry for each rank, these lie along the first dimension; `_movements` moves it to
its place.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ..kernels.call import labelled, labels
from ..kernels.communicator import Communicator
from ..kernels.torch_private import with_tangents
from ._tokens import run


@dataclasses.dataclass(frozen=True, slots=True)
class _Linear:
    comm: Communicator
    saves: ClassVar[bool] = False
    name: ClassVar[str]
    replicates: ClassVar[bool]

    def transpose(self) -> _Linear:
        return self

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def vjp(self, gradient: Tensor, *_: Tensor) -> Tensor:
        return run(self.transpose(), gradient)

    def jvp(self, tangent: Tensor, *_: Tensor) -> Tensor:
        return run(self, tangent)

    def compared(self, x: Tensor, along: str = "") -> labelled:
        """Have ranks compare operation, shape and dimensions, as pieces of one shape may be cut in several ways."""
        return labelled(" ".join(filter(None, (f"as {self.name}{list(x.shape)}", along, labels.current))))


@dataclasses.dataclass(frozen=True, slots=True)
class Sum(_Linear):
    """The sum, or with `op="avg"` the mean, on all ranks. Transpose: itself."""

    replicates: ClassVar[bool] = True
    op: str = "sum"

    @property
    def name(self) -> str:  # type: ignore[override]
        return "pmean" if self.op == "avg" else "psum"

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduced(x, self.op)


@dataclasses.dataclass(frozen=True, slots=True)
class Gather(_Linear):
    """The ranks' tensors stacked along a new first dimension, on all ranks."""

    name: ClassVar[str] = "all_gather"
    replicates: ClassVar[bool] = True
    along: str = ""  # where the first dimension goes

    def transpose(self) -> _Linear:
        return Scatter(self.comm, self.along)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.comm.size, *x.shape))
        with self.compared(x, self.along):
            self.comm.all_gather(list(out.unbind(0)), x)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Scatter(_Linear):
    """The sum over ranks, of which rank i keeps entry i of the first dimension."""

    name: ClassVar[str] = "psum_scatter"
    replicates: ClassVar[bool] = False
    along: str = ""  # which dimension was put first

    def transpose(self) -> _Linear:
        return Gather(self.comm, self.along)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[1:])
        with self.compared(x, self.along):
            self.comm.reduce_scatter(out, list(x.unbind(0)))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange(_Linear):
    """Entry i of the first dimension goes to rank i, and what comes from rank i is entry i. Transpose: itself."""

    name: ClassVar[str] = "all_to_all"
    replicates: ClassVar[bool] = False
    along: str = ""  # which dimension was put first, and where it goes

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        with self.compared(x, self.along):
            self.comm.all_to_all(list(out.unbind(0)), list(x.unbind(0)))
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Permute(_Linear):
    """Sends along pairs (source, destination); a rank that receives nothing gets zeros."""

    name: ClassVar[str] = "ppermute"
    replicates: ClassVar[bool] = False
    pairs: tuple[tuple[int, int], ...]

    def transpose(self) -> _Linear:
        return Permute(self.comm, tuple((dst, src) for src, dst in self.pairs))

    def forward(self, x: Tensor) -> Tensor:
        comm, nothing = self.comm, x.new_empty((0, *x.shape))
        targets = {dst for src, dst in self.pairs if src == comm.rank}
        sources = {src for src, dst in self.pairs if dst == comm.rank}
        out = x.new_zeros(x.shape)
        with self.compared(x):
            comm.all_to_all(
                [out if rank in sources else torch.empty_like(nothing) for rank in range(comm.size)],
                [x if rank in targets else nothing for rank in range(comm.size)],
            )
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast(_Linear):
    """The source's tensor on all ranks."""

    name: ClassVar[str] = "pbroadcast"
    replicates: ClassVar[bool] = True
    source: int

    def transpose(self) -> _Linear:
        return Collect(self.comm, self.source)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape).copy_(x)
        self.comm.broadcast(out, src=self.source)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Collect(_Linear):
    """The sum at the source, zeros elsewhere."""

    name: ClassVar[str] = "the gradient of pbroadcast"
    replicates: ClassVar[bool] = False
    source: int

    def transpose(self) -> _Linear:
        return Broadcast(self.comm, self.source)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape).copy_(x)
        self.comm.reduce(out, dst=self.source)
        return out if self.comm.rank == self.source else out.zero_()


@dataclasses.dataclass(frozen=True, slots=True)
class Extreme:
    """The elementwise maximum or minimum, on all ranks. The gradient is shared equally by the ranks that hold it."""

    comm: Communicator
    op: str
    saves: ClassVar[bool] = True
    replicates: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"p{self.op}"

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduced(x, self.op)

    def _share(self, x: Tensor, extreme: Tensor) -> Tensor:
        holds = (x.detach() == extreme.detach()).to(x.dtype)
        return holds / run(Sum(self.comm), holds)

    def vjp(self, gradient: Tensor, *saved: Tensor) -> Tensor:
        return run(Sum(self.comm), gradient) * self._share(*saved)

    def jvp(self, tangent: Tensor, *saved: Tensor) -> Tensor:
        share = self._share(*saved)
        with with_tangents():  # this product has one, in a jvp of a jvp
            return run(Sum(self.comm), tangent * share)
