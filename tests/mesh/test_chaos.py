"""A short `make chaos`: some faults of every kind but the slow ones, and the run is the undisturbed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from patience import HANGS

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
SLOW = ["stop for ever", "lock of Python held in C", "kill what forks them"]  # each has tests of its own


def test_a_short_one() -> None:
    command = [sys.executable, str(CHAOS), "--seconds", "10", "--kills", "10", "--steps", "40", "--without", *SLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("kill", "terminate", "segfault", "os._exit"))]
    assert sum(int(line[28:].split()[0]) for line in rows) >= 5, done.stdout
