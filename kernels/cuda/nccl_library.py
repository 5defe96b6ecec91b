"""Finds NCCL: CuPy's binding, the one libnccl that is mapped, and errors that say which wheel to install.

torch must be imported first: its CUDA builds load a libnccl, and CuPy then uses the one that is loaded. Two in one
process would each have their own state. Invariant: nothing here is called before a GPU is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import re
from typing import Any

import torch

from ..errors import MeshError

_SPLIT = 21801  # the first NCCL with ncclCommSplit
_SHARED_GPU = 23000  # the first that takes several ranks on one GPU
_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
# Lets several ranks use one GPU. According to NCCL, their kernels can occupy all multiprocessors and then wait for each
# other for ever; so each gets only a few.
SHARED_GPU_ENVIRONMENT = {_SHARE: "1", "NCCL_MAX_CTAS": "4"}


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """The installation that was found.

    Attributes:
        nccl: `cupy.cuda.nccl`.
        version: of the mapped libnccl, as NCCL writes it (22501 is 2.25.1).
        path: the mapped file, as the kernel knows it; "" if none is.
        cupy: the version of CuPy.
        doubt: what may be wrong with the installation; "" if nothing is known to be.
    """

    nccl: Any
    version: int
    path: str
    cupy: str
    doubt: str = ""

    def describe(self) -> str:
        """For messages and reports: `CuPy 14.2.0, NCCL 2.27.3 (/.../libnccl.so.2)`."""
        doubt = f"; {self.doubt}" if self.doubt else ""
        return f"CuPy {self.cupy}, NCCL {version_text(self.version)} ({self.path or 'linked in'}){doubt}"


def version_text(version: int) -> str:
    """NCCL's number as people write it.

    >>> version_text(22501), version_text(2708)
    ('2.25.1', '2.7.8')
    """
    step = 10000 if version >= 10000 else 1000
    return f"{version // step}.{version % step // 100}.{version % 100}"


def mapped_files(maps: str | None = None) -> list[str]:
    """The NCCL libraries that are mapped into this process, without plugins (`libnccl-net.so` and the like).

    >>> mapped_files("7f00-7f01 r-xp 00000000 08:01 12 /opt/nccl/lib/libnccl.so.2")
    ['/opt/nccl/lib/libnccl.so.2']
    """
    if maps is None:
        with open("/proc/self/maps", errors="surrogateescape") as file:
            maps = file.read()
    return sorted(set(re.findall(r"(/\S*/libnccl\.so[.\d]*)$", maps, re.MULTILINE)))


def extra() -> str:
    """The extra of this package that fits torch: CUDA 13's wheels for a torch of CUDA 13, else CUDA 12's."""
    return "cuda13" if (torch.version.cuda or "").startswith("13") else "cuda12"


def _doubt() -> str:
    """A warning if the NCCL wheels of two CUDA versions are installed, of which one has overwritten the other."""
    found = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    if len(found) < 2:
        return ""
    return f"{' and '.join(found)} have overwritten each other's file: uninstall both, then pip install spmd[{extra()}]"


def _check_major(cupy: Any) -> None:
    """Refuse a CuPy built for another major version of CUDA than torch: each would load its own libraries."""
    if torch.version.cuda is None:
        return  # refused elsewhere
    wanted, found = int(torch.version.cuda.partition(".")[0]), cupy.cuda.runtime.runtimeGetVersion() // 1000
    if wanted != found:
        raise MeshError(
            "CuPy and torch are built for different CUDA versions",
            got=f"CuPy {cupy.__version__} for CUDA {found}, torch {torch.__version__} for {torch.version.cuda}",
            expected=f"a CuPy for CUDA {wanted}",
            remedy=f"pip uninstall cupy-cuda{found}x, then pip install cupy-cuda{wanted}x",
        )


@functools.cache
def load() -> Library:
    """CuPy's NCCL, checked.

    Raises:
        MeshError: CuPy or NCCL are missing, do not match, or are set up so that they cannot work.
    """
    if os.environ.get("NCCL_COMM_BLOCKING") == "0":
        raise MeshError(
            "NCCL_COMM_BLOCKING=0 can't be used",
            got="communicators that are not ready when CuPy says that they are made",
            remedy="unset it",
        )
    install = f"pip install spmd[{extra()}]"
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise MeshError("device 'cuda' needs CuPy", got=str(error).strip(), remedy=install) from None
    _check_major(cupy)
    if not getattr(nccl, "available", False):
        raise MeshError(
            "CuPy finds no NCCL", got=f"CuPy {cupy.__version__}", remedy=f"{install}, or nvidia-nccl by itself"
        )
    paths = mapped_files()
    if len(paths) > 1:
        raise MeshError(
            "several libraries of NCCL are mapped into this process",
            got=", ".join(paths),
            expected="one",
            remedy="keep the one that torch brings, and import torch before cupy",
        )
    found = Library(nccl, nccl.get_version(), paths[0] if paths else "", cupy.__version__, _doubt())
    if found.version < _SPLIT:
        raise MeshError(
            "NCCL is too old", got=found.describe(), expected="2.18.1 or later", remedy=f"{install} --upgrade"
        )
    return found


def check_driver() -> None:
    """Refuse a process in which torch can't compute on a GPU.

    Raises:
        MeshError: torch is built without CUDA, or there is no driver or no device.
    """
    if torch.version.cuda is None:
        raise MeshError(
            "device 'cuda' needs a build of torch for CUDA",
            got=f"torch {torch.__version__}",
            remedy="install torch from the index of a CUDA version, see pytorch.org",
        )
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise MeshError(
            "device 'cuda' finds no GPU",
            got=f"torch {torch.__version__} for CUDA {torch.version.cuda}, CUDA_VISIBLE_DEVICES={visible!r}",
            remedy="see what nvidia-smi shows: the driver must be as new as that CUDA version",
        )


def may_share_gpu(library: Library) -> bool:
    """Whether several ranks may use one GPU: from NCCL 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set."""
    return os.environ.get(_SHARE) == "1" and library.version >= _SHARED_GPU
