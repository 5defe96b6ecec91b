"""Several nodes: network namespaces of this machine, with a wire between them whose bytes are counted and that is cut.

Skipped, with the reason, where namespaces can't be made (they need root and iproute2).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import BARE
from patience import HANGS, quick, slowness
from scripts import script
from training import SCRIPT, sequential

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))
import namespaces  # noqa: E402

REASON = namespaces.unavailable()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

TIMEOUT = 4
RECOVERY_SECONDS = 5.0  # that the others of a rank that died take, at most, to say so


@pytest.mark.parametrize("count", [2, 3])
def test_a_script_under_spmd_run(count: int, tmp_path: Path) -> None:
    """The losses of one process with the whole batch, on every node, under torch's elastic launcher on each."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("if mesh.rank in (None, 0):", "if mesh.rank % 2 == 0:"))
    with namespaces.nodes(count) as places:
        started = []
        for rank, node in enumerate(places):
            where = ["--nnodes", str(count), "--node-rank", str(rank), "--master-addr", places[0].address]
            command = [sys.executable, "-m", "spmd", "run", "-n", "2", *where, "--master-port", "29513", str(script)]
            started.append(
                node.start(command, env=BARE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
            )
        try:
            told = [process.communicate(timeout=HANGS) for process in started]
        finally:
            for process in started:
                process.terminate()  # torchrun ends its ranks
                process.wait()
    assert [process.returncode for process in started] == [0] * count, told
    expected = sequential()
    curves = [[float(word) for word in out.split()[1:]] for out, _ in told]
    assert curves == [curves[0]] * count
    assert curves[0] == pytest.approx(expected, abs=1e-5, rel=0)


def test_bytes_on_the_wire() -> None:
    """2(h-1)/h of the buffer for each of h leaders, 2k(n-k)/n flat, half with bfloat16."""
    count = 3
    done = subprocess.run(
        [sys.executable, "nodes.py", "--nodes", str(count), "--mib", "8", "--json"],
        cwd=BENCH,
        env=BARE,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout).values()
    (row,) = found["reductions"]
    size = 2 * count
    # Headers, acknowledgements and the agreement before each reduction come on top: measured, 0.3 to 0.7 %.
    assert row["hierarchical"]["bytes"] == pytest.approx(2 * (count - 1) / count, rel=0.03)
    assert row["gloo"]["bytes"] == pytest.approx(2 * 2 * (size - 2) / size, rel=0.03)
    wide, narrow = found["training"]["float32"], found["training"]["bfloat16"]
    assert wide["bytes"] == pytest.approx(2 * (count - 1) / count, rel=0.06)
    assert narrow["bytes"] == pytest.approx(wide["bytes"] / 2, rel=0.06)
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=0.02)
    assert narrow["losses"] != wide["losses"]
    assert wide["losses"][-1] < 0.6 * wide["losses"][0]


# Each step needs all ranks; a rank that can't take one says when, after how many, and why: at once, so that it stays
# whole in the pipe that it shares with the other rank of its node. They meet when all have imported what they need.
GOING = r"""
import os, time, torch
from pathlib import Path
from spmd import Mesh, psum, spmd
here = Path(__file__).parent / "here"
here.mkdir(exist_ok=True)
(here / os.environ["SPMD_RANK"]).touch()
while len(os.listdir(here)) < int(os.environ["SPMD_SIZE"]):
    time.sleep(0.01)
mesh = Mesh(timeout=SECONDS)
step = spmd(lambda x: psum(x, "data") / mesh.size, mesh=mesh)
x, steps = torch.ones(100_000), 0
try:
    while True:
        x = step(x)
        float(x.full()[0])
        steps += 1
        if steps == 20:
            os.write(1, f"{mesh.backend}\n".encode())
        time.sleep(0.005)
except BaseException as error:
    os.write(1, f"{time.time()} {steps} {type(error).__name__} {error}\n".encode())
    raise SystemExit(3)
"""


def pairs(places: list[namespaces.Node], program: str, grace: float = 10.0) -> list[subprocess.Popen]:
    """Two ranks on each node, forks of one process there, whose group they are; `grace` as for `forked.py`."""
    job = {"SPMD_SIZE": str(2 * len(places)), "SPMD_INIT_METHOD": f"tcp://{places[0].address}:29511"}
    job["FORKED_GRACE"] = str(grace)
    return [
        node.start(
            [sys.executable, str(Path(__file__).parents[1].joinpath("forked.py")), "2", program],
            env={**BARE, **job, "SPMD_RANK": str(2 * number), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number, node in enumerate(places)
    ]


LOST = [("cut", 2, 1), ("killed", 2, 0), ("stopped", 2, 1)]
MORE_LOST = [("cut", 3, 0), ("killed", 2, 1), ("killed", 3, 2), ("stopped", 2, 0)]  # `make test-hosts`


@pytest.mark.parametrize(("how", "count", "which"), LOST + MORE_LOST * bool(os.environ.get("TEST_NAMESPACES")))
def test_a_node_that_is_lost(how: str, count: int, which: int, tmp_path: Path) -> None:
    """Every rank that still runs ends, in time and with a clear error; no half of the job goes on."""
    timeout = TIMEOUT * max(1.0, slowness() / 4)  # it bounds how long ranks wait for each other at the beginning, too
    with namespaces.nodes(count) as places:
        started = pairs(places, script(tmp_path, GOING.replace("SECONDS", str(timeout))), 10.0 + timeout)
        lost = started[which]
        try:
            for process in started:
                assert [process.stdout.readline() for _ in range(2)] == ["hierarchical\n"] * 2
            began = time.time()
            if how == "cut":
                places[which].cut()
            else:
                os.killpg(lost.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            others = [process for process in started if how != "stopped" or process is not lost]
            told = [process.communicate(timeout=HANGS)[0] for process in others]
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()  # closes its pipes
    steps = set()
    for process, text in zip(others, told, strict=True):
        if how == "killed" and process is lost:
            assert process.returncode == -9
            continue
        assert process.returncode == 3, text
        said = re.split(r"^(?=\d+\.\d+ \d+ )", text, flags=re.MULTILINE)[1:]
        assert len(said) == 2, text
        for one in said:
            at, count_of_steps, kind, why = one.split(" ", 3)
            assert kind == "PeerLost"
            limit = RECOVERY_SECONDS if how == "killed" else timeout + RECOVERY_SECONDS
            assert quick(float(at) - began, limit + 2.0), one
            assert re.search(r"ranks? [\d, -]+ did not answer|lost contact with the meeting place", why), why
            steps.add(int(count_of_steps))
    # A rank may have finished the step that another one still waited in; nobody begins one more.
    assert max(steps) - min(steps) <= 1, steps


INTERFACE = """
import sys, torch
sys.path.append(sys.argv[1])
from namespaces import sent_bytes
import spmd
from spmd import Mesh
if sys.argv[2:]:
    import os
    spmd.initialize(int(os.environ["SPMD_RANK"]), int(os.environ["SPMD_SIZE"]), interface=sys.argv[2],
                    init_method=os.environ["SPMD_INIT_METHOD"])
mesh = Mesh(timeout=20)
comm = mesh.comm
def body():
    before = [sent_bytes(card) for card in ("eth0", "eth1")]
    for _ in range(4):
        mesh.comm().all_reduced(torch.ones(1 << 18))
    if mesh.rank == 0:  # messages take the same way
        mesh.comm().send(torch.ones(1 << 18), 1)
    else:
        mesh.comm().recv(torch.empty(1 << 18), 0)
    return [sent_bytes(card) - start for card, start in zip(("eth0", "eth1"), before)]
print(mesh.run(body)[0])
"""


@pytest.mark.parametrize(
    ("environ", "arguments", "card"),
    [
        ({}, [], 0),  # the way to where the ranks met
        ({"SPMD_INTERFACE": "eth1"}, [], 1),
        ({"GLOO_SOCKET_IFNAME": "eth1,eth0"}, [], 1),
        ({"SPMD_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth1"}, [], 0),
        ({"SPMD_INTERFACE": "eth0"}, ["eth1"], 1),
    ],
)
def test_the_interface_is_chosen(environ: dict[str, str], arguments: list[str], card: int) -> None:
    with namespaces.nodes(2, networks=2) as places:
        started = namespaces.on_nodes(places, 1, ["-c", INTERFACE, str(BENCH), *arguments], environ=environ)
        told = [process.communicate(timeout=HANGS) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    sent = json.loads(told[0][0])
    assert sent[card] > 4 << 20
    assert sent[1 - card] < 1 << 18  # the store's few words


def test_an_interface_that_is_not_there() -> None:
    with namespaces.nodes(1) as places:
        (process,) = namespaces.on_nodes(
            places, 1, ["-c", "import spmd; spmd.Mesh()"], environ={"SPMD_INTERFACE": "ib0"}
        )
        _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 1
    assert "MeshError: network interface 'ib0' can't be used on" in err
    assert "expected one of ['eth0', 'lo'], or an address of this host" in err


WITHOUT_LOOPBACK = """
import subprocess
import torch
from spmd import Mesh, MeshError, psum
subprocess.run(["ip", "addr", "del", "127.0.0.1/8", "dev", "lo"], check=True)
print(Mesh({"data": 2}).run(lambda: float(psum(torch.ones(()), "data"))))
try:
    Mesh({"data": 2}, hosts="local:2x1", timeout=9)
except MeshError as error:
    print(error)
Mesh({"data": 2}, backend="gloo").run(lambda: psum(torch.ones(()), "data"))
"""


def test_a_host_whose_loopback_has_no_address() -> None:
    """As where there is IPv6 only: shared memory needs none, and others say what they lack."""
    with namespaces.nodes(1) as places:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = places[0].start([sys.executable, "-c", WITHOUT_LOOPBACK], env=BARE, **pipes)
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 1 and out.startswith("[2.0, 2.0]\n127.0.0.1 can't be reached on")
    assert "MeshError: Gloo can't listen at 127.0.0.1 on" in err


def test_nothing_is_left() -> None:
    with namespaces.nodes(2) as places:
        names = {node.name for node in places}
        listed = {line.split()[0] for line in namespaces.ip("netns", "list").splitlines()}
        assert names <= listed
    assert not [line for line in namespaces.ip("netns", "list").splitlines() if f"-{os.getpid()}-" in line]
