"""The main loop of a driver's rank: take a message from the socket, do what it says, answer.

Tasks run in the order in which they were sent. After a failed region, the rank skips everything already sent, until the
driver has waited for all ranks to fall quiet and opens the next generation. If a task that this rank runs alone fails,
other tasks go on (unless it was interrupted or aborted).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

from ...kernels import debug
from ...kernels.cuda import nccl_watchdog, placement
from ...kernels.errors import Aborted
from ...kernels.interrupts import uninterrupted
from ...kernels.processes import Owned
from .. import protocol, wire
from ..array import Array
from ..display.trace import Recorder
from ..failure import capture
from ..mesh import Mesh
from ..pickling import edited
from ..pickling.beside import remember_sources
from ..pickling.unpicklable import sending_result
from . import memory
from .forks import end_fork, flush_output
from .state import RankState
from .tasks import DO

AGAIN_SECONDS = 0.05  # until an interrupt that came at a bad moment is tried again
BLOCK_SECONDS = 0.5  # how long a `with` statement may take to begin or end until it is interrupted all the same
INTERRUPT_SECONDS = 0.3  # between two interrupts of one task, so that the first one's cleaning up is not interrupted
_BLOCK_ENDS = ("__enter__", "__exit__", "__aenter__", "__aexit__")


class Worker(Owned):
    """Serves the driver at the other end of a socket.

    Attributes:
        task: the number of the current task, or the last one.
    """

    def __init__(self, state: RankState, connection: socket.socket):
        super().__init__()
        self._state, self._connection = state, connection
        self._receiver = wire.Receiver(connection)
        self._unread: deque[wire.Packet] = deque()  # arrived, not handled yet
        self._questions = 0
        self._failed = self._running = self._ends = False
        self._held: Any = None  # until the process ends
        self._interrupted_at = 0.0
        self._asked = 0, 0.0  # the attempt that was last to be interrupted, and since when
        self.task = self._attempts = 0  # a task that runs again is another attempt
        self._sent = 0  # messages over the socket
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Handle messages until the driver says to exit, or is gone."""
        self._send(protocol.Ready())
        while True:
            while self._unread:
                if not self._handle(self._unread.popleft()):
                    return
            self._state.session.node.await_readable(self._connection)
            packets = self._receiver.receive(block=True)
            if packets is None:
                return
            self._unread.extend(packets)

    def _handle(self, packet: wire.Packet) -> bool:
        """Do what a packet asks for; whether to go on."""
        state, msg = self._state, protocol.decode(packet.head)
        if isinstance(msg, protocol.Task):
            state.free(msg.freed, msg.forgotten)
            self._run(msg, packet)
        elif isinstance(msg, protocol.Ship):
            if not state.keep(msg.key, packet):
                self._send(msg)
        elif isinstance(msg, protocol.Free):
            state.free(msg.values, msg.keys)
        elif isinstance(msg, protocol.Renew):
            self._failed = False
            state.forget_last_results()
            state.session.renew(msg.generation, msg.done, replaced=msg.replaced)
            state.values.drop_since(nccl_watchdog.settled(at_once=msg.replaced))
            if msg.kept is not None:
                state.values.keep_only(msg.kept)
        elif isinstance(msg, protocol.CopyTo):
            assert state.values.copier is not None
            state.values.copier.copy_to(msg, state.values.kept)
        elif isinstance(msg, protocol.Populate):
            assert state.session.arena is not None
            results = msg.results if state.session.rank == 0 else 0
            state.session.arena.populate(0, msg.values + msg.step + results)
            memory.populate(msg.step)
        elif isinstance(msg, protocol.SetSources):
            remember_sources(msg.lines)
        elif isinstance(msg, protocol.SetModules):
            edited.keep(msg.modules)
        elif isinstance(msg, protocol.SetPath):
            state.set_path(msg.path)
        packet.close()
        return not isinstance(msg, protocol.Exit)

    def _run(self, task: protocol.Task, packet: wire.Packet) -> None:
        answer = self._answer(task, packet)
        if isinstance(answer, protocol.Unchanged):
            if self._put(answer):
                return
            answer = self._packed(answer)
        if (arena := self._state.session.arena) is not None:
            arena.answers.note(task.number)
        self._send_packet(answer)
        if self._ends:
            os._exit(1)

    def _put(self, answer: protocol.Unchanged) -> bool:
        """Answer in shared memory, if that is possible; whether it was."""
        arena = self._state.session.arena
        if arena is None or self.foreign or arena.aborted():  # after an abort, answers are awaited on the sockets
            return False
        return arena.answers.put(answer.task, self._sent, answer.prints)

    def _answer(self, task: protocol.Task, packet: wire.Packet) -> wire.Packet | protocol.Unchanged:
        """Do a task; returns the answer to send."""
        if self._failed:
            return self._packed(protocol.Skipped(task.number))
        state, self.task = self._state, task.number
        self._attempts += 1
        answer: wire.Packet | protocol.Unchanged
        try:
            pure = isinstance(task, protocol.CallProgram)
            with state.session.region(task.region, pure=pure) if task.region else state.session.alone():
                try:
                    self._running = True
                    found = DO[type(task)](state, task, packet)
                finally:
                    self._running = False
            if self.foreign:
                end_fork()
            if isinstance(found, protocol.Unchanged):
                answer = found
            elif isinstance(found, protocol.Metadata):
                answer = self._packed(found)
            else:
                answer = self._packed(protocol.Answer(task.number), found)
        except BaseException as error:
            self._running = False
            if self.foreign:
                end_fork(error)
            state.forget_last_results()
            self._failed = bool(task.region) or isinstance(error, (Aborted, KeyboardInterrupt))
            if fault := placement.fault():
                # Nothing of the task is freed: where CUDA fails, torch aborts as it frees a tensor of several streams.
                self._ends, self._held = True, (error, error.__traceback__)
            why = f"ended, as its process can use its GPU no more: {fault}" if fault else ""
            answer = self._packed(protocol.Failed(task.number), capture(error, ends=why))
        flush_output()
        return answer

    def _packed(self, message: protocol.Message, content: Any = None) -> wire.Packet:
        state = self._state
        with sending_result(lambda: [("what the function returned", content)], state.session.where, (Array, Mesh)):
            packet = wire.Packet(b"") if content is None else wire.dumps(content, state.name_of)
        packet.head = protocol.encode(message)
        return packet

    def _send(self, message: protocol.Message) -> None:
        self._send_packet(self._packed(message))

    def _send_packet(self, packet: wire.Packet) -> None:
        if self.foreign:
            return
        with contextlib.suppress(ConnectionError), self._sending:  # the driver is gone, and so will be this process
            self._sent += 1
            wire.send(self._connection, packet)
        packet.close()

    def report(self, message: protocol.Message) -> None:
        """Tell the driver something during a task; an interrupt must not cut the message in half."""
        with uninterrupted():
            self._send(message)

    def ask(self, text: str) -> str:
        """For a debugger that has written `text`, a line from the driver's terminal; empty at the end of the input."""
        if self.foreign:  # the driver's messages are for the rank to read
            return ""
        flush_output()
        self._questions += 1
        with uninterrupted():
            self._send(protocol.DebuggerPrompt(self._questions, text))
        readable = select.poll()
        readable.register(self._connection, select.POLLIN)
        while readable.poll():
            with uninterrupted():  # an interrupt must not lose what was received
                packets = self._receiver.receive(block=False)
                if packets is None:
                    break
                lines = []
                for packet in packets:
                    msg = protocol.decode(packet.head)
                    if isinstance(msg, protocol.DebuggerLine):
                        lines.append(msg)
                    else:
                        self._unread.append(packet)
            for line in lines:
                if line.number == self._questions:
                    return line.text or ""
        return ""

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, the driver's Ctrl-C: it is for the running task; between tasks there is nothing to stop."""
        now = time.monotonic()
        if not self._running or now - self._interrupted_at <= INTERRUPT_SECONDS:
            return
        if self._asked[0] != self._attempts:
            self._asked = self._attempts, now
        if _is_bad_moment(frame, in_block=now - self._asked[1] < BLOCK_SECONDS):
            # Not by `threading`: what was stopped by this signal may hold a lock of that module.
            _thread.start_new_thread(self._interrupt_again, (self._attempts,))
            return
        self._interrupted_at, self._asked = now, (0, 0.0)
        raise KeyboardInterrupt

    def _interrupt_again(self, attempt: int) -> None:
        time.sleep(AGAIN_SECONDS)
        if self._running and self._attempts == attempt:
            os.kill(os.getpid(), signal.SIGINT)


class TracedWorker(Worker):
    """A `Worker` that reports every task to the driver's trace when it is over, before the answer."""

    def __init__(self, state: RankState, connection: socket.socket, key: bytes):
        super().__init__(state, connection)
        self._recorder = Recorder(key, lambda fields: self.report(protocol.Logged(fields)))
        debug.note_with(self._recorder.collective)

    def _answer(self, task: protocol.Task, packet: wire.Packet) -> wire.Packet | protocol.Unchanged:
        began, start = time.time(), time.perf_counter()  # the former may be set back meanwhile
        answer = super()._answer(task, packet)
        if not self.foreign:
            seconds = time.perf_counter() - start
            self._recorder.task(task.number, task.region, self._name(task), began, seconds)
        return answer

    def _name(self, task: protocol.Task) -> str:
        """A task's name: that of the program's function, if it calls one."""
        try:
            if isinstance(task, protocol.CallProgram):
                return str(self._state.shipped(self._state.shipped(task.call).program).name)
            if isinstance(task, protocol.CallFunction):
                return str(getattr(self._state.shipped(task.function), "__qualname__", "mesh.run"))
        except Exception:  # it can't be read here, as the answer will say
            pass
        return type(task).__name__


def _is_bad_moment(frame: FrameType | None, *, in_block: bool) -> bool:
    """Whether an interrupt would leave something half done that later calls need.

    That is a module that is being imported, which can't be imported again, and, if `in_block`, a `with` statement that
    begins or ends: what it has set for its block would stay set.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or (in_block and code.co_name in _BLOCK_ENDS):
            return True
        frame = frame.f_back
    return False
