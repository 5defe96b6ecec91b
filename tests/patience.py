"""How long tests wait: for conditions, not for fixed times, and longer on a slow machine.

Nothing here fails for slowness alone. What must come at once is judged by the machine's load; what must come at all is
given up only after `HANGS` seconds, a guard against hanging and no measure of speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

HANGS = 300.0
_LONGEST = 0.1  # seconds between two looks
_ROUNDS = 20_000  # additions, about a millisecond of work where a core is free


def _work() -> float:
    """Seconds that a fixed piece of work takes now."""
    began, total = time.perf_counter(), 0
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - began


_free = min(_work() for _ in range(20))  # what it takes at best


def slowness() -> float:
    """How many times longer everything takes than on free cores, for reasons that are not ours.

    The load is that of the last minute and of this moment; if another virtual machine takes our cores, only the timed
    work shows it. A job of several processes that wait for each other is as late as the latest of them, so a load
    counts fourfold.
    """
    last_minute, _, _, runnable, _ = Path("/proc/loadavg").read_text().split()
    load = max(float(last_minute), int(runnable.partition("/")[0])) / len(os.sched_getaffinity(0))
    late = max(_work() for _ in range(20)) / _free
    return 4 * max(load, late) if max(load, late) > 1.2 else 1.0


def quick(passed: float, seconds: float) -> bool:
    """Whether `passed` seconds would be within a limit if cores were free."""
    return passed < seconds or passed < seconds * slowness()


def soon(seconds: float, began: float) -> bool:
    """Whether no more than so many seconds have passed since `began` (`time.monotonic()`), if cores were free."""
    return quick(time.monotonic() - began, seconds)


def until(condition: Callable[[], object], seconds: float = HANGS) -> bool:
    """Wait until a condition holds; returns whether it did within so many seconds, stretched by `slowness`.

    If this process stands still, as on a virtual machine that is paused, so perhaps does what it waits for: the time
    between two looks counts up to a limit.
    """
    passed, before = 0.0, time.monotonic()
    while not condition():
        now = time.monotonic()
        passed, before = passed + min(now - before, _LONGEST), now
        if not quick(passed, seconds):
            return bool(condition())
        time.sleep(0.01)
    return True


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(seconds: float, pids: Iterable[int]) -> bool:
    """Whether all these processes end within so many seconds, if cores are free."""
    pids = list(pids)
    return until(lambda: not any(map(running, pids)), seconds)
