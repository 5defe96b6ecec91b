"""Strangers on the host of a job: it goes on, its values are right, and nothing of theirs is run or followed."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attacks import JOB, Job, job, listening, scanned
from fork_server import Forked, ForkServer
from patience import HANGS, until
from ports import free_port
from scripts import FORKED_CHILDREN, launched, script, started, two_ranks

from spmd import PeerLost

IDLE = 500
AS_NOBODY = ["setpriv", "--reuid=65534", "--clear-groups"]

needs_second_user = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, for a second user"
)


class Runs:
    """A pickle that leaves a file where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_scanner_and_forged_frames(server: ForkServer, tmp_path: Path) -> None:
    with job(server, tmp_path) as its:
        its.start(0)
        its.start(1)
        its.wait_until_it_trains()
        ports = listening([process.pid for process in its.ranks])
        assert len(ports) >= 3  # the store, Gloo, messages
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in ports), ports
        for port in sorted(ports):
            with scanned(port, IDLE):
                its.trains_on()
        assert its.end() == ["right\n"] * 2


def meeting_of(its: Job) -> dist.Store:
    """Where a job's ranks sign in, once its first rank, which is started, has done so."""
    its.start(0)
    first = its.ranks[0]
    assert until(lambda: first.poll() is not None or listening([first.pid])) and first.poll() is None
    found = dist.PrefixStore("spmd/0", dist.TCPStore("127.0.0.1", its.port, is_master=False))
    found.wait(["rank/0"])
    return found


def test_impostor_and_forged_values(server: ForkServer, tmp_path: Path) -> None:
    """Someone signs in as rank 1 first, copies what rank 0 says, and writes aborts and pickles into the store."""
    ran = tmp_path / "ran"
    payload = pickle.dumps(Runs(ran))
    with job(server, tmp_path) as its:
        stranger = meeting_of(its)
        for forged in (b"here 1 2", payload, stranger.get("rank/0")):
            stranger.set("rank/1", forged)
            time.sleep(0.3)  # in which rank 0 looks
        names = ["host/0", "host/1", "arena/0", "mapped/1", "refused"]
        aborts = [f"abort/{generation}" for generation in range(3)]
        for name in (*names, *aborts, *(f"mesh1/{name}" for name in (*names, *aborts))):
            stranger.set(name, payload)
        its.start(1)
        its.wait_until_it_trains()
        for text in (b"0 stop", b"not a number", payload):
            for generation in range(3):
                stranger.set(f"mesh1/abort/{generation}", text)
            its.trains_on()
        assert its.end() == ["right\n"] * 2
    assert not ran.exists()


def test_ranks_of_another_secret_are_told(server: ForkServer, tmp_path: Path) -> None:
    with job(server, tmp_path) as its:
        meeting_of(its)
        its.environ["SPMD_SECRET"] = "another secret of the job"
        code = "from spmd import Mesh; Mesh(timeout=5)"
        _, told = server.start(code, environ={**its.environ, "SPMD_RANK": "1"}).communicate()
    assert "1 of 2 ranks did not come within 5 s: [0]" in told
    assert "check that all have the same secret" in told


def start(server: ForkServer, rank: int, **environ: str) -> Forked:
    bare = {name: text for name, text in os.environ.items() if not name.startswith(("SPMD_", "MASTER_"))}
    code = "from spmd import Mesh; mesh = Mesh(timeout=60); print(mesh.run(lambda: int(mesh.comm().rank)))"
    told = {"SPMD_RANK": str(rank), "SPMD_SIZE": "2", "OMP_NUM_THREADS": "1", **environ}
    return server.start(code, environ={**bare, **told})


@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_meeting_file_that_is_none(server: ForkServer, tmp_path: Path, kind: str) -> None:
    meet, victim = tmp_path / "meet", tmp_path / "victim"
    victim.write_text("mine")
    if kind == "symlink":
        meet.symlink_to(victim)
    else:
        os.mkfifo(meet)
    out, err = start(server, 0, SPMD_INIT_METHOD=f"file://{meet}").communicate()
    assert "MeshError: rank 0 cannot meet the others at file://" in err and out == ""
    assert victim.read_text() == "mine"


@needs_second_user
def test_meeting_place_that_another_user_made_first(server: ForkServer, tmp_path: Path) -> None:
    """The directory's name can be known: who takes it first does not become the one where the ranks meet."""
    public, home = tmp_path / "public", tmp_path / "home"
    for above in tmp_path.parents:  # those of pytest, below the one that everybody has
        if above.stat().st_uid == os.getuid() and stat.S_IMODE(above.stat().st_mode) == 0o700:
            above.chmod(0o711)
    tmp_path.chmod(0o755)
    public.mkdir()
    public.chmod(0o1777)
    home.mkdir(mode=0o700)
    taken = public / f"spmd-{os.getuid()}"
    made = subprocess.run([*AS_NOBODY, "mkdir", "-m", "777", str(taken)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    ranks = [start(server, rank, TMPDIR=str(public), HOME=str(home)) for rank in range(2)]
    for process in ranks:
        out, err = process.communicate()
        assert out == "[0, 1]\n", err
    assert list(taken.iterdir()) == []
    own = list((home / ".spmd").iterdir())
    assert own and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in own)


SQUAT = """
import socket, sys
taken = []
for line in sys.stdin:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = bytes.fromhex(line)
    print("ready", flush=True)
    while True:  # until its rank has died
        try:
            one.bind(name)
            break
        except OSError:
            pass
    one.listen(0)
    taken.append(one)
    print("taken", flush=True)
"""


def own_names() -> list[str]:
    """Under which this process listens on this host without a file."""
    inodes = {
        os.stat(f"/proc/self/fd/{fd}").st_ino
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [line for line in lines if line[3] == "00010000" and len(line) > 7]
    return [line[7] for line in listening if int(line[6]) in inodes and line[7].startswith("@spmd-")]


class Counter:
    def add(self, more: int) -> int:
        return more + 1


@needs_second_user
def test_another_user_takes_the_name_of_a_rank_that_has_died(make_mesh: Any) -> None:
    mesh = make_mesh({"data": 2})
    with subprocess.Popen(
        [*AS_NOBODY, sys.executable, "-c", SQUAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        for _ in range(2):
            (name,) = mesh.run(own_names, ranks=[1])[0]
            other.stdin.write(f"{name.replace('@', chr(0)).encode().hex()}\n")
            other.stdin.flush()
            assert other.stdout.readline() == "ready\n"
            names = [name]
            while names == [name]:  # else the new rank was faster
                os.kill(mesh.run(os.getpid, ranks=[1])[0], signal.SIGKILL)
                names = []
                while not names:
                    with contextlib.suppress(PeerLost):
                        names = mesh.run(own_names, ranks=[1])[0]
            assert other.stdout.readline() == "taken\n"
            assert mesh.remote(Counter, rank=1).add(41).get(timeout=HANGS) == 42
            assert mesh.run(lambda: int(mesh.comm().size)) == [2, 2]
        other.stdin.close()


DIAL = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
    one.settimeout(10)
    one.connect(bytes.fromhex(sys.argv[1]))
    try:
        one.sendall(bytes(32))
        print(len(one.recv(1)))
    except ConnectionError:
        print(0)
"""


@needs_second_user
def test_gloo_keeps_no_connections_of_strangers(make_mesh: Any) -> None:
    """Once a group is connected nobody else is: Gloo would end the process when it could open no more files."""
    mesh = make_mesh({"data": 2}, backend="gloo")

    def adds() -> float:
        return float(mesh.comm().all_reduced(torch.tensor(1.0)))

    def fails() -> None:
        raise ValueError("of the region: the group is opened anew after it")

    for _ in range(2):
        assert mesh.run(adds) == [2.0, 2.0]
        ports = listening(mesh.run(os.getpid))
        assert len(ports) == 2
        for address in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.5)
        with pytest.raises(ValueError, match=r"of the region"):
            mesh.run(fails)


def test_another_user_dials_a_rank(make_mesh: Any) -> None:
    """He is told nothing, not even what he could prove nothing with."""
    mesh = make_mesh({"data": 2})
    mesh.remote(Counter, rank=1).add(1).get()
    (name,) = mesh.run(own_names, ranks=[1])[0]
    dial = [sys.executable, "-c", DIAL, name.replace("@", chr(0)).encode().hex()]
    others = subprocess.run([*AS_NOBODY, *dial], capture_output=True, text=True, timeout=HANGS)
    assert others.stdout == "0\n", others.stderr
    assert subprocess.run(dial, capture_output=True, text=True, timeout=HANGS).stdout == "1\n"


FOREIGN = """
import os, sys
import torch
from spmd import Mesh
from spmd.kernels.network.authentication import AuthenticatedStore
from spmd.kernels.shm import arena
victim, real = os.open(sys.argv[1], os.O_RDWR), AuthenticatedStore.set
os.ftruncate(victim, arena._layout(2).end)
def names_it(self, key, value):
    real(self, key, f"{os.getpid()} {victim}" if key.endswith("arena/0") else value)
if os.environ["SPMD_RANK"] == "0":
    AuthenticatedStore.set = names_it
mesh = Mesh(timeout=60)
print(mesh.backend, mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1000)).sum())))
"""


def test_a_file_that_is_named_as_the_ranks_memory(tmp_path: Path) -> None:
    """By who may say so: it is not written to, and the ranks do without shared memory."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    outs = two_ranks(tmp_path, FOREIGN, str(victim))
    assert [out for out, _ in outs] == ["gloo [2000.0, 2000.0]\n"] * 2, outs
    with victim.open() as file:
        assert file.read(8) == "mine" + 4 * chr(0)
    assert victim.stat().st_blocks <= 8


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [one for child in children for one in descendants(child)]


def test_spmd_run_listens_nowhere(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = ["-m", "spmd", "run", "-n", "2", str(script), "auto", str(tmp_path)]
    with started(*command, env=FORKED_CHILDREN, stderr=None) as agent:
        end = time.monotonic() + HANGS
        while not all((tmp_path / f"trains-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end and agent.poll() is None
            time.sleep(0.05)
        others = descendants(agent.pid)
        assert len(others) >= 3  # its ranks, and what they are forked from
        assert listening([agent.pid, *others]) == set()
        (tmp_path / "stop").touch()
        assert agent.communicate(timeout=HANGS)[0] == "right\nright\n"


def test_several_hosts_without_a_secret_are_refused_where_one_is_required(server: ForkServer, tmp_path: Path) -> None:
    """Each rank has a home of its own, as on hosts that share none: refused, or warned of once."""
    for required in ("1", ""):
        port = free_port()
        ranks = []
        for rank in range(2):
            home = tmp_path / f"{required}{rank}"
            home.mkdir(mode=0o700)
            told = {"SPMD_INIT_METHOD": f"file://{tmp_path}/meet{required}", "HOME": str(home), "TMPDIR": str(home)}
            ranks.append(start(server, rank, **told, SPMD_REQUIRE_SECRET=required))
        outs = [process.communicate() for process in ranks]
        errors = "".join(err for _, err in outs)
        if required:
            assert all("MeshError: this job over several hosts has no secret" in err for _, err in outs), outs
        else:
            assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs
            assert errors.count("this job over several hosts has no secret") == 1
        assert port


NO_FOLDER = """
import internals
internals.no_own_folders()
import spmd
mesh = spmd.Mesh({"data": -1})
print(mesh.run(lambda: mesh.rank))
"""


def test_a_job_that_can_keep_no_secret_says_so(tmp_path: Path) -> None:
    code, out, err = launched(2, script(tmp_path, NO_FOLDER), env={"SPMD_REQUIRE_SECRET": ""})
    assert code == 0 and out == "[0, 1]\n" * 2 and err.count("this job has no secret") == 1, err
    code, out, err = launched(2, script(tmp_path, NO_FOLDER), env={"SPMD_REQUIRE_SECRET": "1"})
    assert code and not out and err.count("MeshError: this job has no secret") == 2, err
