"""Tensor parallelism by hand: a two-layer MLP whose hidden units are divided over the axis "model".

The first weight is cut by columns, the second by rows; one psum joins the partial results. Batch and hidden units
are divided at the same time, over a mesh of two axes. Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

import torch
import torch.nn.functional as F

from spmd import Mesh, P, psum, put, spmd, value_and_grad

mesh = Mesh({"data": 2, "model": 2})
torch.manual_seed(0)
x, y = torch.randn(8, 16), torch.randn(8, 4)
weights = {"up": torch.randn(16, 32) / 4, "down": torch.randn(32, 4) / 6}


def loss_fn(weights, x, y, axis=None):
    partial = F.gelu(x @ weights["up"]) @ weights["down"]
    return F.mse_loss(partial if axis is None else psum(partial, axis), y)


specs = {"up": P(None, "model"), "down": P("model", None)}


@spmd(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(P(), specs))
def step(weights, x, y):
    return value_and_grad(lambda weights: loss_fn(weights, x, y, "model"))(weights)


loss, gradient = step(put(weights, specs, mesh=mesh), x, y)
dense_loss, dense = value_and_grad(lambda weights: loss_fn(weights, x, y))(weights)
for name in weights:
    torch.testing.assert_close(gradient[name].full(), dense[name])
if mesh.rank in (None, 0):
    print(f"loss {float(loss):.6f}, dense {float(dense_loss):.6f}; gradients agree")
