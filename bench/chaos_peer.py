"""What `chaos.py` measures, for torchrun: a rank of a DDP run is killed, and all begin again at the last checkpoint.

    python bench/chaos_peer.py [--kills 10] [--ranks 2]

The model, the batches and the number of ranks are those of `chaos.py`; after every step rank 0 saves parameters and
optimizer state with `torch.save` to memory (/dev/shm), which takes no disk. Prints the milliseconds from a kill to the
end of the next step, with `torchrun --max-restarts --monitor-interval 0.1`, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
without which ranks that are restarted find the addresses of those before them, and the job fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH = 520, 48


def train(folder: Path) -> None:
    """One rank of the run, for ever."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    layers = nn.Linear(16, 1200), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1200, 200), nn.ReLU(), nn.Linear(200, 4)
    model = DistributedDataParallel(nn.Sequential(*layers))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    done, saved = 0, folder / "checkpoint"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        done = state["done"]
    while True:
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(done))[:BATCH][rank::size]
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        opt.step()
        done += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "done": done}, folder / "new")
            os.replace(folder / "new", saved)
            (folder / "done.new").write_text(str(done))
            os.replace(folder / "done.new", folder / "done")


def seconds_to_train_again(kills: int, ranks: int, seed: int = 0) -> list[float]:
    """From each kill to the end of the next step."""
    draw, found = random.Random(seed), []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        options = ["--nproc-per-node", str(ranks), "--max-restarts", str(kills + 1), "--monitor-interval", "0.1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, "--train", name]
        environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            try:
                for _ in range(kills):
                    begun = _steps(folder)
                    while _steps(folder) < begun + 5:
                        _check(job)
                    time.sleep(draw.uniform(0.0, 0.05))
                    began = time.monotonic()
                    os.kill(int((folder / f"pid{draw.randrange(ranks)}").read_text()), signal.SIGKILL)
                    time.sleep(0.02)  # a step that was about to end has ended
                    before = _steps(folder)
                    while _steps(folder) == before:
                        _check(job)
                    found.append(time.monotonic() - began)
            finally:
                job.terminate()
    return found


def _check(job: subprocess.Popen) -> None:
    time.sleep(0.001)
    if job.poll() is not None:
        raise RuntimeError(f"the job has ended with {job.returncode}")


def _steps(folder: Path) -> int:
    done = folder / "done"
    return int(done.read_text()) if done.exists() else 0


def line(times: list[float], ranks: int) -> str:
    """A line to print under those of `chaos.py`."""
    times = sorted(times)
    middle, most = statistics.median(times), times[min(len(times) - 1, int(0.99 * len(times)))]
    what = f"torchrun --max-restarts, {ranks} ranks, kill one"
    return f"{what}: {len(times)} trials, median {1e3 * middle:.0f} ms, p99 {1e3 * most:.0f} ms (a checkpoint a step)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--train", type=Path)
    chosen = parser.parse_args()
    if chosen.train is not None:
        train(chosen.train)
    else:
        print(line(seconds_to_train_again(chosen.kills, chosen.ranks), chosen.ranks))
