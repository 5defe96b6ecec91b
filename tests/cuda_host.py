"""The CUDA sources on this host: compiled by g++, started as a `Table` starts kernels."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from patience import HANGS
from torch import Tensor

from spmd.kernels.cuda import pack as cuda_pack
from spmd.kernels.cuda.pack import DTYPES

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def tool(name: str, *places: str) -> str:
    """A compiler's path; without one the test is skipped."""
    found = shutil.which(name) or next((place for place in places if Path(place).exists()), None)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def library_for_host(folder: Path) -> str:
    """The source, compiled for the host."""
    library = folder / "bucket.so"
    flags = ["-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-std=c++17", "-shared", "-fPIC", "-x", "c++"]
    subprocess.run([tool("g++"), *flags, "-o", library, cuda_pack.SOURCE], check=True, timeout=HANGS)
    return str(library)


def launcher(on_host: Any) -> Callable[[str, int, tuple], None]:
    """What a `Table` calls to start a kernel."""

    def start(name: str, blocks: int, arguments: tuple) -> None:
        table, leaves, chunk, bucket = arguments
        sizes = ctypes.c_longlong(leaves), ctypes.c_longlong(chunk)
        kernel = ctypes.cast(getattr(on_host, name), ctypes.c_void_p)
        on_host.launch(kernel, blocks, 32, ctypes.c_void_p(table), *sizes, ctypes.c_void_p(bucket))

    return start


# All casts that there are kernels for, and a dtype of each width that is copied as bytes.
PAIRS = [(leaf, wire) for leaf in (*DTYPES, torch.float64) for wire in DTYPES]
COPIED = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float64, torch.bool)


def extremes(dtype: torch.dtype) -> Tensor:
    """Values at which casts go wrong: ties and their neighbours, subnormals, both ends, zeros, infinities, NaN."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    # Half of them lie in the middle between two 16-bit numbers, or next to it; the rest are the ends of float32.
    found = []
    for narrow in (torch.float16, torch.bfloat16):
        every = torch.arange(0, 0x7F80 if narrow == torch.bfloat16 else 0x7C00, 5, dtype=torch.int16).view(narrow)
        following = (every.view(torch.int16) + 1).view(narrow)
        middle = ((every.double() + following.double()) / 2).float()
        found += [every.float(), middle, *(torch.nextafter(middle, torch.tensor(end)) for end in (0.0, torch.inf))]
    # Quiet and signalling NaN, with a payload that a cut would lose; the largest and the smallest numbers.
    bits = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 0x7F7F8000, 0x00800000, 0x007FFFFF, 1, 0]
    found.append(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    positive = torch.cat(found).to(dtype)
    if dtype == torch.float64:  # what float32 cannot hold, and ties that rounding to it first makes
        more = [1e300, 1e-300, 5e-324, 3.4028236e38, 1 + 2**-40, 1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40, 1e-42]
        positive = torch.cat([positive, torch.tensor(more, dtype=dtype)])
    return torch.cat([positive, -positive])


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN to NaN, and zeros of the same sign."""
    number = ~a.isnan()
    same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[number], b[number])
    return same and (not a.is_floating_point() or torch.equal(a[number].signbit(), b[number].signbit()))
