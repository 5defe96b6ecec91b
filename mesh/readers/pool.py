"""A rank's readers, processes beside it: it asks them for what it will need, and takes the answers by number.

Invariants: an answer that nobody wants any more is dropped, and its memory freed; if a reader dies, the error says what
it was reading, and another takes its place at the next request.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from ...kernels.processes import Owned
from .. import failure, protocol, wire
from ..driver import spawn
from ..pickling import edited
from ..rank.descriptors import ReaderRequest
from .process import NOTE_BYTES, Note


class _Reader:
    """One process, and the requests that it has not answered."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket, note: Note):
        self.pid, self.connection, self.note = pid, connection, note
        os.close(pidfd)
        self.incoming = wire.Receiver(connection)
        self.asked: set[int] = set()

    def send(self, packet: wire.Packet) -> None:
        try:
            wire.send(self.connection, packet)
        except ConnectionError:
            pass  # its death is noticed when the answer is taken
        except BaseException:  # Ctrl-C: it may have a part, and could not read what comes after that
            self.close()
            raise

    def close(self) -> None:
        self.incoming.close()
        self.connection.close()


class Pool(Owned):
    """Processes that call `job(*arguments)` for the rank that has made this.

    Args:
        job: the function, sent to each once.
        count: how many processes.
    """

    def __init__(self, job: Any, count: int):
        super().__init__()
        self._job = job
        self._readers: list[_Reader | None] = [None] * count
        self._zygote: spawn.Zygote | None = None  # all pools of this process share it, and it is kept
        self._shipped: wire.Packet | None = None
        self._numbers = 0
        self._answers: dict[int, tuple[Any, wire.Packet]] = {}
        self._lost: dict[int, MeshError] = {}  # requests whose reader has died
        self._wanted: dict[int, int] = {}  # number of a request whose answer is wanted -> index of the reader
        board = os.memfd_create("spmd-readers", os.MFD_CLOEXEC)
        os.ftruncate(board, count * NOTE_BYTES)
        self._board_fd, self._board = board, mmap.mmap(board, count * NOTE_BYTES)

    def __len__(self) -> int:
        return len(self._readers)

    def ask(self, arguments: tuple, index: int | None = None) -> int:
        """Have a reader call the job; returns the number with which to `take` the answer.

        Args:
            index: of the reader; None takes the one with the fewest requests.
        """
        if index is None:
            index = min(range(len(self)), key=lambda one: len(found.asked) if (found := self._readers[one]) else 0)
        reader = self._reader(index)
        self._numbers += 1
        packet = wire.dumps(arguments)
        packet.head = protocol.encode(protocol.CallFunction(self._numbers, 0, (), (), "job", ()))
        reader.asked.add(self._numbers)
        self._wanted[self._numbers] = index
        try:
            reader.send(packet)
        except BaseException:
            self._readers[index] = None
            raise
        finally:
            packet.close()
        return self._numbers

    def take(self, number: int) -> Any:
        """Wait for an answer, and return it.

        Raises:
            what the job has raised; MeshError: the reader has died.
        """
        index = self._wanted[number]
        while number not in self._answers:
            if number in self._lost:
                self._wanted.pop(number)
                raise self._lost.pop(number)
            reader = self._readers[index]
            if reader is None or number not in reader.asked:
                raise MeshError("a reader that reads for the Loader was lost", remedy="iterate again")
            self._receive()
        del self._wanted[number]
        msg, packet = self._answers.pop(number)
        try:
            result = wire.loads(packet)
        finally:
            packet.close()
        if isinstance(msg, protocol.Failed):
            error = failure.original(result)
            error.__cause__ = failure.RemoteTraceback(
                f"\n\nin a process that reads for the Loader:\n{result.traceback}"
            )
            raise error
        return result

    def forget(self) -> None:
        """Drop all answers, also those still to come."""
        self._wanted.clear()
        self._lost.clear()
        while self._answers:
            self._answers.popitem()[1][1].close()

    def close(self) -> None:
        """End the readers."""
        if self.foreign:
            return
        self.forget()
        for reader in self._readers:
            if reader is not None:
                reader.close()
        self._readers = [None] * len(self._readers)
        if self._shipped is not None:
            self._shipped.close()
            self._shipped = None

    def __del__(self) -> None:
        if not self.foreign:
            with contextlib.suppress(Exception):
                self.close()
                os.close(self._board_fd)

    def _reader(self, index: int) -> _Reader:
        found = self._readers[index]
        if found is None:
            self._zygote = spawn.zygote()
            if self._shipped is None:
                self._shipped = self._packed()
                self._shipped.head = protocol.encode(protocol.Ship("job"))
            mine, theirs = socket.socketpair()
            note = Note(self._board, index)
            note.write("")
            request = ReaderRequest(index, tuple(map(str, sys.path)), dict(os.environ))
            with theirs, named_limits():
                folder = os.open(".", os.O_PATH)
                try:
                    pid, pidfd = self._zygote.fork(request, [theirs.fileno(), self._board_fd, 1, 2, folder])
                finally:
                    os.close(folder)
            found = _Reader(pid, pidfd, mine, note)
            if modules := edited.kept():
                found.send(wire.Packet(b"", head=protocol.encode(protocol.SetModules(modules))))
            found.send(self._shipped)
            self._readers[index] = found  # once it has all: until then Ctrl-C may come
        return found

    def _packed(self) -> wire.Packet:
        try:
            return wire.dumps(self._job)
        except Exception as error:  # anything: pickling calls methods of the dataset
            problem = "a dataset cannot be sent to a process that reads for the Loader"
            remedy = "what is open is each process's own: have __getstate__ leave it out"
            raise MeshError(problem, got=f"{type(error).__name__}: {error}", remedy=remedy) from None

    def _receive(self) -> None:
        """Take in what the readers have sent; waits until there is something."""
        waiting, indexes = select.poll(), {}
        for index, reader in enumerate(self._readers):
            if reader is not None and reader.asked:
                waiting.register(reader.connection, select.POLLIN)
                indexes[reader.connection.fileno()] = index
        for fd, _ in waiting.poll():
            with uninterrupted():
                self._receive_from(indexes[fd])

    def _receive_from(self, index: int) -> None:
        reader = self._readers[index]
        assert reader is not None
        packets = reader.incoming.receive(block=False)
        if packets is None:
            self._bury(index, reader)
            return
        for packet in packets:
            msg = protocol.decode(packet.head)
            reader.asked.discard(msg.task)
            if msg.task in self._wanted:
                self._answers[msg.task] = (msg, packet)
            else:
                packet.close()

    def _bury(self, index: int, reader: _Reader) -> None:
        """A reader has ended: keep an error for each request that it did not answer."""
        self._readers[index] = None
        reader.close()
        lost = [number for number in reader.asked if number in self._wanted]
        if not lost:
            return
        assert self._zygote is not None
        status = self._zygote.exit_code(reader.pid)
        how = "has ended" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        error = MeshError(
            f"a process that reads for the Loader {how}",
            got=reader.note.read() or "nothing read yet",
            remedy="nothing that was delivered is lost: go on from the Loader's state_dict(). If the system has "
            "killed it for memory, take fewer workers=, or read less ahead (prefetch=, prefetch_mb=)",
        )
        self._lost.update(dict.fromkeys(lost, error))
