"""How a process is started on a host, and ended: by ssh, here for hosts that this machine pretends to be, or by hand.

A *launcher* starts the per-host process. It is any object with `hosts`, a list of "name:ranks", and two methods:

    start(name, command, stdin) -> handle    run a command on the host of that name, give it these bytes, do not wait
    stop(handle)                             see to it that the command has ended
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import urllib.parse
from collections.abc import Sequence
from typing import Any, Protocol

from ...kernels.errors import MeshError, message
from ...kernels.network.authentication import code
from ..launch.secret import secret_of_user

_END_SECONDS = 5.0


class Launcher(Protocol):
    """What starts the processes of a mesh's hosts, and ends them."""

    hosts: Sequence[str]

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> Any: ...
    def stop(self, handle: Any) -> None: ...


class LocalLauncher:
    """Hosts that this machine pretends to be: each a process of its own, with shared memory of its own."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        return started(command, stdin)

    def stop(self, handle: subprocess.Popen) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.wait(_END_SECONDS)  # it ends with the connection
        handle.kill()
        handle.wait()


class SshLauncher(LocalLauncher):
    """Hosts that ssh reaches without asking for anything."""

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> subprocess.Popen:
        options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        return started(["ssh", *options, name, shlex.join(command)], stdin)


def started(command: Sequence[str], stdin: bytes) -> subprocess.Popen:
    """A process that has been given its input, and that Ctrl-C in this terminal does not reach."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, as will be seen
        process.stdin.write(stdin)
        process.stdin.flush()
    process.stdin.close()
    return process


class DialledHosts:
    """A launcher whose hosts wait already, as "tcp://address:port:ranks": nothing is started there.

    Attributes:
        secret: what they, and who dials them, prove that they have.
    """

    def __init__(self, hosts: Sequence[str]):
        self.hosts, self.secret = hosts, secret_of_hosts()

    def start(self, name: str, command: Sequence[str], stdin: bytes) -> None:
        """It has been."""

    def stop(self, handle: None) -> None:
        """What is there ends with its connection."""


def secret_of_hosts() -> bytes:
    """What a host that listens, and who dials it, prove that they have: from the job's secret."""
    found = secret_of_user()
    if not found.key:
        remedy = "set SPMD_SECRET, the same for the program and on all hosts"
        raise MeshError(message("a host that is dialled needs a secret", got=found.origin, remedy=remedy))
    return code(found.key, b"hosts")


def dialled_address(where: str) -> tuple[str, int] | None:
    """The address and port of "address:port", None if it is none.

    >>> dialled_address("10.0.0.5:7000"), dialled_address("[::1]:7000"), dialled_address("a")
    (('10.0.0.5', 7000), ('::1', 7000), None)
    """
    try:
        found = urllib.parse.urlsplit(f"tcp://{where}")
        return None if not found.hostname or found.port is None or found.path else (found.hostname, found.port)
    except ValueError:
        return None
