"""Messages between ranks of one host: for each ordered pair of ranks a ring with a few places, in the sender's memory.

The sender copies the bytes into a block of its own and posts its offset. The receiver takes posts out of the ring as
they arrive, so that it has room again, and marks the block when it has copied it. Invariant: of a ring's two counters
one is written by the sender and one by the receiver, each on its own cache line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..call import check_received, word_key
from ..collectives import matched
from ..operations import Steps
from .arena import Arena

_RING = 32  # messages under way from one rank to another
_LARGE = 1 << 15  # bytes; before a larger block is allocated, all blocks that were read are freed
# words of a message in a ring, and of the ring's own head; bytes before a message's data
_TAG, _AT, _NBYTES, _STAMP, _MESSAGE = 0, 1, 2, 3, 4
_SENT, _PULLED, _HEAD = 0, 8, 16
_RING_BYTES = (_HEAD + _RING * _MESSAGE) * 8
_BLOCK_HEAD = 64
_WORD = (1 << 64) - 1


class Rings:
    """The rings of one group in one generation, as the rank at `rank` sees them.

    Args:
        ranks: the group's ranks in the mesh.
        key: the group's key, under which rings are published.
    """

    def __init__(self, arena: Arena, ranks: Sequence[int], rank: int, key: int):
        self._arena, self.ranks, self.rank, self._key = arena, tuple(ranks), rank, key
        self._words, self._participants = arena.words, [arena.participant(member) for member in ranks]
        self._rings: dict[tuple[int, int], int] = {}
        self._made: dict[int, int] = {}  # key -> where a ring of this rank's lies
        self._turns: dict[int, int] = {}  # messages started, by destination
        self._unread: deque[tuple[int, int]] = deque()  # (block, bytes) of messages not yet received
        self._arrived: list[tuple[int, int, int, int, int]] = []  # (source, tag, block, bytes, stamp) not asked for yet

    def free_all(self) -> None:
        """Free all memory; only when no peer reads it any more."""
        for key, offset in self._made.items():
            self._arena.directory.forget(key)
            self._arena.heap.free(offset, _RING_BYTES)
        for block, nbytes in self._unread:
            self._arena.heap.free(block, nbytes)
        self._made.clear()
        self._unread.clear()

    def _ring(self, src: int, dst: int) -> int | None:
        """The first word of the ring from `src` to `dst`, or None if the sender has not made it yet."""
        ring = self._rings.get((src, dst))
        if ring is None:
            key = word_key("ring", self._key, src, dst)
            found = self._arena.directory.lookup(self._participants[src], key)
            if found is None and src == self.rank:
                found = self._made[key] = self._arena.heap.allocate(_RING_BYTES)
                self._arena.tensor(found, _RING_BYTES, torch.uint8).zero_()
                self._arena.directory.publish(key, found)
            if found is None:
                return None
            ring = self._rings[src, dst] = found // 8
        return ring

    def send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int) -> Steps:
        words, nbytes, heap = self._words, tensor.numel(), self._arena.heap
        ring = self._ring(self.rank, dst)
        assert ring is not None
        turn = self._turns.get(dst, 0)  # messages to one destination keep their order
        self._turns[dst] = turn + 1
        # Check a few blocks in turn, since some may never be received; all of them before a large block is allocated.
        for _ in range(len(self._unread) if nbytes > _LARGE else min(2, len(self._unread))):
            taken, its_bytes = self._unread.popleft()
            if words[taken // 8]:
                heap.free(taken, its_bytes)
            else:
                self._unread.append((taken, its_bytes))
        block = heap.allocate(_BLOCK_HEAD + nbytes)
        words[block // 8] = 0
        self._arena.tensor(block + _BLOCK_HEAD, nbytes, torch.uint8).copy_(tensor)
        self._unread.append((block, _BLOCK_HEAD + nbytes))
        yield lambda: words[ring + _SENT] == turn and turn - words[ring + _PULLED] < _RING
        at = ring + _HEAD + (turn % _RING) * _MESSAGE
        words[at + _TAG], words[at + _AT], words[at + _NBYTES] = tag & _WORD, block, nbytes
        words[at + _STAMP] = stamp
        words[ring + _SENT] = turn + 1
        self._arena.bells.ring((self._participants[dst],))

    def poll(self) -> None:
        """Take arrived messages out of the rings, so that these never fill up with messages nobody asks for yet."""
        words = self._words
        for src in range(len(self._participants)):
            ring = self._ring(src, self.rank)
            if ring is None:
                continue
            for number in range(words[ring + _PULLED], words[ring + _SENT]):
                at = ring + _HEAD + (number % _RING) * _MESSAGE
                tag, block, nbytes, stamp = words[at : at + _MESSAGE]
                self._arrived.append((src, tag, block, nbytes, stamp))
                words[ring + _PULLED] = number + 1
                self._arena.bells.ring((self._participants[src],))

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int) -> Steps:
        source, _, block, nbytes, sent = yield from matched(self._arrived, src, tag & _WORD)
        check_received(self, source, tag, got=(nbytes, sent), expected=(tensor.numel(), stamp))
        tensor.copy_(self._arena.tensor(block + _BLOCK_HEAD, nbytes, torch.uint8))
        self._words[block // 8] = 1
        return source
