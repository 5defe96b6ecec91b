"""Waiting: what ends it, and how soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from patience import HANGS, soon

from spmd import PeerLost
from spmd.kernels import waiting
from spmd.kernels.errors import Aborted
from spmd.kernels.waiting import (
    LOST_SECONDS,
    PEER_CHECK_SECONDS,
    SAVED_SECONDS,
    SPINS,
    TAKEN_SECONDS,
    YIELDS,
    Cores,
    wait_until,
    yielded,
)


class FakeWatch:
    """Counts the looks; raises when told to."""

    def __init__(self) -> None:
        self.generation = 1
        self.checks = self.peer_checks = 0
        self.aborted = self.lost = self.debugged = False

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

    def in_debugger(self) -> bool:
        return self.debugged


class Clock:
    """What `wait_until` uses of `time`: to look costs a little, and to sleep just as long as was said."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Yielding:
    """A core that is given away comes back after so many seconds."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch):
        self.clock, self.seconds, self.count = clock, 0.0, 0
        monkeypatch.setattr(waiting.os, "sched_yield", self)
        monkeypatch.setattr(waiting, "cores", Cores())

    def __call__(self) -> None:
        self.count += 1
        self.clock.sleep(self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that no load makes jump."""
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


def on_timeout() -> BaseException:
    return TimeoutError("on_timeout")


@pytest.fixture(params=[True, False], ids=["oversubscribed", "roomy"])
def oversubscribed(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_ready_at_once(oversubscribed: bool) -> None:
    watch, calls = FakeWatch(), []
    wait_until(
        lambda: calls.append(1) is None, watch, timeout=1.0, oversubscribed=oversubscribed, on_timeout=on_timeout
    )
    assert len(calls) == 1
    assert watch.checks == 0


def test_spins_only_where_there_is_room() -> None:
    for oversubscribed, spins in ((True, 0), (False, SPINS)):
        watch, calls = FakeWatch(), []
        wait_until(
            lambda: calls.append(1) or watch.checks >= 3,  # type: ignore[func-returns-value]  # noqa: B023
            watch,
            timeout=HANGS,
            oversubscribed=oversubscribed,
            on_timeout=on_timeout,
        )
        assert len(calls) == spins + 4


def test_timeout(oversubscribed: bool) -> None:
    watch = FakeWatch()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="on_timeout"):
        wait_until(lambda: False, watch, timeout=0.05, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert time.monotonic() - began >= 0.05 and soon(0.5, began)


def test_peers_are_looked_at_meanwhile(oversubscribed: bool, clock: Clock) -> None:
    watch = FakeWatch()
    with pytest.raises(TimeoutError, match="on_timeout"):
        wait_until(lambda: False, watch, timeout=0.05, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert 0.05 <= clock.now < 0.06
    assert 0.05 / PEER_CHECK_SECONDS / 2 <= watch.peer_checks <= 0.05 / PEER_CHECK_SECONDS


def test_time_in_which_all_were_stopped_does_not_count(oversubscribed: bool, clock: Clock) -> None:
    """As after SIGSTOP and SIGCONT for a whole job, or on a machine that was paused."""
    watch, began = FakeWatch(), []

    def stopped_twice() -> bool:
        if clock.now - sum(began) > 1.0 and len(began) < 2:
            began.append(1000.0)
            clock.sleep(1000.0)
        return clock.now > 2005.0

    wait_until(stopped_twice, watch, timeout=10.0, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert len(began) == 2
    began.clear()
    clock.now = 0.0
    with pytest.raises(TimeoutError):
        wait_until(stopped_twice, watch, timeout=2.0, oversubscribed=oversubscribed, on_timeout=on_timeout)


def test_no_timeout_while_a_peer_is_in_a_debugger(oversubscribed: bool) -> None:
    watch, went_on = FakeWatch(), threading.Event()
    watch.debugged = True

    def go_on() -> None:
        went_on.set()
        watch.debugged = False

    timer = threading.Timer(0.3, go_on)
    timer.start()
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, watch, timeout=0.05, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert went_on.is_set()
    timer.join()


def test_an_abort_ends_it(oversubscribed: bool) -> None:
    watch = FakeWatch()
    timer = threading.Timer(0.03, watch.abort, ("",))
    timer.start()
    began = time.monotonic()
    with pytest.raises(Aborted, match="given up"):
        wait_until(lambda: False, watch, timeout=5.0, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert soon(1.0, began)
    timer.join()


def test_a_lost_peer_ends_it(oversubscribed: bool) -> None:
    watch = FakeWatch()
    watch.lost = True
    with pytest.raises(PeerLost) as caught:
        wait_until(lambda: False, watch, timeout=5.0, oversubscribed=oversubscribed, on_timeout=on_timeout)
    assert caught.value.rank == 1


def test_looks_for_the_reason_now_and_then(clock: Clock) -> None:
    watch, looks = FakeWatch(), []

    def on_stall() -> None:
        looks.append(clock.now)
        if len(looks) == 3:
            raise ValueError("that is why")

    with pytest.raises(ValueError, match="that is why"):
        wait_until(lambda: False, watch, timeout=5.0, oversubscribed=True, on_timeout=on_timeout, on_stall=on_stall)
    assert looks[0] >= PEER_CHECK_SECONDS
    assert looks[2] - looks[0] >= 1.9 * PEER_CHECK_SECONDS
    assert watch.peer_checks == 3


def test_sleeps_until_it_is_woken() -> None:
    """Where who is waited for can wake it; a moment's sleep is given what it waits for, to look once more."""
    woken = threading.Event()
    timer = threading.Timer(0.05, woken.set)
    sleeps: list[bool] = []

    def sleep(ready: Callable[[], bool]) -> None:
        sleeps.append(ready())
        timer.start()
        woken.wait(HANGS)

    wait_until(woken.is_set, FakeWatch(), timeout=HANGS, oversubscribed=True, on_timeout=on_timeout, sleep=sleep)
    assert sleeps == [False]
    timer.join()


def test_a_long_wait_costs_little() -> None:
    """It sleeps: a tenth of a second of waiting takes far less of a core."""
    calls: list[int] = []
    used = time.thread_time()
    with pytest.raises(TimeoutError):
        wait_until(
            lambda: calls.append(1) is not None, FakeWatch(), timeout=0.2, oversubscribed=True, on_timeout=on_timeout
        )
    assert time.thread_time() - used < 0.1
    assert len(calls) < 20_000


def test_cores_are_given_away_a_few_times(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among ranks that wait for each other on one core: it is back at once."""
    core = Yielding(clock, monkeypatch)
    assert not yielded(lambda: False)
    assert core.count == YIELDS
    assert yielded(lambda: core.count >= YIELDS + 3)
    assert core.count == YIELDS + 3


def test_cores_that_others_want_are_left_to_them(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are kept again and again: for longer each time, until more is saved than lost."""
    core = Yielding(clock, monkeypatch)
    core.seconds = 3e-3
    away = []
    for _ in range(3):
        while not waiting.cores.wanted(clock.monotonic()):
            assert not yielded(lambda: False)
        assert core.count < YIELDS
        began = clock.now
        while waiting.cores.wanted(clock.monotonic()):
            clock.sleep(1e-4)
        away.append(clock.now - began)
    assert away[0] < away[1] < away[2]
    core.seconds = 1e-6
    for _ in range(round(LOST_SECONDS / SAVED_SECONDS)):
        assert yielded(lambda: True)
    core.seconds = 3e-3
    assert yielded(lambda count=core.count: core.count > count)
    assert not waiting.cores.wanted(clock.monotonic())


def test_a_core_that_is_kept_seldom_is_given_away(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that computes keeps it for a while, too."""
    core = Yielding(clock, monkeypatch)
    for turn in range(1000):
        core.seconds = 20 * TAKEN_SECONDS if turn % 100 == 0 else 1e-6
        assert yielded(lambda count=core.count: core.count > count)
