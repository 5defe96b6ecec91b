"""The benches: contenders in groups of their own do the same work in turn, and results become JSON, tables and plots.

Nothing here looks at how fast anything is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scripts
from fork_server import ForkServer
from scripts import launched, run

from spmd.cli.bench import command, groups
from spmd.cli.bench.groups import Group, GroupFailed, in_turn, quartiles
from spmd.cli.main import main
from spmd.kernels.processes import cores

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module", autouse=True)
def bench_folder() -> Iterator[None]:
    """The benches import one another by bare names, as scripts do."""
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module", autouse=True)
def groups_are_forks() -> Iterator[None]:
    """A contender's processes have imported torch already, and its compiler, which DDP and torch's optimizers take.

    So have the programs that the tests run.
    """
    server = ForkServer(modules=["torch._dynamo", "torch.nn.parallel"])

    def popen(command: Sequence[str], **options: Any) -> subprocess.Popen:
        return (server.run if command[0] == sys.executable else subprocess.Popen)(command, **options)

    names = {**vars(subprocess), "Popen": popen}
    contenders = mock.patch.object(groups, "subprocess", types.SimpleNamespace(**names))
    with contenders, mock.patch.object(scripts, "shared_server", lambda: server):
        yield
    server.close()


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "script", ["cost", "exact_mode", "gpu", "nodes", "profile_call", "profile_parts", "profile_step"]
)
def test_scripts_find_what_they_import(bench_folder: None, script: str) -> None:
    assert callable(module(script).main)


@pytest.fixture(scope="module")
def suites(bench_folder: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two suites of a few contenders, measured in no time, saved and loaded again."""
    harness, results = module("harness"), module("results")
    folder = tmp_path_factory.mktemp("results")
    contender = harness.Contender
    reducing = (
        contender("ours, in the arena, kept", "ours", {"kind": "kept"}),
        contender("gloo", "gloo"),
        contender("gloo, placed as woken", "gloo", {"spread": False}),
    )
    stepping = (contender("ours", "ours"), contender("ddp, fused", "gloo", {"fused": True}))
    quick = {"ranks": 2, "rounds": 3, "seconds": 1e-3}
    with harness.Groups() as groups:
        reduced = [harness.measure(groups, reducing, "all_reduce", size, **quick) for size in (4, 1 << 16)]
        stepped = [harness.measure(groups, stepping, "train_step", "models:small", **quick)]
    results.save("all_reduce", reduced, folder)
    results.save("train_step", stepped, folder)
    return results.load(folder), folder


def test_every_contender_has_a_sample_a_round(suites: tuple[dict[str, Any], Path]) -> None:
    found, folder = suites
    assert json.loads((folder / "all_reduce.json").read_text()) == found["all_reduce"]
    for name, suite in found.items():
        assert suite["machine"]["cores"] >= 1
        assert suite["versions"]["torch"] != "not installed"
        for case in suite["cases"]:
            assert len(case["seconds"]) == {"all_reduce": 3, "train_step": 2}[name]
            for contender, samples in case["seconds"].items():
                assert len(samples) == 3
                assert all(sample > 0 for sample in samples)
                assert case["quartiles"][contender] == quartiles(samples)


def test_table_has_every_case_and_target(suites: tuple[dict[str, Any], Path]) -> None:
    text = module("report").text(suites[0])
    for expected in ("64 KiB", "ddp, fused", "against gloo, 4 B to 64 KiB, 2 ranks", "at least 10x", "step of small"):
        assert expected in text


def test_plots_are_drawn(suites: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    paths = module("report").plot(suites[0], tmp_path)
    assert {path.name for path in paths} == {"all_reduce_2.png", "train_step_2.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in paths)


def test_targets_are_judged_by_medians() -> None:
    targets = module("targets")
    case = {
        "ranks": 2,
        "case": "models:mlp_1k",
        "quartiles": {"ours": [1, 2, 3], "ours, fused": [0, 1, 9], "ddp": [3, 4, 5], "ddp, fused": [1, 1.5, 2]},
    }
    first, second = targets.rows({"train_step": {"cases": [case]}})[:2]
    assert (first.measured.split()[0], first.target, first.met) == ("1.50x", "at least 2x", False)
    assert second.measured.startswith("2.00x")


def test_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, report = module("harness"), module("report")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    case = harness.measure(
        harness.Groups(), [harness.Contender("jax", "jax")], "train_step", "", ranks=2, rounds=1, seconds=1e-3
    )
    assert case["missing"] == {"jax": "jax is not installed"}
    assert "jax is not installed" in report.medians({"suite": "train_step", "cases": [case]})


def test_contenders_do_the_same_work() -> None:
    """Their losses agree after a few steps."""
    harness = module("harness")
    peers = ["ours", "driver", "plain", *(["jax"] if importlib.util.find_spec("jax") else [])]
    losses = {}
    with harness.Groups() as groups:
        for peer in peers:
            group = groups.get(peer, 2)
            group.ask("open", "it", "train_step", {}, "models:small")
            losses[peer] = [group.ask("value", "it")[0] for _ in range(3)]
    assert losses["plain"][2] < losses["plain"][0]
    for values in losses.values():
        assert values == pytest.approx(losses["plain"], rel=1e-4)


def test_failing_side_says_what_it_raised() -> None:
    with Group("spmd.cli.bench.contenders:Gloo", 1) as group:
        with pytest.raises(GroupFailed, match="no_such_work"):
            in_turn({"it": (group, "it", {})}, "no_such_work", None, rounds=1, seconds=1e-3)
        assert group.ask("barrier") == [None]


def test_process_that_ends_is_noticed() -> None:
    with Group("spmd.cli.bench.no_such_module:Side", 1) as group, pytest.raises(GroupFailed, match="ended before"):
        group.ask("barrier")


def test_fit_finds_latency_and_bandwidth() -> None:
    fit = module("fit")
    cases = [
        {"work": work, "ranks": ranks, "size": size, "median": 1e-5 * ranks + size * 1e-9 * ranks}
        for work in fit.WORKS
        for ranks in (1, 4)
        for size in (10**power for power in range(3, 9))
    ]
    fits = fit.add_fits(cases)
    for work in fit.WORKS:
        assert fits[work]["largest_error"] < 1e-6
        for way in fits[work]["ways"]:
            own = way["by_ranks"]["4"]
            assert (own["knees"], own["coefficients"]) == ([], pytest.approx([4e-5, 4e-9]))
    assert fit.predicted_for(fits["all_reduce"], 4, 3e6) == pytest.approx(4e-5 + 3e6 * 4e-9)
    # None negative, even where a straight line would begin below zero.
    assert min(fit.fitted([1.0, 2.0, 3.0], [1.0, 10.0, 30.0], [])) >= 0


def test_cost_page_is_made_from_results(tmp_path: Path) -> None:
    fit, cost, results = module("fit"), module("cost"), module("results")
    cases = [
        {"work": work, "ranks": ranks, "size": 10**power, "median": 1e-5 + 10**power * 1e-9}
        for work in fit.WORKS
        for ranks in (1, 2)
        for power in range(3, 9)
    ]
    results.save("scaling", cases, tmp_path, fits=fit.add_fits(cases))
    cost.main([str(tmp_path), str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "| 2 | 128 KiB | 10 us | 1 GB/s |" in page
    assert "a model, not a measurement" in page
    assert cost.ring(2, 1e9, 1e-3, 1e9) == pytest.approx(2 * (1e-3 + 0.5))
    assert cost.tree(8, 1e9, 1e-3, 1e9) == pytest.approx(6e-3 + 2)
    assert module("plots").scaling(results.load(tmp_path)["scaling"], tmp_path)[0].stat().st_size > 10_000


def test_profile_adds_up() -> None:
    code, out, err = launched(2, str(BENCH / "profile_step.py"), "small", "--steps", "2")
    assert code == 0, err
    shares = [float(line.rpartition(" ")[2][:-1]) for line in out.splitlines() if line.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert "optimizer" in out


def test_parts_lie_within_their_step() -> None:
    code, out, err = launched(1, str(BENCH / "profile_parts.py"), "small", "--steps", "3")
    assert code == 0, err
    lines = out.splitlines()
    taken = {line[:34].strip(): float(line[34:].split()[0]) for line in lines[1:]}
    assert 0 < taken["torch's backward"] <= taken["value_and_grad"] <= taken["the region"] <= taken["the call"]
    assert 0 < taken["opt.step"] < taken["the region"]


@pytest.mark.parametrize(
    "launcher", [(), pytest.param(("run", "-n", "2", "-m", "spmd"), marks=pytest.mark.long)], ids=["alone", "launched"]
)
def test_spmd_bench_prints_a_table(
    launcher: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SECONDS", dict.fromkeys(command.SECONDS, 1e-3))
    if launcher:
        code, out, err = run("-m", "spmd", *launcher, "bench", "--rounds", "1")
    else:  # here, so that its groups are forks
        code, (out, err) = main(["bench", "--rounds", "1", "-n", "2"]), capfd.readouterr()
    assert code == 0, err
    assert ("2 ranks of this job" if launcher else f"2 ranks on {cores()} cores") in out
    assert out.count("all-reduce") == 15
    assert out.count("step, MLP") == 4


# What the harness would have measured.
SAMPLED = """
import random, sys
import pytest
sys.path.insert(0, ".")
import harness
def in_turn(turns, *_, rounds, **__):
    return {name: [random.uniform(1e-6, 1e-3) for _ in range(rounds)] for name in turns}
harness.in_turn, harness.Groups.get = in_turn, lambda *_: None
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_pytest_benchmark_replays_the_samples(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    options = [".", "-k", "all_reduce and 2-64- and (kept or gloo)", "--results", str(tmp_path)]
    options.append(f"--benchmark-json={tmp_path / 'entries'}")
    # Of a worker of pytest-xdist the process is no part: pytest-benchmark would write nothing.
    code, out, err = run("-c", SAMPLED, *options, cwd=BENCH, without=["PYTEST_XDIST_WORKER"])
    assert code == 0, out + err
    entries = json.loads((tmp_path / "entries").read_text())["benchmarks"]
    (case,) = json.loads((tmp_path / "all_reduce.json").read_text())["cases"]
    medians = {entry["params"]["contender"]: entry["stats"]["median"] for entry in entries}
    assert medians.keys() == {"ours, in the arena, kept", "gloo", "gloo, placed as woken"}
    for name, median in medians.items():
        assert median == pytest.approx(case["quartiles"][name][1])
