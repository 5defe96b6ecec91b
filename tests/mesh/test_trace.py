"""SPMD_TRACE: what the driver sends and its ranks do, in a file that Perfetto opens."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from scripts import FORKED_CHILDREN, run, script

from spmd import Mesh, MeshError
from spmd.mesh.display.trace import Recorder

PROGRAM = """
import sys, time, torch
from spmd import Mesh, psum, put, spmd

with Mesh({"data": 2}, hosts=sys.argv[1] if len(sys.argv) > 1 else None, timeout=60) as mesh:

    @spmd(mesh=mesh)
    def step(x):
        return psum(x, "data")

    for _ in range(3):
        x = step(torch.ones(4))
    print(float(x[0]))

    def slow():
        time.sleep(0.05)
        mesh.comm().barrier()
        now = time.time
        time.time = lambda: now() - 3600  # the clock is set back

    mesh.run(slow)
"""


def traced(tmp_path: Path, *arguments: str, program: str = PROGRAM) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    code, _, err = run(script(tmp_path, program), *arguments, env={"SPMD_TRACE": str(path), **FORKED_CHILDREN})
    assert code == 0, err
    return json.loads(path.read_text())


def check_format(events: list[dict[str, Any]]) -> None:
    """As the Trace Event Format has it, as far as its events are of the kinds used here."""
    kinds = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "b": {"ts", "id", "cat"}, "e": {"ts", "id", "cat"}}
    names: set[tuple[int, str]] = set()
    begun: dict[tuple[str, str], float] = {}
    ends: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert {*event} >= kinds[event["ph"]], event
        if event["ph"] == "M":
            names.add((event["pid"], event["name"]))
            continue
        assert isinstance(event["ts"], float) and event["ts"] > 1e15  # microseconds since 1970
        assert (event["pid"], "process_name") in names  # said before it is needed
        if event["ph"] == "X":
            assert event["dur"] >= 0
            ends.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
        elif event["ph"] == "b":
            begun[event["cat"], event["id"]] = event["ts"]
        else:
            assert event["ts"] >= begun.pop((event["cat"], event["id"]))
    assert not begun
    for its in ends.values():  # of one thread none overlap
        ordered = sorted(its)
        for (start, seconds), (following, _) in itertools.pairwise(ordered):
            assert following - (start + seconds) > -50


def test_calls_and_collectives_of_all_hosts(tmp_path: Path) -> None:
    events = traced(tmp_path, "local:2x1")
    check_format(events)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named[0].startswith("driver, process")
    assert {*named.values()} - {named[0]} == {"rank 0 on local0", "rank 1 on local1"}
    ranks = {name: pid for pid, name in named.items()}
    calls = {event["args"]["task"]: event for event in events if event["ph"] == "b"}
    assert [event["name"] for event in calls.values()].count("step") == 3
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    for rank in (0, 1):
        its = [event for event in events if event["ph"] == "X" and event["pid"] == ranks[f"rank {rank} on local{rank}"]]
        steps = [event for event in its if event["name"] == "step"]
        assert len(steps) == 3
        for event in steps:  # within what the driver has seen of it
            call = calls[event["args"]["task"]]
            assert call["ts"] <= event["ts"] and event["ts"] + event["dur"] <= ends[call["id"]]
        (slow,) = (event for event in its if event["name"] == "slow")
        assert slow["dur"] >= 50_000
        collectives = [event for event in its if event["cat"] == "collective"]
        assert [event["name"] for event in collectives].count("barrier") >= 1
        assert len([event for event in collectives if event["name"] == "all_reduce"]) >= 3


KILLED = """
import os, signal
from spmd import Mesh

mesh = Mesh({"data": 2})
mesh.run(lambda: mesh.rank)
mesh.resize({"data": 3})
mesh.run(len, "three")
mesh.close()
with Mesh({"data": 1}) as mesh:
    mesh.run(len, "other")
"""


def test_several_meshes_and_a_resize(tmp_path: Path) -> None:
    events = traced(tmp_path, program=KILLED)
    check_format(events)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(named) == len({*named}) and "rank 2, mesh 2" in named and "rank 0, mesh 3" in named
    assert [event["name"] for event in events if event["ph"] == "b"].count("len") == 2


def test_collectives_that_overlap_have_lanes_of_their_own() -> None:
    sent: list[dict[str, Any]] = []
    recorder = Recorder(b"key", sent.append)
    for began, seconds in ((1.0, 2.0), (2.0, 2.0), (3.5, 1.0)):
        recorder.collective("all_reduce float32[4] (sum)", "shm", began, seconds)
    recorder.task(7, 1, "step", 0.0, 5.0)
    events = json.loads(sent[0]["events"])
    assert [(lane, began) for lane, _, _, began, _, _ in events] == [(1, 0.0), (2, 1.0), (3, 2.0), (2, 3.5)]
    assert "key" not in sent[0]["mesh"] and sent[0]["task"] == 7


def test_a_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_TRACE", "/nowhere/trace.json")
    with pytest.raises(MeshError, match=r"SPMD_TRACE names a file that can't be written .*'/nowhere/trace.json'"):
        Mesh({"data": 1})


def test_nothing_is_noted_without_it(shared_mesh: Any) -> None:
    mesh: Mesh = shared_mesh({"data": 2})
    assert "SPMD_TRACE" not in os.environ and mesh.driver.pending.traced is None
    assert mesh.run(lambda: mesh.comm()._debug) == [False, False]  # type: ignore[attr-defined]
