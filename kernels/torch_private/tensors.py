"""Tensors: the memory they lie in, how often it was written, and subclasses of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def version(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place; 0 for inference tensors (no counter).

    It shows that a step changed its input, or that a captured tensor changed since it was sent.
    Public way: none; a checksum of the memory would cost as much as the step.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """`version` of each; fast if none was made in inference mode."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor has no counter
        return [version(tensor) for tensor in tensors]


def base(tensor: Tensor) -> Tensor | None:
    """The tensor that this is a view of. Public way: none; tensors that share a storage need not be views."""
    return tensor._base if tensor._is_view() else None


def storage(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage among all that exist now; 0 if it has none (sparse tensors).

    Views, detached tensors and what autograd saves share it. Public way: the address of the memory, which tensors on
    the meta device lack.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def holders(tensor: Tensor) -> int:
    """How many tensors share a strided tensor's storage, itself included, and whatever else keeps it (autograd, say).

    It shows that a step returned what others have. Public way: none; a search of what the step refers to finds not all.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without `storage`


# Whether a tensor is all zeros and has no memory, as forward-mode differentiation makes tangents of what is constant.
# Public way: none; `data_ptr()` is 0 for an empty tensor, too.
is_lazy_zero = Tensor._is_zerotensor


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """A sparse tensor's indices and values as stored. Public way: methods that refuse a tensor that isn't coalesced."""
    return [tensor._indices(), tensor._values()]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same shapes. Public way: `copy_` for each, one call of torch per leaf."""
    torch._foreach_copy_(targets, sources)


def keep_storage_apart(tensor: Tensor) -> Any:
    """Keeps a storage's number (not its memory) from being reused. Public way: none; `weakref` doesn't do that."""
    return StorageWeakRef(tensor.untyped_storage())


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside this block, torch functions don't call a subclass's `__torch_function__` again. Public way:
    `super().__torch_function__`, which makes all results instances of the subclass.
    """
    return torch._C.DisableTorchFunctionSubclass()


@contextlib.contextmanager
def below_subclasses() -> Iterator[None]:
    """Inside, operations see subclasses as plain tensors. Public way: none for a subclass that wraps no tensor."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def is_batch_of_gradients(gradient: Tensor) -> bool:
    """Whether it stands for many, one for each row of what `torch.autograd.grad(is_grads_batched=True)` was given.

    Public way: none. They are not those of `torch.func.vmap`, and nothing but torch's own operations takes them.
    """
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def laid_out(dtensor: Any) -> tuple[type, Any]:
    """How a `DTensor` is laid out, for `with_layout`."""
    return type(dtensor), dtensor._spec


def with_layout(local: Tensor, layout: tuple[type, Any]) -> Any:
    """A `DTensor` without a history that is laid out as another one, from this rank's shard.

    Public way: `DTensor.from_local`, whose step on the tape and checks cost more than a small operation.
    """
    made, spec = layout
    return made(local, spec, requires_grad=False)
