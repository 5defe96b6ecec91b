"""Brings the several forms of arguments that torch passes to a collective into one, and refuses what can't be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.errors import SpecError, message
from ..kernels.reduction import OPS
from ..transforms._tokens import in_gradient
from .registration import DEVICES

_WRITES = ("all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "recv")
_OPS = {getattr(dist.ReduceOp.RedOpType, name.upper()): name for name in OPS}


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def one(tensors: list[torch.Tensor], what: str) -> torch.Tensor:
    if len(tensors) != 1:
        raise SpecError(
            message(f"{what} got several tensors", got=len(tensors), expected="one", remedy="call it for each")
        )
    if what in _WRITES and in_gradient() and torch.is_grad_enabled() and tensors[0].requires_grad:
        raise SpecError(
            message(
                f"torch.distributed's {what} writes to a tensor that a gradient goes through, and has no derivative",
                remedy="use psum, pbroadcast or another collective of this library, which have one; "
                "or give it tensor.detach(), if that is to be a constant",
            )
        )
    return tensors[0]


def reducing(opts: Any, kind: Any) -> Any:
    """Options that may have been given as a reduction alone."""
    if opts is None or isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
        made = kind()
        if opts is not None:
            made.reduceOp = dist.ReduceOp(opts) if isinstance(opts, dist.ReduceOp.RedOpType) else opts
        return made
    return opts


def rooted(opts: Any, kind: Any) -> Any:
    """Options that may have been given as a root alone."""
    if isinstance(opts, int):
        made = kind()
        made.rootRank = opts
        return made
    return kind() if opts is None else opts


def reduction(opts: Any) -> str:
    found = _OPS.get(opts.reduceOp.op)
    if found is None:
        raise SpecError(
            message(
                "this backend does not know the reduction",
                got=str(opts.reduceOp.op),
                expected=f"one of {sorted(_OPS.values())}",
                remedy="scale the tensor and sum",
            )
        )
    return found


def check_device(kind: str) -> None:
    if kind not in DEVICES:
        problem, remedy = "this backend has no collectives for such tensors", "move them to one of these"
        raise SpecError(message(problem, got=f"a tensor on {kind}", expected=f"one on {DEVICES}", remedy=remedy))


def check_same(what: str, tensor: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    for piece in pieces:
        if piece.dtype != tensor.dtype:
            raise SpecError(
                message(f"{what} got tensors of several dtypes", got=piece.dtype, expected=tensor.dtype, remedy="cast")
            )


def parts(whole: torch.Tensor, size: int, numel: int, what: str) -> list[torch.Tensor]:
    """The parts of a tensor that belong to the ranks, end to end."""
    if whole.numel() != size * numel:
        raise SpecError(
            message(
                f"{what} got a tensor that is not {size} times as large as that of one rank",
                got=f"{whole.numel()} and {numel} elements",
                expected=f"{size * numel}",
                remedy="give one whose first dimension has the ranks' parts end to end",
            )
        )
    if numel == 0:
        return [whole.reshape(-1)] * size
    if whole.is_contiguous():
        return list(whole.detach().view(-1).split(numel))
    return list(whole.detach().chunk(size))


def split(tensor: torch.Tensor, sizes: Sequence[int] | None, size: int, what: str) -> list[torch.Tensor]:
    if sizes:
        if len(sizes) != size or sum(sizes) != tensor.shape[0]:
            raise SpecError(
                message(
                    f"all_to_all_single got {what} sizes that do not fit",
                    got=list(sizes),
                    expected=f"{size} that sum up to {tensor.shape[0]}",
                    remedy="give one for each rank",
                )
            )
        return list(tensor.detach().split(list(sizes)))
    if tensor.shape[0] % size:
        raise SpecError(
            message(
                f"all_to_all_single can't split its {what} evenly",
                got=f"{tensor.shape[0]} rows for {size} ranks",
                remedy="give split sizes",
            )
        )
    return list(tensor.detach().split(max(1, tensor.shape[0] // size))) if tensor.shape[0] else [tensor.detach()] * size
