"""Progress bars of ranks, merged: one tqdm bar for the whole mesh, in the form that suits the driver.

Every rank of an SPMD program draws the same bar. A reader wants it once, and wants it to say how far the mesh is, which
is as far as its slowest rank. So the ranks report their bars instead of drawing them (`report_bars`), and bars that are
alike become one, drawn by `tqdm.auto`: a widget in a notebook, a line on a terminal.
Invariant: a rank's bar is part of exactly one bar that is shown; a shown bar that rank 0 has no part in says whose it
is. A bar that begins long after such a bar has ended on the other ranks is shown as one of its own.

Only one thread at a time may call these functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .output import rank_label

_LOOKS = ("total", "leave", "unit", "unit_scale", "unit_divisor", "initial", "colour", "bar_format")

WINDOW = 0.1  # seconds for which a bar waits for rank 0 to begin it, too
LINGER = 1.0  # seconds for which a bar that has ended waits for ranks that have not begun it


@dataclasses.dataclass(frozen=True, slots=True)
class BarState:
    """A rank's report of one of its bars.

    Attributes:
        number: counts the bars of a task on its rank, from 1 on; fixed while the bar lives.
        name: the description that it began with.
        n, desc, postfix: how far it is, and the text before and after it.
        options: tqdm's options for its looks: total, unit, leave, colour and the like.
        closed: whether it has ended.
    """

    number: int
    name: str
    n: float
    desc: str
    postfix: str
    options: tuple[tuple[str, Any], ...]
    closed: bool = False


class _Shown:
    """One bar on the screen, and the ranks' bars that it stands for."""

    def __init__(self, task: Any, due: float):
        self.task, self.due = task, due
        self.states: dict[int, BarState] = {}
        self.bar: Any = None
        self._seen: tuple[Any, ...] = ()

    @property
    def closed(self) -> bool:
        return all(state.closed for state in self.states.values())

    def draw(self, make: Callable[..., Any], label: Callable[[Sequence[int]], str]) -> None:
        slowest = min(self.states.values(), key=lambda state: state.n)
        first = self.states[min(self.states)]
        desc = first.desc if 0 in self.states else f"{label(sorted(self.states))} {first.desc}"
        seen = (slowest.n, desc, first.postfix)
        if self.bar is None:
            self.bar = make(**dict(first.options), desc=desc.removesuffix(": "))
        elif seen == self._seen:
            return
        self._seen = seen
        self.bar.n, self.bar.postfix = slowest.n, first.postfix or None
        self.bar.set_description_str(desc)


class Bars:
    """The bars of one mesh.

    Args:
        make: makes a bar, as `tqdm` does; None is `tqdm.auto.tqdm`.
        clock: the time in seconds.
        label: takes ranks in ascending order, and gives the text before a bar that rank 0 has no part in.

    Attributes:
        latest: (task, rank) -> the number of its newest bar, for tasks that are not over; empty if there is no bar.
    """

    def __init__(
        self,
        make: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        label: Callable[[Sequence[int]], str] = rank_label,
    ):
        self._make, self._clock, self._label = make, clock, label
        self._shown: dict[tuple[Any, ...], _Shown] = {}
        self.latest: dict[tuple[Any, int], int] = {}

    def report(self, rank: int, task: Any, state: BarState) -> None:
        """Take a rank's report of a bar that it made in a task."""
        key = (task, state.number, state.name, dict(state.options).get("total"))
        shown = self._shown.get(key)
        if shown is None:
            shown = self._shown[key] = _Shown(task, self._clock() + WINDOW)
        shown.states[rank] = state
        self.latest[task, rank] = max(state.number, self.latest.get((task, rank), 0))
        if 0 in shown.states or shown.bar is not None:
            self._draw(shown)
        if shown.closed:
            shown.due = self._clock() + LINGER
        self.tick()

    def tick(self) -> float | None:
        """Show due bars that rank 0 does not have, and close ended ones; gives the seconds until more is due."""
        now, waits = self._clock(), []
        for key, shown in list(self._shown.items()):
            if shown.closed:
                others = (rank for rank in shown.task.ranks if rank not in shown.states)
                if shown.due <= now or all(self.latest.get((shown.task, rank), 0) >= key[1] for rank in others):
                    self._close(key)
                    continue
            elif shown.bar is not None:
                continue
            elif shown.due <= now:
                self._draw(shown)
                continue
            waits.append(shown.due - now)
        return min(waits, default=None)

    def end(self, task: Any) -> None:
        """End a task's bars: they stay as they are."""
        for key in [key for key, shown in self._shown.items() if shown.task is task]:
            self._close(key)
        for rank in task.ranks:
            self.latest.pop((task, rank), None)

    @contextlib.contextmanager
    def aside(self, file: Any) -> Iterator[None]:
        """Take the bars off a stream while something else is written to it."""
        if not any(shown.bar is not None for shown in self._shown.values()):
            yield
            return
        with _tqdm().external_write_mode(file=file):
            yield

    def _close(self, key: tuple[Any, ...]) -> None:
        shown = self._shown.pop(key)
        self._draw(shown)
        shown.task.context.run(shown.bar.close)

    def _draw(self, shown: _Shown) -> None:
        # In the caller's context, so that a notebook's kernel sends a widget's messages to the cell of the call.
        shown.task.context.run(shown.draw, self._make or _tqdm(), self._label)


@functools.cache
def _tqdm() -> Any:
    """tqdm's class of bars for this process, with its own lock, since Ctrl-C may leave the user's bars' lock held."""
    from tqdm.auto import tqdm

    kind = type("tqdm", (tqdm,), {"monitor_interval": 0, "__module__": __name__})
    kind.set_lock(threading.RLock())  # type: ignore[attr-defined]
    return kind


def report_bars(current_task: Callable[[], int], send: Callable[[int, BarState], None]) -> None:
    """From now on, report this process's tqdm bars, except those that write to a file of the program.

    This changes tqdm's class itself, wherever a program imports it from.

    Args:
        current_task: gives the number of the running task.
        send: takes the number of the task in which a bar was made, and the bar's state.
    """
    from tqdm import std

    # A lock for this rank only, and no thread that redraws bars which have come to a halt.
    std.tqdm.set_lock(threading.RLock())
    std.tqdm.monitor_interval = 0
    numbers: dict[int, Any] = {}
    display, clear, close = std.tqdm.display, std.tqdm.clear, std.tqdm.close

    def reported(bar: Any) -> bool:
        return getattr(bar.fp, "_wrapped", bar.fp) in (sys.stdout, sys.stderr)

    def tell(bar: Any, *, closed: bool = False) -> None:
        if not hasattr(bar, "spmd_bar"):
            task = current_task()
            for old in [old for old in numbers if old != task]:
                del numbers[old]
            number = next(numbers.setdefault(task, itertools.count(1)))
            bar.spmd_bar = (task, number, bar.desc, tuple((name, getattr(bar, name)) for name in _LOOKS))
        task, number, name, looks = bar.spmd_bar
        send(task, BarState(number, name, bar.n, bar.desc, bar.postfix or "", looks, closed))

    def display_here(self: Any, msg: str | None = None, pos: int | None = None) -> Any:
        return tell(self) if reported(self) else display(self, msg, pos)

    def clear_here(self: Any, nolock: bool = False) -> Any:
        return None if self.disable or reported(self) else clear(self, nolock)

    def close_here(self: Any) -> Any:
        if getattr(self, "disable", True) or not reported(self):
            return close(self)
        self.disable = True
        self._decr_instances(self)
        return tell(self, closed=True)

    std.tqdm.display, std.tqdm.clear, std.tqdm.close = display_here, clear_here, close_here
    # A function from a notebook may use the notebook's class, which can't be drawn here.
    form: Any = types.ModuleType("tqdm.notebook")
    form.tqdm = form.tqdm_notebook = std.tqdm
    form.trange = form.tnrange = std.trange
    sys.modules["tqdm.notebook"] = form
