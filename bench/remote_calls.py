"""Calls of an object in another process: one at a time, a thousand under way, and a result handed on.

    python bench/remote_calls.py [--peers PYTHON] > bench/results/remote_calls.txt

The peers, Ray and ipyparallel, are measured in the same run by an interpreter that has them; those that it lacks are
named and left out. Each figure is the median of the rounds, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, ROUNDS, FLIGHTS = 200, 7, 1000


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value

    def make(self, size: int) -> Any:
        import numpy

        return numpy.ones(size)

    def total(self, array: Any) -> float:
        return float(array.sum())


def measured(one: Callable[[], Any], many: Callable[[int], Any], handed: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of: a round trip; a call among a thousand; an array of 8 MB from one object to another."""
    found: dict[str, list[float]] = {"one": [], "many": [], "handed": []}
    for _ in range(CALLS):
        one()
    many(FLIGHTS)
    handed()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            one()
        found["one"].append((time.perf_counter() - began) / CALLS * 1e6)
        began = time.perf_counter()
        many(FLIGHTS)
        found["many"].append((time.perf_counter() - began) / FLIGHTS * 1e6)
        began = time.perf_counter()
        handed()
        found["handed"].append((time.perf_counter() - began) * 1e6)
    return found


def of_spmd() -> dict[str, list[float]]:
    from spmd import Mesh

    with Mesh({"data": 2}) as mesh:
        counter, other = mesh.remote(Counter, rank=1), mesh.remote(Counter, rank=0)
        return measured(
            lambda: counter.add(1).get(),
            lambda count: [ref.get() for ref in [counter.add(1) for _ in range(count)]],
            lambda: other.total(counter.make(1 << 20)).get(),
        )


def of_ray() -> dict[str, list[float]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    cls: Any = ray.remote(Counter)
    counter, other = cls.remote(), cls.remote()
    try:
        return measured(
            lambda: ray.get(counter.add.remote(1)),
            lambda count: ray.get([counter.add.remote(1) for _ in range(count)]),
            lambda: ray.get(other.total.remote(counter.make.remote(1 << 20))),
        )
    finally:
        ray.shutdown()


def of_ipyparallel() -> dict[str, list[float]]:
    import ipyparallel

    cluster = ipyparallel.Cluster(n=2, log_level=50)
    view = cluster.start_and_connect_sync()[0]
    try:
        view.block = False
        view.execute("value = 0\ndef add(more):\n    global value\n    value += more\n    return value").get()
        add = ipyparallel.Reference("add")
        call = "lambda add, more: add(more)"
        remote = eval(call)
        return measured(
            lambda: view.apply_async(remote, add, 1).get(),
            lambda count: [result.get() for result in [view.apply_async(remote, add, 1) for _ in range(count)]],
            # ipyparallel has no references to results: the driver fetches the array and sends it on.
            lambda: view.apply_async(
                lambda array: float(array.sum()),
                view.apply_async(lambda: __import__("numpy").ones(1 << 20)).get(),
            ).get(),
        )
    finally:
        cluster.stop_cluster_sync()


SIDES = {"spmd": of_spmd, "ray": of_ray, "ipyparallel": of_ipyparallel}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--side", help="measure this one here, and print what was found")
    options = parser.parse_args()
    if options.side:
        print("found", json.dumps(SIDES[options.side]()))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; microseconds")
    print(f"{'':14}{'a round trip':>22}{'one of 1,000 in flight':>28}{'8 MB, object to object':>28}")
    for name in SIDES:
        python = sys.executable if name == "spmd" else options.peers
        done = subprocess.run([python, __file__, "--side", name], capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        if not lines:
            print(f"{name:14}not measured: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
            continue
        text = f"{name:14}"
        for figures, width in zip(json.loads(lines[0][6:]).values(), (22, 28, 28), strict=True):
            first, middle, last = statistics.quantiles(figures, n=4)
            text += f"{f'{middle:.0f} ({first:.0f}-{last:.0f})':>{width}}"
        print(text)


if __name__ == "__main__":
    main()
