"""What tests do to the library's internals, by name: the one helper that knows private modules.

Tests that otherwise use the public interface only take from here the few things that it does not offer.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor


def pretend_host(name: str) -> None:
    """This launched rank says that it is on that host."""
    from spmd.mesh.launch import joining

    joining._host_identity = lambda: name


def no_own_folders() -> None:
    """This launched rank finds no directory that is the user's alone."""
    from spmd.mesh.launch import secret

    secret.own_folders = lambda **_: []


def leave_numbers_on_the_gpu() -> None:
    """This rank does not send single numbers with its answers, as if they were on a GPU."""
    from spmd.mesh import results

    results.prints_of_scalars = lambda *_: b""


def host_popen(run: Callable[..., Any]) -> Callable[..., Any]:
    """Like `subprocess.Popen`, but starts the Python process of a pretended host with `run`.

    Its command is Python's behind `env` with variables, or that behind a shell that executes it.
    """

    def popen(command: Sequence[str], **options: Any) -> Any:
        words = [one for one in command if one != "-B"]  # which changes nothing
        begin = words.index(sys.executable) if sys.executable in words else 0
        before, python = words[:begin], words[begin:]
        variables = [one for one in before[1:] if "=" in one]
        alone = before[:1] == ["env"] and before[1 + len(variables) :][:2] in ([], ["sh", "-c"])
        forked = alone and python[1] in ("-c", "-m")  # a fork can have no other options
        assert forked or command[0] != "env" or sys.warnoptions, f"this is no fork, and takes seconds: {command}"
        if not forked:
            return subprocess.Popen(command, **options)
        environ = dict(os.environ if options.get("env") is None else options["env"])
        return run(python, **{**options, "env": environ | dict(one.split("=", 1) for one in variables)})

    return popen


def local_hosts(run: Callable[..., Any]) -> contextlib.AbstractContextManager:
    """Start the Python processes of pretended hosts with `run`, which is called like `subprocess.Popen`."""
    from spmd.mesh.hosts import launchers

    names = {**vars(subprocess), "Popen": host_popen(run)}
    return mock.patch.object(launchers, "subprocess", types.SimpleNamespace(**names))


def preloaded() -> tuple[str, ...]:
    """The modules that a mesh's ranks have imported before they are forked."""
    from spmd.mesh.rank.zygote import PRELOADED

    return PRELOADED


def read_environment_again() -> None:
    """In a fork that has other variables than the process that imported the library: those that are read only then."""
    from spmd import _trace

    importlib.reload(_trace)


@contextlib.contextmanager
def without_shared_memory() -> Iterator[None]:
    """Pretend that no arena can be made here."""
    from spmd.kernels.shm.arena import Arena

    def refuse(*_: object) -> None:
        raise OSError("no shared memory here")

    real, Arena.__init__ = Arena.__init__, refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arena.__init__ = real  # type: ignore[method-assign]


def mpi_chunks(nbytes: int) -> contextlib.AbstractContextManager:
    """Send everything that goes through MPI in pieces of so many bytes."""
    from spmd.kernels.network import mpi

    return mock.patch.object(mpi, "_CHUNK", nbytes)


def change_partial_sums(push: Callable[[Any, int, Tensor], None]) -> None:
    """In this process, have `push` add a shard's value to a rank's sums over virtual shards."""
    from spmd.transforms.exact import tree_sums

    tree_sums.Partials.push = push  # type: ignore[method-assign]


def add_in_rank_order() -> None:
    """In this process add as one would without the tree: a rank's shards one by one, then the ranks one by one."""
    from spmd.transforms.exact import tree_sums

    def push(self: Any, shard: int, value: Tensor) -> None:
        if self.nodes:
            ((node, total),) = self.nodes
            self.nodes = [(node, total + value)]
        else:
            self.nodes = [((0, shard), value)]

    def one_by_one(nodes: Any) -> Tensor:
        first, *others = (value for _, value in sorted(nodes.items()))
        return sum(others, first)

    change_partial_sums(push)
    tree_sums.combine = one_by_one
    tree_sums.maximal_nodes = lambda shards: [(0, min(shards))] if shards else []


def share_a_gpu(monkeypatch: Any) -> str | None:
    """Let several ranks share one GPU; returns why that isn't possible here, or None."""
    from spmd.kernels.cuda import nccl_library

    for name, text in nccl_library.SHARED_GPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, text)
    library = nccl_library.load()
    return None if nccl_library.may_share_gpu(library) else f"several ranks on it need NCCL 2.30: {library.describe()}"


def pretend_nccl(monkeypatch: Any, version: int, path: str, cupy: str) -> None:
    """Pretend that a driver and an NCCL of this version are installed."""
    from spmd.kernels.cuda import nccl_library

    library = nccl_library.Library(None, version, path, cupy)
    monkeypatch.setattr(nccl_library, "check_driver", lambda: None)
    monkeypatch.setattr(nccl_library, "load", lambda: library)


def compare_late_output(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Recognise output that all ranks show as the same, however late a rank shows it; in meshes made from now on.

    A line or a bar of one rank alone is then shown at the end of the call.

    Args:
        set_attribute: `monkeypatch.setattr`, or `setattr` to keep it so to the end of the process.
    """
    from patience import HANGS

    from spmd.mesh.display import bars
    from spmd.mesh.driver import receiving

    set_attribute(receiving, "Collator", functools.partial(receiving.Collator, window=HANGS))
    set_attribute(bars, "WINDOW", HANGS)
    set_attribute(bars, "LINGER", HANGS)


def wait_for_stacks() -> None:
    """In this process: a rank that is asked for its stacks is given longer to begin to write them."""
    from spmd.mesh.display import stacks

    stacks._ANSWER_SECONDS = 5.0


def say_what_closing_waits_for_after(monkeypatch: Any, seconds: float) -> None:
    """Who closes a mesh is told so soon what that waits for."""
    from spmd.mesh.driver import open_sessions

    monkeypatch.setattr(open_sessions, "SAY_SECONDS", seconds)


def keep_the_turn(seconds: float) -> None:
    """In this process: a rank's debugger has the terminal until it has not asked for so long; a moment may be short."""
    from spmd.mesh.driver import debugging

    debugging.MOMENT_SECONDS = seconds


def let_time_fly(file: str, timeout: float) -> None:
    """In this process: while a file exists, waits for other ranks find an eighth of their timeout gone at each look.

    The file is removed once several timeouts have passed so.
    """
    import os
    import time

    from spmd.kernels import waiting
    from spmd.kernels.shm import board

    ahead, left = 0.0, 40

    def monotonic() -> float:
        nonlocal ahead, left
        if left and os.path.exists(file):
            ahead, left = ahead + timeout / 8, left - 1
            if not left:
                os.unlink(file)
        return time.monotonic() + ahead

    clock = types.SimpleNamespace(**{**vars(time), "monotonic": monotonic})
    waiting.time = board.time = clock  # type: ignore[attr-defined]


def calls_end_after_ctrl_c() -> contextlib.AbstractContextManager:
    """Within the block, Ctrl-C waits for the calls under way, however late they end, before it interrupts ranks."""
    from patience import HANGS

    from spmd.mesh.driver import recovery

    return mock.patch.object(recovery, "INTERRUPT_SECONDS", HANGS)


_importing: dict[tuple[str, ...], Any] = {}  # modules -> the zygote that has imported them
imported: tuple[str, ...] = ()  # by the ranks of meshes made now


@contextlib.contextmanager
def ranks_import(*modules: str) -> Iterator[None]:
    """Meshes made meanwhile get ranks that have imported these modules: once for all, since it takes each seconds."""
    from spmd.mesh.driver import spawn

    if modules not in _importing or not _importing[modules].alive:
        boot = spawn._BOOT.replace("import main;", f"import main; import {', '.join(modules)};", 1)
        with mock.patch.object(spawn, "_BOOT", boot):
            _importing[modules] = spawn.Zygote()
    with mock.patch.object(spawn, "_zygote", _importing[modules]), mock.patch.dict(globals(), imported=modules):
        yield


def close_all_meshes() -> None:
    """As at this process's exit."""
    from spmd.mesh.driver.open_sessions import close_all

    close_all()
    for one in _importing.values():
        one.close()


def forget_runs() -> None:
    """No mesh resumes from what was restored, and the open ones, which tests share, count as having run no step."""
    from spmd.checkpoint import fingerprint
    from spmd.mesh.driver import open_sessions

    fingerprint.unplaced.restored.clear()
    for session in open_sessions._open:
        run = session.run_state  # type: ignore[attr-defined]
        run.functions, run.settings, run.resumed, run.saved = {}, {}, None, None


def doctor_waits(seconds: float) -> None:
    """In this process `spmd doctor` gives each of its tests so long."""
    from spmd.cli import doctor

    doctor.SECONDS = seconds


def messages_of_call(comm: Any) -> list[Any]:
    """The messages of the current call of an @spmd function that a communicator still knows: the list itself."""
    return comm._operations.of_call


def laid_out_on_a_host(tensor: Tensor) -> bytearray:
    """What a host writes into its arena of a tensor that is put on its ranks."""
    from spmd.mesh import protocol, wire
    from spmd.mesh.hosts.process import Host

    packet, memory, new = wire.dumps(tensor), bytearray(tensor.nbytes), types.SimpleNamespace
    packet.head = protocol.encode(protocol.PutValues(1, 0, (), (), out=2, specs=(), given=None))
    given = new(trim=lambda: None, take=lambda size: (0, 0), memory=lambda result, size: memoryview(memory))
    host: Any = new(_arena=new(given=given), _given={})
    Host._laid_out(host, packet)
    return memory


def lose_value(array: Any, rank: int) -> None:
    """A rank lacks a value, and the driver knows, as after a move to a rank that was replaced has failed."""
    from spmd.mesh import protocol

    session, source, index = array.mesh.driver, array._source, array._index
    source.settle()
    session.tell(protocol.Free((source.number, index, index + 1), ()), ranks=[rank])
    source.missing.setdefault(index, set()).add(rank)


def values_held() -> int:
    """On a driver's rank: how many values it holds."""
    from spmd.mesh.rank.state import Values

    (values,) = [obj for obj in gc.get_objects() if issubclass(type(obj), Values)]
    return len(values)


def keep_no_free_results() -> None:
    """On a rank: memory for results of reductions that was not used lately goes back to the system, however little."""
    from spmd.kernels.shm import blocks

    blocks.KEPT_FREE_BYTES = 0


def arena_bytes(mesh: Any) -> int:
    """The memory that a mesh's shared memory takes."""
    import os

    return os.fstat(mesh.driver.ranks._arena_fd).st_blocks * 512


def zygote_of(mesh: Any) -> int:
    """The process that a mesh's ranks are forked from."""
    return mesh.driver.ranks.all[0]._zygote._process.pid


def exits_of_zygote(mesh: Any) -> dict[int, int]:
    """How processes that were forked from it have ended, by number, as far as the driver has been told."""
    return mesh.driver.ranks.all[0]._zygote.exits


def environment_of_zygote() -> dict[str, str]:
    """The environment that such a process would have, were it started now."""
    from spmd.mesh.driver import spawn

    popen = mock.Mock(side_effect=InterruptedError)
    names = {**vars(subprocess), "Popen": popen}
    with mock.patch.object(spawn, "subprocess", types.SimpleNamespace(**names)), contextlib.suppress(InterruptedError):
        spawn.Zygote()
    return popen.call_args.kwargs["env"]


def zygote_that_stands_by(mesh: Any) -> int:
    """The process that will take the zygote's place."""
    return mesh.driver.ranks.all[0]._zygote._next._process.pid


def newcomers_of(mesh: Any) -> list[int]:
    """The processes of a resize under way that have been started so far."""
    resizing = mesh.driver.resizing
    ranks = getattr(resizing._newcomers, "ranks", None) if resizing is not None else None
    return [] if ranks is None else [rank.pid for rank in ranks.all]


def newcomers_class() -> type:
    """What starts the new ranks of a resize, and ends them."""
    from spmd.mesh.resizing.newcomers import Newcomers

    return Newcomers


def newcomers_bytes(mesh: Any) -> int | None:
    """The shared memory that the ranks of a resize under way have at hand, once they are ready."""
    import os

    resizing = mesh.driver.resizing
    ready = resizing._prepared.done()
    return os.fstat(resizing._newcomers.ranks._arena_fd).st_blocks * 512 if ready else None


def pretend_memory_is_short(monkeypatch: Any) -> None:
    """So that new ranks of a resize reserve no memory before they need it."""
    from spmd.mesh.resizing import newcomers

    monkeypatch.setattr(newcomers, "available_bytes", lambda: 0)


def arenas_mapped() -> int:
    """The meshes' arenas that this process still holds."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return len({line.split()[4] for line in maps if "spmd-arena" in line})


def stalls_at_once(monkeypatch: Any, is_alone: Callable[[], bool]) -> list[Any]:
    """What two ranks publish while they wait, without a minimum of time; both have as many threads as one is told."""
    from spmd.kernels.shm import stalls

    monkeypatch.setattr(stalls, "_SECONDS", 0.0)
    monkeypatch.setattr(stalls, "is_alone", is_alone)
    words = memoryview(array.array("Q", [0, 1, 1] * 2 + [0, 0]))
    return [stalls.Stalls(words, [(0, 1, 2, 6), (3, 4, 5, 7)], rank) for rank in range(2)]


def gathered(msg: list[tuple[str, int, int]], due: dict[int, list[int]]) -> list[tuple[str, tuple[int, ...]]]:
    """What the process of a host sends its driver when its ranks send these messages.

    Args:
        msg: (the message's class, the task, the rank), one after another; ("lost", 0, rank) is that rank's end.
        due: the ranks that were given each task.

    Returns:
        (class and task, ranks) of each message; those after ("held", ()) would wait up to `MOMENT_SECONDS`.
    """
    from spmd.mesh import protocol, wire
    from spmd.mesh.hosts.coded import unframed
    from spmd.mesh.hosts.gathering import Gathering

    sent: list[tuple[str, tuple[int, ...]]] = []

    def send(ranks: tuple[int, ...], content: Any) -> None:
        message = protocol.decode(unframed(b"".join(content)).head)
        sent.append((f"{type(message).__name__} {message.task}", ranks))

    gathering = Gathering(send)
    for task, ranks in due.items():
        message = protocol.PassThrough(task, task, (), ())
        gathering.expect(wire.Packet(b"", head=protocol.encode(message)), ranks)
    for kind, task, rank in msg:
        if kind == "lost":
            gathering.lose(rank)
        else:
            gathering.take(rank, _said_of(kind, task))
    if gathering.left() is not None:
        sent.append(("held", ()))
        gathering.flush()
        assert gathering.left() is None
    return sent


def _said_of(kind: str, task: int) -> Any:
    """The packet of a message of a rank."""
    from spmd.mesh import protocol, wire

    kinds = {
        "Answer": protocol.Answer,
        "Failed": protocol.Failed,
        "Unchanged": lambda task: protocol.Unchanged(task, b"print"),
        "Other": lambda task: protocol.Unchanged(task, b"another"),
        "Progress": lambda task: protocol.Progress(task, None),  # type: ignore[arg-type]
    }
    return wire.Packet(b"", head=protocol.encode(kinds[kind](task)))


def taken(msg: list[tuple[str, int, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """What a driver takes from hosts' messages, in order: (the message's class, the task, the ranks that sent it)."""
    from spmd.mesh import protocol
    from spmd.mesh.hosts.coded import framed
    from spmd.mesh.hosts.hearing import Inbox

    inbox: Any = Inbox()
    for kind, task, ranks in msg:
        if kind == "lost":
            inbox.bury(ranks[0])
        else:
            inbox.put("answer", ranks, b"".join(framed(_said_of(kind, task))))
    found = []
    for what, ranks, packet in inbox.take():
        message = None if packet is None else protocol.decode(packet.head)
        found.append((what if message is None else f"{type(message).__name__} {message.task}", tuple(ranks)))
    return found


def asked_of_a_lost_zygote(mesh: Any) -> tuple[str, int | None]:
    """Fork a rank from a zygote that was killed and closed, and ask for it: the error, and the answer."""
    import os
    import signal

    from patience import running, until

    from spmd.mesh.driver import spawn

    one, rank = mesh.driver.ranks.all[0]._zygote, mesh.driver.pids[0]
    os.kill(one._process.pid, signal.SIGKILL)
    assert until(lambda: not one.alive), "the zygote lives on"
    assert until(lambda: not running(rank)), "its rank lives on"
    spawn.zygote()  # another mesh finds it lost first
    try:
        one.fork(mesh.driver.ranks.request, [])
    except Exception as error:
        return type(error).__name__, one.exit_code(rank)
    return "", None


def asked_by_a_rank_that_ended() -> tuple[Any, list[int]]:
    """What the zygote reads from a rank that has ended in the middle of a request, and had an answer to read."""
    import socket

    from spmd.mesh.rank.descriptors import Exited, receive, send

    rank, zygote = socket.socketpair()
    with zygote:
        send(zygote, Exited(1, 0), [])
        rank.sendall((9).to_bytes(8, "little"))
        rank.close()
        return receive(zygote)


def at_the_switch(monkeypatch: Any, do: Callable[[list[int]], None]) -> None:
    """Call `do` with the new ranks' processes when a mesh over several hosts is about to move its values to them."""
    from spmd.mesh.resizing import newcomers

    take = newcomers.Newcomers.take

    def called(self: Any, *args: Any) -> None:
        do([rank.pid for rank in self.ranks.all])
        take(self, *args)

    monkeypatch.setattr(newcomers.Newcomers, "take", called)


def silent_hosts_are_lost_after(monkeypatch: Any, seconds: float) -> None:
    """Have patience with silent hosts for these seconds alone, but for longer than hosts are silent by themselves."""
    from spmd.mesh.hosts import protocol, rank_host

    assert seconds > 2 * protocol.PULSE_SECONDS
    monkeypatch.setattr(rank_host, "SILENT_SECONDS", seconds)


def ask_while_ranks_start(monkeypatch: Any) -> None:
    """Have another thread ask a host for its status just when the host has said which ranks it restarted."""
    import threading

    from patience import HANGS

    from spmd.mesh.hosts import protocol, rank_host

    asked = rank_host.RankHost.asked

    def asked_twice(host: Any, msg: Any) -> Any:
        answer = asked(host, msg)
        if not isinstance(msg, protocol.BeginAnew):
            return answer

        def late() -> Any:
            other = threading.Thread(target=lambda: asked(host, protocol.Ask("status"))())
            other.start()
            other.join(1.0)  # if it does not have to wait it is answered by then
            return answer()

        return late

    monkeypatch.setattr(rank_host.RankHost, "asked", asked_twice)
    monkeypatch.setattr(rank_host, "_ANSWER_SECONDS", 100 * HANGS)


@contextlib.contextmanager
def links_sent_on(mesh: Any) -> Iterator[list[int]]:
    """Count the messages that the driver sends to each host over its own link, within the block."""
    from spmd.mesh.hosts.link import Link

    links = [host.link for host in mesh.driver.ranks._hosts]
    counts, real = [0] * len(links), Link.send_encoded

    def send(self: Any, msg: bytes, content: Any) -> None:
        if self in links:
            counts[links.index(self)] += 1
        real(self, msg, content)

    Link.send_encoded = send  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Link.send_encoded = real  # type: ignore[method-assign]


def end_of_program() -> None:
    """What Python calls of checkpoints before it ends."""
    from spmd.checkpoint import background

    background._report_at_exit()


def note_what_is_told(mesh: Any, monkeypatch: Any, note: Callable[[Any, Any], None]) -> None:
    """Call `note` with each message to a driver's ranks, and its packet or None, before it is sent."""
    tell = mesh.driver.tell

    def spy(message: Any, packet: Any = None, ranks: Any = None) -> None:
        note(message, packet)
        tell(message, packet, ranks)

    monkeypatch.setattr(mesh.driver, "tell", spy)


def tell_renewals_after(monkeypatch: Any, times: int) -> None:
    """Warn of a function that is defined anew after so many calls."""
    from spmd.mesh.replication import first_calls

    monkeypatch.setattr(first_calls, "RENEWED", times)


def checks_remembered(take_gradient: Callable[[], Any], most: int) -> int:
    """In a region that takes many gradients: how many checks it remembers, where `most` are remembered."""
    from spmd.mesh import region

    with mock.patch.object(region, "_MOST_CHECKS", most):
        for _ in range(8 * most):
            take_gradient()
    return len(region.require("this").noted.looked_at)


@contextlib.contextmanager
def beside_next(what: str, call: Callable[[], object]) -> Iterator[None]:
    """In the block, another thread makes a call as soon as one of these functions has found what it looks for.

    Args:
        what: "leaves" (those of a call's arguments), or "next_run" (the number of a call of `Mesh.run`).
    """
    from spmd.mesh import run_state, trees

    owner: Any = {"leaves": trees.Structure, "next_run": run_state.RunState}[what]
    original = getattr(owner, what)

    def found(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        setattr(owner, what, original)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return result

    setattr(owner, what, found)
    try:
        yield
        assert getattr(owner, what) is original, f"{what} was not called"
    finally:
        setattr(owner, what, original)


def refuse_next_message(mesh: Any, rank: int, *, remote: bool = False) -> None:
    """Have the system refuse the next message to a rank, as it does for want of memory; `remote`: to its objects."""
    import errno
    import os

    sender = mesh.driver.node._to[rank]._sender if remote else mesh.driver.ranks.all[rank].sender

    def refused(*_: Any) -> int:
        del sender._sent
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    sender._sent = refused


def close_control_of_zygote(mesh: Any, monkeypatch: Any) -> None:
    """Nothing can be sent to the zygote of a mesh any more, or come from it."""
    import socket

    from spmd.mesh.driver import spawn

    mesh.driver.ranks.all[0]._zygote._control.shutdown(socket.SHUT_RDWR)
    monkeypatch.setattr(spawn, "_EXIT_SECONDS", 0.1)


def lose_next_reply_of_zygote(monkeypatch: Any) -> None:
    """The system has no memory to take in what a zygote says next, but to meshes that replace ranks meanwhile."""
    import errno
    import os
    import threading

    from spmd.mesh.driver import spawn

    receive = spawn.receive

    def failing(control: Any) -> Any:
        if threading.current_thread().name == "spmd-receiver":
            return receive(control)
        monkeypatch.setattr(spawn, "receive", receive)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(spawn, "receive", failing)


def interrupt_wait_for_end(mesh: Any, rank: int) -> None:
    """Ctrl-C comes while the mesh that is being closed waits for the end of a rank."""
    one = mesh.driver.ranks.all[rank]

    def interrupted(seconds: float) -> bool:
        del one.ended
        raise KeyboardInterrupt

    one.ended = interrupted


def interrupt_restore_at_once(monkeypatch: Any) -> None:
    """Ctrl-C comes as soon as `restore` has opened a checkpoint."""
    from spmd.checkpoint import read

    monkeypatch.setattr(read.Opened, "__enter__", lambda _: signal.raise_signal(signal.SIGINT))


def die_in_next_connection(pid: int) -> None:
    """A rank with this process dies while this one connects to it over Gloo."""
    import os

    from spmd.kernels.network import gloo_group

    connect = gloo_group.connect

    def broken(*args: Any) -> Any:
        gloo_group.connect = connect
        os.kill(pid, signal.SIGKILL)
        raise RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer")

    gloo_group.connect = broken


def interrupt_again_after(seconds: float) -> None:
    """How long this rank puts off an interrupt that comes at a bad moment."""
    from spmd.mesh.rank import worker

    worker.AGAIN_SECONDS = seconds
