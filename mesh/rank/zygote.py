"""The zygote: a process that has imported torch and run nothing, from which ranks are forked.

Importing torch takes seconds, and a fork milliseconds; and a fork of the user's own process, in which torch's thread
pool has run, would hang. Ranks have their readers forked here, too, each over a socket of its own. A second zygote,
forked from the first, stands by in case the first is killed. Invariants: this process never has a second thread;
however the driver ends, the zygotes and all their ranks end, too, and with a rank its readers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import NoReturn

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
    _serve(control_fd, driver)


def _serve(control_fd: int, driver: int) -> NoReturn:
    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}  # pid -> where it was asked for
    # The driver's socket, and one of each rank, with the process group of those that are asked for there.
    sockets = {control.fileno(): (control, 0)}
    with contextlib.suppress(ConnectionError):  # the driver has closed it already, or is gone, which is noticed below
        control.sendall(b"R")
    waiting = select.poll()  # select() takes no descriptors from 1024 on, and the driver may have many open
    for fd in (*sockets, wake_read, driver):
        waiting.register(fd, select.POLLIN)
    while control.fileno() >= 0:
        readable = {fd for fd, _ in waiting.poll()}
        if driver in readable:
            break
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(children)
        for asked_on, group in [sockets[fd] for fd in readable if fd in sockets]:
            request, fds = receive(asked_on)
            if request is None:
                waiting.unregister(asked_on)
                del sockets[asked_on.fileno()]
                asked_on.close()
                continue
            ours = theirs = None
            try:
                if isinstance(request, RankRequest):
                    ours, theirs = socket.socketpair()
                here, pid = os.getpid(), os.fork()
            except OSError as error:
                for one in (ours, theirs):
                    if one is not None:
                        one.close()
                for fd in fds:
                    os.close(fd)
                send(asked_on, Refused(error.errno or 0), [])
                continue
            if pid == 0:
                with contextlib.suppress(OSError):  # its rank has just ended, so that it will end, too
                    os.setpgid(0, group)  # so that processes that a rank starts, and its readers, end with it
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (*(one for one, _ in sockets.values()), ours):
                    if one is not None:
                        one.close()
                for fd in (wake_read, wake_write):
                    os.close(fd)
                if isinstance(request, StandBy):
                    _serve(fds[0], driver)
                os.close(driver)
                end_with_parent(here)
                code = 1
                try:
                    if theirs is not None:
                        spawn.use(spawn.Parent(theirs, here))
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
            with contextlib.suppress(OSError):
                os.setpgid(pid, group)  # parent and child both try: one is first
            children[pid] = asked_on
            if ours is not None and theirs is not None:
                theirs.close()
                sockets[ours.fileno()] = ours, pid
                waiting.register(ours, select.POLLIN)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            send(asked_on, Forked(pid), [pidfd])
            os.close(pidfd)
    for pid in children:
        _end_group(pid)
    os._exit(0)


def _end_group(pid: int) -> None:
    """Kill a rank, its readers, and processes that they have started and left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


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
