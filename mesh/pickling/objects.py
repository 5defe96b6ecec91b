"""How objects of all kinds travel to another process, where cloudpickle alone is not enough.

GPU tensors arrive on the GPU of a rank that has one, and in other processes on the CPU. Arrays that
are mapped files travel as the name of the file.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch

from ...kernels import torch_private
from ...kernels.arguments import arrived
from ...kernels.errors import MeshError
from ...kernels.flat import contiguous
from ...kernels.processes import namespace
from ...kernels.shm.pages import PAGE, any_copied
from . import classes, functions, operators
from .attributes import Parts

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_home = torch.device("cpu")
_PIECES, _PIECE = 64, 64  # pieces of a mapped file that are compared, and the bytes of each


def arrive_on(device: torch.device) -> None:
    """Set the device on which GPU tensors that are sent to this process arrive."""
    global _home
    _home = device


class Pickler(cloudpickle.Pickler):
    """That of cloudpickle, for objects of all kinds.

    Attributes:
        parts: for what a step refers to, whose objects travel with the attributes that are read.
    """

    parts: Parts | None = None

    def reducer_override(self, obj: Any) -> Any:
        found = _reduced(obj)
        if found is None and self.parts is not None:
            if type(obj) is types.MethodType:
                part = self.parts.of_method(obj)
                found = None if part is None else (types.MethodType, (obj.__func__, part))
            elif type(obj) is types.FunctionType:
                found = super().reducer_override(self.parts.of_function(obj))
        found = super().reducer_override(obj) if found is None else found
        if isinstance(obj, type) and isinstance(found, tuple):
            return classes.kept_at_home(obj, found)
        if type(obj) is types.FunctionType and isinstance(found, tuple):
            return functions.with_globals_of_classes(obj, found)
        return found


def name_in_script(obj: Any) -> str | None:
    """The name of a class that this process's main script has; None for all else.

    Launched ranks all run the script: sent by value, its classes would be other ones than the receiver's. A driver's
    ranks have none.
    """
    if not isinstance(obj, type) or obj.__module__ != "__main__":
        return None
    return obj.__qualname__ if functions.named_in(sys.modules["__main__"], obj.__qualname__) is obj else None


def class_of_script(name: str) -> Any:
    found = functions.named_in(sys.modules["__main__"], name)
    if found is None:
        remedy = "define it before the ranks communicate, on all of them"
        raise MeshError(f"the script has no class {name!r} on this rank, as it has on another", remedy=remedy)
    return found


class _OfValues(Pickler):
    """Takes tensors by their values (torch's own pickles have addresses in them), and the script's classes by name."""

    def reducer_override(self, obj: Any) -> Any:
        if (name := name_in_script(obj)) is not None:
            return class_of_script, (name,)
        has_own = type(obj) is torch.nn.Parameter and bool(_own(obj))
        if (
            type(obj) in _TENSORS
            and not has_own
            and obj.is_cpu
            and obj.layout is torch.strided
            and not obj.is_quantized
        ):
            data = contiguous(obj).reshape(-1).view(torch.uint8).numpy()
            trainable = obj.requires_grad and obj.is_leaf
            return _of_bytes, (data.tobytes(), obj.dtype, tuple(obj.shape), trainable, type(obj) is torch.nn.Parameter)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """The pickle of an object, tensors and all: equal bytes on ranks where it is equal."""
    _OfValues(file := io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


def _of_bytes(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], trainable: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if data:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return _trained(tensor, trainable, is_parameter)


def _reduced(obj: Any) -> Any:
    """What `__reduce__` should return for an object; None for most, which cloudpickle pickles well."""
    if type(obj) is torch.nn.Parameter and obj.__dict__:
        return torch.nn.Parameter, (obj.data, obj.requires_grad), (_own(obj), None), None, None, _set_attributes
    if type(obj) in _TENSORS and obj.is_cuda and obj.layout is torch.strided:
        trainable = obj.requires_grad and obj.is_leaf
        return _placed, (obj.detach().cpu(), trainable, type(obj) is torch.nn.Parameter)
    if isinstance(obj, torch.Tensor) and (result := arrived(obj)) is not obj:
        return torch.Tensor.detach, (result,)
    found = operators.reduced(obj) or functions.reduced(obj)
    return found or torch_private.reduce_compiled(obj) or _mapped_file(obj) or _in_slots(obj)


def _own(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """The attributes that a program has set of it."""
    return {name: value for name, value in parameter.__dict__.items() if not name.startswith("_spmd_")}


def _in_slots(obj: Any) -> tuple[Any, ...] | None:
    """How an object with slots travels if its class does, which loses them on its way: there all is in a `__dict__`,
    which the object lacks where the class comes from.
    """
    cls = type(obj)
    if "__slots__" not in vars(cls) or hasattr(cls, "__setstate__") or functions.travels_by_name(cls):
        return None
    how = obj.__reduce_ex__(4)
    if not isinstance(how, tuple) or len(how) < 3 or type(how[2]) is not tuple:
        return None
    return *how, *(None,) * (5 - len(how)), _set_attributes


def _set_attributes(obj: Any, state: tuple[dict[str, Any] | None, dict[str, Any] | None]) -> None:
    for entries in state:
        for name, value in (entries or {}).items():
            object.__setattr__(obj, name, value)


def _placed(tensor: torch.Tensor, trainable: bool, is_parameter: bool) -> torch.Tensor:
    return _trained(tensor.to(_home), trainable, is_parameter)


def _trained(tensor: torch.Tensor, trainable: bool, is_parameter: bool) -> torch.Tensor:
    return torch.nn.Parameter(tensor, trainable) if is_parameter else tensor.requires_grad_(trainable)


def _mapped_file(obj: Any) -> tuple[Callable, tuple] | None:
    """How another process opens this `np.memmap`, or a gapless part of one, as for `__reduce__`; None for all else.

    None of its data is read and sent. A copy-on-write map (mode "c", as ranks have) travels as its file only while
    nothing was written to it; what a rank writes into it stays private to the rank.
    """
    if not isinstance(obj, np.memmap) or obj.filename is None or not obj.size:
        return None
    order = "C" if obj.flags.c_contiguous else "F" if obj.flags.f_contiguous else None
    base: Any = obj
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if order is None or base is None:
        return None
    if obj.mode == "c":
        first = obj.ctypes.data - obj.ctypes.data % PAGE
        if any_copied(first, obj.ctypes.data + obj.nbytes - first):
            return None
    start = obj.offset - obj.offset % mmap.ALLOCATIONGRANULARITY  # of the whole map, of which `obj` may be a part
    offset = start + obj.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    path = str(obj.filename)
    found = _identity(path)
    written = obj.mode not in ("r", "c")
    cut_off = found is not None and found[-1] < offset + obj.nbytes  # the file ends before the map: reading would kill
    seen = None if written or cut_off else (found, _sampled(obj))
    return _opened, (path, obj.dtype, offset, obj.shape, order, seen)


def _opened(path: str, dtype: np.dtype, offset: int, shape: tuple[int, ...], order: Any, seen: Any) -> np.memmap:
    found = np.memmap(path, dtype, "c", offset, shape, order)
    if seen is not None and seen[0] != _identity(path) and seen[1] != _sampled(found):
        raise MeshError(
            f"the file {path} has other data here than where it was mapped",
            where=f"host {socket.gethostname()}",
            remedy="have the same file at this path on all hosts",
        )
    return found


def _identity(path: str) -> tuple[str, int, int, int] | None:
    """Which file it is, among those of all hosts, and its size; None if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return namespace(), status.st_dev, status.st_ino, status.st_size


def _sampled(array: np.memmap) -> bytes:
    """A digest of a few pieces of a gapless array, from its first bytes to its last: files are too large to be read."""
    data = np.asarray(array).ravel("K").view(np.uint8)
    starts = np.linspace(0, max(0, len(data) - _PIECE), _PIECES, dtype=np.int64)
    return hashlib.sha256(b"".join(data[start : start + _PIECE].tobytes() for start in starts)).digest()
