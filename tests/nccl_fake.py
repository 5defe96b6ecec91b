"""A fake of `cupy.cuda.nccl` and of CUDA's streams, for machines without a GPU.

It logs every call with its arguments, and does through a store what the call says with the memory behind the pointers:
so wrong counts, dtypes, roots or pointers give wrong values. CPU tensors stand in for those of GPUs.

It is as strict as the real thing where that hurts. The first call that sends bytes between two ranks waits, in its
thread, until the other rank is there. A communicator is for one thread at a time, and must not be freed while one is in
it (`Nccl.faults`). Received data is there only once the stream that waits for it says so (`streams_fake`). Ranks share
a GPU only if they are told to, and only as long as the blocks of all of them fit on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from streams_fake import Streams, span
from torch.utils._python_dispatch import _disable_current_modes

from spmd.kernels import operations, registry  # noqa: F401 (for tests)
from spmd.kernels.cuda import lanes  # noqa: F401
from spmd.kernels.cuda.nccl import NcclCommunicator
from spmd.kernels.cuda.nccl_arithmetic import NAMES
from spmd.kernels.cuda.nccl_library import Library
from spmd.kernels.reduction import reduce_in_order
from spmd.kernels.shm import arena as arenas
from spmd.kernels.shm.arena import Arena
from spmd.kernels.shm.communicator import ShmCommunicator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# As in nccl.h.
VALUES = {
    "NCCL_INT8": 0,
    "NCCL_UINT8": 1,
    "NCCL_INT32": 2,
    "NCCL_UINT32": 3,
    "NCCL_INT64": 4,
    "NCCL_UINT64": 5,
    "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7,
    "NCCL_FLOAT64": 8,
    "NCCL_BFLOAT16": 9,
    "NCCL_SUM": 0,
    "NCCL_PROD": 1,
    "NCCL_MAX": 2,
    "NCCL_MIN": 3,
    "NCCL_AVG": 4,
}
OPS = {0: "sum", 1: "product", 2: "max", 3: "min", 4: "avg"}
DTYPES = {VALUES[name]: dtype for dtype, name in NAMES.items()}
# A small GPU that ranks share, and the blocks that a kernel of NCCL's takes unless told to take fewer.
MULTIPROCESSORS, BLOCKS = 40, 32
SECONDS = 5.0  # a longer wait for a rank within NCCL counts as a deadlock


def at(pointer: int, count: int, kind: int) -> torch.Tensor:
    """The memory at an address as a tensor."""
    dtype = DTYPES[kind]
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype=dtype)


def let_others_go_on() -> None:
    """With NCCL the host goes on and sends; the fake does so in between, except in threads that are NCCL's alone."""
    if not threading.current_thread().name.startswith("spmd-nccl"):
        for comm in tuple(operations._active):
            comm.progress()
    time.sleep(1e-4)


class Memory:
    """A store for one process."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._kept[key] = value

    def get(self, key: str) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)


class Nccl:
    """The module: `log` has all calls on it and on its communicators.

    Args:
        deferred: calls go on their streams and do nothing to memory, for `replay`.
        shared: all ranks are on one GPU.
    """

    available = True

    def __init__(self, store: Any = None, deferred: bool = False, shared: bool = False):
        self.store, self.deferred, self.log = Memory() if store is None else store, deferred, []
        self.shared = shared
        self.streams = Streams(self.log, let_others_go_on)
        self.faults: list[str] = []  # what would have crashed a process
        self.async_error: BaseException | None = None
        self._group = threading.local()
        for name, number in VALUES.items():
            setattr(self, name, number)

    def get_unique_id(self) -> bytes:
        self.log.append(("get_unique_id",))
        return os.urandom(128)

    def group(self) -> list[Call] | None:
        """The calls of the group that this thread has open."""
        return getattr(self._group, "calls", None)

    def groupStart(self) -> None:
        self.log.append(("groupStart",))
        self._group.calls = []

    def groupEnd(self) -> None:
        self.log.append(("groupEnd",))
        calls, self._group.calls = self._group.calls, None
        self.run(calls)

    def run(self, calls: Sequence[Call]) -> None:
        """Connect the ranks that the calls are between, put the calls on their streams as one, and do what they say."""
        with _disable_current_modes():
            self._run(calls)

    def _run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call.raw.fits()
            call.raw.here(call.kinds)
        for call in calls:
            call.raw.meet(call.kinds)
        if calls:
            self.streams.launched(calls[0].stream, [key for call in calls for key in call.keys], [*self._writes(calls)])
        if self.deferred:
            return
        for call in calls:
            call.begin()
        for call in calls:
            if call.later:
                self.streams.later(call.stream, call.finish)
            else:
                while not call.finish():
                    let_others_go_on()

    def _writes(self, calls: Sequence[Call]) -> Iterator[tuple[int, int]]:
        for call in calls:
            if call.writes is not None:
                yield call.writes

    def NcclCommunicator(self, size: int, unique: bytes, rank: int) -> Raw:
        self.log.append(("NcclCommunicator", size, rank))
        if self.shared and size > 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE: several ranks use the same GPU")
        return Raw(self, size, unique.hex()[:16], rank)


@dataclasses.dataclass
class Call:
    """One of NCCL's calls: `begin` gives this rank's part, `finish` says whether the others' are there, and takes them.

    Attributes:
        kinds: what has to be connected for it: (what, from, to).
        keys: what names it on all ranks that take part, and how many those are.
        writes: the memory that it changes: address and end.
        later: it goes on by itself, so that the host need not wait.
    """

    raw: Raw
    stream: int
    kinds: list[tuple[str, int, int]]
    keys: list[tuple[str, int]]
    begin: Callable[[], None]
    finish: Callable[[], bool]
    writes: tuple[int, int] | None
    later: bool = False


class Raw:
    """A communicator; every call on it is written down."""

    def __init__(self, nccl: Nccl, size: int, name: str, rank: int):
        self.nccl, self.size, self.name, self.rank = nccl, size, name, rank
        self.calls, self.splits, self.ended = 0, 0, ""
        self.sent: dict[tuple[str, str], int] = {}
        self._connected: set[tuple[str, int, int]] = set()
        self._inside: list[str] = []  # the threads

    def _fault(self, text: str) -> None:
        self.nccl.faults.append(text)
        raise AssertionError(text)

    @contextlib.contextmanager
    def _in(self, *call: Any) -> Iterator[None]:
        """While this thread is in a call, nobody else may be."""
        thread = threading.current_thread().name
        if self.ended:
            self._fault(f"{call[0]} on a communicator that was ended")
        if self._inside and self._inside != [thread]:
            self._fault(f"{call[0]} while thread {self._inside[0]} is inside")
        self._inside.append(thread)
        self.nccl.log.append(call)
        try:
            yield
        finally:
            self._inside.remove(thread)

    def fits(self) -> None:
        """Check that the kernels of all ranks fit on their GPU at once, since each waits there for the others."""
        blocks = self.size * int(os.environ.get("NCCL_MAX_CTAS", BLOCKS))
        if self.nccl.shared and blocks > MULTIPROCESSORS:
            self._fault(f"{self.size} ranks take {blocks} blocks of a GPU that has {MULTIPROCESSORS}")

    def here(self, kinds: Sequence[tuple[str, int, int]]) -> None:
        """Say that this rank is inside a call which connects."""
        for what, source, target in kinds:
            if (what, source, target) not in self._connected:
                self.nccl.store.set(f"fake/{self.name}/meets/{what}/{source}/{target}/{self.rank}", b"1")

    def meet(self, kinds: Sequence[tuple[str, int, int]]) -> None:
        """Wait for the other ranks where the call connects; nothing else goes on in this thread meanwhile.

        So a thread that others need for more than NCCL must not come to wait here.
        """
        of_nccl_alone = threading.current_thread().name.startswith("spmd-nccl")
        end = time.monotonic() + (float("inf") if of_nccl_alone else SECONDS)
        for what, source, target in kinds:
            if (what, source, target) in self._connected:
                continue
            ranks = range(self.size) if what == "everyone" else (source, target)
            keys = [f"fake/{self.name}/meets/{what}/{source}/{target}/{rank}" for rank in ranks]
            while not self.nccl.store.check(keys):
                if time.monotonic() > end:
                    self._fault(
                        f"rank {self.rank} waits inside NCCL to connect {source} to {target}, in a rank's thread"
                    )
                time.sleep(1e-3)
            self._connected.add((what, source, target))

    def _collective(
        self, call: tuple[Any, ...], mine: torch.Tensor, writes: tuple[int, int], take: Callable[[Any], None]
    ) -> None:
        """A call in which all ranks give `mine`, and take what they give."""
        *_, stream = call
        with self._in(*call):
            self.calls += 1
            key = f"fake/{self.name}/{self.calls}"

            def begin() -> None:
                if self.size > 1:
                    self.nccl.store.set(f"{key}/{self.rank}", bytes(mine.view(torch.uint8).tolist()))

            def finish() -> bool:
                keys = [f"{key}/{rank}" for rank in range(self.size)]
                if self.size > 1 and not self.nccl.store.check(keys):
                    return False
                found = [self.nccl.store.get(one) for one in keys] if self.size > 1 else []
                take([torch.frombuffer(bytearray(data), dtype=mine.dtype) for data in found] or [mine.clone()])
                return True

            kinds = [("everyone", 0, 0)] if self.size > 1 else []
            self.nccl.run([Call(self, stream, kinds, [(key, self.size)], begin, finish, writes)])

    def allReduce(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        out = at(target, count, kind)
        call = ("allReduce", source, target, count, kind, op, stream)
        self._collective(call, at(source, count, kind), span(out), lambda found: reduce(found, out, op))

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        mine = at(source, count, kind)
        out = at(target, count, kind) if self.rank == root else mine.clone()
        call = ("reduce", source, target, count, kind, op, root, stream)
        self._collective(call, mine, span(out), lambda found: reduce(found, out, op))

    def reduceScatter(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        out = at(target, count, kind)

        def take(found: list[torch.Tensor]) -> None:
            reduce([one[count * self.rank : count * (self.rank + 1)] for one in found], out, op)

        call = ("reduceScatter", source, target, count, kind, op, stream)
        self._collective(call, at(source, count * self.size, kind), span(out), take)

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        out = at(target, count * self.size, kind)
        call = ("allGather", source, target, count, kind, stream)
        self._collective(call, at(source, count, kind), span(out), lambda found: out.copy_(torch.cat(found)))

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int, stream: int) -> None:
        out = at(target, count, kind)
        call = ("broadcast", source, target, count, kind, root, stream)
        self._collective(call, at(source, count, kind), span(out), lambda found: out.copy_(found[root]))

    def send(self, source: int, count: int, kind: int, peer: int, stream: int) -> None:
        key = self._next("send", f"{self.rank}-{peer}")
        mine = at(source, count, kind)

        def begin() -> None:
            self.nccl.store.set(key, bytes(mine.view(torch.uint8).tolist()))

        self._half(("send", source, count, kind, peer, stream), (self.rank, peer), key, begin, lambda: True, None)

    def recv(self, target: int, count: int, kind: int, peer: int, stream: int) -> None:
        key = self._next("recv", f"{peer}-{self.rank}")
        out = at(target, count, kind)

        def finish() -> bool:
            if not self.nccl.store.check([key]):
                return False
            out.copy_(torch.frombuffer(bytearray(self.nccl.store.get(key)), dtype=DTYPES[kind]))
            return True

        call = ("recv", target, count, kind, peer, stream)
        self._half(call, (peer, self.rank), key, lambda: None, finish, span(out))

    def _half(
        self,
        call: tuple[Any, ...],
        between: tuple[int, int],
        key: str,
        begin: Callable[[], None],
        finish: Callable[[], bool],
        writes: tuple[int, int] | None,
    ) -> None:
        with self._in(*call):
            to_itself = between[0] == between[1]
            kinds = [] if to_itself else [("half", *between)]
            half = Call(
                self,
                call[-1],
                kinds,
                [(key, 1 if to_itself else 2)],
                begin,
                finish,
                writes,
                later=self.nccl.group() is None,
            )
            group = self.nccl.group()
            if group is not None:
                group.append(half)
                return
            if to_itself:
                self._fault("a send to itself outside of a group")
            self.nccl.run([half])

    def _next(self, what: str, way: str) -> str:
        self.sent[what, way] = self.sent.get((what, way), 0) + 1
        return f"fake/{self.name}/{way}/{self.sent[what, way]}"

    def commSplit(self, color: int, key: int) -> Raw:
        with self._in("commSplit", color, key):
            self.splits += 1
            return Raw(self.nccl, self.size, f"{self.name}.{self.splits}", key)

    def check_async_error(self) -> None:
        if self.nccl.async_error is not None:
            raise self.nccl.async_error

    def abort(self) -> None:
        with self._in("abort"):
            self.ended = "abort"

    def destroy(self) -> None:
        with self._in("destroy"):
            self.ended = "destroy"


def reduce(found: list[torch.Tensor], out: torch.Tensor, op: int) -> None:
    if OPS[op] in ("max", "min") and out.is_floating_point():  # NCCL's pass over NaN
        combine = torch.fmax if OPS[op] == "max" else torch.fmin
        out.copy_(functools.reduce(combine, [torch.full_like(out, torch.nan), *found]))
        return
    out.copy_(reduce_in_order(found, OPS[op], torch.empty_like(out)))


def communicator(
    watch: Any, ranks: tuple[int, ...], store: Any, timeout: float, channel: str = "main", **options: Any
) -> NcclCommunicator:
    """A communicator of CPU tensors over the fake."""
    nccl = Nccl(store, options.pop("deferred", False), options.pop("shared", False))
    return NcclCommunicator(
        lambda name: ShmCommunicator(watch, ranks, timeout=timeout, channel=name),
        torch.device("cpu"),
        Library(nccl, 23203, "/somewhere/libnccl.so.2", "14.2.0"),
        streams=nccl.streams,
        channel=channel,
        **options,
    )


class Alone:
    """Makes communicators of one rank, and closes them in the end."""

    def __init__(self) -> None:
        self._fd = arenas.create(1)
        self.arena = Arena(self._fd, 1, 0)
        self.arena.clear(1)
        self.arena.generation = 1
        self._made: list[NcclCommunicator] = []

    def __call__(self, timeout: float = 30.0, **options: Any) -> NcclCommunicator:
        self._made.append(communicator(self.arena, (0,), None, timeout, **options))
        return self._made[-1]

    def close(self) -> None:
        for comm in self._made:
            comm.close()
        os.close(self._fd)


def log_of(comm: NcclCommunicator) -> list[Any]:
    return comm.library.nccl.log


def until(condition: Any) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def factory(
    *, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str, **options: Any
) -> Any:
    """For `register_backend`."""
    return communicator(watch, ranks, store(), timeout, channel, **options)


def deferred_factory(**arguments: Any) -> Any:
    """For `register_backend`: calls only go on their streams, and the hosts do not agree on each before."""
    return factory(**arguments, deferred=True, checked=False)


def shared_factory(**arguments: Any) -> Any:
    """For `register_backend`: all ranks are on one GPU."""
    return factory(**arguments, shared=True)
