"""What the ranks of a host answer alike reaches the driver as one message, in its place among what else they say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from internals import gathered, links_sent_on, taken

from spmd import Mesh, P, put, spmd

BOTH = {1: [0, 1], 2: [0, 1]}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts="local:2x2", timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        pytest.param([("Answer", 1, 0), ("Answer", 1, 1)], [("Answer 1", (0, 1))], id="alike"),
        pytest.param(
            [("Unchanged", 1, 0), ("Other", 1, 1)], [("Unchanged 1", (0,)), ("Unchanged 1", (1,))], id="unlike"
        ),
        pytest.param([("Answer", 1, 0)], [("held", ()), ("Answer 1", (0,))], id="one is slow"),
        pytest.param([("Answer", 7, 0)], [("Answer 7", (0,))], id="nobody else was asked"),
        pytest.param(
            [("Answer", 1, 0), ("Progress", 2, 0), ("Answer", 1, 1)],
            [("Answer 1", (0,)), ("Progress 2", (0,)), ("Answer 1", (1,))],
            id="what a rank says later stays later",
        ),
        pytest.param(
            [("Answer", 1, 0), ("Progress", 1, 1), ("Answer", 1, 1)],
            [("Progress 1", (1,)), ("Answer 1", (0, 1))],
            id="what another says does not part them",
        ),
        pytest.param(
            [("Answer", 1, 0), ("Failed", 1, 1)], [("Failed 1", (1,)), ("Answer 1", (0,))], id="a failure goes at once"
        ),
        pytest.param(
            [("Answer", 1, 0), ("Answer", 2, 0), ("Answer", 1, 1), ("Answer", 2, 1)],
            [("Answer 1", (0, 1)), ("Answer 2", (0, 1))],
            id="two tasks under way",
        ),
        pytest.param(
            [("Answer", 1, 0), ("lost", 0, 1), ("Answer", 2, 0)],
            [("Answer 1", (0,)), ("Answer 2", (0,))],
            id="a rank that is lost is not waited for",
        ),
    ],
)
def test_what_a_host_tells(said: list[tuple[str, int, int]], sent: list[tuple[str, tuple[int, ...]]]) -> None:
    assert gathered(said, BOTH) == sent


@pytest.mark.parametrize(
    ("said", "taken_as"),
    [
        pytest.param([("Answer", 1, (0, 1)), ("Answer", 1, (2, 3))], [("Answer 1", (0, 1, 2, 3))], id="alike"),
        pytest.param(
            [("Unchanged", 1, (0,)), ("Other", 1, (1,)), ("Unchanged", 1, (2,))],
            [("Unchanged 1", (0,)), ("Unchanged 1", (1,)), ("Unchanged 1", (2,))],
            id="in order",
        ),
        pytest.param(
            [("Progress", 1, (0,)), ("Progress", 1, (1,))],
            [("Progress 1", (0,)), ("Progress 1", (1,))],
            id="no answers",
        ),
        pytest.param(
            [("Answer", 1, (0,)), ("lost", 0, (0,)), ("Answer", 1, (1,))],
            [("Answer 1", (0,)), ("death", (0,)), ("Answer 1", (1,))],
            id="a death between them",
        ),
    ],
)
def test_what_a_driver_takes_of_several_hosts(
    said: list[tuple[str, int, tuple[int, ...]]], taken_as: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert taken(said) == taken_as


def test_ranks_of_other_hosts_take_no_threads(make_mesh: Callable[..., Mesh]) -> None:
    """Nor does a host: one reads the links to all."""
    counts = []
    for hosts in ("local:1x1", "local:2x2"):
        before = set(threading.enumerate())  # threads of earlier meshes may end meanwhile
        mesh = make_mesh({"data": 4 if hosts.endswith("2x2") else 1}, hosts=hosts)
        counts.append(len(set(threading.enumerate()) - before))
        mesh.close()
    assert counts[0] == counts[1] > 0


def test_equal_results_are_objects_of_their_own(mesh: Mesh) -> None:
    lists = mesh.run(lambda: [0])
    lists[0].append(1)
    assert lists == [[0, 1], [0], [0], [0]]
    tensors = mesh.run(lambda: torch.zeros(3))
    tensors[0].add_(1)
    assert [float(tensor.sum()) for tensor in tensors] == [3.0, 0.0, 0.0, 0.0]


def test_what_was_printed_and_logged_before_comes_before(
    mesh: Mesh, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("gathered")

    def speak(turn: int) -> None:
        print("turn", turn)
        logger.warning("turn %d", turn)

    for turn in range(20):
        mesh.run(speak, turn)
        assert f"turn {turn}" in capsys.readouterr().out
        assert sum(record.getMessage().endswith(f"turn {turn}") for record in caplog.records) == 4


def test_a_call_costs_the_driver_one_message_a_host(mesh: Mesh) -> None:
    mesh.run(int)
    with links_sent_on(mesh) as counts:
        for _ in range(20):
            mesh.run(int)
    assert all(20 <= count <= 22 for count in counts)  # besides, values of before are needed no more


def test_calls_under_way_keep_their_order(mesh: Mesh) -> None:
    @spmd(mesh=mesh, in_specs=(P("data"), None), out_specs=P("data"), donate="total")
    def step(total: torch.Tensor, more: int) -> torch.Tensor:
        return total * 2 + more

    total, expected = put(torch.zeros(4, dtype=torch.int64), P("data"), mesh=mesh), 0
    for turn in range(50):
        total, expected = step(total, turn % 3), 2 * expected + turn % 3
    assert total.full().tolist() == [expected] * 4
