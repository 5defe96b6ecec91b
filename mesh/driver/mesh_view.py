"""The mesh as a type for the files that it imports, which therefore can't import it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from ..hosts.host_list import HostList
from ..rank.session import RankSession
from ..run_state import RunState
from ..spec import Layout
from .session import DriverSession


class MeshView(Protocol):
    """What these files may use of the mesh."""

    at_close: list[Future]
    hosts: HostList | None
    seed: int

    @property
    def driver(self) -> DriverSession: ...
    @property
    def is_driver(self) -> bool: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def run_state(self) -> RunState: ...
    @property
    def session(self) -> RankSession: ...
    @property
    def size(self) -> int: ...
    def check_driver(self, what: str, remedy: str) -> None: ...
    def describe(self) -> str: ...
    def set_layout(self, layout: Layout, threads: int, hosts: HostList | None) -> None: ...
    def threads_for(self, layout: Layout) -> int: ...
