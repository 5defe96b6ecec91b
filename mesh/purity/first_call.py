"""The first call of a signature: what its body changes beside its results is refused, or warned of.

Made before the body runs, and asked afterwards. Invariant: looks only at what a later call would not repeat, so that
calls after the first need none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..region import Region
from .captured import Captured
from .captured_state import CapturedState
from .entries import GivenObjects, warn_of_changed
from .updates import check_updates


class FirstCall:
    """How things were before the body ran.

    Args:
        name, body: of the program.
        local, treedef: this rank's leaves of (args, kwargs), and their structure.
        whole: types that are not looked into.
        describe: what a message calls a path into (args, kwargs).
        copied: a driver has sent the body and its arguments, so that changes to their objects stay on the rank.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        local: list[Any],
        treedef: Any,
        whole: tuple[type, ...],
        describe: Callable[[str], str],
        *,
        copied: bool,
    ):
        self._its, self._local, self._treedef, self._describe = (name, body), local, treedef, describe
        self._captured_state = CapturedState([(body, "self")], whole) if copied else None
        self._given_objects = GivenObjects(local, treedef, whole, describe) if copied else None

    def check(self, region: Region, captured: Captured, arguments: tuple[Any, Any], result: Any) -> None:
        """Refuse, or warn of, what the body did.

        Args:
            region: in which it ran.
            captured: what it refers to.
            arguments: what it was called with.
        """
        (name, body), where = self._its, region.session.where()
        check_updates(region.updates or (), region.differentiated, self._local, result, name, where)
        captured.check(name, where)
        if self._captured_state is not None:
            self._captured_state.check(name, body)
        if self._given_objects is not None:
            self._given_objects.check(name, body, result)
        warn_of_changed(name, body, self._local, self._treedef, arguments, result, self._describe)
