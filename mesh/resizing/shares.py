"""Values of a mesh over several hosts that is resized: each new rank takes its shards from the hosts of the old ranks.

It asks the processes that hold the old ranks for the parts that it needs, over its own connections; if several have a
part, it asks the nearest. Such a process (`Offered`) reads the parts from the arena of its ranks, whose ledgers say
what they keep. Invariants: a new rank's values lie in its memory as if they had been put there; and no old rank takes
part: they are idle, or dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.errors import MeshError, PeerLost
from ...kernels.network.authentication import code
from ...kernels.shm.arena import Arena
from .. import strides, wire
from ..hosts.coded import NotOfThisMesh
from ..hosts.link import Link, dial
from ..hosts.protocol import PartsSent, SendParts
from ..hosts.serving import Serving
from ..rank.lasting_values import Leaf, Values, leaf_of, values_of
from ..spec import Layout, P
from .pieces import Allocate, Box, box_of, room_for, shared, sizes_of, within

_MOST_BYTES = 32 << 20  # that are asked for at once, unless a single part is larger


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A value on the old ranks.

    Attributes:
        shape, spec: the global shape, and how the old ranks have it cut.
        itemsize: of its elements.
        missing: the old ranks that lack it.
    """

    shape: tuple[int, ...]
    spec: P
    itemsize: int
    missing: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A part of a shard that is needed: which rank has it, where the shard lies in the whole, and the needed part."""

    rank: int
    index: int
    shard: Box
    box: Box
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """The values of a call.

    Attributes:
        before: the layout of the old ranks.
        at: for each of them the address and port where its host offers values.
        call: the number of the call.
        values: None for a value that is no longer needed, or that no old rank has.
    """

    before: Layout
    at: tuple[tuple[str, int], ...]
    call: int
    values: tuple[Share | None, ...]

    def take(
        self, layout: Layout, specs: Sequence[P], rank: int, who: tuple[str, bytes], allocate: Allocate
    ) -> list[torch.Tensor]:
        """A new rank's shards with these specs.

        Args:
            who: the rank's address, and the key of its mesh.
        """
        taken: list[torch.Tensor | None] = [None] * len(self.values)
        boxes: list[Box] = []
        parts: list[_Part] = []
        for index, (one, spec) in enumerate(zip(self.values, specs, strict=True)):
            boxes.append([] if one is None else box_of(layout, one.shape, spec, rank))
            parts += () if one is None else self._parts(index, one, boxes[index], rank, who[0])
        with contextlib.closing(_Hosts(self.at, who[1], rank)) as hosts:
            for some in _few(parts):
                for part, (leaf, data) in zip(some, hosts.ask(self.call, some), strict=True):
                    index, shard = part.index, taken[part.index]
                    if leaf.gone:
                        raise MeshError(f"rank {part.rank} does not have value {index} of call {self.call}")
                    if leaf.pickled:
                        taken[index] = self._unpickled(index, data)
                        continue
                    if shard is None:
                        shard = taken[index] = _allocated(leaf, self._shape(index), boxes[index], allocate)
                    if len(data):
                        shard.data[within(boxes[index], part.box)].copy_(_laid_out(data, leaf, sizes_of(part.box)))
        return [torch.empty(0, device="cpu") if shard is None else shard for shard in taken]

    def _unpickled(self, index: int, data: memoryview) -> torch.Tensor:
        """A value that travels as a pickle, because it is sparse or quantized."""
        one = self.values[index]
        if one is None or one.spec.entries:
            raise MeshError("a value that is no plain tensor is cut", got=f"{one}", remedy="fetch and delete it")
        found: torch.Tensor = wire.from_bytes(bytes(data))
        return found

    def _shape(self, index: int) -> tuple[int, ...]:
        one = self.values[index]
        assert one is not None
        return one.shape

    def _parts(self, index: int, one: Share, box: Box, rank: int, address: str) -> list[_Part]:
        """The parts that a rank needs for its shard; an empty one if it has no elements, to learn its layout."""
        found: list[_Part] = []
        for owner in self.before.owners(one.spec):
            its = box_of(self.before, one.shape, one.spec, owner)
            if (both := shared(box, its)) is not None:
                donor = self._donor(one, owner, rank, address)
                found += [_Part(donor, index, its, some, _nbytes(some, one)) for some in _split(both, one)]
        if not found:
            donor = self._donor(one, 0, rank, address)
            its = box_of(self.before, one.shape, one.spec, donor)
            found.append(_Part(donor, index, its, [(start, start) for start, _ in its], 0))
        return found

    def _donor(self, one: Share, owner: int, rank: int, address: str) -> int:
        """An old rank with the same shard as `owner`: on the asking rank's host if possible, else spread over all."""
        having = [other for other in self.before.replicas(one.spec, owner) if other not in one.missing]
        near = [other for other in having if self.at[other][0] == address] or having
        return near[rank % len(near)]


class _Hosts:
    """Connections of a new rank to the hosts of the old ones."""

    def __init__(self, at: Sequence[tuple[str, int]], key: bytes, rank: int):
        self._at, self._secret, self._rank = at, secret_of(key), rank
        self._links: dict[tuple[str, int], Link] = {}

    def ask(self, call: int, parts: Sequence[_Part]) -> list[tuple[Leaf, memoryview]]:
        """For each part the layout of its shard, and the part's bytes; raises `PeerLost`."""
        found: dict[int, tuple[Leaf, memoryview]] = {}
        for where in {self._at[part.rank] for part in parts}:
            its = [number for number, part in enumerate(parts) if self._at[part.rank] == where]
            try:
                msg, content = self._link(where).ask(SendParts(call, tuple(_named(parts[number]) for number in its)))
            except (OSError, NotOfThisMesh) as error:
                raise PeerLost(f"what holds ranks at {where[0]} port {where[1]} can't be reached: {error}") from None
            view, at = memoryview(content), 0
            for number, (head, nbytes) in zip(its, msg.sizes, strict=True):
                found[number] = pickle.loads(view[at : at + head]), view[at + head : at + head + nbytes]
                at += head + nbytes
        return [found[number] for number in range(len(parts))]

    def _link(self, where: tuple[str, int]) -> Link:
        if where not in self._links:
            self._links[where] = dial(where, self._secret, self._rank)
        return self._links[where]

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def _named(part: _Part) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """A part as it is named in `SendParts`."""
    inside = within(part.shard, part.box)
    return part.rank, part.index, tuple(one.start for one in inside), tuple(one.stop for one in inside)


def _nbytes(box: Box, one: Share) -> int:
    return math.prod(sizes_of(box)) * one.itemsize


def _split(box: Box, one: Share) -> Iterator[Box]:
    """A large part in smaller ones, each of some of its rows."""
    (start, stop), *rest = box or [(0, 1)]
    rows = max(1, _MOST_BYTES * (stop - start) // max(1, _nbytes(box, one)))
    for at in range(start, stop, rows):
        yield [(at, min(at + rows, stop)), *rest] if box else []


def _few(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """All parts in order, in groups to be asked for together."""
    some: list[_Part] = []
    left = _MOST_BYTES
    for part in parts:
        if some and part.nbytes > left:
            yield some
            some, left = [], _MOST_BYTES
        some.append(part)
        left -= part.nbytes
    if some:
        yield some


def _allocated(leaf: Leaf, shape: tuple[int, ...], box: Box, allocate: Allocate) -> torch.Tensor:
    """Memory for a part of a value, in the memory order of the old shard `leaf`."""
    like = torch.empty(0, dtype=leaf.dtype, device="cpu")
    found = room_for(like, shape, leaf.shape, leaf.stride, sizes_of(box), allocate)
    return torch.nn.Parameter(found, requires_grad=False) if leaf.frozen else found


def _laid_out(data: memoryview, leaf: Leaf, sizes: tuple[int, ...]) -> torch.Tensor:
    """The bytes of a part of the shard `leaf`, as a tensor."""
    buffer = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    buffer.numpy()[:] = data
    return buffer.view(leaf.dtype).as_strided(sizes, strides.dense(sizes, strides.dense(leaf.shape, leaf.stride)))


def secret_of(key: bytes) -> bytes:
    """The secret for these connections, from the key of the ranks' mesh."""
    return code(key, b"values")


class Offered(Serving):
    """The values that one host offers."""

    def __init__(self, address: str, key: bytes, arena: Arena, members: Sequence[int]):
        self._arena, self._members = arena, members
        self._lock = threading.Lock()
        self._values: dict[int, Values] = {}  # by rank; looked up once
        super().__init__(address, secret_of(key), "spmd-offer")

    def serve(self, rank: int, link: Link) -> None:
        while (messages := link.receive()) is not None:
            for msg, _ in messages:
                found = [self._part(msg.call, *part) for part in msg.parts]
                sizes = tuple((len(head), len(data)) for head, data in found)
                link.send(PartsSent(sizes), *(piece for both in found for piece in both if len(piece)))

    def _part(self, call: int, rank: int, index: int, start: Sequence[int], stop: Sequence[int]) -> tuple[Any, Any]:
        """The layout of a shard, if it is here, and the bytes of a part of it, or a pickle of all of it."""
        with self._lock:
            if rank not in self._values:
                self._values[rank] = values_of(self._arena, self._members.index(rank))
            tensors, _ = self._values[rank].get(call, ([], []))
            shard = tensors[index] if index < len(tensors) else None
        leaf = leaf_of(shard)
        head = pickle.dumps(leaf)
        if shard is None or leaf.pickled:
            return head, b"" if shard is None else wire.to_bytes(shard)
        part = shard.detach()[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        layout = strides.dense(part.shape, strides.dense(shard.shape, shard.stride()))
        plain = part if part.stride() == layout else strides.copied(part, layout)
        return head, strides.flat(plain).view(torch.uint8).numpy().data
