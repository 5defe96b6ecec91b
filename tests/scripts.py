"""Running users' programs as they would: a script, `python -c`, a REPL; and what they leave in shared memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fork_server import shared_server
from jobs import environ_without
from patience import HANGS, until

HERE = str(Path(__file__).parent)  # so that programs find the tests' helpers
ENDS_WHOLLY = {"ENDS_WHOLLY": "1"}  # `env` of a fork that tears down all modules at its end, as a new Python does

FORKED_CHILDREN = {"FORKED_CHILDREN": "1"}  # `env` of a fork whose own Pythons are forks, too: ranks, hosts, scripts


@contextlib.contextmanager
def started(
    *arguments: str, fresh: bool = False, without: Sequence[str] = (), **options: object
) -> Iterator[subprocess.Popen]:
    """A Python process with these arguments, killed at the end if it is still there.

    It has imported spmd already, unless it is `fresh` or its arguments need a new interpreter.

    Args:
        without: prefixes of variables that it gets only from `env`.
    """
    # Starting torch's threads is what makes imports slow; one thread is enough here.
    environ = {
        **environ_without(*without),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": HERE,
        **dict(options.pop("env", {})),
    }  # type: ignore[call-overload]
    fresh = fresh or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-W"))
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    begin = subprocess.Popen if fresh else shared_server().run
    process = begin([sys.executable, *arguments], text=True, env=environ, **{**pipes, **options})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, text: str | None = None, **options: Any) -> tuple[int, str, str]:
    """Run Python to its end, as `started` does: exit code, standard output and error output."""
    with started(*arguments, **options) as process:
        out, err = process.communicate(text, timeout=HANGS)
        return process.returncode, out, err


def launched(ranks: int, program: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Run a script on launched ranks, which are forks of one process; as `run`."""
    return run(str(Path(__file__).with_name("forked.py")), str(ranks), program, *arguments, **options)


def two_ranks(
    folder: Path,
    code: str,
    *arguments: str,
    env: Mapping[str, str] = MappingProxyType({}),
    inside: Callable[[int], Sequence[str]] = lambda rank: (),
) -> list[tuple[str, str]]:
    """Run code as two ranks that meet at a file, each a process of its own: the outputs and error outputs.

    Args:
        env: variables of the ranks' besides those for their meeting, or in the place of one of these.
        inside: the command, if any, that starts Python for a rank.
    """
    told = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"file://{folder}/meet", "OMP_NUM_THREADS": "1", **env}
    ranks = [
        (subprocess.Popen if inside(rank) else shared_server().run)(
            [*inside(rank), sys.executable, "-c", code, *arguments],
            env={**os.environ, **told, "SPMD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [rank.communicate(timeout=HANGS) for rank in ranks]


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def left_in_shm(before: set[str]) -> set[str]:
    """The files in /dev/shm that were not there before and stay; those of tests that run at the same time disappear."""
    names = set(os.listdir("/dev/shm")) - before
    until(lambda: not names & set(os.listdir("/dev/shm")), 60)
    return names & set(os.listdir("/dev/shm"))
