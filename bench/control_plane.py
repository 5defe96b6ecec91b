"""What a driver costs that has many hosts: calls, the start, the death of a host, memory; on stub hosts, fitted.

    python bench/control_plane.py [--hosts 64] > bench/results/control_plane.txt

A stub host is a process that speaks the protocol of `spmd host` and has no ranks behind it: it answers for each of them
at once. All are forked from one process, so that none imports torch. They share the cores of this machine with the
driver: what they take of them is part of the latency, and would not be on hosts of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

RANKS, CALLS = 16, 50


def stub(stdin: bytes) -> None:
    """A stub host, until the driver goes."""
    from spmd.mesh import protocol as ranks_protocol
    from spmd.mesh import wire
    from spmd.mesh.hosts import protocol
    from spmd.mesh.hosts.framing import framed, unframed
    from spmd.mesh.hosts.link import greet_driver
    from spmd.mesh.hosts.versions import versions

    told = json.loads(stdin)
    connection = socket.create_connection((told["address"], told["port"]))
    link = greet_driver(connection, bytes.fromhex(told["secret"]), told["place"])
    link.send(protocol.Hello(versions()))
    nothing = wire.dumps(None).data
    while (messages := link.receive()) is not None:
        for said, content in messages:
            if isinstance(said, protocol.Begin):
                link.send(protocol.Started(tuple((rank, os.getpid(), 1) for rank in said.ranks)))
                for rank in said.ranks:
                    link.send(protocol.FromRank(rank), *framed(_packet(ranks_protocol.Ready())))
            elif isinstance(said, protocol.BeginAnew):
                link.send(protocol.Started(()))
            elif isinstance(said, protocol.Ask):
                link.send(protocol.Told((), ""))
            elif isinstance(said, protocol.ToRanks):
                task = ranks_protocol.decode(unframed(content).head)
                if isinstance(task, ranks_protocol.Task):
                    answer = framed(_packet(ranks_protocol.Answer(task.number), nothing))
                    for rank in said.ranks:
                        link.send(protocol.FromRank(rank), *answer)


def _packet(message: Any, content: bytes = b"") -> Any:
    from spmd.mesh import protocol, wire

    return wire.Packet(content, head=protocol.encode(message))


class Stubs:
    """A launcher of them."""

    def __init__(self, hosts: int):
        self.hosts = [f"stub{host}:{RANKS}" for host in range(hosts)]
        self.running: dict[str, Any] = {}

    def start(self, name: str, command: Any, stdin: bytes) -> Any:
        started = self.running[name] = FORK.Process(target=stub, args=(stdin,), daemon=True)
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


def measured(hosts: int) -> dict[str, float]:
    from spmd import Mesh, PeerLost

    gc.collect()
    before, began, stubs = resident(), time.perf_counter(), Stubs(hosts)
    with Mesh({"data": RANKS * hosts}, hosts=stubs, timeout=120) as mesh:
        start = time.perf_counter() - began
        mesh.run(nothing)
        memory = (resident() - before) / (RANKS * hosts)
        calls = [seconds(lambda: mesh.run(nothing)) for _ in range(CALLS)]
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
        "death": death,
        "memory": memory,
    }


def fitted(rows: dict[int, dict[str, float]], name: str) -> tuple[float, float]:
    """Seconds a mesh, and seconds a host more: a line by least squares."""
    return statistics.linear_regression([*rows], [row[name] for row in rows.values()])[::-1]  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=64)
    most = parser.parse_args().hosts
    os.environ["SPMD_INTERFACE"] = "127.0.0.1"
    logging.getLogger("spmd").setLevel(logging.ERROR)
    measured(1)  # imports what all of them share
    counts, rows = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count <= most], {}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {RANKS} stub ranks a host"
    )
    print(
        f"{'hosts':>5}{'ranks':>7}{'start, s':>10}{'call, ms (middle half)':>26}{'host dies, s':>14}{'KiB a rank':>12}"
    )
    for hosts in counts:
        row = rows[hosts] = measured(hosts)
        call = f"{1e3 * row['call']:.2f} ({1e3 * row['low']:.2f}-{1e3 * row['high']:.2f})"
        rest = f"{row['death']:>14.2f}{row['memory'] / 1024:>12.1f}"
        print(f"{hosts:>5}{RANKS * hosts:>7}{row['start']:>10.2f}{call:>26}{rest}", flush=True)
    print("\nfitted, and carried to 1,000 hosts:")
    for name, what in (("start", "start"), ("call", "a call"), ("death", "a host dies, and comes again")):
        base, each = fitted(rows, name)
        if each < 0:  # it does not grow
            base, each = max(row[name] for row in rows.values()), 0.0
        print(f"  {what}: {1e3 * base:.2f} ms + {1e3 * each:.3f} ms a host; 1,000 hosts: {base + 1000 * each:.2f} s")
    memory = rows[counts[-1]]["memory"]
    print(f"  memory of the driver: {memory / 1024:.1f} KiB a rank; 16,000 ranks: {16000 * memory / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    FORK = multiprocessing.get_context("forkserver")
    FORK.set_forkserver_preload(
        ["spmd.mesh.hosts.link", "spmd.mesh.hosts.protocol", "spmd.mesh.hosts.versions", "control_plane"]
    )
    import control_plane
    from control_plane import main as imported  # so that the fork server finds `stub` by its name

    control_plane.FORK = FORK
    imported()
