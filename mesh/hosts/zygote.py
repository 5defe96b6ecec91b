"""The zygote of a per-host process: a fork of it, made before it has done anything, so that torch is imported once.

What may not be forked is a process in which torch has computed, or that has threads: here there are none yet.
"""

from __future__ import annotations

import os
import socket

from ..driver.spawn import ForkedProcess, Zygote
from ..rank.zygote import main


class ForkedZygote(Zygote):
    """See `Zygote`; make it first of all.

    Args:
        connection: that is open in this process, and would outlive it in the zygote.
    """

    def __init__(self, connection: socket.socket):
        self._open = connection
        super().__init__()

    def _started(self, theirs: socket.socket) -> ForkedProcess:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                self._control.close()
                self._open.close()
                main(theirs.detach(), self.driver_pid)
            finally:
                os._exit(1)
        return ForkedProcess(pid, os.pidfd_open(pid))
