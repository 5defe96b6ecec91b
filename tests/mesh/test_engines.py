"""`Mesh(hosts=)` on what a site runs already: ssh's daemon, Slurm, Ray. What it gives is what one host gives."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm
from patience import HANGS, end_within
from test_hosts import REASON, trained

from spmd import Mesh, MeshError

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import namespaces

pytestmark = pytest.mark.long

# The losses and digest of a run on four ranks, and what processes it had; by the driver that a test starts.
PROGRAM = """
import json, os, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from test_hosts import Mesh, host_process, trained
{before}
with Mesh({{"data": 4}}, hosts={hosts}, timeout=60) as mesh:
    print(json.dumps([trained(mesh, 4), mesh.hosts.by_rank(), mesh.run(os.getpid) + mesh.run(host_process)]))
    for size in (3, 4):  # while processes of the other size are still there
        mesh.resize({{"data": size}})
        assert len(set(mesh.run(os.getpid))) == size
{after}
"""


def check(command: list[str], shared_mesh: Callable[..., Mesh], **options: Any) -> list[str]:
    """Run a driver: its losses and digest are those of one host, and it leaves nothing; each rank's host."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, **options)
    assert done.returncode == 0, done.stderr
    (losses, digest), hosts, pids = json.loads(done.stdout.splitlines()[-1])
    assert (losses, digest) == trained(shared_mesh({"data": 2}), 4)
    assert end_within(10.0, pids)
    return hosts


def program(hosts: str, before: str = "", after: str = "") -> list[str]:
    code = PROGRAM.format(hosts=hosts, before=before, after=after)
    return [sys.executable, "-c", code, str(Path(__file__).parent)]


@pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))
@pytest.mark.parametrize("hosts", ["slurm", "slurm:2"])
def test_an_allocation_of_slurm(tmp_path: Path, shared_mesh: Callable[..., Mesh], hosts: str) -> None:
    """A driver on the login node, in salloc; a real slurmctld, and two nodes."""
    with slurm.slurm(tmp_path, nodes=2) as environ:
        own = {**os.environ, **environ, "SPMD_INTERFACE": "127.0.0.1"}
        tasks = ["--ntasks-per-node=2"] if hosts == "slurm" else ["--cpus-per-task=2"]
        found = check(["salloc", "--quiet", "-N", "2", *tasks, *program(repr(hosts))], shared_mesh, env=own)
    assert found == ["node1", "node1", "node2", "node2"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_cluster_of_ray(shared_mesh: Callable[..., Mesh]) -> None:
    """Two raylets; the placement group is gone when the mesh is closed."""
    before = (
        "import ray; from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2, 'include_dashboard': False})\n"
        "cluster.add_node(num_cpus=2); ray.init(address=cluster.address, log_to_driver=False)\n"
    )
    after = (
        "groups = ray.util.placement_group_table().values()\n"
        "assert [group['state'] for group in groups] == ['REMOVED'], groups\n"
        "ray.shutdown(); cluster.shutdown()\n"
    )
    environ = {**os.environ, "SPMD_INTERFACE": "127.0.0.1"}
    found = check(program("'ray'", before, after), shared_mesh, env=environ)
    assert len(set(found)) == 2 and found[0] == found[1] and found[2] == found[3]


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match=r"for a program in an allocation of Slurm \(got SLURM_JOB_ID not set"):
        Mesh({"data": 4}, hosts="slurm")
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\necho a; echo b\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[a-b]")
    with pytest.raises(MeshError, match=r"how many ranks each node has \(got 2 nodes, SLURM_TASKS_PER_NODE not set\)"):
        Mesh({"data": 4}, hosts="slurm")
    with pytest.raises(MeshError, match="does not fit its hosts"):
        Mesh({"data": 4}, hosts="slurm:3")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MeshError, match="needs Ray"):
        Mesh({"data": 4}, hosts="ray")


NO_SSHD = REASON or (None if shutil.which("sshd") else "sshd is not installed")


@contextlib.contextmanager
def daemons(places: list[namespaces.Node], folder: Path) -> Iterator[None]:
    """An sshd in each namespace, and a program `ssh` in `folder` that is let in."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
        f"PidFile none\nPermitRootLogin prohibit-password\nSetEnv RES_OPTIONS=timeout:1\n"
    )
    ssh = f"-i {folder}/user -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR"
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F /dev/null {ssh} "$@"\n')
    (folder / "ssh").chmod(0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    running = [
        place.start([str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE)
        for place in places
    ]
    try:
        for one in running:
            assert one.stderr is not None and b"listening" in one.stderr.readline()
        yield
    finally:
        for one in running:
            one.terminate()
            one.wait(HANGS)
            assert one.stderr is not None
            one.stderr.close()


@pytest.mark.skipif(NO_SSHD is not None, reason=str(NO_SSHD))
def test_hosts_that_ssh_reaches(tmp_path: Path, shared_mesh: Callable[..., Mesh]) -> None:
    """Two network namespaces, each with a real sshd; the driver is in the first."""
    with namespaces.nodes(2) as places, daemons(places, tmp_path):
        hosts = [f"root@{place.address}:2" for place in places]
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RES_OPTIONS": "timeout:1"}
        inside = ["ip", "netns", "exec", places[0].name, *program(repr(hosts))]
        assert check(inside, shared_mesh, env=environ) == [host.partition(":")[0] for host in hosts for _ in range(2)]
