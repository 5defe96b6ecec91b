"""`spmd host --listen`: hosts that wait to be dialled by a driver that has the job's secret."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import allow_files
from attacks import listening as ports_of
from host_processes import host_process
from patience import HANGS, end_within, until
from test_hosts import REASON, namespaces, trained, works

from spmd import Mesh, MeshError, PeerLost, put, spmd

pytestmark = pytest.mark.long


@contextlib.contextmanager
def listening(
    count: int, environ: dict[str, str], address: str = "127.0.0.1"
) -> Iterator[tuple[list[str], list[subprocess.Popen]]]:
    """So many hosts, at ports of their own choice: as `Mesh(hosts=)` takes them without numbers of ranks."""
    command = [sys.executable, "-m", "spmd", "host", "--listen", f"{address}:0"]
    started = [
        subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        found = []
        for one in started:
            assert one.stdout is not None
            found.append(f"tcp://{address}:{one.stdout.readline().split()[-1]}")
        yield found, started
    finally:
        for one in started:
            one.terminate()
            one.communicate(timeout=HANGS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    secret = secrets.token_hex()
    with pytest.MonkeyPatch.context() as patch, listening(2, {"SPMD_SECRET": secret}) as (found, _):
        patch.setenv("SPMD_SECRET", secret)
        yield found


@pytest.fixture(scope="module")
def mesh(hosts: list[str]) -> Iterator[Mesh]:
    with Mesh({"data": 4}, hosts=[f"{host}:2" for host in hosts], timeout=60, threads=1) as made:
        yield made


def test_training_is_that_of_one_host(mesh: Mesh, shared_mesh: Callable[..., Mesh]) -> None:
    assert trained(mesh, 4) == trained(shared_mesh({"data": 2}), 4)


def test_hosts_of_both_kinds_of_addresses(hosts: list[str]) -> None:
    says = r"some hosts are reached by IPv4 .* \(got tcp://127.* and tcp://\[::1\]"
    with (
        listening(1, {"SPMD_SECRET": os.environ["SPMD_SECRET"]}, "[::1]") as (others, _),
        pytest.raises(MeshError, match=says),
    ):
        Mesh({"data": 2}, hosts=[f"{hosts[0]}:1", f"{others[0]}:1"])


def test_ranks_reach_the_store_by_their_own_host(mesh: Mesh, hosts: list[str]) -> None:
    """Nothing of the driver's is listened at by a rank of another host: no connection of a rank leads to it."""

    def peers() -> set[int]:
        """The ports to which this process's connections lead."""
        own = set()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # that of the directory itself
                own.add(os.readlink(fd))
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {int(line[2].rpartition(":")[2], 16) for line in lines if f"socket:[{line[9]}]" in own}

    assert works(mesh)
    driver = mesh.driver.ranks._store_at[1]
    found = mesh.run(peers)
    assert all(found) and not any(driver in ports for ports in found)


def test_the_mesh_s_key_does_not_travel(mesh: Mesh) -> None:
    from spmd.mesh.hosts import link
    from spmd.mesh.hosts import protocol as hosts_protocol
    from spmd.mesh.rank import descriptors

    ranks = mesh.driver.ranks
    sent: list[Any] = []
    real = link.Link.send_encoded

    def send(self: Any, said: bytes, content: Any) -> None:
        sent.append(hosts_protocol.decode(said))
        real(self, said, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link.Link, "send_encoded", send)
        os.kill(mesh.run(host_process)[3], signal.SIGKILL)
        with contextlib.suppress(PeerLost):
            mesh.run(os.getpid)
        assert until(lambda: works(mesh))
    begun = [descriptors.decode(said.request) for said in sent if isinstance(said, hosts_protocol.Begin)]
    assert begun and all(one.key != ranks.request.key and one.store == "" for one in begun)


def test_a_host_is_lost_and_dialled_again(mesh: Mesh) -> None:
    whole, pids, host = put(torch.ones(3), mesh=mesh), mesh.run(os.getpid), mesh.run(host_process)[3]
    assert whole.full().tolist() == [1, 1, 1]
    os.kill(host, signal.SIGKILL)
    assert end_within(10.0, pids[2:])
    total = spmd(lambda a: a + 1, mesh=mesh)
    assert total(whole).full().tolist() == [2, 2, 2]
    after = mesh.run(os.getpid)
    assert after[:2] == pids[:2] and not {*after[2:]} & {*pids[2:]}


def test_one_mesh_after_another_and_two_at_once(mesh: Mesh, hosts: list[str]) -> None:
    for _ in range(2):
        with Mesh({"data": 2}, hosts=[f"{host}:1" for host in hosts], timeout=60) as other:
            pids = other.run(os.getpid)
            assert works(other) and works(mesh)
        assert end_within(10.0, pids)


def test_a_host_that_can_open_no_more_files(mesh: Mesh) -> None:
    """It does not keep its processor busy with ranks that ask for the store, and lets them in as soon as it can."""
    host = mesh.run(host_process)[3]
    allow_files(host, more=False)
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(one)) for one in ports_of([host])]
        began, before = time.monotonic(), processor_seconds(host)
        time.sleep(2.0)
        assert waiting and processor_seconds(host) - before < 0.25 * (time.monotonic() - began)
        allow_files(host, more=True)
    assert works(mesh)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_ends_with_what() -> None:
    """A host that is ended takes its ranks along."""
    secret = secrets.token_hex()
    with pytest.MonkeyPatch.context() as patch, listening(1, {"SPMD_SECRET": secret}) as (found, (process,)):
        patch.setenv("SPMD_SECRET", secret)
        with contextlib.suppress(MeshError), Mesh({"data": 2}, hosts=[f"{found[0]}:2"], timeout=60) as mesh:
            pids = mesh.run(os.getpid)
            process.send_signal(signal.SIGINT)
            process.wait(HANGS)
            assert end_within(10.0, pids)


def test_who_does_not_have_the_secret(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_SECRET", secrets.token_hex())
    with pytest.raises(MeshError, match=r"can't be dialled.*another secret.*spmd host --listen"):
        Mesh({"data": 1}, hosts=[f"{hosts[0]}:1"])


def test_strangers_do_not_keep_a_driver_out(mesh: Mesh, hosts: list[str]) -> None:
    """Those that say nothing make room for who comes after them."""
    address, _, port = hosts[0].removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((address, int(port)))) for _ in range(40)]
        for one in strangers:
            one.settimeout(HANGS)
        assert strangers[0].recv(32) and strangers[0].recv(1) == b""
        with Mesh({"data": 1}, hosts=[f"{hosts[0]}:1"], timeout=60) as other:
            assert works(other)
    assert works(mesh)


def test_a_host_that_can_serve_nobody_for_a_while() -> None:
    """It turns away who comes, without files for a process of its own, and lives to serve who comes later."""
    secret = secrets.token_hex()
    with pytest.MonkeyPatch.context() as patch, listening(1, {"SPMD_SECRET": secret}) as (found, (process,)):
        patch.setenv("SPMD_SECRET", secret)
        address, _, port = found[0].removeprefix("tcp://").rpartition(":")
        allow_files(process.pid, more=False)
        least, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (least + 1, most))  # a connection, and no pipe
        for _ in range(2):
            with socket.create_connection((address, int(port)), timeout=HANGS) as stranger:
                assert stranger.recv(1) == b""
        allow_files(process.pid, more=True)
        with Mesh({"data": 1}, hosts=[f"{found[0]}:1"], timeout=60) as mesh:
            assert works(mesh)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_SECRET", secrets.token_hex())
    for wrong in (
        ["tcp://a:2"],
        ["tcp://a:7000:2", "b:2"],
        ["tcp://a:x:2"],
        ["tcp://a:7000/x:2"],
        ["tcp://a..b:7000:2"],
    ):
        with pytest.raises(MeshError, match="not understood"):
            Mesh({"data": 2}, hosts=wrong)
    for arguments in (["nowhere"], ["127.0.0.1:99999"]):
        done = subprocess.run([sys.executable, "-m", "spmd", "host", "--listen", *arguments], capture_output=True)
        assert done.returncode == 1 and b"expected an address of this host and a port" in done.stderr
    done = subprocess.run([sys.executable, "-m", "spmd", "host"], stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith(b"spmd host: no driver is named on standard input")


IN_A_NOTEBOOK = """
import sys
from pathlib import Path
import nbformat
sys.path.append(sys.argv[1])
from execute import execute
found = execute(Path(sys.argv[2]))
nbformat.write(found, sys.argv[2])
"""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_notebook_in_a_network_namespace_drives_two_others(tmp_path: Path) -> None:
    """Whose hosts it dials; nobody could dial it, as nothing in its namespace listens but on loopback."""
    book, folder, secret = tmp_path / "book.ipynb", Path(__file__).parents[2] / "notebooks", secrets.token_hex()
    cells = json.loads((folder / "6_several_hosts.ipynb").read_text())
    look = "print('heard at', *(line.split()[1] for line in open('/proc/net/tcp') if ' 0A ' in line))\n"
    cells["cells"][-2]["source"] = [look, "mesh.status()"]
    book.write_text(json.dumps(cells))
    with namespaces.nodes(3) as (here, *others), contextlib.ExitStack() as stack:
        environ = {**os.environ, "SPMD_SECRET": secret, "RES_OPTIONS": "timeout:1 attempts:1"}
        for one in others:
            command = [sys.executable, "-m", "spmd", "host", "--listen", f"{one.address}:7000"]
            process = one.start(command, env=environ, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            assert process.stdout is not None and process.stdout.readline()
        environ["SPMD_NOTEBOOK_HOSTS"] = " ".join(f"tcp://{one.address}:7000:2" for one in others)
        driver = here.start(
            [sys.executable, "-c", IN_A_NOTEBOOK, str(folder), str(book)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            out, _ = driver.communicate(timeout=HANGS)
        finally:
            driver.kill()
        assert driver.returncode == 0, out
    text = json.dumps([cell.get("outputs") for cell in json.loads(book.read_text())["cells"]])
    assert "the same bits as one process here" in text and text.count(f"{others[1].address}:7000") >= 4
    found = re.search(r"heard at ([0-9A-F: ]+)", text)
    assert found is not None and {one.partition(":")[0] for one in found[1].split()} == {"0100007F"}
