"""A program that `make types` checks against the installed library, with mypy's strictest rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmd import (
    Array,
    Loader,
    Mesh,
    P,
    data_parallel,
    fetch,
    functional,
    functional_with_buffers,
    optimizer,
    put,
    spmd,
    value_and_grad,
)

mesh = Mesh({"data": 2})
apply, params = functional(nn.Linear(3, 1))
opt = optimizer(torch.optim.AdamW, lr=1e-3)
opt_state = opt.init(params)


def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    out: Tensor = apply(params, batch)
    return out.square().mean()


@spmd(mesh=mesh)
@data_parallel
def train_step(params: dict[str, Tensor], opt_state: dict[str, Any], batch: Tensor) -> tuple[Any, Any, Tensor]:
    loss, grads = value_and_grad(loss_fn)(params, batch)
    params, opt_state = opt.step(params, grads, opt_state)
    return params, opt_state, loss


@spmd
@data_parallel(batch="rows")
def mean(rows: Tensor) -> Tensor:
    return rows.mean()


@data_parallel
def within(batch: Tensor) -> Tensor:
    return batch.sum()


def whole(x: Tensor) -> Tensor:
    return within(x)


loader = Loader(torch.randn(8, 3), batch_size=4, mesh=mesh)
for batch in loader:
    params, opt_state, loss = train_step(params, opt_state, batch)
    print(f"{float(loss):.3f}")

x: Array = put(torch.ones(4, 2), P("data"), mesh=mesh)
centred: Array = (1 + x - x.mean(0)) / 2
flags: Array = -x > x[0] @ torch.ones(2)
rows: Tensor = mean(x).full()

trained: nn.Module = apply.to_module(fetch(params))
params = apply.params(torch.load("weights.pt"))
apply_norm, params, buffers = functional_with_buffers(nn.BatchNorm1d(3), sync=True)
saved: dict[str, Any] = apply_norm.state_dict(params, buffers)

# Names that are not there are errors; without one, each of these comments would be.
print(mesh.shape)  # type: ignore[attr-defined]
print(apply.parameters)  # type: ignore[attr-defined]
print(apply_norm.train)  # type: ignore[attr-defined]
print(loader.num_workers)  # type: ignore[attr-defined]
