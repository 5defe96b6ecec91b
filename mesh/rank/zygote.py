"""The zygote: a process that has imported torch and run nothing, from which ranks are forked.

Importing torch takes seconds, and a fork milliseconds; and a fork of the user's own process, in which torch's thread
pool has run, would hang. Ranks have their readers forked here, too, each over a socket of its own. A second zygote,
forked from the first, stands by in case the first is killed. Invariants: this process never has a second thread;
however the driver ends, the zygotes and all their ranks end, too, and with a rank its readers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ...kernels.processes import end_with_parent
from ..driver import spawn
from ..readers import process as reader_process
from . import process as rank_process  # this imports torch, which is what this process is for
from .descriptors import Exited, Forked, RankRequest, ReaderRequest, Refused, StandBy, receive, send

# Ranks need these to unpickle a program: imported here once, instead of for 0.05 s on each rank.
PRELOADED = ("spmd.transforms", "spmd.optim.optimizer", "spmd._functional", "spmd.data.loader")


def main(control_fd: int, driver_pid: int) -> None:
    """Serve fork requests on the control socket until it closes."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # unblock what the driver's thread blocks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = os.pidfd_open(driver_pid)
    for name in PRELOADED:
        importlib.import_module(name)
    # So that the garbage collector doesn't write to pages that are shared with the ranks.
    gc.collect()
    gc.freeze()
    gc.enable()
    work: Callable[[], Any] = _Zygote(control_fd, driver).serve
    while True:  # each process that is forked does its work here, so that the stack of none is on another's
        work = work()


class _Zygote:
    """Forks ranks, their readers and the zygote that stands by, and tells when they have ended.

    Args:
        control_fd: the driver's socket.
        driver: its pidfd.
    """

    def __init__(self, control_fd: int, driver: int):
        self._control, self._driver = socket.socket(fileno=control_fd), driver
        self._wakes = os.pipe()  # readable when a child has ended
        for fd in self._wakes:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wakes[1])
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._children: dict[int, socket.socket] = {}  # pid -> where it was asked for
        # The driver's socket, and one of each rank, with the process group of those that are asked for there.
        self._sockets = {control_fd: (self._control, 0)}
        self._waiting = select.poll()  # select() takes no descriptors from 1024 on, and the driver may have many open
        for fd in (control_fd, self._wakes[0], driver):
            self._waiting.register(fd, select.POLLIN)

    def serve(self) -> Callable[[], Any]:
        """Answer requests until the driver has closed its socket, or has ended.

        Returns:
            In a new child, its work; the process that was called ends.
        """
        with contextlib.suppress(ConnectionError):  # it has closed it already, or is gone, which is noticed below
            self._control.sendall(b"R")
        while self._control.fileno() >= 0:
            readable = {fd for fd, _ in self._waiting.poll()}
            if self._driver in readable:
                break
            if self._wakes[0] in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakes[0], 4096)
                _reap(self._children)
            for asked_on, group in [self._sockets[fd] for fd in readable if fd in self._sockets]:
                if (work := self._answer(asked_on, group)) is not None:
                    return work
        for pid in self._children:
            _end_group(pid)
        os._exit(0)

    def _answer(self, asked_on: socket.socket, group: int) -> Callable[[], Any] | None:
        """Fork the process that is asked for on a socket, or close the socket if its other end is closed.

        Returns:
            In the new child, its work.
        """
        request, fds = receive(asked_on)
        if request is None:
            self._waiting.unregister(asked_on)
            del self._sockets[asked_on.fileno()]
            asked_on.close()
            return None
        # A rank asks for its readers over a socket of its own.
        pair: tuple[socket.socket, ...] = ()
        here = os.getpid()
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if isinstance(request, RankRequest):
                pair = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            _close(pair, fds)
            send(asked_on, Refused(error.errno or 0), [])
            return None
        if pid == 0:
            self._leave(group)
            _close(pair[:1], ())
            if isinstance(request, StandBy):
                return _Zygote(fds[0], self._driver).serve
            os.close(self._driver)
            return functools.partial(_run, request, fds, here, *pair[1:])
        with contextlib.suppress(OSError):
            os.setpgid(pid, group)  # parent and child both try: one is first
        self._children[pid] = asked_on
        if pair:
            self._sockets[pair[0].fileno()] = pair[0], pid
            self._waiting.register(pair[0], select.POLLIN)
        _close(pair[1:], fds)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            send(asked_on, Refused(error.errno or 0), [])
            return None
        send(asked_on, Forked(pid), [pidfd])
        os.close(pidfd)
        return None

    def _leave(self, group: int) -> None:
        """In a new child: join a process group, and give up what is the zygote's."""
        with contextlib.suppress(OSError):  # its rank has just ended, so that it will end, too
            os.setpgid(0, group)  # so that processes that a rank starts, and its readers, end with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _close([one for one, _ in self._sockets.values()], self._wakes)


def _run(
    request: RankRequest | ReaderRequest, fds: list[int], zygote: int, forks: socket.socket | None = None
) -> NoReturn:
    """In a new child: be a rank, or a reader.

    Args:
        fds: what came with the request.
        zygote: the pid of its parent.
        forks: where a rank asks for its readers.
    """
    end_with_parent(zygote)
    code = 1
    try:
        if forks is not None:
            spawn.use(spawn.Parent(forks, zygote))
        reading = isinstance(request, ReaderRequest)
        (reader_process if reading else rank_process).main(request, fds)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), signal.SIGCONT)  # stopped, it would not notice the driver's end
        os._exit(code)


def _close(sockets: Iterable[socket.socket], fds: Iterable[int]) -> None:
    for one in sockets:
        one.close()
    for fd in fds:
        os.close(fd)


def _end_group(pid: int) -> None:
    """Kill a rank, its readers, and processes that they have started and left behind.

    Not a resource tracker of Python's multiprocessing: when the others have ended it removes what they have left in
    /dev/shm, and ends. It must not even be stopped meanwhile: a group of which a process is stopped when its parent
    ends gets SIGHUP from the kernel.
    """
    killed = set[int]()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, 0)  # mostly nobody is left, and this raises
        while others := [one for one in _members(pid) if one not in killed and not _is_tracker(one)]:
            for one in others:  # until none has forked another before it was killed
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, signal.SIGKILL)
            killed.update(others)


def _members(group: int) -> Iterable[int]:
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                yield pid


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"resource_tracker import main" in command.read()
    except OSError:  # it has ended
        return False


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _end_group(pid)
        if (asked_on := children.pop(pid)).fileno() >= 0:
            send(asked_on, Exited(pid, os.waitstatus_to_exitcode(status)), [])
