"""The same bits at any number of ranks, however they are started, and after a run was stopped and taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytrees
from internals import add_in_rank_order
from same_bits import MODES, RESUMED, STOPS, Run, chained, taken_up
from scripts import launched, script

from spmd import SpecError

STEPS = 6  # an epoch, with its short last batch, and one step more

# Each model, mode and number of shards at least once. Runs that are stopped need no other test without a stop.
STOPPED = [
    ("cnn", "AdamW, float32, sharded"),
    pytest.param("transformer", "SGD, float32, sharded", marks=pytest.mark.long),
    pytest.param("mlp", "AdamW, bfloat16", marks=pytest.mark.long),
]
CASES = [
    *(("mlp", shards, mode) for shards, mode in ((12, "AdamW, float32"), (4, "SGD, bfloat16, sharded"))),
    *(("cnn", 4, "SGD, float32"), ("transformer", 8, "AdamW, bfloat16")),
]
MORE = [
    *(("mlp", shards, mode) for shards, mode in ((4, "AdamW, float32"), (12, "SGD, bfloat16, sharded"))),
    ("cnn", 8, "AdamW, float32, sharded"),
    *(("transformer", 8, mode) for mode in MODES if ("transformer", 8, mode) not in CASES),
]


EVERY = (1, 2, 3, 4)
# Of each of CASES: three divide neither a batch nor its shards; of four shards, one or three ranks add in one order.
FEWER = [(1, 2, 3), (1, 3, 4), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("model", "shards", "mode", "sizes"),
    [
        *((*case, sizes) for case, sizes in zip(CASES, FEWER, strict=True)),
        *(pytest.param(*case, EVERY, marks=pytest.mark.long) for case in (*CASES, *MORE)),
    ],
)
def test_any_number_of_ranks(shared_mesh: Any, model: str, shards: int, mode: str, sizes: tuple[int, ...]) -> None:
    """Whether a first call is checked or not, too."""
    found = {}
    for ranks, check in zip(sizes, ("first", "never", "first", "never"), strict=False):
        found[ranks] = Run(shared_mesh({"data": ranks}), model, shards, check=check, **MODES[mode]).run(STEPS)
        for step, (mine, first) in enumerate(zip(found[ranks], found[1], strict=True)):
            assert mine == first, f"{ranks} ranks part from one at step {step}"
    assert len(set(found[1])) == STEPS


def test_more_ranks_than_shards(shared_mesh: Any) -> None:
    many, one = (
        Run(shared_mesh({"data": ranks}), "cnn", 2, **MODES["AdamW, float32, sharded"]).run(STEPS) for ranks in (4, 1)
    )
    assert many == one


def test_fused_and_sharded(shared_mesh: Any) -> None:
    """A fused kernel rounds the tail of a vector in its own way."""
    runs = [Run(shared_mesh({"data": ranks}), "mlp", 4, shard=True, fused=True).run(STEPS) for ranks in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("model", "mode", "shard"),
    [
        ("cnn", "AdamW, float32", True),
        ("mlp", "SGD, bfloat16, sharded", False),
        pytest.param("cnn", "AdamW, float32", False, marks=pytest.mark.long),
        pytest.param("mlp", "SGD, bfloat16, sharded", True, marks=pytest.mark.long),
    ],
)
def test_donated(shared_mesh: Any, model: str, mode: str, shard: bool) -> None:
    """Steps that take their arguments' memory compute the bits of those that leave it alone."""
    options = {**MODES[mode], "shard": shard}
    expected = Run(shared_mesh({"data": 1}), model, 8, **options).run(STEPS)
    for ranks in (1, 3):
        run = Run(shared_mesh({"data": ranks}), model, 8, donate=True, **options)
        assert run.run(STEPS) == expected, f"{ranks} ranks"
        before = pytrees.leaves(run.state)
        run.run(1)
        with pytest.raises(SpecError, match="was donated to step"):
            before[0].full()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_any_backend(shared_mesh: Any, ranks: int) -> None:
    runs = [Run(shared_mesh({"data": ranks}, backend), "cnn", 8).run(STEPS) for backend in ("shm", "gloo")]
    assert runs[0] == runs[1]


LAUNCHED = """
import sys
sys.path.insert(0, {folder!r})
from same_bits import Run, chained
from spmd import Mesh
mesh = Mesh(backend={backend!r})
found = chained(Run(mesh, "transformer", 8, shard=True).run({steps}))
if mesh.rank == 0:
    print("digest", found)
mesh.close()
"""


@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), pytest.param("gloo", 3, marks=pytest.mark.long)])
def test_launched(shared_mesh: Any, tmp_path: Path, ranks: int, backend: str) -> None:
    expected = chained(Run(shared_mesh({"data": 1}), "transformer", 8, shard=True).run(STEPS))
    text = LAUNCHED.format(folder=str(Path(__file__).parents[1]), backend=backend, steps=STEPS)
    status, out, err = launched(ranks, script(tmp_path, text))
    assert status == 0, err
    assert f"digest {expected}" in out


def test_rank_order_would_be_noticed(make_mesh: Any) -> None:
    """The negative control: the same runs with the tree and without it, or a tree that does nothing could pass."""
    tree, plain = {}, {}
    for ranks in (1, 2, 3):
        mesh = make_mesh({"data": ranks})
        tree[ranks] = Run(mesh, "mlp", 8, check="never").run(STEPS)
        mesh.run(add_in_rank_order)
        plain[ranks] = Run(mesh, "mlp", 8, check="never").run(STEPS)
    assert tree[1] == tree[2] == tree[3]
    assert len({found[-1] for found in plain.values()}) == 3


@pytest.mark.long  # the next one has other stops of the same run
def test_some_of_the_table_of_runs_taken_up(shared_mesh: Any, tmp_path: Path) -> None:
    """`same_bits.py resume` makes all of it; the test below, another part."""
    paths = {ranks: tmp_path / f"{ranks}" for ranks in (1, 3)}
    runs = {
        ranks: Run(shared_mesh({"data": ranks}), RESUMED[0], RESUMED[1], **MODES[RESUMED[2]]).run(STOPS + 2, path)
        for ranks, path in paths.items()
    }
    assert runs[1] == runs[3]
    stops = [5, 9, 10]  # at the ends of epochs, and before one
    for after in (2, 3):
        found = taken_up(shared_mesh({"data": after}), paths, stops, runs[1])
        assert len(found) == len(paths) * len(stops) and all(found.values()), (after, found)


@pytest.mark.parametrize(("model", "mode"), STOPPED)
def test_stopped_and_taken_up_at_another_size(shared_mesh: Any, tmp_path: Path, model: str, mode: str) -> None:
    """Stop in an epoch, at its end and after it, on any number of ranks; go on with any other."""
    whole = Run(shared_mesh({"data": 1}), model, 8, **MODES[mode]).run(8)
    for stop, before, after in ((1, 2, 3), (4, 3, 1), (5, 4, 2), (6, 1, 4)):
        path = str(tmp_path / f"{stop}")
        first = Run(shared_mesh({"data": before}), model, 8, check="never", **MODES[mode])
        assert first.run(stop) == whole[:stop]
        first.save(path)
        second = Run(shared_mesh({"data": after}), model, 8, **MODES[mode])
        second.restore(path)
        assert second.run(8 - stop) == whole[stop:], f"stopped at {stop} on {before} ranks, taken up on {after}"
