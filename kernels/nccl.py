"""The NCCL communicator: tensors of GPUs go through NCCL, all others through a communicator of the host.

Collectives that NCCL lacks are grouped sends and receives of bytes, as `Communicator` composes them. NCCL adds in an
order of its own: bits may differ from those of CPUs. Invariant: all tensors of one call are on one side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .communicator import Call, Steps, Work, _contiguous, as_bytes
from .nccl_arithmetic import as_signed, brought_back, carried, way
from .nccl_base import NcclBase
from .reduction import check_op, reduce_in_order
from .waiting import wait_until


class NcclCommunicator(NcclBase):
    """A group of ranks with a GPU each; see `Communicator`, and `NcclBase` for how it is made."""

    backend = "nccl"

    # -- what the collectives are made of ------------------------------------------------------------------------------

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        if call is not None:
            self._agree(call, sends, recvs)
        mine, theirs = sends[self.rank], recvs[self.rank]
        sizes = [0 if piece is None else piece.numel() for piece in (mine, theirs)]
        if sizes[0] != sizes[1]:  # NCCL would not say so
            raise self.wrong_piece("exchange" if call is None else call.text, self.rank, *sizes)
        if mine is not None and theirs is not None and mine.data_ptr() == theirs.data_ptr():
            mine = theirs = None  # it is where it is to go
        sends, recvs = list(sends), list(recvs)
        sends[self.rank], recvs[self.rank] = mine, theirs
        byte = self._type(torch.uint8)
        with self._grouped() as launch:
            for rank, (piece, place) in enumerate(zip(sends, recvs, strict=True)):
                if piece is not None and piece.numel():
                    launch("send", piece.data_ptr(), piece.numel(), byte, rank)
                if place is not None and place.numel():
                    launch("recv", place.data_ptr(), place.numel(), byte, rank)
        return
        yield  # a generator like all operations, though it waits for nothing

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str, *, in_place: bool = False) -> Steps:
        self._agree(call)
        return self._reduced(flat, op, None)
        yield

    def _reduced(self, flat: torch.Tensor, op: str, out: torch.Tensor | None) -> torch.Tensor:
        """The reduction of a flat contiguous tensor: in `out`, if it is given and can be, else in a new tensor."""
        chosen = way(op, flat.dtype)
        if not flat.numel():
            return flat.clone() if out is None else out
        if chosen.op is None:
            return self._combined(flat, op)
        source = carried(flat, chosen)
        if not chosen.same:
            target = source  # NCCL may as well write where it reads
        else:
            target = torch.empty_like(source) if out is None else carried(out, chosen)
        number = int(getattr(self.library.nccl, chosen.op))
        self._call("allReduce", source.data_ptr(), target.data_ptr(), source.numel(), self._type(chosen.dtype), number)
        return brought_back(target, flat.dtype, chosen, self.size)

    def _combined(self, flat: torch.Tensor, op: str) -> torch.Tensor:
        """What NCCL can't reduce: gathered, and combined in rank order on every rank."""
        data = as_bytes(flat)
        everything = torch.empty(self.size * data.numel(), dtype=torch.uint8, device=flat.device)
        self._call("allGather", data.data_ptr(), everything.data_ptr(), data.numel(), self._type(torch.uint8))
        parts = [as_signed(part.view(flat.dtype)) for part in everything.split(data.numel())]
        return reduce_in_order(parts, op, torch.empty_like(parts[0])).view(flat.dtype)

    # -- collectives that NCCL has -------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here, and the GPU past what it was given before."""
        self.check()
        self.renew()
        event = self.streams.event()
        wait_until(
            event.query,
            self._watch,
            timeout=self.timeout,
            crowded=True,
            overdue=lambda: self._silence("barrier"),
            late=self.check,
        )
        return self.host.barrier(async_op=async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Any:
        if not self._here("broadcast", tensor):
            return self.host.broadcast(tensor, src, async_op=async_op)
        self._check_rank("broadcast", "src", src)
        call = Call("broadcast", tensor.dtype, tuple(tensor.shape), f"src={src}")

        def steps() -> Steps:
            self._agree(call)
            data = as_bytes(_contiguous(tensor))
            if data.numel():
                pointer = data.data_ptr()
                self._call("broadcast", pointer, pointer, data.numel(), self._type(torch.uint8), src)
            if self.rank != src and data.data_ptr() != tensor.data_ptr() and data.numel():
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("all_reduce", tensor):
            return self.host.all_reduce(tensor, op, async_op=async_op)
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            self._agree(call)
            flat = _contiguous(tensor).view(-1)
            result = self._reduced(flat, op, flat)
            if result.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(result.view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("all_reduce", tensor):
            return self.host.all_reduced(tensor, op, async_op=async_op)
        return super().all_reduced(tensor, op, async_op=async_op)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        if not self._here("reduce", tensor):
            return self.host.reduce(tensor, dst, op, async_op=async_op)
        self._check_rank("reduce", "dst", dst)
        check_op(op, tensor.dtype)
        call = Call("reduce", tensor.dtype, tuple(tensor.shape), f"{op}, dst={dst}")

        def steps() -> Steps:
            self._agree(call)
            flat, chosen = _contiguous(tensor).view(-1), way(op, tensor.dtype)
            if chosen.op is None or not flat.numel():
                result = self._reduced(flat, op, None)
            else:
                source = carried(flat, chosen)
                target = torch.empty_like(source) if self.rank == dst else source
                numbers = self._type(chosen.dtype), int(getattr(self.library.nccl, chosen.op))
                self._call("reduce", source.data_ptr(), target.data_ptr(), source.numel(), *numbers, dst)
                result = brought_back(target, flat.dtype, chosen, self.size)
            if self.rank == dst:
                tensor.detach().copy_(result.view(tensor.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        if not self._here("all_gather", tensor, *(tensor_list or ())):
            return self.host.all_gather(tensor_list, tensor, async_op=async_op)
        outs = self._check_list("all_gather", "tensor_list", tensor_list, tensor.dtype)
        if any(out.shape != tensor.shape for out in outs) or not tensor.numel():
            return super().all_gather(tensor_list, tensor, async_op=async_op)
        call = Call("all_gather", tensor.dtype, None, "", shown=tensor.shape)

        def steps() -> Steps:
            self._agree(call, [tensor] * self.size, outs)
            data = as_bytes(_contiguous(tensor))
            together = _side_by_side(outs)
            if together is None:
                together = torch.empty(self.size * data.numel(), dtype=torch.uint8, device=tensor.device)
            self._call("allGather", data.data_ptr(), together.data_ptr(), data.numel(), self._type(torch.uint8))
            for out, piece in zip(outs, together.split(data.numel()), strict=True):
                if out.data_ptr() != piece.data_ptr():
                    out.detach().copy_(piece.view(tensor.dtype).view(out.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        if not self._here("reduce_scatter", output, *(input_list or ())):
            return self.host.reduce_scatter(output, input_list, op, async_op=async_op)
        check_op(op, output.dtype)
        ins = self._check_list("reduce_scatter", "input_list", input_list, output.dtype)
        call = Call("reduce_scatter", output.dtype, None, op, shown=output.shape)

        def steps() -> Steps:
            self._agree(call, ins, [output] * self.size)
            chosen, count = way(op, output.dtype), output.numel()
            even = all(piece.numel() == count for piece in ins) and count > 0
            if even and chosen.op is not None:
                source = carried(torch.cat([_contiguous(piece).view(-1) for piece in ins]), chosen)
                target = torch.empty(source.numel() // self.size, dtype=source.dtype, device=source.device)
                numbers = self._type(chosen.dtype), int(getattr(self.library.nccl, chosen.op))
                self._call("reduceScatter", source.data_ptr(), target.data_ptr(), target.numel(), *numbers)
                result = brought_back(target, output.dtype, chosen, self.size)
            else:
                sizes = [piece.numel() for piece in ins]
                whole = self._reduced(torch.cat([_contiguous(piece).view(-1) for piece in ins]), op, None)
                result = whole.split(sizes)[self.rank]
            output.detach().copy_(result.view(output.shape))
            return
            yield

        return self._start(call.text, steps(), async_op)

    # -- collectives made of sends and receives ------------------------------------------------------------------------

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        if not self._here("gather", tensor, *(gather_list or ())):
            return self.host.gather(tensor, gather_list, dst, async_op=async_op)
        return super().gather(tensor, gather_list, dst, async_op=async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        if not self._here("scatter", tensor, *(scatter_list or ())):
            return self.host.scatter(tensor, scatter_list, src, async_op=async_op)
        return super().scatter(tensor, scatter_list, src, async_op=async_op)

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], *, async_op: bool = False
    ) -> Any:
        if not self._here("all_to_all", *(output_list or ()), *(input_list or ())):
            return self.host.all_to_all(output_list, input_list, async_op=async_op)
        return super().all_to_all(output_list, input_list, async_op=async_op)

    def all_gathered(
        self, length: int, dtype: torch.dtype, write: Callable[[torch.Tensor], None], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.empty(self.size * length, dtype=dtype) if into is None else into
        mine = out[self.rank * length : (self.rank + 1) * length]
        write(mine)
        self.all_gather(list(out.split(length)) if length else [out] * self.size, mine)
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.host.all_gather_bytes(data)

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # -- point to point ------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        self.check()
        return super().isend(tensor, dst, tag) if self._here("send", tensor) else self.host.isend(tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Work:
        self.check()
        return super().irecv(tensor, src, tag) if self._here("recv", tensor) else self.host.irecv(tensor, src, tag)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        return self._post().send(tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        return self._post().recv(tensor, src, tag)


def _side_by_side(outs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of contiguous tensors that lie one after the other in one storage, as one tensor; None if not so."""
    first = outs[0]
    step = first.numel() * first.element_size()
    if any(
        not out.is_contiguous()
        or out.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or out.data_ptr() != first.data_ptr() + index * step
        for index, out in enumerate(outs)
    ):
        return None
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    start = first.data_ptr() - storage.data_ptr()
    return storage[start : start + len(outs) * step]
