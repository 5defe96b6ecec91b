"""The secret of a job: where it comes from, what is none, and who signs in without it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from fork_server import Forked, ForkServer
from patience import HANGS

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
needs_namespaces = pytest.mark.skipif(
    os.getuid() != 0
    or subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode != 0,
    reason="needs root and unshare, for namespaces",
)

MEETS = """
import sys
from spmd import Mesh
mesh = Mesh(timeout=float(sys.argv[1]))
print(mesh.run(lambda: int(mesh.comm().rank)))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    return made


def environ_of(home: Path, rank: int, size: int = 2, **told: str) -> dict[str, str]:
    bare = {name: text for name, text in os.environ.items() if not name.startswith(("SPMD_", "MASTER_"))}
    meeting = {"SPMD_INIT_METHOD": f"file://{home.parent}/meet", "HOME": str(home), "TMPDIR": str(home)}
    return {**bare, "SPMD_RANK": str(rank), "SPMD_SIZE": str(size), "OMP_NUM_THREADS": "1", **meeting, **told}


def start(server: ForkServer, home: Path, rank: int, *, size: int = 2, timeout: float = 60.0, **told: str) -> Forked:
    return server.start(MEETS, str(timeout), environ=environ_of(home, rank, size, **told))


def signature(**changes: object) -> bytes:
    """A rank's sign-in by who does not know the secret, as one of a host with another home directory would be."""
    said = {"host": "other", "namespace": "other", "pid": 1, "size": 2, "number": secrets.token_hex(16), **changes}
    return secrets.token_bytes(8 + 32) + json.dumps(said).encode()


NO_SIGNATURES = [
    b"",
    bytes(40) + b"[" * 100_000,
    bytes(40) + b"1",
    bytes(40) + b"[]",
    bytes(40) + b"\xff\xfe",
    signature(more=1),
    signature(number=None),
    signature(number=5),
    signature(number="\ud800" * 32),
    signature(host=["x"]),
    signature(host="\ud800"),
    signature(host="two\nlines\x1b[2J"),
    signature(pid="1"),
    signature(pid=True),
    signature(size=2.0),
    signature(host="x" * 5000),
]


def test_sign_ins_that_are_none(server: ForkServer, home: Path) -> None:
    """They are as if they had never come."""
    first = start(server, home, 0)
    store = dist.PrefixStore("spmd/0", dist.FileStore(str(home.parent / "meet"), 2))
    store.wait(["rank/0"])
    for data in NO_SIGNATURES:
        store.set("rank/1", data)
        time.sleep(0.15)  # in which rank 0 looks
        assert first.poll() is None, (data[:100], first.communicate())
    outs = [process.communicate() for process in (first, start(server, home, 1))]
    assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs
    assert not any("has no secret" in err for _, err in outs)


@needs_namespaces
def test_no_stranger_makes_hosts_that_share_a_secret_run_without(server: ForkServer, home: Path) -> None:
    """Rank 1 is on another host, and has the file at home: so the hosts share it, and who has none is nobody."""
    first = start(server, home, 0, size=3)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", MEETS, "60"]
    with subprocess.Popen(
        command, env=environ_of(home, 1, 3), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as second:
        store = dist.PrefixStore("spmd/0", dist.FileStore(str(home.parent / "meet"), 3))
        store.wait(["rank/0", "rank/1"])
        store.set("rank/2", signature(size=3))
        time.sleep(1.0)  # in which both look
        third = start(server, home, 2, size=3)
        outs = [first.communicate(), second.communicate(timeout=HANGS), third.communicate()]
    assert [out for out, _ in outs] == ["[0, 1, 2]\n"] * 3, outs
    assert not any("has no secret" in err for _, err in outs)


NO_LINKS = """
import os
def link(*_):
    raise PermissionError(1, "this file system has no links")
os.link = link
"""


def test_a_home_in_which_no_secret_can_be_kept(server: ForkServer, home: Path) -> None:
    """The ranks of one host do without, and leave no file behind at each start."""
    ranks = [server.start(NO_LINKS + MEETS, "60", environ=environ_of(home, rank)) for rank in range(2)]
    outs = [process.communicate() for process in ranks]
    assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs
    assert list((home / ".spmd").iterdir()) == []


NO_TEMPORARY = """
import tempfile
def none():
    raise FileNotFoundError(2, "No usable temporary directory found")
tempfile.gettempdir = none
"""


def test_where_no_temporary_file_can_be_made(server: ForkServer, home: Path) -> None:
    """As in a container whose file system can only be read: the secret, and where the ranks meet, are in the home."""
    bare = {"SPMD_INIT_METHOD": ""}
    ranks = [server.start(NO_TEMPORARY + MEETS, "60", environ=environ_of(home, rank, **bare)) for rank in range(2)]
    outs = [process.communicate() for process in ranks]
    assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs
    assert (home / ".spmd" / "secret").exists()


def test_a_secret_that_is_no_text(server: ForkServer, home: Path) -> None:
    ranks = [start(server, home, rank, SPMD_SECRET="\udcff\udc80" * 10) for rank in range(2)]
    outs = [process.communicate() for process in ranks]
    assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs


def test_a_secret_that_can_be_guessed(server: ForkServer, home: Path) -> None:
    (home / "short").write_text("short")
    (home / "short").chmod(0o600)
    for told in ({"SPMD_SECRET": "short"}, {"SPMD_SECRET_FILE": str(home / "short")}):
        _, err = start(server, home, 0, timeout=2.0, **told).communicate()
        assert f"MeshError: {next(iter(told))} is too short" in err


@pytest.mark.parametrize(
    ("mode", "owner"),
    [
        (0o644, None),
        (0o640, None),
        (0o620, None),
        (0o602, None),
        pytest.param(0o600, 65534, marks=needs_root),
        pytest.param(0o644, 65534, marks=needs_root),
    ],
)
def test_a_secret_that_others_know(server: ForkServer, home: Path, mode: int, owner: int | None) -> None:
    path = home / "of-the-job"
    path.write_text(secrets.token_hex())
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    out, err = start(server, home, 0, timeout=2, SPMD_SECRET_FILE=str(path)).communicate()
    assert "MeshError: SPMD_SECRET_FILE can't be used" in err and out == ""


def test_a_file_with_a_secret(server: ForkServer, home: Path) -> None:
    path = home / "of-the-job"
    path.write_text(f"{secrets.token_hex()}\n")
    path.chmod(0o600)
    told = [{"SPMD_SECRET_FILE": str(path)}, {"SPMD_SECRET": path.read_text().strip()}]
    ranks = [start(server, home, rank, **told[rank]) for rank in range(2)]
    outs = [process.communicate() for process in ranks]
    assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o660])
def test_a_secret_at_home_that_others_know(server: ForkServer, home: Path, mode: int) -> None:
    """It is used only if nobody else can have read or written it: rank 1, who knows it, is told so by being missed."""
    path = home / ".spmd" / "secret"
    path.parent.mkdir(mode=0o700)
    path.write_text(secrets.token_hex())
    path.chmod(mode)
    timeout = 60.0 if mode == 0o600 else 2.0
    ranks = [
        start(server, home, 0, timeout=timeout),
        start(server, home, 1, timeout=timeout, SPMD_SECRET=path.read_text()),
    ]
    outs = [process.communicate() for process in ranks]
    if mode == 0o600:
        assert [out for out, _ in outs] == ["[0, 1]\n"] * 2, outs
    else:
        assert "1 of 2 ranks did not come within 2 s: [0]" in outs[1][1], outs
