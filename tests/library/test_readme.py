"""README.md and docs/ against reality: every Python block runs, outputs and quoted messages are what comes out."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from patience import end_within, quick
from scripts import FORKED_CHILDREN, left_in_shm, run, started

from spmd import Mesh, P, axis_index, pmax, psum, put, spmd

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
ENVIRON = {"SPMD_RANKS": "2", "PYTHONPATH": ""}  # as a reader has none of what tests share


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A ```python block of a page, and the ```text block that follows it, if one does."""

    page: str
    number: int
    source: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    fences = list(re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
    found: list[Block] = []
    for fence, after in zip(fences, [*fences[1:], None], strict=False):
        if fence[1] == "python":
            output = after[2] if after is not None and after[1] == "text" else None
            found.append(Block(page.name, len(found), fence[2], output))
    return found


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks_of(page)], ids=lambda block: f"{block.page}-{block.number}"
)
def test_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.source)
    environ = {**ENVIRON, **(FORKED_CHILDREN if "hosts=" in block.source else {})}
    status, out, err = run("-W", "error", str(script), cwd=tmp_path, env=environ)
    assert (status, err) == (0, "")
    if block.output is not None:
        assert out == block.output


def test_environment_variables_are_listed() -> None:
    folders = ("spmd", "transforms", "mesh", "kernels")
    read = {
        name
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bSPMD_[A-Z_]+\b", path.read_text())
    }
    listed = set(re.findall(r"\bSPMD_[A-Z_]+\b", (ROOT / "docs" / "environment.md").read_text()))
    assert listed == read


# -- the table of failures --------------------------------------------------------------------------------------------


def one_rank(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        return psum(x * (1 / (1 - axis_index("data"))), "data")

    step(torch.ones(4))


def wrong_spec(mesh: Mesh) -> None:
    @spmd(mesh=mesh, in_specs=P(None, "data"))
    def step(x):
        return x

    step(torch.ones(4))


def indivisible(mesh: Mesh) -> None:
    @spmd(mesh=mesh, in_specs=P("data"))
    def step(x):
        return x

    step(torch.ones(5))


def unknown_axis(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        return psum(x, "model")

    step(torch.ones(4))


def forgotten_psum(mesh: Mesh) -> None:
    @spmd(mesh=mesh, in_specs=P("data"))
    def step(x):
        return {"loss": x.sum()}

    step(torch.ones(4))


def differing_result(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        return {"loss": x * axis_index("data")}

    step(torch.tensor(1.0))


def unpicklable(mesh: Mesh) -> None:
    lock = threading.Lock()

    @spmd(mesh=mesh)
    def step(x):
        with lock:
            return x

    step(torch.ones(4))


def changed_in_place(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(params):
        params["w"] += 1
        return params

    step({"w": torch.ones(4)})


def disagreement(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        return psum(x, "data") if axis_index("data") == 0 else pmax(x, "data")

    step(torch.ones(4))


def left_out(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        return psum(x, "data") if axis_index("data") == 0 else x

    step(torch.ones(4))


def silent(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        if axis_index("data") == 1:
            time.sleep(60)
        return psum(x, "data")

    step(torch.ones(4))


def killed(mesh: Mesh) -> None:
    @spmd(mesh=mesh)
    def step(x):
        if axis_index("data") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return psum(x, "data")

    step(torch.ones(4))


PROVOKED: dict[str, Callable[[Mesh], None]] = {
    "an exception on one rank": one_rank,
    "a wrong spec": wrong_spec,
    "an indivisible dimension": indivisible,
    "an unknown axis": unknown_axis,
    "a result that differs between ranks": differing_result,
    "a function that can't be pickled": unpicklable,
    "a forgotten `psum`, though the values agree": forgotten_psum,
    "an input changed in place": changed_in_place,
    "ranks that disagree on a collective": disagreement,
    "a collective that one rank leaves out": left_out,
    "a rank that falls silent, under `Mesh(timeout=2)`": silent,
    "a step that ends a rank, each time it is run": killed,
}
SIGNALLED = (
    "Ctrl-C",
    "Ctrl-C again, where the ranks do not stop",
    "`kill -9` of the driver",
    "`kill -9` of a rank, or of all",  # see mesh/test_survival.py
)


def failures() -> dict[str, tuple[str, str]]:
    """The table's rows: what goes wrong -> (what the user sees, afterwards)."""
    text = (ROOT / "docs" / "errors.md").read_text()
    table = text.partition("| what goes wrong | what the user sees | afterwards |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {wrong: (sees, afterwards) for wrong, sees, afterwards in rows}


def quoted(sees: str) -> tuple[str, list[str]]:
    """The exception that a cell of the table names, and the pieces of text that it quotes."""
    name, *pieces = re.findall(r"`([^`]+)`", sees)
    return name, pieces


def plain(text: str) -> str:
    """Without what differs between places: numbers, line breaks, and the names of functions around a function."""
    return re.sub(r"\d+", "#", re.sub(r"\w+\.<locals>\.", "", " ".join(text.split())))


def test_every_failure_is_provoked() -> None:
    assert set(failures()) == {*PROVOKED, *SIGNALLED}


@pytest.mark.parametrize("wrong", PROVOKED)
def test_failure_reads_as_quoted(wrong: str, make_mesh: Callable[..., Mesh]) -> None:
    sees, _ = failures()[wrong]
    name, pieces = quoted(sees)
    mesh = make_mesh({"data": 2}, timeout=2.0 if "timeout=2" in wrong else 60.0)
    kept = put(torch.arange(4.0), mesh=mesh)
    with pytest.raises(Exception) as caught:
        PROVOKED[wrong](mesh)
    assert type(caught.value).__name__ == name
    text = plain("".join(traceback.format_exception(caught.value)))
    for piece in pieces:
        assert plain(piece) in text
    assert float(spmd(lambda x: psum(x.sum(), "data"), mesh=mesh)(kept)) == 12.0


# -- signals: in a process of their own -------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time, traceback
import torch
from spmd import Mesh, psum, put, spmd

mesh = Mesh({"data": 2})
stubborn = sys.argv[1] == "stubborn"

@spmd(mesh=mesh)
def step(x):
    begun = sys.argv[2]
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            open(begun, "w").close()
            time.sleep(60)
        except KeyboardInterrupt:
            if not stubborn:
                raise
            begun = sys.argv[2] + " on"

pressed = []

def press(after):
    while not os.path.exists(after):
        time.sleep(0.01)
    time.sleep(0.7)
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def press_all():
    press(sys.argv[2])
    if stubborn:
        press(sys.argv[2] + " on")

kept = put(torch.arange(4.0), mesh=mesh)
threading.Thread(target=press_all).start()
try:
    step(kept)
except KeyboardInterrupt:
    print(traceback.format_exc())
print("seconds", time.monotonic() - pressed[0])
if not stubborn:
    print(float(spmd(lambda x: psum(x.sum(), "data"), mesh=mesh)(kept)))
"""


@pytest.mark.parametrize(("wrong", "how"), [(SIGNALLED[0], "gentle"), (SIGNALLED[1], "stubborn")])
def test_ctrl_c(wrong: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    status, out, err = run(str(script), how, str(tmp_path / "begun"), env=ENVIRON)
    assert status == 0, err
    name, pieces = quoted(failures()[wrong][0])
    for piece in (name, *pieces):
        assert plain(piece) in plain(out)
    if how == "gentle":
        waited = re.search(r"seconds (\S+)", out)
        assert waited is not None
        assert quick(float(waited[1]), 1.0)
        assert out.endswith("12.0\n")


DRIVER = """
import os, time
from spmd import Mesh, spmd

mesh = Mesh({"data": 2})
print(*mesh.run(os.getpid), flush=True)
spmd(lambda: time.sleep(60), mesh=mesh)()
"""


def test_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    shared = set(os.listdir("/dev/shm"))
    with started(str(script), env=ENVIRON) as driver:
        assert driver.stdout is not None
        ranks = [int(pid) for pid in driver.stdout.readline().split()]
        driver.kill()
        driver.wait()
    assert len(ranks) == 2 and end_within(1.0, ranks)
    assert not left_in_shm(shared)
