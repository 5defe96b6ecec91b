"""How a process is started on a host, and ended: by ssh, or here, for hosts that this machine pretends to be.

A *launcher* starts the per-host process. It is any object with `hosts`, a list of "name:ranks", and two methods:

    start(name, command, stdin) -> handle    run a command on the host of that name, give it these bytes, do not wait
    stop(handle)                             see to it that the command has ended
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

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
