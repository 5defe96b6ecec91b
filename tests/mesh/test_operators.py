"""Torch's functions and Python's operators on Arrays: what they give is what they give on plain tensors."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spmd import (
    Array,
    Loader,
    P,
    PeerLost,
    SpecError,
    axis_index,
    data_parallel,
    fetch,
    grad,
    pmean,
    put,
    spmd,
    value_and_grad,
)

pytestmark = pytest.mark.usefixtures("operators_are_imported")

SPECS = {"whole": P(), "rows": P("data"), "columns": P(None, "model"), "both": P("data", "model")}

# x and y are 4 x 6, v is a row of 6, w is 6 x 4, i is of integers and b of booleans, 4 x 6.
ELEMENT_BY_ELEMENT = """
x + y; x - y; x * y; x / y; x // y; x % y; x ** 2; 2 ** x; 1 - x; 1 / (x + 4); 7 // (x + 4); -x; +x; abs(x)
x + 1; 2 * x; x + v; v * x; x - v; x > y; x >= y; x < y; x <= y; x == y; x != y; x > 0; x == 1.0
i << 1; i >> 1; 1 << i.abs(); torch.real(x); x.real
i & 3; i | 1; i ^ i; True & b; 3 | i; ~b; b & b; b | ~b; torch.logical_and(b, ~b); torch.logical_xor(b, b)
torch.abs(x); torch.exp(x); torch.log(x + 5); torch.sqrt(x + 5); torch.rsqrt(x + 5); torch.sin(x); torch.cos(x)
torch.tan(x); torch.tanh(x); torch.sinh(x); torch.cosh(x); torch.asinh(x); torch.atan(x); torch.sigmoid(x)
torch.relu(x); torch.square(x); torch.sign(x); torch.sgn(x); torch.ceil(x); torch.floor(x); torch.round(x)
torch.trunc(x); torch.frac(x); torch.erf(x); torch.erfc(x); torch.expm1(x); torch.log1p(x + 4); torch.log2(x + 5)
torch.log10(x + 5); torch.exp2(x); torch.neg(x); torch.reciprocal(x + 9); torch.isnan(x); torch.isfinite(x)
torch.isinf(x); torch.clamp(x, -1, 1); x.clamp(min=0); torch.clip(x, 0, 1); torch.maximum(x, y); torch.minimum(x, y)
torch.fmax(x, y); torch.fmin(x, y); torch.atan2(x, y); torch.hypot(x, y); torch.copysign(x, y); torch.lerp(x, y, 0.5)
torch.where(x > 0, x, y); torch.where(b, x, y); torch.addcmul(x, x, y); torch.addcdiv(x, x, y + 9)
torch.xlogy(x, y + 9)
torch.nan_to_num(x); torch.heaviside(x, y); torch.fmod(x, y); torch.remainder(x, y); torch.float_power(x, 2)
torch.logaddexp(x, y); torch.ones_like(x); torch.zeros_like(x); x.clone(); x.detach(); x.double(); x.long(); x.bool()
x.to(torch.float64); x.int(); x.half(); torch.add(x, y, alpha=2); torch.sub(x, y, alpha=2); x.add(y); x.mul(2)
F.relu(x); F.gelu(x); F.silu(x); F.elu(x); F.leaky_relu(x); F.softplus(x); F.logsigmoid(x); F.hardtanh(x); F.mish(x)
"""
OTHERS = """
x.sum(()); torch.sum(input=x); x.half().sum(); torch.sum(x, dtype=torch.float64)
x.sum(); x.sum(0); x.sum(1, keepdim=True); x.mean(); x.mean(1); x.prod(1); x.std(); x.var(0); x.max(); x.min()
x.max(1).values; x.argmax(1); x.argmin(0); x.amax(0); x.amin(1); x.norm(); x.median(); x.cumsum(0)
x.cumsum(1); x.cumprod(1); x.cumsum(-1); x.cumprod(-2); x.logcumsumexp(-1); x.cummax(-1).values; x.cummin(-2).indices
torch.sum(x); torch.mean(x, 0); torch.logsumexp(x, 1); b.any(); b.all(); b.sum(); torch.count_nonzero(x); x.nansum()
x.reshape(6, 4); x.view(24); x.flatten(); x.t(); x.T; x.transpose(0, 1); x.permute(1, 0); x.unsqueeze(0); x[None]
x.squeeze(); x.expand(2, 4, 6); x.repeat(2, 1); x.flip(0); x.roll(1, 0); torch.cat([x, y]); torch.cat([x, y], 1)
torch.stack([x, y]); x.chunk(2)[0]; x.split(2)[1]; torch.unbind(x)[1]; x.narrow(0, 1, 2); x.select(1, 2); x.diag()
x[0]; x[1:3]; x[:, 2]; x[..., -1]; x[[0, 2]]; x[b]; x[1, 2]; x[::2]
x[torch.tensor([1, 0])]; x.index_select(0, torch.tensor([1]))
x @ w; torch.matmul(x, w); x.mm(w); torch.einsum("ij,jk->ik", x, w); torch.outer(v, v); v @ v; torch.dot(v, v); x @ v
F.softmax(x, 1); F.log_softmax(x, 0); x.softmax(-1); F.layer_norm(x, (6,)); F.normalize(x); F.one_hot(i % 3)
F.mse_loss(x, y); F.l1_loss(x, y); F.cross_entropy(x, i[:, 0] % 6); F.linear(x, w.t()); F.pad(x, (1, 1))
F.cross_entropy(x, i[:, 0].clamp(0, 5), ignore_index=0); F.nll_loss(x, i[:, 0] % 6, weight=torch.arange(6.0))
F.cross_entropy(x, i[:, 1] % 6, weight=torch.arange(6.0), label_smoothing=0.1); torch.ones(6).to(x); v.to(x.double())
torch.ones((), dtype=torch.int32).type_as(x); x[:, :0].unflatten(1, (2, 0, 0)); x[:0].sum(0); x[:, :0].mean(0)
x.mT; x.H; x.mH; (x * 1j).imag; 1.0 in x; x[0, 0].item() in x; torch.where(b)[1]; torch.where(x[:, 0] > 0)[0]
torch.linalg.pinv(x * 1j + y); F.cosine_embedding_loss(x, y, torch.ones(4)); (x.half() + 1).mean(0)
F.conv1d(x[None], torch.ones(2, 4, 3), padding=1); F.conv1d(x[:, None], torch.ones(1, 1, 3))
F.conv1d(x, torch.ones(2, 4, 3)); x.data; x.is_cpu; x.is_cuda
F.conv_transpose1d(x[None], torch.ones(4, 2, 3), stride=2); F.conv1d(torch.ones(1, 6, 5), x[:, :, None])
x.sort(1).values; x.topk(2, 1).values; x.tril(); x.triu(); x.diagonal()
torch.bincount(i.flatten() + 9); b.byte().any(); b.byte().any(0); b.byte().all(1); b.byte().sum(0, dtype=torch.uint8)
x.gather(1, i.abs() % 6); x.masked_fill(b, 0.0); x.scatter(1, i.abs() % 6, 0.0); torch.allclose(x, x); torch.equal(x, y)
x[:, 0] @ x; F.linear(v, x); F.linear(x.t()[:, None, :], x.t(), torch.ones(6)); F.linear(x[:, None], w.t(), v[:4])
torch.logsumexp(x[:, None], 1, keepdim=True); torch.logsumexp(x, 0, keepdim=True)
torch.linalg.norm(x); torch.linalg.svdvals(x); torch.cov(x); torch.cdist(x, y); x.unique(); torch.histc(x, 4)
"""


def expressions(text: str) -> list[str]:
    return [one.strip() for line in text.strip().split("\n") for one in line.split("; ")]


def operands() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 6, generator=generator)
    integers = torch.randint(-4, 5, (4, 6), generator=generator)
    return {"x": x, "y": y, "v": torch.randn(6, generator=generator), "w": x.T.clone(), "i": integers, "b": x > y}


def evaluated(text: str, names: dict[str, Any]) -> Any:
    return eval(text, {"torch": torch, "F": torch.nn.functional, **names})


def assert_as_plain(text: str, found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, Array), text
        assert found.dtype == expected.dtype and tuple(found.shape) == tuple(expected.shape), text
        torch.testing.assert_close(found.full(), expected, equal_nan=True, msg=text)
    else:
        assert found == expected, text


@pytest.mark.parametrize(
    ("axes", "name", "step"),
    [
        *(({"data": 2}, "rows", 1), ({"data": 2, "model": 2}, "both", 5)),
        *(pytest.param({"data": 2, "model": 2}, name, 1, marks=pytest.mark.long) for name in SPECS),
    ],
    ids=str,
)
def test_results_are_those_of_plain_tensors(shared_mesh: Any, axes: dict[str, int], name: str, step: int) -> None:
    """Of all expressions, or of one of every few."""
    mesh, plain, spec = shared_mesh(axes), operands(), SPECS[name]
    arrays: dict[str, Any] = {name: put(value, mesh=mesh) for name, value in plain.items()}
    arrays |= {name: put(plain[name], spec, mesh=mesh) for name in ("x", "y", "i", "b")}
    alike, others = expressions(ELEMENT_BY_ELEMENT), expressions(OTHERS)
    assert len(set(alike)) + len(set(others)) >= 150
    alike, others = alike[::step], others[::step]
    for text in alike:
        found = evaluated(text, arrays)
        assert_as_plain(text, found, evaluated(text, plain))
        assert found.spec == spec, f"{text} stays cut as it was"
    for text in others * 2:  # the second time the ranks know whether shards will do
        assert_as_plain(text, evaluated(text, arrays), evaluated(text, plain))
    mixed = {**arrays, "y": plain["y"], "v": plain["v"], "w": plain["w"]}
    for text in alike[:20]:
        assert_as_plain(f"{text}, with plain tensors", evaluated(text, mixed), evaluated(text, plain))


# What is cut stays cut where each rank has what it needs for its part, as DTensor has it.
KEPT = {
    "rows": {"x.sum(1)": P("data"), "x @ w": P("data"), "x.softmax(1)": P("data"), "x.t()": P(None, "data")},
    "columns": {"x.sum(0)": P("model"), "x.cumsum(0)": P(None, "model"), "x[1:3]": P(None, "model"), "x @ w": P()},
    "both": {"x.t()": P("model", "data"), "x.mean(1)": P("data"), "x[None]": P(None, "data", "model"), "x.sum()": P()},
}


@pytest.mark.parametrize("name", KEPT)
def test_results_stay_cut_as_dtensor_has_them(shared_mesh: Any, name: str) -> None:
    mesh, plain = shared_mesh({"data": 2, "model": 2}), operands()
    names = {"x": put(plain["x"], SPECS[name], mesh=mesh), "w": put(plain["w"], mesh=mesh)}
    for text, spec in KEPT[name].items():
        for _ in range(2):  # known by then
            found = evaluated(text, names)
            assert_as_plain(text, found, evaluated(text, plain))
            assert found.spec == spec, text


def test_what_is_not_known_yet_is_not_taken_to_be_as_before(shared_mesh: Any) -> None:
    """An operation called before with another slice, type or number may have left its result cut in another way."""
    mesh, plain = shared_mesh({"data": 2}), torch.arange(24.0).view(4, 6)
    for before, text in (
        ("x[:, :3]", "torch.relu(x[1:, ::2])"),
        ("x[1:, ::2]", "torch.linalg.cross(x[:, :3], x[:, 1:4])"),
        ("x[:, :3]", "x[:, 2:] + torch.ones(4)"),
        ("x[:, :3]", "x[1:, ::2].sum()"),
        ("F.dropout(x, 0.0)", "F.dropout(x, 1.0) * 2"),
        ("x.half()", "x.to(torch.float64)"),
        ("x[x > 3]", "x[x > 17] * 2"),
        ("x[:, : x[0, 3].long()]", "x[:, : x[0, 4].long()] + torch.ones(4)"),
    ):
        x = put(plain, P("data"), mesh=mesh)
        evaluated(before, {"x": x})
        assert_as_plain(f"{text}, after {before}", evaluated(text, {"x": x}), evaluated(text, {"x": plain}))


def test_what_a_step_is_given_is_not_taken_to_be_as_before(shared_mesh: Any) -> None:
    mesh, plain = shared_mesh({"data": 2}), torch.arange(24).view(4, 6)
    x = put(plain, P("data"), mesh=mesh)
    _ = x[1:, ::2]
    assert float(spmd(torch.sum, mesh=mesh, in_specs=P())(x[:, :3])) == plain[:, :3].sum()
    twice = spmd(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert torch.equal(twice(x[:, :3]).full(), plain[:, :3] * 2)


def test_a_step_is_given_what_values_have_sized(shared_mesh: Any) -> None:
    """By a step, whose next result may have another size."""
    mesh = shared_mesh({"data": 2})
    positive = spmd(lambda x: x[x > 0], mesh=mesh)
    mean = spmd(lambda x: pmean(x.mean(), "data"), mesh=mesh, in_specs=P("data"))
    positive(torch.tensor([1.0, 2, 3, 4, 5, -1]))
    assert float(mean(positive(torch.tensor([1.0, 2, 3, 4, 5, 6])))) == 3.5
    assert float(mean(positive(torch.tensor([1.0, 2, 3, 4, -1, -1])))) == 2.5
    uneven = spmd(
        data_parallel(lambda batch: value_and_grad(lambda w: (w * batch).mean())(torch.ones(()))[0]), mesh=mesh
    )
    for x in (torch.tensor([1.0, 2, 3, 4, -1, -1]), torch.tensor([1.0, 2, 3, 4, 50, -1])):
        for _ in range(2):
            assert float(uneven(positive(x))) == x[x > 0].mean()
    found = spmd(lambda x: x[x > 0], mesh=mesh)
    for numbers in ([1.0, 2, 3, 4, -1, -1], [1.0, 2, 3, 4, -1, -1], [1.0, -1, -1, 4, 50, -1], [1.0, 2, -1, -1, -1, -1]):
        x = torch.tensor(numbers)
        assert float(uneven(found(x) * 2)) == pytest.approx(float(x[x > 0].mean() * 2))
    for _ in range(2):
        with pytest.raises(SpecError, match="dimension 0 of size 5 is not divisible by axis data of size 2"):
            mean(positive(torch.tensor([1.0, 2, 3, 4, 5, -1]))).full()
    each = spmd(lambda x: x[x > 0], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for numbers in ([1.0, 2, 3, 4], [1.0, 2, 3, 4], [1.0, 2, 3, -1], [-1.0, -1, 3, 4], [1.0, 2, -1, 4]):
        x = torch.tensor(numbers)
        assert float(uneven(each(x))) == pytest.approx(float(x[x > 0].mean()))


def test_arrays_of_numpy_beside_them(shared_mesh: Any) -> None:
    x = put(torch.ones(4, 3), P("data"), mesh=shared_mesh({"data": 2}))
    found = x + np.arange(12.0).reshape(4, 3)
    assert found.spec == P("data") and found.sum().item() == 78


def test_plain_tensors_are_written_to_as_by_plain_ones(shared_mesh: Any) -> None:
    x, kept, mask = put(torch.ones(3), mesh=shared_mesh({"data": 2})), torch.zeros(3), torch.tensor([True, False, True])
    assert torch.add(x, 1, out=kept) is kept and kept.tolist() == [2, 2, 2]
    mask &= kept == x + 1
    kept[mask] = x[0]
    assert kept.tolist() == [1, 2, 1]


def test_errors_are_those_of_the_whole_values(shared_mesh: Any, capfd: Any) -> None:
    x = put(torch.ones(4, 3), P("data"), mesh=shared_mesh({"data": 2}))
    with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got 7"):
        x.sum(7).full()
    for refused, dims in ((lambda: x[0].mT, 1), (lambda: x[0].mH, 1), (lambda: x[None].H, 3)):
        with pytest.raises(RuntimeError, match=f"only supported on matrices.*Got {dims}-D tensor"):
            refused().full()
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:.*deprecated on 0-D tensors")
def test_a_number_is_a_matrix_to_torch(shared_mesh: Any) -> None:
    x = put(torch.tensor(2.0), P(), mesh=shared_mesh({"data": 2}))
    assert [float(same) for same in (x.T, x.mT, x.H, x.mH)] == [2.0] * 4


def test_an_index_for_which_torch_makes_a_tensor_gives_no_advice_about_dtensors(shared_mesh: Any, capfd: Any) -> None:
    x = put(torch.ones(4, 3), P("data"), mesh=shared_mesh({"data": 2}))
    assert x[True].shape == (1, 4, 3)
    assert capfd.readouterr() == ("", "")


def test_shifts_by_what_is_cut_in_another_way(shared_mesh: Any) -> None:
    mesh, i = shared_mesh({"data": 2}), torch.arange(24).view(4, 6)
    for one, other in ((i, i % 3), (i[:, None], (i % 3)[:2])):
        x, y = put(one, P("data"), mesh=mesh), put(other, P(None, "data"), mesh=mesh)
        for shift in (operator.lshift, operator.rshift):
            for found in (shift(x, y), shift(x, other), shift(x, y)):
                assert torch.equal(found.full(), shift(one, other))


def test_cut_in_different_ways(shared_mesh: Any) -> None:
    mesh, plain = shared_mesh({"data": 2, "model": 2}), operands()
    x, y = put(plain["x"], SPECS["rows"], mesh=mesh), put(plain["y"], SPECS["columns"], mesh=mesh)
    assert_as_plain("x + y", x + y, plain["x"] + plain["y"])
    assert (x + y).spec.entries
    assert_as_plain("x @ y.t()", x @ y.t(), plain["x"] @ plain["y"].t())


def test_what_shards_do_not_know_is_asked_of_the_whole(shared_mesh: Any) -> None:
    """Numbers that go to Python, random ones, and which of equal elements is the first."""
    mesh = shared_mesh({"data": 2})
    columns = put(torch.eye(2), P(None, "data"), mesh=mesh)
    assert columns.argmin().item() == torch.argmin(columns, None, True).item() == 1 and columns.argmax().item() == 0
    classes = put(torch.tensor([0, 1, 1, 5]), P("data"), mesh=mesh)  # the largest is on one rank
    assert torch.equal(torch.nn.functional.one_hot(classes).full(), torch.nn.functional.one_hot(classes.full()))
    short = put(torch.tensor([[4e4], [4e4], [-4e4], [-4e4]]).half(), P("data"), mesh=mesh)  # a rank's sum is infinite
    assert short.sum(0).item() == (short.T @ torch.ones(4, dtype=torch.half)).item() == 0
    drawn = torch.rand_like(put(torch.zeros(4, 3), P("data"), mesh=mesh)).full()
    assert len(drawn.unique()) == drawn.numel()


def test_ranks_that_are_replaced_know_the_rules(make_mesh: Any) -> None:
    mesh = make_mesh({"data": 2})
    x = put(torch.arange(8.0).view(4, 2), P("data"), mesh=mesh)
    assert [x.sum().item(), x.mean().item(), x[3, 1].item(), x[3, 1].item()] == [28, 3.5, 7, 7]
    for rank in (1, 0, 0):  # the second time, ranks have made groups anew that no operation has used
        with pytest.raises(PeerLost):
            mesh.submit(os._exit, 1, rank=rank).result()
        assert x.sum(0).tolist() == [12, 16]
    assert [x.sum().item(), x.mean().item(), x[3, 1].item()] == [28, 3.5, 7] and x.sum(1).spec == P("data")


def test_uneven_shards(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    (batch,) = Loader(torch.arange(7.0), batch_size=7, shuffle=False, mesh=mesh)
    assert sorted((batch * 2).tolist()) == [0, 2, 4, 6, 8, 10, 12]
    assert (batch * 2).spec == P("data")
    torch.testing.assert_close((batch + torch.arange(7.0)).full(), batch.full() + torch.arange(7.0))
    half = Loader(torch.tensor([4e4] * 4 + [-4e4] * 3).half(), batch_size=7, shuffle=False, mesh=mesh)
    assert [float(one.sum()) for one in half] == [4e4]  # a rank's own sum is too large for 16 bits
    assert batch.sum().item() == 21 and (batch - batch.mean()).abs().max().item() == 3


def test_shards_that_lie_in_memory_otherwise_than_before(shared_mesh: Any) -> None:
    """DTensor may leave one result cut, and not another of equal shape."""
    mesh, plain = shared_mesh({"data": 2}), torch.arange(32.0).view(4, 8)
    for x in (plain, plain.t().contiguous().t(), plain):
        found = put(x, P("data"), mesh=mesh).flatten()
        assert found.sum().item() == 496 and (found * torch.arange(32.0))[5].item() == 25


def test_shards_whose_sizes_a_step_has_chosen(shared_mesh: Any) -> None:
    """Also where their total is even, or was another one at the last such call, which nobody has waited for."""
    mesh, plain = shared_mesh({"data": 2}), torch.tensor([5.0, 1, 7, 3, 2, 9, 8, 4])
    take = spmd(lambda x, n: x[: n[axis_index("data")]], mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    functions: dict[str, Callable] = {
        "mean": lambda a, b: a.mean(),
        "argmax": lambda a, b: a.argmax(),
        "cumsum": lambda a, b: a.cumsum(0),
        "index": lambda a, b: a[1],
        "elementwise": lambda a, b: (a + 1) * a,
        "beside": lambda a, b: a * torch.arange(float(len(a))),
        "other shards": lambda a, b: a + b,
    }
    for name, function in functions.items():
        for sizes in ([3, 3], [3, 3], [4, 2], [1, 3], [2, 2], [4, 0]):
            shards = [[rank[:n] for rank, n in zip(plain.chunk(2), n, strict=True)] for n in (sizes, sizes[::-1])]
            found = function(*(take(plain, torch.tensor(n)) for n in (sizes, sizes[::-1])))
            assert_as_plain(f"{name} of {sizes}", found, function(*map(torch.cat, shards)))


def test_random_functions_agree_on_all_ranks_and_steps_draw_as_before(make_mesh: Any) -> None:
    def draws(*, operate: bool) -> torch.Tensor:
        mesh = make_mesh({"data": 2})
        x = put(torch.zeros(5), mesh=mesh)
        if operate:
            first, second = torch.rand_like(x), torch.rand_like(x)
            assert torch.equal(*first.shards()) and not torch.equal(first.full(), second.full())
        return spmd(lambda x: x + torch.rand(5), mesh=mesh, out_specs=P("data"))(x).full()

    assert torch.equal(draws(operate=True), draws(operate=False))


def test_a_generator_of_the_program_would_not_advance(shared_mesh: Any) -> None:
    """Every call would draw the same numbers."""
    x, generator = put(torch.full((4,), 0.5), mesh=shared_mesh({"data": 2})), torch.Generator().manual_seed(0)
    with pytest.raises(SpecError, match=r"bernoulli would draw .* copies of a generator.*leave generator= out"):
        torch.bernoulli(x, generator=generator)
    assert x[torch.randperm(4, generator=generator)].shape == (4,)  # no Array among its arguments


def test_the_result_of_a_remote_call_beside_an_array(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    x, ones = put(torch.ones(4), P("data"), mesh=mesh), mesh.remote(lambda: [1.0], rank=1)
    for add in (lambda: x + ones.copy(), lambda: ones.copy() * x):
        with pytest.raises(SpecError, match=r"was given a Ref.*ref\.get\(\)"):
            add()


def test_what_is_refused_says_what_to_write(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    x = put(torch.ones(3), mesh=mesh)
    with pytest.raises(SpecError, match="would change an Array, whose value never changes: write x = x \\+ y"):
        x.add_(1)
    for change in (lambda: torch.add(x, 1, out=x), lambda: torch.nn.init.normal_(x)):
        with pytest.raises(SpecError, match="would change an Array"):
            change()
    for write in (np.copyto, lambda x, y: np.put(x, [0], y)):
        with pytest.raises(ValueError, match="read-only"):
            write(x, np.zeros(3, np.float32))
    for _ in range(2):
        assert torch.equal(torch.nn.functional.relu(x - 2).full(), torch.zeros(3))
        with pytest.raises(SpecError, match=r"relu would change an Array, .*: leave inplace=True out"):
            torch.nn.functional.relu(x, inplace=True)
    with pytest.raises(SpecError, match=r"setitem would change an Array, .*: write x = torch.where\(here, y, x\)"):
        x[0] = 2.0
    for name in ("weight", "data_ptr", "untyped_storage"):  # the memory of the whole value, if any, is gone at once
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': \.full\(\) is the whole value"):
            getattr(x, name)
    with pytest.raises(RuntimeError, match="must match"):
        (x + torch.ones(4)).full()
    assert mesh.run(lambda: type(x.local)) == [torch.Tensor] * 2


_RUNNING: dict[str, Callable[[Callable, Array], object]] = {
    "a batch norm": lambda made, x: torch.nn.BatchNorm1d(4)(x),
    "an instance norm": lambda made, x: torch.nn.functional.instance_norm(
        x[:, :, None] * x, made(torch.zeros(4)), made(torch.ones(4))
    ),
    "an embedding": lambda made, x: torch.nn.functional.embedding(x.long(), made(torch.ones(4, 4)), max_norm=1.0),
}


@pytest.mark.parametrize("call", _RUNNING.values(), ids=_RUNNING)
def test_functions_that_change_what_they_are_given_without_saying_so(shared_mesh: Any, call: Callable) -> None:
    """Of a cut value ranks change only copies: the next call would not see it, silently."""
    mesh = shared_mesh({"data": 2})
    x = put(torch.eye(4), P("data"), mesh=mesh)
    for spec in (None, P(), P("data")):
        for _ in range(2):
            with pytest.raises(SpecError, match=r"in place.*ever changed.*model.eval\(\).*max_norm=.*clone"):
                call(lambda value, spec=spec: value if spec is None else put(value, spec, mesh=mesh), x).full()
    norm = torch.nn.BatchNorm1d(4).eval()
    torch.testing.assert_close(norm(x).full(), norm(torch.eye(4)).detach())


def _set_requires_grad(x: Array) -> None:
    x.requires_grad = True


_THE_WAY = r"differentiate in an @spmd function: value_and_grad\(loss_fn\)\(params, batch\)"
GRADIENTS: dict[str, Callable[[Array], object]] = {
    "backward": lambda x: x.sum().backward(),
    "backward of a product with a parameter": lambda x: (x * torch.ones(4, requires_grad=True)).sum().backward(),
    "autograd.backward": lambda x: torch.autograd.backward(x.sum()),
    "autograd.grad": lambda x: torch.autograd.grad(x.sum(), x),
    "autograd.grad of a tensor": lambda x: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), x),
    "requires_grad_": lambda x: x.requires_grad_(),
    "requires_grad": _set_requires_grad,
    "retain_grad": lambda x: x.retain_grad(),
    "register_hook": lambda x: x.register_hook(print),
    "register_post_accumulate_grad_hook": lambda x: x.register_post_accumulate_grad_hook(print),
    "Parameter": lambda x: torch.nn.Parameter(x),
    "func.grad": lambda x: torch.func.grad(lambda w: (x * w).sum())(torch.ones(4)),
    "func.grad of a number": lambda x: torch.func.grad(lambda w: w * float((x * w).sum()))(torch.ones(())),
    "func.jacrev": lambda x: torch.func.jacrev(lambda w: x * w)(torch.ones(4)),
    "vmap": lambda x: torch.vmap(lambda w: x * w)(torch.ones(3, 4)),
    "spmd.grad": lambda x: grad(lambda w: (x * w).sum())(torch.ones(4)),
}


@pytest.mark.parametrize("ask", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_refused_with_the_way_to_take_them(shared_mesh: Any, ask: Callable[[Array], object]) -> None:
    x = put(torch.ones(4), P("data"), mesh=shared_mesh({"data": 2}))
    with pytest.raises(SpecError, match=_THE_WAY):
        ask(x)
    assert not x.requires_grad and x.sum().item() == 4


def test_a_call_of_an_spmd_function_within_a_transform_of_torch(shared_mesh: Any) -> None:
    total = spmd(lambda x: x.sum(), mesh=shared_mesh({"data": 2}))
    for ask in (torch.func.grad(total), torch.func.vmap(total)):
        with pytest.raises(SpecError, match=rf"within a transform of torch.func .*vmap within .*{_THE_WAY}"):
            ask(torch.ones(4))
    assert total(torch.ones(4)).item() == 4


def test_a_value_of_the_ranks_is_not_frozen(shared_mesh: Any) -> None:
    """As parameters between steps: it would be trained on."""
    x = put(torch.ones(4), mesh=shared_mesh({"data": 2}))
    for freeze in (lambda: x.requires_grad_(False), lambda: setattr(x, "requires_grad", False)):
        with pytest.raises(SpecError, match=r"model.requires_grad_\(False\) before functional\(model\).*among grads"):
            freeze()


def test_what_torch_itself_says_of_gradients_of_arrays(shared_mesh: Any) -> None:
    """Before it calls anything of an Array's."""
    x = put(torch.ones(4), P("data"), mesh=shared_mesh({"data": 2}))
    for transform in (torch.func.grad, torch.func.grad_and_value, torch.func.jacrev):
        with pytest.raises(ValueError, match=r"must be Tensor, got .*Array"):
            transform(lambda x: (x * x).sum())(x)
    for transform in (torch.func.jacfwd, torch.func.hessian):  # torch writes into what it is given
        with pytest.raises(SpecError, match="would change an Array"):
            transform(lambda x: (x * x).sum())(x)
    with pytest.raises(TypeError, match="either Tensors or None, but got Array"):
        (torch.ones(4, requires_grad=True) * 2).backward(x)
    with pytest.raises(AttributeError, match=f"no attribute 'grad': {_THE_WAY}"):
        _ = x.grad


def test_values_are_shown_and_fetched(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    loss = put(torch.tensor(0.25), mesh=mesh)
    assert str(loss) == "Array(0.25, float32[], P())"
    assert f"loss {loss}" == "loss 0.25"  # as a tensor
    assert f"{loss:.3f}" == "0.250"
    small = put(torch.arange(4), P("data"), mesh=mesh)
    assert str(small).startswith("Array([0, 1, 2, 3], int64[4], P('data'))")
    assert str(put(torch.eye(2).to_sparse(), mesh=mesh)).startswith("Array(float32[2, 2], P(), Mesh(")
    assert [one.item() for one in small] == small.tolist() == [0, 1, 2, 3]
    assert isinstance(small.numpy(), np.ndarray)
    found = fetch({"x": small, "name": "x", "more": [loss]})
    assert torch.equal(found["x"], torch.arange(4)) and found["name"] == "x" and found["more"][0] == 0.25


def test_python_s_numbers_and_reversed(shared_mesh: Any) -> None:
    mesh, plain = shared_mesh({"data": 2}), torch.arange(4.0)
    x, one = put(plain, P("data"), mesh=mesh), put(torch.tensor(2 + 0j), mesh=mesh)
    for kind in (float, int, complex):
        with pytest.raises(ValueError, match="only one element tensors can be converted to Python scalars"):
            kind(x)
        assert kind(one) == 2
    assert isinstance(reversed(x), Array) and torch.equal(reversed(x).full(), reversed(plain))


def test_a_module_takes_arrays_for_its_state(shared_mesh: Any) -> None:
    mesh, module = shared_mesh({"data": 2}), torch.nn.Linear(2, 3)
    state = {name: put(value.detach() + 1, mesh=mesh) for name, value in module.state_dict().items()}
    other = torch.nn.Linear(2, 3)
    other.load_state_dict(state)
    assert torch.equal(other.weight, module.weight + 1)


def test_a_metric_by_operators(shared_mesh: Any) -> None:
    """Between steps, on what they return."""
    mesh = shared_mesh({"data": 2})

    @spmd(mesh=mesh, out_specs=P("data"))
    @data_parallel
    def predict(batch: torch.Tensor) -> torch.Tensor:
        return batch * 3

    x = torch.arange(6.0)
    assert float(((predict(x) - put(3 * x, mesh=mesh)) ** 2).mean()) == 0.0


@pytest.mark.parametrize("options", [{"backend": "gloo"}, {"hosts": "local:2x1"}])
def test_ranks_that_meet_over_a_network_are_replaced(make_mesh, options):
    """A new rank makes torch's process groups, which the others have; a group is opened by all of them together."""
    mesh = make_mesh({"data": 2}, **options)
    x = put(torch.arange(4.0), P("data"), mesh=mesh)
    assert x.sum().item() == 6
    for rank in range(2):
        assert mesh.submit(os._exit, 3, rank=rank).exception() is not None
        assert (x + 1).sum().item() == 10
