"""All-reduce of float32 from 4 B to 64 MiB: ours (in the arena, and of any tensor), torch's Gloo, Open MPI.

Gloo and Open MPI overwrite what they are given. So do two of ours: "overwritten" leaves the sum in every rank's own
buffer, "given up" leaves one sum that all ranks read, as a train step does with its gradients. "kept" changes nothing.
"adding alone" is the bound that memory sets: every rank adds one slice of its own in place, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Contender, Groups, measure

SIZES = (4, 64, 1 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
CONTENDERS = (
    Contender("ours, in the arena, given up", "ours", {"kind": "given up"}),
    Contender("ours, in the arena, kept", "ours", {"kind": "kept"}),
    Contender("ours, in the arena, overwritten", "ours", {"kind": "overwritten"}),
    Contender("ours, any tensor", "ours", {"kind": "any"}),
    Contender("gloo", "gloo"),
    # With little to add, Gloo is faster if both of its ranks share a core: both ways are measured.
    Contender("gloo, placed as woken", "gloo", {"spread": False}),
    Contender("open mpi", "open mpi"),
    Contender("adding alone", "floor"),
)


def all_reduce(groups: Groups, ranks: int, size: int, rounds: int = 12, seconds: float = 0.02) -> dict:
    return measure(groups, CONTENDERS, "all_reduce", size, ranks=ranks, rounds=rounds, seconds=seconds)


@pytest.mark.parametrize("contender", [c.name for c in CONTENDERS])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 4])
def bench_all_reduce(ranks: int, size: int, contender: str, measured: Callable, replay: Callable) -> None:
    replay(measured("all_reduce", all_reduce, ranks, size), contender)
