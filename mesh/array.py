"""`Array`: a value on a mesh. The data stays on the ranks; what is here is its shape, its spec and how to get at it.

The same type in the driver and in a launched rank. Where the data is differs, and is a *source*'s business:
`LocalSource` has this rank's shard in hand, the driver's source (in `driver.py`) has a name for it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ..kernels.errors import MeshError, SpecError, message
from . import donation, drawing, launched, strides
from .frozen import frozen_as
from .region import current
from .spec import P


class Source(Protocol):
    """Where an Array's data is."""

    def shape(self) -> tuple[int, ...]: ...
    def dtype(self) -> torch.dtype: ...
    def spec(self) -> P: ...
    def shards(self) -> list[torch.Tensor]: ...
    def full(self) -> torch.Tensor: ...
    def local(self) -> torch.Tensor: ...
    def value(self) -> torch.Tensor: ...


class Array:
    """A global value whose shards live on the ranks of a mesh.

    Attributes:
        mesh: the mesh that holds it.
        shape: the global shape.
        dtype: as in torch.
        spec: how it is cut.
        local: this rank's shard (only on a rank).

    Getting at the values (`float`, `item`, `np.asarray`, `full`, `shards`) waits for the call that makes them, and
    raises what went wrong in it.
    """

    __slots__ = ("__weakref__", "_deal", "_donated", "_source", "mesh")

    def __init__(self, mesh: Any, source: Source, deal: Any = None):
        self.mesh, self._source, self._deal = mesh, source, deal
        self._donated: str | None = None

    def _hint(self) -> tuple[tuple[int, ...], torch.dtype, P]:
        """Shape, dtype and spec without waiting: what the same call made before, if this one is not over yet."""
        hint = getattr(self._source, "hint", None)
        return hint if hint is not None else (tuple(self.shape), self.dtype, self.spec)

    def _readable(self) -> Source:
        if self._donated is not None:
            raise SpecError(
                message(
                    f"this Array was donated to {self._donated} and its memory reused",
                    remedy="use the value that the call returned, or leave the argument out of donate=",
                )
            )
        return self._source

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._source.shape())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype()

    @property
    def spec(self) -> P:
        return self._source.spec()

    @property
    def local(self) -> torch.Tensor:
        return self._readable().local()

    def shards(self) -> list[torch.Tensor]:
        """Each rank's local tensor, in rank order (on launched ranks a collective call)."""
        return self._readable().shards()

    def full(self) -> torch.Tensor:
        """The global value as one torch tensor (on launched ranks a collective call, if it is sharded)."""
        return self._readable().full()

    def item(self) -> float | int | bool | complex:
        """The only element, as a Python number."""
        return self.full().item()

    def __float__(self) -> float:
        return float(self.item())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.item())  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.full())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d Array")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.full()
        if value.dtype is torch.bfloat16:
            value = value.float()  # numpy has no bfloat16
        return np.asarray(value.numpy(), dtype=dtype)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __copy__(self) -> Array:
        return self  # its value never changes

    def __deepcopy__(self, memo: Any) -> Array:
        return self

    def __reduce__(self) -> Any:
        raise MeshError(message("an Array cannot be pickled: its data is on a mesh", remedy="pickle array.full()"))

    def _repr_html_(self) -> str:
        if self._donated is not None:
            return f"<code>{self!r}</code>"
        return drawing.html([self.grid()], self.mesh.size)

    def __str__(self) -> str:
        if self._donated is not None or self.mesh.size > drawing.MOST_DRAWN:
            return repr(self)
        return drawing.text(self.grid())

    def grid(self, name: str = "") -> drawing.Grid:
        """A picture of which rank holds what."""
        return drawing.array_grid(self.mesh.layout, self.spec, tuple(self.shape), f"{name}{self!r}")

    def __repr__(self) -> str:
        if self._donated is not None:
            return f"Array(donated to {self._donated})"
        kind = str(self.dtype).removeprefix("torch.")
        return f"Array({kind}{list(self.shape)}, {self.spec}, {self.mesh.describe()})"


class LocalSource:
    """This rank's shard in hand.

    Args:
        shapes: of all ranks' shards; None if they are cut as `Layout.slices` does.
        hint: shape, dtype and spec, if the caller has them together.
    """

    def __init__(
        self,
        session: Any,
        tensor: torch.Tensor,
        spec: P,
        shape: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...] | None = None,
        hint: tuple[tuple[int, ...], torch.dtype, P] | None = None,
    ):
        self._session, self._tensor, self._spec, self._shape, self._shapes = session, tensor, spec, shape, shapes
        self.name: Any = None  # under which a driver knows it
        self.hint = (tuple(shape), tensor.dtype, spec) if hint is None else hint

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def spec(self) -> P:
        return self._spec

    def local(self) -> torch.Tensor:
        return donation.disown(self._tensor)

    def value(self) -> torch.Tensor:
        """What `local` gives, for a reader that does not hand it on."""
        return self._tensor

    def full(self) -> torch.Tensor:
        if not self._spec.entries:
            # The value must not change with what the caller does to it.
            mine = self._tensor.detach()
            return frozen_as(self._tensor, mine.cpu() if mine.is_cuda else strides.copied(mine))
        return self._session.layout.join(self.shards(), self._spec)

    def shards(self) -> list[torch.Tensor]:
        layout = self._session.layout
        shapes = self._shapes or [layout.shard_shape(self._shape, self._spec, rank) for rank in range(layout.size)]
        out = [torch.empty(shape, dtype=self._tensor.dtype) for shape in shapes]

        def gather() -> None:
            self._session.comm().all_gather(out, self._tensor.detach().cpu())

        if self._session.launched and current() is None:
            launched.call(self._session, gather)
        else:
            gather()
        if strides.is_standard(self._tensor):
            return out
        mine = tuple(self._tensor.shape), strides.dense(self._tensor.shape, self._tensor.stride())
        return [strides.copied(shard, strides.joined(shard.shape, *mine)) for shard in out]
