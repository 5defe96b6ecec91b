"""Which calls are first calls, with all their checks: of each signature one, but not one for every change of the data.

What a function captures may change for every call, as the numbers among its arguments may. Then only some of the calls
are first calls: a program that counts its steps must not make first calls only.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from ...kernels.callsite import warn

# Of calls that differ in numbers and names alone, which may be flags, or in what their function captures, so many are
# first calls, and then those after 8, 16, 32 and so on.
FLAGS = 8
CHOICES = 16  # so many combinations may choose what a function does; if there are more, they count something
RENEWED = 200  # programs in a row of one function of the program's text; a suite of tests may make some


def enough(count: int) -> bool:
    """Whether so many first calls were made of calls that are alike that the next need not be one.

    >>> [count for count in range(20) if not enough(count)]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 16]
    """
    return count >= FLAGS and count & (count - 1) != 0


@dataclasses.dataclass(slots=True)
class Kind:
    """Calls of a function with one kind of arguments and one code, whatever the data that it captures.

    Attributes:
        first: the first one's plan, as it was shipped: ranks remember under its key what such calls have noted.
        times: how many programs of it have ended a call well.
    """

    first: Any = None
    times: int = 0


@dataclasses.dataclass(slots=True)
class Renewals:
    """How many calls in a row had a program of their own, of a function's code that others were made of before."""

    count: int = 0

    def note(self, name: str, why: Callable[[], str], *, quiet: bool) -> None:
        """Count a call, and warn if the function was defined anew, or what it captures had changed, for each of many.

        Args:
            why: says what had, if it is known.
        """
        self.count += 1
        if self.count == RENEWED and not quiet:
            warn(
                f"each of the last {RENEWED} calls of {name} was a first call, or was sent to the ranks anew, which "
                f"takes several times as long: {why() or 'it is defined anew, or what it captures changes'}",
                remedy="define it once, before the loop, pass what changes as an argument, and keep what it does not "
                "need out of the objects that it captures",
            )


# By session and code.
_renewals: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, Renewals]] = weakref.WeakKeyDictionary()


def renewals_of(session: Any, source: Any) -> Renewals:
    code = getattr(inspect.unwrap(source), "__code__", None) if callable(source) else None
    if code is None:
        return Renewals()
    return _renewals.setdefault(session, weakref.WeakKeyDictionary()).setdefault(code, Renewals())
