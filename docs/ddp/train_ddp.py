"""A small regression with DistributedDataParallel: torchrun --nproc-per-node 2 train_ddp.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(1000, 10), torch.randn(1000, 5)
model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=50 // size, sampler=sampler)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch}  loss {mean.item() / size:.4f}")

if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
