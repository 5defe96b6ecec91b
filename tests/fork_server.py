"""Python processes that have imported spmd already: forks of one that has, and that has run nothing.

For tests of what programs do. A process that imports torch costs more than most of these tests, and one that makes a
mesh would import it twice, in its zygote, too; so a program gets a zygote that was forked with it. Tests that use
`subprocess` cover a start from nothing. Invariant: a program can tell only by how soon it begins, and ends (see
`_quickly`). With FORKED_CHILDREN among its variables the Pythons that it starts itself are forks, too, which have one
hash seed: an order of sets that differs between ranks shows in fresh ones only.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from internals import local_hosts, preloaded, read_environment_again
from patience import HANGS

_LENGTH = struct.Struct("I")

# -- in the test ------------------------------------------------------------------------------------------------------


class Program(subprocess.Popen):
    """A program that a server runs: `[sys.executable, *options, script or "-c" or "-m", ...]`.

    It takes the options of `subprocess.Popen`, but ignores those for users, groups and signals.
    """

    def __init__(self, command: Sequence[str], *, server: ForkServer, **options: Any):
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:  # Popen's, which has made the pipes, and closes its own ends
        names = list(inspect.signature(super()._execute_child).parameters)
        told = dict(zip(names, given, strict=True))
        ends = [told[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self.pid = self._server.ask(
                [number if end == -1 else end for number, end in enumerate(ends)],
                arguments=[os.fspath(argument) for argument in told["args"][1:]],
                cwd=os.fspath(told["cwd"] or os.getcwd()),
                environ=dict(os.environ if told["env"] is None else told["env"]),
                session=told["start_new_session"],
            )
        finally:
            self._close_pipe_fds(*(told[name] for name in names if name in _PIPES))
        self._ended = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._ended)
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        waiting = select.poll()
        waiting.register(self._ended, select.POLLIN)
        if not waiting.poll(0 if flags & os.WNOHANG else None):
            return 0, 0
        return self.pid, self._server.ask([], status=self.pid)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            except OSError:  # the server is gone
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()
        return self.returncode


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkServer:
    """The process that all are forked from."""

    def __init__(self, connection: socket.socket | None = None, modules: Sequence[str] = ()) -> None:
        """Start one, which imports these modules besides, or use the one that serves at the other end already."""
        self._lock = threading.Lock()
        if connection is not None:
            self._socket = connection
            return
        self._socket, theirs = socket.socketpair()
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **_environment()}
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environ)

    def ask(self, fds: Sequence[int], **request: Any) -> int:
        text = json.dumps(request).encode()
        with self._lock:
            _send(self._socket, text, fds)
            answer, _ = _receive(self._socket)
        if not answer:
            raise OSError("the server is gone")
        return int(json.loads(answer))

    def run(self, command: Sequence[str], **options: Any) -> Program:
        return Program(command, server=self, **options)

    def start(self, code: str, *arguments: str, environ: Mapping[str, str]) -> Forked:
        """Run a program's text as `python -c` does."""
        return Forked(self, code, *arguments, environ=environ)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(HANGS)


class Forked(Program):
    """A program that goes on even if nobody reads its output."""

    def __init__(self, server: ForkServer, code: str, *arguments: str, environ: Mapping[str, str]):
        self._files = out, err = os.memfd_create("out"), os.memfd_create("err")
        for number in self._files:
            weakref.finalize(self, os.close, number)
        super().__init__(
            [sys.executable, "-c", code, *arguments],
            server=server,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environ,
        )

    def communicate(self, input: None = None, timeout: float | None = HANGS) -> tuple[str, str]:
        self.wait(timeout)
        return self._read(0), self._read(1)

    def communicate_so_far(self) -> str:
        """What it has printed until now."""
        return self._read(0)

    def _read(self, number: int) -> str:
        return os.pread(self._files[number], os.fstat(self._files[number]).st_size, 0).decode()

    def kill(self) -> None:
        super().kill()
        self.wait()


_shared: ForkServer | None = None


def shared_server() -> ForkServer:
    """One for all tests of this process."""
    global _shared
    if _shared is None:
        _shared = ForkServer()
        atexit.register(_shared.close)
    return _shared


def _environment() -> dict[str, str]:
    from spmd.mesh.rank.environment import environment

    return environment(os.environ)


# -- between the two --------------------------------------------------------------------------------------------------


def _send(channel: socket.socket, text: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    channel.sendmsg([_LENGTH.pack(len(text))], rights)
    channel.sendall(text)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it; empty once the other end is closed."""
    head, fds, _, _ = socket.recv_fds(channel, _LENGTH.size, 3)
    if not head:
        return b"", []
    (length,), text = _LENGTH.unpack(head), b""
    while len(text) < length:
        if not (more := channel.recv(length - len(text))):
            return b"", fds
        text += more
    return text, fds


# -- in the server ----------------------------------------------------------------------------------------------------


def _served(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a program for each request. Returns the request in a fork, and None in the server at its end."""
    gc.collect()
    gc.freeze()  # pages of long-lived objects stay shared with the programs
    running: set[int] = set()
    while True:
        text, fds = _receive(channel)
        if not text:
            break
        request = json.loads(text)
        if "status" in request:
            _, answer = os.waitpid(request["status"], 0)
            running.discard(request["status"])
        else:
            begun, begins = os.pipe()
            answer = os.fork()
            if answer == 0:
                channel.close()
                if request["session"]:
                    os.setsid()
                os.close(begins)  # who asked may signal the new session
                os.close(begun)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                    os.close(fd)
                return request
            running.add(answer)
            os.close(begins)
            os.read(begun, 1)
            for fd in (begun, *fds):
                os.close(fd)
        _send(channel, str(answer).encode(), [])
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _become(request: dict[str, Any], channel: socket.socket) -> None:
    """Run the program as a new Python would."""
    from spmd.mesh.driver import spawn
    from spmd.mesh.hosts.process import ForkedZygote
    from spmd.mesh.launch import environments

    os.chdir(request["cwd"])
    environ = request["environ"]
    if environ.pop("FORKED_CHILDREN", None):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            if (child := _served(theirs)) is None:
                os._exit(0)
            return _become(child, theirs)
        theirs.close()
        _fork_pythons(ForkServer(ours))
    os.environ.clear()
    os.environ.update(environ)
    if "SPMD_VERIFY" in environ:
        read_environment_again()
    sys.path[0:1] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not any(launched for _, launched, _ in environments.describe()):
        given = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # of which ranks read
        spawn.use(ForkedZygote(channel))
        os.dup2(given, 0)
        os.close(given)
    raw = "PYTHONUNBUFFERED" in environ
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    out, err = (open(number, "wb", 0 if raw else -1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, line_buffering=out.isatty(), write_through=raw)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(err, errors="backslashreplace", line_buffering=True)  # type: ignore[misc]
    arguments = list(request["arguments"])
    while arguments[0] in ("-W", "-u"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    kind, sys.argv = arguments[0], arguments
    try:
        if kind == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            return None
        if kind == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[2:]]
            code = compile(arguments[1], "<string>", "exec")
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            main.__file__ = kind
            code = compile(Path(kind).read_bytes(), kind, "exec")
        exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _fork_pythons(server: ForkServer) -> None:
    """Let this program start Python, and hosts of its meshes, by forks; with options of Python it starts it anew."""
    new = subprocess.Popen

    def popen(args: Any, **options: Any) -> subprocess.Popen:
        python = list(map(str, args)) if not isinstance(args, str) and args[0] == sys.executable else []
        python[1:] = itertools.dropwhile(lambda option: option.startswith("-X"), python[1:])  # as of a kernel
        forked = python[1:] and (python[1] in ("-c", "-m", "-u", "-W") or not python[1].startswith("-"))
        return server.run(python, **options) if forked else new(args, **options)

    local_hosts(server.run).__enter__()
    subprocess.Popen = popen  # type: ignore[misc,assignment]


_end: Callable[[], None] | None = None  # of a program: what it does in the end


def _quickly() -> None:
    """The last function that Python calls at exit: end before Python tears down all modules.

    The teardown writes to every page shared with the server: half a second of work, while most programs take a tenth.
    By now threads have ended and other exit functions have run, and what the program itself holds is freed as usual.
    """
    if _end is None or "ENDS_WHOLLY" in os.environ:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    sys.modules.pop("__main__", None)
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return  # let Python report it
    _end()


def _interrupted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    global _end
    atexit.register(_quickly)  # before what is imported registers anything
    for name in (*preloaded(), *sys.argv[2:]):
        importlib.import_module(name)
    channel = socket.socket(fileno=int(sys.argv[1]))
    request = _served(channel)
    if request is None:
        return
    status = 0
    try:
        _become(request, channel)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        status = None
        raise
    finally:
        _end = _interrupted if status is None else functools.partial(os._exit, status & 0xFF)


if __name__ == "__main__":
    main()
