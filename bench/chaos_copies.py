"""A host and all its ranks are killed at random moments of a run on `Mesh(copies=1)`; no bit of the run may change.

    python bench/chaos_copies.py [--kills 20] [--seed 0]    # or chaos.py --hosts

Two hosts of two ranks on this machine (`hosts="local:2x2"`) train with dropout, and with optimizer state that is cut
over all ranks, so that half of it is lost with a host. Either host dies, all its processes at one moment, at least two
steps after a run began: in a step, while values are copied, or fetched. The oracle is a hash of the parameters after
every step and of the samples it took. Prints the seconds until the next step is over.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

STEPS = 12  # of a run
SIZE = {"hosts": "local:2x2", "timeout": 120}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_host(mesh: Mesh, host: int) -> None:
    """Kill the processes of a host as if it were switched off."""
    ranks = [row.pid for row in mesh.status()][2 * host : 2 * host + 2]
    pids = [_parent(_parent(ranks[0])), *ranks]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def run(mesh: Mesh, draw: random.Random | None) -> tuple[list[str], float]:
    """The hashes of a run's steps, and, if a host dies in it, the seconds from then to the end of the next step."""
    torch.manual_seed(0)
    x = torch.randn(400, 16)
    data = {"x": x, "y": (x @ torch.randn(16, 4)).argmax(1), "id": torch.arange(400)}
    apply, params = functional(nn.Sequential(nn.Linear(16, 1200), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1200, 4)))
    opt = optimizer(torch.optim.AdamW, lr=1e-3, shard="data")
    state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p, b: F.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        return *opt.step(params, grads, state), loss

    at = STEPS if draw is None else draw.randrange(2, STEPS - 2)
    hashes: list[str] = []
    began = seconds = 0.0
    timer = None
    for batch in Loader(data, 32, seed=1, mesh=mesh):
        if len(hashes) == at and draw is not None:
            timer = threading.Timer(draw.uniform(0.0, 0.2), kill_host, (mesh, draw.randrange(2)))
            timer.start()
            began = time.perf_counter()
        params, state, loss = step(params, state, batch)
        found = hashlib.sha256(loss.full().numpy().tobytes() + batch["id"].full().numpy().tobytes())
        for name in sorted(params):
            found.update(params[name].full().numpy().tobytes())
        hashes.append(found.hexdigest())
        if timer is not None and not timer.is_alive() and not seconds:
            seconds = time.perf_counter() - began
        if len(hashes) == STEPS:
            break
    if timer is not None:
        timer.join()
    return hashes, seconds


def report(kills: int = 20, seed: int = 0) -> int:
    """Print the results; returns how many runs differed from the undisturbed one, or failed."""
    draw, wrong, errors, times = random.Random(seed), 0, 0, []
    with Mesh({"data": 4}, **SIZE) as mesh:
        expected, _ = run(mesh, None)
    with Mesh({"data": 4}, copies=1, **SIZE) as mesh:
        for _ in range(kills):
            try:
                hashes, seconds = run(mesh, draw)
            except Exception as error:
                errors += 1
                print(f"{type(error).__name__}: {error}", flush=True)
                continue
            wrong += hashes != expected
            times.append(seconds)
    middle = f"median {statistics.median(times):.1f} s, most {max(times):.1f} s" if times else "none went on"
    print(f"Mesh(copies=1), a host killed {kills} times: {wrong} wrong hashes, {errors} errors; next step: {middle}")
    return wrong + errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    raise SystemExit(bool(report(chosen.kills, chosen.seed)))
