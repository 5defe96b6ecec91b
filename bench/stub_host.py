"""A stub host: it speaks the protocol of `spmd host`, has no ranks behind it, and answers for all of them at once.

Imports are here, so that the process that all stub hosts are forked from does them once.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from spmd.mesh import protocol as ranks_protocol
from spmd.mesh import wire
from spmd.mesh.hosts import protocol
from spmd.mesh.hosts.coded import framed, unframed
from spmd.mesh.hosts.link import greet_driver

_HELLO = protocol.Hello(protocol.versions())
_NOTHING = wire.dumps(None).data


def stub(stdin: bytes) -> None:
    """Be a stub host until the driver goes."""
    told = json.loads(stdin)
    connection = socket.create_connection((told["address"], told["port"]))
    link = greet_driver(connection, bytes.fromhex(told["secret"]), told["index"])
    link.send(_HELLO)
    while (messages := link.receive()) is not None:
        for msg, content in messages:
            if isinstance(msg, protocol.Begin):
                link.send(protocol.Started(tuple((rank, os.getpid(), 1) for rank in msg.ranks), 0))
                for rank in msg.ranks:
                    link.send(protocol.FromRanks((rank,)), *framed(_packet(ranks_protocol.Ready())))
            elif isinstance(msg, protocol.BeginAnew):
                link.send(protocol.Started((), 0))
            elif isinstance(msg, protocol.Ask):
                link.send(protocol.Report((), ""))
            elif isinstance(msg, protocol.ToRanks):
                task = ranks_protocol.decode(unframed(content).head)
                if isinstance(task, ranks_protocol.Task):
                    answer = _packet(ranks_protocol.Answer(task.number), _NOTHING)
                    link.send(protocol.FromRanks(msg.ranks), *framed(answer))


def _packet(message: Any, content: bytes = b"") -> Any:
    return wire.Packet(content, head=ranks_protocol.encode(message))
