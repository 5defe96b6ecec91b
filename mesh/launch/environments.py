"""Launched mode: find out from the environment variables whether something started this process as a rank, and which.

Launchers agree on little, and their variables leak: an interactive Slurm shell has a rank variable without being a
rank, and in a pod of Kubeflow RANK may count nodes. So each environment is one small class that says whether it is
present, and if not, why not. Invariant: a process is a rank only if one environment gives its rank *and* the number of
ranks; the first such in `ENVIRONMENTS` decides, and one that contradicts itself is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

from ...kernels.errors import MeshError
from .meeting import Environ, first_host, integer, job_of, mpirun_of, show, stated, tasks_per_node, tcp


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """What the environment says about this process.

    >>> detect({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    Launch(rank=3, size=8, local_rank=1, local_size=None, init_method='env://', source='torchrun')

    Args:
        rank: 0 to size - 1.
        size: number of ranks of the whole launch.
        local_rank: this rank's number on its host. If the environment does not say, ranks are assumed to fill one host
            after another: `rank % local_size`, or `rank` if that is unknown as well.
        local_size: number of ranks on this host, None if the environment does not say.
        init_method: where the ranks meet, as in `torch.distributed`: "env://" (MASTER_ADDR and MASTER_PORT),
            "tcp://host:port", "file:///path"; None if nothing says it. The host is that of rank 0.
        source: name of the environment.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    init_method: str | None
    source: str


class Environment:
    """One way of being launched. A third party adds its own by inserting a class into `ENVIRONMENTS`.

    Attributes:
        name: what `Launch.source` says.
        names: the variables that hold rank, size, local rank and local size; "" if there is none. Alternatives are
            separated by a blank, and the first that is set counts.
    """

    name: ClassVar[str]
    names: ClassVar[tuple[str, str, str, str]]

    @classmethod
    def absent(cls, environ: Environ) -> str:
        """Why this environment did not start the process; empty if it did, that is, if its rank or size is set."""
        rank, size = (name.partition(" ")[0] for name in cls.names[:2])
        # If only one of them is set, `_read` reports the contradiction.
        return "" if environ.get(rank) or environ.get(size) else f"{rank} and {size} are not set"

    @classmethod
    def present(cls, environ: Environ) -> bool:
        return not cls.absent(environ)

    @classmethod
    def launch(cls, environ: Environ) -> Launch:
        """Read the launch, if `present`; raises `MeshError` if variables contradict each other."""
        launch = _read(environ, cls.name, cls.names)
        return dataclasses.replace(launch, init_method=stated(environ) or cls.meeting(environ, launch))

    @classmethod
    def meeting(cls, environ: Environ, launch: Launch) -> str | None:
        """Where the ranks meet if the user does not say: the same on all of them, or None."""
        return None


class Explicit(Environment):
    """SPMD_RANK and SPMD_SIZE, set by hand or by a launcher of your own.

    >>> Explicit.launch({"SPMD_RANK": "1", "SPMD_SIZE": "2", "SPMD_INIT_METHOD": "file:///tmp/meet"}).init_method
    'file:///tmp/meet'
    """

    name = "spmd"
    names = ("SPMD_RANK", "SPMD_SIZE", "SPMD_LOCAL_RANK", "SPMD_LOCAL_SIZE")


class Torchrun(Environment):
    """torchrun and `spmd run`. RANK and WORLD_SIZE alone don't count: other tools set them to count nodes."""

    name = "torchrun"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    @classmethod
    def absent(cls, environ: Environ) -> str:
        return super().absent(environ) or _unset(environ, "LOCAL_RANK")


class OpenMpi(Environment):
    """mpirun of Open MPI.

    On one host the ranks meet at 127.0.0.1. On several they meet at the first host of the Slurm or LSF job; outside of
    a job at the host where mpirun runs, since rank 0 is there by default. If it is not (mpirun on a login node with
    --host), set SPMD_INIT_METHOD, or MASTER_ADDR and MASTER_PORT.
    """

    name = "openmpi"
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )

    @classmethod
    def meeting(cls, environ: Environ, launch: Launch) -> str | None:
        (first, job), mpirun = job_of(environ), mpirun_of(environ)
        host, *number = mpirun or (None, job)
        return tcp("127.0.0.1" if launch.local_size == launch.size else first or host, *number)


class Pmi(Environment):
    """mpiexec of MPICH, Intel MPI and MVAPICH (Hydra), and of Cray PALS: the PMI protocol's variables.

    Hydra's variables don't give its job or first host, so these come from the Slurm or LSF job, if there is one.
    """

    name = "pmi"
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE")

    @classmethod
    def absent(cls, environ: Environ) -> str:
        # srun sets these, too, if it speaks PMI itself; its own variables say more, and tell a shell from a rank.
        srun = environ.get("SLURM_STEP_ID") and environ.get("PMI_SIZE") == environ.get("SLURM_STEP_NUM_TASKS")
        if srun and environ.get("PMI_SIZE") and not environ.get("MPI_LOCALRANKID"):
            return "PMI_RANK and PMI_SIZE are those of srun"
        return super().absent(environ)

    @classmethod
    def meeting(cls, environ: Environ, launch: Launch) -> str | None:
        return _in_job(environ, launch)


class Slurm(Environment):
    """A task of a Slurm step: srun. The shell of salloc, the batch script and `srun --pty bash` are no ranks."""

    name = "slurm"
    # SLURM_NTASKS is what the job asked for, until srun overwrites it: second choice.
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", "")

    @classmethod
    def absent(cls, environ: Environ) -> str:
        if not environ.get("SLURM_STEP_ID"):
            job = bool(environ.get("SLURM_JOB_ID"))
            return "in a Slurm job, but in no step of it: start with srun" if job else "SLURM_STEP_ID is not set"
        step = integer(environ, "SLURM_STEP_ID")
        if step is not None and step > 0xFFFFFFF0:  # SLURM_MAX_NORMAL_STEP_ID: above are shell, batch script, extern
            return f"SLURM_STEP_ID={step} is an interactive shell or a batch script, not a step of srun"
        tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
        if environ.get("SLURM_PTY_PORT") and tasks == "1":
            return "a single task with a terminal (srun --pty) is an interactive shell"
        return _unset(environ, "SLURM_PROCID")

    @classmethod
    def launch(cls, environ: Environ) -> Launch:
        launch = super().launch(environ)
        tasks, node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")), integer(environ, "SLURM_NODEID")
        if node is None or node >= len(tasks):
            return launch
        return dataclasses.replace(launch, local_size=tasks[node])

    @classmethod
    def meeting(cls, environ: Environ, launch: Launch) -> str | None:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        # The last resort is the host where srun ran: in a batch script that is the first node, too.
        host = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR")
        if tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) == [launch.size]:
            host = "127.0.0.1"
        return tcp(host, integer(environ, "SLURM_JOB_ID"), integer(environ, "SLURM_STEP_ID") or 0)


class Lsf(Environment):
    """jsrun of IBM's Job Step Manager in an LSF job."""

    name = "lsf"
    names = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")

    @classmethod
    def meeting(cls, environ: Environ, launch: Launch) -> str | None:
        return _in_job(environ, launch)


class Kubeflow(Environment):
    """A pod of a Kubeflow PyTorchJob that runs Python directly: one rank a pod, alone on its host.

    Beware: the operator numbers *pods*, and calls that RANK. If it also sets PET_* variables, it expects torchrun in
    the pod, which reads them, starts several ranks, and gives each its own RANK; so with PET_* this is no rank.
    """

    name = "kubeflow"
    names = ("RANK", "WORLD_SIZE", "", "")

    @classmethod
    def absent(cls, environ: Environ) -> str:
        missing = _unset(environ, "KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing:
            return missing
        pet = sorted(name for name in environ if name.startswith("PET_"))
        return f"{pet[0]} is set, so RANK may count nodes: start with torchrun in the pod" if pet else ""

    @classmethod
    def launch(cls, environ: Environ) -> Launch:
        return dataclasses.replace(super().launch(environ), local_rank=0, local_size=1)


ENVIRONMENTS: list[type[Environment]] = [Explicit, Torchrun, OpenMpi, Pmi, Slurm, Lsf, Kubeflow]


def detect(environ: Environ = os.environ) -> Launch | None:
    """The launch that this process is a rank of; None if nothing launched it.

    >>> detect({"SPMD_RANK": "0", "SPMD_SIZE": "2", "PMI_RANK": "7", "PMI_SIZE": "8"}).source
    'spmd'
    >>> detect({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}) is None
    True

    Raises:
        MeshError: the first environment that is present contradicts itself; names its variables and their values.
    """
    return next((each.launch(environ) for each in ENVIRONMENTS if each.present(environ)), None)


def variables_of(source: str) -> list[str]:
    """The variables by which an environment makes a process a rank: without them it is none.

    >>> variables_of("torchrun"), variables_of("initialize")
    (['RANK', 'WORLD_SIZE'], [])
    """
    return [name for each in ENVIRONMENTS if each.name == source for name in " ".join(each.names[:2]).split()]


def describe(environ: Environ = os.environ) -> list[tuple[str, bool, str]]:
    """For every environment, in the order in which they are tried: its name, whether it is present, and why (not).

    >>> describe({"RANK": "3", "WORLD_SIZE": "8"})[1]
    ('torchrun', False, 'LOCAL_RANK is not set')
    """
    rows = []
    for each in ENVIRONMENTS:
        try:
            reason = each.absent(environ)
            found = not reason
            if found:
                launch = each.launch(environ)
                reason = f"rank {launch.rank} of {launch.size}, local rank {launch.local_rank}"
                reason += f" of {launch.local_size}" if launch.local_size else ""
                reason += f", meeting at {launch.init_method}" if launch.init_method else ", no place to meet is known"
        except MeshError as error:
            found, reason = False, str(error)
        rows.append((each.name, found, reason))
    return rows


def _unset(environ: Environ, *names: str) -> str:
    """Which of the variables is missing, as a reason; empty if all are there."""
    return next((f"{name} is not set" for name in names if not environ.get(name)), "")


def _in_job(environ: Environ, launch: Launch) -> str | None:
    """Where ranks meet whose launcher does not say: at the first host of their Slurm or LSF job."""
    host, job = job_of(environ)
    return tcp("127.0.0.1" if launch.local_size == launch.size else host, job)


def _read(environ: Environ, source: str, names: tuple[str, str, str, str]) -> Launch:
    """A launch from `Environment.names`, without a place to meet."""
    chosen = [next((each for each in name.split() if environ.get(each)), name.partition(" ")[0]) for name in names]
    rank_name, size_name, local_rank_name, local_size_name = chosen
    rank, size, local_rank, local_size = (integer(environ, name) for name in chosen)
    if rank is None or size is None or not 0 <= rank < size:
        expected = f"both set, and 0 <= {rank_name} < {size_name}"
        raise _contradiction(environ, source, expected, rank_name, size_name)
    if local_size is not None and not 1 <= local_size <= size:
        expected = f"1 <= {local_size_name} <= {size_name}"
        raise _contradiction(environ, source, expected, local_size_name, size_name)
    top, top_name = (size, size_name) if local_size is None else (local_size, local_size_name)
    if local_rank is not None and not 0 <= local_rank < top:
        expected = f"0 <= {local_rank_name} < {top_name}"
        raise _contradiction(environ, source, expected, local_rank_name, top_name)
    return Launch(rank, size, rank % top if local_rank is None else local_rank, local_size, None, source)


def _contradiction(environ: Environ, source: str, expected: str, *names: str) -> MeshError:
    return MeshError(
        f"the environment variables of {source} contradict each other",
        expected=expected,
        got=show(environ, *names),
        remedy="set them as the launcher would, or unset them; SPMD_RANK and SPMD_SIZE, where set, come first",
    )
