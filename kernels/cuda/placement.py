"""Where tensors lie: on a rank's GPU or on the host, and side by side or apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import SpecError


def is_on(device: torch.device, what: str, *tensors: torch.Tensor) -> bool:
    """Whether the tensors of an operation are on a rank's GPU, and not on the host.

    Raises:
        SpecError: they are on several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if devices == {device}:
        return True
    if len({one.type for one in devices}) > 1 or any(one.type == device.type and one != device for one in devices):
        raise SpecError(
            f"{what} got tensors of other devices than its own",
            got=", ".join(sorted(map(str, devices))),
            expected=f"all on {device}, or all on the CPU",
            remedy="move them with .to()",
        )
    return any(one.type == device.type for one in devices)


_own: torch.device | None = None


def take(index: int) -> torch.device:
    """Make a GPU this rank's: this thread's current one, and what `own` tells other threads, which start with GPU 0."""
    global _own
    torch.cuda.set_device(index)
    _own = torch.device("cuda", index)
    return _own


def own() -> torch.device:
    """This rank's GPU; the current one in a process that has taken none."""
    return torch.device("cuda", torch.cuda.current_device()) if _own is None else _own


def enter() -> None:
    """Make this rank's GPU, if it has one, the current one of a new thread, in which the program's code will run."""
    if _own is not None:
        torch.cuda.set_device(_own)


def fault() -> str:
    """The error that every CUDA call in this process raises from now on, as after a failed assertion in a kernel.

    "" if there is none.
    """
    if not torch.cuda.is_initialized():
        return ""
    try:
        if not torch.cuda.is_current_stream_capturing():  # a query during capture is an error of its own
            torch.cuda.current_stream().query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The bytes of contiguous tensors that lie end to end in one storage, as one tensor; None if they don't."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    if any(
        not tensor.is_contiguous()
        or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        or tensor.data_ptr() != first.data_ptr() + index * step
        for index, tensor in enumerate(tensors)
    ):
        return None
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    start = first.data_ptr() - storage.data_ptr()
    return storage[start : start + len(tensors) * step]
