"""The zygote of a per-host process: a fork of it, made before it has done anything, so that torch is imported once.

What may not be forked is a process in which torch has computed, or that has threads: here there are none yet.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

from ..driver.spawn import Zygote
from ..rank.zygote import main


class ForkedZygote(Zygote):
    """See `Zygote`; make it first of all.

    Args:
        connection: that is open in this process, and would outlive it in the zygote.
    """

    def __init__(self, connection: socket.socket):
        self._open = connection
        super().__init__()

    def _started(self, theirs: socket.socket) -> _Child:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._control.close()
                self._open.close()
                main(theirs.detach(), self.driver_pid)
            finally:
                os._exit(1)
        return _Child(pid)


class _Child:
    """A forked process, with what is used of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("zygote", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))
