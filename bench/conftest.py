"""Feeds pytest-benchmark: a case is measured once, all contenders in turn, and each then becomes an entry of its own.

By itself, pytest-benchmark would run one contender to its end before the next begins, and all in its own process. So
its entries replay what the harness has measured: each round sets their clock forward by one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fit
import pytest
import report
import results
from harness import Groups


class Replay:
    """A clock that goes forward by the next sample whenever `step` is called."""

    def __init__(self) -> None:
        self.now, self.samples = 0.0, iter(())

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now += next(self.samples)


CLOCK = Replay()
RECORDS: dict[str, list[dict[str, Any]]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, default=results.FOLDER, help="folder for the JSON and the plots")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with Groups() as started:
        yield started


@pytest.fixture
def measured(groups: Groups, request: pytest.FixtureRequest) -> Callable:
    """`measured(suite, function, *case)` is `function(groups, *case)`, called once for all contenders."""
    cache = request.session.stash.setdefault(CASES, {})

    def get(suite: str, function: Callable, *case: Any) -> dict[str, Any]:
        key = (suite, *case)
        if key not in cache:
            cache[key] = function(groups, *case)
            RECORDS.setdefault(suite, []).append(cache[key])
        return cache[key]

    return get


CASES: pytest.StashKey[dict[Any, dict[str, Any]]] = pytest.StashKey()


@pytest.fixture
def measured_many(groups: Groups) -> Callable:
    """The same for a function that returns several records."""

    def get(suite: str, function: Callable, *case: Any) -> list[dict[str, Any]]:
        records = function(groups, *case)
        RECORDS.setdefault(suite, []).extend(records)
        return records

    return get


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Callable:
    """`replay(record, contender)` makes the contender's samples an entry of pytest-benchmark."""

    def feed(record: dict[str, Any], contender: str) -> None:
        if contender in record["missing"]:
            pytest.skip(record["missing"][contender])
        benchmark = request.getfixturevalue("benchmark")
        benchmark.group = f"{record['work']} {record['case']}, {record['ranks']} ranks"
        samples = record["seconds"][contender]
        CLOCK.samples = iter(samples)
        benchmark.pedantic(CLOCK.step, rounds=len(samples), iterations=1)

    return feed


def pytest_sessionfinish(session: pytest.Session) -> None:
    for suite, cases in RECORDS.items():
        more = {"fits": fit.add_fits(cases)} if suite == "scaling" else {}
        results.save(suite, cases, session.config.getoption("--results"), **more)


@pytest.hookimpl(trylast=True)  # after pytest-benchmark's own table
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if RECORDS:
        folder = config.getoption("--results")
        terminalreporter.section("targets")
        text = report.text(results.load(folder)) + "\n"
        terminalreporter.write(text)
        (folder / "table.txt").write_text(text)
        for path in report.plot(results.load(folder), folder):
            terminalreporter.write_line(f"wrote {path}")
