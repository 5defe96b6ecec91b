"""Launched mode: what each launcher sets, recorded; shells that look like ranks, halves of pairs, disagreements."""

from __future__ import annotations

import dataclasses
import doctest
import os
import pickle
import re

import launchers
import pytest
from jobs import KUBEFLOW, SALLOC

from spmd import MeshError
from spmd.mesh.launch import environments
from spmd.mesh.launch import meeting as _meeting
from spmd.mesh.launch.environments import ENVIRONMENTS, Environment, Launch, describe, detect
from spmd.mesh.launch.meeting import first_host, tasks_per_node, tcp

# Recorded environments, cut down to the launchers' variables.

EXPLICIT = {"SPMD_RANK": "1", "SPMD_SIZE": "4", "SPMD_LOCAL_RANK": "1", "SPMD_LOCAL_SIZE": "2"}

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node003",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
    "RANK": "5",
    "ROLE_NAME": "default",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "8",
}

OPENMPI_4 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "1531576321",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
    "OMPI_MCA_orte_local_daemon_uri": "1531576320.1;tcp://10.96.0.2:51123",
    "PMIX_NAMESPACE": "1531576321",
    "PMIX_RANK": "2",
}

OPENMPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_num_procs": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_HOSTNAME": "gpu-node18",
    "PMIX_NAMESPACE": "prterun-gpu-node18-3854@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "prterun-gpu-node18-3854@0.0;tcp4://127.0.0.1:52845",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
}

HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "node7",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

PALS = {
    "PALS_LOCAL_RANKID": "3",
    "PALS_RANKID": "7",
    "PMI_LOCAL_RANK": "3",
    "PMI_LOCAL_SIZE": "4",
    "PMI_RANK": "7",
    "PMI_SIZE": "8",
}

SBATCH = {**SALLOC, "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_TASK_PID": "26431"}

SRUN = {
    **SBATCH,
    "SLURM_GTIDS": "2,3",
    "SLURM_LAUNCH_NODE_IPADDR": "129.79.240.100",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[004-005]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
}

SRUN_PTY = {  # srun --pty bash
    "SLURM_JOB_ID": "24471977",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "39900",
    "SLURM_PTY_WIN_COL": "212",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "sh04-16n09",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}

INTERACTIVE_STEP = {**SRUN_PTY, "SLURM_STEP_ID": "4294967290"}  # salloc with LaunchParameters=use_interactive_step
INTERACTIVE_STEP.pop("SLURM_PTY_PORT")

JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "JSM_NAMESPACE_RANK": "8",
    "JSM_NAMESPACE_SIZE": "12",
    "LSB_JOBID": "231",
    "LSB_MCPU_HOSTS": "batch5 1 h36n11 42 h36n12 42",
}


@pytest.mark.parametrize("module", [environments, _meeting])
def test_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (EXPLICIT, Launch(1, 4, 1, 2, None, "spmd")),
        (TORCHRUN, Launch(5, 8, 1, 4, "env://", "torchrun")),
        (OPENMPI_4, Launch(2, 4, 0, 2, f"tcp://10.96.0.1:{61440 + 23370 % 4096}", "openmpi")),
        (OPENMPI_5, Launch(1, 2, 1, 2, f"tcp://127.0.0.1:{61440 + (3854 + 1021) % 4096}", "openmpi")),
        (HYDRA, Launch(1, 2, 1, 2, None, "pmi")),
        (PALS, Launch(7, 8, 3, 4, None, "pmi")),
        (SRUN, Launch(3, 5, 1, 3, f"tcp://node004:{61440 + (8652 + 2 * 1021) % 4096}", "slurm")),
        (JSRUN, Launch(8, 12, 2, 6, f"tcp://h36n11:{61440 + 231}", "lsf")),
        (KUBEFLOW, Launch(2, 3, 0, 1, "env://", "kubeflow")),
    ],
    ids=lambda value: value.source if isinstance(value, Launch) else "",
)
def test_recorded(environ, launch):
    assert detect(environ) == launch
    # Exactly one environment claims the process, and says so.
    rows = describe(environ)
    assert [name for name, found, _ in rows if found] == [launch.source]
    assert [name for name, _, _ in rows] == [each.name for each in ENVIRONMENTS]
    found = next(reason for _, found, reason in rows if found)
    assert found.startswith(f"rank {launch.rank} of {launch.size}") and (launch.init_method or "no place") in found
    assert all(reason for _, _, reason in rows)


@pytest.mark.parametrize(
    ("environ", "name", "why"),
    [
        ({}, "slurm", "SLURM_STEP_ID is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun", "LOCAL_RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "kubeflow", "KUBERNETES_SERVICE_HOST is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun", "LOCAL_RANK"),
        ({"LOCAL_RANK": "0"}, "torchrun", "RANK and WORLD_SIZE are not set"),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, "torchrun", "RANK and WORLD_SIZE are not set"),
        (SALLOC, "slurm", "start with srun"),
        (SBATCH, "slurm", "start with srun"),
        (SRUN_PTY, "slurm", "srun --pty"),
        ({**SRUN_PTY, "PMI_RANK": "0", "PMI_SIZE": "1"}, "pmi", "those of srun"),
        (INTERACTIVE_STEP, "slurm", "4294967290"),
        ({**SRUN, "SLURM_PROCID": ""}, "slurm", "SLURM_PROCID is not set"),
        ({**KUBEFLOW, "PET_NNODES": "3", "PET_NODE_RANK": "2"}, "kubeflow", "PET_NNODES is set"),
        ({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "host1 4"}, "lsf", "JSM_NAMESPACE_RANK"),
    ],
)
def test_not_a_launch(environ, name, why):
    assert detect(environ) is None
    rows = {row[0]: row[1:] for row in describe(environ)}
    assert not any(found for found, _ in rows.values())
    assert why in rows[name][1]


def test_the_order():
    everything = {**KUBEFLOW, **JSRUN, **SRUN, **HYDRA, **OPENMPI_5, **TORCHRUN, **EXPLICIT}
    for environ, source in (
        (EXPLICIT, "spmd"),
        (TORCHRUN, "torchrun"),
        (OPENMPI_5, "openmpi"),
        (HYDRA, "pmi"),
        (SRUN, "slurm"),
        (JSRUN, "lsf"),
    ):
        launch = detect(everything)
        assert launch is not None and launch.source == source
        everything = {name: value for name, value in everything.items() if name not in environ}
    # What comes later is not looked at: torchrun's rank may differ, or be broken.
    for rank in ("3", "broken"):
        launch = detect({**EXPLICIT, **TORCHRUN, "RANK": rank})
        assert launch is not None and (launch.source, launch.rank) == ("spmd", 1)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SPMD_RANK": "1"}, ["SPMD_RANK='1'", "SPMD_SIZE not set"]),
        ({"SPMD_SIZE": "2"}, ["SPMD_RANK not set", "SPMD_SIZE='2'"]),
        ({"SPMD_RANK": "2", "SPMD_SIZE": "2"}, ["SPMD_RANK='2'", "SPMD_SIZE='2'", "0 <= SPMD_RANK < SPMD_SIZE"]),
        ({"SPMD_RANK": "-1", "SPMD_SIZE": "2"}, ["SPMD_RANK='-1'"]),
        ({"SPMD_RANK": "one", "SPMD_SIZE": "2"}, ["SPMD_RANK='one'", "an integer"]),
        ({**EXPLICIT, "SPMD_INIT_METHOD": "node1:29500"}, ["SPMD_INIT_METHOD='node1:29500'", "tcp://host:port"]),
        ({**EXPLICIT, "SPMD_LOCAL_RANK": "2"}, ["SPMD_LOCAL_RANK='2'", "SPMD_LOCAL_SIZE='2'"]),
        ({**EXPLICIT, "SPMD_LOCAL_SIZE": "9"}, ["SPMD_LOCAL_SIZE='9'", "SPMD_SIZE='4'"]),
        ({**EXPLICIT, "SPMD_LOCAL_SIZE": "0"}, ["SPMD_LOCAL_SIZE='0'"]),
        ({"RANK": "0", "LOCAL_RANK": "0"}, ["torchrun", "RANK='0'", "WORLD_SIZE not set"]),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["RANK not set", "WORLD_SIZE='2'"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK='8'", "WORLD_SIZE='8'"]),
        ({**TORCHRUN, "WORLD_SIZE": "8.0"}, ["WORLD_SIZE='8.0'"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK='4'", "LOCAL_WORLD_SIZE='4'"]),
        ({**TORCHRUN, "MASTER_PORT": ""}, ["MASTER_ADDR='node003'", "MASTER_PORT=''", "set both or neither"]),
        ({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["openmpi", "OMPI_COMM_WORLD_SIZE not set"]),
        ({**OPENMPI_5, "OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_RANK='2'", "OMPI_COMM_WORLD_SIZE='2'"]),
        ({"PMI_RANK": "0"}, ["pmi", "PMI_SIZE not set"]),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, ["MPI_LOCALRANKID='2'", "MPI_LOCALNRANKS='2'"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, ["slurm", "SLURM_STEP_NUM_TASKS not set"]),
        ({**SRUN, "SLURM_PROCID": "5"}, ["SLURM_PROCID='5'", "SLURM_STEP_NUM_TASKS='5'"]),
        ({**SRUN, "SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID='x'"]),
        ({"JSM_NAMESPACE_SIZE": "2"}, ["lsf", "JSM_NAMESPACE_RANK not set"]),
        ({**KUBEFLOW, "RANK": "3"}, ["kubeflow", "RANK='3'", "WORLD_SIZE='3'"]),
    ],
)
def test_contradictions(environ, said):
    with pytest.raises(MeshError) as caught:
        detect(environ)
    text = str(caught.value)
    assert all(part in text for part in said), text
    assert "set" in text.rpartition("): ")[2]  # ends with what to do
    # A report on a broken environment is a report, not an error.
    assert any(not found and reason == text for _, found, reason in describe(environ))


# Where the ranks meet.


def test_what_the_user_says_comes_first():
    master = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for environ in (EXPLICIT, OPENMPI_4, OPENMPI_5, HYDRA, SRUN, JSRUN):
        launch = detect({**environ, **master})
        assert launch is not None and launch.init_method == "env://"
    for environ in (EXPLICIT, TORCHRUN, OPENMPI_4, HYDRA, SRUN, JSRUN, KUBEFLOW):
        launch = detect({**environ, "SPMD_INIT_METHOD": "file:///scratch/meet"})
        assert launch is not None and launch.init_method == "file:///scratch/meet"


def test_ranks_of_a_launch_compute_the_same_address():
    # The second host of an mpirun inside a Slurm job: its daemon was started as a step, whose variables leak through.
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n2"}
    for base in (OPENMPI_4, {**OPENMPI_5, "OMPI_COMM_WORLD_SIZE": "4"}, {**HYDRA, "PMI_SIZE": "4"}):
        first, second = detect({**base, **job}), detect({**base, **job, **step})
        assert first is not None and second is not None and first.init_method is not None
        assert first == second and first.init_method.startswith("tcp://n1:")


def test_steps_and_jobs_have_ports_of_their_own():
    assert len({tcp("h", 100, step) for step in range(4096)}) == 4096
    assert len({tcp("h", job) for job in range(4096)}) == 4096
    ports = [int(str(tcp("h", job, step)).rpartition(":")[2]) for job in (0, 10**9) for step in (0, 7, 10**6)]
    assert all(61440 <= port < 65536 for port in ports)


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}, "tcp://[fe80::b9b]:"),
        (
            {"OMPI_MCA_orte_hnp_uri": "3236233216.0;tcp://172.20.102.82:33559;tcp://172.40.1.8:33559"},
            "tcp://172.20.102.82:",
        ),
        ({"OMPI_MCA_orte_hnp_uri": "723386368.0;usock;tcp://192.168.0.103:56672"}, "tcp://192.168.0.103:"),
        ({"PMIX_NAMESPACE": "prte-login1-77@3"}, "tcp://login1:"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "tcp://127.0.0.1:"),
        ({"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "c[07-09]"}, "tcp://c07:"),
        ({"LSB_JOBID": "3", "LSB_MCPU_HOSTS": "grid03 4 grid05 4"}, "tcp://grid03:"),
        ({"OMPI_MCA_orte_hnp_uri": ""}, None),
    ],
)
def test_open_mpi_on_several_hosts(changes, address):
    launch = detect({**OPENMPI_4, **changes})
    assert launch is not None
    assert launch.init_method is None if address is None else str(launch.init_method).startswith(address)


def test_hydra_in_a_job():
    launch = detect({**HYDRA, "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "c[07-09]"})
    assert launch is not None and launch.init_method == "tcp://127.0.0.1:61443"
    launch = detect({**PALS, "LSB_JOBID": "3", "LSB_MCPU_HOSTS": "a 4 b 4"})
    assert launch is not None and launch.init_method == "tcp://a:61443"


# Slurm.


def test_srun_speaking_pmi_is_slurm():
    launch = detect({**SRUN, "PMI_FD": "6", "PMI_RANK": "3", "PMI_SIZE": "5"})
    assert launch is not None and launch.source == "slurm"


def test_hydra_started_by_srun_is_not_slurm():
    # mpiexec starts one proxy a node through srun; the step's rank is the proxy's.
    launch = detect({**SRUN, **HYDRA, "PMI_SIZE": "5", "PMI_RANK": "4"})
    assert launch is not None and (launch.source, launch.rank) == ("pmi", 4)


def test_a_step_of_one_task_is_a_rank_and_several_with_a_terminal_are():
    one = {name: value for name, value in SRUN_PTY.items() if "PTY" not in name}
    launch = detect(one)
    assert launch is not None and (launch.rank, launch.size, launch.local_size) == (0, 1, 1)
    several = {**SRUN_PTY, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    launch = detect(several)
    assert launch is not None and (launch.rank, launch.size, launch.local_size) == (0, 2, 2)


def test_srun_inside_an_interactive_shell_is_a_step():
    # The nested srun inherits the shell's variables and replaces those of the step.
    nested = {**SRUN_PTY, **SRUN, "SLURM_JOB_NAME": "interactive"}
    launch = detect(nested)
    assert launch is not None and (launch.source, launch.size) == ("slurm", 5)


def test_slurm_with_fewer_variables():
    old = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}
    assert detect(old) == Launch(1, 2, 1, None, None, "slurm")
    ip = detect({**old, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"})
    assert ip is not None and ip.init_method == "tcp://10.0.0.1:61441"
    strange = detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"})
    assert strange is not None and strange.local_size is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("node[003-007,9],gpu1", "node003"),
        ("gpu1,node[003-007,9]", "gpu1"),
        ("rack[2-3]node[01-04]", "rack2node01"),
        ("n[5]-ib.cluster.org,m1", "n5-ib.cluster.org"),
        ("10-0-3-12", "10-0-3-12"),
        ("sh04-16n[09,11]", "sh04-16n09"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_per_node():
    assert tasks_per_node("1(x2),4,3(x3)") == [1, 1, 4, 3, 3, 3]
    assert tasks_per_node("2,nonsense") == tasks_per_node("") == []


# The rest.


def test_local_rank_where_the_environment_is_silent():
    for environ, local in (
        ({"SPMD_RANK": "5", "SPMD_SIZE": "8"}, (5, None)),
        ({"SPMD_RANK": "5", "SPMD_SIZE": "8", "SPMD_LOCAL_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, None)),
    ):
        launch = detect(environ)
        assert launch is not None and (launch.local_rank, launch.local_size) == local


def test_a_launch_is_a_value():
    launch = detect(TORCHRUN)
    assert launch is not None
    assert pickle.loads(pickle.dumps(launch)) == launch and hash(launch) == hash(dataclasses.replace(launch))
    with pytest.raises(dataclasses.FrozenInstanceError):
        launch.rank = 0  # type: ignore[misc]


def test_the_process_environment_is_the_default(monkeypatch):
    for name in list(os.environ):
        if name in everything_set():
            monkeypatch.delenv(name)
    assert detect() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(TORCHRUN)
    assert describe() == describe({**os.environ})


def everything_set() -> set[str]:
    recorded = (EXPLICIT, TORCHRUN, OPENMPI_4, OPENMPI_5, HYDRA, PALS, SRUN, SRUN_PTY, JSRUN, KUBEFLOW)
    return {name for environ in recorded for name in environ} | {"SPMD_INIT_METHOD"}


def test_a_third_party_adds_its_own(monkeypatch):
    class Mine(Environment):
        name = "mine"
        names = ("MINE_RANK", "MINE_SIZE", "", "")

        @classmethod
        def absent(cls, environ):
            return "" if "MINE_RANK" in environ else "MINE_RANK is not set"

        @classmethod
        def meeting(cls, environ, launch):
            return "tcp://here:1"

    monkeypatch.setattr(environments, "ENVIRONMENTS", [*ENVIRONMENTS, Mine])
    assert detect({"MINE_RANK": "0", "MINE_SIZE": "2"}) == Launch(0, 2, 0, None, "tcp://here:1", "mine")
    assert describe({})[-1] == ("mine", False, "MINE_RANK is not set")


def test_the_table_names_every_environment() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", launchers.PAGE.read_text(), re.MULTILINE)
    assert rows == [each.name for each in ENVIRONMENTS]


def test_ranks_of_one_node_meet_on_loopback() -> None:
    slurm = detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"})
    lsf = detect({**JSRUN, "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_SIZE": "12"})
    for launch in (slurm, lsf):
        assert launch is not None and launch.init_method is not None
        assert launch.init_method.startswith("tcp://127.0.0.1:")
