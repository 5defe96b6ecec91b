"""The rank processes of a driver's mesh, as the driver holds them: started, sent to, signalled, and cleared away."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

import cloudpickle

from ..kernels.errors import MeshError, message
from ..kernels.registry import added_factory
from . import wire
from .spawn import zygote


class Rank:
    """One rank process: its socket, its output, and a descriptor that tells when it ends.

    Args:
        rank: its place in the mesh.
        request: what `rank_process.main` needs to know.
        arena: the arena's descriptor.
    """

    def __init__(self, rank: int, request: dict[str, Any], arena: int):
        self.rank = rank
        self.alive, self.ready = True, False
        self.connection, theirs = socket.socketpair()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        out, err = os.pipe(), os.pipe()
        self.pipes = {"stdout": out[0], "stderr": err[0]}
        self._zygote = zygote()
        try:
            self.pid, self.pidfd = self._zygote.fork(
                {**request, "rank": rank}, [theirs.fileno(), out[1], err[1], arena]
            )
        except BaseException:
            self.connection.close()
            for fd in self.pipes.values():
                os.close(fd)
            raise
        finally:
            theirs.close()
            os.close(out[1])
            os.close(err[1])
        for fd in self.pipes.values():
            os.set_blocking(fd, False)
        self.sender, self.receiver = wire.Sender(self.connection), wire.Receiver(self.connection)

    def send(self, packet: wire.Packet) -> bool:
        """Send without waiting; whether the packet is wholly on its way (or never will be)."""
        return self._quietly(lambda: self.sender.send(packet))

    def flush(self) -> bool:
        return self._quietly(self.sender.flush)

    def _quietly(self, send: Callable[[], bool]) -> bool:
        try:
            return not self.alive or send()
        except ConnectionError:  # its death is noticed elsewhere
            self.sender.close()
            return True

    def read(self, stream: str) -> bytes | None:
        """What it printed and nobody has read yet; None if it will never print again."""
        try:
            data = os.read(self.pipes[stream], 1 << 16)
        except BlockingIOError:
            return b""
        if data:
            return data
        os.close(self.pipes.pop(stream))
        return None

    def signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def ended(self, seconds: float) -> bool:
        """Wait for the process to end; whether it has."""
        return not self.alive or bool(select.select([self.pidfd], [], [], seconds)[0])

    def end_text(self) -> str:
        """How the process ended."""
        code = self._zygote.exit_code(self.pid)
        if code is None:
            return "died" if self._zygote.alive else "died with the process that it was forked from"
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"

    def close(self) -> None:
        """Give back its descriptors, once it has ended."""
        if self.pidfd < 0:
            return
        self.sender.close()
        self.receiver.close()
        self.connection.close()
        for fd in (self.pidfd, *self.pipes.values()):
            os.close(fd)
        self.pipes.clear()
        self.pidfd = -1


def pickled_factory(backend: str) -> bytes | None:
    """What a rank needs to know a backend that this process has added; None for one that every process has."""
    factory = added_factory(backend)
    if factory is None:
        return None
    try:
        return cloudpickle.dumps(factory)
    except Exception as error:
        raise MeshError(
            message(
                f"the factory of backend {backend!r} cannot be sent to the ranks",
                got=f"{type(error).__name__}: {error}",
                remedy="register a function that refers to nothing but modules, functions and plain values",
            )
        ) from None
