"""A pipeline of remote stages: what a stage computes goes straight to the rank of the next one.

The program holds `Ref`s only, of which none is fetched until the end; all stages work at once, each on another
microbatch. (It has no derivative: pipelines to train through are written with `ppermute`, as in pipeline.py.)
"""

import os

import torch

from spmd import Mesh


class Stage:
    def __init__(self, weight):
        self.weight, self.done = weight, 0

    def forward(self, x):
        self.done += 1
        return torch.tanh(x @ self.weight)

    def where(self):
        return os.getpid(), self.done


mesh = Mesh({"stage": 3})
torch.manual_seed(0)
weights = torch.randn(3, 256, 256, dtype=torch.float64) / 16
microbatches = torch.randn(8, 64, 256, dtype=torch.float64)  # activations of 128 KiB
stages = [mesh.remote(Stage, weight, rank=rank) for rank, weight in enumerate(weights)]

results = []
for batch in microbatches:
    flowing = batch
    for stage in stages:
        flowing = stage.forward(flowing)  # a Ref: the next stage gets it from this one's rank
    results.append(flowing)

expected = microbatches
for weight in weights:
    expected = torch.tanh(expected @ weight)
torch.testing.assert_close(torch.stack([ref.get() for ref in results]), expected)
places = [stage.where().get() for stage in stages]
assert len({pid for pid, _ in places} | {os.getpid()}) == 4 and [done for _, done in places] == [8, 8, 8]
print("what came out of the last stage and the sequential program's results agree")
mesh.close()
