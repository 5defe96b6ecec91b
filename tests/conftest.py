"""Fixtures: meshes that are closed after the test, and a check that nothing of ours outlives the suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import internals
import pytest
import torch
from fork_server import ForkServer, shared_server
from hypothesis import HealthCheck, settings
from internals import close_all_meshes, forget_runs, local_hosts, ranks_import
from patience import until
from scripts import left_in_shm

from spmd import Mesh

torch.set_num_threads(1)
# A slow example only shows how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
# Started by a shell in the background, the suite and all that it starts would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The slowest files, in order. Workers begin with them (see the Makefile), so that none is left for the end.
LONG = (
    "nodes notebooks compile same_bits launchers optimizer_mesh scripts readme hosts fingerprint torch_distributed "
    "bench communicator survival operators launch processes optimizer_recipes mismatch verify cuda_kernels "
    "data_parallel attacks mpi examples resize wire large_all_reduce launched factors hierarchical layout failures "
    "collectives stuck doctor virtual_shards bucket replicated_values replication nccl sampler restore "
    "chaos interrupts secrets"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; within a file, tests keep their order."""
    place = {f"test_{name}.py": number for number, name in enumerate(LONG.split())}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session", autouse=True)
def hosts_are_forks() -> Iterator[None]:
    with local_hosts(lambda *command, **options: shared_server().run(*command, **options)):
        yield


@pytest.fixture(scope="session")
def server() -> ForkServer:
    """What programs are forked from, which takes seconds to start: one for all tests."""
    return shared_server()


@pytest.fixture
def make_mesh() -> Iterator[Callable[..., Mesh]]:
    """`make_mesh({"data": 2}, ...)` is a Mesh that is closed when the test ends."""
    made: list[Mesh] = []

    def make(axes: dict[str, int] | None = None, **options: Any) -> Mesh:
        made.append(Mesh(axes, **{"timeout": 60.0, **options}))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()


@pytest.fixture(scope="session")
def shared_meshes() -> Iterator[dict[Any, Mesh]]:
    made: dict[Any, Mesh] = {}
    yield made
    for mesh in made.values():
        mesh.close()


@pytest.fixture(scope="module")
def shared_mesh(shared_meshes: dict[Any, Mesh]) -> Iterator[Callable[..., Mesh]]:
    """`shared_mesh({"data": 2}, backend="shm")`: one mesh for all tests that only use it and never break it.

    One over Gloo is for the tests of a file: its threads look a hundred times a second whether something has come.
    """
    made = shared_meshes

    def get(axes: dict[str, int], backend: str = "shm") -> Mesh:
        key = (tuple(axes.items()), backend, internals.imported)
        if key not in made:
            made[key] = Mesh(axes, backend=backend, timeout=60.0)
        return made[key]

    yield get
    for key in [key for key, mesh in made.items() if mesh.backend == "gloo"]:
        made.pop(key).close()


@pytest.fixture(scope="module")
def operators_are_imported() -> Iterator[None]:
    """On all ranks, what Arrays need to take part in torch's functions: meshes that use them pay for it once."""
    with ranks_import("spmd.torch_distributed.propagation"):
        yield


@pytest.fixture(autouse=True)
def nothing_taken_up() -> Iterator[None]:
    """No test's mesh resumes from what another test has restored, or has run on it."""
    yield
    forget_runs()


def children_of(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """After the suite: no rank process, no file in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    yield
    close_all_meshes()

    def ranks() -> list[int]:
        return [grandchild for child in children_of(os.getpid()) for grandchild in children_of(child)]

    assert until(lambda: not ranks(), 60), f"rank processes left behind: {ranks()}"
    assert not left_in_shm(before)
