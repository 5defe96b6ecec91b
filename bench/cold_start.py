"""What a program waits for before its second step: imports, a mesh, the first step; medians of several processes.

python bench/cold_start.py [ranks] [repeats]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

_PROGRAM = """
import json, sys, time
seconds, began = {}, time.perf_counter()

def passed(name):
    global began
    now = time.perf_counter()
    seconds[name], began = now - began, now

import torch
import torch.nn.functional as F
passed("import torch")
import spmd as _
passed("import spmd")
from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad
passed("what a step is written with")
mesh = Mesh({"data": int(sys.argv[1])})
passed("Mesh()")
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
x, y = torch.randn(1024, 20), torch.randint(5, (1024,))
apply, params = functional(model)
opt = optimizer(torch.optim.AdamW, lr=1e-3)
state = opt.init(params)

def loss_fn(params, batch):
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])

@spmd(mesh=mesh)
@data_parallel
def step(params, state, batch):
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, state = opt.step(params, grads, state)
    return params, state, loss

for name, batch in zip(("first step", "second step", "third step"), Loader({"x": x, "y": y}, 256, mesh=mesh)):
    params, state, loss = step(params, state, batch)
    float(loss)
    passed(name)
print(json.dumps(seconds))
"""


def main(ranks: int = 2, repeats: int = 5) -> None:
    rows: dict[str, list[float]] = {}
    command = [str(Path(sys.executable).parent / "spmd"), "--help"]
    for _ in range(repeats):
        program = [sys.executable, "-c", _PROGRAM, str(ranks)]
        output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
        for name, seconds in json.loads(output.splitlines()[-1]).items():
            rows.setdefault(name, []).append(seconds)
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        rows.setdefault("spmd --help", []).append(time.perf_counter() - began)
    torch = statistics.median(rows["import torch"])
    print(f"{ranks} ranks, {repeats} processes: seconds (least to most), and in import torch's")
    for name, found in rows.items():
        median = statistics.median(found)
        print(f"  {name:28} {median:6.3f} ({min(found):.3f} to {max(found):.3f}) {median / torch:5.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
