"""One training script, unchanged, in every way of starting it: plain torch's losses, and nothing left behind."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import Sampler
from spmd.__main__ import main, parse

LENGTH, BATCH_SIZE, EPOCHS = 90, 32, 2  # the last batch of an epoch has 26 samples

DATA = f"""
torch.manual_seed(0)
x = torch.randn({LENGTH}, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
"""
SCRIPT = f"""
import torch
import torch.nn.functional as F
from torch import nn
from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad
{DATA}
mesh = Mesh({{"data": -1}})
apply, params = functional(model)
opt = optimizer(torch.optim.AdamW, lr=1e-2)
opt_state = opt.init(params)

def loss_fn(params, batch):
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])

@spmd(mesh=mesh)
@data_parallel
def train_step(params, opt_state, batch):
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, opt_state = opt.step(params, grads, opt_state)
    return params, opt_state, loss

losses = []
loader = Loader({{"x": x, "y": y}}, batch_size={BATCH_SIZE}, seed=0, mesh=mesh)
for epoch in range({EPOCHS}):
    for batch in loader:
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))

if mesh.rank in (None, 0):
    print("losses", *map(repr, losses))
"""
BARE = {
    name: value
    for name, value in os.environ.items()
    if name != "OMP_NUM_THREADS" and not name.startswith(("SPMD_", "PET_"))
}

# How a script is started, and whether it is given as a file or on standard input.
WAYS: dict[str, tuple[list[str], bool]] = {
    "python": ([], True),
    "python -": (["-"], False),
    "python -i": (["-i", "-q"], False),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], True),
    "spmd run -n 2": (["-m", "spmd", "run", "-n", "2"], True),
    "spmd run -n 1": (["-m", "spmd", "run", "-n", "1"], True),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "train.py"
    path.write_text(SCRIPT)
    return path


def start(options: list[str], script: Path, *, as_file: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python and wait for it, with a mark in its environment by which its descendants are found."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, *options, *([str(script)] if as_file else [])],
        input=None if as_file else typed(script.read_text()),
        cwd=script.parent,
        env={**BARE, "SPMD_RANKS": "2", "LAUNCH_TEST": mark},
        capture_output=True,
        text=True,
        timeout=60,
    )
    end = time.monotonic() + 2.0
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"still alive after {options}: {left}"
    return done


def marked(mark: str) -> list[int]:
    """The living processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"LAUNCH_TEST={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def typed(source: str) -> str:
    """A script as it would be typed at the prompt, where an empty line ends a block."""
    return re.sub(r"(\n +\S.*)(?=\n\S)", r"\1\n", re.sub(r"\n\n+", "\n", source)) + "\n"


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "losses" in line]
    assert len(lines) == 1, done.stdout
    return [float(word) for word in lines[0].partition("losses")[2].split()]


def sequential() -> list[float]:
    """The same program in plain torch, on one device with the whole batch."""
    names: dict = {"torch": torch, "nn": nn}
    exec(DATA, names)
    x, y, model = names["x"], names["y"], names["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = Sampler(LENGTH, BATCH_SIZE, seed=0)
    losses = []
    for epoch in range(EPOCHS):
        for step in range(len(sampler)):
            ids = sampler.batch(epoch, step)
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    with torch.random.fork_rng():
        return sequential()


@pytest.fixture(scope="module")
def losses(script: Path) -> Callable[[str], list[float]]:
    """The losses of a way; it is gone once, however many tests ask."""

    @functools.cache
    def of(way: str) -> list[float]:
        options, as_file = WAYS[way]
        return losses_of(start(options, script, as_file=as_file))

    return of


@pytest.mark.parametrize("way", WAYS)
def test_same_losses(way: str, losses: Callable[[str], list[float]], expected: list[float]) -> None:
    assert losses(way) == pytest.approx(expected, abs=1e-5, rel=0)


@pytest.mark.parametrize(("way", "other"), [("python", "python -"), ("torchrun", "spmd run -n 2")])
def test_two_runs_on_two_ranks_have_the_same_bits(way: str, other: str, losses: Callable[[str], list[float]]) -> None:
    assert losses(way) == losses(other)


def test_failing_script_gives_its_status(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    done = start(["-m", "spmd", "run", "-n", "2"], script)
    assert done.returncode == 7
    assert "failing.py FAILED" in done.stderr
    assert "Traceback" not in done.stderr


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with six cores, and an environment without torchrun's variables."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ([], "6"),
        (["-n", "3"], "3"),
        (["-n3"], "3"),
        (["--nproc-per-node", "4"], "4"),
        (["--nproc_per_node=4"], "4"),
        (["--nproc-per-node", "gpu"], "gpu"),
    ],
)
def test_ranks_per_host(given: list[str], ranks: str) -> None:
    options = parse([*given, "train.py"])
    assert options.nproc_per_node == ranks
    assert options.standalone


@pytest.mark.usefixtures("cores")
def test_arguments_of_the_script_stay_its_own() -> None:
    own = ["-n", "9", "--nnodes", "2", "--standalone", "--nproc-per-node", "4", "--help"]
    options = parse(["-n", "2", "train.py", *own])
    assert options.nproc_per_node == "2"
    assert options.nnodes == "1:1"
    assert options.training_script == "train.py"
    assert options.training_script_args == own
    assert parse(["train.py", *own]).nproc_per_node == "6"


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("nnodes", "2"),
        ("nnodes", "1:4"),
        ("node_rank", 0),
        ("rdzv_backend", "c10d"),
        ("rdzv_endpoint", "host0:29500"),
        ("rdzv_id", "17"),
        ("master_addr", "host0"),
        ("master_port", 29501),
    ],
)
def test_told_where_to_meet_it_is_not_alone(option: str, value: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = option.replace("_", "-")
    for arguments in ([f"--{name}", str(value)], [f"--{option}={value}"]):
        options = parse([*arguments, "train.py"])
        assert getattr(options, option) == value
        assert not options.standalone
        assert options.nproc_per_node == "6"
    assert parse(["train.py"]).standalone
    monkeypatch.setenv(f"PET_{option.upper()}", str(value))
    options = parse(["train.py"])
    assert getattr(options, option) == value
    assert not options.standalone


@pytest.mark.usefixtures("cores")
def test_the_rest_is_as_torchrun_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    arguments = ["--standalone", "--max-restarts", "3", "-m", "package.train", "--lr", "0.1"]
    assert parse(arguments) == parse_args(arguments)


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_bad_count_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", count, "train.py"])
    assert caught.value.code == 2
    assert f"expected a number, at least 1, got '{count}'" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    def call(arguments: list[str]) -> tuple[object, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return caught.value.code, "".join(capsys.readouterr())

    assert call(["--version"]) == (0, f"spmd {spmd.__version__}\n")
    for arguments in (["--help"], ["run", "--help"]):
        status, text = call(arguments)
        assert status == 0
        assert "[-n N]" in text
    assert "spmd run -n 4 train.py --lr 0.1" in text
    assert "--nnodes" in text
    for arguments, missing in (([], "command"), (["walk"], "walk"), (["run"], "training_script")):
        status, text = call(arguments)
        assert status == 2
        assert missing in text
