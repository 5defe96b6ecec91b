"""The driver's session as a type for the files that it imports, which therefore can't import it.

It leaves out parts whose types import this file: a file that needs one of these extends `Session` for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .. import protocol, wire
from ..run_state import RunState
from ..spec import Layout
from .debugging import Debugging
from .pending import Make, Pending, Task
from .ranks import Ranks


class Session(Protocol):
    """What all these files may use of the driver's session."""

    calls: Any
    changed: threading.Condition
    closed: str | None
    closing: bool
    debugging: Debugging
    layout: Layout
    lock: threading.RLock
    lasting: bool
    node: Any
    numbers: Iterator[int]
    options: dict[str, Any]
    pending: Pending
    ranks: Ranks
    regions: int
    reruns: bool
    run_state: RunState
    timeout: float

    @property
    def foreign(self) -> bool: ...
    @property
    def mesh(self) -> Any: ...
    @property
    def whole(self) -> tuple[type, ...]: ...
    def close(self, why: str) -> None: ...
    def describe(self) -> str: ...
    def dumps(self, obj: Any, *args: Any, **kwargs: Any) -> wire.Packet: ...
    def move_values(self) -> bool: ...
    def ready(self) -> None: ...
    def shut(self, why: str) -> None: ...
    def submit(self, make: Make, *args: Any, **kwargs: Any) -> Task: ...
    def tell(
        self, message: protocol.Message, packet: wire.Packet | None = None, ranks: Iterable[int] | None = None
    ) -> None: ...
    def wait(self, task: Task) -> Task: ...
