"""The driver's handle on its zygote: one for each process, started with the first mesh, and a second that stands by."""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.network.codec import Message
from ...kernels.processes import check_can_start_python, check_not_imported_by_worker, ended, python_command
from ..rank.descriptors import Forked, RankRequest, Refused, StandBy, receive, send
from ..rank.environment import environment

# Nothing else is imported before the path is set: a file in the current folder might have the same name.
# First of all, make it end with the driver by PDEATHSIG, since importing takes seconds; later it watches the driver.
_BOOT = (
    "import sys; fd, pid, *sys.path[:] = sys.argv[1:]; import ctypes, os; end = ctypes.CDLL(None).prctl; end(1, 9); "
    "os.getppid() == int(pid) or os._exit(1); "
    "import gc; gc.disable(); "  # what is imported leaves no garbage
    "from spmd.mesh.rank.zygote import main; end(1, 0); main(int(fd), int(pid))"
)
_SILENT_SECONDS = 2.0  # then it is continued, in case it was stopped
_EXIT_SECONDS = 10.0  # for it to say how a process has ended
_TRIES = 3  # of forking: a zygote that was killed is replaced, as are its ranks


class ZygoteLost(MeshError):
    """The process that ranks are forked from has been killed."""


class Zygote:
    """A running zygote; `fork` makes a rank from it."""

    def __init__(self) -> None:
        with uninterrupted():  # its number would be lost, if Ctrl-C came just when it was started
            control, theirs = socket.socketpair()
            self._ask_on(control)
            try:
                self._process = self._started(theirs)
            except BaseException:
                self._control.close()
                raise
            finally:
                theirs.close()

    def _ask_on(self, control: socket.socket) -> None:
        self.driver_pid = os.getpid()
        self._control, self._ready = control, False
        self._next: StandingBy | None = None
        self._lock = threading.Lock()
        self.exits: dict[int, int] = {}  # pid -> exit code, negative for a signal

    def _started(self, theirs: socket.socket) -> Any:
        """The process, which has the other end of the control socket."""
        return subprocess.Popen(
            [*python_command(), "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), *map(str, sys.path)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment(os.environ)},  # the ranks' own os.environ is the driver's
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in a terminal reaches the driver only
        )

    def fork(self, request: Message, fds: list[int]) -> tuple[int, int]:
        """Fork a rank (or a reader) that runs `main(request, fds)` of its module, or another zygote; pid and pidfd."""
        self.await_ready()
        with self._lock:
            if self._control.fileno() < 0:  # another mesh found that it was gone, and closed it
                raise self._lost("is gone")
            with uninterrupted():
                send(self._control, request, fds)
                while True:
                    self._await()
                    reply, received = self._reply()
                    if reply is None:
                        raise self._lost("is gone")
                    if isinstance(reply, Forked) and not received:  # it ends, since what it was to serve is closed
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    if isinstance(reply, Forked):
                        self.exits.pop(reply.pid, None)  # of an earlier process with this number
                        return reply.pid, received[0]
                    if isinstance(reply, Refused):
                        raise OSError(reply.number, os.strerror(reply.number))
                    self.exits[reply.pid] = reply.status

    def await_ready(self) -> None:
        """Wait until it has imported what it needs."""
        with self._lock:
            if self._ready or self._control.fileno() < 0:
                return
            self._await()
            with uninterrupted():  # it says so once
                if self._control.recv(1) != b"R":
                    raise self._lost("did not start")
                self._ready = True

    def next(self) -> Zygote | None:
        """The zygote that replaces this one, which was killed; None if there is none."""
        if self._next is None or not self._next.alive:
            self.stand_alone()
        one, self._next = self._next, None
        return one

    def stand_by(self) -> None:
        """Have another zygote stand by."""
        if self._next is None or not self._next.alive:
            self.stand_alone()
            with contextlib.suppress(MeshError, OSError):  # it is not needed yet, and may be made next time
                self._next = StandingBy(self)

    def stand_alone(self) -> None:
        """End the zygote that stands by."""
        one, self._next = self._next, None
        if one is not None:
            one.close()

    def _await(self, seconds: float = math.inf) -> bool:
        """Wait until it has sent something, or is gone; if it was stopped, continue it. Whether that was in time."""
        readable, end = select.poll(), time.monotonic() + seconds
        readable.register(self._control, select.POLLIN)
        while not readable.poll(1000 * max(0.0, min(_SILENT_SECONDS, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            self._process.send_signal(signal.SIGCONT)
        return True

    def _reply(self) -> tuple[Any, list[int]]:
        try:
            return receive(self._control)
        except BaseException:  # it can't be used any more: what is left of this reply would be taken for the next one
            self._process.send_signal(signal.SIGKILL)
            raise

    def _lost(self, how: str) -> MeshError:
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # it can't be talked to any more
            self._process.send_signal(signal.SIGKILL)
            code = self._process.wait()
        killed = code < 0  # else it has failed by itself, and would again
        remedy = "see who kills it" if killed else "its error output says why; check that `import spmd` works"
        problem = f"the process that ranks are forked from {how}"
        return (ZygoteLost if killed else MeshError)(problem, got=f"exit code {code}", remedy=remedy)

    def exit_code(self, pid: int) -> int | None:
        """How a process that was forked from it, and has ended, did so; None if it does not say that."""
        if not self.alive:
            return None
        with self._lock:
            if self._control.fileno() < 0:  # as in `fork`
                return None
            end = time.monotonic() + _EXIT_SECONDS
            with contextlib.suppress(OSError):
                while pid not in self.exits and self._await(end - time.monotonic()):
                    reply, _ = self._reply()
                    if reply is None:
                        break
                    self.exits[reply.pid] = reply.status
            return self.exits.get(pid)

    @property
    def alive(self) -> bool:
        return self.driver_pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self.driver_pid == os.getpid():
            self.stand_alone()
            with self._lock, self._control, contextlib.suppress(OSError):  # not while another mesh waits for its answer
                self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may have the socket, too
            self._process.send_signal(signal.SIGCONT)  # stopped, it would not notice
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


class StandingBy(Zygote):
    """A zygote that was forked from another, to take its place."""

    def __init__(self, one: Zygote):
        self._fork = one.fork
        super().__init__()
        del self._fork  # the reference to the other zygote

    def _started(self, theirs: socket.socket) -> Any:
        return ForkedProcess(*self._fork(StandBy(), [theirs.fileno()]))


class Parent(Zygote):
    """On a rank: the zygote that it was forked from, from which its readers are forked, too.

    Args:
        control: the rank's own socket to it.
        pid: of the zygote.
    """

    def __init__(self, control: socket.socket, pid: int):
        self._ask_on(control)
        self._ready, self._process = True, ForkedProcess(pid, os.pidfd_open(pid))


class ForkedProcess:
    """A process known by its pidfd, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, pid: int, pidfd: int):
        self.pid, self._pidfd = pid, pidfd
        self._code: int | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, pidfd)

    def poll(self) -> int | None:
        return self._code_after(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._code_after(-1.0 if timeout is None else timeout)
        if code is None:
            raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        return code

    def _code_after(self, seconds: float) -> int | None:
        """The exit code, if it has ended; if it is no child of this process, its code counts as SIGKILL's."""
        if not ended(self._pidfd, seconds):
            return None
        with self._lock:  # `waitid` gives it only once
            if self._code is None:
                try:
                    found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
                except ChildProcessError:
                    found = None
                if found is None:
                    self._code = -signal.SIGKILL
                else:
                    self._code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            return self._code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


def await_zygote() -> None:
    """Wait until ranks can be forked in a moment; if the zygote is killed meanwhile, `fork_rank` makes another."""
    with contextlib.suppress(ZygoteLost):
        zygote().await_ready()


def fork_rank(request: RankRequest, fds: list[int]) -> tuple[Zygote, int, int]:
    """Fork a rank from this process's zygote (a new one if it was killed); gives that zygote, the pid and a pidfd."""
    for left in reversed(range(_TRIES)):
        one = zygote()
        try:
            found = one, *one.fork(request, fds)
            with _lock:  # several meshes may lose their ranks at once
                one.stand_by()
            return found
        except ZygoteLost:
            if not left:
                raise
    raise AssertionError


_zygote: Zygote | None = None
_meshes: set[object] = set()  # those that have ranks forked from it
_lock = threading.Lock()


def mesh_begins(ranks: object) -> None:
    """Note that ranks of a mesh are about to be forked."""
    _meshes.add(ranks)


def mesh_ends(ranks: object) -> None:
    """Note that the ranks of a mesh have ended; after the last mesh no zygote stands by."""
    _meshes.discard(ranks)
    if not _meshes:  # else without the lock: the garbage collector may close a mesh while another one starts
        with _lock:
            if not _meshes and _zygote is not None:
                _zygote.stand_alone()


def use(one: Zygote) -> None:
    """Fork ranks from this zygote as long as it lives."""
    global _zygote
    _zygote = one
    atexit.register(one.close)


def zygote() -> Zygote:
    """This process's zygote, made on first use (a forked child of a driver makes its own)."""
    global _zygote
    check_not_imported_by_worker()
    check_can_start_python()
    with uninterrupted(), _lock:
        if _zygote is None or not _zygote.alive:
            following = None
            if _zygote is not None:
                following = _zygote.next()
                atexit.unregister(_zygote.close)
                _zygote.close()
            use(following or Zygote())
        assert _zygote is not None
        return _zygote
