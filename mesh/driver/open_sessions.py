"""The driver's open sessions: closed when their mesh is gone, or at exit, when what nobody has seen is shown."""

from __future__ import annotations

import atexit
import contextlib
import threading
import traceback
from typing import Protocol

from .receiving import Receiving


class Session(Protocol):
    def close(self, why: str) -> None: ...


_open: set[Session] = set()


def add(session: Session) -> None:
    if not _open:
        # After the zygote's own hook was registered, so that this runs before it.
        atexit.unregister(close_all)
        atexit.register(close_all)
    _open.add(session)


def discard(session: Session) -> None:
    _open.discard(session)


def close_quietly(session: Session) -> None:
    """Close a session whose mesh is gone, and show what nobody has seen; called wherever garbage is collected."""
    if isinstance(threading.current_thread(), Receiving):
        # That thread is needed for closing; it can't wait here.
        threading.Thread(target=close_quietly, args=(session,), daemon=True).start()
        return
    try:
        session.close("nothing refers to it any more")
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()


def close_all() -> None:
    """At exit: end every mesh that is still open, and show what nobody has seen."""
    for session in list(_open):
        try:
            session.close("the driver exited")
        except BaseException:
            traceback.print_exc()
