"""Memory of four ranks that train 104 million parameters with AdamW, against one process and against DDP.

Proportional set size (`/proc/*/smaps_rollup`): a page that several processes share counts for each by its share, so
that the sum over the whole tree of processes (driver and zygote included) is the memory that the program takes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Contender, Groups, missing

RANKS = 4
MODEL = "models:large"
CONTENDERS = (
    Contender("one process", "plain", {"foreach": True}),
    Contender("ours, sharded", "driver", {"shard": "data"}),
    Contender("ours, sharded, fused, donated", "driver", {"shard": "data", "fused": True, "donate": True}),
    Contender("ddp, fused", "gloo", {"fused": True}),
)
NEEDED_GIB = {"gloo": 10.0}  # of all four processes together


def tree(roots: list[int]) -> list[int]:
    """Processes and all their descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def proportional_set_size(pids: list[int]) -> int:
    """The sum in bytes; a process that has ended counts as 0."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) * 1024
    return total


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20


def memory(groups: Groups, contender: str, model: str = MODEL, turns: int = 2) -> dict:
    """The largest size seen between steps, and while steps are under way."""
    (chosen,) = (c for c in CONTENDERS if c.name == contender)
    record = {"work": "memory", "case": contender, "ranks": RANKS, "model": model}
    why = missing(chosen.peer)
    if NEEDED_GIB.get(chosen.peer, 0) > available_gib():
        why = f"{available_gib():.0f} GiB are free, and it needs {NEEDED_GIB[chosen.peer]:g}"
    if why is not None:
        return {**record, "missing": {contender: why}}
    groups.close()
    group = groups.get(chosen.peer, RANKS)
    group.ask("open", contender, "train_step", chosen.options, model)
    within, between = [0], [0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            within.append(proportional_set_size(pids))

    for _ in range(turns):
        group.ask("run", contender, 1)
        pids = tree(group.pids)
        between.append(proportional_set_size(pids))
    watching = threading.Thread(target=watch)
    watching.start()
    group.ask("run", contender, 1)
    over.set()
    watching.join()
    groups.close()
    return {**record, "missing": {}, "between_steps": max(between), "within_steps": max(within)}


@pytest.mark.parametrize("contender", [c.name for c in CONTENDERS])
def bench_memory(contender: str, measured: Callable) -> None:
    record = measured("memory", memory, contender)
    if record["missing"]:
        pytest.skip(record["missing"][contender])
    assert record["between_steps"] > os.sysconf("SC_PAGE_SIZE")
