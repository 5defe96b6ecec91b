"""Private parts of torch: each does what it is used for with this version of torch, and no other file names one."""

import ast
import builtins
import copy
import datetime
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import spmd
import spmd.kernels
import spmd.mesh
import spmd.transforms
from spmd.kernels import torch_private


class Followed(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append("function")
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append("dispatch")
        with torch_private.below_subclasses():
            return func(*args, **(kwargs or {}))


def version() -> None:
    x = torch.zeros(2)
    before = torch_private.version(x)
    x.view(-1).add_(1)
    assert torch_private.version(x) == before + 1
    with torch.inference_mode():
        assert torch_private.version(torch.zeros(2)) == 0


def base() -> None:
    x = torch.zeros(2)
    assert torch_private.base(x[:1]) is x
    assert torch_private.base(x) is None


def storage() -> None:
    x = torch.zeros(2, device="meta")
    assert torch_private.storage(x[:1].detach()) == torch_private.storage(x) != 0
    assert torch_private.storage(torch.zeros(2).to_sparse()) == 0


def holders() -> None:
    x = torch.zeros(2)
    view, other = x[:1], torch.zeros(2)
    assert (torch_private.holders(x), torch_private.holders(view), torch_private.holders(other)) == (2, 2, 1)


def keep_storage_apart() -> None:
    x = torch.zeros(2)
    number, kept = torch_private.storage(x), torch_private.keep_storage_apart(x)
    del x
    others = [torch.zeros(2) for _ in range(100)]
    assert kept.expired() and number not in [torch_private.storage(other) for other in others]


def operation_name() -> None:
    assert torch_private.operation_name(torch.ops.aten.add.out) == "add"
    assert torch_private.names_of(torch.ops.aten.add_.Tensor) == ("aten::add_", "Tensor")
    assert torch_private.names_of(torch.ops.aten.add) == ("aten::add", None)


def has_tag() -> None:
    dynamic, seeded = torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded
    nonzero, rand_like = torch.ops.aten.nonzero.default, torch.ops.aten.rand_like.default
    found = [torch_private.has_tag(one, tag) for one in (nonzero, rand_like) for tag in (dynamic, seeded)]
    assert found == [True, False, False, True]


def below_subclasses() -> None:
    x = torch.zeros(2).as_subclass(Followed)
    Followed.seen.clear()
    assert x.add(1).tolist() == [1, 1]
    assert Followed.seen == ["function", "dispatch"]
    Followed.seen.clear()
    with torch_private.below_subclasses():
        assert x.add(1).tolist() == [1, 1]
    assert Followed.seen == []


def without_torch_function() -> None:
    x = torch.zeros(2).as_subclass(Followed)
    Followed.seen.clear()
    with torch_private.without_torch_function():
        x.add(1)
    assert Followed.seen == ["dispatch"]


def arguments() -> None:
    found = torch_private.arguments(torch.ops.aten.add.out)
    assert [one.name for one in found] == ["self", "other", "alpha", "out"]
    assert [one.is_written for one in found] == [False, False, False, True]
    assert [one.kwarg_only for one in found] == [False, False, True, True]


def item() -> None:
    seen = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            with torch_private.below_subclasses():
                return func(*args, **(kwargs or {}))

    assert torch.tensor(3.0).as_subclass(Seen).item() == 3
    assert torch_private.ITEM in seen


def dispatch_mode() -> None:
    """It sees both directions, and what the compiler makes; its own code is not compiled."""

    class Seen(torch_private.DispatchMode):
        def operation(self, func, args, kwargs):
            seen.append(func.overloadpacket)
            return func(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    for double in (lambda x: x * 2, torch.compile(lambda x: x * 2, backend="eager")):
        seen: list[object] = []
        with Seen():
            double(x).sum().backward()
        assert seen.count(torch.ops.aten.mul) == 2
    assert x.grad is not None and x.grad.tolist() == [4, 4]


def saved() -> None:
    x, w = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    for y, name in ((nn.functional.linear(x, w), "self"), (nn.functional.linear(x, w, torch.ones(4)), "mat1")):
        assert y.grad_fn.name() in ("MmBackward0", "AddmmBackward0")
        assert torch.equal(torch_private.saved(y.grad_fn, name), x)
        itself = torch_private.saves_itself(y.grad_fn, name)
        assert torch.equal(itself, x) if hasattr(torch._C._autograd.SavedTensor, "data") else itself is None
        assert not torch_private.scales(y.grad_fn)


def packed() -> None:
    """The tensor of a layer whose activations are computed again is not taken."""
    w, b = torch.ones(4, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    y = checkpoint(lambda x: nn.functional.linear(x, w, b), torch.ones(2, 3, requires_grad=True), use_reentrant=False)
    assert torch_private.saves_itself(y.grad_fn, "mat1") is None


def scales() -> None:
    w = torch.ones(3, 4, requires_grad=True)
    assert torch_private.scales(torch.addmm(torch.ones(4), torch.ones(2, 3), w, alpha=2).grad_fn)


def sums_up() -> None:
    x, mse = torch.ones(2, requires_grad=True), torch.nn.functional.mse_loss
    assert torch_private.sums_up(mse(x, torch.zeros(2), reduction="sum").grad_fn)
    assert not torch_private.sums_up(mse(x, torch.zeros(2)).grad_fn)


def order() -> None:
    x = torch.ones(1, requires_grad=True)
    first, second = x + 1, x * 2
    assert torch_private.order(first.grad_fn) < torch_private.order(second.grad_fn)


def in_backward() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append((torch_private.in_backward(), torch_private.backward_keeps_tape())))
    y = 2 * x
    assert not torch_private.in_backward()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen == [(True, True), (True, False)]


def hooks_made() -> None:
    before = torch_private.hooks_made()
    torch.ones(1, requires_grad=True).register_hook(lambda gradient: None)
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert torch_private.hooks_made() >= before + 2


def has_hooks() -> None:
    for register in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
        x = torch.ones(1, requires_grad=True)
        assert not torch_private.has_hooks(x)
        handle = register(x, lambda _: None)
        assert torch_private.has_hooks(x)
        assert torch_private.hooks_gradient(x) == (register is torch.Tensor.register_hook)
        handle.remove()
        assert not torch_private.has_hooks(x) and not torch_private.hooks_gradient(x)


def in_forward_mode() -> None:
    seen = [torch_private.in_forward_mode()]

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch_private.in_forward_mode())
            return x * 1

        @staticmethod
        def jvp(ctx, tangent):
            return tangent

    with warnings.catch_warnings(), torch.autograd.forward_ad.dual_level():
        warnings.simplefilter("ignore")  # of torch.jit
        seen.append(torch_private.in_forward_mode())
        Same.apply(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert seen == [False, True, False]


def in_torch_func() -> None:
    seen = []

    def f(x):
        seen.append(torch_private.in_torch_func())
        with torch_private.outside_torch_func():
            seen.append(torch_private.in_torch_func())
        return x * 2

    torch.func.vmap(f)(torch.ones(2))
    assert (*seen, torch_private.in_torch_func()) == (True, False, False)


def with_tangents() -> None:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, tangent):
            with torch_private.with_tangents():
                return Same.apply(tangent * 3)

    class Same(Sine):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def jvp(ctx, tangent):
            return tangent.clone()

    def slope(x):
        return torch.func.jvp(lambda y: Sine.apply(y.square()), (x,), (torch.ones(()),))[1]  # 3 * 2 * x

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`")  # by torch itself, for the first jvp of a process
        assert torch.func.jvp(slope, (torch.ones(()),), (torch.ones(()),))[1] == 6


def tables() -> None:
    layer = nn.BatchNorm1d(2)
    torch_private.parameters(layer)["weight"] = torch.tensor([2.0, 3.0])
    torch_private.buffers(layer)["running_mean"] = torch.tensor([1.0, 1.0])
    assert layer.weight.tolist() == [2, 3] and layer.running_mean.tolist() == [1, 1]
    assert torch_private.children(nn.Sequential(layer, layer)) == {"0": layer, "1": layer}
    assert not any(torch_private.hooks(layer))
    ways = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    for number, way in enumerate(ways, 1):
        getattr(layer, f"register_{way}")(print)
        assert [hook for table in torch_private.hooks(layer) for hook in table.values()] == [print] * number


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def inject_parametrizations() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    parametrize.register_parametrization(layer, "weight", Twice())
    layer.__class__ = nn.Linear
    torch_private.inject_parametrizations(layer, ["weight"])
    assert layer.weight.item() == 2


def being_recorded() -> None:
    seen = []

    def f(x):
        seen.append(torch_private.being_recorded())
        return x * 2

    f(torch.ones(2))
    exported = type("Exported", (nn.Module,), {"forward": lambda self, x: f(x)})()
    for record in (
        make_fx(f),
        lambda x: torch.func.linearize(f, x),
        lambda x: torch.jit.trace(f, x),
        lambda x: torch.export.export(exported, (x,), strict=False),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit, and of linearize itself
            record(torch.ones(2))
        assert seen[0] is False and True in seen, record  # what is recorded may be run again without
        seen[1:] = []


def run_while_tracing() -> None:
    given = [1]

    def found():
        return tuple(given)

    torch_private.run_while_tracing(found)
    run = torch.compile(lambda x: x + sum(found()), backend="eager", fullgraph=True)
    assert run(torch.ones(1)) == 2
    given.append(2)
    assert run(torch.ones(1)) == 2 and run(torch.ones(2)).tolist() == [4, 4]  # called again only while it traces


def forget_assigned() -> None:
    one, other, known = torch.nn.Module(), torch.nn.Module(), []

    def forget():
        known.append(torch_private.forget_assigned([one]))

    torch_private.run_while_tracing(forget)

    def assign(x):
        one.a, other.c = x * 2, x
        result = x + one.a
        forget()
        return result, hasattr(one, "a")

    result, has_one = torch.compile(assign, backend="eager", fullgraph=True)(torch.ones(1))
    assert result == 3 and not has_one and not hasattr(one, "a") and hasattr(other, "c")
    forget()
    assert known == [True, False]


def changes_children() -> None:
    found, one, other = [], torch.nn.Sequential(), torch.nn.Sequential(torch.nn.Identity())

    def look():
        found.append([torch_private.changes_children([module]) for module in (one, other)])

    torch_private.run_while_tracing(look)

    def add(x):
        x = other(x)
        one.added = torch.nn.Identity()
        look()
        return one(x)

    torch.compile(add, backend="eager", fullgraph=True)(torch.ones(1))
    assert found == [[True, False]]


def inline_with_own_globals() -> None:
    torch_private.inline_with_own_globals()
    names = {"__name__": __name__, "__builtins__": builtins, "OWN": 3}
    inlined = types.FunctionType((lambda x: x * OWN).__code__, names)  # type: ignore[name-defined]  # noqa: F821
    run = torch.compile(lambda x: inlined(x), backend="eager", fullgraph=True)
    assert run(torch.ones(1)) == 3
    names["OWN"] = 5
    assert run(torch.ones(1)) == 5


def break_graph() -> None:
    def f(x):
        torch_private.break_graph("for a reason")
        return x

    f(torch.ones(1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="for a reason"):
        torch.compile(f, backend="eager", fullgraph=True)(torch.ones(1))


def clipping_functions() -> None:
    x, seen = torch.ones(2), []
    functions = (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_)
    for cell, clip in zip(torch_private.clipping_functions(), functions, strict=True):
        before = cell.cell_contents
        cell.cell_contents = lambda *args, before=before: seen.append((before.__name__, args))
        try:
            clip(x, 0.5)
        finally:
            cell.cell_contents = before
    assert seen == [(clip.__name__, (x, 0.5)) for clip in functions]


def compiled_call() -> None:
    module = nn.Linear(1, 1)
    assert torch_private.compiled_call(module) is None
    module.compile(backend="eager")
    found = torch_private.compiled_from(torch_private.compiled_call(module))
    assert found.__name__ == "_call_impl"  # a bound method or, since torch 2.14, a copy of the function


def tree_nodes() -> None:
    node = torch_private.tree_nodes()[list]
    apart, anew = node.flatten_fn, node.unflatten_fn
    parts, context = apart([1, 2])
    assert anew(parts, context) == [1, 2]
    assert Followed not in torch_private.tree_nodes()


def has_step_hooks() -> None:
    assert not torch_private.has_step_hooks()
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert torch_private.has_step_hooks()
        handle.remove()


def gloo_options() -> None:
    options = torch_private.gloo_options(7.0, "127.0.0.1")
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    torch_private.set_timeout(group, datetime.timedelta(seconds=70))
    group.allreduce([torch.ones(1)]).wait()


def fail_future() -> None:
    class Ours(Exception):
        pass

    future: torch.futures.Future = torch.futures.Future()
    torch_private.fail_future(future, Ours("ours"))
    assert future.done()
    with pytest.raises(Ours, match=r"^ours$"):
        future.wait()
    torch._C.Future._set_unwrap_func(future, torch._jit_internal._extract_tensors)  # of its value, as C++ does
    with pytest.raises(Ours, match=r"^ours$"):
        future.wait()


def coo_parts() -> None:
    values = torch.ones(2)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3,), check_invariants=False)
    indices, same = torch_private.coo_parts(sparse)
    assert indices.tolist() == [[1, 1]] and same.data_ptr() == values.data_ptr()


def is_lazy_zero() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit
        zero = torch.func.jacfwd(torch.func.jacfwd(lambda x: 3 * x))(torch.ones(2))
    assert torch_private.is_lazy_zero(zero) and not zero.data_ptr()
    assert not torch_private.is_lazy_zero(torch.zeros(2)) and not torch_private.is_lazy_zero(torch.empty(0))


def copy_each() -> None:
    target = torch.zeros(4)
    torch_private.copy_each(list(target.split(2)), [torch.ones(2), torch.full((2,), 2.0)])
    assert target.tolist() == [1, 1, 2, 2]


def reduce_compiled() -> None:
    def double(x):
        return x * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True, dynamic=False)
    made, (function, options) = torch_private.reduce_compiled(compiled)
    assert function is double is torch_private.uncompiled(compiled)
    assert (options["fullgraph"], options["dynamic"], options["backend"].__name__) == (True, False, "eager")
    before = torch_private.graphs_compiled()
    made(function, options)(torch.ones(2))
    assert torch_private.graphs_compiled() == before + 1
    assert torch_private.reduce_compiled(double) is None


def graph_for_each_batch_size() -> None:
    """Of other dimensions, and of numbers, there is one graph for all sizes."""
    torch._dynamo.reset()
    double = torch.compile(lambda x, by: by * x, backend="eager")
    with torch_private.graph_for_each_batch_size():
        for by, shape, new in ((2, (3, 4), 1), (3, (3, 5), 1), (4, (3, 6), 0), (5, (4, 7), 1), (6, (5, 8), 1)):
            before = torch_private.graphs_compiled()
            double(torch.ones(shape), by)
            assert torch_private.graphs_compiled() == before + new


def compiled_parts() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].compile(backend="eager")
    parts = torch_private.compiled_parts(module)
    assert [*parts] == ["0"] and torch_private.compiled_parts(copy.deepcopy(module)) == {}
    again = torch_private.compile_parts(copy.deepcopy(module), parts)
    assert [*torch_private.compiled_parts(again)] == ["0"]


def custom_operators() -> None:
    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(2 * x)

    def shape(x: torch.Tensor, out: torch.Tensor) -> None: ...

    made = torch.library.custom_op("spmd_tests::twice", twice, mutates_args={"out"})
    made.register_fake(shape)
    assert torch_private.custom_operators()["spmd_tests::twice"] is made
    assert torch_private.qualified_name(made) == "spmd_tests::twice" and torch_private.function_of(made) is twice
    declared, registered = torch_private.declaration(made), torch_private.registered(made)
    assert declared == {**declared, "schema": "(Tensor x, Tensor(a1!) out) -> ()", "mutates_args": ["out"]}
    assert (registered["kernels"], registered["fake"], registered["vmap"]) == ({None: twice}, shape, None)
    assert torch_private.names_of(torch.ops.spmd_tests.twice) == ("spmd_tests::twice", None)
    assert torch_private.names_of(torch.ops.spmd_tests.twice.default) == ("spmd_tests::twice", "default")


def is_exported() -> None:
    exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert torch_private.is_exported(exported) and torch_private.is_exported(exported.module())
    assert not torch_private.is_exported(nn.Linear(2, 2))


def fakes() -> None:
    fakes = torch_private.FakeTensors()
    weight = fakes.like(nn.Parameter(torch.ones(2, 3).t()))
    assert (weight.shape, weight.stride()) == ((3, 2), (1, 3)) and isinstance(weight, nn.Parameter)
    taken: list[int] = []
    with fakes, torch_private.PretendedNumbers(lambda: taken.append(1)):
        total = weight.sum()
        assert torch_private.is_fake(total) and total.item() == 1.0
        assert total > 0 and not (total > 0).any() and not total.isnan() and torch.equal(total, total)
        assert len(taken) == 5
        with torch_private.PretendedArrays():
            assert total.detach().numpy() == 1 and f"{total:.1f}" == "1.0"
    assert sys.modules["torch._subclasses.fake_tensor"].log.name == torch_private.FAKES_LOG


def is_batch_of_gradients() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda gradient: seen.append(torch_private.is_batch_of_gradients(gradient)))
    y = x * 2
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def events() -> None:
    assert torch_private.begin_event("ours", []) is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch_private.end_event(torch_private.begin_event("ours", [torch.ones(2, 3)]))
    assert [one.input_shapes for one in profile.events() if one.name == "ours"] == [[[2, 3]]]


# Of what torch may move: what in this library depends on it.
PARTS: dict[Callable[[], None], str] = {
    version: "finding inputs that a step changed, and captured tensors that changed",
    base: "knowing over which axes a view differs",
    holders: "results of launched steps that keep their values, whatever the program does to what the step returned",
    storage: "following which axes a value differs over, and with it the error for a forgotten psum",
    keep_storage_apart: "following which axes a value differs over, and with it the error for a forgotten psum",
    operation_name: "following which axes a value differs over, and with it the error for a forgotten psum",
    has_tag: "knowing what draws random numbers, and what chooses samples by their values",
    below_subclasses: "following what a step computes from its batch under shards=",
    without_torch_function: "following what a step computes from its batch under shards=",
    arguments: "refusing writes of what was computed from the batch under shards=",
    item: "refusing numbers taken from the batch under shards=",
    dispatch_mode: "following which axes a value differs over, and with it the error for a forgotten psum",
    saved: "gradients of linear layers computed in their buckets",
    packed: "gradients of linear layers computed in their buckets",
    scales: "gradients of linear layers computed in their buckets",
    sums_up: "refusing losses that are sums over samples",
    order: "gradients of linear layers computed in their buckets",
    in_backward: "refusing gradients of the batch under shards=, and backward passes within another",
    hooks_made: "leaving a backward pass to torch where the function has hooks",
    has_hooks: "refusing modules whose parameters have hooks",
    has_step_hooks: "calling hooks that a program has given every optimizer's step",
    in_torch_func: "collectives and grad within transforms of torch.func",
    in_forward_mode: "refusing what would drop tangents",
    with_tangents: "second derivatives of pmax and pmin in forward mode",
    tables: "functional, and looking for changes of captured modules",
    inject_parametrizations: "shipping modules with parametrizations",
    being_recorded: "refusing collectives whose results would become constants of a graph",
    run_while_tracing: "leaving no trace of what forward assigns in compiled code",
    changes_children: "leaving no trace of what forward assigns in compiled code",
    forget_assigned: "leaving no trace of what forward assigns in compiled code",
    inline_with_own_globals: "compiling functions that have come by value, whose globals are not their module's",
    break_graph: "saying which collectives can't be part of a graph",
    clipping_functions: "refusing to clip gradients that are none in a step",
    compiled_call: "carrying module.compile() to the ranks",
    tree_nodes: "batches and results in classes that are registered with torch's trees",
    gloo_options: "the backend gloo",
    fail_future: "errors of collectives under DDP",
    coo_parts: "what memory a sparse result shows",
    is_lazy_zero: "communicating and keeping tangents that are zeros without memory",
    copy_each: "buckets and flat parameters of many leaves",
    reduce_compiled: "sending compiled functions to the ranks",
    graph_for_each_batch_size: "the same bits of compiled functions on any number of ranks",
    compiled_parts: "carrying module.compile() to the ranks",
    custom_operators: "sending a program's own operators to the ranks",
    is_exported: "refusing what torch.export made, which can't be sent",
    fakes: "spmd.check, on tensors without values",
    is_batch_of_gradients: "refusing collectives in gradients for many rows at once",
    events: "events of collectives in torch's profiler",
}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_private_parts_are_where_they_were(part: Callable[[], None]) -> None:
    try:
        part()
    except Exception as error:
        pytest.fail(
            f"torch {torch.__version__} has moved or changed a private part, torch_private.{part.__name__}: "
            f"{type(error).__name__}: {error}. What depends on it: {PARTS[part]}. Look for a public way first, and "
            "write what was found beside the entry."
        )


def test_no_other_file_names_a_private_part_of_torch() -> None:
    packages = (spmd, spmd.kernels, spmd.mesh, spmd.transforms)
    files = {file for package in packages for file in pathlib.Path(package.__path__[0]).resolve().rglob("*.py")}
    nodes = {file: _nodes(file.read_text()) for file in files if file.parent.name != "torch_private"}
    assert len(nodes) > 100
    own = {name for each in nodes.values() for node in each for name in _defined(node)}
    found = [
        f"{file.name}:{node.lineno} {name}"
        for file, each in nodes.items()
        for node in each
        for name in _foreign(node, own)
    ]
    assert not found, "private names of others; those of torch belong in kernels/torch_private/"


_PRIVATE = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")
PUBLIC = {
    "_exit",
    "_getframe",
    "_current_frames",
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_render_traceback_",
}  # documented elsewhere
PUBLIC |= {"_is_owned", "_release_save", "_acquire_restore", "_at_fork_reinit"}  # what Condition asks any lock for
OF_TORCH = {
    name
    for thing in (torch, torch.Tensor, torch.optim.SGD, nn.Linear(1, 1), torch.UntypedStorage, torch.ops.aten.add.out)
    for name in dir(thing)
    if name.startswith("_") and not name.startswith("__")
}


def _nodes(text: str) -> list[ast.AST]:
    """All nodes of a program but names, of which there are the most, and which have nothing below them."""
    found: list[ast.AST] = [ast.parse(text)]
    for node in found:
        for value in node.__dict__.values():
            if type(value) is list:
                found += [one for one in value if isinstance(one, ast.AST) and type(one) is not ast.Name]
            elif isinstance(value, ast.AST) and type(value) not in (ast.Name, ast.Load, ast.Store):
                found.append(value)
    return found


def _defined(node: ast.AST) -> list[str]:
    """Names that our own classes, functions and fields bear."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return [node.attr]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _foreign(node: ast.AST, own: set[str]) -> list[str]:
    """Names with an underscore that a node takes from something that isn't ours."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
    elif isinstance(node, ast.Attribute) and not (
        isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    ):
        names = [node.attr] if node.attr not in own or node.attr in OF_TORCH else []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        text = node.args[1]
        names = [text.value] if isinstance(text, ast.Constant) and text.value in OF_TORCH else []
        names += (
            ["_saved"] if isinstance(text, ast.JoinedStr) and ast.unparse(text).startswith(("f'_s", "f'_r")) else []
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PRIVATE.fullmatch(node.value):
        names = node.value.split(".")  # as for sys.modules
    else:
        names = []
    hidden = [name for name in names if name.startswith("_") and not name.startswith(("__", "_spmd_"))]
    return [name for name in hidden if name not in PUBLIC]
