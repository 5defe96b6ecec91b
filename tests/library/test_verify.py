"""`spmd verify`: it says that a script's bits agree at several sizes, or where they first part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import FORKED_CHILDREN, run, script

TRAIN = """
import torch
from spmd import Loader, Mesh, data_parallel, grad, spmd
with Mesh() as mesh:
    @spmd(mesh=mesh)
    @data_parallel(shards={shards})
    def step(w, batch):
        return {{"w": w - 0.1 * grad(lambda w, x: (w @ x.T).tanh().square().mean())(w, batch)}}["w"]
    generator = torch.Generator().manual_seed(0)
    w, data = torch.randn(50, generator=generator), torch.randn(60, 50, generator=generator)
    for batch in Loader(data, 10, mesh=mesh, shards={shards}):
        w = step(w, batch)
"""


def test_exact(tmp_path: Path) -> None:
    program = script(tmp_path, TRAIN.format(shards=4))
    status, out, err = run("-m", "spmd", "verify", "--ranks", "1,3", program, env=FORKED_CHILDREN)
    assert status == 0, out + err
    assert out.splitlines() == [
        "1 rank: 6 calls",
        "3 ranks: the same bits as 1 in all 6 calls",
    ]


@pytest.mark.long
def test_not_exact(tmp_path: Path) -> None:
    program = script(tmp_path, TRAIN.format(shards=None))  # in new Pythons: the one above has forks
    status, out, err = run("-m", "spmd", "verify", "--ranks", "1,3", program)
    assert status == 1
    assert err.count("spmd verify: step is data_parallel without shards=, and not expected to give the same bits") == 1
    assert re.search(
        r"^3 ranks: parts from 1 at call \d+, of step, in result: .*\n"
        r"  \d+ of 50 elements differ, the first at \[\d+\]: \S+, and \S+ there, \S+ apart; by at most \S+$",
        out,
        re.M,
    ), out
    assert "The usual causes:" in out and "shards= is not given" in out
    assert all(
        cause in out for cause in ("torch.manual_seed", "takes itself up", "batch.shape", "from one shard to the next")
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("raise SystemExit(7)", (7, "failed with exit status 7")), ("", (1, "called no @spmd"))]
)
def test_scripts_that_show_nothing(tmp_path: Path, text: str, expected: tuple[int, str]) -> None:
    status, out, _ = run("-m", "spmd", "verify", script(tmp_path, text))
    assert status == expected[0] and expected[1] in out


FIXED = """
import torch
from spmd import Mesh, spmd
with Mesh({"data": 2}) as mesh:
    print(float(spmd(lambda x: x + 1, mesh=mesh)(torch.ones(2)).full()[0]))
"""


@pytest.mark.long
def test_a_mesh_of_fixed_size_is_refused(tmp_path: Path) -> None:
    status, out, err = run("-m", "spmd", "verify", "--ranks", "3,2", script(tmp_path, FIXED))
    assert status == 1, out + err
    assert "3 ranks: " in out and "made a mesh of 2 ranks; give it an axis of size -1" in out
