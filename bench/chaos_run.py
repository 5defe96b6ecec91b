"""The training run that `chaos.py` disturbs: after every step a hash of its parameters, and the samples it took.

At five moments (`MOMENTS`) a step looks for a file that tells its rank to fail there. The rank removes the file, so
that the repeated call succeeds. Invariant: undisturbed, a run always has the same hashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, data_parallel, functional, optimizer, pmean, restore, save, spmd
from spmd import value_and_grad as grads_of

SAMPLES, BATCH = 520, 48
MOMENTS = ("forward", "backward", "before a reduction", "after a reduction", "optimizer")
CGROUP = Path("/sys/fs/cgroup/memory")  # of version 1


class Run:
    """A training run on a mesh, from its beginning.

    Args:
        folder: where a file says which fault is to happen on a rank.
    """

    def __init__(self, mesh: Mesh, shards: int | None, folder: Path):
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 16)
        data = {"x": x, "y": (x @ torch.randn(16, 4)).argmax(1), "id": torch.arange(SAMPLES)}
        # Values above and below the size that the ledger takes, and random numbers.
        layers = nn.Linear(16, 1200), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1200, 200), nn.ReLU(), nn.Linear(200, 4)
        apply, self.params = functional(nn.Sequential(*layers))
        opt = optimizer(torch.optim.AdamW, lr=1e-3)
        self.state, self.loss = opt.init(self.params), None
        self._loader = Loader(data, batch_size=BATCH, seed=0, mesh=mesh, shards=shards)
        come_to = functools.partial(strike_if_told, str(folder), mesh)

        def loss_of(params: Any, batch: Any) -> Any:
            come_to("forward")
            loss = F.cross_entropy(apply(params, batch["x"]), batch["y"])
            if loss.requires_grad:
                loss.register_hook(lambda slope: come_to("backward"))
            return loss

        @spmd(mesh=mesh)
        @data_parallel(shards=shards)
        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = grads_of(loss_of)(params, batch)
            come_to("before a reduction")
            ones = pmean(torch.ones(3), "data")
            come_to("after a reduction")
            grads = {name: grad * ones[0] for name, grad in grads.items()}
            come_to("optimizer")
            params, state = opt.step(params, grads, state)
            return params, state, loss

        self._step = step

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self, batch: Any, begins: Callable[[str], None]) -> tuple[str, list[int]]:
        """Do one step, which changes nothing if it raises; returns its hash, and its samples.

        Args:
            begins: called with the name of what begins.
        """
        begins("a step")
        params, state, loss = self._step(self.params, self.state, batch)
        if random.random() < 0.5:
            float(loss)  # like a program that waits for each step, or one that does not
        begins("values fetched")
        found = digest(params, loss), batch["id"].full().tolist()
        self.params, self.state, self.loss = params, state, loss
        return found

    def save(self, folder: Path, step: int, *, background: bool) -> Any:
        tree = {"params": self.params, "loss": self.loss}
        return save(folder, tree, step=step, keep=2, background=background)


def digest(params: dict[str, Any], loss: Any) -> str:
    found = hashlib.sha256(loss.full().numpy().tobytes())
    for name in sorted(params):
        found.update(params[name].full().numpy().tobytes())
    return found.hexdigest()


def digest_of_saved(folder: Path) -> str:
    """The hash that the last checkpoint's step had."""
    tree = restore(folder)
    found = hashlib.sha256(tree["loss"].numpy().tobytes())
    for name in sorted(tree["params"]):
        found.update(tree["params"][name].detach().numpy().tobytes())
    return found.hexdigest()


# -- on a rank ---------------------------------------------------------------------------------------------------------


def fault_file(folder: Path | str, moment: str, rank: int) -> Path:
    return Path(folder, f"{moment} {rank}")


def strike_if_told(folder: str, mesh: Mesh, moment: str) -> None:
    """On a rank that has come to a moment: do what a file says is to happen there."""
    path = f"{folder}/{moment} {mesh.rank}"
    if not os.path.exists(path):
        return
    what = Path(path).read_text()
    Path(folder, "struck").write_text(f"{time.monotonic()} {os.getpid()}")
    os.unlink(path)
    globals()[what]()


def killed() -> None:
    """Kill this process at once, or within the next milliseconds, whatever it does then."""
    if random.random() < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))  # SIGALRM ends a process


def segfault() -> None:
    ctypes.string_at(0)


def exit_of_the_process() -> None:
    os._exit(7)


def exit_of_python() -> None:
    sys.exit("chaos")


def lock_of_python_held_in_c() -> None:
    """A signal ends the sleep, and the next one begins."""
    while True:
        ctypes.PyDLL(None).sleep(1000)


def limit_of_memory() -> None:
    """What RLIMIT_AS leaves is too little for the next tensor."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        torch.ones(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def killed_for_memory() -> None:
    """Have the kernel kill this process: it gets a memory group of its own, of 64 MB."""
    group = CGROUP / f"spmd-chaos-{os.getppid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    torch.ones(1 << 28)


def no_groups_of_memory() -> str | None:
    """Why no process can have a limit of its own here, or None."""
    try:
        group = CGROUP / f"spmd-chaos-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        group.rmdir()
    except OSError as error:
        return f"groups of processes with a limit of memory cannot be made here: {error}"
    return None


def remove_groups() -> None:
    for group in CGROUP.glob("spmd-chaos-*"):
        with contextlib.suppress(OSError):
            group.rmdir()
