"""What a driver with many hosts costs: calls, the start, the death of a host, memory; on stub hosts, and fitted.

    python bench/control_plane.py [--hosts 64] > bench/results/control_plane.txt

Beyond 32 hosts some relay to the others; there each row is measured without relays as well.

Stub hosts (`stub_host`) are forked from one process, so that none imports torch. They share the cores of this machine
with the driver, which adds to the latency, as real hosts would not; so the processor time of all of the driver's
threads is given, too.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import multiprocessing
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import stub_host

RANKS, CALLS, DIRECT_HOSTS = 16, 50, 32
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


def measured(hosts: int, ranks: int = RANKS, *, relays: bool = True) -> dict[str, float]:
    from spmd import Mesh
    from spmd.mesh.hosts.relaying import tree

    tree.DIRECT_HOSTS = DIRECT_HOSTS if relays else hosts
    gc.collect()
    before, began, stubs = resident(), time.perf_counter(), Stubs(hosts, ranks)
    with Mesh({"data": ranks * hosts}, hosts=stubs, timeout=120) as mesh:
        start = time.perf_counter() - began
        mesh.run(nothing)
        memory = (resident() - before) / (ranks * hosts)
        while hosts > tree.DIRECT_HOSTS and len(relayed(mesh)) < hosts - relays_of(hosts):
            time.sleep(0.01)
        spent = time.process_time()
        calls = [seconds(lambda: mesh.run(nothing)) for _ in range(CALLS)]
        spent = (time.process_time() - spent) / CALLS
        death, relay_death = (death_of(stubs, f"stub{place}", mesh) for place in (hosts - 1, 0))
    quartiles = statistics.quantiles(calls, n=4)
    return {
        "start": start,
        "call": quartiles[1],
        "low": quartiles[0],
        "high": quartiles[2],
        "spent": spent,
        "death": death,
        "relay": relay_death,
        "memory": memory,
    }


def relayed(mesh: Any) -> list[int]:
    """The hosts that have a relay now."""
    return [place for place, host in enumerate(mesh.driver.ranks._hosts) if host.ordered._relayed]


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


def relays_of(hosts: int) -> int:
    """How many of them are relays, where there are any."""
    from spmd.mesh.hosts.relaying.tree import branch_size

    return math.ceil(hosts / branch_size(hosts))


def print_relays(rows: dict[int, dict[str, float]], hosts: int, spent: float) -> None:
    """What the driver takes with relays, carried to 1,000 hosts: a message to each relay, and notes of each host."""
    base, a_host = fitted(rows, "spent")
    noted = (spent - base - relays_of(hosts) * a_host) / hosts
    total = base + relays_of(1000) * a_host + 1000 * noted
    print(f"  with {relays_of(1000)} relays: {1e3 * noted:.3f} ms a host more than to the relays; {total:.2f} s")


def row_of(hosts: int, row: dict[str, float], relays: str) -> str:
    call = f"{1e3 * row['call']:.2f} ({1e3 * row['low']:.2f}-{1e3 * row['high']:.2f})"
    deaths = f"{row['death']:>13.2f}{row['relay']:>14.2f}"
    sizes = f"{hosts:>5}{RANKS * hosts:>7}{relays:>7}{row['start']:>10.2f}"
    return f"{sizes}{call:>22}{1e3 * row['spent']:>11.2f}{deaths}{row['memory'] / 1024:>11.1f}"


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
    deaths = f"{'last dies, s':>13}{'first dies, s':>14}"
    print(f"{'hosts':>5}{'ranks':>7}{'relays':>7}{'start, s':>10}{call}{deaths}{'KiB a rank':>11}")
    with_relays: dict[int, float] = {}
    for hosts in counts:
        rows[hosts] = measured(hosts, relays=False)
        print(row_of(hosts, rows[hosts], "-"), flush=True)
        if hosts > DIRECT_HOSTS:
            row = measured(hosts)
            with_relays[hosts] = row["spent"]
            print(row_of(hosts, row, str(relays_of(hosts))), flush=True)
    print("\nfitted without relays, and carried to 1,000 hosts:")
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
    for hosts, spent in with_relays.items():
        print_relays(rows, hosts, spent)


if __name__ == "__main__":
    main()
