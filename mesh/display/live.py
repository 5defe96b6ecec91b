"""`mesh.status()` in a notebook: the table stays where it is shown, and tells what the ranks do while other cells run.

Nothing here imports IPython, see `notebook`. Invariant: the table that was shown last is the mesh's live one; the
others stay as they are.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import weakref
from typing import Any

from ...kernels.errors import SpmdError
from . import notebook, status

SECONDS = 1.0  # between two looks
_shown: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()  # mesh -> ends its live table


class LiveStatus(status.Status):
    """A `Status` that goes on where a notebook shows it."""

    mesh: Any = None  # a reference to it

    def _ipython_display_(self) -> None:
        mesh = None if self.mesh is None else self.mesh()
        show = sys.modules["IPython"].display.display
        if mesh is None or mesh.closed:
            show(_drawn(self), raw=True)
            return
        handle = show(_drawn(self), raw=True, display_id=True)
        if (before := _shown.get(mesh)) is not None:
            before.set()
        ended = _shown[mesh] = threading.Event()
        # In this cell's context: the kernel sends what the thread shows as this cell's.
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(_follow, self.mesh, handle, ended), name="spmd-status", daemon=True).start()


def of_mesh(mesh: Any) -> status.Status:
    """See `Mesh.status`."""
    rows = status.of_mesh(mesh)
    if not mesh.is_driver or notebook.shell() is None:
        return rows
    found = LiveStatus(rows)
    found.mesh = weakref.ref(mesh)
    return found


def _follow(reference: Any, handle: Any, ended: threading.Event) -> None:
    """A thread's main function: until the mesh is closed, gone, or has another live table."""
    before: Any = None
    while not ended.wait(SECONDS):
        mesh = reference()
        if mesh is None or mesh.closed:
            return
        with contextlib.suppress(SpmdError):  # a host is lost, and may come again
            rows = status.of_mesh(mesh)
            if rows != before and not ended.is_set():
                handle.update(_drawn(rows), raw=True)
                before = rows
        del mesh


def _drawn(rows: status.Status) -> dict[str, str]:
    return {"text/plain": status.Status.__repr__(rows), "text/html": rows._repr_html_()}
