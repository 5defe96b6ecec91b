"""`mean_of`: the mean over the mesh of a total by a count, at any number of ranks what torch computes on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd import Mesh, SpecError, data_parallel, grad, mean_of, spmd, value_and_grad

PAD = -100


def padded(samples: int = 7) -> dict[str, Tensor]:
    """Sequences of classes, of which some positions don't count: in the last samples none does."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (samples, 5), generator=generator)
    y[torch.rand(samples, 5, generator=generator) < 0.4] = PAD
    y[samples // 2 :] = PAD
    y[0, 0] = 1
    return {"x": torch.randn(samples, 5, 3, generator=generator), "y": y}


def weights() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def of_tokens(w: Tensor, batch: Any) -> Any:
    total = F.cross_entropy((batch["x"] @ w.t()).flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return mean_of(total, (batch["y"] != PAD).sum())


def of_classes(w: Tensor, batch: Any) -> Any:
    share = torch.tensor([1.0, 0.5, 3.0, 0.1])
    y = batch["y"].flatten()
    total = F.cross_entropy((batch["x"] @ w.t()).flatten(0, 1), y, weight=share, reduction="sum")
    return mean_of(total, share[y[y != PAD]].sum())


def expected(w: Tensor, batch: Any, **options: Any) -> tuple[Tensor, Tensor]:
    w = w.clone().requires_grad_()
    value = F.cross_entropy((batch["x"] @ w.t()).flatten(0, 1), batch["y"].flatten(), **options)
    value.backward()
    assert w.grad is not None
    return value.detach(), w.grad


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_padded_tokens_and_class_weights(shared_mesh: Callable[..., Mesh], ranks: int, shards: int | None) -> None:
    share = torch.tensor([1.0, 0.5, 3.0, 0.1])
    for loss_fn, options in ((of_tokens, {}), (of_classes, {"weight": share})):

        @spmd(mesh=shared_mesh({"data": ranks}))
        @data_parallel(shards=shards)
        def step(w, batch, loss_fn=loss_fn):
            return value_and_grad(loss_fn)(w, batch)

        value, gradient = step(weights(), padded())
        for got, want in zip((value.full(), gradient.full()), expected(weights(), padded(), **options), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shards", [None, 4])
def test_means_over_something_else_give_a_warning(shared_mesh: Callable[..., Mesh], shards: int | None) -> None:
    batch, even, uneven = padded(), torch.ones(4), torch.arange(1.0, 5.0)
    whole = {"x": batch["x"], "y": batch["y"].clamp(0)}

    def call(batch, **options):
        @spmd(mesh=shared_mesh({"data": 2}))
        @data_parallel(shards=shards)
        def step(w, batch):
            return value_and_grad(
                lambda w, b: F.cross_entropy((b["x"] @ w.t()).flatten(0, 1), b["y"].flatten(), **options)
            )(w, batch)

        step(weights(), batch)[0].full()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for options in ({}, {"weight": even}, {"label_smoothing": 0.1}):
            call(whole, **options)
    assert not found
    for given, options, what in ((batch, {}, "ignored targets"), (whole, {"weight": uneven}, "class weights")):
        with pytest.warns(UserWarning, match=rf"not that of the whole batch \(got {what}\): return mean_of"):
            call(given, **options)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("samples", [2, 8])
def test_targets_shifted_by_one(shared_mesh: Callable[..., Mesh], shards: int | None, samples: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (samples, 5), generator=generator)
    batch = {"x": torch.randn(samples, 5, 3, generator=generator), "y": F.pad(tokens, (0, 1), value=PAD)[:, 1:]}

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def step(w, batch):
        return value_and_grad(lambda w, b: F.cross_entropy((b["x"] @ w.t()).transpose(1, 2), b["y"]))(w, batch)

    def flat(w, b):
        return F.cross_entropy((b["x"] @ w.t()).flatten(0, 1), b["y"].flatten())

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def flat_step(w, batch):
        return value_and_grad(flat)(w, batch)

    value, gradient = expected(weights(), batch)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for one in step, flat_step:
            got = one(weights(), batch)
            torch.testing.assert_close((got[0].full(), got[1].full()), (value, gradient))
    assert not found
    batch["y"][:, -2] = PAD  # padding, of which another rank's samples may have less
    with pytest.warns(UserWarning, match=r"not that of the whole batch \(got ignored targets\)"):
        spmd(data_parallel(lambda w, batch: grad(flat)(w, batch), shards=shards), mesh=shared_mesh({"data": 2}))(
            weights(), batch
        ).full()


def test_same_bits_at_any_number_of_ranks(shared_mesh: Callable[..., Mesh]) -> None:
    found = set()
    for ranks in (1, 2, 3):

        @spmd(mesh=shared_mesh({"data": ranks}))
        @data_parallel(shards=4)
        def step(w, batch):
            return value_and_grad(of_tokens)(w, batch)

        found.add(tuple(bytes(leaf.full().numpy().tobytes()) for leaf in step(weights(), padded())))
    assert len(found) == 1


@pytest.mark.parametrize("shards", [None, 2])
def test_with_aux(shared_mesh: Callable[..., Mesh], shards: int | None) -> None:
    def loss_fn(w, batch):
        pair = of_tokens(w, batch)
        return pair, {"samples": batch["x"].sum(), "name": "tokens"}

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def step(w, batch):
        return value_and_grad(loss_fn, has_aux=True)(w, batch)

    batch = padded(8)
    (value, aux), gradient = step(weights(), batch)
    want = expected(weights(), batch)
    torch.testing.assert_close(value.full(), want[0])
    torch.testing.assert_close(gradient.full(), want[1])
    torch.testing.assert_close(aux["samples"].full(), batch["x"].sum() / 2)  # aux is averaged over samples as ever
    assert aux["name"] == "tokens"


def test_more_ranks_than_samples(shared_mesh: Callable[..., Mesh]) -> None:
    @spmd(mesh=shared_mesh({"data": 3}))
    @data_parallel
    def step(w, batch):
        return value_and_grad(of_tokens)(w, batch)

    value, gradient = step(weights(), padded(2))
    want = expected(weights(), padded(2))
    torch.testing.assert_close(value.full(), want[0])
    torch.testing.assert_close(gradient.full(), want[1])


@pytest.mark.parametrize("shards", [None, 2])
def test_nothing_counts_anywhere(shared_mesh: Callable[..., Mesh], shards: int | None) -> None:
    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def step(w, batch):
        return value_and_grad(of_tokens)(w, batch)

    batch = padded(4)
    batch["y"] = torch.full_like(batch["y"], PAD)
    value, gradient = step(weights(), batch)
    want = expected(weights(), batch)
    torch.testing.assert_close(value.full(), want[0], equal_nan=True)
    assert value.full().isnan()
    if shards is None:
        torch.testing.assert_close(gradient.full(), want[1], equal_nan=True)
    else:
        assert gradient.full().isnan().all()


def test_nothing_counts_on_some_ranks_or_anywhere(shared_mesh: Callable[..., Mesh]) -> None:
    """What docs/losses.md adds to the count, which a `clamp(min=1)` would make too large by every other rank."""

    def loss_fn(w: Tensor, batch: Any) -> Any:
        return mean_of((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum() + 1e-9)

    @spmd(mesh=shared_mesh({"data": 3}))
    @data_parallel
    def step(w, batch):
        return value_and_grad(loss_fn)(w, batch)

    w, x = torch.tensor(2.0), torch.arange(1.0, 6.0)
    for mask, mean in ((torch.arange(5) == 3, 4.0), (torch.zeros(5, dtype=torch.bool), 0.0)):
        value, gradient = step(w, {"x": x, "mask": mask})
        assert (value.item(), gradient.item()) == pytest.approx((2 * mean, mean))


def test_second_derivatives(shared_mesh: Callable[..., Mesh]) -> None:
    """Of a mean of cubes, 2 * 3 * mean(x**3 w); the count is a constant to them."""

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(w, batch):
        def inner(w):
            return grad(lambda w: mean_of((w * batch).pow(3).sum(), len(batch)))(w)

        return grad(inner)(w)

    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(step(torch.tensor(2.0), x).full(), (6 * 2 * x**3).mean())


def test_a_pair_is_the_value_alone_and_no_number() -> None:
    def both(w, x):
        return (w * x).mean(), {"masked": mean_of((w * x).sum(), 4)}

    w, x = torch.tensor(2.0), torch.tensor([3.0, 5.0])
    with pytest.raises(SpecError, match=r"aux has a mean_of.*got aux\['masked'\].*means over samples"):
        value_and_grad(both, has_aux=True)(w, x)
    for use in (lambda pair: pair.detach(), lambda pair: pair**2, lambda pair: pair.item(), lambda pair: pair.exp()):
        with pytest.raises(SpecError, match=r"a mean_of is a pair of numbers.*the value that value_and_grad returns"):
            value_and_grad(lambda w, x, use=use: use(mean_of((w * x).sum(), 4)))(w, x)


def test_outside_a_region() -> None:
    value, gradient = value_and_grad(lambda w, x: mean_of((w * x).sum(), 4))(
        torch.tensor(2.0), torch.tensor([3.0, 5.0])
    )
    assert value.item() == 4.0 and gradient.item() == 2.0


def test_a_count_that_is_not_on_the_host_is_not_read() -> None:
    """On a GPU that would wait for all work there, and no graph could capture it. ("meta" has no values to read.)"""
    w, x = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    value, gradient = value_and_grad(lambda w, x: mean_of((w * x).sum(), x.sum()))(w, x)
    assert (value.shape, value.dtype, gradient.shape, gradient.dtype) == ((), w.dtype, w.shape, w.dtype)


@pytest.mark.parametrize(
    ("total", "count", "text"),
    [
        (torch.zeros(2), 1, r'mean_of got an unexpected value for argument "total".*got torch.float32\[2\]'),
        (torch.tensor(1), 1, r'argument "total".*floating-point'),
        (torch.tensor(1.0), torch.ones(2), r'argument "count".*got torch.float32\[2\]'),
        (torch.tensor(1.0), "3", r'argument "count".*got str'),
    ],
)
def test_refused(total: Any, count: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        mean_of(total, count)
