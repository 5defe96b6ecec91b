"""Which device a mesh gets, with what torch and NCCL say of GPUs replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import HANGS

from spmd import Mesh, MeshError
from spmd.kernels.cuda import nccl_library
from spmd.kernels.cuda.nccl_library import Library
from spmd.mesh.launch.environments import Launch, detect
from spmd.mesh.rank import devices
from spmd.mesh.rank.session import RankSession
from spmd.mesh.replication.values import prints_of_scalars

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`gpus(2)`: this host seems to have two; gives the list of those made current."""

    def have(count: int, version: int = 22703, uuids: Callable[[int], Any] = lambda index: index) -> list[int]:
        taken: list[int] = []
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids(index)))
        monkeypatch.setattr(nccl_library, "load", lambda: Library(None, version, "/a/libnccl.so.2", "14.0.0"))
        return taken

    return have


@no_gpu
def test_auto_is_the_cpu_here(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2}, device="auto")
    assert (mesh.device, mesh.backend) == ("cpu", "shm")
    assert (
        mesh.run(lambda: (mesh.device, torch.cuda.is_initialized(), "cupy" in sys.modules))
        == [("cpu", False, False)] * 2
    )


@no_gpu
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"backend": "nccl"}])
def test_asked_for_and_not_there(options: dict[str, str]) -> None:
    with pytest.raises(MeshError, match=r"device 'cuda' (needs|finds).*(install torch|nvidia-smi)"):
        Mesh({"data": 1}, **options)


@pytest.mark.parametrize(
    ("device", "backend", "text"),
    [("cpu", "nccl", "GPUs only.*use device='cuda'"), ("cuda", "gloo", "CPUs only.*use backend='auto'")],
)
def test_contradictions(device: str, backend: str, text: str) -> None:
    with pytest.raises(MeshError, match=f"backend '{backend}' moves tensors of {text}"):
        Mesh({"data": 1}, device=device, backend=backend)


@pytest.mark.parametrize(("count", "chosen"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")])
def test_auto_in_a_driver(gpus: Callable[..., Any], count: int, chosen: str) -> None:
    """GPUs only if each of two ranks can have one of its own."""
    gpus(count)
    assert devices.for_driver("auto", "auto", 2) == chosen
    assert devices.for_driver("auto", "shm", 2) == devices.for_driver("cpu", "auto", 2) == "cpu"


def missing() -> Library:
    raise MeshError("no CuPy")


def test_auto_without_cupy(gpus: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.setattr(nccl_library, "load", missing)
    assert devices.for_driver("auto", "auto", 2) == "cpu"
    with pytest.raises(MeshError, match="no CuPy"):
        devices.for_driver("cuda", "auto", 2)


def test_too_few(gpus: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    two = r"a GPU for every rank \(got 1 for 2 ranks\).*NCCL_MULTI_RANK_GPU_ENABLE=1 and NCCL_MAX_CTAS=4"
    with pytest.raises(MeshError, match=two):
        devices.for_driver("cuda", "auto", 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with pytest.raises(MeshError, match=r"NCCL 2\.27\.3"):  # too old to share
        devices.for_driver("cuda", "auto", 2)
    taken = gpus(1, version=23000)
    assert devices.for_driver("cuda", "auto", 2) == "cuda"
    assert [devices.of_rank("cuda", rank) for rank in (0, 1)] == [torch.device("cuda", 0)] * 2
    assert taken == [0, 0]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mesh]:
    """`planned(axes, ...)` is a driver's mesh whose ranks are not started."""
    monkeypatch.delenv("SPMD_RANKS", raising=False)
    monkeypatch.setattr(Mesh, "_start", lambda self: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    return Mesh


CUDA, AUTO, CPU = {"device": "cuda"}, {"device": "auto"}, {"device": "cpu"}


@pytest.mark.parametrize(
    ("count", "axes", "options", "found", "device"),
    [
        (4, None, AUTO, {"data": 4}, "cuda"),
        (4, None, CUDA, {"data": 4}, "cuda"),
        (8, {"data": -1}, {"backend": "nccl"}, {"data": 8}, "cuda"),  # more GPUs than cores
        (1, None, AUTO, {"data": 1}, "cuda"),
        (4, {"data": -1, "model": 2}, AUTO, {"data": 2, "model": 2}, "cuda"),
        (3, {"data": -1, "model": 2}, AUTO, {"data": 1, "model": 2}, "cuda"),
        (2, {"data": -1, "model": 3}, AUTO, {"data": 2, "model": 3}, "cpu"),  # three cannot have a GPU each
        (0, None, AUTO, {"data": 6}, "cpu"),
        (4, None, CPU, {"data": 6}, "cpu"),
        (4, None, {"backend": "gloo"}, {"data": 6}, "cpu"),
        (4, {"data": 2}, AUTO, {"data": 2}, "cuda"),
        (4, {"data": 6}, AUTO, {"data": 6}, "cpu"),
    ],
)
def test_open_axis_in_a_driver(
    gpus: Callable[..., Any],
    planned: Callable[..., Mesh],
    count: int,
    axes: Any,
    options: dict[str, str],
    found: dict[str, int],
    device: str,
) -> None:
    """It has as many ranks as there are GPUs, where the mesh is one of GPUs."""
    gpus(count)
    mesh = planned(axes, **options)
    assert (mesh.axes, mesh.device) == (found, device)
    assert mesh.threads == max(1, 6 // mesh.size)
    assert planned(axes, **options, threads=3).threads == 3


def test_number_of_ranks_that_was_asked_for(
    gpus: Callable[..., Any], planned: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(4)
    monkeypatch.setenv("SPMD_RANKS", "2")
    assert (planned().axes, planned().device) == ({"data": 2}, "cuda")
    monkeypatch.setenv("SPMD_RANKS", "5")
    assert (planned().axes, planned().device) == ({"data": 5}, "cpu")


def test_open_axis_without_what_gpus_take(
    gpus: Callable[..., Any], planned: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    with pytest.raises(MeshError, match="got 1 for 2 ranks"):
        planned({"data": -1, "model": 2}, device="cuda")
    gpus(0)
    with pytest.raises(MeshError, match="finds no GPU"):
        planned(device="cuda")
    gpus(4)
    monkeypatch.setattr(nccl_library, "load", missing)
    assert (planned().axes, planned().device) == ({"data": 6}, "cpu")
    with pytest.raises(MeshError, match="no CuPy"):
        planned(device="cuda")


def test_visible_gpus_are_counted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES is torch's to read, at every call anew."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    seen = iter([4, 2])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: next(seen))
    assert [devices.default_size("cuda", "auto", 1) for _ in range(2)] == [4, 2]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.default_size("cuda", "auto", 1) == 1  # refused later, with what is missing


def together(device: str, local_ranks: list[int], hosts: list[str], backend: str = "auto") -> list[Any]:
    """What launched ranks get, each on a thread with a store that they share."""
    store, size = dist.HashStore(), len(local_ranks)
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        launch = Launch(rank, size, local_ranks[rank], None, None, "test")
        try:
            found[rank] = devices.of_launched(device, backend, launch, store, hosts[rank], size)
        except MeshError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_launched(gpus: Callable[..., Any]) -> None:
    taken = gpus(2)
    assert together("auto", [0, 1, 0, 1], ["a", "a", "b", "b"]) == [torch.device("cuda", i) for i in (0, 1, 0, 1)]
    assert sorted(taken) == [0, 0, 1, 1]
    assert together("auto", [0, 1, 2], ["a"] * 3) == [None] * 3  # two would share one
    assert together("cpu", [0, 1], ["a"] * 2) == together("auto", [0, 1], ["a"] * 2, "gloo") == [None] * 2
    for text in together("cuda", [0, 1, 2], ["a"] * 3):
        assert "share one" in text and "needs a GPU for every rank" in text


@pytest.mark.parametrize(("local_rank", "count", "index"), [("2", 4, 2), ("2", 1, 0), ("5", 8, 5)])
def test_local_rank_of_torchrun(gpus: Callable[..., Any], local_rank: str, count: int, index: int) -> None:
    taken = gpus(count)
    # Ranks may be numbered otherwise than those of a host are: rank 0 need not be the first.
    launch = detect({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "8"})
    assert launch is not None
    found = devices.of_launched("auto", "auto", launch, dist.HashStore(), "a", 1)
    assert found == torch.device("cuda", index) and taken == [index]


def test_one_gpu_shown_to_each(gpus: Callable[..., Any]) -> None:
    """CUDA_VISIBLE_DEVICES names another GPU in each process, so that all are number 0."""
    order = iter("xyzw")
    gpus(1, uuids=lambda index: next(order))
    assert together("auto", [0, 1, 2], ["a"] * 3) == [torch.device("cuda", 0)] * 3


def test_the_zygote_stays_away_from_cuda() -> None:
    source = "import spmd.mesh.rank.zygote, sys, torch; print(torch.cuda.is_initialized(), 'cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_what_is_large_goes_to_a_gpu_by_way_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    session = object.__new__(RankSession)
    session.device = torch.device("cuda", 0)
    pinned: list[int] = []
    moved: list[tuple[torch.device, bool]] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.nbytes)
        return self.clone()

    def to(self: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        moved.append((device, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    small, large, sparse = torch.zeros(3), torch.zeros(1 << 16), torch.zeros(1 << 16).to_sparse()
    assert session.on_device(large) is not large
    assert session.on_device(small) is small and session.on_device(sparse) is sparse
    assert pinned == [large.nbytes]
    assert moved == [(session.device, True)] * 3
    session.device = torch.device("cpu")
    assert session.on_device(large) is large and len(moved) == 3


def test_numbers_beside_those_of_a_gpu_are_not_told() -> None:
    """The bytes of one would be taken for another's."""
    number, on_gpu = torch.tensor(2.0), SimpleNamespace(is_cuda=True)
    assert prints_of_scalars([number, number], (0, 1)) == 2 * bytes(number.numpy())
    assert prints_of_scalars([on_gpu, number], (0, 1)) == b""


def test_objects_on_a_rank_compute_on_its_gpu(make_mesh: Callable[..., Mesh]) -> None:
    """Each has a thread of its own, and CUDA begins a thread with GPU 0."""

    def pretend() -> None:
        from spmd.kernels.cuda import placement

        own = threading.local()
        torch.cuda.set_device = lambda device: setattr(own, "index", getattr(device, "index", device))
        torch.cuda.current_device = lambda: getattr(own, "index", 0)
        placement.take(1)

    class Where:
        def __init__(self) -> None:
            self.at_first = torch.cuda.current_device()

        def current(self) -> tuple[int, int]:
            return self.at_first, torch.cuda.current_device()

    mesh = make_mesh({"data": 1}, device="cpu")
    mesh.run(pretend)
    assert mesh.remote(Where, rank=0).current().get() == (1, 1)
