"""Streams and events without a GPU: a model of CUDA in which every launch knows what it comes after."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spmd.kernels.cuda import streams as cuda_streams
from spmd.kernels.cuda.streams import Home, Streams
from spmd.transforms._plan import Plan
from spmd.transforms._sums import Hook


class Stream:
    """What is launched on a stream comes after all that it was given, and after the events that it waited for."""

    number = 0

    def __init__(self, device: torch.device):
        Stream.number += 1
        self.device, self.cuda_stream, self.past = device, Stream.number, frozenset[str]()

    def launch(self, name: str) -> frozenset[str]:
        before, self.past = self.past, self.past | {name}
        return before

    def wait_event(self, event: Event) -> None:
        self.past |= event.past

    def wait_stream(self, other: Stream) -> None:
        self.past |= other.past


class Event:
    past = frozenset[str]()

    def record(self, stream: Stream) -> None:
        self.past = stream.past


class Cuda:
    """What `torch.cuda` has of all this."""

    Event = Event

    def __init__(self) -> None:
        self._current: dict[torch.device, Stream] = {}
        self._pool: list[Stream] = []
        self.capturing, self.own = False, 0

    def Stream(self, device: torch.device) -> Stream:
        """One of the 32 that torch has of a device, in turn."""
        self._pool.append(self._pool[-32] if len(self._pool) >= 32 else Stream(device))
        return self._pool[-1]

    def ExternalStream(self, pointer: int, device: torch.device) -> Stream:
        """One that CuPy has made."""
        assert pointer == self.own
        return Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        return self._current.setdefault(device, Stream(device))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        yield
        self._current[stream.device] = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Cupy:
    """What `cupy.cuda` has of all this: streams that are nobody else's, numbered."""

    def __init__(self, cuda: Cuda):
        self.cuda, self._cuda = self, cuda

    def Device(self, index: int) -> Any:
        return contextlib.nullcontext()

    def Stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        self._cuda.own += 1
        return types.SimpleNamespace(ptr=self._cuda.own)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "cupy", Cupy(cuda))  # type: ignore[arg-type]
    for name in ("Stream", "ExternalStream", "Event", "current_stream", "stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(cuda_streams, "_newest", {})
    monkeypatch.setattr(cuda_streams, "_spare", {})
    monkeypatch.setattr(cuda_streams, "_kept", [])
    return cuda


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def launch(cuda: Cuda, device: torch.device, name: str) -> frozenset[str]:
    return cuda.current_stream(device).launch(name)


def test_beside(cuda: Cuda) -> None:
    """A side stream comes after what the current one was given, which waits for it only when told to."""
    streams = Streams(FIRST)
    launch(cuda, FIRST, "made")
    early = streams.event()
    launch(cuda, FIRST, "later")
    with streams.on(streams.new(), early):
        assert launch(cuda, FIRST, "message") == {"made"}
    with streams.beside():
        assert launch(cuda, FIRST, "reduced") == {"made", "later"}
        done = streams.event()
    assert "reduced" not in launch(cuda, FIRST, "more")
    streams.wait(done)
    assert "reduced" in launch(cuda, FIRST, "use")


def test_turns_of_all_communicators_of_a_device(cuda: Cuda) -> None:
    """Whichever communicator and stream: each launch comes after all before it, in the order of the host's calls."""
    communicators = [Streams(FIRST), Streams(FIRST), Streams(FIRST)]
    launched: list[str] = []
    for number in range(12):
        streams = communicators[number * 5 % 3]
        with streams.beside(f"side {number % 2}") if number % 4 else contextlib.nullcontext(), streams.in_turn():
            before = launch(cuda, FIRST, f"collective {number}")
        assert set(launched) <= before
        launched.append(f"collective {number}")


def test_only_what_is_launched_takes_turns(cuda: Cuda) -> None:
    """Not the rest of a stream, not messages, not another device."""
    first, second, other = Streams(FIRST), Streams(FIRST), Streams(SECOND)
    with first.beside():
        with first.in_turn():
            launch(cuda, FIRST, "all_reduce")
        launch(cuda, FIRST, "unpacked")
    with second.on(second.new()):
        assert launch(cuda, FIRST, "message") == set()
    with second.beside(), second.in_turn():
        assert launch(cuda, FIRST, "all_gather") == {"all_reduce"}
    with other.in_turn():
        assert launch(cuda, SECOND, "broadcast") == set()


def test_no_turns_within_a_graph(cuda: Cuda) -> None:
    """A stream that is captured can't wait for one that is not, nor the other way round."""
    streams = Streams(FIRST)
    with streams.beside(), streams.in_turn():
        launch(cuda, FIRST, "before")
    cuda.capturing = True
    with streams.in_turn():
        assert launch(cuda, FIRST, "captured") == set()
    cuda.capturing = False
    with streams.on(streams.new(), Event()), streams.in_turn():
        assert launch(cuda, FIRST, "after") == {"before"}


def test_side_streams_are_nobody_else_s(cuda: Cuda) -> None:
    """However many communicators and directions there are; torch's own would come again after 32."""
    communicators = [Streams(FIRST) for _ in range(20)]
    for number, streams in enumerate(communicators):
        for name in ("", "buckets"):
            with streams.beside(name):
                assert not {f"of {other}" for other in range(number)} & launch(cuda, FIRST, f"of {number}")
    lanes = [communicators[0].new() for _ in range(32)]
    assert len({id(lane) for lane in lanes}) == 32 and cuda.own == 72


def test_streams_are_used_again(cuda: Cuda) -> None:
    for _ in range(5):
        streams = Streams(FIRST)
        with streams.beside():
            launch(cuda, FIRST, "reduced")
        streams.give_back(streams.new())
        streams.close()
    assert cuda.own == 2


class Gradient(torch.Tensor):
    """A tensor that says to be on a GPU."""

    device, is_cuda = FIRST, True
    held: Any = ()

    def record_stream(self, stream: Any) -> None:
        self.held = (*self.held, stream)


def test_gradients_of_several_streams(cuda: Cuda) -> None:
    """What sums them starts from the stream where the backward pass began, after all that made them."""
    home = Home(FIRST)
    begun = cuda.current_stream(FIRST)
    filled: list[tuple[Stream, frozenset[str]]] = []

    class Sums:
        def fill(self, place: Any, value: Any) -> None:
            filled.append((cuda.current_stream(FIRST), launch(cuda, FIRST, f"packs {place}")))

    class Twin:
        grad: Any = None

    elsewhere, twin = Stream(FIRST), Twin()
    for place, stream in enumerate((begun, elsewhere, begun)):
        with cuda.stream(stream):
            launch(cuda, FIRST, f"makes {place}")
            gradient = twin.grad = torch.ones(1).as_subclass(Gradient)
            Hook(Sums(), place, Plan(), home)(twin)
        assert twin.grad is None
        assert gradient.held == ((begun,) if stream is elsewhere else ())
    twin.grad = torch.ones(1)  # of a leaf on the CPU
    with cuda.stream(elsewhere):
        Hook(Sums(), "host", Plan(), home)(twin)
    assert [stream for stream, _ in filled] == [begun] * 3 + [elsewhere]
    assert {"makes 0", "makes 1"} <= filled[1][1] and "makes 2" in filled[2][1]
