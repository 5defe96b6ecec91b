"""How torch's launcher has its agent and ranks meet on one host: without a port, and without a pickle.

Torch's own way opens a store on all addresses, from which the agent unpickles whatever anyone has put there. Here the
agent has a store in its own memory, and the ranks meet in a directory that only this user may enter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from .temporary import temporary_folder

BACKEND = "spmd-one-host"


class OneHost(RendezvousHandler):
    """The rendezvous of one agent with itself."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # For programs that call torch's init_process_group themselves; ours need no IPv4 address.
        port = 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


@contextlib.contextmanager
def meeting_place() -> Iterator[None]:
    """Ranks that are started within it meet in a directory of the user's own, with a secret made for them."""
    rendezvous_handler_registry.register(BACKEND, OneHost)
    before = {name: os.environ.get(name) for name in ("SPMD_INIT_METHOD", "SPMD_SECRET")}
    with temporary_folder("run") as folder:
        os.environ["SPMD_INIT_METHOD"] = f"file://{folder / 'meet'}"
        os.environ["SPMD_SECRET"] = secrets.token_hex(32)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
