"""`torch.compile` around what a step captures: the same as eager, or refused in words."""

import os
import signal
import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from internals import ranks_import
from scripts import launched, run, script
from torch.fx.experimental.proxy_tensor import make_fx

import spmd
from spmd import (
    P,
    SpecError,
    all_gather,
    all_to_all,
    data_parallel,
    functional,
    grad,
    optimizer,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCH = {"x": torch.arange(12.0).reshape(4, 3) / 10, "y": torch.ones(4, 1)}


@pytest.fixture
def with_compiler():
    """Ranks of meshes made in this test have imported torch's compiler, which else takes each of them seconds."""
    with ranks_import("torch._dynamo.backends.debugging"):
        yield


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
    return [step(params, BATCH) for _ in range(3)][-1]


def a_gradient_made_outside(mesh, compiled, **options):
    """What wraps a compiled function is not taken for it, neither by pickle nor by the compiler."""
    gradient = value_and_grad(compiled(lambda w, x: (w * x).square().mean(), **options))
    twice = compiled(lambda w, x: gradient(w, x), **options)
    step = spmd.spmd(lambda x: (gradient(torch.ones(3), x), twice(torch.ones(3), x)), in_specs=P("data"), mesh=mesh)
    return [step(BATCH["x"]) for _ in range(3)][-1]


def a_whole_step(mesh, compiled, **options):
    apply, params = model_and_params()
    opt = optimizer(torch.optim.Adam, lr=0.1)

    def step(p, s, x):
        loss, g = value_and_grad(lambda p, x: torch.relu(apply(p, x)).mean())(p, x)
        return loss, *opt.step(p, g, s)

    run = spmd.spmd(data_parallel(compiled(step, **options), batch="x"), mesh=mesh)
    state = opt.init(params)
    for _ in range(3):
        loss, params, state = run(params, state, BATCH["x"])
    return loss, params


def applied(mesh, compiled, **options):
    apply, params = model_and_params()
    run = compiled(apply, **options)

    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(p, batch):
        return value_and_grad(lambda p, b: (run(p, b["x"]) - b["y"]).square().mean())(p, batch)

    return [step(params, BATCH) for _ in range(3)][-1]


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

    for _ in range(4):
        loss, params, state = step(params, state, BATCH)
    return loss, params


def trained_compiled_within(mesh, compiled, **options):
    return trained(mesh, lambda function: lambda *args: compiled(function, **options)(*args))


def collectives(mesh, compiled, **options):
    def combine(x):
        total = psum(x.sum(), "data")
        return total * 2 + all_gather(x, "data").sum()

    run = compiled(combine, **options)
    step = spmd.spmd(lambda x: run(x), in_specs=P("data"), mesh=mesh)
    return [step(BATCH["x"]) for _ in range(3)][-1]


def gradient_through_a_collective(mesh, compiled, **options):
    def norm(w, x):
        return psum((w * x).square().sum(), "data")

    run = compiled(norm, **options)
    step = spmd.spmd(lambda x: grad(run)(torch.ones(3), x), in_specs=P("data"), mesh=mesh)
    return [step(BATCH["x"]) for _ in range(3)][-1]


def moved(mesh, compiled, **options):
    """What the ranks' own tensors go through outside of a loss, and at a new shape again."""

    def move(x):
        turned = all_to_all(ppermute(x, "data", [(0, 1), (1, 0)]), "data", 0, 0, tiled=True)
        return turned + all_gather(psum_scatter(x, "data", tiled=True), "data", tiled=True)

    run = compiled(move, **options)
    step = spmd.spmd(lambda x: run(x), in_specs=P("data"), out_specs=P("data"), mesh=mesh)
    return [step(torch.arange(3.0 * rows).view(rows, 3)) for rows in (4, 4, 8, 12)]


def an_object(mesh, compiled, **options):
    run = compiled(Scale(3.0), **options)
    step = spmd.spmd(lambda x: psum(run(x), "data"), mesh=mesh)
    return [step(torch.ones(2)) for _ in range(3)][-1]


def a_module(mesh, compiled, **options):
    torch.manual_seed(0)
    module = compiled(torch.nn.Linear(3, 1), **options)
    apply, params = functional(module)
    step = spmd.spmd(lambda p, x: psum(apply(p, x).sum(), "data"), mesh=mesh)
    return [step(params, BATCH["x"]) for _ in range(3)][-1]


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)


def a_checkpoint_in_forward(mesh, compiled, **options):
    torch.manual_seed(0)
    apply, params = functional(Checkpointed())
    options = {**options, "fullgraph": True} if options else {}
    loss = compiled(lambda p, x: pmean(apply(p, x).square().mean(), "data"), **options)
    step = spmd.spmd(lambda p, x: value_and_grad(loss)(p, x), mesh=mesh, in_specs=(P(), P("data")))
    return [step(params, BATCH["x"]) for _ in range(3)][-1]


PROGRAMS = [
    *(loss_and_grads, applied, trained, trained_compiled_within, collectives, gradient_through_a_collective),
    *(moved, an_object, a_module, a_gradient_made_outside, a_whole_step, a_checkpoint_in_forward),
]


def leaves(result):
    return [leaf.full() for leaf in torch.utils._pytree.tree_leaves(result)]


def check(mesh, program, backend):
    expected, found = leaves(program(mesh, plain)), leaves(program(mesh, torch.compile, backend=backend))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "program", [p if p is not moved else pytest.param(p, marks=pytest.mark.long) for p in PROGRAMS]
)
def test_as_in_eager_on_a_driver(with_compiler, shared_mesh, program, backend):
    check(shared_mesh({"data": 2}), program, backend)


def large_weights(mesh, compiled, **options):
    """Of linear layers, some used in another way besides; their gradients come as factors, or as products."""
    torch.manual_seed(0)
    rows = {"once": 2048, "next": 2048, "third": 2048, "tied": 256, "decayed": 300, "last": 8}
    params = {name: torch.randn(count, 2048, dtype=torch.float64) / 40 for name, count in rows.items()}

    def loss_fn(p, x, y):
        for name in ("once", "next", "third"):
            x = torch.tanh(x @ p[name].t())
        tied = torch.tanh(x @ p["tied"].t()) @ p["tied"]
        decay = torch.nn.functional.linear(x, p["decayed"]).square().mean() + 1e-3 * p["decayed"].square().sum()
        return 1e3 * (torch.nn.functional.linear(x + tied, p["last"]) - y).square().mean() + decay

    run, outside = compiled(loss_fn, **options), []

    def step_of(p, batch):
        return value_and_grad(lambda p, b: run(p, *b) + (p["once"][0].sum() if b[0].sum() > 0 else 0.0))(p, batch)

    step = spmd.spmd(data_parallel(lambda p, batch: step_of(p, batch)), mesh=mesh)
    for number in range(5):
        batch = torch.randn(15, 2048).double() + number % 2 / 10 - 0.05, torch.randn(15, 8)
        outside.append(step(params, batch))
    # Two leaves with the same memory in one graph, of which the first is used outside of it, too.
    same = spmd.spmd(lambda p, batch: step_of({**p, "third": p["once"]}, batch), mesh=mesh, in_specs=(P(), P("data")))
    evaluate = spmd.spmd(lambda p, batch: pmean(run(p, *batch), "data"), mesh=mesh, in_specs=(P(), P("data")))
    even = torch.randn(16, 2048).double() + 0.1, torch.randn(16, 8)
    return outside, [same(params, even) for _ in range(3)], [evaluate(params, even) for _ in range(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [loss_and_grads, large_weights])
@pytest.mark.long
def test_inductor(with_compiler, shared_mesh, program):
    check(shared_mesh({"data": 2}), program, "inductor")


@pytest.mark.filterwarnings("ignore")
def test_the_first_call_draws_what_later_ones_draw(with_compiler, shared_mesh):
    """It is in eager mode. A resumed run begins with such a call, and has to draw what one that went on drew."""
    run = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))

    def drawn(x):
        torch.manual_seed(0)
        return run(x)

    step = spmd.spmd(drawn, mesh=shared_mesh({"data": 2}))
    first, *later = [step(torch.ones(64)).full() for _ in range(3)]
    assert all(torch.equal(first, other) for other in later)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_large_weights_come_by_an_operator(with_compiler, shared_mesh):
    """Else torch has moved where Inductor takes a rewriting of its graphs, and they come at the end of each graph."""
    run = torch.compile(lambda p, x: torch.tanh(x @ p["large"].t() + p["bias"]).square().mean())

    @spmd.spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(batch="x")
    def step(p, x):
        with torch.profiler.profile() as profile:
            _, grads = value_and_grad(run)(p, x)
        count = sum(event.name == "spmd::weight_gradient" for event in profile.events())
        return grads, pmax(torch.tensor(count), "data")

    params = {"large": torch.randn(300, 512) / 20, "bias": torch.zeros(300)}
    found = [int(step(params, torch.ones(4, 512))[1]) for _ in range(4)]
    assert (found[0], found[2:]) == (0, [1, 1])  # the first call is in eager; while it compiles, the second traces some


LAUNCHED = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import spmd
from test_compile import PROGRAMS, check
mesh = spmd.Mesh({"data": 2})
for program in PROGRAMS[: int(sys.argv[2])]:
    check(mesh, program, "aot_eager")
print("equal")
"""


@pytest.mark.parametrize("programs", [1, pytest.param(len(PROGRAMS), marks=pytest.mark.long)])
def test_as_in_eager_on_launched_ranks(tmp_path, programs):
    arguments, imported = (
        (__file__.rpartition("/")[0], str(programs)),
        {"FORKED_WITH": "torch._dynamo.backends.debugging"},
    )
    code, out, err = launched(2, script(tmp_path, LAUNCHED), *arguments, env=imported)
    assert code == 0 and out.count("equal") == 2, err


GLOBALS = """
import warnings
import torch
import spmd
warnings.simplefilter("ignore")
SCALE = 1.0

class Scale(torch.nn.Module):
    def forward(self, x):
        return x * SCALE

apply, params = spmd.functional(torch.nn.Sequential(torch.nn.Linear(2, 1), Scale()))
run = torch.compile(apply, backend="eager")
x = torch.ones(2, 2)

def chosen(x):
    return torch.cond(x.sum() > 0, lambda x: x * SCALE, lambda x: x + SCALE, (x,))

with spmd.Mesh({"data": 2}) as mesh:
    step = spmd.spmd(lambda params, x: (run(params, x), chosen(x)), mesh=mesh)
    for SCALE in (1.0, 1.0, 2.0, 2.0, 1.0, 2.0):
        assert mesh.run(chosen, -x)[1].tolist() == (SCALE - x).tolist()
        out, also = step(params, x)
        torch.testing.assert_close((out.full(), also.full()), (apply(params, x), x * SCALE))
print("equal")
"""


def test_what_torch_compiles_reads_the_scripts_globals_as_they_are(tmp_path):
    """Models and functions given to `torch.cond`: the ranks, to which they come by value, have another `__main__`."""
    code, out, err = run(script(tmp_path, GLOBALS))
    assert code == 0 and out.strip() == "equal", err


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_is_refused(with_compiler, shared_mesh):
    mesh = shared_mesh({"data": 2})
    step = spmd.spmd(lambda x: psum(x, "data"), mesh=mesh)
    for compiled in (torch.compile(step, backend="eager"), torch.compile(lambda x: step(x) + 0, backend="eager")):
        with pytest.raises(SpecError, match=r"an @spmd function.*compile what is inside"):
            compiled(torch.ones(2))
    assert step(torch.ones(2)).full().tolist() == [2, 2]


class Assigning(torch.nn.Module):
    """Its `forward` assigns attributes, its own and a submodule's, and deletes one; and it reads them first."""

    of_class = 0.0

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.cache = torch.nn.Linear(3, 1), 0, None
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x, keeps, breaks):
        if breaks:
            torch._dynamo.graph_break()
        self.calls += 1
        if not hasattr(self, "added"):
            self.added = torch.nn.Identity()
        else:
            x = x * 2
        out = self.layer(x) * self.calls + getattr(self.layer, "note", 0) + self.mean + self.of_class
        if self.cache is not None:
            out = out + self.cache
        self.mean = self.mean + 1
        if keeps:
            self.cache, self.layer.note, self.of_class = out, out.sum(), 1.0
            del self.layer.in_features
        return out + hasattr(self.layer, "in_features")


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("calls", ["CCc", "eCcC", "CeE"])
@pytest.mark.filterwarnings("ignore")
def test_what_forward_assigns_is_gone_after_a_compiled_call(calls, breaks):
    """In any order of compiled calls and eager ones (e), with attributes assigned (C, E) or not."""
    torch.compiler.reset()
    apply, params, buffers = spmd.functional_with_buffers(Assigning())
    run = torch.compile(lambda *args: apply(*args), backend="eager", fullgraph=not breaks)
    expected = params["layer.weight"].sum() + params["layer.bias"] + 1
    for kind in calls:
        keeps = kind.isupper()
        out, new = (apply if kind in "eE" else run)(params, buffers, torch.ones(1, 3), keeps, breaks)
        torch.testing.assert_close(out[0], expected - int(keeps))
        assert new["mean"].tolist() == [1] and buffers["mean"].tolist() == [0]


class Keeping(torch.nn.Module):
    """Its `forward` reads what it assigns: attributes, one of them its class's, and a buffer that was None."""

    of_class = 0

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(2)), 0
        self.register_buffer("first", None)

    def forward(self, x):
        self.calls, self.of_class = self.calls + 1, self.of_class + 1
        if self.first is None:
            self.first = x * 10
        seen = hasattr(self, "note")
        self.note = x
        return self.weight * x + self.first + self.calls + self.of_class + seen


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_calls_in_one_graph_do_not_see_what_forward_assigned_in_others(backend):
    torch.compiler.reset()
    apply, params = functional(Keeping())
    run = torch.compile(lambda p, x: (apply(p, x), apply(p, x * 2), apply(p, x * 3)), backend=backend, fullgraph=True)
    for _ in range(3):
        results = run(params, torch.ones(2))
        assert [one.tolist() for one in results] == [[13, 13], [24, 24], [35, 35]]


class Net(torch.nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return torch.tanh(self.inside(x)) * 2


def in_place(mesh, part, **options):
    torch.manual_seed(0)
    module = Net(Net(torch.nn.Linear(3, 1)))
    if part is not None:
        module.get_submodule(part).compile(**options)
    apply, params = functional(module)

    @spmd.spmd(mesh=mesh)
    @data_parallel
    def step(p, batch):
        return value_and_grad(lambda p, b: (apply(p, b["x"]) - b["y"]).square().mean())(p, batch)

    return apply, params, [step(params, BATCH) for _ in range(3)][-1]


def test_operators_on_arrays_run_as_written(with_compiler, shared_mesh):
    """In a function of the driver, which has nothing to compile."""
    plain = torch.arange(24.0).view(4, 6)
    x = spmd.put(plain, P("data"), mesh=shared_mesh({"data": 2}))
    for function in (lambda x: x * 2 + 1, lambda x: torch.relu(x[1:, ::2]).sum() if x.sum() > 0 else x):
        run = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal(run(x).full(), function(plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["", "inside"])
def test_a_module_that_was_compiled_in_place(with_compiler, shared_mesh, part):
    """`module.compile()`, of the whole and of one layer: its copies on the ranks are compiled with the same options."""
    mesh = shared_mesh({"data": 2})
    _, _, expected = in_place(mesh, None)
    before, here = mesh.run(compiled_by_counting), compiled_by_counting()
    apply, params, found = in_place(mesh, part, backend=counting)
    torch.testing.assert_close(leaves(found), leaves(expected))
    assert all(now > then for now, then in zip(mesh.run(compiled_by_counting), before, strict=True))
    assert compiled_by_counting() == here
    apply(params, BATCH["x"])
    again = cloudpickle.loads(cloudpickle.dumps(apply))
    torch.testing.assert_close(again(params, BATCH["x"]), apply(params, BATCH["x"]))
    assert compiled_by_counting() > here


def compiled_in_the_step(x):
    return torch.compile(lambda x: x * 2, backend=counting)(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("within", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_was_compiled_runs_compiled(with_compiler, shared_mesh, within):
    """Though at the first call, which is followed operation by operation, it runs as the plain function."""
    mesh = shared_mesh({"data": 2})
    before = mesh.run(compiled_by_counting)
    double = compiled_in_the_step if within else torch.compile(lambda x: x * 2, backend=counting)
    step = spmd.spmd(lambda x: psum(double(x), "data"), mesh=mesh)
    for _ in range(3):
        assert step(torch.ones(2)).full().tolist() == [4, 4]
    assert all(now > then for now, then in zip(mesh.run(compiled_by_counting), before, strict=True))


def counting(graph, inputs):
    torch.counted_compilations = compiled_by_counting() + 1
    return graph


def compiled_by_counting():
    return getattr(torch, "counted_compilations", 0)


class Called(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def torchs_gradient(model, p, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(p, x).sum(), x, create_graph=True)
    return slope


def our_gradient(model, p, x):
    return grad(lambda p, x: model(p, x).square().mean(), axes=())(p, x)["0.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inner", [pytest.param(torchs_gradient, marks=pytest.mark.long), our_gradient])
def test_second_derivatives_are_refused(with_compiler, shared_mesh, inner):
    """Of a penalty on gradients, torch's backward to some leaves would leave a part out."""
    apply, params = model_and_params()

    def step_of(model, constant=False):
        def loss_fn(p, x):
            gradient = inner(model, p, x)
            return model(p, x).square().mean() + (gradient.detach() if constant else gradient).square().mean()

        return spmd.spmd(data_parallel(lambda p, x: value_and_grad(loss_fn)(p, x), batch="x"), mesh=mesh)

    mesh, twice = shared_mesh({"data": 2}), torch.compile(lambda p, x: apply(p, x), backend="aot_eager")
    step, x = step_of(twice), BATCH["x"]
    expected = leaves(step(params, x))  # the first call is in eager mode
    for _ in range(2):
        with pytest.raises(SpecError, match=r"a gradient of a compiled function, .*can't be differentiated twice"):
            leaves(step(params, x))
    once = torch.compile(lambda p, x: apply(p, x), backend="eager")  # whose tape is torch's own
    for model, constant in ((once, False), (twice, True)):
        step, plainly = step_of(model, constant), step_of(apply, constant)
        step(params, x)
        torch.testing.assert_close(leaves(step(params, x)), leaves(plainly(params, x)) if constant else expected)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_torch_within_what_is_compiled(with_compiler, shared_mesh):
    """In one graph with its gradients torch differentiates twice; the module keeps nothing of the inner one."""
    apply, params = model_and_params()

    def loss_fn(p, x):
        return torch.func.grad(lambda p: apply(p, x).square().mean())(p)["0.weight"].square().sum()

    def found(loss_fn):
        step = spmd.spmd(data_parallel(lambda p, x: value_and_grad(loss_fn)(p, x), batch="x"), mesh=mesh)
        return [leaves(step(params, BATCH["x"])) for _ in range(2)][-1]

    mesh = shared_mesh({"data": 2})
    torch.testing.assert_close(found(torch.compile(loss_fn, backend="aot_eager")), found(loss_fn))


@pytest.mark.filterwarnings("ignore")
def test_second_derivatives_by_one_helper_are_each_refused(with_compiler, shared_mesh):
    """The helper's code is that of the plain loss, too, which was differentiated twice before."""

    def loss_fn(w, x):
        return (x @ w).tanh().square().mean()

    def steepness(loss, w, x):
        return grad(lambda w: grad(loss)(w, x).square().sum())(w)

    def step(w, x):
        return steepness(loss_fn, w, x), steepness(fast, w, x)

    fast = torch.compile(loss_fn, backend="aot_eager")
    on_ranks = spmd.spmd(step, mesh=shared_mesh({"data": 2}), in_specs=(P(), P("data")))
    plain, eager = on_ranks(torch.ones(3), BATCH["x"])  # the first call is in eager mode
    torch.testing.assert_close(eager.full(), plain.full())
    for _ in range(3):  # also where no graph is compiled any more
        with pytest.raises(SpecError, match="can't be differentiated twice"):
            leaves(on_ranks(torch.ones(3), BATCH["x"]))


RECORDERS = {
    "make_fx": lambda f, x: make_fx(f)(x),
    "linearize": torch.func.linearize,
    "jit.trace": lambda f, x: torch.jit.trace(f, x, check_trace=False),
    "export": lambda f, x: torch.export.export(Called(f), (x,)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", RECORDERS)
def test_recording_is_refused(with_compiler, shared_mesh, record):
    """What a collective gives would be a constant of the graph."""
    mesh, recorder = shared_mesh({"data": 2}), RECORDERS[record]
    for what in ("psum", "all_gather", "spmd's grad of"):
        call = {
            "psum": lambda x: psum(x, "data"),
            "all_gather": lambda x: all_gather(x, "data"),
            "spmd's grad of": lambda x: grad(lambda w: (w * x).sum())(x),
        }[what]
        with pytest.raises(SpecError, match=f"{what}.* was called while torch records operations"):
            spmd.spmd(lambda x, call=call: (recorder(call, x), 0)[1], in_specs=P("data"), mesh=mesh)(torch.ones(4))
    graph = spmd.spmd(lambda x: psum(make_fx(lambda x: x * 2)(x)(x), "data"), in_specs=P("data"), mesh=mesh)
    assert graph(torch.ones(4)).full().tolist() == [4, 4]


def switched(params, x):
    def linear(x):
        return F.linear(x, params["weight"], params["bias"])

    return torch.cond(x.sum() > 0, linear, lambda x: linear(x) * 2, (x,)).square().mean()


@pytest.mark.filterwarnings("ignore")
def test_parameters_in_branches_of_cond(with_compiler, shared_mesh):
    """Torch refuses arguments that share memory there, as parameters do after a step."""
    params = dict(torch.nn.Linear(2, 3).named_parameters())
    params, x = {name: value.detach() for name, value in params.items()}, torch.ones(4, 2)
    opt = optimizer(torch.optim.SGD, lr=0.1)

    def trained(loss):
        @spmd.spmd(mesh=shared_mesh({"data": 2}))
        @data_parallel
        def step(params, state, batch):
            return opt.step(params, grad(loss)(params, batch), state)

        own, state = params, opt.init(params)
        for _ in range(3):
            own, state = step(own, state, x)
        return spmd.fetch(own)

    with pytest.raises(RuntimeError, match="do not support aliasing") as caught:
        trained(switched)
    assert sys.version_info < (3, 11) or "value.clone() for name, value in params.items()" in caught.value.__notes__[-1]
    found = trained(lambda params, x: switched({name: value.clone() for name, value in params.items()}, x))
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    plain = torch.optim.SGD(own.values(), lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        switched(own, x).backward()
        plain.step()
    for name, value in own.items():
        torch.testing.assert_close(found[name], value.detach())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", ["first", pytest.param("never", marks=pytest.mark.long)])
def test_a_new_rank_computes_compiled_as_the_others_do(with_compiler, make_mesh, check):
    """The first call of a signature is in eager mode: not that of a rank that joins when the others run compiled."""
    mesh = make_mesh({"data": 2})
    rounds = torch.compile(lambda x: x * 1, backend=lambda graph, inputs: lambda *args: [2 * graph(*args)[0]])
    step = spmd.spmd(lambda x, flag: psum(rounds(x), "data") + len(flag), mesh=mesh, check=check)

    def calls(*flags):
        return [float(step(torch.ones(()), flag)) for flag in flags]

    assert calls("", "", "a", "a", "", "a") == [2, 4, 3, 5, 4, 5]
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    assert calls("", "a", "", "b", "b") == [4, 5, 4, 3, 5]
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    assert calls("cc", "", "cc", "b") == [4, 4, 6, 5]
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    assert float(step(torch.ones(1), "")) == 4  # of another shape
    if check != "never":
        mesh.resize({"data": 3})
        assert calls("", "a", "", "b") == [6, 7, 6, 7]


@pytest.mark.parametrize("size", [1, 2])
def test_first_calls_are_checked_where_the_compiler_is_loaded(with_compiler, make_mesh, size):
    """By ranks that were there at the start, and by those that have replaced them."""
    mesh = make_mesh({"data": size})
    loaded = spmd.spmd(lambda x: x * ("torch._dynamo" in sys.modules), mesh=mesh)

    def writes(x):
        x.data.add_(1)
        return x * 2

    for _ in range(2):
        assert float(loaded(torch.ones(()))) == 1
        with pytest.raises(SpecError, match="changed its input argument 0 in place"):
            spmd.spmd(writes, mesh=mesh)(torch.ones(2))
        os.kill(mesh.run(os.getpid)[-1], signal.SIGKILL)


@pytest.mark.filterwarnings("ignore")
def test_a_new_rank_compiles_a_module_in_one_graph(with_compiler, make_mesh):
    """On its first call, where other ranks have made a call in eager mode before they compiled."""
    mesh = make_mesh({"data": 2})
    apply, params = functional(torch.nn.Linear(3, 1))
    loss = torch.compile(lambda p, x: apply(p, x).mean(), fullgraph=True, backend=counting)
    step = spmd.spmd(lambda p, x: value_and_grad(loss)(p, x), mesh=mesh)
    before = [step(params, torch.ones(2, 3)) for _ in range(2)]
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    value, grads = step(params, torch.ones(2, 3))
    assert float(value) == float(before[0][0])
    assert all(torch.equal(grads[name].full(), before[0][1][name].full()) for name in grads)
    assert all(mesh.run(compiled_by_counting))


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_a_module_is_compiled_in_one_graph_before_it_was_called(with_compiler, make_mesh):
    module, x = torch.nn.Linear(3, 1), torch.ones(2, 3)
    apply, params = functional(module)
    assert torch.equal(torch.compile(apply, fullgraph=True, backend="eager")(params, x), module(x))
    mesh = make_mesh({"data": 2})
    loss = torch.compile(lambda p, x: (apply(p, x) - apply(p, 3 * x)).mean(), fullgraph=True, backend="eager")
    step = spmd.spmd(lambda p, x: value_and_grad(loss)(p, x), mesh=mesh)
    for mode in (True, False, True):  # the third is compiled at once, as the first is followed no more
        apply, params = functional(module.train(mode))
        value, grads = step(params, x)
        assert float(value) == float(loss(params, x))
        assert torch.equal(grads["weight"].full(), torch.full((1, 3), -2.0))
