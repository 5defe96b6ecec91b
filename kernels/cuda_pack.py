"""The launches that pack and unpack a bucket of CUDA leaves, one for all leaves; the source is `cuda/bucket.cu`.

A `Table` says where the leaves lie in the bucket; that part of it goes to the device once. The leaves' addresses go
along when they change, from pinned memory on the stream of the launch, so that nothing is waited for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).parent / "cuda" / "bucket.cu"
THREADS = 256
_STEP = 2048  # elements; chunks are multiples of it, so that every chunk of an aligned leaf is aligned
_LARGEST = 1 << 15
_BLOCKS = 1056  # eight for each of the 132 multiprocessors of an H100

# What the kernels know; other dtypes are copied by torch.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kernel_name(direction: str, leaf: torch.dtype, wire: torch.dtype) -> str:
    """The name of a kernel in the source.

    >>> kernel_name("pack", torch.float32, torch.bfloat16)
    'pack_float32_bfloat16'
    """
    return "_".join((direction, *(str(dtype).removeprefix("torch.") for dtype in (leaf, wire))))


class Table:
    """Where the leaves of a bucket lie in it; kept from step to step.

    Args:
        starts, lengths: of every leaf in the bucket, in elements.
        leaf_dtype, wire_dtype: of the leaves and of the bucket, from `DTYPES`.
        launch: `launch(name, blocks, arguments)` starts a kernel on the current stream; None is CuPy.
    """

    def __init__(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        leaf_dtype: torch.dtype,
        wire_dtype: torch.dtype,
        launch: Callable[[str, int, tuple], None] | None = None,
    ):
        self.leaves, self._dtypes = len(starts), (leaf_dtype, wire_dtype)
        self.chunk = min(_LARGEST, max(1, math.ceil(sum(lengths) / _BLOCKS / _STEP)) * _STEP)
        blocks = [
            index << 32 | chunk
            for index, length in enumerate(lengths)
            for chunk in range(math.ceil(length / self.chunk))
        ]
        self.blocks = len(blocks)
        self._rest = torch.tensor([*starts, *lengths, *blocks], dtype=torch.int64)
        self._launch = launch or _launch
        self._on_device: Tensor | None = None
        self._addresses: list[int] = []
        self._captured: list[Tensor] = []  # what a captured graph reads when it is replayed

    def pack(self, leaves: Sequence[Tensor | None], bucket: Tensor, scale: float = 1.0) -> None:
        """Write the leaves, times `scale`, into the bucket; None gives zeros. Leaves are dense."""
        self._run("pack", leaves, bucket, scale)

    def unpack(self, bucket: Tensor, leaves: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write the bucket's elements, times `scale`, into the leaves."""
        self._run("unpack", leaves, bucket, scale)

    def _run(self, direction: str, leaves: Sequence[Tensor | None], bucket: Tensor, scale: float) -> None:
        if not self.blocks:
            return
        table = self._for([0 if leaf is None or not leaf.numel() else leaf.data_ptr() for leaf in leaves], bucket)
        arguments = (table.data_ptr(), self.leaves, self.chunk, bucket.data_ptr(), scale)
        self._launch(kernel_name(direction, *self._dtypes), self.blocks, arguments)

    def _for(self, addresses: list[int], bucket: Tensor) -> Tensor:
        """The table on the bucket's device, with these addresses; written in the order of the current stream."""
        known = self._on_device
        capturing = bucket.is_cuda and torch.cuda.is_current_stream_capturing()
        if known is None or capturing:
            whole = torch.cat([torch.tensor(addresses, dtype=torch.int64), self._rest])
            known = _moved(whole, bucket.device)
            if capturing:
                self._captured += [known, whole]
                return known
            self._on_device = known
        elif addresses != self._addresses:
            # The pinned memory behind it is not used again before this copy is over: torch sees to that.
            known[: self.leaves].copy_(_pinned(torch.tensor(addresses, dtype=torch.int64), known), non_blocking=True)
        self._addresses = addresses
        return known


def _moved(table: Tensor, device: torch.device) -> Tensor:
    return table.clone() if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def _pinned(addresses: Tensor, beside: Tensor) -> Tensor:
    return addresses.pin_memory() if beside.is_cuda else addresses


def compile_options(architecture: int | None = None) -> tuple[str, ...]:
    """What the source is compiled with, for `sm_<architecture>` or for the device at hand."""
    return ("--std=c++14", *(() if architecture is None else (f"--gpu-architecture=sm_{architecture}",)))


@functools.cache
def _module(device: int) -> Any:
    """The compiled source, on one device (CuPy keeps it on disk as well)."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(code=SOURCE.read_text(), options=compile_options())


@functools.cache
def _kernel(name: str, device: int) -> Any:
    return _module(device).get_function(name)


def _launch(name: str, blocks: int, arguments: tuple) -> None:
    import cupy
    import numpy as np

    table, leaves, chunk, bucket, scale = arguments
    device = torch.cuda.current_device()
    integers = [np.uint64(table), np.int64(leaves), np.int64(chunk), np.uint64(bucket)]
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        _kernel(name, device)((blocks,), (THREADS,), (*integers, np.float32(scale)))
