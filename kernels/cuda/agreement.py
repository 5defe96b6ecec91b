"""The hosts' agreement on a call of their GPUs: a disagreement is an error on all, at once, and no GPU waits for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..call import Call, wrong_piece
from ..communicator import Communicator

_ON_DEVICE = 1 << 61  # tells the signature of a call on GPUs from that of the same call on the host


def agree(
    host: Communicator,
    device: torch.device,
    call: Call,
    sends: Sequence[torch.Tensor | None] = (),
    recvs: Sequence[torch.Tensor | None] = (),
) -> None:
    """See that all ranks make the same call, with pieces that fit; the hosts wait for each other.

    Raises:
        CollectiveMismatch: they do not.
    """
    call = copy.copy(call)
    call.signature, call.text = call.signature ^ _ON_DEVICE, f"{call.text} on {device.type}"
    nothing: list[torch.Tensor | None] = [None] * host.size
    host._start(call.text, host._exchange(call, nothing, nothing), False)
    if not sends:
        return
    theirs = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(host.size)]
    host.all_to_all(theirs, [torch.tensor([_size(piece)], device="cpu") for piece in sends])
    for rank, (their, piece) in enumerate(zip(theirs, recvs, strict=True)):
        if int(their) != _size(piece):
            got, expected = int(their), _size(piece)
            raise wrong_piece(
                host.ranks, host.rank, call.text, source=rank, got=got, expected=expected, site=host.site()
            )


def _size(piece: torch.Tensor | None) -> int:
    return 0 if piece is None else piece.numel()
