"""Launched ranks without a launcher: forks of one process that has imported torch, and run nothing.

    python forked.py 3 program.py argument ...

For tests of what ranks do once they have been launched; a process that imports torch anew costs more than most of them.
Ends as `spmd run` does, with the status of the rank that failed first. The ranks are the whole job, unless SPMD_SIZE
and SPMD_INIT_METHOD name a larger one; then SPMD_RANK is the first of them. FORKED_WITH names modules that they need
besides (torch's compiler is one), which are then imported once for all.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time

from internals import preloaded

GRACE_SECONDS = float(os.environ.get("FORKED_GRACE", "10"))  # for the others, once a rank has failed


def be_rank(rank: int, count: int, folder: str, program: str, arguments: list[str]) -> None:
    os.environ.setdefault("SPMD_SIZE", str(count))
    os.environ.setdefault("SPMD_INIT_METHOD", f"file://{folder}/meet")
    first = int(os.environ.get("SPMD_RANK", 0))
    os.environ.update(SPMD_RANK=str(first + rank), SPMD_LOCAL_RANK=str(rank), SPMD_LOCAL_SIZE=str(count))
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def await_all(ranks: set[int]) -> int:
    """The exit code of the first that failed, 0 if none did."""
    failed, end = 0, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, end = code, time.monotonic() + GRACE_SECONDS
        elif time.monotonic() > end:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.01)
    return failed


def main() -> None:
    count, program, *arguments = sys.argv[1:]
    for name in (*preloaded(), *os.environ.get("FORKED_WITH", "").split()):
        importlib.import_module(name)

    folder, ranks = tempfile.mkdtemp(), set[int]()
    for rank in range(int(count)):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, int(count), folder, program, arguments)
            return
        ranks.add(pid)
    code = await_all(ranks)
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
