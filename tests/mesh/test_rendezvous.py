"""Where launched ranks meet, and what each is told when they don't, within the timeout.

The processes of all cases begin together when all have imported the library.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from fork_server import shared_server
from jobs import environ_without
from patience import HANGS, quick
from ports import free_port
from scripts import ENDS_WHOLLY, FORKED_CHILDREN, run, started, two_ranks

from spmd import MeshError, initialize

TIMEOUT = 3  # of those that wait in vain

# It reads nothing from a pipe whose other end is closed.
CLOSES_A_PIPE = """
import os
from spmd import Mesh, initialize
reading, writing = os.pipe()
os.set_blocking(reading, False)
initialize(0, 1, init_method="METHOD")
with Mesh(timeout=60) as mesh:
    os.close(writing)
    print(os.read(reading, 1), mesh.rank)
"""

# What each process runs, given how to start; it says how long it took, and what came of it.
PROGRAM = f"""
import datetime, os, sys, time
import torch, torch.distributed as dist
from spmd import Mesh, MeshError
from spmd import initialize
print("ready", flush=True)
input()
began, timeout = time.monotonic(), {HANGS}
try:
    exec(sys.argv[1])
    mesh = Mesh(timeout=timeout)
    total = mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(()))))
    text = f"rank {{mesh.rank}} of {{mesh.size}}: {{total}}"
except MeshError as error:
    text = f"MeshError: {{error}}"
print(f"{{time.monotonic() - began:.3f}} s: {{text}}", flush=True)
input()
"""


def at(method: str) -> str:
    """One process's start: `{rank}` and `{size}` are still to be filled in."""
    return f"initialize({{rank}}, {{size}}, init_method={method!r})"


def pair(start: str) -> list[str]:
    return [start.format(rank=rank, size=2) for rank in range(2)]


def stale_file(folder: Path) -> str:
    """What a killed run leaves: rank 0, of a process that is no more, has signed in."""
    code = "import sys; from spmd import Mesh, initialize; initialize(0, 2, init_method=sys.argv[1]); Mesh(timeout=60)"
    left = folder / "stale"
    with started("-c", code, f"file://{left}") as process:
        while b"rank/0" not in written(left):
            assert process.poll() is None
            time.sleep(0.01)
    return f"file://{left}"


def written(path: Path) -> bytes:
    """What is in a file of a `FileStore`, whose entries are whole whenever it can be locked."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()


def cases_in(folder: Path, busy: int) -> dict[str, list[str]]:
    """What the processes of each case call."""
    waits = f"timeout = {TIMEOUT}; "
    port, unmet = free_port(), at(f"tcp://127.0.0.1:{free_port()}")
    environ = "os.environ.update(MASTER_ADDR='localhost', MASTER_PORT='{port}'); " + at("env://")
    tcp_store = (
        f"initialize({{rank}}, 2, store=dist.TCPStore('127.0.0.1', {free_port()}, None, {{rank}} == 0, "
        f"datetime.timedelta(seconds={HANGS})))"
    )
    return {
        "env": pair(environ.replace("{port}", str(free_port()))),
        "tcp": pair(at(f"tcp://127.0.0.1:{port}")),
        "file": pair(at(f"file://{folder}/file")),
        "TCPStore": pair(tcp_store),
        "FileStore": pair(f"initialize({{rank}}, 2, store=dist.FileStore('{folder}/store', 2))"),
        "stale": [at(stale_file(folder)).format(rank=0, size=2)],
        "busy": [at(f"tcp://127.0.0.1:{busy}").format(rank=0, size=2)],
        "no rank 1": [waits + at(f"tcp://127.0.0.1:{free_port()}").format(rank=0, size=3)],
        "rank 0 gives up": [waits + unmet.format(rank=0, size=3), unmet.format(rank=1, size=3)],
        "no rank 0": [waits + at(f"tcp://127.0.0.1:{free_port()}").format(rank=1, size=2)],
        "no rank 0 at a file": [waits + at(f"file://{folder}/alone").format(rank=1, size=2)],
        "twice": [at(f"file://{folder}/twice").format(rank=0, size=2)] * 2,
        "sizes": [at(f"file://{folder}/sizes").format(rank=rank, size=2 + rank) for rank in range(2)],
    }


@contextlib.contextmanager
def waiting(start: str, environ: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process that begins once it gets a line."""
    process = shared_server().run(
        [sys.executable, "-c", PROGRAM, start],
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[tuple[float, str]]]]:
    """For each case and process: the seconds it took, and what it said."""
    bare = environ_without("SPMD_", "MASTER_", "TORCHELASTIC")
    with socket.create_server(("", 0)) as stranger, contextlib.ExitStack() as stack:
        cases = cases_in(tmp_path_factory.mktemp("meet"), stranger.getsockname()[1])
        begun = {name: [stack.enter_context(waiting(start, bare)) for start in group] for name, group in cases.items()}
        every = [process for group in begun.values() for process in group]
        for process in every:
            assert process.stdout.readline() == "ready\n"
        for _ in range(2):  # begin; and end, when every process of the case has said what it has to say
            for process in every:
                process.stdin.write("\n")
                process.stdin.flush()
        outs = {name: [process.communicate(timeout=HANGS)[0] for process in group] for name, group in begun.items()}
    found = {
        name: [re.fullmatch(r"([\d.]+) s: (.*)\n", out, re.DOTALL) for out in group] for name, group in outs.items()
    }
    assert all(match for group in found.values() for match in group), outs
    yield {name: [(float(match[1]), match[2]) for match in group if match] for name, group in found.items()}


@pytest.mark.parametrize("place", ["env", "tcp", "file", "TCPStore", "FileStore"])
def test_they_meet(told: dict[str, list[tuple[float, str]]], place: str) -> None:
    assert [text for _, text in told[place]] == [f"rank {rank} of 2: [2.0, 2.0]" for rank in range(2)]


# For each process of a case, what it must be told.
FAILURES = {
    "stale": [
        r"the meeting place file:///.*/stale is left over from an earlier run \(process \d+, which has ended\).*remove"
    ],
    "busy": [r"rank 0 cannot meet the others at port \d+ \(got .*in use\): end what uses the port, or choose another"],
    "no rank 1": [
        rf"2 of 3 ranks did not come within {TIMEOUT} s: \[1, 2\] \[rank 0, at tcp://.*check that they were started"
    ],
    "rank 0 gives up": [
        rf"1 of 3 ranks did not come within {TIMEOUT} s: \[2\]",
        r"rank 1 has lost the meeting place tcp://\S+ before all 3 ranks had come .*: see the output of rank 0",
    ],
    "no rank 0": [
        rf"rank 1 of 2 \(from initialize\) found nobody at 127.0.0.1:\d+ within {TIMEOUT} s, where rank 0 should be"
    ],
    "no rank 0 at a file": [rf"1 of 2 ranks did not come within {TIMEOUT} s: \[0\] \[rank 1, at file:///.*/alone\]"],
    "twice": [r"two processes are rank 0: \d+ on \S+ and \d+ on \S+ \[.*\]: (give each|correct the start)"] * 2,
    "sizes": [
        r"ranks disagree on how many there are: rank \d says \d, rank \d says \d.*: (start all|correct the start)"
    ]
    * 2,
}
AT_ONCE = ("stale", "busy", "twice", "sizes")


@pytest.mark.parametrize("case", FAILURES)
def test_what_they_are_told(told: dict[str, list[tuple[float, str]]], case: str) -> None:
    for (seconds, text), pattern in zip(told[case], FAILURES[case], strict=True):
        assert re.match(f"MeshError: {pattern}", text), text
        assert quick(seconds, 2 if case in AT_ONCE else TIMEOUT + 2), text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank": 2, "size": 2, "init_method": "env://"}, r"bad rank \(expected 0 to 1, got rank 2 of 2\)"),
        ({"rank": -1, "size": 2, "init_method": "env://"}, "got rank -1 of 2"),
        ({"rank": 0, "size": 0, "init_method": "env://"}, "bad rank"),
        ({"rank": 0, "size": 1}, "one of init_method and store"),
        ({"rank": 0, "size": 1, "init_method": "env://", "store": dist.HashStore()}, "one of init_method and store"),
    ],
)
def test_bad_arguments(arguments: dict, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        initialize(**arguments)


BAD_PLACES = """
import os
from spmd import Mesh, MeshError
from spmd import initialize
def attempt(method, **environ):
    os.environ.update(environ)
    initialize(0, 1, init_method=method)
    try:
        Mesh(timeout=3)
    except MeshError as error:
        print(error)
attempt("env://", MASTER_ADDR="localhost")
attempt("env://", MASTER_PORT="http")
for method in ("smoke://hill", "tcp://localhost", "tcp://localhost:99999", "tcp://a..b:2000"):
    attempt(method)
attempt("file:///no/such/folder/file")
attempt("tcp://no.such.host.invalid:2000")
"""


def test_bad_places() -> None:
    status, out, err = run("-c", BAD_PLACES, without=["SPMD_", "MASTER_"])
    assert status == 0, err
    first, *others, file, unknown = out.splitlines()
    assert first == "env:// needs MASTER_ADDR and MASTER_PORT (got no MASTER_PORT)"
    methods = ("tcp://localhost:http", "smoke://hill", "tcp://localhost", "tcp://localhost:99999", "tcp://a..b:2000")
    for line, method in zip(others, methods, strict=True):
        assert re.match(f"cannot meet there .*tcp://host:port.*got '{method}'", line), line
    assert re.match("rank 0 cannot meet the others at file:///no/such/folder/file .*No such file.*another path", file)
    assert re.match("rank 0 cannot meet .* at tcp://no.such.host.invalid:2000 .*: name an address of rank 0's", unknown)


def test_a_process_with_other_sockets_meets_as_well() -> None:
    """A pipe of multiprocessing is a socket without a name, and so without a port."""
    port = free_port()
    code = (
        "import socket; pair = socket.socketpair(); from spmd import Mesh, initialize; "
        f"initialize(0, 1, init_method='tcp://127.0.0.1:{port}'); print(Mesh().size)"
    )
    assert run("-c", code)[:2] == (0, "1\n")


STARTS_ANOTHER = f"""
import subprocess, sys
from spmd import Mesh, MeshError
try:
    mesh = Mesh(timeout={HANGS} if len(sys.argv) == 1 else 1)
    print("rank", mesh.rank, "of", mesh.size, flush=True)
    if mesh.rank == 0:
        subprocess.run([sys.executable, sys.argv[0], "child"], check=True)
except MeshError as error:
    print(error, flush=True)
"""


TOLD = r"this program was started by rank 0 \(process \d+\), whose variables it has.*-u SPMD_RANK -u SPMD_SIZE"


# `env` starts a new Python, whose variables others can see; otherwise both are forks.
@pytest.mark.parametrize(
    ("environ", "command"),
    [({}, ()), ({"TORCHELASTIC_RUN_ID": "1"}, ()), ({"SPMD_INIT_METHOD": "tcp://127.0.0.1:PORT"}, ("env",))],
    ids=["once", "restarts", "port"],
)
def test_a_program_that_a_rank_starts_is_told_whose_variables_it_has(
    tmp_path: Path, environ: dict[str, str], command: tuple[str, ...]
) -> None:
    """Also as under mpirun: the port is in use for a second one, by the rank that has started it."""
    program = tmp_path / "program.py"
    program.write_text(STARTS_ANOTHER)
    code = f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path(sys.argv[0], run_name='__main__')"
    told = {name: text.replace("PORT", str(free_port())) for name, text in {**environ, **FORKED_CHILDREN}.items()}
    (first, err), (other, _) = two_ranks(tmp_path, code, env=told, inside=lambda rank: () if rank else command)
    assert other == "rank 1 of 2\n", err
    said, answer = first.splitlines()
    assert said == "rank 0 of 2" and re.match(TOLD, answer), first + err


def test_the_meeting_place_is_removed(tmp_path: Path) -> None:
    """Also if what keeps it lies in a cycle: at the end all is searched for garbage."""
    code = "import sys; from spmd import Mesh, initialize; initialize(0, 1, init_method=sys.argv[1]); mesh = Mesh()"
    assert run("-c", f"{code}; print(mesh.size)", f"file://{tmp_path}/meet", env=ENDS_WHOLLY)[:2] == (0, "1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_whose_name_the_kernel_has_cut_within_a_character() -> None:
    """Ranks of one parent meet at a file that is named after it; of a name the kernel keeps 15 bytes."""
    code = """
import ctypes, os
ctypes.CDLL(None).prctl(15, "abcdefghijklmné".encode())  # PR_SET_NAME
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
from spmd import Mesh
print(Mesh().size)
"""
    told = {"SPMD_RANK": "0", "SPMD_SIZE": "1"}
    assert run("-c", code, without=["SPMD_"], env=told)[:2] == (0, "1\n")


def test_open_files_are_not_kept() -> None:
    code, out, err = run("-c", CLOSES_A_PIPE.replace("METHOD", f"tcp://127.0.0.1:{free_port()}"))
    assert (code, out) == (0, "b'' 0\n"), err
