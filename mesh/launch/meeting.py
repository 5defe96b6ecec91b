"""Where launched ranks meet, read from the environment: hosts, ports, and how different clusters spell them.

Invariant: all ranks of a launch compute the same address, since only variables that are equal on all of them are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...kernels.errors import MeshError

Environ = Mapping[str, str]


def integer(environ: Environ, name: str) -> int | None:
    """The variable as an integer; None if it is not set, or is empty, as shell scripts may leave it."""
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise MeshError(
            f"environment variable {name} is not a number",
            expected="an integer",
            got=f"{name}={text!r}",
            remedy=f"unset {name}, or set it as the launcher would",
        ) from None


def stated(environ: Environ) -> str | None:
    """What the user set: SPMD_INIT_METHOD, else MASTER_ADDR and MASTER_PORT.

    >>> stated({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}), stated({})
    ('env://', None)
    """
    method = environ.get("SPMD_INIT_METHOD")
    if method:
        if not method.startswith(("env://", "tcp://", "file://")):
            raise MeshError(
                "SPMD_INIT_METHOD is not understood",
                expected="env://, tcp://host:port or file:///path",
                got=f"SPMD_INIT_METHOD={method!r}",
                remedy="set it to an address that all ranks can reach, or unset it",
            )
        return method
    address, port = environ.get("MASTER_ADDR"), integer(environ, "MASTER_PORT")
    if bool(address) != (port is not None):
        raise MeshError(
            "MASTER_ADDR and MASTER_PORT say only together where the ranks meet",
            got=f"{show(environ, 'MASTER_ADDR', 'MASTER_PORT')}",
            remedy="set both or neither",
        )
    return "env://" if address else None


def tcp(host: str | None, job: int | None, step: int = 0) -> str | None:
    """An address from a host and the numbers of a job and its step; None if the host or the job is unknown.

    >>> tcp("node1", 17), tcp("node1", 18), tcp("fe80::1", 17, step=1), tcp(None, 17)
    ('tcp://node1:61457', 'tcp://node1:61458', 'tcp://[fe80::1]:62478', None)
    """
    if host is None or job is None:
        return None
    # 61440 to 65535: above Linux's ephemeral ports (32768 to 60999), so that no client socket has the port by chance.
    # 1021 is coprime to 4096: up to 4096 steps of a job, and steps of neighbouring jobs, get ports of their own.
    port = 61440 + (job + 1021 * step) % 4096
    return url(host, port)


def url(host: str, port: object) -> str:
    """Where a store listens, as `init_method` takes it; an IPv6 address needs its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def job_of(environ: Environ) -> tuple[str | None, int | None]:
    """The first host and the number of the Slurm or LSF job that another launcher runs in; None for what is unknown.

    The job's and not the step's: mpirun's daemons are a step of their own, without the ranks of the first host.

    >>> job_of({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "batch2 1 h41n03 42 h41n04 42"})
    ('h41n03', 5)
    """
    if environ.get("SLURM_JOB_ID"):
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        return first_host(nodes) if nodes else None, integer(environ, "SLURM_JOB_ID")
    hosts = environ.get("LSB_MCPU_HOSTS", "").split()  # host slots host slots ...
    # On machines with launch nodes the first entry is one, with a single slot: no rank runs there.
    launch_node = len(hosts) > 3 and hosts[1] == "1" and hosts[3] != "1"
    return hosts[2 if launch_node else 0] if hosts else None, integer(environ, "LSB_JOBID")


def mpirun_of(environ: Environ) -> tuple[str, int, int] | None:
    """The host where Open MPI's mpirun runs, and two numbers that identify it there; None if unknown.

    >>> mpirun_of({"PMIX_NAMESPACE": "prterun-gpu-node18-3854@1"})
    ('gpu-node18', 3854, 1)
    >>> mpirun_of({"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"})
    ('10.96.0.1', 23370, 0)
    """
    # Version 5: <tool>-<host>-<pid>@<job>. PMIX_SERVER_URI*, which also has a host, is no help: it is the address of
    # the daemon on each rank's own host, and a loopback address at that.
    prrte = re.fullmatch(r"[a-z]+-(.+)-(\d+)@(\d+)", environ.get("PMIX_NAMESPACE", ""))
    if prrte:
        return prrte[1], int(prrte[2]), int(prrte[3])
    # Up to version 4: <job family * 2**16>.0;tcp://<host>,<host>:<port>, or tcp6://[<host>,<host>]:<port>.
    orte = re.match(r"(\d+)\.\d+;.*?tcp(?:://([^,:;]+)|6://\[([^],]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return (orte[2] or orte[3], int(orte[1]) >> 16, 0) if orte else None


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("node[003-007,9],gpu1"), first_host("rack[2-3]n[01,4]-ib"), first_host("gpu1,node[1-2]")
    ('node003', 'rack2n01-ib', 'gpu1')
    """
    # A comma inside brackets belongs to the host; of each pair of brackets the first number counts.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's shorthand; empty if that is not understood.

    >>> tasks_per_node("2(x3),1"), tasks_per_node("")
    ([2, 2, 2, 1], [])
    """
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def show(environ: Environ, *names: str) -> str:
    """The variables and their values, for a message.

    >>> show({"RANK": "3"}, "RANK", "WORLD_SIZE")
    "RANK='3', WORLD_SIZE not set"
    """
    return ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} not set" for name in names)
