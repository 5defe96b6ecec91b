"""A fake of CUDA's streams and events, for machines without a GPU; CPU tensors stand in for those of GPUs.

Received data is there only once the stream that waits for it says so; `watched` finds every use of a tensor on a stream
that is not ordered after what NCCL did to it. `replay` runs what several ranks put on their streams as GPUs do, where a
stream that waits holds up everything that it was given later, and finds deadlocks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CURRENT, SIDE = 0x51, 0x5D


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The memory of a tensor: address and end."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Coming:
    """Data to be received: when asked whether it has arrived, takes it."""

    def __init__(self, finish: Callable[[], bool]):
        self._finish, self._turn, self.over = finish, threading.Lock(), False

    def __call__(self) -> bool:
        if not self.over:
            with self._turn, _disable_current_modes():  # what NCCL does itself is not watched
                self.over = self.over or self._finish()
        return self.over


class Event:
    """A point in a stream: `past` has the launches before it, `coming` the data to be received among them."""

    def __init__(self, streams: Streams, number: int, past: frozenset[int], coming: tuple[Coming, ...]):
        self._streams, self.number, self.past, self.coming = streams, number, past, coming

    def query(self) -> bool:
        if self._streams.broken is not None:
            raise self._streams.broken
        return not self._streams.stuck and all(one() for one in self.coming)


class Streams:
    """The streams: what they are told is logged among NCCL's calls; `stuck` events are never over.

    Args:
        go_on: what the host does instead of waiting for data.

    Attributes:
        queue: what the streams were given, in the order of the host, for `replay`.
    """

    def __init__(self, log: list[Any], go_on: Callable[[], None]):
        self._go_on = go_on
        self.device = torch.device("cpu")
        self.log, self.now, self.stuck, self.graph = log, CURRENT, False, False
        self.entered: set[str] = set()  # the threads that took the device
        self.broken: BaseException | None = None
        self.queue: list[tuple[str, int, Any]] = []
        self.made: list[int] = []
        self._spare: list[int] = []
        self._past: dict[int, frozenset[int]] = {}
        self._coming: dict[int, tuple[Coming, ...]] = {}
        self._writes: list[tuple[int, int, int]] = []  # address, end, launch
        self._numbers = 0
        self._newest: Event | None = None
        self._local = threading.local()

    @property
    def now(self) -> int:
        """The current stream; each thread has its own."""
        return getattr(self._local, "now", CURRENT)

    @now.setter
    def now(self, stream: int) -> None:
        if hasattr(self, "_local"):
            self._local.now = stream

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def pointer(self) -> int:
        return self.now

    def new(self) -> int:
        if self._spare:
            return self._spare.pop()
        self.made.append(0x100 + len(self.made))
        return self.made[-1]

    def give_back(self, stream: int) -> None:
        self._spare.append(stream)

    def close(self) -> None: ...

    @contextlib.contextmanager
    def on(self, stream: int, after: Event | None = None) -> Iterator[None]:
        after = self._event() if after is None else after
        before, self.now = self.now, stream
        self._order(after)
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def beside(self, name: str = "") -> Iterator[None]:
        self.log.append(("beside", name))
        with self.on(SIDE):
            yield

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        self.log.append(("turn", self.now))
        if self._newest is not None:
            self._order(self._newest)
        yield
        self._newest = self._event()

    def launched(self, stream: int, keys: list[tuple[str, int]], writes: Sequence[tuple[int, int]]) -> None:
        """Note that NCCL has put a kernel on a stream, and the memory that it writes."""
        self._numbers += 1
        self._past[stream] = self._past.get(stream, frozenset()) | {self._numbers}
        self.queue.append(("launch", stream, keys))
        self._writes += [(*span, self._numbers) for span in writes]

    def later(self, stream: int, finish: Callable[[], bool]) -> None:
        """Note that what a stream was given ends when `finish` says so."""
        self._coming[stream] = (*self._left(stream), Coming(finish))

    def _left(self, stream: int) -> tuple[Coming, ...]:
        return tuple(one for one in self._coming.get(stream, ()) if not one.over)

    def _event(self) -> Event:
        self._numbers += 1
        self.queue.append(("record", self.now, self._numbers))
        return Event(self, self._numbers, self._past.get(self.now, frozenset()), self._left(self.now))

    def event(self) -> Event:
        self.log.append(("event", self.now))
        return self._event()

    def _order(self, event: Event) -> None:
        self.queue.append(("wait", self.now, event.number))
        self._past[self.now] = self._past.get(self.now, frozenset()) | event.past
        self._coming[self.now] = tuple(dict.fromkeys((*self._left(self.now), *event.coming)))

    def wait(self, event: Event) -> None:
        self.log.append(("wait", self.now))
        self._order(event)
        while not all(one() for one in event.coming):  # the host goes on, but what it is given next finds it there
            self._go_on()

    def hold(self, tensor: torch.Tensor) -> None:
        self.log.append(("hold", tensor.data_ptr(), self.now))

    def capturing(self) -> bool:
        return self.graph

    def see(self, tensor: torch.Tensor, what: str) -> None:
        """Refuse a use of memory on the current stream that comes before or beside what NCCL does to it."""
        start, end = span(tensor)
        past = self._past.get(self.now, frozenset())
        late = [one for first, last, one in self._writes if first < end and start < last and one not in past]
        assert not late, f"{what} on stream {self.now:#x} is not ordered after NCCL's launch {late[0]}"

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget the writes to memory that is allocated anew."""
        start, end = span(tensor)
        self._writes = [one for one in self._writes if not (one[0] < end and start < one[1])]


class watched(TorchDispatchMode):
    """Checks that torch's operations use what NCCL wrote only on streams that are ordered after it."""

    def __init__(self, streams: Streams):
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, torch.Tensor)]
        if not func.is_view:
            for one in tensors:
                self._streams.see(one, str(func))
        found = func(*args, **(kwargs or {}))
        storages = {one.untyped_storage().data_ptr() for one in tensors}
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in storages:
                self._streams.forget(one)
        return found


def replay(queues: Sequence[list[tuple[str, int, Any]]]) -> None:
    """Run what ranks put on their streams: each stream in order, a launch once all of its ranks have reached it.

    Raises:
        AssertionError: they wait for each other.
    """
    left = [{stream: [one for one in queue if one[1] == stream] for _, stream, _ in queue} for queue in queues]
    recorded: list[set[Any]] = [set() for _ in queues]
    known = [{number for kind, _, number in queue if kind == "record"} for queue in queues]
    arrived: dict[str, set[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, streams in enumerate(left):
            for queue in streams.values():
                while queue:
                    kind, _, what = queue[0]
                    if kind == "launch":
                        for key, _ in what:
                            arrived.setdefault(key, set()).add(rank)
                        if any(len(arrived[key]) < count for key, count in what):
                            break
                    elif kind == "record":
                        recorded[rank].add(what)
                    elif what in known[rank] and what not in recorded[rank]:
                        break
                    queue.pop(0)
                    moved = True
    stuck = [
        f"rank {rank}, stream {s:#x}: {q[0]}" for rank, streams in enumerate(left) for s, q in streams.items() if q
    ]
    assert not stuck, "the GPUs wait for each other:\n" + "\n".join(stuck)
