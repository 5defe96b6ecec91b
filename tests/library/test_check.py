"""`spmd.check`: the types of a step on a mesh of any size, in one process and in seconds."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from spmd import (
    Loader,
    P,
    Sharded,
    SpecError,
    all_gather,
    axis_index,
    check,
    data_parallel,
    functional,
    functional_with_buffers,
    mean_of,
    optimizer,
    psum,
    psum_scatter,
    put,
    spmd,
    value_and_grad,
)

HUGE = {"data": 4096, "model": 8}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def refused(step, *args, axes=HUGE) -> str:
    with pytest.raises(SpecError) as caught:
        check(step, axes, *args)
    return str(caught.value)


def test_global_shapes_and_specs():
    def body(x):
        return {
            "sum": psum(x.sum(), ("data", "model")),
            "same": x * 2,
            "rows": all_gather(x, "data", tiled=True).to(torch.float64),
            "scattered": psum_scatter(all_gather(x, "model", dim=1, tiled=True).T, "model", tiled=True),
            "number": 3,
        }

    specs = {"sum": P(), "same": P("data", "model"), "rows": P(None, "model"), "number": P()}
    step = spmd(body, in_specs=P("data", "model"), out_specs={**specs, "scattered": P("model", "data")})
    found = check(step, HUGE, meta(8192, 16))
    assert found.pop("number") == 3
    shown = {name: (about.shape, about.dtype, about.spec) for name, about in found.items()}
    assert shown == {
        "sum": ((), torch.float32, P()),
        "same": ((8192, 16), torch.float32, P("data", "model")),
        "rows": ((8192, 16), torch.float64, P(None, "model")),
        "scattered": ((16, 8192), torch.float32, P("model", "data")),
    }
    assert not multiprocessing.active_children()


def test_what_the_call_would_refuse():
    cut = P("data")
    text = refused(spmd(lambda x: {"loss": x.sum()}, in_specs=cut), meta(8192))
    assert (
        "result ['loss'] of <lambda> may differ between ranks along data; it comes of argument 0, computed at" in text
    )
    assert "test_check.py" in text and "psum or pmean it over 'data'" in text
    assert "axis_index" in refused(spmd(lambda x: x * axis_index("model")), torch.ones(3))
    assert "size 8192 is not divisible by axis data of size 3000" in refused(
        spmd(lambda x: x, in_specs=cut), meta(8192), axes={"data": 3000}
    )
    assert 'psum got an unknown "axis"' in refused(spmd(lambda x: psum(x, "rows")), torch.ones(3))
    assert "expected sizes of at least 1" in refused(spmd(lambda x: x), torch.ones(3), axes={"data": -1})
    assert "too many ranks" in refused(spmd(lambda x: x), torch.ones(3), axes={"data": 10**9, "model": 10**9})
    assert check(spmd(lambda x: x), {"data": 1 << 17}, torch.ones(3)).shape == (3,)  # more than any mesh can have
    with pytest.raises(RuntimeError, match="dim"):
        check(spmd(lambda x: x @ torch.ones(3, 3), in_specs=cut), HUGE, meta(8192, 4))


def test_its_work_does_not_grow_with_the_number_of_ranks():
    class Operations(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    @spmd
    @data_parallel
    def step(w, batch):
        return value_and_grad(lambda w, x: (w * x).mean())(w, batch)

    counts = []
    for ranks in 200, 100_000:  # most ranks have no samples
        with Operations() as operations:
            check(step, {"data": ranks}, torch.tensor(2.0), meta(100))
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("shard", [("data", "model"), "auto"])
def test_a_train_step(shard):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-3, shard=shard)
    opt_state = opt.init(params)

    def loss_fn(params, batch):
        return F.cross_entropy(apply(params, batch["x"]), batch["y"])

    def weighted(params, batch):
        return mean_of(loss_fn(params, batch), batch["y"].numel())

    @spmd
    @data_parallel
    def train_step(params, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        value_and_grad(weighted)(params, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state, loss

    state = torch.get_rng_state()
    batch = {"x": meta(8192, 16), "y": meta(8192, dtype=torch.int64)}
    after, after_state, loss = check(train_step, HUGE, params, opt_state, batch)
    assert {name: about.shape for name, about in after.items()} == {name: p.shape for name, p in params.items()}
    assert all(about.spec == P() for about in after.values()) and loss.shape == ()
    specs = {about.spec for own in after_state["state"].values() for about in own.values() if about.shape}
    assert specs == {P() if shard == "auto" else P(("data", "model"))}  # no memory is shared by so many ranks
    assert torch.equal(state, torch.get_rng_state())
    assert all(type(p) is torch.Tensor and p.isfinite().all() for p in params.values())

    forgotten = spmd(data_parallel(loss_fn))
    assert "it comes of argument 1['x']" in refused(forgotten, params, batch)
    check(train_step, {"data": 3000, "model": 2}, params, opt_state, batch)  # an uneven batch


def test_a_step_with_tensors_of_its_own_and_aux():
    """The statistics of batch norm, and class weights, are values in a step that has none."""
    apply, params, buffers = functional_with_buffers(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    weights = torch.ones(3)

    def step(params, buffers, batch):
        def loss_fn(params, batch):
            out, new = apply(params, buffers, batch["x"])
            hits = (out.argmax(1) == batch["y"]).float()
            return F.cross_entropy(out * weights, batch["y"]), (
                new,
                hits.mean(),
                hits.sum(),
                Sharded(out, P("data")),
                3,
            )

        return value_and_grad(loss_fn, has_aux=True)(params, batch)

    batch = {"x": meta(10, 4), "y": meta(10, dtype=torch.int64)}
    (loss, (new, mean, _, out, _)), _ = check(data_parallel(step), {"data": 2}, params, buffers, batch)
    assert loss.shape == mean.shape == () and mean.spec == P() and (out.shape, out.spec) == ((10, 3), P("data"))
    assert {name: about.shape for name, about in new.items()} == {name: own.shape for name, own in buffers.items()}
    with pytest.raises(SpecError, match=r"check cannot follow step through.*shards=4\).*check it without shards="):
        check(data_parallel(step, shards=4), {"data": 2}, params, buffers, batch)


def test_shapes_that_depend_on_values_are_refused_at_their_line():
    def masked(x):
        return psum(x[x > 3].sum(), "data")

    with pytest.raises(SpecError, match=r"check cannot follow masked: the shape.*values \(got nonzero\)") as caught:
        check(spmd(masked, in_specs=P("data")), {"data": 2}, torch.ones(4))
    assert [frame.name for frame in caught.traceback][-1] == "masked"


def test_conditions_that_look_for_faults_find_none():
    def guarded(x):
        loss = F.gaussian_nll_loss(x, x, x.exp())  # which looks for a negative variance
        if torch.isnan(loss) or torch.isinf(x).any() or not torch.isfinite(loss) or not torch.allclose(x, x):
            raise ValueError("the loss is not finite")
        return psum(loss, "data")

    assert check(spmd(guarded, in_specs=P("data")), {"data": 2}, torch.ones(4)).shape == ()

    def by_value(x):
        if x.sum() < 0:
            raise ValueError("negative")
        return x

    with pytest.raises(ValueError, match="negative") as caught:
        check(by_value, {"data": 2}, torch.ones(4))
    (note,) = caught.value.__notes__
    assert note.startswith("[check sees no values: a number or condition at test_check.py:")


def test_results_that_differ_on_the_last_rank():
    """Numbers, texts and shapes that are made of a rank's index are known without values."""
    assert "(got '0' and '2999')" in refused(spmd(lambda: str(axis_index("data"))), axes={"data": 3000})
    assert "has other shapes on other ranks (got (1,) and (3000,))" in refused(
        spmd(lambda: torch.tensor([1.0] * int(axis_index("data") + 1))), axes={"data": 3000}
    )
    assert check(spmd(lambda x: (x.shape[0], "a", None, float(x.sum())), in_specs=P("data")), HUGE, meta(8192))


def test_arrays_of_numpy_and_texts_that_a_step_takes_out_of_tensors():
    def step(x):
        total = psum(x, "data")
        assert f"{total.sum():.2f} {total!s}".startswith("1.00 ")
        return torch.from_numpy(total.numpy() * 2), torch.as_tensor(np.asarray(total, dtype="int32"))

    doubled, whole = check(spmd(step, in_specs=P("data")), {"data": 2}, torch.ones(4, 3))
    assert doubled.shape == whole.shape == (2, 3) and (doubled.dtype, whole.dtype) == (torch.float32, torch.int32)


def test_settings_of_torch_hold_in_it():
    """As they do in a call."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            made, product = check(spmd(lambda x: (torch.zeros(2), x @ x)), HUGE, meta(3, 3))
    finally:
        torch.set_default_dtype(before)
    assert (made.dtype, product.dtype) == (torch.float64, torch.bfloat16)


def test_arrays_keep_their_specs(shared_mesh):
    """What lives cut on a mesh is cut in the check as well, at the sizes that are asked for."""
    x = put(torch.ones(8, 3), P("data"), mesh=shared_mesh({"data": 2}))
    assert check(spmd(lambda x: psum(x.sum(), "data")), {"data": 4}, x).shape == ()
    assert check(spmd(lambda x: x * 2, out_specs=P("data")), {"data": 4}, x).shape == (8, 3)
    assert "comes of argument 0" in refused(spmd(lambda x: x.sum()), x, axes={"data": 4})
    assert "not divisible by axis data of size 3" in refused(spmd(lambda x: x), x, axes={"data": 3})


def test_a_loaders_batch(shared_mesh):
    (batch,) = Loader({"x": torch.ones(8, 3)}, 8, mesh=shared_mesh({"data": 2}))

    @spmd
    @data_parallel
    def step(w, batch):
        return value_and_grad(lambda w, batch: (batch["x"] @ w).square().mean())(w, batch)

    loss, gradient = check(step, {"data": 4}, torch.ones(3), batch)
    assert (loss.shape, gradient.shape) == ((), (3,))


def test_message_passing(shared_mesh):
    mesh = shared_mesh({"data": 2})

    def ring(x):
        comm = mesh.comm("data")
        assert comm.size == 4096
        there, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent, received = comm.isend(x, there), torch.empty_like(x)
        assert comm.irecv(received, back).wait() == back
        sent.wait()
        work = comm.all_reduce(received, async_op=True)
        return work.wait() or received

    assert check(spmd(ring), HUGE, meta(5)).shape == (5,)

    def received(x):
        y = torch.empty_like(x)
        mesh.comm("data").irecv(y, 0).wait()
        return y

    assert "a message (irecv)" in refused(spmd(received), meta(5))


def test_errors_of_fake_tensors_are_told_once(caplog, capfd):
    with pytest.raises(RuntimeError, match="3 and 7"):
        check(spmd(lambda x: x @ torch.ones(7)), HUGE, torch.ones(3))
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_module_with_buffers_is_made_functional_before_a_checked_step():
    def step(x):
        apply, params = functional(torch.nn.BatchNorm1d(8))
        return apply(params, x)

    with pytest.raises(SpecError, match=r"module with buffers in a step that is only checked.*before the step"):
        check(step, {"data": 4}, torch.empty(16, 8))
