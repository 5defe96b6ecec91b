"""An asynchronous parameter server: ranks read weights and send gradients, each at its own speed, and never wait.

A gradient may be of weights that others have changed since (it is *stale*); with a small enough step the weights come
to the same place as those of plain gradient descent. Source: Dean et al., Large Scale Distributed Deep Networks (2012).
"""

import torch

from spmd import Mesh


class Server:
    def __init__(self, size, rate):
        self.weight, self.rate, self.version, self.staleness = torch.zeros(size, dtype=torch.float64), rate, 0, []

    def read(self):
        return self.version, self.weight

    def write(self, version, gradient):
        self.staleness.append(self.version - version)
        self.weight -= self.rate * gradient
        self.version += 1

    def report(self):
        return self.version, max(self.staleness)


mesh = Mesh({"data": 3})
torch.manual_seed(0)
x = torch.randn(90, 4, dtype=torch.float64)
truth = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
y = x @ truth
server = mesh.remote(Server, 4, 0.02, rank=0)


def work(x, y, steps):
    """On each rank: gradients of its own samples; the server, on rank 0, answers while rank 0 computes as well."""
    mine_x, mine_y = x[mesh.rank :: mesh.size], y[mesh.rank :: mesh.size]
    for _ in range(steps):
        version, weight = server.read().get()
        error = mine_x @ weight - mine_y
        server.write(version, 2 * mine_x.T @ error / len(mine_y))
    server.read().get()  # this rank's writes are done


mesh.run(work, x, y, 250)
version, weight = server.read().get()
writes, stalest = server.report().get()
assert version == writes == 250 * mesh.size
torch.testing.assert_close(weight, truth, rtol=0, atol=1e-3)
print(f"{writes} gradients, the stalest of {stalest} versions before: the weights agree with the truth")
mesh.close()
