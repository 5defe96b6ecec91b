"""Tensors as flat bytes: what transports move, whatever dtype, strides or laziness a tensor has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import torch_private


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 view of it (of a copy, if it is not contiguous)."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # an empty tensor may have strides that view() refuses
    flat = contiguous(tensor).detach().view(-1)
    # A single element may have any stride, and view() wants 1.
    return (flat if flat.numel() > 1 else flat.as_strided((1,), (1,))).view(torch.uint8)


def sizes(pieces: Sequence[torch.Tensor | None]) -> list[int]:
    """How many bytes each piece has; 0 for None."""
    return [0 if piece is None else piece.nbytes for piece in pieces]


def without_own(
    sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None], here: int
) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor] | None]:
    """Bytes for, and from, each rank without those that rank `here` sends to itself, and (target, source) of these.

    The latter, which need no staging, are None if there are none, or if they overlap.
    """
    target, piece = recvs[here], sends[here]
    if target is None or piece is None or target.numel() != piece.numel():
        return sends, recvs, None
    if 0 < abs(target.data_ptr() - piece.data_ptr()) < piece.numel():
        return sends, recvs, None
    return (*sends[:here], None, *sends[here + 1 :]), (*recvs[:here], None, *recvs[here + 1 :]), (target, piece)


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold a tensor's bytes: itself, or the parts of a sparse or nested one, values last."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.is_nested:
        return [tensor.offsets(), tensor.values()]  # type: ignore[attr-defined]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def storages(tensor: torch.Tensor) -> set[int]:
    """The addresses of a tensor's storage, or of the storages of its parts."""
    uncoalesced = tensor.layout is torch.sparse_coo and not tensor.is_coalesced()
    parts = torch_private.coo_parts(tensor) if uncoalesced else strided_parts(tensor)
    return {part.untyped_storage().data_ptr() for part in parts}


def repeats(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory, as after `expand`."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def extent_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the start of a tensor's first element to the end of its last.

    >>> extent_bytes((2, 3), (1, 4), 8), extent_bytes((2, 0), (1, 1), 8)
    (80, 0)
    """
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * itemsize


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie side by side without gaps, in any order of dimensions."""
    step = 1
    for size, stride in sorted(zip(shape, strides, strict=True), key=lambda dim: (dim[0] < 2, dim[1])):
        if size < 2:
            break
        if stride != step:
            return False
        step *= size
    return True


Span = tuple[int, int]  # of addresses


def spans(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """The addresses at which the memory of each non-empty tensor begins and ends."""
    filled = [(x.data_ptr(), extent_bytes(x.shape, x.stride(), x.itemsize)) for x in tensors if x.numel()]
    return [(start, start + length) for start, length in filled]


def overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether any span of `some` overlaps with any of `others`.

    >>> overlap([(0, 8), (16, 24)], [(20, 28)])
    True
    """
    return any(start < end and first < last for first, end in some for start, last in others)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether memory does not hold a tensor's values: they are to be conjugated or negated, or zeros without any."""
    return tensor.is_conj() or tensor.is_neg() or torch_private.is_lazy_zero(tensor)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor detached, and its values in its memory.

    >>> resolved(torch.tensor([1j]).conj().imag).is_neg()
    False
    """
    tensor = tensor.detach()
    if is_lazy(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
        return tensor.clone() if torch_private.is_lazy_zero(tensor) else tensor
    return tensor


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor detached, in C order, and its values in its memory."""
    return resolved(tensor).contiguous()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if bytes can be written into it, else a contiguous stand-in; see `copy_back`."""
    if tensor.is_contiguous() and not is_lazy(tensor):
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def copy_back(outs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Copy what was written into stand-ins to the tensors that they stand for."""
    for out, buffer in zip(outs, buffers, strict=True):
        if buffer.data_ptr() != out.data_ptr():
            out.detach().copy_(buffer)
