"""A stand-in for `cupy.cuda.nccl` and for CUDA's streams on machines without a GPU.

It writes down every call, with its arguments, and does what the call says to the memory that the pointers point to,
through a store: so wrong counts, dtypes, roots or pointers give wrong values. Tensors of the CPU play those of GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from typing import Any

import cloudpickle
import torch

from spmd.kernels import arena as arenas
from spmd.kernels import communicator as communicators
from spmd.kernels.arena import Arena
from spmd.kernels.nccl import NcclCommunicator
from spmd.kernels.nccl_arithmetic import NAMES
from spmd.kernels.nccl_library import Library
from spmd.kernels.reduction import reduce_in_order
from spmd.kernels.shm import ShmCommunicator

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CURRENT, SIDE = 0x51, 0x5D
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


def at(pointer: int, count: int, kind: int) -> torch.Tensor:
    """The memory at an address as a tensor."""
    dtype = DTYPES[kind]
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype=dtype)


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
    """The module: `log` has all calls on it and on its communicators."""

    available = True

    def __init__(self, store: Any = None):
        self.store, self.log, self.grouped = Memory() if store is None else store, [], 0
        self.waiting: list[Any] = []
        self.async_error: BaseException | None = None
        vars(self).update(VALUES)

    def get_unique_id(self) -> bytes:
        self.log.append(("get_unique_id",))
        return os.urandom(128)

    def groupStart(self) -> None:
        self.log.append(("groupStart",))
        self.grouped += 1

    def groupEnd(self) -> None:
        self.log.append(("groupEnd",))
        self.grouped -= 1
        waiting, self.waiting = self.waiting, []
        for receive in waiting:
            receive()

    def NcclCommunicator(self, size: int, unique: bytes, rank: int) -> Raw:
        self.log.append(("NcclCommunicator", size, rank))
        return Raw(self, size, unique.hex()[:16], rank)


class Raw:
    """A communicator; every call on it is written down."""

    def __init__(self, nccl: Nccl, size: int, name: str, rank: int):
        self.nccl, self.size, self.name, self.rank = nccl, size, name, rank
        self.calls, self.splits, self.ended = 0, 0, ""
        self.sent: dict[tuple[str, str], int] = {}

    def _note(self, *call: Any) -> None:
        assert not self.ended, f"{call[0]} on a communicator that was ended"
        self.nccl.log.append(call)

    def _everyone(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        self.calls += 1
        key = f"double/{self.name}/{self.calls}"
        if self.size == 1:
            return [mine]
        self.nccl.store.set(f"{key}/{self.rank}", bytes(mine.view(torch.uint8).tolist()))
        found = [self.nccl.store.get(f"{key}/{rank}") for rank in range(self.size)]
        return [torch.frombuffer(bytearray(data), dtype=mine.dtype) for data in found]

    def allReduce(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        self._note("allReduce", source, target, count, kind, op, stream)
        self._reduce(at(source, count, kind), at(target, count, kind), op)

    def _reduce(self, mine: torch.Tensor, out: torch.Tensor, op: int) -> None:
        if OPS[op] in ("max", "min") and out.is_floating_point():  # NCCL's pass over NaN
            combine = torch.fmax if OPS[op] == "max" else torch.fmin
            out.copy_(functools.reduce(combine, [torch.full_like(out, torch.nan), *self._everyone(mine.clone())]))
            return
        out.copy_(reduce_in_order(self._everyone(mine.clone()), OPS[op], torch.empty_like(out)))

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        self._note("reduce", source, target, count, kind, op, root, stream)
        mine = at(source, count, kind)
        self._reduce(mine, at(target, count, kind) if self.rank == root else mine.clone(), op)

    def reduceScatter(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        self._note("reduceScatter", source, target, count, kind, op, stream)
        whole = torch.empty(count * self.size, dtype=DTYPES[kind])
        self._reduce(at(source, count * self.size, kind), whole, op)
        at(target, count, kind).copy_(whole[count * self.rank : count * (self.rank + 1)])

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        self._note("allGather", source, target, count, kind, stream)
        at(target, count * self.size, kind).copy_(torch.cat(self._everyone(at(source, count, kind).clone())))

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int, stream: int) -> None:
        self._note("broadcast", source, target, count, kind, root, stream)
        at(target, count, kind).copy_(self._everyone(at(source, count, kind).clone())[root])

    def send(self, source: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("send", source, count, kind, peer, stream)
        assert self.nccl.grouped or peer != self.rank, "a send to itself outside of a group"
        key = self._next("send", f"{self.rank}-{peer}")
        self.nccl.store.set(key, bytes(at(source, count, kind).view(torch.uint8).tolist()))

    def recv(self, target: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("recv", target, count, kind, peer, stream)
        key = self._next("recv", f"{peer}-{self.rank}")

        def receive() -> None:
            # NCCL's host goes on and sends; here it has to do so in between.
            while not self.nccl.store.check([key]):
                for comm in tuple(communicators._active):
                    comm.progress()
            data = bytearray(self.nccl.store.get(key))
            at(target, count, kind).copy_(torch.frombuffer(data, dtype=DTYPES[kind]))

        self.nccl.waiting.append(receive)
        if not self.nccl.grouped:
            self.nccl.waiting.pop()()

    def _next(self, what: str, way: str) -> str:
        self.sent[what, way] = self.sent.get((what, way), 0) + 1
        return f"double/{self.name}/{way}/{self.sent[what, way]}"

    def commSplit(self, color: int, key: int) -> Raw:
        self._note("commSplit", color, key)
        self.splits += 1
        return Raw(self.nccl, self.size, f"{self.name}.{self.splits}", key)

    def check_async_error(self) -> None:
        if self.nccl.async_error is not None:
            raise self.nccl.async_error

    def abort(self) -> None:
        self._note("abort")
        self.ended = "abort"

    def destroy(self) -> None:
        self._note("destroy")
        self.ended = "destroy"


class Event:
    def __init__(self, streams: Streams):
        self._streams = streams

    def query(self) -> bool:
        if self._streams.broken is not None:
            raise self._streams.broken
        return not self._streams.stuck


class Streams:
    """The streams: what they are told is written down among NCCL's calls; `stuck` events are never over."""

    def __init__(self, log: list[Any]):
        self.log, self.now, self.stuck, self.graph = log, CURRENT, False, False
        self.entered: set[str] = set()  # the threads that took the device
        self.broken: BaseException | None = None

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def pointer(self) -> int:
        return self.now

    @contextlib.contextmanager
    def beside(self, name: str = "", after: Any = None) -> Any:
        self.log.append(("beside", name))
        before, self.now = self.now, SIDE
        yield
        self.now = before

    @contextlib.contextmanager
    def in_turn(self) -> Any:
        self.log.append(("turn", self.now))
        yield

    def event(self) -> Event:
        self.log.append(("event", self.now))
        return Event(self)

    def wait(self, event: Event) -> None:
        self.log.append(("wait", self.now))

    def hold(self, tensor: torch.Tensor) -> None:
        self.log.append(("hold", tensor.data_ptr(), self.now))

    def capturing(self) -> bool:
        return self.graph


def communicator(
    watch: Any, ranks: tuple[int, ...], store: Any, timeout: float, channel: str = "main", **options: Any
) -> NcclCommunicator:
    """A communicator of CPU tensors over the double."""
    nccl = Nccl(store)
    return NcclCommunicator(
        lambda name: ShmCommunicator(watch, ranks, timeout=timeout, channel=name),
        torch.device("cpu"),
        Library(nccl, 23203, "/somewhere/libnccl.so.2", "14.2.0"),
        streams=Streams(nccl.log),
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
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def factory(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Any:
    """For `register_backend`."""
    return communicator(watch, ranks, store(), timeout, channel)
