"""Handwritten digits, data-parallel: the whole of a user's program.

SPMD_RANKS=4 python digits.py                four processes on this host (default: one per core)
torchrun --nproc-per-node 2 digits.py        the processes that the launcher started, here two
spmd run -n 4 digits.py                      the same, through the command line of the library
"""

import os
import socket
import time
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from digits_plot import draw
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

from spmd import Loader, Mesh, data_parallel, functional, optimizer, psum, spmd, value_and_grad

EPOCHS, BATCH_SIZE = 15, 64

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
test = torch.arange(len(x)) % 5 == 0

torch.manual_seed(0)
features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
model = nn.Sequential(features, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))

# As many ranks as were launched; without a launcher SPMD_RANKS says how many, or this host's cores.
mesh = Mesh({"data": -1})
lead = mesh.rank in (None, 0)
apply, params = functional(model)
opt = optimizer(torch.optim.AdamW, lr=4e-3)
opt_state = opt.init(params)


def loss_fn(params, batch):
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])


@spmd(mesh=mesh)
@data_parallel
def train_step(params, opt_state, batch):
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, opt_state = opt.step(params, grads, opt_state)
    return params, opt_state, loss


@spmd(mesh=mesh)
@data_parallel
def count_correct(params, batch):
    return psum((apply(params, batch["x"]).argmax(1) == batch["y"]).sum(), "data")


loader = Loader({"x": x[~test], "y": y[~test]}, BATCH_SIZE, seed=0, mesh=mesh)
losses: list[float] = []
start = time.perf_counter()
for epoch in range(EPOCHS):
    steps = []
    for batch in tqdm(loader, f"epoch {epoch + 1:2d}", leave=False, disable=not lead):
        params, opt_state, loss = train_step(params, opt_state, batch)
        steps.append(loss)
    losses += map(float, steps)
    if lead:
        print(f"epoch {epoch + 1:2d}  loss {fmean(losses[-len(steps) :])!r}")
seconds = time.perf_counter() - start

correct = count_correct(params, {"x": x[test], "y": y[test]}).item()
places = mesh.run(lambda: f"{mesh.coords()}  {socket.gethostname()}  pid {os.getpid()}  threads {mesh.threads}")
if lead:
    print(f"test accuracy {correct / int(test.sum()):.4f}  ({correct} of {int(test.sum())})")
    print(f"{EPOCHS * int((~test).sum()) / seconds:.0f} samples/s on {mesh.size} ranks")
    for rank, place in enumerate(places):
        print(f"rank {rank}  {place}")
    picture = Path(__file__).with_suffix(".png")
    draw(picture, losses, loader.sampler, mesh.size, digits.images[~test.numpy()])
    print(f"picture: {picture}")
