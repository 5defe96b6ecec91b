"""A table of torch's operators that mix the rows of a batch, and of uses of the same ones that do not.

Each computes a weight for each sample in the step. What mixes rows has another value on two ranks, and must warn; all
else must have the same value, and give no warning, also where other dimensions are as long as there are samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd import Mesh, data_parallel, spmd, value_and_grad

COUNT, HERE = 20, 10  # samples, and those of each rank
generator = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(6, 3, generator=generator)}
BATCH = {
    "x": torch.randn(COUNT, 6, generator=generator),
    "y": torch.randint(0, 3, (COUNT,), generator=generator),
    "g": torch.randn(COUNT, generator=generator),
    "times": torch.randn(COUNT, HERE, HERE, generator=generator),  # as many times, and features
}


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def loss_fn(p: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (F.cross_entropy(x @ p["w"], y, reduction="none") * weight).mean()


def run(mesh: Mesh, weigh: Callable) -> tuple[bool, list[str]]:
    """Whether the value is that of one device, and the warnings."""

    def step(p: Any, b: Any) -> Any:
        return value_and_grad(loss_fn)(p, b["x"], b["y"], weigh(b["x"], b["y"], b["g"], b["times"]).float())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loss, _ = spmd(data_parallel(step, batch="b"), mesh=mesh)(PARAMS, BATCH)
    return torch.allclose(loss.full(), step(PARAMS, BATCH)[0]), [str(one.message) for one in found]


def counts(y: Tensor) -> Tensor:
    _, inverse, found = torch.unique(y, return_inverse=True, return_counts=True)
    return found[inverse]


def hardest(g: Tensor) -> Tensor:
    return torch.zeros_like(g).index_fill(0, g.argsort()[:4], 1.0)


def shifted(x: Tensor, g: Tensor) -> Tensor:
    return g + 0.9 * torch.cat([g[1:], torch.zeros(1)])


def of_samples(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*x], layout=torch.jagged)


JOINED = {
    "sort, ranks": (lambda x, y, g, t: g.argsort().argsort(), "the order by sort"),
    "sort, the hardest": (lambda x, y, g, t: hardest(g), "the order by sort"),
    "sort, some losses": (lambda x, y, g, t: g[g.argsort()[:4]].mean() * g, "mean"),
    "unique": (lambda x, y, g, t: counts(y), "_unique2"),
    "roll": (lambda x, y, g, t: g.roll(1), "roll"),
    "roll, rows": (lambda x, y, g, t: x.roll(1, 0)[:, 0], "roll"),
    "flip": (lambda x, y, g, t: g.flip(0), "flip"),
    "diff": (lambda x, y, g, t: torch.cat([torch.zeros(1), g.diff()]), "sub"),
    "gradient": (lambda x, y, g, t: torch.gradient(g)[0], "sub"),
    "slices": (lambda x, y, g, t: F.pad(g[1:] - g[:-1], (0, 1)), "sub"),
    "shifted": (lambda x, y, g, t: shifted(x, g), "cat"),
    "halves": (lambda x, y, g, t: torch.cat([*g.chunk(2)][::-1]), "cat"),
    "numbers of parts": (lambda x, y, g, t: torch.stack([part.amax() for part in g.chunk(2)])[0] * g, "amax"),
    "a number by its index": (lambda x, y, g, t: g * torch.zeros(()).index_add(0, y[:1] * 0, g.mean()), "mean"),
    "nested": (lambda x, y, g, t: g * of_samples(x).values().mean(), "mean"),
    "first": (lambda x, y, g, t: g - g[0], "sub"),
    "product with the first": (lambda x, y, g, t: x @ x[0], "mv"),
    "the largest": (lambda x, y, g, t: g - g[g.argmax()], "sub"),
    "batch_norm": (lambda x, y, g, t: F.batch_norm(x, None, None, training=True)[:, 0], "native_batch_norm"),
    "fft": (lambda x, y, g, t: torch.fft.fft(g).real, "_fft_r2c"),
    "all pairs": (lambda x, y, g, t: (g[:, None] - g).abs().mean(1), "sub"),
    "equal pairs": (lambda x, y, g, t: (y[:, None] == y[None]).sum(1), "eq"),
    "pairs of rows": (lambda x, y, g, t: (x[:, None] - x[None]).square().sum(2).amax(1), "sub"),
    "outer": (lambda x, y, g, t: torch.outer(g, g).relu().sum(1), "mul"),
    "kron": (lambda x, y, g, t: torch.kron(g, g).view(len(g), -1).relu().sum(1), "mul"),
    "addr": (lambda x, y, g, t: torch.addr(torch.zeros(len(g), len(g)), g, g).relu().sum(1), "addr"),
    "addmm": (lambda x, y, g, t: (x @ torch.addmm(torch.zeros(6, 6), x.T, x)).sum(1), "addmm"),
    "addmm, pairs": (lambda x, y, g, t: torch.addmm(torch.zeros(len(x), len(x)), x, x.T).relu().sum(1), "addmm"),
    "mv": (lambda x, y, g, t: x @ (x.T @ g), "mv"),
    "einsum": (lambda x, y, g, t: x @ torch.einsum("nd,n->d", x, g), "bmm"),
    "vdot": (lambda x, y, g, t: g * torch.vdot(g, g), "vdot"),
    "pdist": (lambda x, y, g, t: g * F.pdist(x).mean(), "mean"),
    "histogram": (lambda x, y, g, t: torch.histogram(g, 3, range=(-2.0, 2.0))[0][y], "histogram"),
    "index_put": (lambda x, y, g, t: torch.zeros(3).index_put((y,), g, accumulate=True)[y], "index_put"),
    "pinv": (lambda x, y, g, t: torch.linalg.pinv(x)[0], "linalg_pinv"),
    "transposed": (lambda x, y, g, t: x @ x.T.mean(1), "mean"),
    "transposed softmax": (lambda x, y, g, t: x.T.softmax(1)[0], "_softmax"),
    "flat": (lambda x, y, g, t: g * x.flatten().std(), "std"),
    "chosen": (lambda x, y, g, t: g - g[g > 0].mean(), "mean"),
    "mse_loss": (lambda x, y, g, t: g * F.mse_loss(g, x[:, 0]), "mse_loss"),
    "cross_entropy": (lambda x, y, g, t: g * F.cross_entropy(x, y), "nll_loss_forward"),
}


@pytest.mark.parametrize("joined", JOINED)
def test_what_mixes_rows(mesh: Mesh, joined: str) -> None:
    weigh, name = JOINED[joined]
    is_same, texts = run(mesh, weigh)
    assert not is_same and len(texts) == 1
    assert f"which comes of {name} at test_traps_operators.py:" in texts[0]


def rms(x: Tensor) -> Tensor:
    return x * x.square().mean(-1, keepdim=True).rsqrt()


def time_first(t: Tensor) -> Tensor:
    t = t.permute(1, 0, 2)
    t = (t - t.mean(0, keepdim=True)).flip(0).cumsum(0).flip(0) + t.roll(1, 0).softmax(0)
    return torch.cat([t[1:] - t[:-1], t[:1]]).sum((0, 2))


def stacked_by_time(t: Tensor) -> Tensor:
    steps = torch.stack([2 * step for step in t.unbind(1)])
    return (steps - steps.mean(0, keepdim=True)).square().mean(0).sum(1)


def returns(t: Tensor) -> Tensor:
    """Of as many times as there are samples, with no further dimension."""
    rewards = t[..., 0].T.contiguous()
    return (rewards.flip(0).cumsum(0).flip(0) + rewards.roll(1, 0) * rewards.softmax(0)).square().sum(0)


def chunks_time_first(t: Tensor) -> Tensor:
    return torch.cat([(part.transpose(0, 1).softmax(0) * part.transpose(0, 1)).mean(0) for part in t.chunk(2)]).sum(1)


def in_chunks(t: Tensor) -> Tensor:
    return torch.cat([rms(chunk).softmax(-1)[:, 0, 0] + chunk.mean((1, 2)) for chunk in t.split(5)])


def in_place(t: Tensor) -> Tensor:
    out, half = torch.zeros_like(t), len(t) // 2
    out[:half], out[half:] = rms(t[:half]), rms(t[half:])
    return (out - t).sum((1, 2))


def one_by_one(t: Tensor) -> Tensor:
    slices = [t[at : at + 1] for at in range(len(t))]
    return torch.cat(
        [((one - one.mean()) / one.std() + (one @ one.mT).softmax(-1) @ one).amax((1, 2)) for one in slices]
    )


def rows_of_one(t: Tensor) -> Tensor:
    return torch.stack([(one[1:] - one[:-1]).std() + one[0] @ one[1] + (one.T @ one).trace() for one in t])


def experts(x: Tensor, y: Tensor) -> Tensor:
    """Rows that are ordered by their expert, and put back."""
    order = y.argsort(stable=True)
    parts = x[order].split(y.bincount(minlength=3).tolist())
    return torch.cat([(at + 1) * part for at, part in enumerate(parts)])[order.argsort()].sum(1)


def packed(x: Tensor, y: Tensor) -> Tensor:
    """As for recurrent layers: by falling length."""
    lengths, order = (y + 1).sort(descending=True)
    out = torch.empty_like(x)
    out[order] = x[order] * lengths[:, None]
    return out.sum(1)


def by_length(x: Tensor, y: Tensor) -> Tensor:
    """As in buckets of about equal lengths."""
    out = torch.empty_like(x)
    for at in y.argsort().split(4):
        out[at] = rms(x[at])
    return out.sum(1)


def padded(g: Tensor) -> Tensor:
    """Something for one sample of each rank only, times 0 so that it is the same on one device."""
    return torch.cat([0 * g[:1], torch.zeros(len(g) - 1)]) + torch.cat([0 * g[:2], torch.zeros(len(g) - 2)])


def written(g: Tensor) -> Tensor:
    out, more = torch.zeros_like(g), torch.zeros_like(g)
    out[0], more[:2] = 0 * g[0], 0 * g[:2]
    return out + more


def codes(x: Tensor) -> Tensor:
    table = torch.linspace(-2, 2, HERE)
    return table[(x[:, :1] - table[None]).square().argmin(1)] + (torch.arange(HERE)[:, None] < x[:, 0].abs()).sum(0)


def with_random_numbers(t: Tensor) -> Tensor:
    """As of embeddings of places under dropout, times 0 so that they are the same on one device."""
    random = 0 * torch.rand(1, HERE, HERE)
    return (t[:, :1] + random).mean((1, 2)) + (t[:, 0] @ random[0]).amax(1)


def nested(x: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in of_samples(x).unbind()])


APART = {
    "times first": lambda x, y, g, t: time_first(t),
    "stacked by time": lambda x, y, g, t: stacked_by_time(t),
    "returns": lambda x, y, g, t: returns(t),
    "chunks with times first": lambda x, y, g, t: chunks_time_first(t),
    "batch norm in evaluation": lambda x, y, g, t: F.batch_norm(x, torch.ones(6), torch.ones(6))[:, 0],
    "attention": lambda x, y, g, t: ((t @ t.mT).softmax(-1) @ t).flip(1).roll(1, 2).cumsum(1)[:, 0].mean(1),
    "pairs of times": lambda x, y, g, t: (t[:, :, :1] - t[:, None, :, 0]).abs().amax((1, 2)),
    "times shifted": lambda x, y, g, t: torch.cat([t[:, 1:] - t[:, :-1], t[:, :1]], 1).std((1, 2)),
    "sums over times": lambda x, y, g, t: torch.einsum("ntd,nte->nde", t, torch.fft.fft(t).real).mean((1, 2)),
    "in chunks": lambda x, y, g, t: in_chunks(t),
    "chunks in place": lambda x, y, g, t: in_place(t),
    "one by one": lambda x, y, g, t: one_by_one(t),
    "rows of one": lambda x, y, g, t: rows_of_one(t),
    "pairs of neighbours": lambda x, y, g, t: (g.view(-1, 2).mean(1) + g[::2] - g[1::2]).repeat_interleave(2),
    "half of them": lambda x, y, g, t: g + padded(g) + written(g),
    "experts": lambda x, y, g, t: experts(x, y),
    "by length": lambda x, y, g, t: by_length(x, y),
    "packed": lambda x, y, g, t: packed(x, y),
    "codes": lambda x, y, g, t: codes(x),
    "random numbers": lambda x, y, g, t: with_random_numbers(t),
    "nested": lambda x, y, g, t: nested(x),
}


@pytest.mark.parametrize("apart", APART)
def test_what_keeps_rows_apart(mesh: Mesh, apart: str) -> None:
    assert run(mesh, APART[apart]) == (True, [])


def test_a_random_partner_is_each_ranks_own(mesh: Mesh) -> None:
    """As in mixup: any partner will do, and on one device it is another one, too; so is the share of each."""

    def mixed(x: Tensor, y: Tensor, g: Tensor, t: Tensor) -> Tensor:
        share = torch.rand(len(g))[0]
        return share * g + (1 - share) * g[torch.randperm(len(g))]

    assert run(mesh, mixed)[1] == []
