"""What a driver with many hosts costs: calls, the start, the death of a host, memory; on stub hosts, and fitted.

    python bench/control_plane.py [--hosts 64] > bench/results/control_plane.txt

Stub hosts (`stub_host`) are forked from one process, so that none imports torch. They share the cores of this machine
with the driver, which adds to the latency, as real hosts would not; so the processor time of all of the driver's
threads is given, too.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import stub_host

RANKS, CALLS = 16, 50
FORK = multiprocessing.get_context("forkserver")


class Stubs:
    """A launcher of them."""

    def __init__(self, hosts: int, ranks: int):
        self.hosts = [f"stub{host}:{ranks}" for host in range(hosts)]
        self.running: dict[str, Any] = {}

    def start(self, name: str, command: Any, stdin: bytes) -> Any:
        started = self.running[name] = FORK.Process(target=stub_host.stub, args=(stdin,), daemon=True)
        started.start()
        return started

    def stop(self, handle: Any) -> None:
        handle.join(5.0)
        handle.kill()
        handle.join()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def nothing() -> None:
    """What is called on all ranks."""


def measured(hosts: int, ranks: int = RANKS) -> dict[str, float]:
    from spmd import Mesh

    gc.collect()
    before, began, stubs = resident(), time.perf_counter(), Stubs(hosts, ranks)
    with Mesh({"data": ranks * hosts}, hosts=stubs, timeout=120) as mesh:
        start = time.perf_counter() - began
        mesh.run(nothing)
        memory = (resident() - before) / (ranks * hosts)
        spent = time.process_time()
        calls = [seconds(lambda: mesh.run(nothing)) for _ in range(CALLS)]
        spent = (time.process_time() - spent) / CALLS
        death = death_of(stubs, f"stub{hosts - 1}", mesh)
    quartiles = statistics.quantiles(calls, n=4)
    return {
        "start": start,
        "call": quartiles[1],
        "low": quartiles[0],
        "high": quartiles[2],
        "spent": spent,
        "death": death,
        "memory": memory,
    }


def death_of(stubs: Stubs, name: str, mesh: Any) -> float:
    """Seconds from a host's death until a call succeeds again."""
    from spmd import PeerLost

    os.kill(stubs.running[name].pid, signal.SIGKILL)
    began = time.perf_counter()
    while True:
        try:
            mesh.run(nothing)
            return time.perf_counter() - began
        except PeerLost:
            pass


def fitted(rows: dict[int, dict[str, float]], name: str) -> tuple[float, float]:
    """Seconds for a mesh, and for each further host: a line by least squares."""
    return statistics.linear_regression([*rows], [row[name] for row in rows.values()])[::-1]  # type: ignore[return-value]


def row_of(hosts: int, row: dict[str, float]) -> str:
    call = f"{1e3 * row['call']:.2f} ({1e3 * row['low']:.2f}-{1e3 * row['high']:.2f})"
    sizes = f"{hosts:>5}{RANKS * hosts:>7}{row['start']:>10.2f}"
    return f"{sizes}{call:>22}{1e3 * row['spent']:>11.2f}{row['death']:>12.2f}{row['memory'] / 1024:>11.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=64)
    most = parser.parse_args().hosts
    os.environ["SPMD_INTERFACE"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # where the fork server finds this
    FORK.set_forkserver_preload(["stub_host"])
    logging.getLogger("spmd").setLevel(logging.ERROR)
    measured(1)  # imports what all of them share
    counts, rows = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count <= most], {}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {RANKS} stub ranks a host"
    )
    call = f"{'call, ms (middle)':>22}{'driver, ms':>11}"
    print(f"{'hosts':>5}{'ranks':>7}{'start, s':>10}{call}{'one dies, s':>12}{'KiB a rank':>11}")
    for hosts in counts:
        rows[hosts] = measured(hosts)
        print(row_of(hosts, rows[hosts]), flush=True)
    print("\nfitted, and carried to 1,000 hosts:")
    for name, what in (
        ("start", "start"),
        ("call", "a call"),
        ("spent", "processor time of the driver, a call"),
        ("death", "a host dies, and comes again"),
    ):
        base, each = fitted(rows, name)
        if each < 0:  # it does not grow
            base, each = max(row[name] for row in rows.values()), 0.0
        print(f"  {what}: {1e3 * base:.2f} ms + {1e3 * each:.3f} ms a host; 1,000 hosts: {base + 1000 * each:.2f} s")
    memory = rows[counts[-1]]["memory"]
    print(f"  memory of the driver: {memory / 1024:.1f} KiB a rank; 16,000 ranks: {16000 * memory / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
