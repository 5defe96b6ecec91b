"""A host that the driver dials (`spmd host --listen`), because a firewall lets nobody out, or nobody in to the driver.

It waits for drivers that have the job's secret. Each driver gets a process of its own here, as `mesh.hosts.process`
describes, forked before anything else was done. Invariant: connections that have not proved the secret are few, and
none is older than a greeting takes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque

from ..kernels.errors import MeshError
from ..kernels.processes import end_with_parent
from ..mesh.hosts.coded import NotOfThisMesh
from ..mesh.hosts.launchers import dialled_address, secret_of_hosts
from ..mesh.hosts.link import PAUSE_SECONDS, accepted, greet_driver
from ..mesh.hosts.process import hold
from ..mesh.hosts.serving import STRANGERS


def listen(where: str) -> None:
    """Hold ranks for whoever has the job's secret, until this process is ended."""
    if (address := dialled_address(where)) is None:
        sys.exit(f"spmd host: --listen {where}: expected an address of this host and a port, such as 10.0.0.5:7000")
    try:
        secret = secret_of_hosts()
        server = socket.create_server(
            address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET, backlog=STRANGERS
        )
    except (MeshError, OSError) as error:
        sys.exit(f"spmd host: {where}: {error}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print(f"spmd host: listening at {server.getsockname()[0]} port {server.getsockname()[1]}", flush=True)
    strangers: deque[tuple[int, int]] = deque()  # pid, and a pipe that closes when it is no stranger any more
    while (connection := accepted(server)) is not None:
        strangers = deque(one for one in strangers if not _ended(one[1]))
        if len(strangers) >= STRANGERS:  # the oldest makes room
            pid, standing = strangers.popleft()
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
            os.close(standing)
        with connection:
            here, pipe = os.getpid(), list[int]()
            try:
                standing, end = pipe[:] = os.pipe()
                pid = os.fork()
            except OSError as error:  # no more files, or processes: who has connected may come again
                print(f"spmd host: {error}", file=sys.stderr, flush=True)
                for fd in pipe:
                    os.close(fd)
                time.sleep(PAUSE_SECONDS)
                continue
            if pid == 0:
                _answer(here, connection, secret, end, [server.detach(), standing, *(fd for _, fd in strangers)])
            os.close(end)
            strangers.append((pid, standing))


def _ended(pipe: int) -> bool:
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if not waiting.poll(0):
        return False
    os.close(pipe)
    return True


def _answer(parent: int, connection: socket.socket, secret: bytes, standing: int, others: list[int]) -> None:
    """Have the one who connected prove to be a driver, and serve it, in a process of its own, which ends here."""
    status = 1
    try:
        end_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in others:
            os.close(fd)
        link = greet_driver(connection, secret, 0)
        os.close(standing)
        hold(link, secret)
        status = 0
    except (OSError, NotOfThisMesh) as error:
        print(f"spmd host: {error}", file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)
