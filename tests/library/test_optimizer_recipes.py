"""Groups, schedules, clipping and averages, against plain torch on the whole batch, at 1, 2 and 3 ranks."""

import doctest
import pickle
import re
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import cases
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import spmd as library
from spmd import P, Sharded, SpecError, data_parallel, ema, functional, grad, optimizer, spmd, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Tied(nn.Module):
    """An embedding and a head with one weight, of sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.inner = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.norm(self.embedding(x)))))


def model():
    torch.manual_seed(0)
    return Tied()


X = torch.randint(0, 11, (13,), generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 11, (13,), generator=torch.Generator().manual_seed(2))
STEPS = 5


def is_plain(name, p):
    return p.ndim < 2


def trained(mesh, opt, steps=STEPS, resume=None):
    apply, params = functional(model())
    opt_state = opt.init(params)

    @spmd(mesh=mesh, check="always")
    @data_parallel
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(lambda params, batch: F.cross_entropy(apply(params, batch["x"]), batch["y"]))(
            params, batch
        )
        params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state, loss

    for _ in range(steps):
        params, opt_state, _ = step(params, opt_state, {"x": X, "y": Y})
    return {name: value.full() for name, value in params.items()}, opt_state


def by_torch(make, steps=STEPS):
    """The same by torch: `make(module)` gives an optimizer, and a function to be called before and after its step."""
    module = model()
    reference, before, after = make(module)
    for _ in range(steps):
        reference.zero_grad()
        F.cross_entropy(module(X), Y).backward()
        before()
        reference.step()
        after()
    return {name: value.detach() for name, value in module.named_parameters()}


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def nothing():
    pass


def torch_groups(module):
    named = dict(module.named_parameters())
    return [
        {"params": [p for p in named.values() if p.ndim >= 2]},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


RANKS, SHARDS = (1, 2, 3), ("auto", None, "data")


@pytest.mark.parametrize(("size", "shard"), cases(lambda size, shard: size == 3 or shard == "auto", RANKS, SHARDS))
def test_groups(shared_mesh, size, shard):
    wanted = by_torch(lambda module: (optim.AdamW(torch_groups(module), lr=0.01, weight_decay=0.3), nothing, nothing))
    names = [name for name, p in model().named_parameters() if p.ndim < 2]
    booleans = {name: p.ndim < 2 for name, p in model().named_parameters()}
    for which in (is_plain, names, booleans):
        groups = [{"params": which, "weight_decay": 0.0, "lr": 0.02}]
        opt = optimizer(optim.AdamW, shard=shard, groups=groups, lr=0.01, weight_decay=0.3)
        found, opt_state = trained(shared_mesh({"data": size}), opt)
        assert_close(found, wanted)
        assert opt_state["groups"] == [{"lr": 0.02, "weight_decay": 0.0}]


def test_the_first_group_that_names_a_parameter_has_it():
    params = {"a": {"w": torch.ones(1), "b": torch.ones(1)}, "c": torch.ones(1)}
    groups = [
        {"params": lambda name, p: name == "a.b", "lr": 2.0},
        {"params": {"a": True, "c": False}, "lr": 3.0, "momentum": 0.5},
    ]
    opt = optimizer(optim.SGD, lr=1.0, groups=groups)
    opt_state = opt.init(params)
    new, opt_state = opt.step(params, params, opt_state)
    assert (new["a"]["b"], new["a"]["w"], new["c"]) == (-1, -2, 0)
    assert [*opt_state["state"]] == ["['a']['w']"]
    # What a group has not of its own follows the others.
    opt_state["hyper"]["weight_decay"] = 1.0
    opt_state["groups"][1]["lr"] = 0.0
    new, _ = opt.step(params, params, opt_state)
    assert (new["a"]["b"], new["a"]["w"], new["c"]) == (-3, 1, -1)


SCHEDULERS = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=7),
    "one-cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=12),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)], [2]
    ),
    "class": lr_scheduler.ExponentialLR,
}


def one_with_all_others_with_one(name, size, shard):
    """The rates are the same on any number of ranks, however the state is cut."""
    return (name == "cosine" and (size == 3 or shard == "auto")) or (size, shard) == (3, "auto")


@pytest.mark.parametrize(
    ("name", "size", "shard"), cases(one_with_all_others_with_one, SCHEDULERS, RANKS, ("auto", None))
)
def test_schedulers_of_torch(shared_mesh, name, size, shard):
    make = SCHEDULERS[name]
    factory = make if not isinstance(make, type) else lambda opt: make(opt, gamma=0.7)

    def reference(module):
        own = optim.SGD(torch_groups(module), lr=0.05, momentum=0.9)
        return own, nothing, factory(own).step

    groups = [{"params": is_plain, "weight_decay": 0.0, "lr": 0.02}]
    opt = optimizer(optim.SGD, shard=shard, groups=groups, schedule=factory, lr=0.05, momentum=0.9)
    found, opt_state = trained(shared_mesh({"data": size}), opt)
    assert_close(found, by_torch(reference))
    assert int(opt_state["count"]) == STEPS and opt_state["hyper"]["lr"] == 0.05


class DecaySchedule(lr_scheduler.LRScheduler):
    """Raises the weight decay, and leaves the rate."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * (1 + self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(("make", "decays"), [(lr_scheduler.ConstantLR, [0, 0.5]), (DecaySchedule, [0.1, 0.2])])
def test_a_scheduler_sets_what_it_writes_and_the_rest_may_be_changed(make, decays):
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.5, weight_decay=0.0, schedule=lambda opt: make(opt))
    params = {"w": torch.ones(1)}
    opt_state = opt.init(params)
    w, momentum, change = params["w"].clone(), 0.0, {}
    for number, decay in enumerate(decays):
        opt_state["hyper"] |= change
        params, opt_state = opt.step(params, {"w": torch.ones(1)}, opt_state)
        rate = 1.0 if make is DecaySchedule else 1 / 3
        momentum = (0.25 if number else 0.5) * momentum + 1 + decay * w
        w -= rate * momentum
        torch.testing.assert_close(params["w"], w)
        change = {"momentum": 0.25, "weight_decay": 0.5}
    assert opt_state["hyper"] == {"lr": 1.0, "dampening": 0, **change}


class OnGpu(torch.Tensor):
    """Plays a tensor of a GPU: what is computed from it is one, too, until it is asked to come to the host."""

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_a_rate_that_is_a_tensor_is_left_as_it_is():
    """A scheduler writes to it; another optimizer, or this one on a rank, would begin with what it wrote."""
    rate, w = torch.tensor(0.5), torch.ones(3)
    for _ in range(2):
        opt = optimizer(torch.optim.SGD, lr=rate, schedule=lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 2))
        params, opt_state = {"w": w}, opt.init({"w": w})
        found = []
        for step in range(4):
            if step == 2:
                opt = pickle.loads(cloudpickle.dumps(opt))
            params, opt_state = opt.step(params, {"w": w}, opt_state)
            found.append(float(params["w"][0]))
        assert found == [0.75, 0.5, 0.0, -0.5]
        assert rate == opt_state["hyper"]["lr"] == 0.5


def test_steps_are_counted_on_the_host():
    """A count that came back on a GPU would be waited for at every step, with all that the GPU does before."""
    opt, params = optimizer(optim.SGD, schedule=lambda step: 0.5**step, lr=1.0), {"w": torch.ones(2)}
    opt_state = opt.init(params)
    opt_state["count"] = opt_state["count"].as_subclass(OnGpu)
    assert type(opt_state["count"] + 1) is OnGpu
    for expected in (0.0, -0.5):
        params, opt_state = opt.step(params, {"w": torch.ones(2)}, opt_state)
        assert params["w"].tolist() == [expected] * 2 and type(opt_state["count"]) is torch.Tensor


@pytest.mark.parametrize("shard", ["auto", None])
def test_functions_of_the_step_and_numbers(shared_mesh, shard):
    def rates(step):
        return 0.1 / (step + 1)

    def reference(module):
        own = optim.AdamW(module.parameters())
        steps = iter(range(STEPS))
        return own, lambda: own.param_groups[0].update(lr=rates(next(steps))), nothing

    mesh = shared_mesh({"data": 2})
    assert_close(trained(mesh, optimizer(optim.AdamW, shard=shard, schedule=rates))[0], by_torch(reference))
    constant = by_torch(lambda module: (optim.AdamW(module.parameters(), lr=0.02), nothing, nothing))
    assert_close(trained(mesh, optimizer(optim.AdamW, shard=shard, schedule=0.02))[0], constant)


def test_a_run_taken_up_goes_on_with_its_schedule():
    params = {"w": torch.ones(3)}
    make = lambda: optimizer(optim.SGD, lr=1.0, schedule=lambda opt: lr_scheduler.StepLR(opt, 2, 0.1))  # noqa: E731
    opt = make()
    opt_state = opt.init(params)
    for _ in range(3):
        params, opt_state = opt.step(params, {"w": torch.ones(3)}, opt_state)
    again, _ = make().step(params, {"w": torch.ones(3)}, opt_state)
    assert torch.equal(again["w"], opt.step(params, {"w": torch.ones(3)}, opt_state)[0]["w"])
    torch.testing.assert_close(params["w"], torch.full((3,), 1 - 2.1))


@pytest.mark.parametrize(
    ("size", "shard", "clip"),
    cases(lambda size, shard, clip: size == 3 or (shard, clip) == ("auto", 0.05), RANKS, SHARDS, (0.05, 100.0)),
)
def test_clipping(shared_mesh, size, shard, clip):
    def reference(module):
        own = optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        return own, lambda: nn.utils.clip_grad_norm_(module.parameters(), clip), nothing

    opt = optimizer(optim.SGD, shard=shard, clip=clip, lr=0.5, momentum=0.9)
    assert_close(trained(shared_mesh({"data": size}), opt)[0], by_torch(reference))


@pytest.mark.parametrize(
    ("shard", "dtype"),
    [("auto", torch.float32), (None, torch.float32), ("data", torch.float32), ("auto", torch.float16)],
)
def test_clipping_by_the_norm_of_parameters_that_are_cut(shared_mesh, shard, dtype):
    """In half precision the square of the norm would be infinite."""
    mesh = shared_mesh({"data": 2, "model": 2})
    opt = optimizer(optim.SGD, shard=shard, clip=0.5, lr=1.0)
    params = {"cut": torch.ones(4, dtype=dtype), "whole": torch.ones(3, dtype=dtype)}

    def step(params, opt_state):
        grads = {"cut": params["cut"] * 300.0, "whole": params["whole"] * 400.0}
        return opt.step(params, grads, opt_state)[0]

    specs = {"cut": P("model"), "whole": P()}
    found = spmd(step, mesh=mesh, in_specs=(specs, None), out_specs=specs)(params, opt.init(params))
    norm = (4 * 9 + 3 * 16) ** 0.5
    torch.testing.assert_close(found["cut"].full(), 1 - 3 * 0.5 / norm * torch.ones(4, dtype=dtype))
    torch.testing.assert_close(found["whole"].full(), 1 - 4 * 0.5 / norm * torch.ones(3, dtype=dtype))


def test_clipping_gradients_of_several_dtypes():
    """Torch multiplies by the factor as it is, and does not round it to each gradient's dtype first."""
    params = {"w": torch.zeros(1000, dtype=torch.bfloat16), "v": torch.zeros(10), "scale": torch.zeros(())}
    params["wide"] = torch.zeros(2, dtype=torch.float64)
    grads = {
        name: torch.randn(value.shape, generator=torch.Generator().manual_seed(0)) for name, value in params.items()
    }
    grads = {name: value.to(params[name]) for name, value in grads.items()}
    opt = optimizer(optim.SGD, lr=1.0, clip=1.0)
    found, _ = opt.step(params, grads, opt.init(params))
    reference = [nn.Parameter(value.clone()) for value in params.values()]
    for param, gradient in zip(reference, grads.values(), strict=True):
        param.grad = gradient.clone()
    nn.utils.clip_grad_norm_(reference, 1.0)
    assert all(torch.equal(-value, param.grad) for value, param in zip(found.values(), reference, strict=True))


@pytest.mark.parametrize(("size", "shard"), cases(lambda size, shard: size == 3, RANKS, ("auto", None)))
def test_averages_compose_with_the_rest(shared_mesh, size, shard):
    averaged = []

    def reference(module):
        own = optim.AdamW(torch_groups(module), lr=0.01, weight_decay=0.3)
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        average.update_parameters(module)  # the first makes it a copy
        averaged.append(average.module)
        return (
            own,
            lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
            lambda: average.update_parameters(module),
        )

    groups = [{"params": is_plain, "weight_decay": 0.0, "lr": 0.02}]
    opt = ema(optimizer(optim.AdamW, shard=shard, groups=groups, clip=0.1, lr=0.01, weight_decay=0.3), decay=0.9)
    found, opt_state = trained(shared_mesh({"data": size}), opt)
    assert_close(found, by_torch(reference))
    wanted = {name: value.detach() for name, value in averaged[0].named_parameters()}
    assert_close({name: value.full() for name, value in opt_state["ema"].items()}, wanted)


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adagrad, optim.Muon] if hasattr(optim, "Muon") else [optim.AdamW])
def test_state_sharded_by_itself_goes_on_anywhere(shared_mesh, tmp_path, cls):
    """On two ranks, one, in the driver without any, on three: with checkpoints between, as if it had been one run."""
    opt, plain = optimizer(cls, lr=0.1), optimizer(cls, shard=None, lr=0.1)
    params = expected = {"w": torch.randn(13, 11, generator=torch.Generator().manual_seed(0)), "v": torch.ones(7, 10)}
    opt_state, reference = opt.init(params), plain.init(params)
    for turn, size in enumerate((2, 1, None, 3, 2)):
        grads = {name: value * (turn + 1) for name, value in expected.items()}
        if size is None:
            params, opt_state = opt.step(params, grads, opt_state)
        else:
            mesh = shared_mesh({"data": size})
            params, opt_state = spmd(opt.step, mesh=mesh)(params, grads, opt_state)
            library.save(tmp_path / str(turn), {"params": params, "opt_state": opt_state})
            restored = library.restore(tmp_path / str(turn))
            params, opt_state = restored["params"], restored["opt_state"]
        expected, reference = plain.step(expected, grads, reference)
        for name in expected:
            assert torch.equal(params[name], expected[name]), (turn, name)


def test_a_gradient_missing_for_a_while_in_a_sharded_step(shared_mesh):
    """The state of the leaf that has none stays as it is, as torch leaves it."""
    opt, plain = optimizer(optim.AdamW, lr=0.1), optimizer(optim.AdamW, shard=None, lr=0.1)
    params = expected = {"a": torch.ones(70), "b": torch.ones(130), "c": torch.ones(3)}
    opt_state, reference = opt.init(params), plain.init(params)
    run = spmd(opt.step, mesh=shared_mesh({"data": 2}))
    for missing in (None, "b", "b", "a", None, None):
        grads = {name: None if name == missing else torch.full_like(p, 0.5) for name, p in expected.items()}
        params, opt_state = run(params, grads, opt_state)
        expected, reference = plain.step(expected, grads, reference)
        for name in expected:
            assert torch.equal(params[name].full(), expected[name]), (missing, name)


def test_gradients_of_their_own_are_not_taken_for_one(shared_mesh):
    """Ranks that go their own ways, and gradients that the step has worked on: nothing is sharded by itself."""
    opt = optimizer(optim.AdamW, lr=0.1)

    def own_ways(w, x):
        opt_state = opt.init(w)
        for _ in range(2):
            w, opt_state = opt.step(w, grad(lambda w: ((w - x) ** 2).sum(), axes=())(w), opt_state)
        return Sharded(w, P("data"))

    x = torch.tensor([[1.0], [-1.0]])
    found = spmd(own_ways, mesh=shared_mesh({"data": 2}), in_specs=(P(), P("data")))(torch.zeros(1, 1), x)
    assert found.full()[0] > 0.1 and found.full()[1] < -0.1


def test_the_examples_in_the_documentation_are_right():

    assert doctest.testmod(spmd_module("averaging")).failed == 0


def spmd_module(name):
    return sys.modules[f"spmd.optim.{name}"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": {"a": 1}}, r"unexpected argument 'groups' .*write groups=\[\{"),
        ({"groups": [{"params": ["w"], "momentum": 1}]}, "AdamW does not take 'momentum'"),
        ({"schedule": "cosine"}, r"unexpected argument 'schedule'.*as in schedule=lambda opt: StepLR\(opt"),
        ({"schedule": lambda step: "fast"}, "schedule= made no scheduler"),
        ({"schedule": lambda opt: lr_scheduler.ReduceLROnPlateau(opt)}, "ReduceLROnPlateau looks at a metric"),
        ({"schedule": lr_scheduler.StepLR}, "missing 1 required positional argument: 'step_size'"),
        ({"schedule": lambda step: 0.1, "groups": [{"params": ["w"], "lr": 1.0}]}, "learning rate of its own"),
        ({"clip": -1.0}, "unexpected argument 'clip' .*positive"),
        ({"clip": True}, "unexpected argument 'clip'"),
    ],
)
def test_what_is_refused_at_once(options, text):
    with pytest.raises(SpecError, match=text):
        optimizer(optim.AdamW, **options)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ("bias", r"groups\[0\] is a text .*'bias'.*write \"params\": \['bias'\]"),
        ({"w": "yes", "bias": True}, r"groups\[0\] got a bad value for w .*'yes'.*True or False"),
        (torch.ones(2), r"groups\[0\] got a bad value for w .*tensor\(\[1., 1.\]\).* or a list of names"),
        (["bais"], "names 'bais', which is no parameter"),
    ],
    ids=["a text", "a tree of texts", "a parameter", "a list"],
)
def test_groups_that_name_no_parameters(params, text):
    """Texts were true for all parameters, silently."""
    opt = optimizer(optim.SGD, lr=0.1, groups=[{"params": params, "lr": 1.0}])
    with pytest.raises(SpecError, match=text):
        opt.init({"w": torch.ones(2), "bias": torch.ones(2)})


def test_a_group_that_no_parameter_belongs_to():
    """As of a function that returns nothing, or under names that an earlier group has."""
    params = {"w": torch.ones(2), "bias": torch.ones(2), "name": "linear"}
    for groups, number in (
        ([{"params": lambda name, p: None, "lr": 1.0}], 0),
        ([{"params": ["bias"], "lr": 1.0}, {"params": ["bias"], "lr": 2.0}], 1),
    ):
        words = rf"no parameter belongs to groups\[{number}\].*got parameters \['w', 'bias'"
        with pytest.warns(UserWarning, match=words):
            optimizer(optim.SGD, lr=0.1, groups=groups).init(params)


def test_a_factor_given_as_a_rate():
    with pytest.warns(
        UserWarning, match=r"no factor for that of lr= \(got lr=0.1, and 1.0 for step 0\).*LambdaLR\(opt"
    ):
        optimizer(optim.SGD, lr=0.1, schedule=lambda step: 0.5**step)
    optimizer(optim.SGD, lr=0.1, schedule=lambda step: 0.1 * min(1, step / 10))  # a warm-up


def test_what_torch_s_optimizers_have():
    opt = optimizer(optim.SGD, lr=0.1)
    for name, words in (("zero_grad", "none to reset"), ("param_groups", "schedule="), ("state_dict", r"save\(")):
        with pytest.raises(AttributeError, match=f"Optimizer has no attribute '{name}': .*{words}"):
            getattr(opt, name)
    with pytest.raises(AttributeError, match=r"none to reset"):
        ema(opt).zero_grad()
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        opt.other  # noqa: B018


def test_what_is_refused_with_the_parameters():
    params = {"w": torch.ones(2)}
    with pytest.raises(SpecError, match=r"names 'v', which is no parameter"):
        optimizer(optim.AdamW, groups=[{"params": ["v"], "lr": 1.0}]).init(params)
    with pytest.raises(SpecError, match=r"of groups\[0\] does not fit the parameters"):
        optimizer(optim.AdamW, groups=[{"params": {"v": True}, "lr": 1.0}]).init(params)
    for which in (re.compile("w").search, lambda name: name == "w"):
        with pytest.raises(SpecError, match=r"of groups\[0\] is a function that fails for a name .*lambda name, p: "):
            optimizer(optim.AdamW, groups=[{"params": which, "lr": 1.0}]).init(params)
    with pytest.raises(SpecError, match=r"groups are given to optimizer .*write optimizer\(\.\.\., groups="):
        optimizer(optim.AdamW).init([{"params": [params["w"]], "weight_decay": 0.0}])
    assert optimizer(optim.AdamW).init([{"params": params["w"]}])["state"] == {}  # a tree like another
    opt = optimizer(optim.AdamW, schedule=0.1)
    with pytest.raises(SpecError, match=r"unexpected form .*'count'"):
        opt.step(params, params, optimizer(optim.AdamW).init(params))
    with pytest.raises(SpecError, match="ema got an unexpected argument 'decay'"):
        ema(opt, 2.0)
    assert ema(opt, np.float32(0.5)).init(params)["ema"]["w"].equal(params["w"])
    with pytest.raises(SpecError, match="opt_state has no 'ema'"):
        ema(opt).step(params, params, opt.init(params))
