"""Values of a driver's rank that outlive it: large ones lie in the arena, and a ledger in the arena lists all of them.

The bytes of a small value are in its ledger entry; the tensor itself lies in the rank's memory. Large results of the
optimizer and of reductions are made in the arena; others are copied there once, when a call's results are kept.
Invariant: a process that replaces this one finds every value that the driver has been told of, with the same bytes,
strides and alignment.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ...kernels import torch_private
from ...kernels.copying import copy
from ...kernels.flat import extent_bytes, is_lazy, resolved
from ...kernels.shm.arena import Arena
from ...kernels.shm.blocks import Extent
from ...kernels.shm.ledger import Record
from ...kernels.shm.succession import extent_of, kept_by, take_over
from .. import strides, wire
from ..spec import P
from ..strides import frozen_as, is_frozen, is_plain

Values = dict[int, tuple[list[torch.Tensor | None], list[P]]]
"""The number of a call -> its results, and their specs."""
SMALL_BYTES = 1 << 16
_AT = 40  # bits for a tensor's offset in its storage; the bits above say which of the entry's extents that is
_GONE, _INLINE, _STORED, _PICKLED = range(4)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """How to rebuild a tensor: from bytes in the entry, from an extent of the arena, or from a pickle."""

    kind: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    frozen: bool
    nbytes: int  # from its first element to its last

    @property
    def gone(self) -> bool:
        return self.kind == _GONE

    @property
    def pickled(self) -> bool:
        return self.kind == _PICKLED

    def made(self, base: torch.Tensor, at: int) -> torch.Tensor:
        """The tensor that begins `at` bytes into `base`."""
        found = base[at : at + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)
        return torch.nn.Parameter(found, requires_grad=False) if self.frozen else found

    def remade(self, data: Any, at: int) -> torch.Tensor:
        """The tensor from its bytes, `at` bytes behind a multiple of 64, as the first lay: bits may depend on that."""
        at -= at % self.dtype.itemsize
        buffer = torch.empty(at + self.nbytes, dtype=torch.uint8, device="cpu")
        buffer.numpy()[at:] = np.frombuffer(data, np.uint8)
        return self.made(buffer, at)


class _Listed(NamedTuple):
    """How to rebuild a call's values: as a rank uses it, and as their entry begins with it."""

    leaves: tuple[Leaf, ...]
    pickled: bytes

    @staticmethod
    def of(tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> _Listed:
        leaves = tuple(map(leaf_of, tensors))
        return _Listed(leaves, pickle.dumps((leaves, tuple(specs))))


class KnownLayout:
    """The memory layout of values that are all plain tensors: later values need only be checked against it.

    Attributes:
        specs: of each.
        large: indices of those too large for the ledger.
        listed: how the ledger lists such values, once it does.
    """

    __slots__ = ("_complex", "_dtypes", "_shapes", "_strides", "large", "listed", "specs")

    def __init__(self, tensors: Sequence[torch.Tensor], specs: Sequence[P]):
        self.specs = tuple(specs)
        self.listed: _Listed | None = None
        self._shapes, self._strides, self._dtypes = _kinds(tensors)
        self._complex = tuple(index for index, tensor in enumerate(tensors) if tensor.is_complex())
        extents = [extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize) for tensor in tensors]
        self.large = tuple(index for index, nbytes in enumerate(extents) if nbytes > SMALL_BYTES)

    @staticmethod
    def of(tensors: Sequence[Any], specs: Sequence[P]) -> KnownLayout | None:
        """The layout of some tensors; None if not all are plain tensors."""
        plain = all(type(tensor) is torch.Tensor and is_plain(tensor) for tensor in tensors)
        return KnownLayout(tensors, specs) if plain else None

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are plain tensors of this layout whose memory holds their values."""
        try:
            alike = (self._shapes, self._strides, self._dtypes) == _kinds(tensors)
        except (RuntimeError, AttributeError, TypeError):  # a tensor without strides; no tensor
            return False
        return (
            alike
            and not any(map(torch.Tensor.is_neg, tensors))
            and not any(map(torch_private.is_lazy_zero, tensors))
            and not any(tensors[index].is_conj() for index in self._complex)
        )


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return list(map(_shape_of, tensors)), list(map(torch.Tensor.stride, tensors)), list(map(_dtype_of, tensors))


_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


class LastingValues:
    """The values that a rank keeps, by the number of the call that made them."""

    def __init__(self, arena: Arena):
        self._arena, self._lasting, self._ledger = arena, arena.lasting, arena.ledger
        self._kept: dict[int, tuple[int, tuple[Leaf, ...]]] = {}  # call -> its entry, and how to rebuild it

    def lay_out(self, leaves: list[Any], known: KnownLayout | None = None) -> None:
        """Move results, in place in the list, to memory that lasts, except those small enough for the ledger."""
        found: dict[int, list[int]] = {}  # storage -> the results in it that are to be copied
        for index in range(len(leaves)) if known is None else known.large:
            leaf = leaves[index]
            if not isinstance(leaf, torch.Tensor):
                continue
            if is_lazy(leaf):
                leaf = leaves[index] = frozen_as(leaf, resolved(leaf))
            if self._is_to_be_copied(leaf):
                found.setdefault(leaf.untyped_storage().data_ptr(), []).append(index)
        for address, indexes in found.items():
            storage = leaves[indexes[0]].untyped_storage()
            if 2 * sum(leaves[index].nbytes for index in indexes) >= storage.nbytes():
                # Parameters that lie side by side stay so, and results that share memory go on to share it.
                self._move(leaves, address, storage)
                continue
            for index in indexes:
                leaves[index] = self._copied(leaves[index])

    def _is_to_be_copied(self, leaf: torch.Tensor) -> bool:
        if not is_plain(leaf):
            return False
        if extent_bytes(leaf.shape, leaf.stride(), leaf.itemsize) <= SMALL_BYTES:
            return False
        return extent_of(self._arena, leaf.untyped_storage()) is None

    def _move(self, leaves: list[Any], address: int, storage: torch.UntypedStorage) -> None:
        """Copy a storage, and make all results in it views of the copy."""
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        block = copy(self._lasting.empty(storage.nbytes()), whole).untyped_storage()
        for index, leaf in enumerate(leaves):
            plain = isinstance(leaf, torch.Tensor) and is_plain(leaf)
            if plain and leaf.numel() and leaf.untyped_storage().data_ptr() == address:
                moved = torch.empty(0, dtype=leaf.dtype, device="cpu")
                moved.set_(block, leaf.storage_offset(), leaf.shape, leaf.stride())
                leaves[index] = frozen_as(leaf, moved)

    def _copied(self, leaf: torch.Tensor) -> torch.Tensor:
        source = leaf.detach()
        order = strides.dense(source.shape, source.stride())
        block = self._lasting.empty(source.nbytes).view(source.dtype).as_strided(source.shape, order)
        if order == source.stride():
            copy(strides.flat(block), strides.flat(source))
        else:
            block.copy_(source)
        return frozen_as(leaf, block)

    def allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for `numel` elements of a tensor's kind: memory that lasts, if they are many."""
        nbytes = numel * like.element_size()
        if nbytes <= SMALL_BYTES or not like.is_cpu:
            return like.new_empty(numel)
        return self._lasting.empty(nbytes).view(like.dtype)

    def keep(self, call: int, tensors: Sequence[Any], specs: Sequence[P], known: KnownLayout | None = None) -> None:
        """Note a call's values in the ledger, in place of what was noted of that call before."""
        before = self._kept.get(call)
        listed = None if known is None else known.listed
        if listed is None:
            listed = _Listed.of(tensors, specs)
            if known is not None:
                known.listed = listed
        self._kept[call] = self._written(call, tensors, listed), listed.leaves
        if before is not None:
            self._ledger.remove(before[0])

    def _written(self, call: int, tensors: Sequence[torch.Tensor | None], listed: _Listed) -> int:
        """Write an entry; gives its number."""
        extents: dict[Extent, int] = {}
        words: list[int] = []
        addresses: list[int] = []
        sizes: list[int] = []
        data = listed.pickled
        which = first = stop = 0  # of the last storage: many parameters lie side by side in one
        for tensor, leaf in zip(tensors, listed.leaves, strict=True):
            if tensor is None:
                words.append(0)
            elif leaf.kind == _INLINE:
                address = tensor.data_ptr()
                words.append(address & 63)
                addresses.append(address)
                sizes.append(leaf.nbytes)
            elif leaf.kind == _PICKLED:
                pickled = wire.to_bytes(tensor)
                words.append(len(pickled))
                data += pickled
            else:
                address = tensor.data_ptr()
                if not first <= address <= stop - leaf.nbytes:
                    storage = tensor.untyped_storage()
                    # If the program has written to a value since (it should not), its changes do not count, and are
                    # lost with the rank.
                    extent = extent_of(self._arena, storage, written=True)
                    assert extent is not None, "a large value that is kept has been placed"
                    which = extents.setdefault(extent, len(extents))
                    first, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                words.append(which << _AT | address - first)
        return self._ledger.write(call, tuple(extents), (len(listed.pickled), *words), data, addresses, sizes)

    def shrink(self, call: int, tensors: Sequence[torch.Tensor | None], specs: Sequence[P]) -> None:
        """Note that some of a call's values are gone; called before their memory is freed.

        The entry is not written again if that would save only a few bytes in it.
        """
        if call not in self._kept:
            return
        _, leaves = self._kept[call]
        gone = [leaf for leaf, tensor in zip(leaves, tensors, strict=True) if tensor is None]
        small = sum(leaf.nbytes for leaf in gone if leaf.kind == _INLINE)
        if 2 * small > sum(leaf.nbytes for leaf in leaves if leaf.kind == _INLINE) or any(
            leaf.kind in (_STORED, _PICKLED) for leaf in gone
        ):
            self.keep(call, tensors, specs)

    def forget(self, call: int) -> None:
        """Note that all of a call's values are gone; called before their memory is freed."""
        if call in self._kept:
            self._ledger.remove(self._kept.pop(call)[0])

    def take_over(self) -> Values:
        """The values that the process before this one kept, by the number of their call."""
        found = _values(take_over(self._arena))
        with self._ledger.anew():
            for call, (tensors, specs) in found.items():
                self.keep(call, tensors, specs)
        return found


def values_of(arena: Arena, rank: int) -> Values:
    """The values that a rank keeps, by the number of their call, as views of its memory; it must be doing nothing."""
    return _values(kept_by(arena, rank))


def _values(records: Sequence[tuple[Record, list[torch.Tensor]]]) -> Values:
    loads = functools.cache(pickle.loads)  # most calls list their values in the same words
    found: Values = {}
    for one, bases in records:
        leaves, specs = loads(one.data[: one.words[0]])
        found[one.number] = _tensors(one, leaves, bases), list(specs)
    return found


def leaf_of(tensor: torch.Tensor | None) -> Leaf:
    if tensor is None:
        return Leaf(_GONE, (), (), torch.float32, False, 0)
    if not is_plain(tensor):
        return Leaf(_PICKLED, (), (), tensor.dtype, is_frozen(tensor), 0)
    return _plain(tensor.shape, tensor.stride(), tensor.dtype, is_frozen(tensor))


@functools.lru_cache(maxsize=1024)
def _plain(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, frozen: bool) -> Leaf:
    nbytes = extent_bytes(shape, stride, dtype.itemsize)
    return Leaf(_INLINE if nbytes <= SMALL_BYTES else _STORED, tuple(shape), stride, dtype, frozen, nbytes)


def _tensors(record: Record, leaves: Sequence[Leaf], bases: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    at, pickled = 0, record.words[0]
    for leaf, word in zip(leaves, record.words[1:], strict=True):
        if leaf.kind == _GONE:
            found.append(None)
        elif leaf.kind == _PICKLED:
            found.append(wire.from_bytes(record.data[pickled : pickled + word]))
            pickled += word
        elif leaf.kind == _STORED:
            found.append(leaf.made(bases[word >> _AT], word & (1 << _AT) - 1))
        else:
            found.append(leaf.remade(record.pieces[at : at + leaf.nbytes], word))
            at += leaf.nbytes
    return found


def copy_out(leaves: list[Any], borrowed: Sequence[int]) -> None:
    """Copy borrowed leaves out of their shared blocks, in place in the list, unless they fill most of a block.

    A small view (a loss beside a bucket of gradients) would keep its whole block in use; new parameters, side by side
    in one block that all ranks read, are better left where they are.
    """
    blocks: dict[int, list[int]] = {}
    first = stop = 0  # of the last block: most lie side by side
    for index in borrowed:
        if not first <= leaves[index].data_ptr() < stop:
            block = leaves[index].untyped_storage()
            first, stop = block.data_ptr(), block.data_ptr() + block.nbytes()
        blocks.setdefault(first, []).append(index)
    for members in blocks.values():
        used = sum([leaves[index].nbytes for index in members])
        if 2 * used < leaves[members[0]].untyped_storage().nbytes():
            for index in members:
                leaves[index] = frozen_as(leaves[index], leaves[index].clone())
