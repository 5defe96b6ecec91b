"""From the kill of a launched rank to the end of the next step: `spmd run --max-restarts` beside torchrun.

    python bench/restarts.py [--kills 10] [--ranks 2] [--folder FOLDER]

Both train the model of `chaos.py` on batches of the same size and make a checkpoint after every step: one with `save`
in the background and `restore`, the other with DistributedDataParallel and `torch.distributed.checkpoint`. A random
rank is killed at a random moment; the launchers look at their ranks every 0.1 s, and start all of them again, which
import torch and resume from the last checkpoint. The jobs take turns, kill by kill, and the other one is stopped
meanwhile. Prints the milliseconds from each kill to the end of the next step, most of which are imports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES, BATCH = 520, 48
LIMIT = 120.0  # seconds without a step after which a job counts as hung


def data() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    layers = nn.Linear(16, 1200), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1200, 200), nn.ReLU(), nn.Linear(200, 4)
    return nn.Sequential(*layers), {"x": x, "y": (x @ torch.randn(16, 4)).argmax(1)}


def note(folder: Path, name: str, text: object) -> None:
    (folder / f"{name}.new").write_text(str(text))
    os.replace(folder / f"{name}.new", folder / name)


def with_spmd(folder: Path) -> None:
    """One rank, for ever."""
    from spmd import Loader, Mesh, data_parallel, functional, optimizer, restore, save, spmd, value_and_grad

    mesh, (module, samples) = Mesh({"data": -1}), data()
    note(folder, f"pid{mesh.rank}", os.getpid())
    apply, params = functional(module)
    opt = optimizer(torch.optim.AdamW, lr=1e-3)
    loader = Loader(samples, BATCH, mesh=mesh)
    state: dict[str, Any] = {"params": params, "state": opt.init(params), "loader": loader, "done": 0}
    if any(mesh.run(lambda: bool([*folder.glob("run/step-*/checkpoint.json")]))):
        state = restore(folder / "run", like=state, mesh=mesh)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p, b: nn.functional.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        return *opt.step(params, grads, state), loss

    while True:
        for batch in loader:
            params, opt_state, loss = step(state["params"], state["state"], batch)
            float(loss)
            state = {"params": params, "state": opt_state, "loader": loader, "done": state["done"] + 1}
            if mesh.rank == 0:
                note(folder, "done", f"{state['done']} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
            save(folder / "run", state, keep=2, background=True)


def with_torch(folder: Path) -> None:
    """One rank, for ever."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    note(folder, f"pid{rank}", os.getpid())
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    module, samples = data()
    model = DistributedDataParallel(module)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    done = 0
    if (folder / "last").exists():
        done = int((folder / "last").read_text())
        params, state = get_state_dict(model, opt)
        whole = {"model": params, "opt": state}
        checkpoint.load(whole, checkpoint_id=str(folder / f"step-{done}"))
        set_state_dict(model, opt, model_state_dict=whole["model"], optim_state_dict=whole["opt"])
    while True:
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(done))[:BATCH][rank::size]
        opt.zero_grad()
        nn.functional.cross_entropy(model(samples["x"][ids]), samples["y"][ids]).backward()
        opt.step()
        done += 1
        if rank == 0:
            note(folder, "done", f"{done} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        params, state = get_state_dict(model, opt)
        checkpoint.save({"model": params, "opt": state}, checkpoint_id=str(folder / f"step-{done}"))
        if rank == 0:
            note(folder, "last", done)
            shutil.rmtree(folder / f"step-{done - 2}", ignore_errors=True)


KINDS = {"spmd run, save in the background": with_spmd, "torchrun, torch.distributed.checkpoint": with_torch}


class Job:
    """One of the two jobs, in a session of its own: `killed` measures how long a kill stops it."""

    def __init__(self, name: str, folder: Path, ranks: int, kills: int):
        folder.mkdir()
        self._folder, self._ranks = folder, ranks
        launcher = ["spmd", "run"] if KINDS[name] is with_spmd else ["torch.distributed.run"]
        options = ["--nproc-per-node", str(ranks), "--max-restarts", str(kills + 1), "--monitor-interval", "0.1"]
        command = [sys.executable, "-m", *launcher, *options, __file__, "--train", name, "--folder", str(folder)]
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarted ranks find old addresses
        self._log = (folder / "log").open("w+")
        self._job = subprocess.Popen(
            command, env=environ, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.train(3)

    def _done(self) -> tuple[int, int]:
        """The last step that is over, and the number of the restart in which it was."""
        with contextlib.suppress(FileNotFoundError):
            step, restart = (self._folder / "done").read_text().split()
            return int(step), int(restart)
        return 0, 0

    def _until(self, condition: Any) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            time.sleep(0.002)
            if self._job.poll() is not None or time.monotonic() > end:
                self._log.seek(0)
                raise RuntimeError(f"the job has ended, or hangs:\n{self._log.read()[-3000:]}")

    def train(self, steps: int) -> None:
        begun, _ = self._done()
        self._until(lambda: self._done()[0] >= begun + steps)

    def killed(self, draw: random.Random) -> float:
        self.train(5)
        time.sleep(draw.uniform(0.0, 0.05))
        (_, restart), began = self._done(), time.monotonic()
        os.kill(int((self._folder / f"pid{draw.randrange(self._ranks)}").read_text()), signal.SIGKILL)
        self._until(lambda: self._done()[1] > restart)
        return time.monotonic() - began

    def signal(self, number: int) -> None:
        """Send a signal to the launcher and to its ranks, each of which leads a session."""
        pids = [int((self._folder / f"pid{rank}").read_text()) for rank in range(self._ranks)]
        for pid in (self._job.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self._job.terminate()
        self._job.wait()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--train", choices=KINDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        KINDS[chosen.train](chosen.folder)
        return
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}, {chosen.ranks} ranks", flush=True)
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as top, contextlib.ExitStack() as ending:
        jobs = {}
        for number, name in enumerate(KINDS):
            jobs[name] = Job(name, Path(top) / str(number), chosen.ranks, chosen.kills)
            ending.callback(jobs[name].end)
            jobs[name].signal(signal.SIGSTOP)
        draw = random.Random(0)
        for _ in range(chosen.kills):
            for name, job in jobs.items():
                job.signal(signal.SIGCONT)
                times[name].append(job.killed(draw))
                job.signal(signal.SIGSTOP)
    print(f"{'kill to the next finished step, ms':<42}{'median':>8}{'least':>8}{'most':>8}")
    for name, found in times.items():
        print(
            f"{name:<42}" + "".join(f"{1e3 * one:>8.0f}" for one in (statistics.median(found), min(found), max(found)))
        )
    ours, theirs = times.values()
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    print(f"ratio of each pair, median (quartiles): {statistics.median(ratios):.2f}", end=" ")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"({low:.2f} to {high:.2f}), {chosen.kills} kills each")


if __name__ == "__main__":
    main()
