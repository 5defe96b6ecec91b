"""Values of ranks that were replaced, from ranks that hold the same: where nothing outlives a rank, as on GPUs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from ...kernels.errors import PeerLost, message
from .. import protocol, wire
from ..array import Meta
from ..protocol import Spans
from ..spec import Layout
from .pending import Task


class Session(Protocol):
    """What sends tasks to the ranks and waits for them: the driver's session."""

    layout: Layout
    lock: threading.RLock
    node: Any

    @property
    def mesh(self) -> Any: ...
    def describe(self) -> str: ...
    def dumps(self, obj: Any) -> wire.Packet: ...
    def wait(self, task: Task) -> Task: ...
    def submit(
        self,
        make: Callable[[int, int, Spans, tuple[str, ...]], protocol.Task],
        content: Callable[[], wire.Packet] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        needs: Callable[[], Iterable[tuple[Any, int]]] = tuple,
        name: str | None = None,
        holds: Any = None,
        values: Any = None,
    ) -> Task: ...


def copy_from_replicas(session: Session, call: int, about: Meta, index: int, missing: Collection[int]) -> None:
    """Give a value of a call to the ranks that lack it."""
    fetch = functools.partial(protocol.FetchValue, call=call, index=index)
    store = functools.partial(protocol.StoreValue, call=call, index=index, spec=about.spec)
    for rank in sorted(missing):
        donors = [replica for replica in session.layout.replicas(about.spec, rank) if replica not in missing]
        if not donors:
            raise PeerLost(
                message(
                    f"a value on this mesh was lost with rank {rank}, which alone held a shard of it",
                    got=f"{about.spec}, shape {tuple(about.shape)}",
                    where=session.describe(),
                    remedy="restore it from a checkpoint, or compute it again",
                ),
                rank,
            )
        shard = session.wait(session.submit(fetch, ranks=donors[:1])).values()[0]
        session.wait(session.submit(store, functools.partial(session.dumps, shard), ranks=[rank]))
