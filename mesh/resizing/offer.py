"""What the ranks of a host have, for ranks of a mesh of another size that are about to take it over.

The process that holds a host's ranks reads it from what these share, where their ledgers say what they keep, and sends
the parts that a new rank asks for. Invariant: no rank that is about to leave takes part; they rest, or are no more.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.network.authentication import code
from ...kernels.shm.arena import Arena
from .. import strides, wire
from ..hosts import protocol
from ..hosts.link import Link
from ..hosts.serving import Serving
from ..rank.lasting_values import Values, leaf_of, values_of


def secret_of(key: bytes) -> bytes:
    """What ranks prove that they have, from the key of their mesh."""
    return code(key, b"values")


class Offered(Serving):
    """The values of one host.

    Args:
        address: of this host, at which ranks of others reach it.
        key: of the mesh that takes them over.
        arena: of this host.
        members: the ranks that share it.
    """

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
                link.send(protocol.PartsSent(sizes), *(piece for both in found for piece in both if len(piece)))

    def _part(self, call: int, rank: int, index: int, start: Sequence[int], stop: Sequence[int]) -> tuple[Any, Any]:
        """How a shard lies in memory, if it is here, and the bytes of a part of it, or a pickle of all of it."""
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
