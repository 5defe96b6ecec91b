"""What the parts of a train step take by the clock on rank 0, beside plain torch's step in the same process, in turn.

    spmd run -n 1 bench/profile_parts.py encoder --fused --donate

It does not use a profiler, which slows Python down and C not at all. Parts within others are indented. Below is the
time of Python's garbage collections, and the number of function calls in a step, which noise does not change.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.autograd
from profile_step import asked

from spmd import _spmd
from spmd.cli.bench.contenders import made, ours_step, plain_step
from spmd.mesh import donation, program, results
from spmd.optim import optimizer as _optimizer
from spmd.transforms import _backward, _grad

# (depth, what it is, where it is looked up, its name there)
PARTS: tuple[tuple[int, str, Any, str], ...] = (
    (0, "the call", _spmd, "call"),
    (1, "the region", program.CompiledCall, "__call__"),
    (2, "arguments enter", program.CompiledCall, "_enter"),
    (2, "value_and_grad", _grad, "_differentiate"),
    (3, "forward", _backward.Plain, "evaluate"),
    (3, "backward and sums", _backward, "outermost"),
    (4, "torch's backward", torch.autograd, "backward"),
    (2, "opt.step", _optimizer, "_step"),
    (2, "results leave", results.Results, "kept"),
    (2, "who owns what", donation, "settle"),
)


def clocked(function: Callable, taken: list[float]) -> Callable:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            taken.append(time.perf_counter() - began)

    return timed


class Garbage:
    """The time of garbage collections while this is in `gc.callbacks`."""

    seconds = began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self.began


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the parts of a train step on rank 0.")
    given, flags, mesh = asked(parser, steps=20)
    taken: dict[str, list[float]] = defaultdict(list)
    for _, what, place, name in PARTS:
        setattr(place, name, clocked(getattr(place, name), taken[what]))
    step = ours_step(mesh, f"models:{given.model}", **flags)
    plain = plain_step(*made(f"models:{given.model}"), **({"fused": True} if given.fused else {}))
    step, plain = clocked(step, taken["ours"]), clocked(plain, taken["plain"])
    for _ in range(3):
        step()
        plain()
    for times in taken.values():
        times.clear()
    garbage = Garbage()
    gc.callbacks.append(garbage)
    backwards = taken["torch's backward"]
    for _ in range(given.steps):
        step()
        count = len(backwards)
        plain()
        del backwards[count:]  # the plain step's own
    gc.callbacks.remove(garbage)
    profile = cProfile.Profile()
    with profile:
        step()
    if mesh.rank == 0:
        ours, other = (statistics.median(taken[name]) * 1e3 for name in ("ours", "plain"))
        print(f"{given.model} {flags or ''}, {mesh.size} ranks: ours {ours:.2f} ms, plain torch {other:.2f} ms")
        for depth, what, _, _ in PARTS:
            print(f"{'  ' * depth + what:<34}{statistics.median(taken[what]) * 1e3:9.3f} ms")
        print(f"{'searches for garbage, both':<34}{garbage.seconds / given.steps * 1e3:9.3f} ms (mean)")
        print(f"{'calls of functions, ours':<34}{pstats.Stats(profile).total_calls:9d}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
