"""A pipeline of two stages by ppermute: microbatches flow from rank to rank, and gradients flow back.

All ranks run the same program; at each tick a stage works on what came from the one before it, and hands its result
on. Source: Huang et al., GPipe (2019); the fill-and-drain schedule.
"""

import torch

from spmd import Mesh, P, axis_index, axis_size, grad, ppermute, psum, spmd

mesh = Mesh({"stage": 2})
torch.manual_seed(0)
microbatches = torch.randn(4, 3, 8, dtype=torch.float64)  # microbatch, sample, features
weights = torch.randn(2, 8, 8, dtype=torch.float64) / 3  # one matrix a stage


def pipeline(weight, microbatches):
    stage, stages, count = axis_index("stage"), axis_size("stage"), len(microbatches)
    arriving = torch.zeros_like(microbatches[0])
    loss = torch.zeros((), dtype=torch.float64)
    for tick in range(count + stages - 1):
        work = microbatches[min(tick, count - 1)] if stage == 0 else arriving
        done = torch.tanh(work @ weight)
        if stage == stages - 1 and tick >= stages - 1:
            loss = loss + done.square().sum()
        arriving = ppermute(done, "stage", [(rank, rank + 1) for rank in range(stages - 1)])
    return psum(loss, "stage")


@spmd(mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))
def gradient(weights, microbatches):
    return grad(lambda weights: pipeline(weights[0], microbatches))(weights)


def sequential(weights):
    return torch.tanh(torch.tanh(microbatches @ weights[0]) @ weights[1]).square().sum()


torch.testing.assert_close(gradient(weights, microbatches).full(), grad(sequential)(weights))
if mesh.rank in (None, 0):
    print("the pipeline's gradients agree with the sequential program's")
