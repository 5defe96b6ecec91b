"""What becomes of a mesh's values when it gets another size, over several hosts: the new ranks fetch them.

They go from host to host, or within one, and not through the driver; and where values have copies, so have the new
ones. All of that happens before the mesh has the new ranks, so that whoever dies meanwhile, it is as it was. Invariant:
no rank that is about to leave takes part.
"""

from __future__ import annotations

from ...kernels.errors import MeshError
from .. import protocol, wire
from ..driver.pending import Task
from ..driver.session import DriverSession
from ..driver.values import CallValues
from ..hosts.ranks import HostRanks
from ..spec import REPLICATED, Layout, P
from .moved import bytes_to_move, spec_on
from .newcomers import Died, Newcomers
from .shares import Share, Shares

_SLOWEST = 10 << 20  # bytes a second that a rank fetches; more than that late, and it counts as silent


class MovedBetweenHosts:
    """All values of a mesh, for newcomers of another layout, which have them once this is made.

    It is made with the lock, while no rank has anything to do.

    Raises:
        Died: a newcomer has died, or a host. MeshError: a value can't be moved.
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
        """Know them on the ranks that there are now: none has to be waited for."""
        driver.uncopied.close()
        for values, shares, specs in self._calls:
            values.was_cut({index: spec for index, spec in enumerate(specs) if shares[index] is not None})
            lost = [index for index in values.missing if shares[index] is None]
            values.missing = {index: set(range(driver.layout.size)) for index in lost}
        return []


def _shares(before: Layout, values: CallValues) -> tuple[Share | None, ...]:
    """The values of a call, without those that are needed no more, and those that nobody has."""
    found: list[Share | None] = []
    freed = values.freed_names()
    for index, about in enumerate(values.settle()):
        missing = frozenset(values.missing.get(index, ()))
        gone = index in values.donated or any(freed[at + 1] <= index < freed[at + 2] for at in range(0, len(freed), 3))
        lost = any(missing.issuperset(before.replicas(about.spec, owner)) for owner in before.owners(about.spec))
        share = Share(tuple(about.shape), about.spec, about.dtype.itemsize, missing)
        found.append(None if gone or lost else share)
    return tuple(found)


def _specs(
    driver: DriverSession, layout: Layout, values: CallValues, shares: tuple[Share | None, ...]
) -> tuple[P, ...]:
    """How the new ranks are to have them."""
    return tuple(
        REPLICATED if share is None else spec_on(driver.layout, layout, about, driver.describe())
        for about, share in zip(values.settle(), shares, strict=True)
    )
