"""Reductions of flat contiguous tensors on GPUs, as NCCL calls; `nccl_arithmetic` says how each travels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..flat import as_bytes, contiguous
from ..reduction import Op, reduce_in_order
from .nccl_arithmetic import as_signed, decoded, encoded, nccl_type, way
from .nccl_channel import Channel


class Reductions:
    """The reductions of one channel."""

    def __init__(self, channel: Channel):
        self._channel, self._nccl, self._size = channel, channel.library.nccl, len(channel.ranks)

    def everywhere(self, flat: torch.Tensor, op: Op, out: torch.Tensor | None) -> torch.Tensor:
        """The reduction on every rank: written to `out` if possible, else a new tensor."""
        chosen = way(op, flat.dtype)
        if not flat.numel():
            return flat.clone() if out is None else out
        if chosen.op is None:
            return self._combined(flat, op)
        source = encoded(flat, chosen)
        if not chosen.same:
            target = source  # `source` is a new tensor, so NCCL can write its result there
        else:
            target = torch.empty_like(source) if out is None else encoded(out, chosen)
        self._launch("allReduce", source, target, source.numel(), chosen.op)
        return decoded(target, flat.dtype, chosen, self._size)

    def at(self, dst: int, flat: torch.Tensor, op: Op) -> torch.Tensor:
        """The reduction on rank `dst`; on other ranks, a tensor without meaning."""
        chosen = way(op, flat.dtype)
        if chosen.op is None or not flat.numel():
            return self.everywhere(flat, op, None)
        source = encoded(flat, chosen)
        target = torch.empty_like(source) if self._channel.rank == dst else source
        self._launch("reduce", source, target, source.numel(), chosen.op, dst)
        return decoded(target, flat.dtype, chosen, self._size)

    def scattered(self, pieces: Sequence[torch.Tensor], op: Op, count: int) -> torch.Tensor:
        """The reduction of this rank's piece, of `count` elements; the pieces of other ranks may differ in size."""
        whole = torch.cat([contiguous(piece).view(-1) for piece in pieces])
        chosen, sizes = way(op, whole.dtype), [piece.numel() for piece in pieces]
        if chosen.op is None or not count or set(sizes) != {count}:
            return self.everywhere(whole, op, None).split(sizes)[self._channel.rank]
        source = encoded(whole, chosen)
        target = torch.empty(source.numel() // self._size, dtype=source.dtype, device=source.device)
        self._launch("reduceScatter", source, target, target.numel(), chosen.op)
        return decoded(target, whole.dtype, chosen, self._size)

    def _launch(
        self, name: str, source: torch.Tensor, target: torch.Tensor, count: int, op: str = "", *dst: int
    ) -> None:
        numbers = nccl_type(self._nccl, source.dtype), *([int(getattr(self._nccl, op))] if op else []), *dst
        call = name, source.data_ptr(), target.data_ptr(), count, *numbers
        self._channel.launch(name, [call], (source, target))

    def _combined(self, flat: torch.Tensor, op: Op) -> torch.Tensor:
        """For ops and dtypes that NCCL can't reduce: gather, and combine in rank order on every rank."""
        data = as_bytes(flat)
        everything = torch.empty(self._size * data.numel(), dtype=torch.uint8, device=flat.device)
        self._launch("allGather", data, everything, data.numel())
        parts = [as_signed(part.view(flat.dtype)) for part in everything.split(data.numel())]
        return reduce_in_order(parts, op, torch.empty_like(parts[0])).view(flat.dtype)
