import copy
import gc
import threading
import warnings
import weakref

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from patience import HANGS
from torch import nn
from torch.nn.utils import parametrizations

from spmd import (
    SpecError,
    SpmdError,
    data_parallel,
    fetch,
    functional,
    functional_with_buffers,
    grad,
    pmean,
    put,
    spmd,
    value_and_grad,
)


class Tied(nn.Module):
    """A token embedding whose weight is the last layer's too, as language models have it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


MODULES = {
    "linear": (lambda: nn.Linear(3, 2), lambda: (torch.randn(4, 3),)),
    "nested": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 2))),
        lambda: (torch.randn(4, 3),),
    ),
    "tied": (Tied, lambda: (torch.tensor([0, 3, 3]),)),
    "shared submodule": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2), lambda: (torch.randn(4, 3),)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2), lambda: (torch.randn(5, 2, 3),)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), lambda: (torch.randn(3, 2, 8),)),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)), lambda: (torch.randn(4, 2, 3, 3),)),
    "channels last": (
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        lambda: (torch.randn(1, 2, 5, 5),),
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), lambda: (torch.randn(4, 3),)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), lambda: (torch.randn(4, 3),)),
    "bfloat16": (lambda: nn.Linear(3, 2).bfloat16(), lambda: (torch.randn(4, 3).bfloat16(),)),
}


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", MODULES)
def test_apply_computes_what_the_module_computes(name):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, args = make(), inputs()
    before = copy.deepcopy(module.state_dict())
    apply, params = functional(module)
    shipped = cloudpickle.loads(cloudpickle.dumps(apply))
    outs = [first(f(params, *args)) for f in (apply, apply, shipped)]
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())
    expected = first(module(*args))
    for out in outs:
        assert torch.equal(out, expected)
    doubled = {key: value * 2 for key, value in params.items()}
    if name != "weight norm":
        assert not torch.equal(first(apply(doubled, *args)), expected)
    assert torch.equal(first(apply(params, *args)), expected)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_the_module(name):
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, args = make(), inputs()
    apply, params = functional(module)
    leaves = {key: value.requires_grad_() for key, value in params.items()}
    first(apply(leaves, *args)).square().sum().backward()
    first(module(*args)).square().sum().backward()
    for key, param in module.named_parameters():
        assert torch.equal(leaves[key].grad, param.grad), key


def test_params_are_detached_copies_in_the_order_of_named_parameters():
    module = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last))
    _, params = functional(module)
    assert type(params) is dict
    assert list(params) == [name for name, _ in module.named_parameters()]
    for name, param in module.named_parameters():
        value = params[name]
        assert type(value) is torch.Tensor
        assert not value.requires_grad
        assert torch.equal(value, param)
        assert value.stride() == param.stride()
        assert value.data_ptr() != param.data_ptr()
    with torch.no_grad():
        params["0.weight"].zero_()
    assert module[0].weight.abs().sum() > 0


def test_a_tied_parameter_appears_once_under_its_first_name():
    module = Tied()
    apply, params = functional(module)
    assert list(params) == ["embedding.weight", "norm.weight", "norm.bias"]
    zeros = {**params, "embedding.weight": torch.zeros(5, 3)}
    assert torch.equal(apply(zeros, torch.tensor([1])), torch.zeros(1, 5))


def test_a_frozen_parameter_stays_a_frozen_parameter():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    module.count = nn.Parameter(torch.tensor(3), requires_grad=False)
    _, params = functional(module)
    frozen = {name for name, value in params.items() if isinstance(value, nn.Parameter)}
    assert frozen == {"0.weight", "0.bias", "count"}
    assert not any(value.requires_grad for value in params.values())


def partly_frozen(frozen):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    module[0].requires_grad_(not frozen)
    return functional(module)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_are_not_frozen_as_the_module_was(shared_mesh, frozen, shards):
    """They stay what they were when a module is unfrozen, or frozen, in the middle of a run: params goes on."""
    mesh = shared_mesh({"data": 2})

    def moved(apply, params):
        @spmd(mesh=mesh)
        @data_parallel(shards=shards)
        def step(params, batch):
            return value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)

        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                _, grads = step(params, torch.ones(4, 3))
            return bool(grads["0.weight"].any()), [str(one.message) for one in found]

    _, params = partly_frozen(not frozen)
    apply, own = partly_frozen(frozen)
    kept, (text,) = moved(apply, put(params, mesh=mesh))
    assert kept == frozen and "apply.params(fetch(params))" in text and "(got '0.weight', '0.bias')" in text
    assert ("are trained, and were frozen" if frozen else "are frozen, and were trainable") in text
    assert moved(apply, apply.params(fetch(put(params, mesh=mesh)))) == (not frozen, [])
    assert moved(apply, own) == (not frozen, [])


@pytest.mark.parametrize("where", ["here", "on the ranks"])
def test_a_module_that_is_frozen_after_its_function_was_made(shared_mesh, where):
    """Its parameters are copies, and were trained, silently."""
    mesh = shared_mesh({"data": 2})

    def made(*freeze):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        apply, params = functional(module)
        for part in freeze:
            part(module)
        if where == "here":
            apply(params, torch.ones(4, 3))
        else:
            spmd(lambda params, x: apply(params, x), mesh=mesh)(params, torch.ones(4, 3))

    def partly(module):
        module[0].requires_grad_(False)

    with pytest.warns(UserWarning, match=r"after functional was called.*got '0.weight', '0.bias'.*freeze them first"):
        made(partly)
    made()  # nor is there a warning of these
    made(lambda module: module.requires_grad_(False))
    made(partly, functional)  # the next function is made of it


def test_a_frozen_teacher_with_the_function_of_its_student(shared_mesh):
    module = nn.Linear(3, 1)
    apply, params = functional(module)
    _, teacher = functional(copy.deepcopy(module).requires_grad_(False))

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(params, teacher, batch):
        return value_and_grad(lambda p: (apply(teacher, batch) - apply(p, batch) - 1).square().mean())(params)

    step(params, teacher, torch.ones(4, 3))  # a warning would be an error


def test_a_parameter_that_is_not_there_is_none_still():
    apply, params = functional(nn.Linear(2, 2, bias=False))
    assert list(params) == ["weight"]
    assert apply(params, torch.ones(1, 2)).shape == (1, 2)


def test_the_module_is_neither_changed_nor_followed():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    apply, params = functional(module)
    x = torch.ones(64, 2)
    module.eval()
    with pytest.warns(UserWarning, match="is in training mode"):
        assert (apply(params, x) == 0).any(), "the mode is that of the call to functional"
    evaluate, _ = functional(module)
    module.train()
    assert torch.equal(evaluate(params, x), F.linear(x, params["0.weight"], params["0.bias"]))
    with torch.no_grad():
        module[0].weight.zero_()
    assert params["0.weight"].abs().sum() > 0


WEIGHTS_OF_BEFORE = "were changed after functional had copied them"


@pytest.mark.parametrize("split", [functional, lambda module: functional_with_buffers(module)[:2]])
def test_weights_that_a_module_gets_too_late(shared_mesh, split):
    mesh, module = shared_mesh({"data": 2}), nn.Linear(2, 1)
    loaded = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    for change in (lambda: module.load_state_dict(loaded), lambda: module.load_state_dict(loaded, assign=True)):
        apply, params = split(module)
        change()
        with pytest.warns(UserWarning, match=WEIGHTS_OF_BEFORE):
            mesh.run(id, apply)
        mesh.run(id, (apply, params))  # says it once
    apply, params = functional(module)
    nn.init.zeros_(module.weight)
    with pytest.warns(UserWarning, match=WEIGHTS_OF_BEFORE):
        apply(params, torch.ones(2))


def test_weights_that_a_module_gets_afterwards(shared_mesh):
    """Of those that params were taken from again, or that are written back, nothing is said."""
    mesh, module = shared_mesh({"data": 2}), nn.Linear(2, 1)
    first, _ = functional(module)
    kept, params = functional(module)
    nn.init.zeros_(module.weight)
    params = first.params(module.state_dict())
    step = spmd(lambda params: kept(params, torch.ones(2)), mesh=mesh)
    _, others = functional(module)
    assert float(step(params)) == float(first(params, torch.ones(2)))
    nn.init.ones_(module.weight)
    assert spmd(lambda params: kept(params, torch.ones(2)) * 2, mesh=mesh)(others).full() == 2 * float(step(params))


def evaluated(mesh, apply, params):
    """What a step that evaluates warns of."""

    @spmd(mesh=mesh)
    @data_parallel
    def evaluate(params, batch):
        return pmean(apply(params, batch).mean(), "data")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            float(evaluate(params, torch.ones(4, 3)))
    return [str(one.message) for one in found]


@pytest.mark.parametrize("split", [functional, lambda module: functional_with_buffers(module)[:2]])
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda *parts: parametrizations.weight_norm(nn.Linear(3, 3))])
def test_a_module_that_goes_over_to_evaluation(shared_mesh, split, wrap):
    """What was made of it in training stays in training, which is told where it is called to evaluate."""
    mesh, module = shared_mesh({"data": 2}), wrap(nn.Linear(3, 3), nn.Dropout(0.5))
    apply, params = split(module)
    call = (lambda p, x: apply(p, x)) if split is functional else (lambda p, x: apply(p, {}, x)[0])
    grad(lambda p: call(p, torch.ones(2, 3)).sum())(params)
    assert evaluated(mesh, call, params) == []
    module.eval()
    grad(lambda p: call(p, torch.ones(2, 3)).sum())(params)
    (text,) = evaluated(mesh, lambda p, x: call(p, x) + 1, params)
    assert "is in training mode" in text and "predict, _ = functional(model.eval())" in text
    with pytest.warns(UserWarning, match="is in training mode"):
        call(params, torch.ones(2, 3))
    call(params, torch.ones(2, 3))  # says it once


def test_functions_of_a_module_in_both_modes(shared_mesh):
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    apply, params = functional(module)
    predict, _ = functional(module.eval())
    for function in (apply, predict):
        assert evaluated(shared_mesh({"data": 2}), function, params) == []
    module.train()
    assert evaluated(shared_mesh({"data": 2}), predict, params) == []


def test_args_and_kwargs_reach_forward_even_those_named_like_ours():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, *, params, self_=1, buffers=0):
            return self.w * x + params + buffers

    apply, params = functional(Scale())
    assert apply(params, torch.tensor(3.0), params=1.0, buffers=10.0) == 17


def test_buffers_are_constants_of_functional():
    module = nn.BatchNorm1d(2)
    apply, params = functional(module)
    x = torch.randn(8, 2) * 3 + 5
    size = len(cloudpickle.dumps(apply))
    expected = F.batch_norm(x, None, None, module.weight, module.bias, training=True)
    for _ in range(2):
        assert torch.equal(apply(params, x), expected)
    assert torch.equal(module.running_mean, torch.zeros(2))
    assert len(cloudpickle.dumps(apply)) == size
    evaluate, _ = functional(module.eval())
    assert torch.allclose(evaluate(params, x), x, atol=1e-3)


def test_functional_with_buffers_returns_new_buffers_and_leaves_the_old():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    apply, params, buffers = functional_with_buffers(module)
    assert list(buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    old = {name: value.clone() for name, value in buffers.items()}
    x = torch.randn(8, 3)
    state = buffers
    for step in range(3):
        out, state = apply(params, state, x)
        assert torch.equal(out, module(x))
        assert state["1.num_batches_tracked"] == step + 1
    for name, value in module.named_buffers():
        assert torch.equal(value, state[name])
        assert torch.equal(buffers[name], old[name])
        assert state[name].data_ptr() != buffers[name].data_ptr()
    shipped = cloudpickle.loads(cloudpickle.dumps(apply))
    assert torch.equal(shipped(params, buffers, x)[1]["1.running_mean"], apply(params, buffers, x)[1]["1.running_mean"])


class Counter(nn.Module):
    """Buffers of every kind: tied, not persistent, rebound, absent."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0), persistent=False)
        self.register_buffer("same", self.count)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("absent", None)
        self.child = nn.Module()
        self.child.register_buffer("count", self.count)

    def forward(self, x):
        self.count += 1
        self.mean = self.mean + x
        self.absent = x
        return self.child.count + self.same


def test_tied_nonpersistent_and_rebound_buffers():
    apply, params, buffers = functional_with_buffers(Counter())
    assert params == {}
    assert list(buffers) == ["count", "mean"]
    out, new = apply(params, buffers, torch.ones(2))
    assert out == 2
    assert new["count"] == 1
    assert torch.equal(new["mean"], torch.ones(2))
    assert buffers["count"] == 0
    constant, _ = functional(Counter())
    assert [constant({}, torch.ones(2)).item() for _ in range(2)] == [2, 2]


def test_nothing_that_forward_assigns_outlives_the_call():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.hidden = self.layer(x)
            if hasattr(self, "added"):
                self.hidden = self.added(self.hidden)
            self.added = nn.Tanh()
            return self.hidden * self.calls

    apply, params = functional(Caching())
    size = len(cloudpickle.dumps(apply))
    x = torch.ones(1, 2)
    params = {name: value.requires_grad_() for name, value in params.items()}
    first_out, second_out = apply(params, x), apply(params, x)
    assert torch.equal(first_out, second_out)
    assert len(cloudpickle.dumps(apply)) == size
    activation = weakref.ref(first_out)
    del first_out, second_out
    gc.collect()
    assert activation() is None


def test_the_parameters_of_a_call_are_not_kept_alive():
    for make, inputs in MODULES.values():
        module, args = make(), inputs()
        apply, params = functional(module)
        apply(params, *args)
        alive = [weakref.ref(value) for value in params.values()]
        del params
        gc.collect()
        assert not any(ref() is not None for ref in alive)


def test_a_failed_call_leaves_no_trace():
    apply, params = functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    expected = apply(params, torch.eye(2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        apply(params, torch.ones(2, 5))
    assert torch.equal(apply(params, torch.eye(2)), expected)


def test_the_skeleton_weighs_nothing():
    apply, params, _ = functional_with_buffers(nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)))
    assert len(cloudpickle.dumps(apply)) < 10_000
    apply(
        params,
        {
            "1.running_mean": torch.zeros(1000),
            "1.running_var": torch.ones(1000),
            "1.num_batches_tracked": torch.tensor(0),
        },
        torch.zeros(2, 1000),
    )
    assert len(cloudpickle.dumps(apply)) < 10_000


@pytest.mark.parametrize("name", MODULES)
def test_a_call_does_not_change_the_pickled_bytes(name):
    make, inputs = MODULES[name]
    apply, params = functional(make())
    before = cloudpickle.dumps(apply)
    apply(params, *inputs())
    assert cloudpickle.dumps(apply) == before


def test_several_threads_may_call_the_same_function():
    """The first of them to come ends first, and the compiler, whose state they share, compiles afterwards."""
    import torch._dynamo

    meet, ended = threading.Barrier(3, timeout=HANGS), [threading.Event() for _ in range(4)]
    ended[-1].set()

    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(0.0))

        def forward(self, turns):
            turns.append(meet.wait())
            ended[turns[0] - 1].wait(HANGS)
            return self.w + 0

    apply, _ = functional(Meeting())
    results = [None] * 3

    def run(number):
        turns = []
        results[number] = apply({"w": torch.tensor(float(number))}, turns)
        ended[turns[0]].set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert results == [0.0, 1.0, 2.0]
    graphs = []
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph)(torch.ones(2))
    assert len(graphs) == 1


def test_torch_func_transforms_work_on_apply():
    apply, params = functional(nn.Linear(3, 1))
    xs = torch.randn(5, 3)
    grads = torch.func.vmap(torch.func.grad(lambda p, x: apply(p, x).sum()), in_dims=(None, 0))(params, xs)
    assert torch.equal(grads["weight"][:, 0], xs)
    stacked = {name: torch.stack([value, 2 * value]) for name, value in params.items()}
    both = torch.func.vmap(apply, in_dims=(0, None))(stacked, xs)
    assert torch.allclose(both[1], 2 * both[0])


@pytest.mark.parametrize("own", [grad, torch.func.grad])
def test_a_step_after_a_transform_of_torch(shared_mesh, own):
    """What the first call of all, within a transform, leaves in `apply` is nothing of the transform's."""
    apply, params = functional(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval()))
    xs = torch.randn(4, 3)

    def loss(params, batch):
        return apply(params, batch).square().mean()

    wanted = torch.func.grad(loss)(params, xs)
    step = spmd(data_parallel(lambda params, batch: grad(loss)(params, batch)), mesh=shared_mesh({"data": 2}))
    torch.testing.assert_close({name: value.full() for name, value in step(params, xs).items()}, wanted)
    assert torch.equal(apply(params, xs), apply(params, xs))

    def adapted(params, batch, own=own):
        gradients = own(loss)(params, batch)
        return loss({name: value - gradients[name] for name, value in params.items()}, batch)

    outer = spmd(data_parallel(lambda params, batch: grad(adapted)(params, batch)), mesh=shared_mesh({"data": 2}))
    found = {name: value.full() for name, value in outer(params, xs).items()}
    parts = (xs,) if own is grad else (xs[:2], xs[2:])  # torch's is of a rank's own samples
    each = [torch.func.grad(adapted)(params, part, torch.func.grad) for part in parts]
    torch.testing.assert_close(found, {name: sum(one[name] for one in each) / len(each) for name in found})


def test_hooks_run():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, out: out + 1)
    apply, params = functional(module)
    assert torch.equal(apply(params, torch.ones(1, 2)), module(torch.ones(1, 2)))


@pytest.mark.parametrize("register", [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook])
def test_hooks_of_parameters_are_refused_as_they_would_not_run(register):
    module = nn.Sequential(nn.Linear(2, 2))
    handle = register(module[0].weight, lambda gradient: None)
    with pytest.raises(SpecError, match=r"'0.weight' has a hook .* never be called: .* step: grads\['0.weight'\]"):
        functional(module)
    handle.remove()
    functional(module)


def test_plain_tensors_stay_even_those_with_a_history():
    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.scale = torch.tensor(3.0)
            self.derived = self.layer.weight * 2

        def forward(self, x):
            return self.layer(x) @ self.derived * self.scale

    module = Derived()
    apply, params = functional(module)
    assert torch.equal(apply(params, torch.ones(1, 2)), module(torch.ones(1, 2)))
    cloudpickle.dumps(apply)


def test_a_module_that_cannot_be_copied_is_refused_by_name():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(SpmdError, match=r"cannot copy the module Locked .*lock"):
        functional(Locked())


@pytest.mark.parametrize("function", [functional, functional_with_buffers])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(SpecError, match=r"expected a torch.nn.Module, got dict"):
        function({"w": torch.zeros(2)})
    with pytest.raises(SpecError, match=r"functional\(Linear\(...\)\)"):
        function(nn.Linear)
    with pytest.raises(SpecError, match="'weight' is not initialised"):
        function(nn.LazyLinear(2))
    with pytest.raises(SpecError, match=r"'0', an embedding that.*torch.renorm\(params\['0.weight'\], 2.0, 0, 1.5\)}"):
        function(nn.Sequential(nn.Embedding(3, 2, max_norm=1.5)))


def test_wrong_names_are_refused_by_name():
    apply, params = functional(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with pytest.raises(SpecError, match="misses 'bias'"):
        apply({"weight": params["weight"]}, x)
    with pytest.raises(SpecError, match="unexpected 'extra'"):
        apply({**params, "extra": x}, x)
    with pytest.raises(SpecError, match="got list"):
        apply(list(params.values()), x)
    apply, params, _ = functional_with_buffers(nn.BatchNorm1d(2))
    with pytest.raises(SpecError, match="'buffers' of apply misses 'running_mean'"):
        apply(params, {}, x)
