"""Waiting: what ends it, and how soon."""

from __future__ import annotations

import threading
import time

import pytest
from scripts import soon

from spmd.kernels.errors import Aborted, PeerLost
from spmd.kernels.waiting import PEER_CHECK_SECONDS, SPINS, wait_until


class FakeWatch:
    """Counts the looks; raises when told to."""

    def __init__(self) -> None:
        self.generation = 1
        self.checks = self.peer_checks = 0
        self.aborted = self.lost = False

    def abort(self, text: str) -> None:
        self.aborted = True

    def check(self) -> None:
        self.checks += 1
        if self.aborted:
            raise Aborted("given up")

    def check_peers(self) -> None:
        self.peer_checks += 1
        if self.lost:
            raise PeerLost("rank 1 died", 1)


def overdue() -> BaseException:
    return TimeoutError("overdue")


@pytest.fixture(params=[True, False], ids=["crowded", "roomy"])
def crowded(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_ready_at_once(crowded: bool) -> None:
    watch, calls = FakeWatch(), []
    wait_until(lambda: calls.append(1) is None, watch, timeout=1.0, crowded=crowded, overdue=overdue)
    assert len(calls) == 1
    assert watch.checks == 0


def test_spins_only_where_there_is_room() -> None:
    for crowded, spins in ((True, 0), (False, SPINS)):
        watch, calls = FakeWatch(), []
        wait_until(
            lambda: calls.append(1) or watch.checks >= 3,  # type: ignore[func-returns-value]  # noqa: B023
            watch,
            timeout=1.0,
            crowded=crowded,
            overdue=overdue,
        )
        assert len(calls) == spins + 4


def test_timeout(crowded: bool) -> None:
    watch = FakeWatch()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="overdue"):
        wait_until(lambda: False, watch, timeout=0.05, crowded=crowded, overdue=overdue)
    assert time.monotonic() - began >= 0.05 and soon(0.5, began)
    assert watch.peer_checks >= 2


def test_an_abort_ends_it(crowded: bool) -> None:
    watch = FakeWatch()
    timer = threading.Timer(0.03, watch.abort, ("",))
    timer.start()
    began = time.monotonic()
    with pytest.raises(Aborted, match="given up"):
        wait_until(lambda: False, watch, timeout=5.0, crowded=crowded, overdue=overdue)
    assert soon(1.0, began)
    timer.join()


def test_a_lost_peer_ends_it(crowded: bool) -> None:
    watch = FakeWatch()
    watch.lost = True
    with pytest.raises(PeerLost) as caught:
        wait_until(lambda: False, watch, timeout=5.0, crowded=crowded, overdue=overdue)
    assert caught.value.rank == 1


def test_looks_for_the_reason_now_and_then() -> None:
    watch, looks = FakeWatch(), []

    def late() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise ValueError("that is why")

    began = time.monotonic()
    with pytest.raises(ValueError, match="that is why"):
        wait_until(lambda: False, watch, timeout=5.0, crowded=True, overdue=overdue, late=late)
    assert looks[0] - began >= PEER_CHECK_SECONDS
    assert looks[2] - looks[0] >= 1.9 * PEER_CHECK_SECONDS
    assert watch.peer_checks == 3


def test_a_long_wait_costs_little() -> None:
    """It sleeps: a tenth of a second of waiting takes far less of a core."""
    calls: list[int] = []
    used = time.process_time()
    with pytest.raises(TimeoutError):
        wait_until(lambda: calls.append(1) is not None, FakeWatch(), timeout=0.2, crowded=True, overdue=overdue)
    assert time.process_time() - used < 0.1
    assert len(calls) < 20_000
