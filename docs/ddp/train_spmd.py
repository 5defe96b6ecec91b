"""A small regression: python train_spmd.py, or torchrun --nproc-per-node 2 train_spmd.py"""

import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

torch.manual_seed(0)
x, y = torch.randn(1000, 10), torch.randn(1000, 5)
model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))

mesh = Mesh({"data": -1})
apply, params = functional(model)
opt = optimizer(torch.optim.SGD, lr=0.1)
opt_state = opt.init(params)


def loss_fn(params, batch):
    inputs, targets = batch
    return F.mse_loss(apply(params, inputs), targets)


@spmd(mesh=mesh)
@data_parallel
def train_step(params, opt_state, batch):
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, opt_state = opt.step(params, grads, opt_state)
    return params, opt_state, loss


loader = Loader((x, y), batch_size=50, seed=0, order="torch", mesh=mesh)

for epoch in range(2):
    for batch in loader:
        params, opt_state, loss = train_step(params, opt_state, batch)
    if mesh.rank in (None, 0):
        print(f"epoch {epoch}  loss {float(loss):.4f}")

weights = {name: value.full() for name, value in params.items()}
if mesh.rank in (None, 0):
    torch.save(weights, "model.pt")
