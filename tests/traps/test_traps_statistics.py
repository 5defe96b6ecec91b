"""What a step computes of its rank's samples together, or of one alone, and gives to its loss; and what is neither."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd import Mesh, all_gather, axis_size, data_parallel, grad, mean_of, pmean, psum, spmd, value_and_grad

generator = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(6, 3, generator=generator)}
BATCH = {
    "x": torch.randn(20, 6, generator=generator),
    "y": torch.randint(0, 3, (20,), generator=generator),
    "gain": torch.randn(20, generator=generator),
    "mask": (torch.rand(20, generator=generator) < 0.6).float(),
}


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh]) -> Mesh:
    return shared_mesh({"data": 2})


def warned(mesh: Mesh, step: Callable, results: list[Any] | None = None) -> list[str]:
    """What a step warns of; what it returns is added to `results`."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = spmd(data_parallel(step, batch="b"), mesh=mesh)(PARAMS, BATCH)
    if results is not None:
        results.append(result)
    return [str(one.message) for one in found]


def losses(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ p["w"], y, reduction="none")


def weighted(p: Any, x: Tensor, y: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    return (losses(p, x, y) * weight / scale).mean()


def advantages(p: Any, b: Any) -> Any:
    gain = (b["gain"] - b["gain"].mean()) / b["gain"].std()
    return value_and_grad(weighted)(p, b["x"], b["y"], gain)


def features(p: Any, b: Any) -> Any:
    x = (b["x"] - b["x"].mean(0, keepdim=True)).float()
    return value_and_grad(lambda p: losses(p, x, b["y"]).mean())(p)


def deviation_only(p: Any, b: Any) -> Any:
    scale = b["x"].std()
    return value_and_grad(lambda p, b: (losses(p, b["x"], b["y"]) / scale).mean())(p, b)


def shares_of_classes(p: Any, b: Any) -> Any:
    weight = 1 / (1 + b["y"].bincount(minlength=3))
    return value_and_grad(weighted)(p, b["x"], b["y"], weight[b["y"]])


def largest_priority(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], b["gain"].abs() / b["gain"].abs().max())


def hard_ones(p: Any, b: Any) -> Any:
    each = losses(p, b["x"], b["y"])
    return value_and_grad(weighted)(p, b["x"], b["y"], each >= each.quantile(0.5))


def returns(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], b["gain"].flip(0).cumsum(0).flip(0))


def discounted(p: Any, b: Any) -> Any:
    found, after = torch.zeros_like(b["gain"]), torch.zeros(())
    for time in reversed(range(len(b["gain"]))):
        after = b["gain"][time] + 0.9 * after
        found[time] = after
    return value_and_grad(weighted)(p, b["x"], b["y"], found)


def added_in_place(p: Any, b: Any) -> Any:
    found, total = [], torch.zeros(6)
    for row in b["x"]:
        total += row
        found.append(total.clone())
    return value_and_grad(weighted)(p, torch.stack(found), b["y"], b["gain"])


def whitened(p: Any, b: Any) -> Any:
    x = b["x"] @ torch.linalg.inv(torch.linalg.cholesky(b["x"].T @ b["x"])).T
    return value_and_grad(lambda p: losses(p, x, b["y"]).mean())(p)


def attended(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], b["gain"].softmax(0) * len(b["gain"]))


def neighbours(p: Any, b: Any) -> Any:
    away = torch.cdist(b["x"], b["x"]).fill_diagonal_(9.0).amin(1)
    return value_and_grad(weighted)(p, b["x"], b["y"], away)


def similar(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], (b["x"] @ b["x"].T).relu().sum(1))


def similar_by_einsum(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], torch.einsum("nd,md->nm", b["x"], b["x"]).amax(1))


def totals_of_classes(p: Any, b: Any) -> Any:
    total = torch.zeros(3).index_add(0, b["y"], b["gain"])
    return value_and_grad(weighted)(p, b["x"], b["y"], total[b["y"]])


def largest_of_classes(p: Any, b: Any) -> Any:
    most = torch.zeros(3).scatter_reduce_(0, b["y"], b["gain"], "amax")
    return value_and_grad(weighted)(p, b["x"], b["y"], most[b["y"]])


def principal(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], torch.linalg.svd(b["x"], full_matrices=False)[0][:, 0].abs())


def if_any(p: Any, b: Any) -> Any:
    return value_and_grad(weighted)(p, b["x"], b["y"], b["gain"] * (b["gain"] > 2).any())


def number(p: Any, b: Any) -> Any:
    scale = b["gain"].std().item()
    return value_and_grad(weighted)(p, b["x"], b["y"], b["gain"], scale)


def number_held(p: Any, b: Any) -> Any:
    centre = float(b["gain"].mean())
    return value_and_grad(lambda p: weighted(p, b["x"], b["y"], b["gain"] - centre))(p)


STATISTICS = {
    advantages: "mean",
    features: "mean",
    deviation_only: "std",
    shares_of_classes: "bincount",
    largest_priority: "max",
    hard_ones: "sort",
    returns: "cumsum",
    discounted: "add",
    added_in_place: "add_",
    whitened: "mm",
    attended: "_softmax",
    neighbours: "_cdist_forward",
    similar: "mm",
    similar_by_einsum: "bmm",
    totals_of_classes: "index_add",
    largest_of_classes: "scatter_reduce_",
    principal: "_linalg_svd",
    if_any: "any",
    number: "std",
    number_held: "mean",
}


@pytest.mark.parametrize("step", STATISTICS)
def test_statistics_of_a_ranks_samples(mesh: Mesh, step: Callable) -> None:
    (text,) = warned(mesh, step)
    assert " is not a mean over samples of the whole batch: it is given what the step computed" in text
    assert (
        f"which comes of {STATISTICS[step]} at test_traps_statistics.py:" in text and "pmean(x.mean(), 'data')" in text
    )


def averaged(p: Any, b: Any) -> Any:
    away = b["gain"] - pmean(b["gain"].mean(), "data")
    return value_and_grad(weighted)(p, b["x"], b["y"], away / pmean(away.square().mean(), "data").sqrt())


def gathered(p: Any, b: Any) -> Any:
    gain = all_gather(b["gain"], "data", tiled=True)
    return value_and_grad(weighted)(p, b["x"], b["y"], (b["gain"] - gain.mean()) / gain.std())


def of_each_sample(p: Any, b: Any) -> Any:
    x = (b["x"] - b["x"].mean(1, keepdim=True)) / b["x"].norm(dim=1, keepdim=True)
    order = b["gain"].argsort()  # as for sequences that are packed by length
    x = (x @ torch.eye(6)).cumsum(1)[(b["y"] + 1).cumsum(0) % len(x)]
    return value_and_grad(weighted)(p, x[order], b["y"][order], b["gain"][order])


def within_each_sample(p: Any, b: Any) -> Any:
    """Attention over, distances among, and factors of what each sample has; its distances to what all ranks have."""
    sets = b["x"].view(-1, 3, 2)
    attended = (sets @ sets.mT).softmax(-1) @ sets
    attended = (
        attended + torch.cdist(sets, sets).sum(-1, keepdim=True) + torch.linalg.svd(sets)[1].sum(-1)[:, None, None]
    )
    x = attended.flatten(1) * b["x"].softmax(1) * (b["x"] > 0).any(1, keepdim=True)
    x = x + torch.cdist(x, p["w"].T).sum(1, keepdim=True) + (x @ p["w"]).sum(1, keepdim=True)
    spread = torch.zeros(2 * len(x), 6).index_add(0, 2 * torch.arange(len(x)), x)  # each in a place of its own
    return value_and_grad(weighted)(p, spread[::2], b["y"], b["gain"])


def one_by_one(p: Any, b: Any) -> Any:
    """A loop over the samples, and one over what each of them has."""
    gain = torch.zeros_like(b["gain"])
    for at in range(len(gain)):
        gain[at] = b["gain"][at] * b["x"][at, 0] + b["x"][at, 1]
    last = torch.zeros(len(gain))
    for step in b["x"].T:
        last = step + 0.9 * last
    x = torch.stack([torch.cat([row[:3] - row[0] * row[1], row[3:]]) for row in b["x"]])
    table = b["x"][:, :1] * torch.arange(10.0)  # each sample has as many numbers as there are samples here
    last = last + torch.stack([row.mean() + row[0] - row[1] for row in table])
    final = torch.zeros(len(gain))
    for step in table.T:  # which are as many steps
        final = step + 0.9 * final
    return value_and_grad(weighted)(p, x, b["y"], gain + last + final)


def of_parameters(p: Any, b: Any) -> Any:
    scale = p["w"].std() * b["x"].max(dim=1).values
    return value_and_grad(weighted)(p, b["x"], b["y"], scale)


def a_count(p: Any, b: Any) -> Any:
    count = b["mask"].sum()
    return value_and_grad(lambda p, b: mean_of((losses(p, b["x"], b["y"]) * b["mask"]).sum(), count))(p, b)


def of_gradients(p: Any, b: Any) -> Any:
    """SAM, and adversarial samples."""
    f = lambda p, x: losses(p, x, b["y"]).mean()  # noqa: E731
    up, along = grad(f, argnums=(0, 1))(p, b["x"])
    return value_and_grad(f)({"w": p["w"] + 0.1 * up["w"] / up["w"].norm()}, b["x"] + along.sign())


def of_torchs_gradients(p: Any, b: Any) -> Any:
    x = b["x"].clone().requires_grad_()
    (along,) = torch.autograd.grad(F.cross_entropy(x @ p["w"], b["y"]), x)
    return value_and_grad(lambda p, x: losses(p, x, b["y"]).mean())(p, b["x"] + 0.1 * along.sign())


def numbers(p: Any, b: Any) -> Any:
    """One that ranks share, one of a single sample, one that is not given to the loss, and a constant."""
    scale, first, _ = pmean(b["gain"].mean(), "data").item(), b["gain"][0].item(), b["gain"].std().item()
    largest = b["gain"].clamp(max=0.5).max().item()
    return value_and_grad(lambda p: weighted(p, b["x"], b["y"], b["gain"] - first, scale / 0.5))(p), largest


NONE = (averaged, gathered, of_each_sample, within_each_sample, one_by_one, of_parameters, a_count)
NONE += (of_gradients, of_torchs_gradients, numbers)


@pytest.mark.parametrize("step", NONE)
def test_what_is_none(mesh: Mesh, step: Callable) -> None:
    assert warned(mesh, step) == []


# -- some of the samples -----------------------------------------------------------------------------------------------


def mean_loss(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return losses(p, x, y).mean()


def masked(p: Any, b: Any) -> Any:
    keep = b["y"] != 0
    return value_and_grad(mean_loss)(p, b["x"][keep], b["y"][keep])


def by_nonzero(p: Any, b: Any) -> Any:
    keep = b["mask"].nonzero().squeeze(1)
    return value_and_grad(lambda p: mean_loss(p, 2 * b["x"].index_select(0, keep), b["y"][keep]))(p)


def repeated(p: Any, b: Any) -> Any:
    return value_and_grad(mean_loss)(p, *(each.repeat_interleave(b["y"], 0) for each in (b["x"], b["y"])))


@pytest.mark.parametrize(("step", "by"), [(masked, "index"), (by_nonzero, "nonzero"), (repeated, "repeat_interleave")])
def test_samples_chosen_by_their_values(mesh: Mesh, step: Callable, by: str) -> None:
    (text,) = warned(mesh, step)
    assert " is not a mean over samples of the whole batch: it is one over those that the step chose" in text
    assert (
        f"for 10 samples, which comes of {by} at test_traps_statistics.py:" in text
        and "mean_of(losses.sum(), len(los" in text
    )


def counted(p: Any, b: Any) -> Any:
    keep = b["y"] != 0

    def loss_fn(p: Any, x: Tensor, y: Tensor) -> Any:
        return mean_of(losses(p, x, y).sum(), len(y))

    return value_and_grad(loss_fn)(p, b["x"][keep], b["y"][keep])


def filled_in(p: Any, b: Any) -> Any:
    """As edges of graphs, and rows that are put back."""
    x, keep = b["x"].clone(), b["y"] != 0
    x[keep] = 2 * b["x"][keep]
    return value_and_grad(lambda p, x, y: mean_loss(p, x.index_add(0, keep.nonzero()[:, 0], x[keep]), y))(p, x, b["y"])


def summed_by_sample(p: Any, b: Any) -> Any:
    """As messages along edges."""
    rows, columns = (b["x"] > 0).nonzero().T

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return torch.zeros(len(x)).index_add(0, rows, (x @ p["w"])[rows, columns % 3]).square().mean()

    return value_and_grad(loss_fn)(p, b["x"])


def of_all(p: Any, b: Any) -> Any:
    x, y = all_gather((b["x"], b["y"]), "data", tiled=True)
    return value_and_grad(mean_loss)(p, x[y != 0], y[y != 0])


def chosen_features(p: Any, b: Any) -> Any:
    """The same ones of every sample, whose features lie in dimension 0 afterwards."""
    features = b["x"][:, torch.tensor([True, True, False, True, False, True])].flatten()
    return value_and_grad(lambda p, x: (x[:, None] * p["w"][0]).square().mean())(p, features)


@pytest.mark.parametrize("step", [counted, filled_in, summed_by_sample, of_all, chosen_features])
def test_samples_chosen_in_another_way(mesh: Mesh, step: Callable) -> None:
    assert warned(mesh, step) == []


# -- tasks of MAML, one by one -----------------------------------------------------------------------------------------


def inner(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"] - 1).square().mean()


def adapted(p: Any, b: Any, up: Callable) -> Tensor:
    found = [inner({"w": p["w"] - 0.1 * up(p, x)["w"]}, x + 1) for x in b["x"]]
    return torch.stack(found).mean()


def test_a_gradient_for_each_sample_within_another(mesh: Mesh) -> None:
    one = value_and_grad(lambda p, b: adapted(p, b, torch.func.grad(inner)))(PARAMS, BATCH)
    for up, expected in ((grad(inner), 1), (grad(inner, axes=()), 0), (torch.func.grad(inner), 0)):
        found: list[Any] = []

        def step(p: Any, b: Any, up: Callable = up) -> Any:
            return value_and_grad(lambda p, b: adapted(p, b, up))(p, b)

        texts = warned(mesh, step, found)
        assert len(texts) == expected and torch.allclose(found[0][0].full(), one[0]) == (not expected)
        for text in texts:
            assert "for a single sample" in text and "got a row of the batch, of shape [6]" in text
            assert "grad(f, axes=())" in text


def test_a_gradient_for_all_within_another(mesh: Mesh) -> None:
    def penalty(p: Any, b: Any) -> Tensor:
        return grad(inner)(p, b["x"])["w"].square().sum()

    assert warned(mesh, lambda p, b: value_and_grad(penalty)(p, b)) == []


# -- sums over ranks of each one's mean --------------------------------------------------------------------------------


def cross_entropy(w, b, **options):
    return F.cross_entropy(b["x"] @ w, b["y"], **options)


SUMMED_MEANS = {
    "a loss": lambda w, b: psum(cross_entropy(w, b), "data") / axis_size("data"),
    "a loss, divided before": lambda w, b: psum(cross_entropy(w, b) / axis_size("data"), "data"),
    "a loss with a penalty": lambda w, b: psum(cross_entropy(w, b) + 0.1 * w.square().sum(), "data") / 2,
    "a metric": lambda w, b: psum(((b["x"] @ w).argmax(1) == b["y"]).float().mean(), "data") / 2 + w.sum(),
    "statistics of a batch norm": lambda w, b: (psum(b["x"].mean(0), "data") / 2).sum() + w.sum(),
}
TAKEN_RIGHT = {
    "pmean": lambda w, b: pmean(cross_entropy(w, b), "data"),
    "a sum and a count": lambda w, b: psum(cross_entropy(w, b, reduction="sum"), "data") / psum(len(b["x"]), "data"),
    "weighted by hand": lambda w, b: psum(cross_entropy(w, b) * len(b["x"]), "data") / psum(len(b["x"]), "data"),
    "sums of means over features": lambda w, b: (
        psum(b["x"].mean(1).sum(), "data") / psum(len(b["x"]), "data") + w.sum()
    ),
}


@pytest.mark.parametrize("summed", SUMMED_MEANS.values(), ids=SUMMED_MEANS)
@pytest.mark.parametrize("differentiated", [True, False])
def test_means_of_one_rank_that_are_summed(shared_mesh, summed, differentiated):
    """They are those of the batch until one comes that does not divide by the ranks."""
    take = value_and_grad(summed) if differentiated else lambda w, b: (summed(w, b), 0)
    step = spmd(data_parallel(lambda w, batch: take(w, batch)), mesh=shared_mesh({"data": 2}))
    with pytest.warns(UserWarning, match=r"means over the samples of each rank along 'data'.*write pmean\(x, 'data'\)"):
        step(torch.ones(3, 2), {"x": torch.randn(8, 3), "y": torch.arange(8) % 2})


@pytest.mark.parametrize("loss_fn", TAKEN_RIGHT.values(), ids=TAKEN_RIGHT)
def test_means_over_the_ranks_that_are_right(shared_mesh, loss_fn):
    step = spmd(data_parallel(lambda w, batch: value_and_grad(loss_fn)(w, batch)[0]), mesh=shared_mesh({"data": 2}))
    alone = spmd(data_parallel(lambda w, batch: value_and_grad(loss_fn)(w, batch)[0]), mesh=shared_mesh({"data": 1}))
    for count in (8, 7):
        arguments = torch.ones(3, 2), {"x": torch.randn(count, 3), "y": torch.arange(count) % 2}
        torch.testing.assert_close(step(*arguments).full(), alone(*arguments).full())
