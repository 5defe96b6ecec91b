"""Processes that have imported spmd already: forks of one that has, and that has run nothing.

For tests of what several processes do; each that imports torch anew costs more than most of these tests.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patience import HANGS


class Forked:
    """A program that runs in a fork of the server; as a `subprocess.Popen` in text mode, as far as tests use one."""

    def __init__(self, server: ForkServer, pid: int, out: Path):
        self.pid, self._server, self._out = pid, server, out
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def communicate(self, timeout: float = HANGS) -> tuple[str, str]:
        end = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < end, f"still running: {self._read('err')}"
            time.sleep(0.02)
        return self._read("out"), self._read("err")

    def communicate_so_far(self) -> str:
        """What it has printed until now."""
        return self._read("out") if self._out.with_suffix(".out").exists() else ""

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _read(self, stream: str) -> str:
        return self._out.with_suffix(f".{stream}").read_text()


class ForkServer:
    """The process that all are forked from."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, code: str, *arguments: str, environ: Mapping[str, str]) -> Forked:
        """Run a program's text as `python -c` does."""
        self._count += 1
        out = self._folder / str(self._count)
        pid = self.ask(code=code, arguments=arguments, environ=dict(environ), out=str(out))
        return Forked(self, pid, out)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(HANGS)
        self._process.stdout.close()


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer(Path(folder))
        try:
            yield server
        finally:
            server.close()


def _become(request: dict[str, Any]) -> None:
    """What a fork does."""
    code = 1
    try:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{request['out']}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.argv = ["-c", *request["arguments"]]
        try:
            exec(compile(request["code"], "<program>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    from spmd import Mesh  # noqa: F401  # and with it torch

    ended: dict[int, int] = {}
    running = set()
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "code" in request:
            sys.stdout.flush()
            answer = os.fork()
            if answer == 0:
                _become(request)
            running.add(answer)
        else:
            pid = request["poll"]
            if pid in running:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    running.discard(pid)
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
