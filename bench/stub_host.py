"""A stub host: it speaks the protocol of `spmd host`, has no ranks behind it, and answers for all of them at once.

Imports are here, so that the process that all stub hosts are forked from does them once.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from typing import Any

from spmd.mesh import protocol as ranks_protocol
from spmd.mesh import wire
from spmd.mesh.hosts import protocol
from spmd.mesh.hosts.coded import framed, unframed
from spmd.mesh.hosts.link import greet_driver, mesh_key
from spmd.mesh.hosts.relaying.branch import Branch
from spmd.mesh.rank import descriptors

_HELLO = protocol.Hello(protocol.versions())
_NOTHING = wire.dumps(None).data


def stub(stdin: bytes) -> None:
    """Be a stub host until the driver goes."""
    told = json.loads(stdin)
    connection = socket.create_connection((told["address"], told["port"]))
    secret = bytes.fromhex(told["secret"])
    link = greet_driver(connection, secret, told["index"])
    link.send(_HELLO)
    ranks: tuple[int, ...] = ()
    branch: Any = None
    selector = selectors.DefaultSelector()

    def handle(msg: Any, content: bytes) -> None:
        if isinstance(msg, protocol.BeginAnew):
            branch.send(protocol.Started((), 0))
        elif isinstance(msg, protocol.Ask):
            branch.send(protocol.Report((), ""))
        elif isinstance(msg, protocol.ToRanks):
            task = ranks_protocol.decode(unframed(content).head)
            if isinstance(task, ranks_protocol.Task):
                answer = b"".join(framed(_packet(ranks_protocol.Answer(task.number), _NOTHING)))
                if msg.ranks:
                    branch.send(protocol.FromRanks(msg.ranks), answer)
                else:
                    branch.answer(ranks, (answer,), task.number)
        else:
            branch.handle(msg, content)

    def read(events: int) -> bool:
        nonlocal ranks, branch
        for msg, content in (messages := link.receive()) or ():
            if isinstance(msg, protocol.Begin):
                ranks = msg.ranks
                key = mesh_key(secret, descriptors.decode(msg.request).key)
                branch = Branch(link, connection.getsockname()[0], key, len(ranks), selector, handle)
                link.send(protocol.Started(tuple((rank, os.getpid(), 1) for rank in ranks), 0))
                for rank in ranks:
                    link.send(protocol.FromRanks((rank,)), *framed(_packet(ranks_protocol.Ready())))
            else:
                handle(msg, content)
        return messages is not None

    selector.register(connection, selectors.EVENT_READ, read)
    while True:
        left = None if branch is None or branch.left() == float("inf") else branch.left()
        for key, events in selector.select(left):
            if not key.data(events) and key.fileobj is connection:
                return
        if branch is not None:
            branch.tick()


def _packet(message: Any, content: bytes = b"") -> Any:
    return wire.Packet(content, head=ranks_protocol.encode(message))
