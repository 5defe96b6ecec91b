"""Copies of bytes between hosts, authenticated by the job's secret: torch unpickles what object collectives receive.

Gloo's connections are not authenticated. So if a group's ranks are on several hosts, a copy of a uint8 tensor that the
caller waits for, as object collectives do, is followed by a copy of authentication codes, and raises if these don't
fit. Invariant: nothing from another process than the group's ranks is unpickled.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.communicator import Communicator
from ..kernels.network.authentication import CODE_BYTES, code, same
from ..kernels.network.communicator import NetworkedCommunicator, not_of_this_job

_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()  # of copies with codes so far


def broadcast(comm: Communicator, tensor: torch.Tensor, src: int, later: bool) -> Any:
    started = comm.broadcast(tensor, src, async_op=later)
    if _is_vouched(comm, tensor, later):
        _begin(comm)
        theirs = _code(comm, src, tensor) if comm.rank == src else _no_code()
        comm.broadcast(theirs, src)
        _check(comm, src, tensor, theirs)
    return started


def all_gather(comm: Communicator, pieces: list[torch.Tensor], tensor: torch.Tensor, later: bool) -> Any:
    mine = _codes(comm, comm.rank, [tensor], later)
    started = comm.all_gather(pieces, tensor, async_op=later)
    if mine:
        _begin(comm)
        codes = [_no_code() for _ in pieces]
        comm.all_gather(codes, mine[0])
        _check_all(comm, pieces, codes)
    return started


def gather(comm: Communicator, tensor: torch.Tensor, pieces: list[torch.Tensor] | None, dst: int, later: bool) -> Any:
    mine = _codes(comm, comm.rank, [tensor], later)
    started = comm.gather(tensor, pieces, dst, async_op=later)
    if mine:
        _begin(comm)
        codes = None if pieces is None else [_no_code() for _ in pieces]
        comm.gather(mine[0], codes, dst)
        _check_all(comm, pieces or (), codes or ())
    return started


def scatter(comm: Communicator, tensor: torch.Tensor, pieces: list[torch.Tensor] | None, src: int, later: bool) -> Any:
    codes = _codes(comm, src, pieces or (), later)
    started = comm.scatter(tensor, pieces, src, async_op=later)
    if _is_vouched(comm, tensor, later):
        _begin(comm)
        mine = _no_code()
        comm.scatter(mine, codes or None, src)
        _check(comm, src, tensor, mine)
    return started


def _is_vouched(comm: Communicator, tensor: torch.Tensor, later: bool) -> bool:
    return isinstance(comm, NetworkedCommunicator) and not later and tensor.dtype is torch.uint8


def _begin(comm: Communicator) -> None:
    """Count a copy, once its bytes have come: bad arguments, for which one rank alone raises, don't count."""
    _numbers[comm] = _numbers.get(comm, 0) + 1


def _codes(comm: Communicator, source: int, tensors: Sequence[torch.Tensor], later: bool) -> list[torch.Tensor]:
    """The codes of what a copy is about to send, made before, since it may overwrite that; none for one without."""
    return [_code(comm, source, each, ahead=1) for each in tensors if _is_vouched(comm, each, later)]


def _no_code() -> torch.Tensor:
    return torch.zeros(CODE_BYTES, dtype=torch.uint8, device="cpu")


def _code(comm: Any, source: int, tensor: torch.Tensor, ahead: int = 0) -> torch.Tensor:
    number = f"{source} {_numbers.get(comm, 0) + ahead}".encode()  # so that an overheard code fits no other copy
    made = code(comm.key, b"object", number, tensor.detach().contiguous().numpy().tobytes())
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _check(comm: Any, source: int, tensor: torch.Tensor, theirs: torch.Tensor) -> None:
    if not same(_code(comm, source, tensor).numpy().tobytes(), theirs.numpy().tobytes()):
        raise not_of_this_job(comm, source)


def _check_all(comm: Any, pieces: Sequence[torch.Tensor], codes: Sequence[torch.Tensor]) -> None:
    for source, (piece, theirs) in enumerate(zip(pieces, codes, strict=True)):
        _check(comm, source, piece, theirs)
