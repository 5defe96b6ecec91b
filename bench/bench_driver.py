"""What a driver costs with four ranks: calls that do nothing, starting, and replacing a rank.

"four bare pipes" is the least that a call of four processes can cost: a byte to each, and one back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Contender, Groups, measure

RANKS = 4
READY = "{}; print('ready', flush=True); input()"
FOUR_RANKS = f"import spmd; mesh = spmd.Mesh({{'data': {RANKS}}}); mesh.run(int)"
WORK = {
    "no_op": (
        Contender("no-op, answered", "programs", {"answered": True}),
        Contender("no-op, in flight", "programs", {"answered": False}),
        Contender("four bare pipes", "programs", {"bare": True}),
    ),
    "start": (
        Contender("import torch", "programs", {"program": READY.format("import torch")}),
        Contender("import spmd", "programs", {"program": READY.format("import spmd")}),
        Contender("four ranks", "programs", {"program": READY.format(FOUR_RANKS)}),
    ),
    "replacement": (Contender("replacement", "programs"),),
}


def driver(groups: Groups, work: str, rounds: int = 9, seconds: float = 0.1) -> dict:
    rounds = min(rounds, 5) if work == "start" else rounds  # seconds a turn
    return measure(groups, WORK[work], work, None, ranks=RANKS, rounds=rounds, seconds=seconds)


@pytest.mark.parametrize(("work", "contender"), [(work, c.name) for work in WORK for c in WORK[work]])
def bench_driver(work: str, contender: str, measured: Callable, replay: Callable) -> None:
    replay(measured("driver", driver, work), contender)
