"""Which device each rank computes on: the one asked for, or a GPU if every rank can have its own.

Invariant: a driver's process only counts CUDA devices, and no process touches CUDA if "cpu" was asked for; each rank
makes its GPU the current one before anything else uses CUDA in its process.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.cuda import nccl_library, placement
from ...kernels.errors import MeshError
from ...kernels.shm import arena
from ..failure import ranks_text
from ..launch.environments import Launch


def wants_cuda(device: str, backend: str) -> bool | None:
    """Whether GPUs were asked for; None if they are to be used where there are enough."""
    if device != "auto":
        return device == "cuda"
    return backend == "nccl" or (None if backend == "auto" else False)


def default_size(device: str, backend: str, known: int) -> int | None:
    """How many ranks a driver's mesh has if the size of an axis is -1: one for each GPU; None if they compute on CPUs.

    Args:
        known: the product of the other axes' sizes: at least so many GPUs are needed.
    """
    count = _gpus_for(device, backend, known)
    return None if count is None else max(count, known)  # too few are refused by `for_driver`


def for_driver(device: str, backend: str, size: int) -> str:
    """The device of a driver's mesh, whose ranks are all on this host.

    Raises:
        MeshError: GPUs were asked for and can't be used; it says what to install.
    """
    count = _gpus_for(device, backend, size)
    if count is None:
        return "cpu"
    nccl_library.check_driver()
    library = nccl_library.load()
    if count < size and not nccl_library.may_share_gpu(library):
        raise _too_few(f"{count} for {size} ranks", library)
    return "cuda"


def chosen(device: str, backend: str, size: int, *, several: bool) -> tuple[str, str]:
    """The device and the backend of a driver's mesh, on this host or on several."""
    if several:
        return "cpu", "hierarchical" if backend == "auto" else backend
    device = for_driver(device, backend, size)
    if backend == "auto":
        backend = "nccl" if device == "cuda" else "gloo" if arena.supported() else "shm"
    return device, backend


def of_rank(device: str, rank: int) -> torch.device | None:
    """Take the GPU of a driver's rank: rank modulo the number of GPUs."""
    if device != "cuda":
        return None
    nccl_library.check_driver()
    return placement.take(rank % torch.cuda.device_count())


def of_launched(device: str, backend: str, launch: Launch, store: Any, host: str, size: int) -> torch.device | None:
    """Take the GPU of a launched rank, by its number on its host; all ranks learn whether each has its own GPU.

    If the launcher shows every process only one GPU (CUDA_VISIBLE_DEVICES), the rank takes that one.
    """
    wanted = wants_cuda(device, backend)
    if wanted is False:
        return None
    problem: MeshError | None = None
    library, own, shown = None, None, "none"
    try:
        nccl_library.check_driver()
        library = nccl_library.load()
        own = index_of(launch.local_rank, torch.cuda.device_count())
        shown = f"{host} {torch.cuda.get_device_properties(own).uuid}"
    except MeshError as error:
        problem = error
    except RuntimeError as error:  # CUDA's; it is raised below, since the other ranks wait for this one's entry
        problem = MeshError("this rank's GPU cannot be used", got=str(error))
    store.set(f"gpu/{launch.rank}", shown)
    everyone = [store.get(f"gpu/{rank}").decode() for rank in range(size)]
    without = [rank for rank, its in enumerate(everyone) if its == "none"]
    shared = [rank for rank, its in enumerate(everyone) if everyone.count(its) > 1 and its != "none"]
    if wanted is None and (without or shared):
        return None
    if problem is not None:
        raise problem
    if without:
        raise MeshError("device 'cuda' needs a GPU on every rank", got=f"none on {ranks_text(without)}")
    assert library is not None and own is not None
    if shared and not nccl_library.may_share_gpu(library):
        raise _too_few(f"{ranks_text(shared)} share one", library)
    return placement.take(own)


def index_of(local_rank: int, count: int) -> int:
    """The index of a launched rank's GPU among the `count` that its process sees.

    >>> index_of(3, 8), index_of(3, 1), index_of(5, 4)
    (3, 0, 1)
    """
    return local_rank % max(1, count)


def _gpus_for(device: str, backend: str, ranks: int) -> int | None:
    """How many GPUs this process sees (CUDA_VISIBLE_DEVICES says which); None if so many ranks compute on CPUs."""
    wanted = wants_cuda(device, backend)
    if wanted is False:
        return None
    count = torch.cuda.device_count() if torch.version.cuda is not None else 0
    return None if wanted is None and (count < ranks or not _usable()) else count


def _usable() -> bool:
    """Whether the driver and NCCL are installed and work."""
    try:
        nccl_library.check_driver()
        nccl_library.load()
    except MeshError:
        return False
    return True


def _too_few(got: str, library: nccl_library.Library) -> MeshError:
    return MeshError(
        "device 'cuda' needs a GPU for every rank",
        got=got,
        where=library.describe(),
        remedy="use fewer ranks, or for a test NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL_MAX_CTAS=4",
    )
