"""Some steps of a real model, by plain torch on the whole batch and by a mesh, to be compared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import IN_FLOAT32, batch, loss
from torch import Tensor, nn

from spmd import Loader, Mesh, data_parallel, functional, spmd, value_and_grad

SAMPLES, STEPS = 7, 3


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of it: the loss of every step, the parameters, and what is left in the optimizer's state."""

    losses: list[float]
    params: dict[str, Tensor]
    state: Any = None


def autocast(wanted: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if wanted else contextlib.nullcontext()


def by_torch(
    name: str,
    module: nn.Module,
    opt: torch.optim.Optimizer,
    *,
    casting: bool = False,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> Run:
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        with autocast(casting):
            value = loss(name, module, batch(name, SAMPLES, step))
        value.backward()
        before_step()
        opt.step()
        after_step()
        losses.append(value.item())
    return Run(losses, {key: value.detach() for key, value in module.named_parameters()})


def whole_batches(name: str) -> Iterable[Any]:
    return (batch(name, SAMPLES, step) for step in range(STEPS))


def dealt_batches(name: str, mesh: Mesh, shards: int | None) -> Iterable[Any]:
    """The same samples from a `Loader`, by whose epoch and step random numbers go, whatever the mesh did before."""
    parts = [batch(name, SAMPLES, step) for step in range(STEPS)]
    data = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return Loader(data, SAMPLES, shuffle=False, mesh=mesh, shards=shards)


def by_mesh(
    name: str,
    module: nn.Module,
    opt: Any,
    mesh: Mesh,
    *,
    batches: Iterable[Any] | None = None,
    shards: int | None = None,
    casting: bool = False,
) -> Run:
    apply, params = functional(module)
    state = opt.init(params)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return loss(name, lambda *args, **kwargs: apply(params, *args, **kwargs), batch)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(loss_fn)(params, batch)
        params, state = opt.step(params, gradients, state)
        return params, state, value

    losses = []
    for part in whole_batches(name) if batches is None else batches:
        with autocast(casting):
            params, state, value = train_step(params, state, part)
        losses.append(value.item())
    return Run(losses, {key: value.full() for key, value in params.items()}, state)


def assert_same(name: str, found: Run, expected: Run, *, near: dict[str, float] | None = None) -> None:
    """To rounding, unless `near` says otherwise."""
    small = 1e-5 if name in IN_FLOAT32 else 1e-9
    near = near or {"rtol": small, "atol": small}
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), **near)
    assert found.params.keys() == expected.params.keys()
    for key, value in found.params.items():
        torch.testing.assert_close(value, expected.params[key], **near, msg=lambda text, key=key: f"{key}: {text}")
