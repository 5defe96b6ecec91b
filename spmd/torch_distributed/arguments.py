"""Brings the several forms of arguments that torch passes to a collective into one, and refuses what can't be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.errors import SpecError
from ..kernels.reduction import OPS
from ..kernels.torch_private import in_torch_func, is_fake
from ..transforms._tokens import in_gradient
from .registration import DEVICES

_WRITES = ("all_reduce", "reduce", "broadcast", "scatter", "reduce_scatter", "recv")
_OPS = {getattr(dist.ReduceOp.RedOpType, name.upper()): name for name in OPS}


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def one(tensors: list[torch.Tensor], what: str) -> torch.Tensor:
    if len(tensors) != 1:
        raise SpecError(f"{what} got several tensors", got=len(tensors), expected="one", remedy="call it for each")
    if is_fake(tensors[0]):
        problem, remedy = f"{what} got a fake tensor, which has no values", 'use init_process_group("fake")'
        raise SpecError(problem, remedy=remedy)
    if what in _WRITES and (in_gradient() or in_torch_func()) and torch.is_grad_enabled() and tensors[0].requires_grad:
        raise SpecError(
            f"torch.distributed's {what} writes to a tensor that a gradient goes through, and has no derivative",
            remedy="use psum, pbroadcast or another collective of this library, which have one; "
            "or give it tensor.detach(), if that is to be a constant",
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
            "this backend does not know the reduction",
            got=str(opts.reduceOp.op),
            expected=f"one of {sorted(_OPS.values())}",
            remedy="scale the tensor and sum",
        )
    return found


def check_device(kind: str) -> None:
    if kind not in DEVICES:
        problem, remedy = "this backend has no collectives for such tensors", "move them to one of these"
        raise SpecError(problem, got=f"a tensor on {kind}", expected=f"one on {DEVICES}", remedy=remedy)


def check_own(what: str, rank: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
    """Refuse a rank whose part for itself does not fit where it belongs, before the others wait for it.

    Flat tensors take any shape of their size, as on NCCL. Lists of another length are refused later.
    """
    for own, place in zip(sent[rank : rank + 1], received[rank : rank + 1], strict=False):
        same = [size for size in own.shape if size != 1] == [size for size in place.shape if size != 1]
        if own.numel() != place.numel() or (not same and own.numel() and min(own.dim(), place.dim()) > 1):
            raise SpecError(
                f"{what} got another shape for this rank's own part than for the place where it belongs",
                got=f"{list(own.shape)} for {list(place.shape)}",
                where=f"rank {rank}",
                remedy="give both one shape",
            )


def parts(whole: torch.Tensor, size: int, numel: int, what: str) -> list[torch.Tensor]:
    """The parts of a tensor that belong to the ranks, end to end."""
    if whole.numel() != size * numel:
        raise SpecError(
            f"{what} got a tensor that is not {size} times as large as that of one rank",
            got=f"{whole.numel()} and {numel} elements",
            expected=f"{size * numel}",
            remedy="give one whose first dimension has the ranks' parts end to end",
        )
    if numel == 0:
        return [whole.reshape(-1)] * size
    if whole.is_contiguous():
        return list(whole.detach().view(-1).split(numel))
    if whole.shape[0] % size:
        raise SpecError(
            f"{what} got a tensor that is not contiguous, and whose rows are no multiple of the ranks",
            got=f"shape {list(whole.shape)}, strides {whole.stride()}",
            remedy="use tensor.contiguous()",
        )
    return list(whole.detach().chunk(size))


def _split(tensor: torch.Tensor, sizes: Sequence[int] | None, size: int, what: str) -> list[torch.Tensor]:
    if not tensor.dim():
        problem, remedy = f"all_to_all_single can't split its {what}", "give it a dimension: tensor.view(1)"
        raise SpecError(problem, got="a tensor without dimensions", remedy=remedy)
    if sizes:
        if len(sizes) != size or sum(sizes) != tensor.shape[0]:
            raise SpecError(
                f"all_to_all_single got {what} sizes that do not fit",
                got=list(sizes),
                expected=f"{size} that sum up to {tensor.shape[0]}",
                remedy="give one for each rank",
            )
        return list(tensor.detach().split(list(sizes)))
    if tensor.shape[0] % size:
        raise SpecError(
            f"all_to_all_single can't split its {what} evenly",
            got=f"{tensor.shape[0]} rows for {size} ranks",
            remedy="give split sizes",
        )
    return list(tensor.detach().split(max(1, tensor.shape[0] // size))) if tensor.shape[0] else [tensor.detach()] * size


def exchanged(
    output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, rank: int, size: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a rank gets from each, and what it sends to each, as parts of the tensors of `all_to_all_single`."""
    outs, ins = _split(output, output_sizes, size, "output"), _split(input, input_sizes, size, "input")
    if output.is_contiguous() and input.is_contiguous():  # then a part fills a place with rows of another length
        outs, ins = ([piece.view(-1) for piece in pieces] for pieces in (outs, ins))
    check_own("all_to_all", rank, ins, outs)
    return outs, ins
