"""`optimizer` on real ranks: the bits of plain torch, and with `shard=` one part of the state on each rank."""

import contextlib
import inspect
import sys

import cloudpickle
import pytest
import pytrees
import scripts
import torch
import torch.nn.functional as F
from cases import cases
from patience import HANGS
from torch import nn, optim

from spmd import (
    Array,
    P,
    Sharded,
    SpecError,
    axis_index,
    data_parallel,
    ema,
    fetch,
    functional,
    grad,
    optimizer,
    pmean,
    psum,
    put,
    spmd,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

on_both = pytest.mark.parametrize("backend", ["shm", "gloo"])
CLASSES = [
    (optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mixed(seed=0):
    return {
        "matrix": drawn(13, 11, seed=seed),
        "scalar": drawn(seed=seed + 1),
        "empty": torch.ones(0, 2),
        "double": drawn(70, dtype=torch.float64, seed=seed + 2),
        "half": drawn(9, dtype=torch.bfloat16, seed=seed + 3),
        "strided": drawn(5, 4, seed=seed + 4).t(),
        "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
        "integer": torch.arange(3),
        "name": "linear",
    }


def sequential(cls, hyper, params, grads_of_steps, schedule=None):
    """The same steps by torch itself."""
    leaves = {name: nn.Parameter(p.detach().clone()) for name, p in params.items() if _is_trained(p)}
    half = [leaf for leaf in leaves.values() if leaf.dtype == torch.bfloat16]
    rest = [leaf for leaf in leaves.values() if leaf.dtype != torch.bfloat16]
    references = [cls(rest, **{**_fused(cls), **hyper})] + ([cls(half, **hyper)] if half else [])
    for step, grads in enumerate(grads_of_steps):
        if schedule is not None:
            for reference in references:
                reference.param_groups[0]["lr"] = schedule(step)
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        for reference in references:
            reference.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _fused(cls):
    """What `optimizer` takes where the user says nothing of it."""
    return {"fused": True} if "fused" in inspect.signature(cls).parameters else {}


def _is_trained(p):
    return isinstance(p, torch.Tensor) and p.is_floating_point() and not isinstance(p, nn.Parameter)


def zeros_for(params, grads):
    return {name: grads[name] if _is_trained(p) else None for name, p in params.items()}


def arrays(tree):
    return [leaf for leaf in pytrees.leaves(tree, is_leaf=lambda x: isinstance(x, Array)) if isinstance(leaf, Array)]


@pytest.mark.parametrize(
    ("cls", "hyper", "shard"),
    [
        *((*case, shard) for shard in ("auto", "data") for case in CLASSES),
        *((*case, None) for case in CLASSES[:2]),
        *(pytest.param(*case, None, marks=pytest.mark.long) for case in CLASSES[2:]),
    ],
    ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else ""),
)
@pytest.mark.parametrize("sizes", [(3,), pytest.param((1, 2, 4), marks=pytest.mark.long)], ids=str)
def test_steps_on_ranks_are_torchs_bit_for_bit(shared_mesh, shard, cls, hyper, sizes):
    are_torchs_bit_for_bit(shared_mesh, shard, cls, hyper, sizes)


def test_steps_on_any_number_of_ranks_are_torchs_bit_for_bit(shared_mesh):
    are_torchs_bit_for_bit(shared_mesh, "auto", *CLASSES[0], (1, 2, 4))


def are_torchs_bit_for_bit(shared_mesh, shard, cls, hyper, sizes):
    opt = optimizer(cls, shard=shard, **hyper)
    grads_of_steps = [zeros_for(mixed(), mixed(10 * i + 5)) for i in range(3)]
    wanted = sequential(cls, hyper, mixed(), grads_of_steps)
    for size in sizes:
        mesh = shared_mesh({"data": size})
        step = spmd(lambda params, grads, opt_state: opt.step(params, grads, opt_state), mesh=mesh, check="always")
        for where in ("driver", "region") if size > 1 else ("driver",):
            params = mixed()
            opt_state = opt.init(params) if where == "driver" else spmd(opt.init, mesh=mesh)(params)
            for grads in grads_of_steps:
                params, opt_state = step(params, grads, opt_state)
            for name, value in wanted.items():
                assert torch.equal(params[name].full(), value), name
            assert params["frozen"].full().tolist() == [1, 1, 1] and params["name"] == "linear"
            assert params["integer"].full().tolist() == [0, 1, 2]


@pytest.mark.parametrize(("backend", "sizes"), [("shm", (1, 2, 4)), ("gloo", (2,))])
def test_each_rank_keeps_one_part_of_the_state(shared_mesh, backend, sizes):
    """The shards of all ranks together are the state once, but for padding to multiples of 64."""
    params = {"w": drawn(100, 30), "b": drawn(100, seed=1), "d": drawn(300, dtype=torch.float64, seed=2)}
    grads = {name: torch.ones_like(value) for name, value in params.items()}
    for size in sizes:
        opt = optimizer(optim.AdamW, shard="data")
        mesh = shared_mesh({"data": size}, backend)
        new, opt_state = spmd(opt.step, mesh=mesh)(params, grads, opt.init(params))
        moments = {leaf for leaf in arrays(opt_state["state"]) if leaf.shape}
        assert len(moments) == 4 and all(leaf.spec == P("data") for leaf in moments)
        held = [sum(leaf.shards()[rank].numel() for leaf in moments) for rank in range(size)]
        assert len(set(held)) == 1
        whole = 2 * (3100 + 300)
        assert whole <= sum(held) <= whole + 4 * 64 * size
        assert all(leaf.spec == P() for leaf in arrays(new))
        plain = optimizer(optim.AdamW, shard=None)
        replicated = spmd(plain.step, mesh=mesh)(params, grads, plain.init(params))[1]
        assert all(leaf.spec == P() for leaf in arrays(replicated))


@pytest.mark.parametrize("trained", ["all", "some"])
def test_steps_are_checked_and_divided_once(shared_mesh, trained):
    """Also if some parameters are frozen, whose gradients carried no mark: each step was worked out anew."""
    opt, params = optimizer(optim.Adam, lr=0.1), {"a": drawn(5000), "b": drawn(5000, seed=1)}
    if trained == "some":
        params["b"] = nn.Parameter(params["b"], requires_grad=False)

    @spmd(mesh=shared_mesh({"data": 2}))
    def step(params, opt_state):
        grads = grad(lambda params: (params["a"].square() + params["b"].square()).sum())(params)
        ran = set()
        sys.setprofile(lambda frame, event, argument: ran.add(frame.f_code.co_name))
        try:
            params, opt_state = opt.step(params, grads, opt_state)
        finally:
            sys.setprofile(None)
        return params, opt_state, "settle" in ran, "divide" in ran

    opt_state, found = opt.init(params), []
    for _ in range(4):
        params, opt_state, *ran = step(params, opt_state)
        found.append(ran)
    assert found[0] == [True, True] and found[-1] == [True, False]


@pytest.mark.parametrize("numel", [3, 5000])
def test_state_is_for_the_leaves_that_it_was_made_for(shared_mesh, numel):
    """In whatever form: laid end to end, that of a frozen leaf would be taken for that of the one behind it."""
    mesh, opt = shared_mesh({"data": 2}), optimizer(optim.Adam, lr=0.1)
    params = {"a": drawn(numel), "b": drawn(numel, seed=1)}
    frozen = {**params, "a": nn.Parameter(params["a"], requires_grad=False)}

    def step(params, opt_state):
        grads = grad(lambda params: (params["a"].square() + 0.01 * params["b"].square()).sum())(params)
        return opt.step(params, grads, opt_state)

    for run in (step, spmd(step, mesh=mesh)):
        _, opt_state = run(params, opt.init(params))
        _, without = run(frozen, opt.init(frozen))
        wider = {"a": drawn(numel + 1), "b": drawn(numel + 1, seed=1)}
        for _ in range(2):
            for given, its_state in ((frozen, opt_state), (wider, opt_state), (wider, without)):
                with pytest.raises(SpecError, match=r"opt_state (holds state of|has a .* that does not fit)"):
                    run(given, its_state)
            assert run(frozen, without)[1]["state"].keys() == without["state"].keys()
    moved = {"b": params["b"], "a": params["a"]}
    with pytest.raises(SpecError, match=r"or of these in another order .*for others call opt.init"):
        run(moved, opt_state)


@on_both
@pytest.mark.parametrize("shard", ["auto", None, "data"])
def test_state_passes_through_steps_that_do_other_things_with_it(shared_mesh, backend, shard):
    mesh, opt = shared_mesh({"data": 2}, backend), optimizer(optim.AdamW, shard=shard, lr=0.1)
    params = {"w": drawn(200)}

    @spmd(mesh=mesh, check="always")
    @data_parallel
    def step(carry, batch):
        (params, opt_state), count = carry
        value, grads = value_and_grad(lambda params: ((batch @ params["w"]) ** 2).mean())(params)
        return (opt.step(params, grads, opt_state), count + 1), value

    carry, x = ((params, opt.init(params)), torch.tensor(0)), drawn(5, 200, seed=1)
    for _ in range(3):
        carry, value = step(carry, x)
    carry = spmd(lambda carry: carry, mesh=mesh)(carry)
    (found, opt_state), count = carry
    assert count.item() == 3 and value.full().isfinite()
    w = nn.Parameter(params["w"].clone())
    reference = optim.AdamW([w], lr=0.1)
    for _ in range(3):
        reference.zero_grad()
        ((x @ w) ** 2).mean().backward()
        reference.step()
    torch.testing.assert_close(found["w"].full(), w.detach(), rtol=1e-4, atol=1e-4)
    (key,) = opt_state["state"]
    assert opt_state["state"][key]["step"].item() == 3
    torch.testing.assert_close(
        opt_state["state"][key]["exp_avg"].full()[:200], reference.state[w]["exp_avg"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shard", ["auto", None, "data"])
def test_steps_are_skipped_where_a_loss_is_not_finite(shared_mesh, shard):
    """The state that is returned as it came stays cut as it is."""
    mesh, opt = shared_mesh({"data": 2}), optimizer(optim.AdamW, shard=shard, lr=0.1)
    params = {"w": drawn(120, 90)}

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(lambda params: ((batch @ params["w"]) ** 2).mean())(params)
        return *(opt.step(params, grads, opt_state) if loss.isfinite() else (params, opt_state)), loss

    w, x = nn.Parameter(params["w"].clone()), drawn(6, 120, seed=1)
    reference = optim.AdamW([w], lr=0.1)
    opt_state, bad = opt.init(params), torch.full_like(x, float("inf"))
    for batch in (x, x, bad, bad, bad, bad, x, bad, x):
        params, opt_state, loss = step(params, opt_state, batch)
        assert loss.isfinite().item() == (batch is x)
        if batch is x:
            reference.zero_grad()
            ((x @ w) ** 2).mean().backward()
            reference.step()
    torch.testing.assert_close(params["w"].full(), w.detach(), rtol=1e-4, atol=1e-4)
    (state,) = opt_state["state"].values()
    assert state["exp_avg"].spec == (P("data") if shard else P())


def test_state_goes_on_at_another_number_of_ranks(shared_mesh):
    opt = optimizer(optim.AdamW, shard="data", lr=0.1)
    params = expected = {"w": drawn(13, 11), "b": drawn(70, seed=1)}
    opt_state, plain = opt.init(params), optimizer(optim.AdamW, lr=0.1)
    reference = plain.init(expected)
    for size in (2, 4, 1, 3):
        grads = {name: torch.full_like(value, float(size)) for name, value in params.items()}
        params, opt_state = spmd(opt.step, mesh=shared_mesh({"data": size}))(params, grads, opt_state)
        # As from a checkpoint.
        fetch = lambda leaf: leaf.full() if isinstance(leaf, Array) else leaf  # noqa: E731
        params, opt_state = pytrees.map(fetch, (params, opt_state), is_leaf=lambda x: isinstance(x, Array))
        expected, reference = plain.step(expected, grads, reference)
        for name in params:
            assert torch.equal(params[name], expected[name])


@pytest.mark.parametrize("donate", [(), ("params", "opt_state")], ids=["", "donated"])
@pytest.mark.parametrize(("cls", "hyper"), CLASSES, ids=lambda v: getattr(v, "__name__", ""))
def test_state_of_few_parameters_lies_end_to_end(shared_mesh, cls, hyper, donate):
    """Every rank has all of it; it goes on where it is sliced or kept by parameter, and back, with the same bits."""
    mesh = shared_mesh({"data": 2})
    params = {"w": drawn(3, 7), "one": drawn(seed=1), "none": drawn(0), "b": drawn(11, seed=2)}
    grads_of_steps = [{name: drawn(*p.shape, seed=10 * i) for name, p in params.items()} for i in range(8)]
    wanted = sequential(cls, hyper, params, grads_of_steps)
    opt_state = optimizer(cls, **hyper).init(params)
    shards = ("auto", "auto", None, "auto", "data", "auto", "data", "auto")
    for grads, shard in zip(grads_of_steps, shards, strict=True):
        opt = optimizer(cls, shard=shard, **hyper)
        step = spmd(
            lambda params, grads, opt_state, opt=opt: opt.step(params, grads, opt_state), donate=donate, mesh=mesh
        )
        params, opt_state = step(params, grads, opt_state)
        keys = [key.partition("#")[0] for key in opt_state["state"]]
        assert keys == ([f"[{name!r}]" for name in params] if shard is None else ["float32"])
        for leaf in arrays(opt_state["state"]):
            assert leaf.spec == (P("data") if shard == "data" and leaf.shape else P())
    for name, value in wanted.items():
        assert torch.equal(params[name].full(), value), name


def test_hyper_parameters_may_be_scheduled(shared_mesh):
    schedule = [0.1, 0.05, 0.2]
    params = {"w": drawn(70)}
    grads_of_steps = [{"w": drawn(70, seed=i)} for i in range(3)]
    wanted = sequential(optim.AdamW, {}, params, grads_of_steps, schedule.__getitem__)
    for shard in (None, "data"):
        opt = optimizer(optim.AdamW, shard=shard)

        def step(params, grads, opt_state, lr, opt=opt):
            return opt.step(params, grads, {**opt_state, "hyper": {**opt_state["hyper"], "lr": lr}})

        run = spmd(step, mesh=shared_mesh({"data": 2}))
        for given in (float, torch.tensor):
            new, opt_state = params, opt.init(params)
            for grads, lr in zip(grads_of_steps, schedule, strict=True):
                new, opt_state = run(new, grads, opt_state, given(lr))
                found = opt_state["hyper"]["lr"]
                assert float(found) == pytest.approx(lr)
            torch.testing.assert_close(new["w"].full(), wanted["w"])


# -- parameters that are cut ------------------------------------------------------------------------------------------

SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}


def tensor_parallel_params():
    return {"w1": drawn(5, 6), "b1": drawn(6, seed=1), "w2": drawn(6, 3, seed=2), "b2": drawn(3, seed=3)}


def tensor_parallel_loss(params, batch, combine):
    h = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    return F.mse_loss(combine(h @ params["w2"]) + params["b2"], batch["y"])


@pytest.mark.parametrize(
    ("backend", "which", "shard"),
    cases(
        lambda backend, which, shard: (
            (backend, which) == ("shm", 0) or (shard == "auto" and (backend, which) != ("gloo", 2))
        ),
        ("shm", "gloo"),
        (0, 2),
        ("auto", None, "data", "model", ("data", "model")),
    ),
    ids=str,
)
def test_parameters_cut_over_an_axis(shared_mesh, backend, which, shard):
    """Tensor parallelism and data parallelism at once: state is cut as its parameter is, and sliced if asked for."""
    cls, hyper = CLASSES[which]
    mesh, opt = shared_mesh({"data": 2, "model": 2}, backend), optimizer(cls, shard=shard, **hyper)

    def step(params, opt_state, batch):
        loss = lambda params: tensor_parallel_loss(params, batch, lambda h: psum(h, "model"))  # noqa: E731
        value, grads = value_and_grad(loss)(params)
        return *opt.step(params, grads, opt_state), value

    run = spmd(data_parallel(step), mesh=mesh, out_specs=(SPECS, P(), P()), check="always")
    batch = {"x": drawn(7, 5, seed=4), "y": drawn(7, 3, seed=5)}
    plain = {name: nn.Parameter(value) for name, value in tensor_parallel_params().items()}
    reference = cls(plain.values(), **hyper)
    for _ in range(3):
        reference.zero_grad()
        tensor_parallel_loss(plain, batch, lambda h: h).backward()
        reference.step()
    for where in ("driver", "region"):
        params = put(tensor_parallel_params(), SPECS, mesh=mesh)
        opt_state = opt.init(params) if where == "driver" else spmd(opt.init, mesh=mesh)(params)
        for _ in range(3):
            params, opt_state, _ = run(params, opt_state, batch)
        for name, value in plain.items():
            assert params[name].spec == SPECS[name]
            torch.testing.assert_close(params[name].full(), value.detach(), rtol=1e-4, atol=1e-5)
        if shard in (None, "auto"):  # there is too little to be sliced by default
            for name, spec in SPECS.items():
                # What is not cut is laid end to end.
                key = "float32" if shard and not spec.entries else f"[{name!r}]"
                (own,) = (own for its, own in opt_state["state"].items() if its.partition("#")[0] == key)
                for what, value in own.items():
                    if value.shape:
                        assert value.spec == spec
                        expected = reference.state[plain[name]][what]
                        found = value.full() if key[0] == "[" else value.full()[: expected.numel()]
                        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        else:
            slices = [leaf for leaf in arrays(opt_state["state"]) if leaf.shape]
            assert slices and all(leaf.spec.entries for leaf in slices)


@pytest.mark.parametrize("whole", [False, True])
def test_averages_of_parameters_cut_over_an_axis(shared_mesh, whole):
    """They are cut as their parameters are, be it that `init` was given these cut or whole."""
    mesh, opt = shared_mesh({"data": 2, "model": 2}), ema(optimizer(optim.SGD, lr=0.1), 0.5)

    def step(params, opt_state, batch):
        grads = grad(lambda p: tensor_parallel_loss(p, batch, lambda h: psum(h, "model")))(params)
        params, opt_state = opt.step(params, grads, opt_state)
        return opt.step(params, grads, opt_state)  # of averages that a step has declared

    params = put(tensor_parallel_params(), SPECS, mesh=mesh)
    batch = {"x": drawn(8, 5, seed=4), "y": drawn(8, 3, seed=5)}
    opt_state = opt.init(tensor_parallel_params() if whole else params)
    assert whole or {name: value.spec for name, value in opt_state["ema"].items()} == SPECS
    alone, alone_state = tensor_parallel_params(), opt.init(tensor_parallel_params())
    run = spmd(data_parallel(step), mesh=mesh, out_specs=(SPECS, None))
    for _ in range(2):
        params, opt_state = run(params, opt_state, batch)
        grads = grad(lambda p: tensor_parallel_loss(p, batch, lambda h: h))(alone)
        for _ in range(2):
            alone, alone_state = opt.step(alone, grads, alone_state)
    for name, value in alone_state["ema"].items():
        assert opt_state["ema"][name].spec == SPECS[name]
        torch.testing.assert_close(opt_state["ema"][name].full(), value)


@pytest.mark.parametrize("cls", [optim.Adafactor, *([optim.Muon] if hasattr(optim, "Muon") else [])])
def test_optimizers_that_need_whole_matrices_refuse_parts_of_them(shared_mesh, cls):
    opt, params = optimizer(cls, lr=0.1), {"whole": torch.ones(2, 2), "cut": torch.ones(4, 2)}
    specs = {"whole": P(), "cut": P("model")}

    def step(params, opt_state):
        return opt.step(params, {name: value * 0.5 for name, value in params.items()}, opt_state)

    run = spmd(step, mesh=shared_mesh({"data": 2, "model": 2}), in_specs=(specs, None), out_specs=(specs, None))
    with pytest.raises(SpecError, match=rf"{cls.__name__} .* a part of params\['cut'\] \(got \[2, 2\] of P\('model'\)"):
        run(params, opt.init(params))
    spmd(step, mesh=shared_mesh({"data": 2, "model": 1}), in_specs=(specs, None), out_specs=(specs, None))(
        params, opt.init(params)
    )


@pytest.mark.parametrize(
    ("shard", "key", "spec"), [(None, "['w']", P(None, "model")), ("auto", "float32/model", P(("data", "model")))]
)
def test_whole_state_is_cut_as_its_parameter_is(shared_mesh, shard, key, spec):
    """State made in the driver of whole parameters, for parameters that are cut on their way in."""
    mesh = shared_mesh({"data": 2, "model": 2})
    opt = optimizer(optim.Adagrad, shard=shard, initial_accumulator_value=0.5)
    params = {"w": drawn(64, 258), "b": drawn(3)}
    grads = {"w": drawn(64, 258, seed=1), "b": drawn(3, seed=1)}
    specs = {"w": P(None, "model"), "b": P()}
    opt_state = opt.init(params)
    wanted, _ = opt.step(params, grads, opt_state)
    run = spmd(opt.step, mesh=mesh, in_specs=(specs, specs, None), out_specs=(specs, P()))
    found, state = run(params, grads, opt_state)
    assert torch.equal(found["w"].full(), wanted["w"]) and torch.equal(found["b"].full(), wanted["b"])
    assert {its.partition("#")[0]: own["sum"].spec for its, own in state["state"].items()}[key] == spec


@pytest.mark.parametrize(
    ("shard", "before", "after"),
    [("auto", (2, 1), (1, 2)), ("auto", (2, 2), (1, 2)), ("data", (1, 2), (1, 1)), ("auto", (2, 1), (1, 1))],
)
def test_state_of_cut_parameters_that_was_fetched(shared_mesh, shard, before, after):
    """Laid end to end, it lies otherwise on other ranks; if no axis that cuts has several, it goes on anywhere."""
    opt = optimizer(optim.AdamW, lr=0.1, shard=shard)
    whole = {"w": drawn(256, 128), "v": drawn(256, 64)}

    def stepped(sizes, params, opt_state):
        mesh = shared_mesh(dict(zip(("data", "model"), sizes, strict=True)))
        params = put(params, P("model"), mesh=mesh)
        specs = dict.fromkeys(params, P("model"))
        return fetch(
            spmd(lambda p, state: opt.step(p, p, state), mesh=mesh, out_specs=(specs, None))(params, opt_state)
        )

    params, opt_state = stepped(before, whole, opt.init(whole))
    if after != (1, 1) or before[1] > 1:
        with pytest.raises(SpecError, match=r"cut .*go on with it on a mesh with the sizes of these axes"):
            stepped(after, params, opt_state)
        return
    found, alone = whole, opt.init(whole)
    for _ in range(2):
        found, alone = opt.step(found, found, alone)
    torch.testing.assert_close(stepped(after, params, opt_state)[0], found)


def test_parts_of_unlike_shapes(shared_mesh):
    """As a step may have cut them: ranks agree on whose the state is."""
    mesh, opt = shared_mesh({"data": 2, "model": 2}), optimizer(optim.AdamW, lr=0.1, shard="data")
    params = spmd(lambda: {"w": torch.ones(2 + axis_index("model"), 7)}, mesh=mesh, out_specs=P("model"))()
    step = spmd(lambda p, state: opt.step(p, p, state), mesh=mesh, out_specs=({"w": P("model")}, None))
    found, opt_state = {"w": torch.ones(5, 7)}, opt.init(params)
    alone = opt.init(found)
    for _ in range(2):
        params, opt_state = step(params, opt_state)
        found, alone = opt.step(found, found, alone)
    torch.testing.assert_close(params["w"].full(), found["w"])


def test_few_parameters_are_stepped_whole_by_default(shared_mesh):
    """And what was sliced, of as few, is put together again; the bits are those of replicas."""
    mesh = shared_mesh({"data": 2})
    for width, sliced in ((64, False), (300, True)):
        params, grads = {"w": drawn(32, width)}, {"w": drawn(32, width, seed=1)}
        steps = {
            shard: spmd(optimizer(optim.AdamW, shard=shard, fused=True).step, mesh=mesh)
            for shard in ("auto", None, "data")
        }
        state = optimizer(optim.AdamW, fused=True).init(params)
        found = {shard: step(params, grads, state) for shard, step in steps.items()}
        again = {shard: steps["auto"](new, grads, its_state) for shard, (new, its_state) in found.items()}
        for results in (found, again):
            for new, _ in results.values():
                assert torch.equal(new["w"].full(), results[None][0]["w"].full())
        for _, its_state in (found["auto"], *again.values()):
            moments = [leaf for leaf in arrays(its_state["state"]) if leaf.shape]
            assert len(moments) == 2 and all(bool(leaf.spec.entries) is sliced for leaf in moments)


# -- several steps in one region --------------------------------------------------------------------------------------


def test_many_steps_in_one_region(shared_mesh):
    """What one step makes is differentiated by the next, clipped or not."""
    x = drawn(8, 5)
    params = {"w": drawn(5)}

    def train(params, opt_state, batch, clip):
        def loss(params):
            return ((batch @ params["w"] - 1) ** 2).mean()

        for _ in range(4):
            grads = grad(loss)(params)
            if clip:
                norm = torch.linalg.vector_norm(grads["w"])
                grads = {"w": grads["w"] / norm}
            params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state

    for shard in (None, "data"):
        opt = optimizer(optim.AdamW, shard=shard, lr=0.05)
        for clip in (False, True):
            found, _ = spmd(data_parallel(train), mesh=shared_mesh({"data": 2}), check="always")(
                params, opt.init(params), x, clip
            )
            wanted, _ = train(params, opt.init(params), x, clip)
            torch.testing.assert_close(found["w"].full(), wanted["w"])


def test_local_steps_then_an_average(shared_mesh):
    """Local SGD: each rank goes its own way by its own gradients, and the ways are averaged."""
    opt = optimizer(optim.SGD, lr=0.1)

    def train(w, x):
        opt_state = opt.init(w)
        for _ in range(3):
            w, opt_state = opt.step(w, grad(lambda w: ((w - x) ** 2).sum(), axes=())(w), opt_state)
        mine = grad(lambda w: (w * x).sum())(w)  # they differ now, so each has a gradient of its own
        return pmean(w, "data"), Sharded(mine, P("data"))

    x = torch.tensor([[1.0], [3.0]])
    mean, mine = spmd(train, mesh=shared_mesh({"data": 2}), in_specs=(P(), P("data")))(torch.zeros(1, 1), x)
    ways = [float(value) * (1 - 0.8**3) for value in x]
    assert mean.item() == pytest.approx(sum(ways) / 2)
    assert mine.full().flatten().tolist() == [0.5, 1.5]


def test_a_failed_step_can_be_run_again(shared_mesh):
    mesh, opt = shared_mesh({"data": 2}), optimizer(optim.AdamW, shard="data")
    params = {"w": drawn(100)}
    opt_state = opt.init(params)

    def step(params, opt_state, fails):
        new = opt.step(params, {"w": torch.ones(100)}, opt_state)
        if fails and axis_index("data") == 1:
            raise RuntimeError("on one rank")
        return new

    run = spmd(step, mesh=mesh)
    params, opt_state = run(params, opt_state, False)
    before = params["w"].full().clone()
    with pytest.raises(RuntimeError, match="on one rank"):
        run(params, opt_state, True)
    assert torch.equal(params["w"].full(), before)
    again, _ = run(params, opt_state, False)
    plain = optimizer(optim.AdamW)
    expected, state = {"w": drawn(100)}, plain.init({"w": drawn(100)})
    for _ in range(2):
        expected, state = plain.step(expected, {"w": torch.ones(100)}, state)
    assert torch.equal(again["w"].full(), expected["w"])


def test_a_model_with_a_tied_weight(shared_mesh):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    apply, params = functional(module)
    opt, x = optimizer(optim.AdamW, shard="data", lr=0.1), drawn(6, 4)

    def step(params, opt_state, batch):
        grads = grad(lambda params: apply(params, batch).pow(2).mean())(params)
        return opt.step(params, grads, opt_state)

    opt_state = opt.init(params)
    reference = optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(3):
        params, opt_state = spmd(data_parallel(step), mesh=shared_mesh({"data": 3}))(params, opt_state, x)
        reference.zero_grad()
        module(x).pow(2).mean().backward()
        reference.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(params[name].full(), value.detach(), rtol=1e-4, atol=1e-5)


class Derived(optim.SGD):
    def step(self, closure=None):
        super().step(closure)


class Own(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def test_a_first_step_does_not_import_torchs_compiler(make_mesh):
    """That takes a second of every rank's, and no step needs it."""
    mesh = make_mesh({"data": 2})
    apply, params = functional(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)))
    opt = optimizer(optim.AdamW, lr=0.1)

    @spmd(mesh=mesh)
    @data_parallel
    def step(params, state, batch):
        loss, grads = value_and_grad(lambda params, batch: F.mse_loss(apply(params, batch), batch[:, 0, 0, :3]))(
            params, batch
        )
        params, state = opt.step(params, grads, state)
        return params, state, loss

    params, state, loss = step(params, opt.init(params), torch.ones(4, 1, 4, 4))
    assert float(step(params, state, torch.ones(4, 1, 4, 4))[2]) != float(loss)
    for cls in Derived, Own:  # of the program
        opt = optimizer(cls, lr=0.1, shard=None)
        found, _ = spmd(opt.step, mesh=mesh)({"w": torch.ones(3)}, {"w": torch.ones(3)}, opt.init({"w": torch.ones(3)}))
        torch.testing.assert_close(found["w"].full(), torch.full((3,), 0.9))
    slow = {"sympy", "torch._dynamo"}
    assert mesh.run(lambda: slow & set(sys.modules)) == [set(), set()]


MISSING = """
import torch
from spmd import Mesh, data_parallel, fetch, optimizer, spmd, value_and_grad

mesh = Mesh(AXES)
names = [f"{group}{part}" for group in "abcdef" for part in "01"]
params = {name: torch.arange(256.0) * place for place, name in enumerate(names, 1)}
groups = [{"params": [f"{group}0", f"{group}1"], "lr": 0.1} for group in "abcdef"]
opt = optimizer(torch.optim.SGD, shard=tuple(AXES), groups=groups, lr=0.1, momentum=0.9)
opt_state = opt.init(params)


@spmd(mesh=mesh)
@data_parallel
def step(params, opt_state, batch, without):
    grads = value_and_grad(lambda params: sum((p * p).sum() for p in params.values()) * batch.mean())(params)[1]
    return opt.step(params, {name: None if name[1] in without else grad for name, grad in grads.items()}, opt_state)


plain, momentum = dict(params), dict.fromkeys(names, 0)
for without in "", "1", "":
    params, opt_state = step(params, opt_state, torch.ones(4), without)
    for name in names:  # by hand: at its first step torch imports its compiler, for seconds
        if name[1] not in without:
            momentum[name] = 0.9 * momentum[name] + 2 * plain[name]
            plain[name] = plain[name] - 0.1 * momentum[name]
print(all(torch.allclose(fetch(params)[name], plain[name]) for name in names))
"""


def test_launched_ranks_divide_state_in_one_order(tmp_path):
    """Whatever seed Python has for the hashes of texts: they gather it over both axes, and could mix groups or axes."""
    quick = "mesh.close()\nimport os, sys\nsys.stdout.flush()\nos._exit(0)  # to tear down all modules takes longer\n"
    program = scripts.script(tmp_path, MISSING.replace("AXES", "{'data': 2, 'model': 2}") + quick)
    told = {"SPMD_SIZE": "4", "SPMD_INIT_METHOD": f"file://{tmp_path}/meet"}
    forked = f"{scripts.HERE}/forked.py"
    with contextlib.ExitStack() as stack:
        halves = [
            stack.enter_context(
                scripts.started(
                    *(forked, "2", program), fresh=True, env={**told, "SPMD_RANK": first, "PYTHONHASHSEED": seed}
                )
            )
            for first, seed in (("0", "1"), ("2", "2"))
        ]
        assert [half.communicate(timeout=HANGS) for half in halves] == [("True\nTrue\n", "")] * 2


@pytest.mark.long
@pytest.mark.parametrize("seed", ["1", "2"])
def test_state_is_gathered_in_the_order_of_its_axes(tmp_path, seed):
    program = scripts.script(tmp_path, MISSING.replace("AXES", "{'data': 2, 'model': 2}"))
    status, out, err = scripts.run(program, fresh=True, env={"PYTHONHASHSEED": seed})
    assert (status, out) == (0, "True\n"), err
