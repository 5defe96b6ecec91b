"""How a mesh's values get to the new ranks when it is resized.

On one host, the new ranks are told where the shards of sharded values lie (`pieces`), and replicated values are put
once where all see them. Over several hosts, the new ranks fetch their shards (`shares`) before the switch, so that the
mesh is as it was if something dies meanwhile. Invariant: no old rank takes part, so that it does not matter which of
them are still alive.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ...kernels.errors import MeshError
from .. import protocol, wire
from ..array import Meta
from ..driver.pending import Pure, Task
from ..driver.rerun import send_at_once
from ..driver.sending import put_message
from ..driver.session import DriverSession
from ..driver.values import CallValues
from ..hosts.ranks import HostRanks
from ..rank.lasting_values import values_of
from ..spec import RAGGED, REPLICATED, Layout, P
from ..strides import frozen_as, is_plain
from .newcomers import Died, Newcomers
from .pieces import Piece, Pieces, Source
from .shares import Share, Shares

_SLOWEST = 10 << 20  # bytes a second: beyond the timeout, ranks get as long to fetch values as this rate takes


class Moved:
    """All values of a mesh on one host, for another layout; they lie in the old ranks' arena while this is alive."""

    def __init__(self, driver: DriverSession, arena: Any, layout: Layout):
        before = driver.layout
        kept = [values_of(arena, rank) for rank in range(before.size)]
        source = Source(os.getpid(), arena.fd, arena.size)
        self._calls: list[tuple[CallValues, list[torch.Tensor | Pieces], dict[int, P]]] = []
        driver.values.sort()
        for values in driver.values.of_calls(read=False):
            found = [each[values.number] for each in kept if values.number in each]
            failed = values.task is not None and values.task.failure is not None
            if failed or len(found) < before.size or not values.live:
                continue
            wholes: list[torch.Tensor | Pieces] = []
            specs: dict[int, P] = {}
            for index, about in enumerate(values.settle()):
                shards = [shard for tensors, _ in found if (shard := tensors[index]) is not None]
                if len(shards) < before.size:
                    wholes.append(torch.empty(0, device="cpu"))
                    specs[index] = REPLICATED  # it is gone: at the next resize there is nothing to cut
                    continue
                specs[index] = spec = spec_on(before, layout, about, driver.describe())
                usual = about.shards is None and RAGGED not in about.shape
                if spec.entries and usual and all(map(is_plain, shards)):
                    wholes.append(_pieces(before, about, shards, source, arena))
                else:
                    wholes.append(frozen_as(shards[0], before.join(shards, about.spec)))
            self._calls.append((values, wholes, specs))

    def put(self, driver: DriverSession) -> list[Task]:
        """Send them to the new ranks, which are the mesh's now."""
        tasks = []
        for values, wholes, specs in self._calls:
            values.was_cut(specs)
            cuts = tuple(specs.get(index, REPLICATED) for index in range(len(wholes)))
            tasks.append(_put(driver, values, wholes, cuts))
        return tasks


def _put(driver: DriverSession, values: CallValues, wholes: list[Any], specs: tuple[P, ...]) -> Task:
    make, content = put_message(driver, values, wholes, specs)
    return send_at_once(driver, Pure("put"), make, content(), range(driver.layout.size))


def _pieces(before: Layout, about: Meta, shards: list[torch.Tensor], source: Source, arena: Any) -> Pieces:
    """A sharded value, for ranks that read it from the arena."""
    pieces = []
    for rank in before.owners(about.spec):
        shard = shards[rank]
        begin = [part.start for part in before.slices(about.shape, about.spec, rank)]
        begin += [0] * (len(about.shape) - len(begin))
        # Small ones were copied out of the ledger.
        data = shard.data_ptr() - arena.address if arena.is_borrowed(shard) else shard
        pieces.append(Piece(tuple(begin), tuple(shard.shape), tuple(shard.stride()), data))
    return Pieces(source, tuple(about.shape), frozen_as(shards[0], shards[0].new_empty(0)), tuple(pieces))


def spec_on(before: Layout, after: Layout, about: Meta, where: str) -> P:
    """A value's spec on a mesh of other sizes: the same, or `P()` if these do not divide its dimensions."""
    for dim in range(len(about.spec.entries)):
        axes = about.spec.dim_axes(dim)
        if before.parts(axes) == after.parts(axes) and all(before.axes[name] == after.axes[name] for name in axes):
            continue
        if len([name for name in axes if before.axes[name] > 1 or after.axes[name] > 1]) > 1:
            # The parts of a sharded optimizer state are in the order of the old ranks.
            raise MeshError(
                "the mesh cannot be resized: a value is cut over several axes in one dimension",
                got=f"shape {tuple(about.shape)} with {about.spec}",
                where=where,
                remedy="resize along an axis that does not cut it, or start anew from whole values",
            )
        if about.shape[dim] % after.parts(axes) or about.shape[dim] == RAGGED:
            return REPLICATED
    return about.spec


def bytes_to_move(driver: DriverSession, layout: Layout) -> tuple[int, int]:
    """About how many bytes of values all ranks of another layout will share, and how many each will have for itself."""
    shared = own = 0
    driver.values.sort()
    for values in driver.values.of_calls(read=False):
        for about in values.hints if values.live else ():
            nbytes = max(0, math.prod(about.shape)) * about.dtype.itemsize
            if about.spec.entries:
                own += nbytes // layout.parts(tuple(about.spec.axes))
            else:
                shared += nbytes
    return shared, own


class MovedBetweenHosts:
    """All values of a mesh over several hosts, for newcomers of another layout, which have them once this is made.

    It is made while the lock is held and no rank has anything to do.

    Raises:
        Died: a newcomer or a host has died. MeshError: a value can't be moved.
    """

    def __init__(self, driver: DriverSession, newcomers: Newcomers):
        old, new, layout = driver.ranks, newcomers.ranks, newcomers.layout
        assert isinstance(old, HostRanks)
        assert isinstance(new, HostRanks)
        driver.values.sort()
        self._calls = [
            (values, shares, _specs(driver, layout, values, shares))
            for values in driver.values.of_calls(read=False)
            if values.live and (values.task is None or values.task.failure is None)
            for shares in [_shares(driver.layout, values)]
        ]
        try:
            at = old.offered_to(new)
        except MeshError as error:  # a host is lost: the mesh finds it out, too
            raise Died(str(error)) from None
        messages = []
        for values, shares, specs in self._calls:
            task = protocol.PutValues(next(driver.numbers), 0, (), (), values.number, specs, None)
            messages.append((task, wire.dumps(Shares(driver.layout, at, values.number, shares))))
        shared, own = bytes_to_move(driver, layout)
        newcomers.take(messages, driver.timeout + (shared + own) / _SLOWEST)
        if driver.options["copies"]:
            newcomers.copy(driver.uncopied.copy_to(new, driver.values), driver.timeout + own / _SLOWEST)

    def put(self, driver: DriverSession) -> list[Task]:
        """Note that the values are on the new ranks; there is no task to wait for."""
        driver.uncopied.close()
        for values, shares, specs in self._calls:
            values.was_cut({index: spec for index, spec in enumerate(specs) if shares[index] is not None})
            lost = [index for index in values.missing if shares[index] is None]
            values.missing = {index: set(range(driver.layout.size)) for index in lost}
        return []


def _shares(before: Layout, values: CallValues) -> tuple[Share | None, ...]:
    """The values of a call; None for those that are no longer needed, or that no rank has."""
    found: list[Share | None] = []
    for index, about in enumerate(values.settle()):
        missing = frozenset(values.missing.get(index, ()))
        gone = index in values.donated or values.was_freed(index)
        lost = any(missing.issuperset(before.replicas(about.spec, owner)) for owner in before.owners(about.spec))
        share = Share(tuple(about.shape), about.spec, about.dtype.itemsize, missing)
        found.append(None if gone or lost else share)
    return tuple(found)


def _specs(
    driver: DriverSession, layout: Layout, values: CallValues, shares: tuple[Share | None, ...]
) -> tuple[P, ...]:
    """Their specs on the new ranks."""
    for share, about in zip(shares, values.settle(), strict=True):
        if share is not None and about.shards is not None:
            raise MeshError(
                "the mesh cannot be resized: the ranks' parts of a value have sizes of their own",
                got=f"shape {tuple(about.shape)} with {about.spec}, in parts of {', '.join(map(str, about.shards))}",
                where=driver.describe(),
                remedy="drop it, or put(array.full(), spec) it first",
            )
    return tuple(
        REPLICATED if share is None else spec_on(driver.layout, layout, about, driver.describe())
        for about, share in zip(values.settle(), shares, strict=True)
    )
