"""`breakpoint()` on a rank: Python's debugger, at whichever terminal there is.

A launched rank uses its own terminal; a driver's rank has none, and asks the driver for each line. Invariant: only the
ranks that SPMD_DEBUG_RANK names stop, and while one of them is at its prompt, no wait of the others times out.
"""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...kernels.errors import MeshError
from .session import RankSession

_OURS = "spmd"
_TASKS = f"{_OURS}.mesh.rank.tasks"  # a driver's rank calls the program's code from here


def stops(rank: int) -> bool:
    """Whether a breakpoint stops this rank: SPMD_DEBUG_RANK is a number, several with commas, or `all`; 0 if not set.

    Raises:
        MeshError: SPMD_DEBUG_RANK is none of these.
    """
    chosen = os.environ.get("SPMD_DEBUG_RANK", "0") or "0"
    if chosen == "all":
        return True
    try:
        return rank in [int(one) for one in chosen.split(",")]
    except ValueError:
        raise MeshError(
            "SPMD_DEBUG_RANK is no rank", got=repr(chosen), expected="a number, several with commas, or all"
        ) from None


class Dialogue:
    """For a rank without a terminal: the file that its debugger writes to and reads from.

    Args:
        ask: takes what was written and gives the next line; empty at the end of the input.
    """

    def __init__(self, ask: Callable[[str], str]):
        self._ask, self._written = ask, ""

    def write(self, text: str) -> int:
        self._written += text
        return len(text)

    def flush(self) -> None:
        """Does nothing: what was written is sent with the next question."""

    def readline(self) -> str:
        return self._ask(self.rest())

    def rest(self) -> str:
        """What was written since the last question."""
        text, self._written = self._written, ""
        return text


def debug_through(session: RankSession, ask: Callable[[str], str] | None = None) -> None:
    """Make this process's breakpoints, and `pdb`, work on a rank.

    Args:
        ask: see `Dialogue`; None: this process has a terminal of its own.
    """
    passed: list[bool] = []

    class RankPdb(pdb.Pdb):
        def __init__(self, *args: Any, **options: Any):
            self._dialogue = None if ask is None else Dialogue(ask)
            if self._dialogue is not None:
                options = {"stdin": self._dialogue, "stdout": self._dialogue, **options, "nosigint": True}
                options.pop("mode", None)  # newer ones ask at the terminal before they quit
            super().__init__(*args, **{"skip": [f"{_OURS}.*"], **options})
            self.prompt = f"(Pdb rank {session.rank}) "

        def set_trace(self, frame: FrameType | None = None, *args: Any, **options: Any) -> None:
            if stops(session.rank):
                super().set_trace(sys._getframe(1) if frame is None else frame, *args, **options)
            elif not passed:
                passed.append(True)
                print("passed a breakpoint by: SPMD_DEBUG_RANK names the ranks that stop (0 if unset)", file=sys.stderr)

        def interaction(self, *args: Any, **options: Any) -> None:
            session.watch.set_in_debugger(True)
            try:
                super().interaction(*args, **options)
            finally:
                session.watch.set_in_debugger(False)
            if self._dialogue is not None:
                print(self._dialogue.rest(), end="")

        def user_return(self, frame: FrameType, return_value: Any) -> None:
            super().user_return(frame, return_value)
            if ask is not None and _is_outermost(frame):
                self.set_continue()  # beyond it there is only the library to step through

        def _cmdloop(self) -> None:
            if ask is None:
                super()._cmdloop()
            else:
                self.cmdloop()  # pdb's `_cmdloop` would catch Ctrl-C, which comes from the driver and ends the call

        def do_EOF(self, arg: str) -> bool | None:
            raise MeshError(
                "the debugger at a breakpoint came to the end of its input",
                where=session.where(),
                remedy="run the program in a terminal or a notebook, or with PYTHONBREAKPOINT=0",
            )

    pdb.Pdb = RankPdb  # type: ignore[misc]  # what breakpoint(), set_trace() and post_mortem() make


def _is_outermost(frame: FrameType) -> bool:
    """Whether this is the outermost frame of the program's code, which the library called for a task."""
    above = frame.f_back
    while above is not None:
        module = above.f_globals.get("__name__", "")
        if module == _TASKS:
            return True
        if module.partition(".")[0] != _OURS:
            return False
        above = above.f_back
    return False
