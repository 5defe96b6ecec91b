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

from spmd.kernels import cuda_pack

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
    subprocess.run([tool("g++"), *flags, "-o", library, cuda_pack.SOURCE], check=True, timeout=100)
    return str(library)


def launcher(on_host: Any) -> Callable[[str, int, tuple], None]:
    """What a `Table` calls to start a kernel."""

    def start(name: str, blocks: int, arguments: tuple) -> None:
        table, leaves, chunk, bucket, scale = arguments
        sizes = ctypes.c_longlong(leaves), ctypes.c_longlong(chunk)
        kernel = ctypes.cast(getattr(on_host, name), ctypes.c_void_p)
        on_host.launch(
            kernel, blocks, 32, ctypes.c_void_p(table), *sizes, ctypes.c_void_p(bucket), ctypes.c_float(scale)
        )

    return start
