"""tqdm on a driver's rank: its bars are reported to the driver instead of being drawn.

The class itself is changed, so that it does not matter where a program got it from. Bars that write to a file of the
program's own are left alone.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from ..display.bars import BarState

_LOOKS = ("total", "leave", "unit", "unit_scale", "unit_divisor", "initial", "colour", "bar_format")


def report_bars(current_task: Callable[[], int], send: Callable[[int, BarState], None]) -> None:
    """Have this process's tqdm bars reported from now on.

    Args:
        current_task: the number of the task that runs.
        send: takes the number of the task in which a bar was made, and the bar's state.
    """
    from tqdm import std

    # Of its own for each rank, and without the thread that redraws bars which have come to a halt.
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
    # A function from a notebook may name the notebook's form, which can't be drawn here.
    form: Any = types.ModuleType("tqdm.notebook")
    form.tqdm = form.tqdm_notebook = std.tqdm
    form.trange = form.tnrange = std.trange
    sys.modules["tqdm.notebook"] = form
