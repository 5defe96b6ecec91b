"""How time grows: all-reduces and train steps with 1 to 16 ranks, and 10^3 to 10^8 parameters.

Ranks beyond the cores share them, so that here more ranks are never faster; what is measured is what they cost.
"""

from __future__ import annotations

from collections.abc import Callable

import fit
import pytest
from harness import Groups

from spmd.cli.bench.groups import in_turn, quartiles

RANKS = (1, 2, 4, 8, 16)
PARAMETERS = {
    "all_reduce": tuple(round(10 ** (power / 2)) for power in range(6, 17)),
    "train_step": (10**3, 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8),
}
MOST_BYTES = 3 << 30  # that all ranks' buffers may take together
MOST_STEP_BYTES = 1 << 30
PASSES = 3


def scaling(groups: Groups, work: str, ranks: int, rounds: int = 4, seconds: float = 0.02) -> list[dict]:
    """A record for every size that fits the memory.

    All sizes are measured in turn, several times, so that a burst of noise does not spoil one of them.
    """
    limit = MOST_BYTES if work == "all_reduce" else MOST_STEP_BYTES
    samples: dict[int, list[float]] = {size: [] for size in PARAMETERS[work] if 4 * size * ranks <= limit}
    groups.close()
    for parameters in list(samples) * PASSES:
        if work == "all_reduce":
            group = groups.get("collectives", ranks)
            (found,) = group.ask("all_reduce_seconds", 4 * parameters, rounds, seconds)
        else:
            group = groups.get("driver", ranks)
            turn = {"ours": (group, "ours", {"shard": "data", "fused": True, "donate": True})}
            few = 1 if parameters >= 10**7 else rounds
            found = in_turn(turn, work, ("models:square_of", parameters), rounds=few, seconds=seconds)["ours"]
        samples[parameters] += found
    groups.close()
    records = []
    for parameters, found in samples.items():
        low, middle, high = quartiles(found)
        size = 4 * parameters if work == "all_reduce" else parameters
        records.append({"work": work, "ranks": ranks, "size": size, "median": middle, "spread": [low, high]})
    return records


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("work", fit.WORKS)
def bench_scaling(work: str, ranks: int, measured_many: Callable) -> None:
    records = measured_many("scaling", scaling, work, ranks)
    assert all(record["median"] > 0 for record in records)
