"""A program of torch's, as it is; "spmd" stands where "gloo" stood.

torchrun --nproc-per-node 2 train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import spmd  # noqa: F401

dist.init_process_group("spmd")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def fit(model):
    x = torch.linspace(-1, 1, 512).view(64, 8)
    y = x.square().mean(1, keepdim=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        optimizer.step()
    return nn.functional.mse_loss(model(x), y).item()


ways = {"DDP": DistributedDataParallel(make_model()), "FSDP2": fully_shard(make_model(), mesh=mesh)}
for name, model in ways.items():
    loss = fit(model)
    if rank == 0:
        print(f"{name}: {loss:.4f}")
dist.destroy_process_group()
