"""One training script, as users write it, for every way of starting it; and its losses in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Sampler

LENGTH, BATCH_SIZE, EPOCHS = 90, 32, 2  # the last batch of an epoch has 26 samples

DATA = f"""
torch.manual_seed(0)
x = torch.randn({LENGTH}, 6)
y = (x @ torch.randn(6, 3)).argmax(1)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
"""
SCRIPT = f"""
import torch
import torch.nn.functional as F
from torch import nn
from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad
{DATA}
mesh = Mesh({{"data": -1}})
apply, params = functional(model)
opt = optimizer(torch.optim.AdamW, lr=1e-2)
opt_state = opt.init(params)

def loss_fn(params, batch):
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])

@spmd(mesh=mesh)
@data_parallel
def train_step(params, opt_state, batch):
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, opt_state = opt.step(params, grads, opt_state)
    return params, opt_state, loss

losses = []
loader = Loader({{"x": x, "y": y}}, batch_size={BATCH_SIZE}, seed=0, mesh=mesh)
for epoch in range({EPOCHS}):
    for batch in loader:
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(float(loss))

if mesh.rank in (None, 0):
    print("losses", *map(repr, losses))
"""


def sequential() -> list[float]:
    """The same program in plain torch, on one device with the whole batch."""
    names: dict = {"torch": torch, "nn": nn}
    exec(DATA, names)
    x, y, model = names["x"], names["y"], names["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = Sampler(LENGTH, BATCH_SIZE, seed=0)
    losses = []
    for epoch in range(EPOCHS):
        for step in range(len(sampler)):
            ids = sampler.batch(epoch, step)
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
