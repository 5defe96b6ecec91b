"""The driver's handle on its zygote: one for the process, started with the first mesh."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading

from ...kernels.errors import MeshError, message
from ...kernels.processes import check_not_imported_by_worker
from .. import protocol
from ..rank import memory
from ..rank.descriptors import receive, send
from ..rank.interrupts import uninterrupted

# No other import comes before the path is set: a file in the current folder might go by that name.
_BOOT = (
    "import sys; fd, pid, *sys.path[:] = sys.argv[1:]; from spmd.mesh.rank.zygote import main; main(int(fd), int(pid))"
)


class Zygote:
    """A running zygote; `fork` makes a rank of it."""

    def __init__(self) -> None:
        self.driver_pid = os.getpid()
        self._control, theirs = socket.socketpair()
        tunables = memory.tunables(os.environ.get("GLIBC_TUNABLES"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), *map(str, sys.path)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "GLIBC_TUNABLES": tunables},  # the ranks' own os.environ is the driver's
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is the driver's to hand on
        )
        theirs.close()
        self._ready = False
        self._lock = threading.Lock()
        self.exits: dict[int, int] = {}  # pid -> exit code, negative for a signal

    def fork(self, request: protocol.RankRequest | protocol.ReaderRequest, fds: list[int]) -> tuple[int, int]:
        """Fork a rank (or a reader) that runs `main(request, fds)` of its module; its pid and a pidfd."""
        with self._lock:
            if not self._ready:
                if self._control.recv(1) != b"R":
                    raise MeshError(
                        message(
                            "the process that ranks are forked from did not start",
                            got=f"exit code {self._process.wait()}",
                            remedy="its error output says why; check that `import spmd` works in a fresh interpreter",
                        )
                    )
                self._ready = True
            with uninterrupted():
                send(self._control, request, fds)
                while True:
                    reply, received = receive(self._control)
                    if reply is None:
                        raise MeshError(message("the process that ranks are forked from is gone", remedy="try again"))
                    if isinstance(reply, protocol.Forked):
                        return reply.pid, received[0]
                    self.exits[reply.pid] = reply.status

    def exit_code(self, pid: int, wait: float = 0.2) -> int | None:
        """How a rank ended, if the zygote has said so by now."""
        if not self.alive:
            return None
        with self._lock:
            self._control.settimeout(wait)
            try:
                while pid not in self.exits:
                    reply, _ = receive(self._control)
                    if reply is None:
                        break
                    self.exits[reply.pid] = reply.status
            except (TimeoutError, BlockingIOError):
                pass
            finally:
                self._control.settimeout(None)
            return self.exits.get(pid)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self.driver_pid == os.getpid()

    def close(self) -> None:
        if self.driver_pid == os.getpid():
            self._control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


_zygote: Zygote | None = None
_lock = threading.Lock()


def zygote() -> Zygote:
    """This process's zygote, made on first use (a forked child of a driver makes its own)."""
    global _zygote
    check_not_imported_by_worker()
    with _lock:
        if _zygote is None or not _zygote.alive:
            _zygote = Zygote()
            atexit.register(_zygote.close)
        return _zygote
