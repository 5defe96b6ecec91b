"""What an operation on an Array costs in the driver: answered one by one, and with a hundred under way.

`python bench/operator_cost.py | tee bench/results/operator_cost.txt`: microseconds an operation on a tensor of 1,000
numbers over two ranks, median and quartiles of rounds.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch

from spmd import Array, Mesh, P, put

ROUNDS, IN_FLIGHT = 30, 100


def microseconds(work: Callable[[], object], operations: int) -> str:
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - begin) / operations)
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:6.0f} us ({low:.0f} to {high:.0f})"


def answered(x: Array) -> None:
    for _ in range(IN_FLIGHT):
        float((x + 1)[0])


def chained(x: Array) -> None:
    for _ in range(IN_FLIGHT):
        x = x + 1
    x.full()


def sums(x: Array) -> None:
    for _ in range(IN_FLIGHT):
        float(x.sum())


def independent(x: Array) -> None:
    found = [x * scale for scale in range(IN_FLIGHT)]
    found[-1].full()


def main() -> None:
    print(f"{platform.machine()}, torch {torch.__version__}, 2 ranks, {ROUNDS} rounds of {IN_FLIGHT} operations")
    with Mesh({"data": 2}) as mesh:
        for name, spec in (("replicated", P()), ("sharded", P("data"))):
            x = put(torch.ones(1000), spec, mesh=mesh)
            for what, work, operations in (
                ("x + 1, then [0], each answered", answered, 2 * IN_FLIGHT),
                ("x.sum(), each answered", sums, IN_FLIGHT),
                ("x + 1 in a chain, the last answered", chained, IN_FLIGHT),
                ("x * k, independent, the last answered", independent, IN_FLIGHT),
            ):
                work(x)
                print(f"{name:10}  {what:38} {microseconds(lambda work=work, x=x: work(x), operations)}", flush=True)


if __name__ == "__main__":
    main()
