"""Ordinary programs that would train nothing, or something else, without a word: each with the message that it gets."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spmd import (
    Mesh,
    P,
    Sharded,
    SpecError,
    axis_index,
    data_parallel,
    fetch,
    functional,
    grad,
    psum,
    spmd,
    value_and_grad,
)

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def gradients(mesh: Mesh, loss_fn: Callable, params: Any, batch: Any, shards: int | None = None, **options: Any) -> Any:
    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params, batch):
        return value_and_grad(loss_fn, **options)(params, batch)

    return step(params, batch)


@pytest.mark.parametrize("shards", [None, 2])
def test_the_model_instead_of_apply(mesh: Mesh, shards: int | None) -> None:
    module = model()
    _, params = functional(module)
    with pytest.raises(SpecError, match=r"computes with parameters that it captures.*functional\(model\).*apply\(par"):
        gradients(mesh, lambda params, batch: module(batch).square().mean(), params, X, shards)


def test_a_model_without_gradients_instead_of_apply(mesh: Mesh) -> None:
    _, params = functional(model())
    module = model().requires_grad_(False)
    with pytest.raises(SpecError, match=r"got gradients that are zero for every leaf.*by detach\(\)"):
        gradients(mesh, lambda params, batch: module(batch).square().mean(), params, X)


def test_a_captured_module_beside_the_parameters(mesh: Mesh) -> None:
    apply, params = functional(model())
    head = nn.Linear(1, 1)
    with pytest.raises(SpecError, match=r"parameter of shape \[1, 1\] that is none of its arguments|shape \[1\] that"):
        gradients(mesh, lambda params, batch: head(apply(params, batch)).mean(), params, X)
    head.requires_grad_(False)
    gradients(mesh, lambda params, batch: head(apply(params, batch)).mean(), params, X)


@pytest.mark.parametrize("shards", [None, 2])
def test_aux_with_a_row_for_each_sample(mesh: Mesh, shards: int | None) -> None:
    apply, params = functional(model())

    def loss_fn(params, batch):
        out = apply(params, batch)
        return out.square().mean(), {"logits": out}

    with pytest.raises(SpecError, match=r"aux\['logits'\] of loss_fn has a row for each sample.*Sharded.*or reduce it"):
        gradients(mesh, loss_fn, params, X, shards, has_aux=True)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("first", [lambda out: out.mean(), lambda out: out.mean() * torch.ones(3)])
def test_aux_with_a_row_for_each_sample_in_a_later_call(mesh: Mesh, first: Callable, shards: int | None) -> None:
    """What comes first is what its name says; the rows come with parameters that the first call did not have."""

    def loss_fn(w, batch):
        out = batch @ w
        return out.square().mean(), out.detach() if float(w.detach().sum()) > 0 else first(out.detach())

    step = spmd(mesh=mesh)(
        data_parallel(shards=shards)(lambda w, batch: value_and_grad(loss_fn, has_aux=True)(w, batch))
    )
    width = X.shape[1]
    (_, aux), _ = step(-torch.ones(width), X)
    torch.testing.assert_close(aux.full(), first(X @ -torch.ones(width)))
    with pytest.raises(SpecError, match=r"aux of loss_fn has a row for each sample.*Sharded.*or reduce it"):
        fetch(step(torch.ones(width), X))


def argument(w, x):
    return value_and_grad(lambda w, x: ((x @ w).square().mean(), x @ w), has_aux=True)(w, x)


def captured(w, x):
    return value_and_grad(lambda w: ((x @ w).square().mean(), x @ w), has_aux=True)(w)


def captured_by_another(w, x):
    def loss_fn(w):
        return (x @ w).square().mean(), x @ w

    return value_and_grad(lambda w: loss_fn(w), has_aux=True)(w)


def partly_given(w, x):
    return value_and_grad(functools.partial(lambda x, w: ((x @ w).square().mean(), x @ w), x), has_aux=True)(w)


@pytest.mark.parametrize("body", [argument, captured, captured_by_another, partly_given])
def test_aux_with_a_row_for_each_row_of_what_in_specs_cut(mesh: Mesh, body: Callable) -> None:
    step = spmd(mesh=mesh, in_specs=(P(), P("data")))(body)
    with pytest.raises(SpecError, match=r"aux of .* has a row for each sample.*Sharded.*or reduce it"):
        step(torch.ones(X.shape[1]), X)


def test_aux_in_a_step_with_in_specs_that_means_what_it_says(mesh: Mesh) -> None:
    """Sums over ranks, statistics as long as the rows, and rows of features that the ranks have in common."""

    @spmd(mesh=mesh, in_specs=(P(), P("data"), P(None, "data")))
    def step(w, x, features):
        def loss_fn(w, x):
            out = x @ w
            return out.square().mean(), (Sharded(out, P("data")), torch.arange(4.0) + out.mean())

        (_, (rows, statistics)), _ = value_and_grad(loss_fn, has_aux=True)(w, x)
        _, total = value_and_grad(lambda w: (w.sum(), psum(features.sum(1), "data")), has_aux=True)(w)[0]
        return rows, statistics, total

    features = torch.arange(8.0).reshape(2, 4)
    rows, statistics, total = step(torch.ones(X.shape[1]), X, features)
    torch.testing.assert_close(rows.full(), X.sum(1))
    torch.testing.assert_close(statistics.full(), torch.arange(4.0) + X.sum(1).mean())
    torch.testing.assert_close(total.full(), features.sum(1))


def test_aux_that_is_averaged_though_its_spec_cuts_it(mesh: Mesh) -> None:
    """As `shard_map(value_and_grad(f, has_aux=True))` would return it in JAX; the loss communicates."""

    def step(make_aux: Callable) -> Any:
        def loss_fn(w, x):
            out = x @ w
            return psum(out.sum(), "data"), make_aux(out)

        wrapped = value_and_grad(loss_fn, has_aux=True)
        specs = {"in_specs": (P(), P("data")), "out_specs": ((P(), P("data")), P())}
        return spmd(wrapped, mesh=mesh, **specs)(torch.ones(X.shape[1]), X)[0][1]

    for aux in (lambda out: out, lambda out: out.sum()[None]):
        with pytest.raises(
            SpecError, match=r"result \[0\]\[1\] of loss_fn is aux .* averaged .*Sharded\(value, P\('data'\)\)"
        ):
            step(aux)
    torch.testing.assert_close(step(lambda out: Sharded(out, P("data"))).full(), X.sum(1))
    assert step(lambda out: torch.ones(1)).full().tolist() == [1.0, 1.0]


def test_aux_that_says_what_it_is(mesh: Mesh) -> None:
    """Rows that stay those of the samples, means of them, and statistics that happen to be as long as the batch."""
    apply, params = functional(model())

    def loss_fn(params, batch):
        out = apply(params, batch)
        statistics = torch.arange(4.0) + out.mean()
        return out.square().mean(), (Sharded(out, P("data")), out.mean(0), statistics)

    (_, (rows, mean, statistics)), _ = gradients(mesh, loss_fn, params, X, has_aux=True)
    expected = apply(params, X).detach()
    torch.testing.assert_close(rows.full(), expected)
    torch.testing.assert_close(mean.full(), expected.mean(0))
    torch.testing.assert_close(statistics.full(), torch.arange(4.0) + expected.mean())


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.square().sum(),
        lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
        lambda out: F.cross_entropy(torch.cat([out, -out], 1), torch.zeros(len(out)).long(), reduction="sum"),
        lambda out: -0.5 * out.square().sum() / 7,
        lambda out: F.binary_cross_entropy_with_logits(out, (out > 0).float(), reduction="sum") + out.square().sum(),
        lambda out: out.norm() ** 2,
        lambda out: torch.dot(out.flatten(), out.flatten()) + 0.1,
        lambda out: (out * torch.ones(5)).flatten().square().sum(),
        lambda out: F.dropout(out + torch.randn_like(out)).square().mean() + (out.exp() - out - 1).sum(),
    ],
)
@pytest.mark.parametrize("shards", [None, 2])
def test_a_loss_that_is_a_sum(mesh: Mesh, loss: Callable[[Tensor], Tensor], shards: int | None) -> None:
    apply, params = functional(model())
    with pytest.raises(SpecError, match=r"returns a sum over its samples.*return the mean.*or mean_of\(total, count\)"):
        gradients(mesh, lambda params, batch: loss(apply(params, batch)), params, X, shards)


def test_of_one_rank_whose_batch_is_in_virtual_shards(shared_mesh: Callable[..., Mesh]) -> None:
    """As by several ranks, what is no mean would be the mean of those of the shards."""
    apply, params = functional(model())
    mesh = shared_mesh({"data": 1})
    with pytest.raises(SpecError, match="returns a sum over its samples, and the mean over virtual shards of sums"):
        gradients(mesh, lambda params, batch: apply(params, batch).square().sum(), params, X, 2)
    with pytest.raises(SpecError, match="aux of <lambda> has a row for each sample"):
        gradients(mesh, lambda params, batch: (apply(params, batch).mean(), 1 * batch), params, X, 2, has_aux=True)
    loss = gradients(mesh, lambda params, batch: apply(params, batch).square().sum(), params, X)[0]
    torch.testing.assert_close(loss.full(), apply(params, X).square().sum().detach())


def test_a_sum_over_one_sample_a_rank_and_the_same_code_again(mesh: Mesh) -> None:
    apply, params = functional(model())

    def made(reduction: str) -> Callable:
        def loss_fn(params, batch):
            return F.mse_loss(apply(params, batch), batch[:, :1], reduction=reduction)

        return loss_fn

    gradients(mesh, made("mean"), params, X[:2])
    with pytest.raises(SpecError, match="returns a sum over its samples"):
        gradients(mesh, made("sum"), params, X[:2])


class Chosen(NamedTuple):
    reduction: str


class Scaled:
    by = functools.lru_cache(lambda self, reduction: 1.0)


def test_a_sum_by_what_a_loss_holds(mesh: Mesh) -> None:
    """Of losses with the same code: a name in a tuple says which; a method that is cached has no code itself."""

    def made(chosen: Chosen, scale: Callable) -> Callable:
        def loss_fn(params, batch):
            return scale(chosen.reduction) * F.mse_loss(batch @ params["w"], batch[:, 0], reduction=chosen.reduction)

        return loss_fn

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, summed, batch):
        return grad(made(Chosen("sum" if summed > 0 else "mean"), Scaled().by))(params, batch)

    params = {"w": torch.ones(3)}
    fetch(step(params, torch.tensor(0.0), X))
    with pytest.raises(SpecError, match="returns a sum over its samples"):
        fetch(step(params, torch.tensor(1.0), X))


def attacked(params: Any, x: Tensor, loss: Callable, sharded: bool) -> Tensor:
    """The samples, moved twice by the gradient of the loss by themselves, which begins with zeros."""
    delta = torch.zeros_like(x)
    for _ in range(2):
        by_delta = grad(lambda delta: loss(params, x + delta))
        delta = delta + (by_delta(Sharded(delta, P("data"))).local if sharded else by_delta(delta))
    return x + delta


@pytest.mark.parametrize("within", [False, True])
def test_gradients_by_samples(mesh: Mesh, within: bool) -> None:
    """Of a loss by what has a row for each sample, in a step and in a loss that is differentiated itself."""
    apply, params = functional(model())

    def step(params, batch, sharded, reduction):
        def loss(params, x, reduction="mean"):
            return getattr(apply(params, x).square(), reduction)()

        x, by_samples = 2 * batch, functools.partial(loss, reduction=reduction)
        if within:
            return grad(lambda params, x: loss(params, attacked(params, x, by_samples, sharded)))(params, x)
        return grad(loss)(params, attacked(params, x, by_samples, sharded))

    on_mesh = spmd(data_parallel(step), mesh=mesh)
    with pytest.raises(SpecError, match=r"same values on all ranks.*shape \[4, 3\], for 4 .*\(Sharded\(tensor, P\("):
        on_mesh(params, X, False, "mean")
    with pytest.raises(SpecError, match=r"returns a sum over its samples.*the gradient of each sample.*axes=\(\)"):
        on_mesh(params, X, True, "sum")
    for samples in (8, 7):
        expected, got = step(params, X[:samples], True, "mean"), on_mesh(params, X[:samples], True, "mean")
        torch.testing.assert_close({name: value.full() for name, value in got.items()}, expected)


def test_a_sum_by_a_flag(mesh: Mesh) -> None:
    """Of a step whose loss was a mean before."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(w, batch, reduction):
        losses = functools.partial(lambda name, x: getattr(x, name)(), reduction)
        return grad(lambda w, batch: losses(batch @ w))(w, batch)

    step(torch.ones(3), X, "mean")
    with pytest.raises(SpecError, match="returns a sum over its samples"):
        step(torch.ones(3), X, "sum")


def test_gradients_by_what_has_as_many_rows_as_there_are_samples(mesh: Mesh) -> None:
    def step(params, batch):
        params = {name: value + 0 for name, value in params.items()}  # of which nothing is known
        return grad(lambda params, x: (x @ params["w"].T).square().mean() + params["w"].mean())(params, batch)

    params = {"w": torch.ones(4, 3)}
    got = spmd(data_parallel(step), mesh=mesh)(params, X)
    torch.testing.assert_close(got["w"].full(), step(params, X)["w"])


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        (lambda out: out.detach().numpy(), "a row for each sample"),
        (lambda out: out.T, "a row for each sample"),
        (lambda out: torch.cat([out, out]).flatten(), "a row for each sample"),
        (lambda out: (out > 0).flatten(), "a row for each sample"),
        (lambda out: out.flatten().tolist(), "a leaf for each sample"),
        (lambda out: (out < 1e6).sum(), r"may differ between ranks.*psum it first"),
    ],
)
def test_aux_of_other_forms_with_something_for_each_sample(mesh: Mesh, aux: Callable, words: str) -> None:
    apply, params = functional(model())

    def loss_fn(params, batch):
        out = apply(params, batch)
        return out.square().mean(), aux(out)

    with pytest.raises(SpecError, match=words):
        gradients(mesh, loss_fn, params, X, has_aux=True)


@pytest.mark.parametrize("shards", [None, 2])
def test_aux_that_counts_samples(mesh: Mesh, shards: int | None, recwarn: pytest.WarningsRecorder) -> None:
    """As a float, which is averaged; what is a mean, a constant, or summed over the ranks is right."""
    apply, params = functional(model())

    def loss_fn(params, batch, aux):
        out = apply(params, batch)
        hits = (out < 1e6).float()
        return out.square().mean(), {
            "hits": hits.sum(),
            "both": torch.stack([hits.sum(), torch.zeros(())]),
            "number": float(len(batch)),
            "right": (hits.mean(), torch.tensor(3.0), hits.sum() / len(batch)),
            "summed": psum(hits.sum(), "data") if aux == "summed" else 0,
        }[aux]

    remedy = r"virtual shards.*: return its mean" if shards else r"ranks.*: psum\(.*or return its mean"
    for aux in ("hits", "both", "number"):
        with pytest.warns(UserWarning, match=rf"aux of the function is a number of samples.*averaged over {remedy}"):
            gradients(mesh, functools.partial(loss_fn, aux=aux), params, X, shards, has_aux=True)
    recwarn.clear()
    for aux in ("right", "summed")[: 1 if shards else 2]:
        gradients(mesh, functools.partial(loss_fn, aux=aux), params, X, shards, has_aux=True)
    assert not recwarn.list


def test_what_is_printed_in_a_loss_is_printed_once(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    apply, params = functional(model())

    def loss_fn(params, batch):
        out = apply(params, batch)
        print("rows:", len(out))
        return (out.square() / len(out)).sum()

    gradients(mesh, loss_fn, params, X)
    printed = capsys.readouterr().out
    assert "rows: 4" in printed and "rows: 8" not in printed


def test_sums_that_are_none_over_samples(mesh: Mesh) -> None:
    apply, params = functional(model())
    gradients(mesh, lambda params, batch: (apply(params, batch).square() / len(batch)).sum(), params, X)
    gradients(mesh, lambda params, batch: torch.stack([apply(params, batch).mean()] * 4).sum(), params, X)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            lambda: value_and_grad(torch.zeros(())),
            r"value_and_grad takes a function.*got a tensor.*value_and_grad\(loss",
        ),
        (lambda: grad(None), r"grad takes a function.*got NoneType.*grad\(loss_fn\)\(params, batch\)"),
        (lambda: data_parallel(3), "data_parallel takes a function.*got int.*@data_parallel above def step"),
        (lambda: spmd("data"), r"spmd takes a function.*got str.*spmd\(step, mesh=mesh\)"),
        (lambda: data_parallel(spmd(lambda batch: batch)), "data_parallel was put around spmd.*@spmd above @data_par"),
    ],
)
def test_what_is_no_function(wrong: Callable[[], Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        wrong()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "clip",
    [
        nn.utils.clip_grad_norm_,
        nn.utils.clip_grad_value_,
        functools.partial(nn.utils.clip_grads_with_norm_, total_norm=torch.tensor(2.0)),
    ],
)
def test_clipping_gradients_that_are_none(shared_mesh: Callable[..., Mesh], clip: Callable, ranks: int) -> None:
    """The gradients of a step are values, and not in its parameters."""
    apply, params = functional(model())

    @spmd(mesh=shared_mesh({"data": ranks}))
    @data_parallel
    def step(params, batch, way):
        loss, _ = value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)
        clip(params.values() if way == "values" else (p for p in params.values()), 1.0)
        return loss

    name = getattr(clip, "func", clip).__name__
    for way in ("values", "generator"):
        with pytest.raises(SpecError, match=rf"{name} was called.*got 4 tensors with .grad None.*clip=1.0\)"):
            step(params, X, way)


def test_clipping_gradients_that_are_there(mesh: Mesh) -> None:
    """Of what a step trains within, of a function given to run, and outside of both."""

    def inner(x):
        w = torch.full((3,), 2.0, requires_grad=True)
        frozen = torch.ones(3, requires_grad=True)
        (w * x).sum().backward()
        norm = nn.utils.clip_grad_norm_((p for p in (w, frozen)), 1.0)
        return w.grad, norm

    grad, norm = spmd(inner, mesh=mesh)(torch.tensor([3.0, 0.0, 4.0]))
    torch.testing.assert_close(grad.full(), torch.tensor([0.6, 0.0, 0.8]))
    assert norm.item() == 5
    assert mesh.run(lambda: float(nn.utils.clip_grad_norm_([torch.ones(2)], 1.0))) == [0.0, 0.0]
    assert float(nn.utils.clip_grad_norm_([torch.ones(2)], 1.0)) == 0


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_counts_indices(mesh: Mesh, layer: Any, shards: int | None) -> None:
    apply, params = functional(layer(3, 1, scale_grad_by_freq=True))
    with pytest.raises(SpecError, match=r"how often an index is in the batch.*scale_grad_by_freq=False"):
        gradients(mesh, lambda p, rows: apply(p, rows).mean(), params, torch.zeros(4, 1, dtype=torch.int64), shards)


@pytest.mark.parametrize("shards", [None, 2])
def test_reentrant_checkpointing_with_nothing_trained_before_it(mesh: Mesh, shards: int | None) -> None:
    """Beside a layer that is trained; torch only warns."""
    _, params = functional(model())

    def loss_fn(params, batch):
        hidden = checkpoint(lambda x: torch.tanh(x @ params["0.weight"].T), batch, use_reentrant=True)
        return (hidden @ params["2.weight"].T).square().mean()

    with pytest.raises(SpecError, match=r"reentrant activation checkpointing of inputs that.*use_reentrant=False"):
        gradients(mesh, loss_fn, params, X, shards)


def test_reentrant_checkpointing(mesh: Mesh) -> None:
    apply, params = functional(model())
    with pytest.raises(SpecError, match=r"reentrant activation checkpointing.*use_reentrant=False"):
        gradients(
            mesh,
            lambda p, batch: checkpoint(lambda x: apply(p, x), batch * p["0.bias"].sum(), use_reentrant=True).mean(),
            params,
            X,
        )


class Checkpointed(nn.Sequential):
    """Computed again in the backward pass, or not, as `gradient_checkpointing_enable` has models do."""

    again = False

    def forward(self, x: Tensor) -> Tensor:
        forward = super().forward
        return checkpoint(forward, x.detach().requires_grad_(), use_reentrant=True) if self.again else forward(x)


def test_what_changes_a_function_that_was_looked_at_before(mesh: Mesh) -> None:
    """Each step is looked at, though its functions have the code of another's: a part of the model trains nothing."""
    module = nn.Sequential(Checkpointed(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1))
    for again in (False, True):
        module[0].again = again
        apply, params = functional(module)

        def loss_fn(params, batch, apply=apply):
            return apply(params, batch).square().mean()

        if again:
            with pytest.raises(SpecError, match=r"reentrant activation checkpointing.*use_reentrant=False"):
                gradients(mesh, loss_fn, params, X)
        else:
            gradients(mesh, loss_fn, params, X)


class Reduced:
    """A loss that is an object, with what it computes, or how, in its attributes."""

    def __init__(self, reduce: Callable):
        self.reduce = reduce

    def __call__(self, w: Tensor, batch: Tensor) -> Tensor:
        return self.reduce(batch @ w)


@pytest.mark.parametrize("chosen", [lambda loss: loss, lambda loss: loss.__call__], ids=["object", "method"])
def test_losses_of_one_class_are_each_looked_at(mesh: Mesh, chosen: Callable) -> None:
    mean, total = (chosen(Reduced(reduce)) for reduce in (lambda x: x.mean(), lambda x: x.sum()))
    on_ranks = spmd(data_parallel(lambda w, batch: [grad(f)(w, batch) for f in (mean, total)]), mesh=mesh)
    with pytest.raises(SpecError, match="sum"):
        on_ranks(torch.ones(3), X)


class Dropped(nn.Module):
    """Two blocks with dropout, the first one computed again in the backward pass or not."""

    def __init__(self, again: bool):
        super().__init__()
        self.again = again
        self.first = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4))
        self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        return self.second(hidden)


@pytest.fixture(scope="module")
def alike() -> Iterator[list[Mesh]]:
    """Two meshes that make the same calls, and so draw with the same keys."""
    with Mesh({"data": 2}, seed=3) as one, Mesh({"data": 2}, seed=3) as other:
        yield [one, other]


@pytest.mark.parametrize("shards", [None, 4])
def test_checkpointing_with_dropout(alike: list[Mesh], shards: int | None) -> None:
    """The same masks in the backward pass, and after it: the same gradients as without, in steps with one key."""
    found = []
    for again, mesh in zip((False, True), alike, strict=True):
        torch.manual_seed(0)
        apply, params = functional(Dropped(again))

        def loss_fn(params, batch, apply=apply):
            return apply(params, batch).square().mean()

        found.append(gradients(mesh, loss_fn, params, X, shards))
    (plain, expected), (value, got) = found
    assert plain.item() == value.item()
    for name in expected:
        torch.testing.assert_close(got[name].full(), expected[name].full(), rtol=0, atol=0)
        assert expected[name].full().any()


def twice(gradient: Tensor) -> Tensor:
    return 2 * gradient


def hooked(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    params["w"].register_hook(twice)
    return (batch @ params["w"]).square().mean()


def hooked_within(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    out = batch @ params["w"]
    out.register_hook(twice)
    return out.square().mean()


@pytest.mark.parametrize("loss_fn", [hooked, hooked_within])
def test_hooks_run_once_though_the_loss_is_evaluated_again(mesh: Mesh, loss_fn: Callable) -> None:
    """The first call looks at more values of the loss. Each of them added the hook to the same parameter."""
    w = torch.ones(3, requires_grad=True)
    (X @ w).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [gradients(mesh, loss_fn, {"w": w.detach()}, X)[1]["w"].full() for _ in range(2)]
    for gradient in found:
        torch.testing.assert_close(gradient, 2 * w.grad)
    texts = [str(one.message) for one in caught]
    if loss_fn is hooked:
        assert texts and "a parameter's gradient, which gets that of this rank's samples" in texts[0]
        assert "change grads in the step" in texts[0]
    else:
        assert not texts


def test_hooks_of_virtual_shards(mesh: Mesh) -> None:
    """Those for a parameter would be registered anew by each of a rank's shards."""
    params = {"w": torch.ones(3)}
    with pytest.raises(SpecError, match=r"a parameter's gradient, which gets that of each virtual shard.*change grads"):
        gradients(mesh, hooked, params, X, shards=4)
    within = gradients(mesh, hooked_within, params, X, shards=4)[1]["w"].full()
    torch.testing.assert_close(within, gradients(mesh, hooked_within, params, X)[1]["w"].full())


def hooked_if_large(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return hooked(params, batch) if batch.abs().max() > 100 else hooked_within(params, batch)


def test_hooks_that_a_later_call_registers(mesh: Mesh) -> None:
    """Nothing else is looked at after the first call of a signature."""

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, batch):
        return value_and_grad(hooked_if_large)(params, batch)

    @spmd(mesh=mesh)
    @data_parallel(shards=4)
    def exact(params, batch):
        return value_and_grad(hooked_if_large)(params, batch)

    params = {"w": torch.ones(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in X, X, 1e6 * X, 1e6 * X:
            fetch(step(params, batch))
    (text,) = [str(one.message) for one in caught]
    assert "a parameter's gradient, which gets that of this rank's samples" in text
    fetch(exact(params, X))
    last = torch.cat([X[:-1], 1e6 * X[-1:]])  # which is not in the first shard of its rank
    with pytest.raises(SpecError, match="a parameter's gradient, which gets that of each virtual shard"):
        fetch(exact(params, last))


def test_a_hook_on_one_rank_alone(mesh: Mesh) -> None:
    def loss_fn(params, batch):
        return (hooked if axis_index("data") == 1 else hooked_within)(params, batch)

    with pytest.warns(UserWarning, match="a parameter's gradient, which gets that of this rank's samples"):
        gradients(mesh, loss_fn, {"w": torch.ones(3)}, X)


def test_a_hook_in_a_gradient_within_a_virtual_shard(mesh: Mesh) -> None:
    """Each shard has a leaf of its own there."""

    def penalised(params, batch):
        inner = grad(hooked, axes=())({"w": params["w"].detach()}, batch)["w"]
        return (batch @ (params["w"] * inner)).mean()

    params = {"w": torch.ones(3)}
    found = gradients(mesh, penalised, params, X, shards=4)[1]["w"].full()
    parts = [X[shard::4] for shard in range(4)]
    wanted = [4 * part.mean(0) * (part.t() @ (part @ params["w"])) / len(part) for part in parts]
    torch.testing.assert_close(found, torch.stack(wanted).mean(0))
