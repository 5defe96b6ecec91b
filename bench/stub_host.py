"""A stub host: it speaks the protocol of `spmd host`, has no ranks behind it, and answers for all of them at once.

What it needs is imported here, so that the process that all of them are forked from does so once.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from spmd.mesh import protocol as ranks_protocol
from spmd.mesh import wire
from spmd.mesh.hosts import protocol
from spmd.mesh.hosts.framing import framed, unframed
from spmd.mesh.hosts.link import greet_driver

_HELLO = protocol.Hello(protocol.versions())


def stub(stdin: bytes) -> None:
    """A stub host, until the driver goes."""
    told = json.loads(stdin)
    connection = socket.create_connection((told["address"], told["port"]))
    link = greet_driver(connection, bytes.fromhex(told["secret"]), told["place"])
    link.send(_HELLO)
    nothing = wire.dumps(None).data
    while (messages := link.receive()) is not None:
        for said, content in messages:
            if isinstance(said, protocol.Begin):
                link.send(protocol.Started(tuple((rank, os.getpid(), 1) for rank in said.ranks), 0))
                for rank in said.ranks:
                    link.send(protocol.FromRanks((rank,)), *framed(_packet(ranks_protocol.Ready())))
            elif isinstance(said, protocol.BeginAnew):
                link.send(protocol.Started((), 0))
            elif isinstance(said, protocol.Ask):
                link.send(protocol.Told((), ""))
            elif isinstance(said, protocol.ToRanks):
                task = ranks_protocol.decode(unframed(content).head)
                if isinstance(task, ranks_protocol.Task):
                    answer = framed(_packet(ranks_protocol.Answer(task.number), nothing))
                    link.send(protocol.FromRanks(said.ranks), *answer)


def _packet(message: Any, content: bytes = b"") -> Any:
    return wire.Packet(content, head=ranks_protocol.encode(message))
