"""Packs and unpacks a bucket of CUDA leaves with one kernel launch for all leaves; the kernels are in `bucket.cu`.

A `Table` says where the leaves lie in the bucket. It is copied to the device when the leaves' addresses change, from
pinned memory on the stream of the launch, so that nothing waits. Invariant: a table that a kernel may be reading is
never written to; a new one replaces it, and torch reuses the old memory in the order of that stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import dtype_name

SOURCE = Path(__file__).parent / "bucket.cu"
OPTIONS = ("--std=c++14",)  # of its compilation
THREADS = 256
_STEP = 2048  # elements; chunk sizes are multiples of it, so that every chunk of an aligned leaf is aligned
_LARGEST = 1 << 15
_BLOCKS = 1056  # eight for each of the 132 multiprocessors of an H100

# The dtypes that the kernels cast to; they cast from these and from float64.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def has_kernel(leaf: torch.dtype, wire: torch.dtype) -> bool:
    """Whether leaves of one dtype can be packed into a bucket of another.

    >>> has_kernel(torch.float64, torch.float16), has_kernel(torch.int32, torch.float16)
    (True, False)
    """
    return leaf == wire or (wire in DTYPES and leaf in (*DTYPES, torch.float64))


def kernel_name(direction: str, leaf: torch.dtype, wire: torch.dtype) -> str:
    """The name of a kernel in the source; leaves of dtypes that are not cast are copied as bytes.

    >>> kernel_name("pack", torch.float32, torch.bfloat16), kernel_name("unpack", torch.int64, torch.int64)
    ('pack_float32_bfloat16', 'unpack_bytes')
    """
    if _as_bytes(leaf, wire):
        return f"{direction}_bytes"
    return "_".join((direction, *map(dtype_name, (leaf, wire))))


def _as_bytes(leaf: torch.dtype, wire: torch.dtype) -> bool:
    return leaf == wire and leaf not in DTYPES


class Table:
    """Where the leaves of a bucket lie in it; cached from step to step.

    Args:
        starts, lengths: of every leaf in the bucket, in elements.
        leaf_dtype, wire_dtype: of the leaves and of the bucket, for which `has_kernel` is True. If they are the same
            and not among `DTYPES`, elements are copied as bytes.
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
        if _as_bytes(leaf_dtype, wire_dtype):
            starts, lengths = ([count * leaf_dtype.itemsize for count in counts] for counts in (starts, lengths))
        self.chunk = min(_LARGEST, max(1, math.ceil(sum(lengths) / _BLOCKS / _STEP)) * _STEP)
        blocks = [
            index << 32 | chunk
            for index, length in enumerate(lengths)
            for chunk in range(math.ceil(length / self.chunk))
        ]
        self.blocks = len(blocks)
        self._rest = torch.tensor([*starts, *lengths, *blocks], dtype=torch.int64, device="cpu")
        self._launch = launch or _launch
        self._known: tuple[tuple[int, list[int]], Tensor] | None = None  # (stream, addresses), and the table there
        self._captured: list[Tensor] = []  # what a captured graph reads when it is replayed

    def pack(self, leaves: Sequence[Tensor | None], bucket: Tensor) -> None:
        """Write the leaves into the bucket; None stands for zeros. Leaves must be dense."""
        self._run("pack", leaves, bucket)

    def unpack(self, bucket: Tensor, leaves: Sequence[Tensor]) -> None:
        """Write the bucket's elements into the leaves."""
        self._run("unpack", leaves, bucket)

    def _run(self, direction: str, leaves: Sequence[Tensor | None], bucket: Tensor) -> None:
        if not self.blocks:
            return
        table = self._for([0 if leaf is None or not leaf.numel() else leaf.data_ptr() for leaf in leaves], bucket)
        arguments = (table.data_ptr(), self.leaves, self.chunk, bucket.data_ptr())
        self._launch(kernel_name(direction, *self._dtypes), self.blocks, arguments)

    def _for(self, addresses: list[int], bucket: Tensor) -> Tensor:
        """The table with these addresses on the bucket's device, ready for the next launch on the current stream."""
        key = _stream() if bucket.is_cuda else 0, addresses
        capturing = bucket.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._known is not None and self._known[0] == key and not capturing:
            return self._known[1]
        whole = torch.cat([torch.tensor(addresses, dtype=torch.int64, device="cpu"), self._rest])
        # torch makes sure that pinned memory is not reused before the copy from it is over.
        whole = whole.pin_memory() if bucket.is_cuda else whole
        table = whole.to(bucket.device, non_blocking=True, copy=True)
        if capturing:
            self._captured += [table, whole]
        else:
            self._known = key, table
        return table


@functools.cache
def _module(device: int) -> Any:
    """The compiled source, on one device (CuPy keeps it on disk as well)."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)


@functools.cache
def _kernel(name: str, device: int) -> Any:
    return _module(device).get_function(name)


class _Stream(NamedTuple):
    """A stream in the form in which CuPy accepts foreign ones; torch's streams have this form from torch 2.10 on."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _launch(name: str, blocks: int, arguments: tuple) -> None:
    import cupy
    import numpy as np

    table, leaves, chunk, bucket = arguments
    device = torch.cuda.current_device()
    integers = np.uint64(table), np.int64(leaves), np.int64(chunk), np.uint64(bucket)
    with cupy.cuda.Stream.from_external(_Stream(_stream())):
        _kernel(name, device)((blocks,), (THREADS,), integers)
