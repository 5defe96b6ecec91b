"""The collectives, over any transport that can exchange pieces of bytes between all ranks.

All are built on one exchange, combine in rank order, and take every dtype; a transport overrides what it can do better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .call import Call
from .flat import as_bytes, contiguous, copy_back, writable
from .operations import Steps
from .reduction import Op, reduce_in_order, slice_bounds

# Up to this size a rank sends its whole contribution to all: one exchange instead of two.
ONE_PHASE_BYTES = 1 << 15
_HEAD_BYTES = 1 << 10  # what `bytes_of_all` gathers first: the length and the first bytes, which mostly is all


class Transport(Protocol):
    """A communicator, as its collectives see it."""

    rank: int
    size: int

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps: ...

    def stamp(self, tensor: torch.Tensor) -> Sequence[int]: ...

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps: ...

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps: ...

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: Op, *, in_place: bool = False) -> Steps: ...


def send(comm: Transport, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
    # Not before the first step: a communicator that the mesh has recovered is opened afresh until then.
    return (yield from comm._send(as_bytes(tensor), dst, tag, *comm.stamp(tensor)))


def recv(comm: Transport, tensor: torch.Tensor, src: int | None, tag: int, *stamp: int) -> Steps:
    buffer = writable(tensor)
    source = yield from comm._recv(as_bytes(buffer), src, tag, *stamp)
    copy_back([tensor], [buffer])
    return source


def in_one_mode(steps: Steps, tensors: Sequence[torch.Tensor]) -> Steps:
    """The same steps, all in `torch.inference_mode` or none, whichever thread takes them.

    What is made in that mode, be it by the program or by an earlier step, can be written in it alone.
    """
    return _in_mode(steps, torch.is_inference_mode_enabled() or bool([x for x in tensors if x.is_inference()]))


def _in_mode(steps: Steps, inference: bool) -> Steps:
    while True:
        try:
            if torch.is_inference_mode_enabled() == inference:
                ready = next(steps)
            else:
                with torch.inference_mode(inference):
                    ready = next(steps)
        except StopIteration as end:
            return end.value
        yield ready


def matched(inbox: list[Any], src: int | None, tag: int) -> Steps:
    """Wait for a message from a source (None: any) with a tag, and take it out of an inbox of (source, tag, ...)."""
    found: list[Any] = []

    def arrived() -> bool:
        for index, (source, its_tag, *_) in enumerate(inbox):
            if its_tag == tag and src in (None, source):
                found.append(inbox.pop(index))
                return True
        return False

    yield arrived
    return found[0]


def barrier(comm: Transport, call: Call) -> Steps:
    nothing: list[torch.Tensor | None] = [None] * comm.size
    return comm._exchange(call, nothing, nothing)


def broadcast(comm: Transport, call: Call, tensor: torch.Tensor, src: int) -> Steps:
    mine = comm.rank == src
    buffer = contiguous(tensor) if mine else writable(tensor)
    data = as_bytes(buffer)
    sends = [data if mine and rank != src else None for rank in range(comm.size)]
    recvs = [data if not mine and rank == src else None for rank in range(comm.size)]
    yield from comm._exchange(call, sends, recvs)
    if not mine:
        copy_back([tensor], [buffer])


def reduce(comm: Transport, call: Call, tensor: torch.Tensor, dst: int, op: Op) -> Steps:
    flat, mine = contiguous(tensor).view(-1), comm.rank == dst
    parts = [torch.empty_like(flat) if mine and rank != dst else flat for rank in range(comm.size)]
    sends = [as_bytes(flat) if rank == dst and not mine else None for rank in range(comm.size)]
    recvs = [as_bytes(part) if mine and rank != dst else None for rank, part in enumerate(parts)]
    yield from comm._exchange(call, sends, recvs)
    if mine:
        tensor.detach().copy_(reduce_in_order(parts, op, torch.empty_like(flat)).view(tensor.shape))


def gather(comm: Transport, call: Call, tensor: torch.Tensor, outs: Sequence[torch.Tensor], dst: int) -> Steps:
    buffers = [writable(out) for out in outs]
    sends = [as_bytes(contiguous(tensor)) if rank == dst else None for rank in range(comm.size)]
    recvs = [as_bytes(buffers[rank]) if buffers else None for rank in range(comm.size)]
    yield from comm._exchange(call, sends, recvs)
    copy_back(outs, buffers)


def scatter(comm: Transport, call: Call, tensor: torch.Tensor, ins: Sequence[torch.Tensor], src: int) -> Steps:
    buffer = writable(tensor)
    sends = [as_bytes(contiguous(ins[rank])) if ins else None for rank in range(comm.size)]
    recvs = [as_bytes(buffer) if rank == src else None for rank in range(comm.size)]
    yield from comm._exchange(call, sends, recvs)
    copy_back([tensor], [buffer])


def all_gather(comm: Transport, call: Call, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
    buffers = [writable(out) for out in outs]
    yield from comm._exchange(call, [as_bytes(contiguous(tensor))] * comm.size, [as_bytes(part) for part in buffers])
    copy_back(outs, buffers)


def all_to_all(comm: Transport, call: Call, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> Steps:
    buffers = [writable(out) for out in outs]
    sends = [as_bytes(contiguous(piece)) for piece in ins]
    yield from comm._exchange(call, sends, [as_bytes(buffer) for buffer in buffers])
    copy_back(outs, buffers)


def reduce_scatter(comm: Transport, call: Call, output: torch.Tensor, ins: Sequence[torch.Tensor], op: Op) -> Steps:
    parts = [torch.empty(output.numel(), dtype=output.dtype, device="cpu") for _ in range(comm.size)]
    sends = [as_bytes(contiguous(piece)) for piece in ins]
    yield from comm._exchange(call, sends, [as_bytes(part) for part in parts])
    output.detach().copy_(reduce_in_order(parts, op, torch.empty_like(parts[0])).view(output.shape))


def all_reduce(comm: Transport, call: Call, tensor: torch.Tensor, op: Op) -> Steps:
    flat = contiguous(tensor).view(-1)
    # Reducing in place works only in the tensor's own memory; if `flat` is a copy, the result is copied back.
    in_place = flat.data_ptr() == tensor.data_ptr()
    result = yield from comm._all_reduce(call, flat, op, in_place=in_place)
    if result is not None:
        tensor.detach().copy_(result.view(tensor.shape))


def all_reduced(comm: Transport, call: Call, tensor: torch.Tensor, op: Op) -> Steps:
    return in_one_mode(_all_reduced(comm, call, tensor, op), ())  # which only reads the tensor: what it makes is new


def _all_reduced(comm: Transport, call: Call, tensor: torch.Tensor, op: Op) -> Steps:
    result = yield from comm._all_reduce(call, contiguous(tensor).view(-1), op)
    return result.view(tensor.shape)


def in_slices(comm: Transport, call: Call, flat: torch.Tensor, op: Op) -> Steps:
    """Reduce a flat contiguous tensor; returns a new one.

    Small: every rank sends everything to all, and each adds for itself. Large: rank i adds slice i and sends it to all.
    That moves 2(n-1)/n of the bytes per rank, as a ring does, but adds in rank order.
    """
    others = [rank != comm.rank for rank in range(comm.size)]
    if flat.numel() * flat.element_size() <= ONE_PHASE_BYTES:
        parts = [torch.empty_like(flat) if other else flat for other in others]
        yield from comm._exchange(
            call,
            [as_bytes(flat) if other else None for other in others],
            [as_bytes(part) if other else None for part, other in zip(parts, others, strict=True)],
        )
        return reduce_in_order(parts, op, torch.empty_like(flat))
    bounds = slice_bounds(flat.numel(), comm.size)
    slices = [flat[bounds[rank] : bounds[rank + 1]] for rank in range(comm.size)]
    parts = [torch.empty_like(slices[comm.rank]) for _ in range(comm.size)]
    parts[comm.rank] = slices[comm.rank]
    yield from comm._exchange(
        call,
        [as_bytes(piece) if other else None for piece, other in zip(slices, others, strict=True)],
        [as_bytes(part) if other else None for part, other in zip(parts, others, strict=True)],
    )
    result = torch.empty_like(flat)
    pieces = [result[bounds[rank] : bounds[rank + 1]] for rank in range(comm.size)]
    reduce_in_order(parts, op, pieces[comm.rank])
    yield from comm._exchange(
        None,  # still the same call: nothing more to compare
        [as_bytes(pieces[comm.rank]) if other else None for other in others],
        [as_bytes(piece) if other else None for piece, other in zip(pieces, others, strict=True)],
    )
    return result


def bytes_of_all(all_gather: Callable[[list[torch.Tensor], torch.Tensor], Any], size: int, data: bytes) -> list[bytes]:
    """Every rank's bytes, of any length: one all-gather, and a second one if some rank has many bytes."""

    def gathered(mine: bytes, lengths: list[int]) -> list[bytes]:
        pieces = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
        all_gather(pieces, torch.frombuffer(bytearray(mine + b"\0"), dtype=torch.uint8)[:-1])
        return [piece.numpy().tobytes() for piece in pieces]

    head = (len(data).to_bytes(8, "little") + data)[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")
    heads = gathered(head, [_HEAD_BYTES] * size)
    lengths = [int.from_bytes(each[:8], "little") for each in heads]
    if max(lengths) > _HEAD_BYTES - 8:
        return gathered(data, lengths)
    return [each[8 : 8 + length] for each, length in zip(heads, lengths, strict=True)]


def slices_of_all(
    all_gather: Callable[[list[torch.Tensor], torch.Tensor], Any],
    size: int,
    rank: int,
    length: int,
    write: Callable[[torch.Tensor], None],
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` with the slices of all ranks, end to end; `write` fills this rank's."""
    mine = out[rank * length : (rank + 1) * length]
    write(mine)
    all_gather(list(out.split(length)) if length else [out] * size, mine)
    return out
