"""The driver's open sessions: closed when their mesh is gone, or at exit, showing errors that nobody has seen."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import wait

from ...kernels.errors import MeshError
from ..display import trace
from ..failure import ranks_text
from .receiving import Receiving
from .session_view import Session

SAY_SECONDS = 3.0  # after which closing says what it waits for
_AT_EXIT = "the driver exited"
_FINALIZER = weakref.finalize.__call__.__code__


_open: dict[Session, weakref.finalize] = {}  # each with what closes it when its mesh is gone


def add(session: Session) -> None:
    if not _open:
        # After the zygote's own hook was registered, so that this runs before it.
        atexit.unregister(close_all)
        atexit.register(close_all)
    _open[session] = weakref.finalize(session.mesh, close_quietly, session)
    _open[session].atexit = False
    follow(session)


def follow(session: Session) -> None:
    """Trace a session's calls and what its ranks do, if SPMD_TRACE asks for that; called again for other ranks."""
    if (writer := trace.writer()) is not None:
        hosts = session.mesh.hosts.by_rank() if session.mesh.hosts is not None else ()
        session.pending.traced = writer.follow(session.ranks.request.key, hosts)


def discard(session: Session) -> None:
    if (finalizer := _open.pop(session, None)) is not None:
        finalizer.detach()


def finish_tasks(session: Session) -> None:
    """Wait for checkpoints, then for all tasks under way, at most for the timeout in all; says so if it takes long."""
    if (mesh := session.mesh) is not None:
        wait(mesh.at_close)
    began, warned = time.monotonic(), False
    for task in list(session.pending.tasks.values()):
        session.debugging.wait(task, max(0.0, began + SAY_SECONDS - time.monotonic()))
        busy = [] if warned or task.settled.is_set() else sorted(session.pending.busy())
        if busy and session.timeout > SAY_SECONDS:
            warned = True
            print(
                f"spmd: {session.describe()} is to be closed, and waits up to {session.timeout:g} s for what "
                f"{ranks_text(busy)} {'does' if len(busy) == 1 else 'do'} (Ctrl-C: no longer)",
                file=sys.stderr,
                flush=True,
            )
        session.debugging.wait(task, max(0.0, began + session.timeout - time.monotonic()))


def close_quietly(session: Session) -> None:
    """Close a session whose mesh is gone, and show errors that nobody has seen; called by the garbage collector."""
    if session not in _open:  # it is being closed already, at exit for instance: collectors of garbage can't wait
        return
    if isinstance(threading.current_thread(), Receiving):
        # That thread is needed for closing; it can't wait here.
        threading.Thread(target=close_quietly, args=(session,), daemon=True).start()
        return
    try:
        session.close("nothing refers to it any more")
    except KeyboardInterrupt:  # Python ignores what is raised in a finalizer
        threading.Thread(target=_interrupt_again, daemon=True).start()
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _interrupt_again() -> None:
    """Send the main thread another SIGINT, once it has left the finalizer."""
    main = threading.main_thread().ident
    assert main is not None
    while any(frame.f_code is _FINALIZER for frame, _ in traceback.walk_stack(sys._current_frames()[main])):
        time.sleep(0.001)
    signal.pthread_kill(main, signal.SIGINT)


def close_all() -> None:
    """At exit, close every mesh that is still open, and show errors that nobody has seen."""
    if _open:
        _quieten_daemons()
    for session in list(_open):
        try:
            session.close(_AT_EXIT)
        except KeyboardInterrupt:
            for rest in list(_open):
                if not rest.foreign:
                    rest.shut(_AT_EXIT)
            raise
        except BaseException:
            traceback.print_exc()
            print(
                "spmd: nobody had fetched the result of this call, and the program's exit status does not show that it "
                "failed: end with mesh.close(), or use `with mesh:`, which raise its error",
                file=sys.stderr,
                flush=True,
            )


def _quieten_daemons() -> None:
    """Have daemon threads, which end with the program, print nothing of meshes that it closes while they use them."""
    show = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        is_daemon = args.thread is not None and args.thread.daemon
        if not (is_daemon and isinstance(args.exc_value, MeshError) and _AT_EXIT in str(args.exc_value)):
            show(args)

    threading.excepthook = hook
