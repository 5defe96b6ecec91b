"""A short `make chaos`: some faults of every kind but the slow ones, and the run is the undisturbed one."""

from __future__ import annotations

from pathlib import Path

from scripts import run

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
SLOW = ["stop for ever", "lock of Python held in C", "kill what forks them"]  # each has tests of its own


def test_a_short_one() -> None:
    code, out, err = run(str(CHAOS), "--seconds", "4", "--kills", "6", "--steps", "40", "--without", *SLOW)
    assert code == 0, out + err
    rows = [line for line in out.splitlines() if line.startswith(("kill", "terminate", "segfault", "os._exit"))]
    assert sum(int(line[28:].split()[0]) for line in rows) >= 3, out
