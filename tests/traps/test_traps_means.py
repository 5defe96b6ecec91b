"""Losses that are no means over samples, each with the warning that it gets, and ordinary means, which get none."""

from __future__ import annotations

import dataclasses
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from spmd import (
    Loader,
    Mesh,
    P,
    Sharded,
    SpecError,
    all_gather,
    axis_index,
    data_parallel,
    fetch,
    functional,
    functional_with_buffers,
    mean_of,
    pmean,
    psum,
    put,
    random_key,
    spmd,
    value_and_grad,
)

CLASSES, FEATURES, TOKENS = 5, 6, 7
torch.manual_seed(0)
NET, PARAMS = functional(nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)))
DROPOUT, _ = functional(nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES)))
CONV, CONV_PARAMS, BUFFERS = functional_with_buffers(nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten()))
LSTM, LSTM_PARAMS = functional(nn.LSTM(FEATURES, 4, 2, dropout=0.3))
LAYER, LAYER_PARAMS = functional(nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.2))
generator = torch.Generator().manual_seed(0)
BATCH = {
    "x": torch.randn(20, FEATURES, generator=generator),
    "other": torch.randn(20, CLASSES, generator=generator),
    "label": torch.randint(0, CLASSES, (20,), generator=generator),
    "flag": (torch.rand(20, generator=generator) < 0.5).float(),
    "weight": torch.rand(20, generator=generator),
    "token": torch.randint(0, 16, (20, TOKENS), generator=generator),
    "mask": (torch.rand(20, TOKENS, generator=generator) < 0.6).float(),
}


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def step_with(mesh: Mesh, loss_fn: Callable, shards: int | None = None, **options: Any) -> Callable:
    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(loss_fn, **options)(params, batch)

    return step


def warned(mesh: Mesh, loss_fn: Callable, params: Any = PARAMS, shards: int | None = None, **options: Any) -> list[str]:
    """What a step warns of."""
    step = step_with(mesh, loss_fn, shards, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step(params, BATCH)
    return [str(one.message) for one in found]


def net(p: Any, b: Any) -> Tensor:
    return NET(p, b["x"])


def losses(p: Any, b: Any) -> Tensor:
    return F.cross_entropy(net(p, b), b["label"], reduction="none")


def normed(p: Any, b: Any) -> Tensor:
    return (F.instance_norm(net(p, b)[:, None]) * b["other"][:, None]).square().mean((1, 2))


def token_losses(p: Any, b: Any) -> Tensor:
    return p["0.weight"][b["token"]].square().mean(-1)


def correlation(p: Any, b: Any) -> Tensor:
    out, other = net(p, b)[:, 0], b["other"][:, 0]
    return F.cosine_similarity(out - out.mean(), other - other.mean(), dim=0)


def contrast(p: Any, b: Any) -> Tensor:
    logits = F.normalize(net(p, b), dim=1) @ F.normalize(b["other"], dim=1).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def contrast_of_dropout(p: Any, b: Any) -> Tensor:
    logits = DROPOUT(p, b["x"]) @ DROPOUT(p, b["x"]).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def normalised_advantages(p: Any, b: Any) -> Tensor:
    advantages = (b["weight"] - b["weight"].mean()) / b["weight"].std()
    return -(net(p, b).log_softmax(1)[:, 0].exp() * advantages).mean()


def cox(p: Any, b: Any) -> Tensor:
    order = b["weight"].argsort(descending=True)
    risk, event = net(p, b)[order, 0], b["flag"][order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


def dice(p: Any, b: Any) -> Tensor:
    out = net(p, b)[:, 0].sigmoid()
    return 1 - 2 * (out * b["flag"]).sum() / (out.sum() + b["flag"].sum())


def attention(p: Any, b: Any, **options: Any) -> Tensor:
    """Between samples, as if time were first."""
    out = net(p, b)[None, None]
    return F.scaled_dot_product_attention(out, out, out, **options).square().mean()


def sum_in_a_loop(p: Any, b: Any) -> Tensor:
    total = torch.zeros(())
    for x in b["x"]:
        total = total + NET(p, x).square().mean()
    return total


def in_bfloat16(p: Any, b: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(p, b).logsumexp((0, 1))


NO_MEANS: dict[str, Callable] = {
    "deviation": lambda p, b: net(p, b).std(),
    "correlation": correlation,
    "median": lambda p, b: losses(p, b).median(),
    "deviation after instance norm": lambda p, b: normed(p, b).std(),
    "instance norm of a transposed batch": lambda p, b: (F.instance_norm(net(p, b).T[None])[0].T * b["other"]).mean(),
    "maximum": lambda p, b: losses(p, b).max(),
    "quantile": lambda p, b: losses(p, b).quantile(0.9),
    "hardest": lambda p, b: losses(p, b).topk(3).values.mean(),
    "root of the mean square": lambda p, b: F.mse_loss(net(p, b), b["other"]).sqrt(),
    "exponential of a mean": lambda p, b: losses(p, b).mean().exp(),
    "mask": lambda p, b: (token_losses(p, b) * b["mask"]).sum() / b["mask"].sum(),
    "index": lambda p, b: token_losses(p, b)[b["mask"] > 0].mean(),
    "weights": lambda p, b: (losses(p, b) * b["weight"]).sum() / b["weight"].sum(),
    "contrast": contrast,
    "contrast of two dropout masks": contrast_of_dropout,
    "pairs": lambda p, b: torch.cdist(net(p, b), net(p, b)).mean(),
    "advantages": normalised_advantages,
    "Cox": cox,
    "dice": dice,
    "variance of features": lambda p, b: losses(p, b).mean() + net(p, b).var(0).mean(),
    "batch norm by hand": lambda p, b: NET(p, b["x"] / b["x"].std(0)).square().mean(),
    "attention": attention,
    "sum in a loop": sum_in_a_loop,
    "sum as a product": lambda p, b: torch.einsum("bi,bi->", net(p, b), net(p, b)),
    "bfloat16": in_bfloat16,
    "mean in mean_of": lambda p, b: mean_of(losses(p, b).mean(), len(b["x"])),
    "count in mean_of": lambda p, b: mean_of(losses(p, b).sum(), 1),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_no_mean_over_samples(mesh: Mesh, name: str) -> None:
    (text,) = warned(mesh, NO_MEANS[name])
    assert " is not a mean over samples" in text and "for 10 samples, and " in text
    assert "those for 4 and 6 of them" in text and "mean_of(total, count)" in text and "all_gather over 'data'" in text
    assert ("of its mean_of is not a sum over them" in text) == ("in mean_of" in name)


# -- means -------------------------------------------------------------------------------------------------------------


def diffusion(p: Any, b: Any) -> Tensor:
    noise, time = torch.randn_like(b["x"]), torch.randint(0, 100, (len(b["x"]), 1)) / 100
    return F.mse_loss(NET(p, (1 - time) * b["x"] + time * noise)[:, :2], noise[:, :2])


def variational(p: Any, b: Any) -> Tensor:
    mean, spread = net(p, b)[:, :2], net(p, b)[:, 2:4]
    sample = mean + torch.randn(mean.shape) * spread.exp()
    return (sample - b["other"][:, :2]).square().sum(1).mean() + 0.5 * (mean.square() - spread).sum(1).mean()


def mixed_precision(p: Any, b: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(net(p, b), b["label"])


def about_zero(p: Any, b: Any) -> Tensor:
    out = net(p, b).log_softmax(1)
    return ((out - out.detach()).exp() * (b["other"] - b["other"].mean(1, keepdim=True))).mean()


def proximal(p: Any, b: Any) -> Tensor:
    policy = Categorical(logits=net(p, b))
    ratio = (policy.log_prob(b["label"]) + 1.6).exp()
    gain = torch.min(ratio * b["weight"], ratio.clamp(0.8, 1.2) * b["weight"])
    return -gain.mean() - 0.01 * policy.entropy().mean() + policy.log_prob(policy.sample()).mean()


def time_first(p: Any, b: Any) -> Tensor:
    return LSTM(p, b["x"][None] * torch.arange(TOKENS)[:, None, None])[0].square().mean()


def transformer(p: Any, b: Any) -> Tensor:
    return LAYER(p, b["x"][None] * torch.arange(TOKENS)[:, None, None]).abs().mean()


def connectionist(p: Any, b: Any) -> Tensor:
    logits = (net(p, b)[None] * torch.arange(16.0)[:, None, None]).log_softmax(-1)
    lengths = torch.full((len(b["x"]),), 16)
    return F.ctc_loss(logits, 1 + b["token"][:, :4] % 4, lengths, lengths // 4, zero_infinity=True)


def sampled_negatives(p: Any, b: Any) -> Tensor:
    rows = p["0.weight"][torch.randint(0, 16, (len(b["x"]), 3))]
    return F.softplus((rows * b["x"][:, None]).sum(-1)).mean()


def shuffled(p: Any, b: Any, permutation: Callable = torch.randperm) -> Tensor:
    return (net(p, b) * NET(p, b["x"][permutation(len(b["x"]))])).mean()


def in_chunks(p: Any, b: Any) -> Tensor:
    """Half of the samples make one chunk, so that those of the second half would get the dropout of others."""
    chunks = zip(b["x"].split(5), b["label"].split(5), strict=True)
    return sum(F.cross_entropy(DROPOUT(p, x), label, reduction="sum") for x, label in chunks) / len(b["x"])


def sorted_first(p: Any, b: Any) -> Tensor:
    """As sequences are by their lengths."""
    order = b["x"].sum(1).argsort()
    return F.cross_entropy(DROPOUT(p, b["x"][order]), b["label"][order])


def noise_of_a_key(p: Any, b: Any) -> Tensor:
    noise = np.random.default_rng(random_key("noise")).standard_normal(b["x"].shape, dtype=np.float32)
    return F.cross_entropy(NET(p, b["x"] + torch.from_numpy(noise)), b["label"])


def shuffled_by_noise(p: Any, b: Any) -> Tensor:
    return (net(p, b) * NET(p, b["x"][torch.rand(len(b["x"])).argsort()])).mean()


def branches(p: Any, b: Any) -> Tensor:
    loss = losses(p, b).mean()
    return 2 * loss if loss > 0.01 else loss


def mean_in_a_loop(p: Any, b: Any) -> Tensor:
    return sum_in_a_loop(p, b) / len(b["x"])


def batch_norm(p: Any, b: Any) -> tuple[Tensor, Any]:
    out, new = CONV(p, BUFFERS, b["x"][:, None])
    return out.square().mean(), new


def gathered(p: Any, b: Any) -> Tensor:
    return NET(p, all_gather(b["x"], "data", tiled=True)).std()


def counted_by_all(p: Any, b: Any) -> Tensor:
    count = psum(torch.tensor(len(b["x"])), "data")
    return torch.einsum("bi,bi->", net(p, b), net(p, b)) / count * 2


MEANS: dict[str, Callable] = {
    "label smoothing": lambda p, b: F.cross_entropy(net(p, b), b["label"], label_smoothing=0.1),
    "instance norm": lambda p, b: normed(p, b).mean(),
    "mean square": lambda p, b: F.mse_loss(net(p, b), b["other"]),
    "Huber": lambda p, b: F.huber_loss(net(p, b), b["other"]),
    "binary": lambda p, b: F.binary_cross_entropy_with_logits(net(p, b)[:, 0], b["flag"]),
    "divergence": lambda p, b: F.kl_div(net(p, b).log_softmax(1), b["other"].softmax(1), reduction="batchmean"),
    "norm of each": lambda p, b: net(p, b).norm(dim=1).mean(),
    "dropout": lambda p, b: F.cross_entropy(DROPOUT(p, b["x"]), b["label"]),
    "float64": lambda p, b: net(p, b).double().square().mean(),
    "mixed precision": mixed_precision,
    "zero": lambda p, b: (net(p, b) - net(p, b).detach()).square().mean(),
    "about zero": about_zero,
    "tiny": lambda p, b: 1e-12 * losses(p, b).mean(),
    "diffusion": diffusion,
    "variational": variational,
    "gumbel": lambda p, b: (F.gumbel_softmax(net(p, b), hard=True) * b["other"]).sum(1).mean(),
    "proximal": proximal,
    "connectionist": connectionist,
    "penalty": lambda p, b: losses(p, b).mean() + sum(value.square().sum() for value in p.values()),
    "tokens": lambda p, b: token_losses(p, b).mean(),
    "mask of ones": lambda p, b: (token_losses(p, b) * torch.ones_like(b["mask"])).sum() / b["mask"].numel(),
    "weights by number": lambda p, b: (losses(p, b) * b["weight"]).mean(),
    "mean_of tokens": lambda p, b: mean_of((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum()),
    "mean_of samples": lambda p, b: mean_of(losses(p, b).sum() + p["0.bias"].sum() * len(b["x"]), len(b["x"])),
    "vmap": lambda p, b: torch.func.vmap(lambda x: NET(p, x).square().mean())(b["x"]).mean(),
    "sampled negatives": sampled_negatives,
    "shuffled": shuffled,
    "shuffled by noise": shuffled_by_noise,
    "in chunks": in_chunks,
    "sorted": sorted_first,
    "noise of a key": noise_of_a_key,
    "shuffled by NumPy": lambda p, b: shuffled(p, b, np.random.permutation),
    "shuffled by Python": lambda p, b: shuffled(p, b, lambda count: random.sample(range(count), count)),
    "shuffled by a generator": lambda p, b: shuffled(p, b, np.random.default_rng().permutation),
    "pairs of neighbours": lambda p, b: (net(p, b)[::2] - net(p, b)[1::2]).square().mean(),
    "branches": branches,
    "loop": mean_in_a_loop,
    "gathered": gathered,
    "mean of means": lambda p, b: pmean(net(p, b).mean(), "data").square(),
    "counted by all": counted_by_all,
    "by rank": lambda p, b: losses(p, b).mean() * (1 + axis_index("data")),
}


BY_PLACES: dict[str, Callable] = {
    "differences": lambda p, b: losses(p, b).mean() + net(p, b).diff(dim=0).square().mean(),
    "next": lambda p, b: F.triplet_margin_loss(net(p, b), net(p, b).roll(1, 0), net(p, b).roll(2, 0)),
    "flipped": lambda p, b: NET(p, 0.7 * b["x"] + 0.3 * b["x"].flip(0)).square().mean(),
    "weights by place": lambda p, b: (losses(p, b) * torch.linspace(0, 2, len(b["x"]))).mean(),
    "causal attention": lambda p, b: attention(p, b, is_causal=True),
    "with dropout": lambda p, b: DROPOUT(p, b["x"]).diff(dim=0).square().mean(),
}


@pytest.mark.parametrize("name", BY_PLACES)
def test_what_goes_by_places_in_the_batch(mesh: Mesh, name: str) -> None:
    (text,) = warned(mesh, BY_PLACES[name])
    assert " is not a mean over samples, but goes by their places in the batch" in text
    assert "for 10 samples, and " in text and "those for 5 and 5 of them, cut as the batch was" in text
    assert "all_gather(x, 'data', tiled=True)" in text and "a row of its own" in text


def test_pairs_of_neighbours_are_dealt_apart(mesh: Mesh) -> None:
    """Two halves of a batch keep them together, a Loader does not."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(MEANS["pairs of neighbours"])(params, batch)

    with pytest.warns(UserWarning, match=r"goes by their places.*for 8 samples.* for 4 and 4 of them"):
        step(PARAMS, next(iter(Loader(BATCH, batch_size=16, mesh=mesh))))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples(mesh: Mesh, name: str) -> None:
    assert warned(mesh, MEANS[name]) == []


@pytest.mark.parametrize(("loss_fn", "params"), [(time_first, LSTM_PARAMS), (transformer, LAYER_PARAMS)])
def test_a_mean_of_sequences_with_time_first(mesh: Mesh, loss_fn: Callable, params: Any) -> None:
    """With dropout, of which the samples are not the first dimension."""
    assert warned(mesh, loss_fn, params) == []


def test_a_mean_that_another_step_takes(mesh: Mesh) -> None:
    """Other samples are parts of a batch as well, which an `@spmd` function does not cut again."""
    inner = spmd(data_parallel(lambda params, batch: losses(params, batch).mean()))
    assert warned(mesh, lambda p, b: inner(p, b)) == []
    total = spmd(data_parallel(lambda params, batch: losses(params, batch).mean().square()))
    assert len(warned(mesh, lambda p, b: total(p, b))) == 1


def test_batch_norm(mesh: Mesh) -> None:
    assert warned(mesh, batch_norm, CONV_PARAMS, has_aux=True) == []


def test_aux_and_what_the_step_computed(mesh: Mesh) -> None:
    """Of the batch, with noise of its own, and the number of samples."""

    def step(params, batch):
        x, count = batch["x"] + torch.randn(batch["x"].shape), len(batch["x"])

        def loss_fn(params):
            out = NET(params, x)
            return torch.einsum("bi,bi->", out, out) / count, {"out": out.mean()}

        return value_and_grad(loss_fn, has_aux=True)(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spmd(data_parallel(step), mesh=mesh)(PARAMS, BATCH)


def perplexity(p: Any, b: Any) -> Tensor:
    return losses(p, b).mean().exp()


def accuracy_of_tokens(p: Any, b: Any) -> Tensor:
    return ((token_losses(p, b) > 0.055).float() * b["mask"]).sum() / b["mask"].sum()


def largest(p: Any, b: Any) -> Tensor:
    return net(p, b).abs().amax(0)


def unnormalised(p: Any, b: Any) -> float:
    return net(p, b).square().sum().item()


@pytest.mark.parametrize("metric", [perplexity, accuracy_of_tokens, largest, unnormalised])
def test_aux_that_is_no_mean(mesh: Mesh, metric: Callable) -> None:
    def loss_fn(p: Any, b: Any) -> Any:
        return losses(p, b).mean() + 5, {"loss": losses(p, b).mean(), "metric": metric(p, b)}

    (text,) = warned(mesh, loss_fn, has_aux=True)
    assert "aux['metric'] of loss_fn is not a mean over samples, and comes back as the mean of those of the" in text
    assert "for 10 samples, and " in text and "return the means that it is computed of" in text


def test_aux_that_is_a_mean(mesh: Mesh) -> None:
    def loss_fn(p: Any, b: Any) -> Any:
        weights = b["mask"]
        aux = {
            "hits": (net(p, b).argmax(1) == b["label"]).float().mean(),
            "by class": F.one_hot(b["label"], CLASSES).float().mean(0),
            "noise": (net(p, b) + torch.randn(len(b["x"]), 1)).mean().item(),
            "rate": 0.1,
            "each": Sharded(losses(p, b).exp(), P("data")),
        }
        return mean_of((token_losses(p, b) * weights).sum(), weights.sum()), aux

    assert warned(mesh, loss_fn, has_aux=True) == []


# -- losses that take gradients themselves -----------------------------------------------------------------------------


def slope(p: Any, b: Any) -> Tensor:
    x = b["x"].clone().requires_grad_()
    (along,) = torch.autograd.grad(NET(p, x).sum(), x, create_graph=True)
    return along


def test_losses_that_take_gradients(mesh: Mesh) -> None:
    """A penalty on the slope, forces, differential equations: they can't be evaluated without gradients."""
    assert warned(mesh, lambda p, b: (slope(p, b).norm(dim=1) - 1).square().mean()) == []
    assert len(warned(mesh, lambda p, b: slope(p, b).square().mean().sqrt())) == 1
    with pytest.raises(SpecError, match="returns a sum over its samples"):
        warned(mesh, lambda p, b: (slope(p, b) - 1).square().sum())


@pytest.mark.parametrize("ranks", [1, 2])
def test_virtual_shards(shared_mesh: Callable[..., Mesh], ranks: int) -> None:
    """They are parts of the batch, too, and one rank may have several."""
    mesh = shared_mesh({"data": ranks})
    (text,) = warned(mesh, lambda p, b: net(p, b).logsumexp((0, 1)), shards=4)
    assert "a step on several virtual shards" in text and "leave shards= out" in text
    assert warned(mesh, lambda p, b: net(p, b).square().mean() + 1, shards=4) == []
    assert warned(mesh, lambda p, b: mean_of(losses(p, b).sum() + 0, len(b["x"])), shards=4) == []


def test_a_single_virtual_shard(shared_mesh: Callable[..., Mesh]) -> None:
    """It has the whole batch."""
    assert warned(shared_mesh({"data": 1}), lambda p, b: net(p, b).logsumexp((0, 1)) + 4, shards=1) == []


def test_what_few_samples_do_by_chance(mesh: Mesh) -> None:
    """The hardest half of rank 0's samples, one of which is in the first third of them, as they are and as dealt."""
    hardest = torch.tensor([5.0, 1.0, 1.0, 1.0, 6.0, 7.0])

    @spmd(mesh=mesh)
    @data_parallel
    def step(w: Tensor, batch: Tensor) -> Any:
        return value_and_grad(lambda w, x: (w * x).topk(len(x) // 2).values.mean())(w, batch)

    with pytest.warns(UserWarning, match="is not a mean over samples"):
        step(torch.tensor(1.0), torch.cat([hardest, hardest]))


def test_a_mask_of_which_no_parts_have_something(mesh: Mesh) -> None:
    """Their means are NaN; for all samples of rank 0 it is a number."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(w: Tensor, batch: Tensor) -> Any:
        return value_and_grad(lambda w, x: (w * x)[x > 4].mean())(w, batch)

    with pytest.warns(UserWarning, match="is not a mean over samples.*got 5 for 6 samples, and nan as the mean"):
        step(torch.tensor(1.0), torch.arange(12.0) + 0.5)


def test_one_rank_and_few_samples(shared_mesh: Callable[..., Mesh]) -> None:
    assert warned(shared_mesh({"data": 1}), lambda p, b: net(p, b).logsumexp((0, 1)) + 2) == []
    assert warned(shared_mesh({"data": 2}), lambda p, b: net(p, b).logsumexp((0, 1)) + 3, shards=10) == []


def test_it_is_silenced_as_any_warning(mesh: Mesh) -> None:
    step = step_with(mesh, lambda p, b: net(p, b).logsumexp((0, 1)) + 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*is not a mean over samples")
        step(PARAMS, BATCH)
    assert not found


def test_after_a_value_that_is_not_finite(mesh: Mesh) -> None:
    """Nothing can be said of it, so the next ones are looked at."""
    step = step_with(mesh, lambda p, b: net(p, b).logsumexp((0, 1)) + 6)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step({name: leaf * float("nan") for name, leaf in PARAMS.items()}, BATCH)
        assert not found
        for _ in range(2):
            fetch(step(PARAMS, BATCH))
    assert len(found) == 1


def test_it_is_told_once(mesh: Mesh) -> None:
    """Not again for parameters that are on the mesh by then, or for batches of another size."""
    step = step_with(mesh, lambda p, b: net(p, b).logsumexp((0, 1)) + 5)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for params, count in ((PARAMS, len(BATCH["x"])), (put(PARAMS, mesh=mesh), len(BATCH["x"])), (PARAMS, 10)):
            step(params, {name: rows[:count] for name, rows in BATCH.items()})
    assert len(found) == 1


class Power(nn.Module):
    """Of the mean loss; with the exponent 1 it is a mean over samples, with 2 it is not."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, out, label):
        return F.cross_entropy(out, label) ** self.exponent

    def loss(self, p, b):
        return self(net(p, b), b["label"])


def loss_of(criterion: nn.Module) -> Callable:
    return lambda p, b: criterion(net(p, b), b["label"])


def test_each_of_many_losses_with_the_same_code_is_judged(mesh: Mesh) -> None:
    """Those of a sweep in one program, though others were right, or have given a warning."""
    exponents = [1.0] * 9 + [2.0, 3.0]
    assert [len(warned(mesh, loss_of(Power(one)))) for one in exponents] == [one > 1 for one in exponents]


@pytest.mark.parametrize("made", [loss_of, lambda criterion: criterion.loss], ids=["function", "method"])
def test_losses_with_the_same_code_in_one_step_are_all_judged(mesh: Mesh, made: Callable) -> None:
    criteria = Power(1.0), Power(2.0)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return [value_and_grad(made(criterion))(params, batch)[0] for criterion in criteria]

    with pytest.warns(UserWarning, match="is not a mean over samples"):
        fetch(step(PARAMS, BATCH))


class Unset:
    """A loss with a property that can't be read."""

    @property
    def reduction(self) -> str:
        raise AttributeError("it is not set")

    def __call__(self, p, b):
        return F.cross_entropy(net(p, b), b["label"])


def test_what_cannot_be_read_of_a_loss_is_left(mesh: Mesh) -> None:
    assert not warned(mesh, Unset())


@dataclasses.dataclass
class Step:
    """A step that can't be hashed."""

    exponent: float

    def __call__(self, params, batch):
        def step(params, batch):
            return value_and_grad(Power(self.exponent).loss)(params, batch)

        return data_parallel(step)(params, batch)


def test_a_loss_in_a_step_that_cannot_be_hashed_is_judged(mesh: Mesh) -> None:
    with pytest.warns(UserWarning, match="is not a mean over samples"):
        fetch(spmd(Step(2.0), mesh=mesh)(PARAMS, BATCH))


def test_that_a_loss_is_evaluated_again_is_not_seen(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank logs once in a call, and random numbers go on as they would have."""

    def loss_fn(params, batch):
        logging.getLogger("loss").warning("%d samples, %f", len(batch["x"]), np.random.rand())
        return net(params, batch).square().mean()

    def drawn(number: int) -> float:
        return float(np.random.RandomState(0).rand(number)[-1])

    mesh.run(lambda: np.random.seed(0))
    for number in (1, 2):
        caplog.clear()
        assert warned(mesh, lambda p, b, number=number: loss_fn(p, b) + number) == []
        logged = [one.getMessage().removeprefix("[rank 1] ") for one in caplog.records if one.name == "loss"]
        assert logged == [f"10 samples, {drawn(number):f}"] * 2


def test_a_generator_of_the_users_own_is_left_as_it_was(mesh: Mesh) -> None:
    def step(params, batch):
        generator = torch.Generator().manual_seed(0)

        def loss_fn(params, batch):
            return (net(params, batch) + torch.rand(len(batch["x"]), 1, generator=generator)).square().mean()

        value_and_grad(loss_fn)(params, batch)
        return torch.rand(1, generator=generator)

    generator = torch.Generator().manual_seed(0)
    torch.rand(10, 1, generator=generator)
    assert spmd(data_parallel(step), mesh=mesh)(PARAMS, BATCH).full() == torch.rand(1, generator=generator)
