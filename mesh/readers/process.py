"""A reader: a process beside a rank that reads what the rank asks for, one request after another.

It is forked from the zygote that its rank was forked from, or, beside a launched rank, from one of the rank's own. It
ends when the rank closes the socket.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import sys
from typing import Any

import torch

from ...kernels.processes import open_more_files
from .. import protocol, wire
from ..failure import capture
from ..pickling import edited
from ..rank.descriptors import ReaderRequest
from ..rank.memory import keep_some_freed_memory

NOTE_BYTES = 1024  # of shared memory, for each reader


class Note:
    """Says what a reader is reading, so that the rank knows it if the reader dies; in other processes it does nothing.

    Invariant: one line of text in memory that both map, written before the work that might kill the process.
    """

    def __init__(self, board: mmap.mmap | None = None, index: int = 0):
        self._board, self._at = board, index * NOTE_BYTES

    @property
    def kept(self) -> bool:
        """Whether anybody reads it."""
        return self._board is not None

    def write(self, text: str) -> None:
        if self._board is not None:
            data = text.encode(errors="replace")[: NOTE_BYTES - 1]
            self._board[self._at : self._at + len(data) + 1] = data + b"\0"

    def read(self) -> str:
        assert self._board is not None
        return self._board[self._at : self._at + NOTE_BYTES].partition(b"\0")[0].decode(errors="replace")


note = Note()


def main(request: ReaderRequest, fds: list[int]) -> None:
    """Serve a rank, in its surroundings, until its socket ends."""
    control, board, out, err, folder = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.fchdir(folder)
    for fd in (out, err, folder):
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.path[:] = request.path
    open_more_files()
    serve(control, board, request.index)


def serve(control: int, board: int, index: int) -> None:
    """Do what a rank asks for until its socket ends."""
    global note
    keep_some_freed_memory()
    torch.set_num_threads(1)
    note = Note(mmap.mmap(board, 0), index)
    os.close(board)
    with socket.socket(fileno=control) as connection:
        incoming, job = wire.Receiver(connection), None
        while (packets := incoming.receive(block=True)) is not None:
            for packet in packets:
                msg = protocol.decode(packet.head)
                if isinstance(msg, protocol.Ship):
                    job = _Job(packet)
                elif isinstance(msg, protocol.SetModules):
                    edited.keep(msg.modules)
                else:
                    assert job is not None
                    _answer(connection, msg.number, job, wire.loads(packet))
                packet.close()


class _Job:
    """The function that a reader calls; it is unpickled at the first request, which gets the error if that fails."""

    def __init__(self, packet: wire.Packet):
        self._packet: wire.Packet | None = wire.Packet(packet.data, packet.inline, packet.fd)
        packet.fd = None
        self._call: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._packet is not None:
            self._call = wire.loads(self._packet)
            self._packet.close()
            self._packet = None
        return self._call(*arguments)


def _answer(connection: socket.socket, number: int, job: _Job, arguments: tuple) -> None:
    try:
        note.write("")
        packet = wire.dumps(job(*arguments))
        packet.head = protocol.encode(protocol.Answer(number))
    except BaseException as error:
        packet = wire.dumps(capture(error))
        packet.head = protocol.encode(protocol.Failed(number))
    try:
        with contextlib.suppress(ConnectionError):  # the rank has ended, as the next `receive` will notice
            wire.send(connection, packet)
    finally:
        packet.close()
