"""How long tests wait: until something is so, rather than for a while, and longer where the machine is slow.

Nothing here fails for slowness alone. What must come at once is measured against the load there was; what must come
at all is given up after `HANGS` seconds only, which is a guard against hanging and no measure of speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

HANGS = 300.0
_ROUNDS = 20_000  # additions, about a millisecond of work where a core is free


def _work() -> float:
    """Seconds that a fixed piece of work takes now."""
    began, total = time.perf_counter(), 0
    for number in range(_ROUNDS):
        total += number
    return time.perf_counter() - began


_free = min(_work() for _ in range(20))  # what it takes at best


def slowness() -> float:
    """How many times longer all takes here than where cores are free, for reasons that are not ours.

    The load is that of the last minute and of this moment; what another machine takes of ours shows in the work alone.
    A job of several processes that wait for each other is late as often as one of them is, so a load counts fourfold.
    """
    last_minute, _, _, runnable, _ = Path("/proc/loadavg").read_text().split()
    load = max(float(last_minute), int(runnable.partition("/")[0])) / len(os.sched_getaffinity(0))
    late = max(_work() for _ in range(20)) / _free
    return 4 * max(load, late) if max(load, late) > 1.2 else 1.0


def quick(passed: float, seconds: float) -> bool:
    """Whether what took so long is within a limit, if cores were free."""
    return passed < seconds or passed < seconds * slowness()


def soon(seconds: float, began: float) -> bool:
    """Whether no more than so many seconds have passed since `began` (`time.monotonic()`), if cores were free."""
    return quick(time.monotonic() - began, seconds)


def until(condition: Callable[[], object], seconds: float = HANGS) -> bool:
    """Wait until a condition holds: whether it did within so many seconds, if cores are free."""
    began = time.monotonic()
    while not condition():
        if not soon(seconds, began):
            return bool(condition())
        time.sleep(0.01)
    return True


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(seconds: float, pids: Iterable[int]) -> bool:
    """Whether all these processes end within so many seconds, if cores are free."""
    pids = list(pids)
    return until(lambda: not any(map(running, pids)), seconds)
