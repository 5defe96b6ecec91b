"""`torch.compile` around what a step captures: the same as eager, or refused in words."""

import sys

import cloudpickle
import pytest
import torch
from scripts import launched, script

import spmd
from spmd import P, SpecError, all_gather, data_parallel, functional, grad, optimizer, psum, value_and_grad

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCH = {"x": torch.arange(12.0).reshape(4, 3) / 10, "y": torch.ones(4, 1)}


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x


def plain(function, **options):
    return function


def model_and_params():
    torch.manual_seed(0)
    return functional(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))


def loss_and_grads(mesh, compiled, **options):
    apply, params = model_and_params()

    def loss_fn(p, batch):
        return (apply(p, batch["x"]) - batch["y"]).square().mean()

    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(p, batch):
        return value_and_grad(compiled_loss)(p, batch)

    compiled_loss = compiled(loss_fn, **options)
    return [step(params, BATCH) for _ in range(2)][-1]


def applied(mesh, compiled, **options):
    apply, params = model_and_params()
    run = compiled(apply, **options)

    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(p, batch):
        return value_and_grad(lambda p, b: (run(p, b["x"]) - b["y"]).square().mean())(p, batch)

    return step(params, BATCH)


def trained(mesh, compiled, **options):
    apply, params = model_and_params()
    opt = optimizer(torch.optim.Adam, lr=0.1)
    state = opt.init(params)
    update = compiled(opt.step, **options)

    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(p, s, batch):
        loss, g = value_and_grad(lambda p, b: (apply(p, b["x"]) - b["y"]).square().mean())(p, batch)
        p, s = update(p, g, s)
        return loss, p, s

    for _ in range(2):
        loss, params, state = step(params, state, BATCH)
    return loss, params


def trained_compiled_within(mesh, compiled, **options):
    return trained(mesh, lambda function: lambda *args: compiled(function, **options)(*args))


def collectives(mesh, compiled, **options):
    def combine(x):
        total = psum(x.sum(), "data")
        return total * 2 + all_gather(x, "data").sum()

    run = compiled(combine, **options)
    return spmd.spmd(lambda x: run(x), in_specs=P("data"), mesh=mesh)(BATCH["x"])


def gradient_through_a_collective(mesh, compiled, **options):
    def norm(w, x):
        return psum((w * x).square().sum(), "data")

    run = compiled(norm, **options)
    return spmd.spmd(lambda x: grad(run)(torch.ones(3), x), in_specs=P("data"), mesh=mesh)(BATCH["x"])


def an_object(mesh, compiled, **options):
    run = compiled(Scale(3.0), **options)
    return spmd.spmd(lambda x: psum(run(x), "data"), mesh=mesh)(torch.ones(2))


def a_module(mesh, compiled, **options):
    torch.manual_seed(0)
    module = compiled(torch.nn.Linear(3, 1), **options)
    apply, params = functional(module)
    return spmd.spmd(lambda p, x: psum(apply(p, x).sum(), "data"), mesh=mesh)(params, BATCH["x"])


PROGRAMS = [
    *(loss_and_grads, applied, trained, trained_compiled_within, collectives, gradient_through_a_collective),
    *(an_object, a_module),
]


def leaves(result):
    return [leaf.full() for leaf in torch.utils._pytree.tree_leaves(result)]


def check(mesh, program, backend):
    expected, found = leaves(program(mesh, plain)), leaves(program(mesh, torch.compile, backend=backend))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager_on_a_driver(shared_mesh, program, backend):
    check(shared_mesh({"data": 2}), program, backend)


@pytest.mark.filterwarnings("ignore")
def test_inductor(shared_mesh):
    check(shared_mesh({"data": 2}), loss_and_grads, "inductor")


LAUNCHED = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import spmd
from test_compile import PROGRAMS, check
mesh = spmd.Mesh({"data": 2})
for program in PROGRAMS:
    check(mesh, program, "aot_eager")
print("equal")
"""


def test_as_in_eager_on_launched_ranks(tmp_path):
    code, out, err = launched(2, script(tmp_path, LAUNCHED), __file__.rpartition("/")[0])
    assert code == 0 and out.count("equal") == 2, err


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_refused(shared_mesh):
    mesh = shared_mesh({"data": 2})
    step = spmd.spmd(lambda x: psum(x, "data"), mesh=mesh)
    for compiled in (torch.compile(step, backend="eager"), torch.compile(lambda x: step(x) + 0, backend="eager")):
        with pytest.raises(SpecError, match=r"an @spmd function.*compile what is inside"):
            compiled(torch.ones(2))
    assert step(torch.ones(2)).full().tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_compile_of_a_module_does_is_said():
    module = torch.nn.Linear(2, 1)
    module.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"does not carry Linear.compile\(\): write torch.compile\(apply\)"):
        functional(module)
