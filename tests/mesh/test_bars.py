"""Progress bars of ranks: one for the whole mesh, as far as the slowest rank; each form drawn where it belongs."""

from __future__ import annotations

import contextvars
import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from internals import compare_late_output
from patience import HANGS
from tqdm import tqdm
from tqdm.notebook import tqdm_notebook

from spmd import Mesh, axis_index
from spmd.mesh.display.bars import LINGER, WINDOW, Bars, BarState


@dataclasses.dataclass(eq=False)
class Drawn:
    """Stands for a bar on the screen."""

    desc: str = ""
    total: float | None = None
    leave: bool = True
    n: float = 0
    postfix: str | None = None
    closed: bool = False
    drawn: list[tuple[str, float]] = dataclasses.field(default_factory=list)

    def set_description_str(self, desc: str) -> None:
        assert not self.closed
        self.drawn.append((desc, self.n))

    def close(self) -> None:
        self.closed = True


class Task:
    def __init__(self) -> None:
        self.context, self.ranks = contextvars.copy_context(), (0, 1, 2)


class Screen:
    def __init__(self) -> None:
        self.now, self.bars, self.task = 0.0, [], Task()
        self.merged = Bars(self._make, lambda: self.now)

    def _make(self, **options: Any) -> Drawn:
        self.bars.append(Drawn(**options))
        return self.bars[-1]

    def report(self, rank: int, n: float, *, desc: str = "", number: int = 1, total: int = 10, **others: Any) -> None:
        name = others.pop("name", desc)
        state = BarState(number, name, n, desc, others.pop("postfix", ""), (("total", total),), **others)
        self.merged.report(rank, self.task, state)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_alike_bars_are_one_that_shows_the_slowest_rank(screen: Screen) -> None:
    for rank in (1, 0, 2):
        screen.report(rank, 0, desc="train: ")
    for n in range(1, 11):
        screen.report(0, n, desc="train: ")
        screen.report(1, n, desc="train: ", closed=n == 10)
        screen.report(2, n // 2, desc="train: ")
    (bar,) = screen.bars
    assert bar.drawn == [("train: ", n) for n in range(6)] and bar.total == 10
    screen.merged.end(screen.task)
    assert bar.closed and bar.drawn[-1] == ("train: ", 5)


def test_a_bar_is_closed_with_the_last_of_its_ranks(screen: Screen) -> None:
    screen.report(0, 10)
    screen.report(1, 9)
    screen.report(0, 10, closed=True)
    assert not screen.bars[0].closed
    screen.report(1, 10, closed=True)
    assert not screen.bars[0].closed and screen.merged.tick() == LINGER  # rank 2 may be late
    screen.report(2, 10, closed=True)
    assert screen.bars[0].closed and screen.bars[0].n == 10
    screen.report(0, 0, number=2)
    screen.merged.end(screen.task)
    assert [bar.closed for bar in screen.bars] == [True, True]


def test_a_bar_that_others_can_join_no_more_is_closed(screen: Screen) -> None:
    screen.report(0, 10, closed=True)
    screen.report(1, 0, desc="another")
    assert not screen.bars[0].closed
    screen.report(2, 0, number=2)
    assert screen.bars[0].closed
    screen.report(0, 10, number=3, closed=True)
    screen.now = 2 * LINGER
    screen.merged.tick()
    assert screen.bars[1].n == 10 and screen.bars[1].closed


def test_bars_that_differ_are_told_apart(screen: Screen) -> None:
    screen.report(0, 1)
    screen.report(1, 2, total=11)
    screen.report(2, 3, total=11)
    assert len(screen.bars) == 1
    assert screen.merged.tick() == WINDOW
    screen.now = WINDOW
    assert screen.merged.tick() is None
    assert [bar.drawn for bar in screen.bars] == [[("", 1)], [("[ranks 1-2] ", 2)]]


def test_a_bar_waits_for_rank_0(screen: Screen) -> None:
    screen.report(1, 1)
    screen.report(0, 2)
    screen.now = WINDOW
    assert screen.merged.tick() is None and [bar.drawn for bar in screen.bars] == [[("", 1)]]


def test_what_stands_around_a_bar_may_change(screen: Screen) -> None:
    screen.report(0, 1, desc="", postfix="loss=2")
    screen.report(1, 1, desc="", postfix="loss=3")
    assert screen.bars[0].postfix == "loss=2"
    screen.report(0, 1, name="", desc="end: ", postfix="loss=1")
    assert screen.bars[0].drawn[-1] == ("end: ", 1) and screen.bars[0].postfix == "loss=1"


def test_tasks_are_told_apart(screen: Screen) -> None:
    screen.report(0, 1)
    first, screen.task = screen.task, Task()
    screen.report(0, 2)
    screen.merged.end(first)
    assert [bar.closed for bar in screen.bars] == [True, False]


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def shown(text: str) -> list[str]:
    """The bars and lines in the order in which they were drawn."""
    return [part for part in re.split(r"[\r\n]+|\x1b\[A", text) if part.strip()]


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    compare_late_output(monkeypatch.setattr)
    return make_mesh({"data": 2})


def test_one_bar_for_the_mesh(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    def loop() -> None:
        for _ in tqdm(range(4), "steps"):
            time.sleep(0.11 * (1 + axis_index("data")))
        for _ in tqdm_notebook(range(2), "rest"):  # the form of notebooks, which a function may bring along
            time.sleep(0.11)

    mesh.run(loop)
    bars = shown(capfd.readouterr().err)
    steps = [re.search(r"^steps: .* (\d)/4 ", bar) for bar in bars]
    counts = [int(found[1]) for found in steps if found]
    common = counts[len(counts) - 1 - counts[::-1].index(0) :]  # since the slower rank has begun
    assert common == sorted(common) and set(common) == {0, 1, 2, 3, 4}, counts
    rest = [bar for bar in bars if bar.startswith("rest: ")]
    assert len(counts) + len(rest) == len(bars), bars  # none is labelled: all are of both ranks
    assert "0/2" in rest[0] and "2/2" in rest[-1]


def test_lines_do_not_break_a_bar(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    def loop() -> None:
        for step in tqdm(range(3), "steps"):
            time.sleep(0.2)
            print("at", step)

    mesh.run(loop)
    out, err = capfd.readouterr()
    assert out.splitlines() == ["at 0", "at 1", "at 2"]
    assert "[rank" not in err and shown(err)[-1].startswith("steps: 100%")


def test_a_bar_to_a_file_of_the_program_is_drawn_there(shared_mesh: Callable[..., Mesh]) -> None:
    import io

    def loop() -> str:
        file = io.StringIO()
        for _ in tqdm(range(2), "kept", file=file):
            pass
        return file.getvalue()

    assert all("kept: 100%" in text for text in shared_mesh({"data": 2}).run(loop))


def test_a_failure_leaves_the_bar_where_it_was(
    mesh: Mesh, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmd.mesh.driver.recovery.GRACE_SECONDS", HANGS)  # both fail, however late one is

    def loop() -> None:
        for step in tqdm(range(4), "fails"):
            time.sleep(0.11)
            if step == 2:
                raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        mesh.run(loop)
    bars = shown(capfd.readouterr().err)
    assert "2/4" in bars[-1] and mesh.run(lambda: 1) == [1, 1]
