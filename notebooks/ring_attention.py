"""Ring attention: a sequence divided over ranks, keys and values going round.

Each rank keeps its queries and meets one block of keys and values at a time, sent on by ppermute, with a running
softmax; no rank ever holds the whole sequence. Source: Liu, Zaharia, Abbeel, Ring Attention (2023).
"""

import torch
import torch.nn.functional as F

from spmd import Mesh, P, axis_size, grad, ppermute, psum, spmd

mesh = Mesh({"seq": 4})
torch.manual_seed(0)
q, k, v = torch.randn(3, 32, 8, dtype=torch.float64).unbind(0)  # sequence, features


def ring_attention(q, k, v):
    n = axis_size("seq")
    onward = [(rank, (rank + 1) % n) for rank in range(n)]
    top = torch.full((len(q), 1), -torch.inf, dtype=q.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for _ in range(n):
        scores = q @ k.T / q.shape[1] ** 0.5
        new_top = torch.maximum(top, scores.amax(1, keepdim=True))
        scale, weights = (top - new_top).exp(), (scores - new_top).exp()
        total, out = total * scale + weights.sum(1, keepdim=True), out * scale + weights @ v
        top = new_top
        k, v = ppermute((k, v), "seq", onward)
    return out / total


@spmd(mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
def attend(q, k, v):
    return ring_attention(q, k, v)


@spmd(mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
def gradients(q, k, v):
    return grad(lambda q, k, v: psum(ring_attention(q, k, v).square().sum(), "seq"), argnums=(0, 1, 2))(q, k, v)


def dense(q, k, v):
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


torch.testing.assert_close(attend(q, k, v).full(), dense(q, k, v))
expected = grad(lambda q, k, v: dense(q, k, v).square().sum(), argnums=(0, 1, 2))(q, k, v)
for mine, theirs in zip(gradients(q, k, v), expected, strict=True):
    torch.testing.assert_close(mine.full(), theirs)
if mesh.rank in (None, 0):
    print("ring attention and its gradients agree with dense attention")
