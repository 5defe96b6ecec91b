"""Gradients of large weights with few samples, exchanged as factors: that they are right, and where it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd import Mesh, P, count_collectives, data_parallel, grad, mean_of, spmd, value_and_grad

WIDTH = 1500  # of weights that are large enough
WHOLE = 4 * WIDTH * WIDTH  # bytes


def leaves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (WIDTH, WIDTH), "a": (WIDTH,), "second": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator) / 40 for name, shape in shapes.items()}


def rows(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_fn(p: dict[str, Tensor], batch: Tensor) -> Tensor:
    return F.linear(F.linear(batch, p["first"], p["a"]).tanh(), p["second"], p["b"]).square().mean()


def weighted(p: dict[str, Tensor], batch: Tensor) -> Any:
    """A weighted mean, in which ranks with as many samples have different weights."""
    each = F.linear(F.linear(batch, p["first"], p["a"]).tanh(), p["second"], p["b"]).square().mean(1)
    counts = 1 + (batch[:, 0] > 0).to(each.dtype)
    return mean_of((each * counts).sum(), counts.sum())


def step_of(mesh: Mesh, loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return spmd(data_parallel(lambda p, batch: value_and_grad(loss)(p, batch), **options), mesh=mesh)


def full(tree: Any) -> dict[str, Tensor]:
    return {name: leaf.full() for name, leaf in tree.items()}


@pytest.mark.parametrize(
    ("size", "samples", "loss"),
    [
        *((2, samples, loss) for samples in (1, 3, 8, 13) for loss in (loss_fn, weighted)),
        *((3, samples, loss_fn) for samples in (1, 3, 8, 13)),
        *((3, samples, weighted) for samples in (1, 13)),
        *(pytest.param(3, samples, weighted, marks=pytest.mark.long) for samples in (3, 8)),
    ],
)
def test_as_on_one_rank(shared_mesh: Callable[..., Mesh], size: int, samples: int, loss: Callable[..., Any]) -> None:
    step, x = step_of(shared_mesh({"data": size}), loss), rows(samples)
    wanted_value, wanted = value_and_grad(loss)(leaves(), x)
    before = None
    for _ in range(2):
        value, found = step(leaves(), x)
        torch.testing.assert_close(value.full(), wanted_value)
        torch.testing.assert_close(full(found), wanted)
        assert before is None or all(torch.equal(before[name], leaf) for name, leaf in full(found).items())
        before = full(found)


def communicated(mesh: Mesh, samples: int, **options: Any) -> Any:
    step = step_of(mesh, loss_fn, **options)
    step(leaves(), rows(samples))
    with count_collectives() as counts:
        step(leaves(), rows(samples))
    return counts


def test_where_samples_are_few(shared_mesh: Callable[..., Mesh]) -> None:
    mesh = shared_mesh({"data": 2})
    assert communicated(mesh, 8).bytes < WHOLE / 10  # on one rank: four rows of both factors of both weights
    assert communicated(mesh, 8).operations == {"all_reduce": 3}
    assert communicated(mesh, 400).bytes > 2 * WHOLE
    assert communicated(mesh, 8, wire_dtype=torch.bfloat16).bytes >= WHOLE  # half of both
    assert communicated(mesh, 8, shards=4).bytes >= 2 * WHOLE


def test_layers_with_more_rows_than_samples(shared_mesh: Callable[..., Mesh]) -> None:
    """What is announced by the samples may have too many rows after all; where all have, it is as it was."""
    mesh = shared_mesh({"data": 2})

    def repeated(p: dict[str, Tensor], batch: Tensor) -> Tensor:
        return loss_fn(p, batch.unsqueeze(1).expand(-1, 100, -1))

    step = step_of(mesh, repeated)
    wanted = value_and_grad(repeated)(leaves(), rows(8))[1]
    with count_collectives() as counts:
        found = step(leaves(), rows(8))[1]
    assert counts.bytes > 2 * WHOLE
    torch.testing.assert_close(full(found), wanted)


def test_a_rank_that_leaves_a_layer_out_or_has_more_rows(shared_mesh: Callable[..., Mesh]) -> None:
    def first_alone(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.linear(x, p["first"], p["a"]).square().mean()

    def second_twice(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_fn(p, x) + p["second"].square().mean()

    def many_rows(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_fn(p, x.repeat(100, 1))

    programs = (loss_fn, first_alone, second_twice, many_rows)

    @spmd(mesh=shared_mesh({"data": 2}), in_specs=(P(), P(), P("data")))
    def step(p: dict[str, Tensor], x: Tensor, which: Tensor) -> Any:
        return grad(lambda p: programs[int(which)](p, x))(p)

    alone = [grad(lambda p, program=program: program(p, rows(4)))(leaves()) for program in programs]
    for one, other in ((0, 1), (1, 0), (0, 2), (2, 0), (3, 0), (0, 3), (2, 1), (2, 3)):
        found = full(step(leaves(), rows(4), torch.tensor([one, other])))
        wanted = {name: (leaf + alone[other][name]) / 2 for name, leaf in alone[one].items()}
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_only_leaf_that_is_summed_over_an_axis(shared_mesh: Callable[..., Mesh], samples: int) -> None:
    """Of one sample a rank has none, and gives zeros where the others give factors."""

    def loss(p: dict[str, Tensor], batch: Tensor) -> Tensor:
        return F.linear(batch * p["a"], p["w"]).square().mean()

    specs = {"w": P("model"), "a": P()}
    given = {"w": torch.cat([leaves()["first"], leaves()["second"]]), "a": torch.ones(WIDTH)}
    step = data_parallel(lambda p, batch: value_and_grad(loss)(p, batch))
    cut = spmd(step, mesh=shared_mesh({"data": 2, "model": 2}), in_specs=(specs, P()), out_specs=(P(), specs))
    wanted = value_and_grad(loss)(given, rows(samples))
    value, found = cut(given, rows(samples))
    torch.testing.assert_close((value.full(), full(found)), wanted)
