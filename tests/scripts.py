"""Running users' programs as they would: a script, `python -c`, a REPL; and whether processes end when they should."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SECONDS = 60


@contextlib.contextmanager
def started(*arguments: str, **options: object) -> Iterator[subprocess.Popen]:
    """A Python process with these arguments, killed at the end if it is still there."""
    # A fork of torch's threads, rather than OMP_NUM_THREADS, decides how long imports take; one thread is enough here.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **dict(options.pop("env", {}))}  # type: ignore[call-overload]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, text: str | None = None, **options: object) -> tuple[int, str, str]:
    """Run Python to its end: exit code, standard output and error output."""
    with started(*arguments, **options) as process:
        out, err = process.communicate(text, timeout=SECONDS)
        return process.returncode, out, err


def launched(ranks: int, program: str, *arguments: str, **options: object) -> tuple[int, str, str]:
    """Run a script on launched ranks, which are forks of one process; as `run`."""
    return run(str(Path(__file__).with_name("forked.py")), str(ranks), program, *arguments, **options)


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds * slowness()
    while any(map(running, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def slowness() -> float:
    """How many times longer all takes here than where cores are free, for reasons that are not ours."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def soon(seconds: float, began: float) -> bool:
    """Whether no more than so many seconds have passed, if cores are free."""
    return time.monotonic() - began < seconds * slowness()


def left_in_shm(before: set[str]) -> set[str]:
    """The files in /dev/shm that were not there before, and stay: those of tests that run beside this one go."""
    names = set(os.listdir("/dev/shm")) - before
    end = time.monotonic() + SECONDS
    while names and time.monotonic() < end:
        time.sleep(0.1)
        names &= set(os.listdir("/dev/shm"))
    return names
