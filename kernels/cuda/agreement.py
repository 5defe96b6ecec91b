"""The hosts' agreement on a call of their GPUs: a disagreement is an error on all, at once, and no GPU waits for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..call import Call, check_pieces
from ..communicator import Communicator
from ..flat import sizes

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
    host.all_to_all(theirs, [torch.tensor([size], device="cpu") for size in sizes(sends)])
    check_pieces(host, call.text, [int(their) for their in theirs], sizes(recvs))
