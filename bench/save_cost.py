"""What a checkpoint after every step costs a launched job: `save(..., background=True)` beside steps without.

    python bench/save_cost.py [--rounds 12] [--folder FOLDER]

Two ranks (`spmd run -n 2`) train the benches' encoder; all of parameters and optimizer state is written after every
step, and the last two checkpoints are kept. Rounds with and without take turns, in an order that changes. Prints the
median step of each, and the median over rounds of their ratio, with its quartiles; the same for whole rounds, which end
when their last checkpoint is on disk; and for the first rank's processor time, which depends least on what else the
machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from spmd import Mesh, data_parallel, functional, optimizer, save, spmd, value_and_grad

HERE = Path(__file__).parent
STEPS = 12  # in a round
RANKS = 2


def train(folder: Path, rounds: int) -> None:
    """One rank; the first prints."""
    sys.path.insert(0, str(HERE))
    from models import encoder

    mesh = Mesh({"data": -1})
    module, x, y = encoder()
    apply, params = functional(module)
    opt = optimizer(torch.optim.AdamW, lr=1e-4)
    state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        loss, grads = value_and_grad(lambda p, b: F.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    batch = {"x": x, "y": y}
    steps: dict[bool, list[float]] = {True: [], False: []}
    wholes: dict[bool, list[float]] = {True: [], False: []}
    busy: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * rounds + 2):
        saves = turn % 2 == (turn // 2) % 2
        times, saved = [], None
        mesh.run(lambda: None)
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            at = time.perf_counter()
            params, state, loss = step(params, state, batch)
            float(loss)
            if saves:
                saved = save(folder, {"params": params, "state": state}, keep=2, background=True)
            times.append(time.perf_counter() - at)
        if saved is not None:
            saved.result()
        if turn >= 2:
            steps[saves].append(statistics.median(times))
            wholes[saves].append((time.perf_counter() - began) / STEPS)
            busy[saves].append((time.process_time() - processor) / STEPS)
    if mesh.rank == 0:
        last = sorted(folder.glob("step-*"))[-1]
        what = f"encoder, {sum(file.stat().st_size for file in last.iterdir()) / 1e6:.0f} MB a checkpoint"
        print(f"{what:<30}{'without':>10}{'saving':>10}{'ratio':>26}")
        kinds = {"a step, ms": steps, "a round / its steps, ms": wholes, "processor time a step, ms": busy}
        for name, found in kinds.items():
            middle = [f"{1e3 * statistics.median(found[saves]):.1f}" for saves in (False, True)]
            pairs = zip(found[True], found[False], strict=True)
            low, ratio, high = statistics.quantiles([one / other for one, other in pairs], n=4)
            print(f"{name:<30}{middle[0]:>10}{middle[1]:>10}{f'{ratio:.3f} ({low:.3f} to {high:.3f})':>26}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.rounds)
        return
    folder = Path(tempfile.mkdtemp(prefix="save-cost-", dir=options.folder))
    try:
        stat = subprocess.run(["stat", "-fc", "%T", folder], capture_output=True, text=True, check=True)
        where = f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}"
        print(f"{where}, {RANKS} ranks, {stat.stdout.strip()}", flush=True)
        command = [sys.executable, "-m", "spmd", "run", "-n", str(RANKS), __file__, "--train", str(folder)]
        subprocess.run([*command, "--rounds", str(options.rounds)], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
