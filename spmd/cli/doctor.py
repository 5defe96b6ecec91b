"""`spmd doctor`: what this library finds here, what it would do, and whether its transports work.

For the person who asks why a job does not start, or is slow. Under a launcher (`mpirun -n 2 spmd doctor`) all ranks
take part and rank 0 prints. Invariant: it says why, for each thing that it found or did not, and its exit status is 1
only if something fails that a mesh made here with backend="auto" needs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch

from .. import __version__
from ..kernels.cuda import nccl_library
from ..kernels.errors import MeshError
from ..kernels.network import interface
from ..kernels.processes import cores
from ..kernels.shm import arena
from ..mesh.arguments import layout_of
from ..mesh.launch.environments import Launch, describe
from ..mesh.launch.rendezvous import address, launch_of_process
from ..mesh.mesh import Mesh
from ..mesh.rank.devices import default_size, for_driver

PACKAGES = ("numpy", "optree", "cloudpickle", "tqdm", "cupy-cuda12x", "cupy-cuda13x", "mpi4py")
SECONDS = 60.0
_FLOATS = 1 << 20
_WARM, _TIMED = 3, 5  # all-reduces

_MPI_TEST = "from spmd import Mesh; from spmd.cli.doctor import reduce_once; print(reduce_once(Mesh(backend='mpi')))"

_NCCL_TEST = f"""
import sys
from spmd import Mesh
from spmd.cli.doctor import reduce_once
from spmd.kernels.cuda.nccl_library import load
with Mesh({{"data": int(sys.argv[1])}}, device="cuda", timeout={SECONDS}) as mesh:
    print(reduce_once(mesh), load().describe(), sep="; ")
"""
_SHARED = "two ranks on one GPU"


def doctor() -> int:
    """Print the findings, and return the exit status."""
    try:
        launch = launch_of_process()
    except MeshError as error:
        _print_found(None)
        print(f"\nfailed: {error}")
        return 1
    if launch is not None:
        return _as_rank(launch)
    _print_found(None)
    refused = arena.supported()
    ranks = _ranks_of_its_own()
    on_gpus = for_driver("auto", "auto", ranks) == "cuda"
    backend = "nccl" if on_gpus else "gloo" if refused else "shm"
    why = f"{ranks} ranks can have a GPU each" if on_gpus else "all ranks are on this host"
    _section("backend")
    _line("auto", backend, f"{why}{f', and {refused}' if refused and not on_gpus else ''}")
    _section("transports")
    failed = []
    for name in ("shm", "gloo"):
        works = name == "gloo" or not refused
        outcome = attempt(lambda name=name: _in_driver(name)) if works else (False, f"absent: {refused}")  # type: ignore[misc]
        _line(name, *_verdict(outcome) if works else (outcome[1],))
        if works and not outcome[0]:
            failed.append(name)
    _line("mpi", *_mpi())
    for its in _nccl():
        _line("nccl", *its)
        if on_gpus and its[1] == "FAILS" and its[0] != _SHARED:
            failed.append("nccl")
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def _as_rank(launch: Launch) -> int:
    """On every rank of a launched job: try what backend="auto" chooses, and Gloo between all."""
    prints = launch.rank == 0
    if prints:
        _print_found(launch)
        _section("transports")
    failed = []
    for name in ("auto", "gloo"):
        outcome = attempt(lambda name=name: _launched(name))  # type: ignore[misc]
        if prints:
            _line(name, *_verdict(outcome))
        if not outcome[0]:
            failed.append(name)
            break  # the ranks have lost each other
    if prints and failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


def _ranks_of_its_own() -> int:
    """How many ranks a mesh that is made here starts."""
    return layout_of({"data": -1}, None, functools.partial(default_size, "auto", "auto")).size


def attempt(test: Callable[[], str]) -> tuple[bool, str]:
    """Whether a test passes, and what it says."""
    try:
        return True, test()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}".splitlines()[0]


def reduce_once(mesh: Mesh) -> str:
    """All-reduce 4 MiB on a mesh, check the sum, and say how long it took.

    The first ones warm up: they allocate memory, and are not what a training loop sees. Of the rest the fastest counts,
    since other programs may run here.
    """

    def body() -> tuple[float, float]:
        comm = mesh.comm()
        x = torch.full((_FLOATS,), float(comm.rank + 1), device="cuda" if comm.backend == "nccl" else "cpu")
        times = []
        for _ in range(_WARM + _TIMED):
            comm.barrier()
            began = time.perf_counter()
            total = comm.all_reduced(x)
            float(total[0])  # waits for a GPU
            times.append(time.perf_counter() - began)
        return float(total.sum()) / _FLOATS, min(times[_WARM:])

    expected = mesh.size * (mesh.size + 1) / 2
    found = mesh.run(body)
    if any(total != expected for total, _ in found):
        raise MeshError(f"the sum is wrong: {[total for total, _ in found]} instead of {expected}")
    return f"{mesh.size} ranks, 4 MiB reduced in {1e3 * max(took for _, took in found):.2f} ms"


def _in_driver(backend: str) -> str:
    with Mesh({"data": 2}, backend=backend, timeout=SECONDS) as mesh:
        return reduce_once(mesh)


def _launched(backend: str) -> str:
    with Mesh(backend=backend, timeout=SECONDS) as mesh:
        where = mesh.run(lambda: (platform.node(), os.readlink("/proc/self/ns/net"), address()))
        ranks = Counter((host, at) for host, _, at in sorted(where, key=str))
        hosts = ", ".join(f"{count} on {host}{f' at {at}' if at else ''}" for (host, at), count in ranks.items())
        return f"{mesh.backend}: {reduce_once(mesh)} ({hosts})"


# -- what is here ------------------------------------------------------------------------------------------------------


def _print_found(launch: Launch | None) -> None:
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    print(f"spmd {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {machine}")
    _section("packages")
    for name in PACKAGES:
        try:
            _line(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            _line(name, "not installed")
    _section("devices")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    limited = ", as its control group limits it" if cores() < len(os.sched_getaffinity(0)) else ""
    _line("cpu", f"{cores()} of {os.cpu_count()} cores for this process{limited}, {memory:.1f} GiB of memory")
    if not torch.cuda.is_available():
        _line("cuda", "none", "torch was built without it" if torch.version.cuda is None else "no device found")
    for index in range(torch.cuda.device_count()):
        _line(f"cuda:{index}", torch.cuda.get_device_name(index))
    _section("launched by")
    for name, found, reason in describe():
        _line(name, "yes" if found else "no", reason)
    if launch is None:
        ranks = _ranks_of_its_own()
        why = "GPU" if for_driver("auto", "auto", ranks) == "cuda" else "core"
        outcome = "" if os.environ.get("SPMD_RANKS") else f", one per {why}"
        print(f"  so a Mesh made here starts its own ranks: {ranks}{outcome}")
    else:
        print(f"  so this process is rank {launch.rank} of {launch.size}, as {launch.source} says")
    _section("network")
    for name, where in interface.addresses().items():
        _line(name, where)
    chosen = interface.chosen()
    why = "SPMD_INTERFACE or GLOO_SOCKET_IFNAME" if chosen else "neither SPMD_INTERFACE nor GLOO_SOCKET_IFNAME is set"
    _line("between hosts", chosen or "the interface that leads to where the ranks meet", why)


def _mpi() -> tuple[str, ...]:
    """The state of backend "mpi", which no mesh takes unless asked to."""
    launcher = shutil.which("mpirun")
    missing = "mpirun is not on the PATH" if launcher is None else ""
    missing = missing or (
        "" if importlib.util.find_spec("mpi4py") else "mpi4py is not installed: pip install spmd[mpi]"
    )
    if missing or launcher is None:
        return "absent", missing
    _, version = _run([launcher, "--version"], {}, SECONDS)
    more = ["--oversubscribe"] if "Open MPI" in version else []
    environ = {"OMP_NUM_THREADS": "1"}
    if os.geteuid() == 0:  # as in containers, where Open MPI wants to be told that this is meant
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    works, text = _run([launcher, *more, "-n", "2", sys.executable, "-c", _MPI_TEST], environ, SECONDS)
    if not works:
        return "FAILS", text, "(not needed unless asked for)"
    return "works", text.splitlines()[0], version.splitlines()[0] if version else ""


def _nccl() -> list[tuple[str, ...]]:
    """NCCL on one GPU, on all of them, and two ranks on one, each in a process that is ended where it hangs."""
    if not torch.cuda.is_available():
        return [("absent: no CUDA device",)]
    if importlib.util.find_spec("cupy") is None:
        return [("absent: CuPy is not installed",)]
    count = torch.cuda.device_count()
    found = [("one GPU", *_verdict(_reduced_by_nccl(1, {})))]
    if count > 1:
        found.append((f"{count} GPUs", *_verdict(_reduced_by_nccl(count, {}))))
    one = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    shared = {**nccl_library.SHARED_GPU_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": one}
    return [*found, (_SHARED, *_verdict(_reduced_by_nccl(2, shared)), "(for tests; needs NCCL 2.30)")]


def _reduced_by_nccl(ranks: int, environ: dict[str, str]) -> tuple[bool, str]:
    """Whether this many ranks can all-reduce on GPUs, and what they print."""
    return _run([sys.executable, "-c", _NCCL_TEST, str(ranks)], environ, 2 * SECONDS)


def _run(command: list[str], environ: dict[str, str], seconds: float) -> tuple[bool, str]:
    """Whether a program succeeds within so many seconds, and its output, or else its last line of errors."""
    try:
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"did not end within {seconds:g} s"
    except OSError as error:
        return False, str(error)
    if done.returncode:
        return False, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return True, done.stdout.strip()


def _verdict(outcome: tuple[bool, str]) -> tuple[str, str]:
    return "works" if outcome[0] else "FAILS", outcome[1]


def _section(title: str) -> None:
    print(f"\n{title}")


def _line(name: str, *texts: str) -> None:
    print(f"  {name:<14} {'  '.join(text for text in texts if text)}".rstrip(), flush=True)
