"""What a driver costs that has many hosts: calls, the start, the death of a host, memory; on stub hosts, fitted.

    python bench/control_plane.py [--hosts 64] > bench/results/control_plane.txt

Stub hosts (`stub_host`) are forked from one process, so that none imports torch. They share the cores of this machine
with the driver: what they take of them is part of the latency, and would not be on hosts of their own; so the driver's
own processor time, of all its threads, is given too.
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
    from spmd import Mesh, PeerLost

    gc.collect()
    before, began, stubs = resident(), time.perf_counter(), Stubs(hosts, ranks)
    with Mesh({"data": ranks * hosts}, hosts=stubs, timeout=120) as mesh:
        start = time.perf_counter() - began
        mesh.run(nothing)
        memory = (resident() - before) / (ranks * hosts)
        spent = time.process_time()
        calls = [seconds(lambda: mesh.run(nothing)) for _ in range(CALLS)]
        spent = (time.process_time() - spent) / CALLS
        victim = next(iter(stubs.running.values()))
        os.kill(victim.pid, signal.SIGKILL)
        began = time.perf_counter()
        while True:
            try:
                mesh.run(nothing)
                break
            except PeerLost:
                pass
        death = time.perf_counter() - began
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


def fitted(rows: dict[int, dict[str, float]], name: str) -> tuple[float, float]:
    """Seconds a mesh, and seconds a host more: a line by least squares."""
    return statistics.linear_regression([*rows], [row[name] for row in rows.values()])[::-1]  # type: ignore[return-value]


def print_tree(rows: dict[int, dict[str, float]]) -> None:
    """What a tree of hosts would save: to its driver 64 hosts over 8 of them would be 8 hosts of 8 times the ranks."""
    few, tall = rows[8]["spent"], measured(8, 8 * RANKS)["spent"]
    a_rank = max(0.0, (tall - few) / (7 * 8 * RANKS))
    base, a_host = fitted(rows, "spent")
    a_host -= RANKS * a_rank
    print("\nover a tree with as many branches as each of them has hosts, of the driver's processor time:")
    print(f"  8 hosts of {8 * RANKS} ranks: {1e3 * tall:.2f} ms a call; so {1e6 * a_rank:.2f} us a rank")
    for hosts, branches in ((64, 8), (1000, 32)):
        alone = base + hosts * a_host + hosts * RANKS * a_rank
        root, relay = base + branches * a_host + hosts * RANKS * a_rank, hosts / branches * a_host
        text = f"{1e3 * alone:.1f} ms without; {1e3 * root:.1f} ms with, and {1e3 * relay:.1f} ms of each branch"
        print(f"  {hosts:,} hosts over {branches} branches, by the fit: {text}")


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
    call = f"{'call, ms (middle half)':>26}{'driver, ms':>12}"
    print(f"{'hosts':>5}{'ranks':>7}{'start, s':>10}{call}{'host dies, s':>14}{'KiB a rank':>12}")
    for hosts in counts:
        row = rows[hosts] = measured(hosts)
        call = f"{1e3 * row['call']:.2f} ({1e3 * row['low']:.2f}-{1e3 * row['high']:.2f})"
        rest = f"{1e3 * row['spent']:>12.2f}{row['death']:>14.2f}{row['memory'] / 1024:>12.1f}"
        print(f"{hosts:>5}{RANKS * hosts:>7}{row['start']:>10.2f}{call:>26}{rest}", flush=True)
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
    if 8 in rows:
        print_tree(rows)


if __name__ == "__main__":
    main()
