"""Pickling what a program passes to other processes: which errors are its own, and which say that it can't be sent.

Invariant: an error of naming a value (a donated one, one of another mesh), the library's own errors, those of signal
handlers and of memory reach the program as they were raised. All else is `Unsendable`, of which callers make a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...kernels.errors import SpmdError
from ...kernels.interrupts import raised_by_handler
from .. import wire


def packed(obj: Any, name_of: Callable[[Any], Any], **how: Any) -> wire.Packet:
    """Pickle an object as `wire.dumps` does; raises `Unsendable`, or the error of a value in it."""
    raised: list[BaseException] = []

    def noted(one: Any) -> Any:
        try:
            return name_of(one)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        return wire.dumps(obj, noted, **how)
    except Exception as error:
        if raised:  # which pickle may have wrapped
            raise raised[0] from raised[0].__cause__
        if isinstance(error, SpmdError | MemoryError) or raised_by_handler(error):
            raise
        raise wire.Unsendable(f"{type(error).__name__}: {error}") from None
