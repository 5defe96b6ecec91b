"""Copying a rank's values to other hosts, by a thread beside the program, when a call has made them.

Values go to the next hosts that lack them, in a ring, until as many other hosts have them as `Mesh(copies=)` says; of
several ranks that hold the same shard, the first sends it. Invariant: the driver is told that a call's results will
be copied before it hears of the call's end, and that they are copied once all of those hosts have all of them.
"""

from __future__ import annotations

import functools
import pickle
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import protocol, wire
from ..protocol import ALL, Spans, each_span
from ..rank.descriptors import RankRequest
from ..rank.lasting_values import Leaf, leaf_of
from ..spec import Layout, P
from . import protocol as hosts_protocol
from .coded import NotOfThisMesh
from .holder import secret_of
from .link import Link, dial

Kept = Iterable[tuple[int, Sequence[torch.Tensor | None], Sequence[P]]]
"""(Number of a call, its values, their specs) for each call."""
_Item = tuple[int, torch.Tensor, P, tuple[int, ...]]  # index, value, spec, the numbers of the hosts that it goes to
_CALLS = 2  # whose copies may be under way; then the next waits
_AGAIN_SECONDS = 1.0  # until a host that could not be reached is tried again
_LENGTH = struct.Struct("<Q")  # of a value's description, before its bytes


def copy_hosts(replicas: Sequence[int], rank: int, hosts: Sequence[Sequence[int]], copies: int) -> tuple[int, ...]:
    """The hosts to which a rank sends its shard.

    >>> copy_hosts([0], 0, [(0, 1), (2, 3), (4, 5)], 1), copy_hosts([0, 1], 1, [(0, 1), (2, 3), (4, 5)], 1)
    ((1,), ())
    >>> copy_hosts([0, 2], 0, [(0, 1), (2, 3), (4, 5)], 1), copy_hosts([0, 2], 0, [(0, 1), (2, 3), (4, 5)], 2)
    ((), (2,))

    Args:
        replicas: all ranks that hold it.
        hosts: the ranks of each.
    """
    have = {host for host, ranks in enumerate(hosts) if any(one in ranks for one in replicas)}
    if rank != min(replicas):
        return ()
    own = next(host for host, ranks in enumerate(hosts) if rank in ranks)
    ring = [(own + step) % len(hosts) for step in range(1, len(hosts))]
    return tuple(host for host in ring if host not in have)[: max(0, copies + 1 - len(have))]


class Copier:
    """One rank's part in copying.

    Args:
        layout: the axes.
        request: what this rank was started with.
        report: sends a message to the driver, from any thread.
        watch: raises an error if the region is aborted while this rank waits.
    """

    def __init__(self, layout: Layout, request: RankRequest, report: Callable[[protocol.Message], None], watch: Any):
        rank, hosts, copies = request.rank, request.hosts, request.copies
        self._rank, self._secret, self._report, self._watch = rank, secret_of(request.key), report, watch

        @functools.cache
        def copied_to(spec: P) -> tuple[int, ...]:
            return copy_hosts(layout.replicas(spec, rank), rank, hosts, copies)

        self._copied_to = copied_to
        own = next(host for host, ranks in enumerate(hosts) if rank in ranks)
        self._neighbours = [(own + step) % len(hosts) for step in range(1, copies + 1)]
        self._request = protocol.CopyTo(0, (), ())  # the last one
        self._reached = 0  # the number of the last one that was done
        self._kept: Callable[[], Kept] = tuple
        self._links: dict[int, Link] = {}  # used by the thread only
        self._sent: set[int] = set()  # calls that may have copies
        self._changed = threading.Condition()
        self._under_way: set[int] = set()  # calls that the driver was told of, and that are not copied yet
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._broken, self._try_at = True, float("inf")
        self._thread: threading.Thread | None = None

    # -- the rank's thread ---------------------------------------------------------------------------------------------

    def copy_to(self, msg: protocol.CopyTo, kept: Callable[[], Kept]) -> None:
        """Keep copies at these hosts, of all current values and of those to come."""
        self._request, self._kept = msg, kept
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spmd-copier", daemon=True)
            self._thread.start()
        self._begin_anew()

    def _begin_anew(self) -> None:
        calls = [(call, self._items(tensors, specs)) for call, tensors, specs in self._kept()]
        calls = [(call, items) for call, items in calls if items]
        self._sent = {call for call, _ in calls}
        with self._changed:
            self._broken, self._try_at, before = False, float("inf"), tuple(self._under_way)
        self._queue.put(functools.partial(self._send_all, calls, before, self._request))

    def keep(self, call: int, tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> None:
        """Begin to copy what a call has made; waits while too many copies are under way."""
        items = self._items(tensors, specs)
        if not items:
            return
        with self._changed:
            while len(self._under_way) >= _CALLS and not self._broken:
                if not self._changed.wait(0.05):
                    self._watch.check()
                    self._watch.check_peers()
            self._under_way.add(call)
        self._sent.add(call)
        self._report(protocol.Copying(self._request.number, (call,), done=False))
        if not self._broken:
            self._queue.put(functools.partial(self._send_call, call, items))
        elif time.monotonic() > self._try_at:
            self._begin_anew()

    def _items(self, tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> list[_Item]:
        return [
            (index, tensor, spec, to)
            for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True))
            if tensor is not None and (to := self._copied_to(spec))
        ]

    def free(self, spans: Spans) -> None:
        """Drop the copies of values that are no longer needed."""
        found: list[int] = []
        for call, start, stop in each_span(spans):
            if call in self._sent:
                found += (call, start, stop)
                if stop == ALL:
                    self._sent.discard(call)
        if found:
            self._queue.put(functools.partial(self._drop, tuple(found)))

    def fetch(self, copies: Iterable[tuple[int, str, int, int, tuple[tuple[int, int], ...]]]) -> Iterable[Any]:
        """This rank's part of the copies in a `MoveValues`: yields each value's name, the value and its spec."""
        for rank, address, port, owner, names in copies:
            if rank != self._rank:
                continue
            link = dial((address, port), self._secret, self._rank)
            try:
                msg, content = link.ask(hosts_protocol.SendCopies(owner, names))
            finally:
                link.close()
            view, start = memoryview(content), 0
            for name, nbytes in zip(names, msg.sizes, strict=True):
                yield name, *_unpacked(view[start : start + nbytes])
                start += nbytes

    # -- a thread of its own -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            do = self._queue.get()
            try:
                do()
            except (OSError, NotOfThisMesh):  # the driver finds out whether that host is lost
                self._close()
                with self._changed:
                    self._broken, self._try_at = True, time.monotonic() + _AGAIN_SECONDS
                    self._changed.notify_all()
            del do

    def _close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _send_all(
        self,
        calls: list[tuple[int, list[_Item]]],
        before: tuple[int, ...],
        msg: protocol.CopyTo,
    ) -> None:
        """Bring each host's copies up to date: send what it lacks, and drop what is no longer needed.

        Args:
            before: calls whose copies were under way: they are among `calls`, or no longer needed.
        """
        self._close()
        for neighbour in self._neighbours:
            link = self._links[neighbour] = dial(msg.hosts[neighbour], self._secret, self._rank)
            held, _ = link.ask(hosts_protocol.ListCopies())
            there = {(call, index) for _, call, index in held.names}
            gone = sorted({call for call, _ in there}.difference(msg.needed, (call for call, _ in calls)))
            spans = tuple(word for call in gone for word in (call, 0, ALL))
            if spans:
                link.ask(hosts_protocol.DropCopies(spans))
            for call, items in calls:
                self._send(
                    neighbour, call, [item for item in items if neighbour in item[3] and (call, item[0]) not in there]
                )
        self._reached = msg.number
        self._done((*before, *(call for call, _ in calls)))

    def _send_call(self, call: int, items: list[_Item]) -> None:
        if self._links:  # else it will be sent with everything else by `_send_all`
            for neighbour in {neighbour for item in items for neighbour in item[3]}:
                self._send(neighbour, call, [item for item in items if neighbour in item[3]])
            self._done((call,))

    def _send(self, neighbour: int, call: int, items: list[_Item]) -> None:
        if items:
            pieces = [_packed(tensor, spec) for _, tensor, spec, _ in items]
            sizes = [sum(map(len, each)) for each in pieces]
            encoded = tuple((item[0], nbytes) for item, nbytes in zip(items, sizes, strict=True))
            self._links[neighbour].ask(
                hosts_protocol.KeepCopies(call, encoded), *(piece for each in pieces for piece in each)
            )

    def _drop(self, spans: Spans) -> None:
        for link in self._links.values():
            link.ask(hosts_protocol.DropCopies(spans))
        with self._changed:
            never = tuple(call for call, _, stop in each_span(spans) if stop == ALL and call in self._under_way)
        if never:
            self._done(never)

    def _done(self, calls: tuple[int, ...]) -> None:
        with self._changed:
            self._under_way.difference_update(calls)
            self._changed.notify_all()
        self._report(protocol.Copying(self._reached, calls, done=True))


def _packed(tensor: torch.Tensor, spec: P) -> list[Any]:
    """A value as bytes, in pieces."""
    leaf = leaf_of(tensor)
    # The alignment, since kernels may give other bits if a tensor begins elsewhere in a cache line.
    encoded = pickle.dumps((leaf, spec, tensor.data_ptr() % 64 if leaf.nbytes else 0))
    head = _LENGTH.pack(len(encoded)) + encoded
    if leaf.pickled:
        return [head, wire.to_bytes(tensor)]
    if not leaf.nbytes:
        return [head]
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (leaf.nbytes,), (1,))
    return [head, flat.numpy().data]


def _unpacked(data: memoryview) -> tuple[torch.Tensor, P]:
    (length,) = _LENGTH.unpack_from(data)
    leaf: Leaf
    leaf, spec, at = pickle.loads(data[_LENGTH.size : _LENGTH.size + length])
    rest = data[_LENGTH.size + length :]
    if leaf.pickled:
        return wire.from_bytes(bytes(rest)), spec
    return leaf.remade(rest, at), spec
