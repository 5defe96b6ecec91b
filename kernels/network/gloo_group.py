"""Connects and ends groups of Gloo in threads: Gloo notices no aborts, so a rank must not wait inside it.

A group's constructor waits for peers that may have given up, and its destructor for operations that were given up. A
thread that does not return is left behind, until Gloo's own timeout ends it and frees what it has made.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_END_SECONDS = 0.5
_PAUSE_SECONDS = 1e-3
_ATTACH_FILTER = 26  # Linux's SO_ATTACH_FILTER, for which Python has no name
_DROP_ALL = struct.pack("=HBBI", 6, 0, 0, 0)  # a filter of one instruction: of every packet 0 bytes are kept

Sockets = set[tuple[int, str]]  # descriptors, and which sockets they are, since descriptor numbers are reused


def connect(
    store: dist.Store, rank: int, size: int, options: Any, wait: Callable[[Callable[[], bool]], None]
) -> tuple[Any, Sockets]:
    """A group of `size` ranks that meet in a store, and its sockets.

    Args:
        wait: waits until the function that it is given returns True; what it raises is raised here.

    Raises:
        RuntimeError: Gloo could not connect it.
    """
    made: list[tuple[Any, Sockets]] = []
    failed: list[BaseException] = []
    cancelled, done = threading.Event(), threading.Event()
    before = _sockets()

    def make() -> None:
        try:
            polled = _PolledStore(store, cancelled)
            group = dist.ProcessGroupGloo(polled, rank, size, options)
            made.append((group, _own(group, rank, size, _sockets() - before)))
            _let_nobody_else_in(polled.told)
        except BaseException as error:
            failed.append(error)
        done.set()
        if cancelled.is_set():
            made.clear()

    maker = threading.Thread(target=make, name="spmd-gloo-connect", daemon=True)
    maker.start()
    try:
        wait(done.is_set)
    except BaseException:
        cancelled.set()
        maker.join(_END_SECONDS)
        made.clear()
        raise
    if failed:
        raise failed[0]
    return made[0]


def end(group: list[Any], sockets: Sockets) -> None:
    """End a group, the only element of a list (which then has the last reference), whatever is under way in it.

    Gloo has no way to cancel an operation. Shutting down its sockets ends those under way at once, except for about one
    in a thousand interrupted sends, whose end Gloo misses.
    """
    for number, _ in sockets & _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    ender = threading.Thread(target=group.clear, name="spmd-gloo-end", daemon=True)
    ender.start()
    ender.join(_END_SECONDS)


class _PolledStore(dist.Store):
    """A store that polls instead of blocking, so that other threads can use it, and can cancel a wait."""

    def __init__(self, store: dist.Store, cancelled: threading.Event):
        super().__init__()
        self._polled, self._cancelled = store, cancelled
        self.told = b""

    def set(self, key: str, value: str | bytes) -> None:
        self.told += value.encode() if isinstance(value, str) else value
        self._polled.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._polled.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._polled.check(keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        end = time.monotonic() + (math.inf if timeout is None else timeout.total_seconds())
        while not self._polled.check(keys):
            if self._cancelled.is_set():
                raise dist.DistStoreError("given up")
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout, keys: {', '.join(keys)}")
            time.sleep(_PAUSE_SECONDS)

    def add(self, key: str, amount: int) -> int:
        return self._polled.add(key, amount)


def _own(group: Any, rank: int, size: int, opened: Sockets) -> Sockets:
    """Which of the newly opened sockets belong to this group: those whose other end a peer has.

    Other threads of the program may have opened sockets at the same time.
    """
    ends = {one: found for one in opened for found in _ends(one[0])}
    mine = "\n".join(" ".join(pair) for pair in ends.values()).encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
    group.allgather([lengths], [torch.tensor([len(mine)], device="cpu")]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
    found = [torch.empty_like(padded) for _ in range(size)]
    if longest:
        group.allgather([found], [padded]).wait()
    others = [one.numpy().tobytes().rstrip(b"\0") for its, one in enumerate(found) if its != rank]
    theirs = {line for one in others for line in one.split(b"\n")}
    return {one for one, (here, there) in ends.items() if f"{there} {here}".encode() in theirs}


def _let_nobody_else_in(told: bytes) -> None:
    """Have the kernel drop what comes to the socket at which the group listens, since all its ranks are connected.

    Gloo keeps every connection that is made there, even one that has ended, and ends the process when it can open no
    more files. It does not say which socket it is: the one whose address it has `told` the other ranks.
    """
    filter_ = ctypes.create_string_buffer(_DROP_ALL)
    found: dict[int, int] = {}  # where its address is -> descriptor
    for number, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = one.getsockname()
                address = struct.pack("=H", one.family) + struct.pack(">H", port) + socket.inet_aton(host)
                found[told.find(address)] = number
    found.pop(-1, None)
    if found:  # what follows the address may be anything, even another one
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found[min(found)])) as one:
            one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(filter_)))


def _sockets() -> Sockets:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found.add((int(name), link))
    return found


def _ends(number: int) -> list[tuple[str, str]]:
    """Both ends of a connection over IP, this one first; nothing for any other socket."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            here, there = one.getsockname(), one.getpeername()
            return [(f"{here[0]}|{here[1]}", f"{there[0]}|{there[1]}")]
    return []
