import copy
import doctest
import gc
import inspect
import itertools
import math
import pickle
import threading
import weakref
from collections import namedtuple
from typing import ClassVar

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANGS
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import spmd.optim.optimizer
from spmd import MeshError, P, Sharded, SpecError, SpmdError, data_parallel, functional, optimizer, value_and_grad
from spmd.kernels.reduction import slice_length
from spmd.mesh import trees
from spmd.optim import flat, leaves, slices
from spmd.optim.optimizer import Optimizer

RECIPES = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.1, "fused": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "maximize": True, "foreach": True, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (optim.RMSprop, {"foreach": True, "maximize": True}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.1, "foreach": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1}),
    (optim.ASGD, {"foreach": True, "t0": 2}),
    (optim.Rprop, {}),
    (optim.Rprop, {"foreach": True, "maximize": True}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"foreach": True, "maximize": True}),
]
if hasattr(optim, "Muon"):
    RECIPES.append((optim.Muon, {"weight_decay": 0.1}))
ELEMENTWISE = [(cls, hyper) for cls, hyper in RECIPES if cls.__name__ not in leaves.REFUSED and "fused" not in hyper]


def name_of(recipe):
    return f"{recipe[0].__name__}({', '.join(f'{k}={v}' for k, v in recipe[1].items())})"


recipes = pytest.mark.parametrize(("cls", "hyper"), RECIPES, ids=map(name_of, RECIPES))
elementwise = pytest.mark.parametrize(("cls", "hyper"), ELEMENTWISE, ids=map(name_of, ELEMENTWISE))


def draw(shapes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"p{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}


def torchs(cls, params, hyper):
    """torch's own, of the implementation that `optimizer` takes where the user says nothing of it."""
    kinds = {param.dtype for param in params}
    takes = "fused" in inspect.signature(cls).parameters and not {"fused", "foreach"} & {*hyper}
    return cls(params, **hyper, **({"fused": True} if takes and kinds <= {torch.float32, torch.float64} else {}))


def same(left, right):
    """Equal bit for bit, structure, types and all."""
    (lefts, treedef), (rights, other) = trees.flatten(left), trees.flatten(right)
    if treedef != other:
        return False
    for a, b in zip(lefts, rights, strict=True):
        if isinstance(a, torch.Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
                return False
        elif a != b:
            return False
    return True


def test_the_examples_in_the_documentation_are_right():
    assert doctest.testmod(spmd.optim.optimizer).failed == 0
    assert doctest.testmod(slices).failed == doctest.testmod(flat).failed == 0


@recipes
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_five_steps_are_torchs_bit_for_bit_and_leave_inputs_alone(monkeypatch, cls, hyper, dtype, block):
    if block is not None:
        monkeypatch.setattr(spmd.optim.engine, "BLOCK", block)
    if dtype == torch.bfloat16 and cls is optim.SGD and "fused" in hyper:
        pytest.skip("torch starts from uninitialised momentum")
    if dtype.is_complex and (cls.__name__ in ("Adafactor", "Muon") or "fused" in hyper):
        pytest.skip("torch has no complex version")
    shapes = [(5, 7), (64, 3)] if cls.__name__ == "Muon" else [(5, 7), (130,), (), (2, 3, 4), (0,)]
    if cls.__name__ == "Adafactor":
        shapes.pop()  # torch divides by its size
    params = draw(shapes, dtype, 0)
    theirs = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    reference = torchs(cls, list(theirs.values()), hyper)
    opt = optimizer(cls, **hyper)
    opt_state = opt.init(params)
    for step in range(5):
        grads = draw(shapes, dtype, step + 1)
        for name, grad in grads.items():
            theirs[name].grad = grad.clone()
        reference.step()
        inputs = (params, grads, opt_state)
        before = copy.deepcopy(inputs)
        params, opt_state = opt.step(*inputs)
        assert same(inputs, before), step
        for name, value in theirs.items():
            assert torch.equal(params[name], value), (step, name)
            assert params[name].stride() == value.stride()
            state = opt_state["state"].get(f"['{name}']", {})
            assert same(state, dict(reference.state.get(value, {}))), (step, name)
    leaves = [leaf for leaf in trees.leaves((params, opt_state)) if isinstance(leaf, torch.Tensor)]
    assert not any(leaf.requires_grad or leaf.grad is not None for leaf in leaves)


def test_sparse_gradients():
    params = {"w": torch.ones(4, 2)}
    grad = torch.sparse_coo_tensor([[1, 3]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True).coalesce()
    theirs = nn.Parameter(params["w"].clone())
    theirs.grad = grad
    reference = optim.SparseAdam([theirs])
    opt = optimizer(optim.SparseAdam)
    opt_state = opt.init(params)
    for _ in range(2):
        reference.step()
        params, opt_state = opt.step(params, {"w": grad}, opt_state)
    assert torch.equal(params["w"], theirs)


def test_sparse_embeddings(shared_mesh):
    """Their gradients are dense here, as sums over ranks are; the rows not zero are what torch's would have."""
    ids = torch.tensor([[1, 2], [3, 1]])
    reference = nn.Embedding(6, 2, sparse=True)
    (apply, params), theirs = functional(reference), optim.SparseAdam(reference.parameters(), lr=0.1)
    opt = optimizer(optim.SparseAdam, lr=0.1)

    @spmd.spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(params, opt_state, batch, rows):
        _, grads = value_and_grad(lambda params, batch: apply(params, batch).square().mean())(params, batch)
        return opt.step(params, {name: g.to_sparse(1) for name, g in grads.items()} if rows else grads, opt_state)

    opt_state = opt.init(params)
    with pytest.raises(
        SpecError, match=r"SparseAdam takes sparse gradients, and value_and_grad .*to_sparse\(1\).*Adam"
    ):
        step(params, opt_state, ids, False)
    for _ in range(2):
        params, opt_state = step(params, opt_state, ids, True)
        theirs.zero_grad()
        reference(ids).square().mean().backward()
        theirs.step()
    torch.testing.assert_close(params["weight"].full(), reference.weight.detach())


def test_a_class_made_from_sparse_adam_says_what_it_takes():
    class Rows(optim.SparseAdam):
        pass

    opt, params = optimizer(Rows, lr=0.1), {"w": torch.ones(2, 2)}
    with pytest.raises(SpecError, match=r"Rows takes sparse gradients, and value_and_grad gives dense ones"):
        opt.step(params, params, opt.init(params))


def test_it_is_a_pair():
    opt = optimizer(optim.SGD, lr=0.1)
    assert isinstance(opt, Optimizer)
    init, step = opt
    assert step(torch.tensor(1.0), torch.tensor(1.0), init(torch.tensor(1.0)))[0] == torch.tensor(0.9)


def test_the_state_is_made_when_torch_makes_it():
    params = {"layer": {"w": torch.ones(2)}, "list": [torch.ones(3)]}
    opt = optimizer(optim.Adam, lr=0.5, betas=(0.8, 0.9), amsgrad=False)
    opt_state = opt.init(params)
    assert opt_state == {"state": {}, "hyper": {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0}}
    _, opt_state = opt.step(params, params, opt_state)
    assert list(opt_state["state"]) == ["['layer']['w']", "['list'][0]"]
    assert list(opt_state["state"]["['list'][0]"]) == ["step", "exp_avg", "exp_avg_sq"]
    at_once = optimizer(optim.Adagrad, initial_accumulator_value=0.5).init(params)
    assert torch.equal(at_once["state"]["['list'][0]"]["sum"], torch.full((3,), 0.5))
    bare = optimizer(optim.SGD, momentum=0.9)
    _, opt_state = bare.step(torch.ones(2), torch.ones(2), bare.init(torch.ones(2)))
    assert list(opt_state["state"]) == [""]


@recipes
def test_the_state_survives_flattening_pickling_and_another_process(cls, hyper):
    params = draw([(4, 6), (6, 6)], torch.float32, 0)
    grads = draw([(4, 6), (6, 6)], torch.float32, 1)
    opt = optimizer(cls, **hyper)
    opt_state = opt.init(params)
    other = cloudpickle.loads(cloudpickle.dumps(opt))
    for _ in range(3):
        leaves, treedef = trees.flatten(pickle.loads(pickle.dumps(opt_state)))
        copied = trees.unflatten(treedef, leaves)
        expected = opt.step(params, grads, opt_state)
        assert same(other.step(params, grads, copied), expected)
        params, opt_state = expected


def test_using_an_optimizer_does_not_change_its_pickled_bytes():
    opt = optimizer(optim.AdamW, lr=1e-2)
    before = cloudpickle.dumps(opt)
    params = {"w": torch.randn(1000)}
    opt.step(params, params, opt.init(params))
    assert cloudpickle.dumps(opt) == before


def test_hyper_parameters_are_read_from_the_state():
    params = {"w": torch.tensor([1.0, -2.0])}
    theirs = nn.Parameter(params["w"].clone())
    reference = torchs(optim.AdamW, [theirs], {})
    opt = optimizer(optim.AdamW)
    opt_state = opt.init(params)
    for lr, betas in [(0.5, (0.9, 0.99)), (0.1, (0.5, 0.99)), (0.2, (0.5, 0.6))]:
        reference.param_groups[0].update(lr=lr, betas=betas)
        theirs.grad = torch.tensor([1.0, 3.0])
        reference.step()
        # As it arrives from a schedule computed with tensors, and from formats without tuples.
        opt_state["hyper"]["lr"] = torch.tensor(lr, dtype=torch.float64)
        opt_state["hyper"]["betas"] = list(betas)
        params, opt_state = opt.step(params, {"w": theirs.grad}, opt_state)
        assert torch.equal(params["w"], theirs)
    assert optimizer(optim.AdamW).init(params)["hyper"]["lr"] == 1e-3


def test_one_state_may_be_stepped_twice_with_other_hyper_parameters():
    params, grads = {"w": torch.tensor(1.0)}, {"w": torch.tensor(1.0)}
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.5)
    opt_state = opt.init(params)
    slow = {**opt_state, "hyper": {**opt_state["hyper"], "lr": 0.25}}
    assert opt.step(params, grads, slow)[0]["w"] == 0.75
    assert opt.step(params, grads, opt_state)[0]["w"] == 0


def test_what_is_not_trained_comes_back_as_it_is():
    params = {
        "w": torch.ones(2),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "ids": torch.arange(3),
        "none": None,
        "text": "text",
    }
    grads = {
        "w": torch.ones(2),
        "parameter": torch.ones(2),
        "frozen": torch.ones(5),
        "ids": None,
        "none": None,
        "text": 1,
    }
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.9)
    new, opt_state = opt.step(params, grads, opt.init(params))
    assert list(new) == list(params)
    assert all(new[name] is params[name] for name in ("frozen", "ids", "none", "text"))
    assert torch.equal(new["w"], torch.zeros(2)) and torch.equal(new["parameter"], torch.zeros(2))
    assert list(opt_state["state"]) == ["['w']", "['parameter']"]
    empty = {"ids": torch.arange(3)}
    assert opt.step(empty, {"ids": None}, opt.init(empty)) == (empty, opt.init(empty))


def test_a_missing_gradient_is_skipped_as_torch_does():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    theirs = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    reference = torchs(optim.AdamW, theirs, {})
    opt = optimizer(optim.AdamW)
    opt_state = opt.init(params)
    for a, b in [(1, None), (1, 2), (None, None), (None, 3)]:
        grads = [None if g is None else torch.full((2,), float(g)) for g in (a, b)]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad
        reference.step()
        params, opt_state = opt.step(params, dict(zip("ab", grads, strict=True)), opt_state)
        for param, value in zip(theirs, params.values(), strict=True):
            assert torch.equal(param, value)
    assert opt_state["state"]["['a']"]["step"] == 2


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_sgd_with_a_first_gradient_later_than_the_others(options):
    """Torch's fused kernel itself takes parameters that are all in their first step, or none."""
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.5, **options)
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    opt_state = opt.init(params)
    for b in (None, torch.ones(2)):
        params, opt_state = opt.step(params, {"a": torch.ones(2), "b": b}, opt_state)
    assert params["a"].tolist() == [-2.5, -2.5] and params["b"].tolist() == [-1.0, -1.0]


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "tree",
    [
        torch.ones(3),
        [torch.ones(2), torch.ones(())],
        (torch.ones(2), {"b": torch.ones(1), "a": [torch.ones(3)]}),
        Pair(torch.ones(2), Pair(torch.ones(1), None)),
        {},
    ],
)
def test_params_may_be_any_tree(tree):
    opt = optimizer(optim.Adam, lr=0.5)
    new, opt_state = opt.step(tree, tree, opt.init(tree))
    new, opt_state = opt.step(new, tree, opt_state)
    assert trees.flatten(new)[1] == trees.flatten(tree)[1]
    for old, value in zip(trees.leaves(tree), trees.leaves(new), strict=True):
        assert old is None or torch.allclose(value, torch.zeros(()), atol=1e-4)


def test_gradients_are_matched_by_key_not_by_position():
    params = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    opt = optimizer(optim.SGD, lr=1.0)
    new, _ = opt.step(params, {"b": torch.tensor(2.0), "a": torch.tensor(1.0)}, opt.init(params))
    assert same(new, {"a": torch.tensor(0.0), "b": torch.tensor(0.0)})


def test_an_enclosing_graph_is_left_out():
    w = torch.ones(2, requires_grad=True)
    grad = w * 2
    opt = optimizer(optim.SGD, lr=1.0, momentum=0.9)
    new, opt_state = opt.step({"w": w * 1}, {"w": grad}, opt.init({"w": w}))
    assert not new["w"].requires_grad
    assert not opt_state["state"]["['w']"]["momentum_buffer"].requires_grad
    assert torch.is_grad_enabled()


def test_nothing_of_a_step_is_kept():
    opt = optimizer(optim.Adam)
    params = {"w": torch.ones(100)}
    grads = {"w": torch.ones(100)}
    first = opt.step(params, grads, opt.init(params))
    new, opt_state = opt.step(first[0], grads, first[1])
    alive = [
        weakref.ref(leaf)
        for leaf in trees.leaves((params, grads, first, new, opt_state))
        if isinstance(leaf, torch.Tensor)
    ]
    assert len(alive) == 10
    del params, grads, first, new, opt_state
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_the_torch_optimizer_is_made_once():
    made = []

    class Counted(optim.SGD):
        def __init__(self, *args, **kwargs):
            made.append(self)
            super().__init__(*args, **kwargs)

    opt = optimizer(Counted, lr=0.1)
    params = {"w": torch.ones(2)}
    opt_state = opt.init(params)
    count = len(made)
    for _ in range(3):
        params, opt_state = opt.step(params, params, opt_state)
    assert len(made) == count


def test_a_failed_step_can_be_run_again():
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    opt = optimizer(optim.Adam)
    opt_state = opt.step(params, params, opt.init(params))[1]
    broken = copy.deepcopy(opt_state)
    broken["state"]["['b']"]["exp_avg"] = torch.ones(7)
    with pytest.raises(SpecError, match=r"'exp_avg' that does not fit its parameter .*expected shape \(2,\), got"):
        opt.step(params, params, broken)
    again = opt.step(params, params, opt_state)
    assert same(again, optimizer(optim.Adam).step(params, params, opt_state))


def test_several_threads_may_step_at_once():
    opt = optimizer(optim.Adam, lr=0.1)
    grads = {"w": torch.ones(50)}

    def train(start, out):
        params = {"w": torch.full((50,), float(start))}
        opt_state = opt.init(params)
        for _ in range(30):
            params, opt_state = opt.step(params, grads, opt_state)
        out[start] = params

    alone, together = {}, {}
    for start in range(4):
        train(start, alone)
    threads = [threading.Thread(target=train, args=(start, together)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    assert all(same(alone[start], together[start]) for start in range(4))


def test_parameters_that_live_on_the_ranks_can_be_initialised_but_not_stepped(monkeypatch):
    class OnTheRanks:
        spec = P()

        def full(self):
            return torch.ones(3)

    for module in (spmd.optim.optimizer, spmd.optim.given):
        monkeypatch.setattr(module, "Array", OnTheRanks)
    opt = optimizer(optim.Adagrad)
    params = {"w": OnTheRanks()}
    opt_state = opt.init(params)
    assert opt_state["state"]["['w']"]["sum"].shape == (3,)
    w, array = torch.ones(3), params["w"]
    with pytest.raises(SpecError, match=r"got an Array, params\['w'\]"):
        opt.step(params, {"w": w}, opt_state)
    with pytest.raises(SpecError, match=r"got an Array, grads\['w'\]\): step in an @spmd function, .* fetch\(\)"):
        opt.step({"w": w}, {"w": array}, opt_state)
    own = {"['w']": {**opt_state["state"]["['w']"], "step": array}}
    with pytest.raises(SpecError, match=r"got an Array, opt_state\['state'\]\[.*\]\['step'\]"):
        opt.step({"w": w}, {"w": w}, {**opt_state, "state": own})


def test_what_is_known_of_a_parameter_is_carried_over():
    params = {"cut": torch.ones(2), "plain": torch.ones(2), "same": torch.ones(2), "worked on": torch.ones(2)}
    params["cut"]._spmd_axes, params["cut"]._spmd_spec = frozenset({"model"}), P("model")
    for name in ("same", "worked on"):
        params[name]._spmd_axes, params[name]._spmd_spec = frozenset(), P()
    grads = {name: torch.ones(2) for name in params}
    grads["cut"]._spmd_axes, grads["same"]._spmd_axes = frozenset({"model"}), frozenset()
    opt = optimizer(optim.Adam)
    new, opt_state = opt.step(params, grads, opt.init(params))
    assert new["cut"]._spmd_axes == {"model"} and new["cut"]._spmd_spec == P("model")
    assert new["same"]._spmd_axes == frozenset() and new["same"]._spmd_spec == P()
    assert not hasattr(new["worked on"], "_spmd_axes") and not hasattr(new["plain"], "_spmd_axes")
    moments = {name: opt_state["state"][f"[{name!r}]"]["exp_avg"] for name in params}
    assert isinstance(moments["cut"], Sharded) and moments["cut"].spec == P("model")
    assert isinstance(moments["same"], torch.Tensor) and isinstance(moments["plain"], torch.Tensor)
    again, opt_state = opt.step(new, grads, opt_state)
    assert torch.equal(again["cut"], again["plain"])
    assert isinstance(opt_state["state"]["['cut']"]["exp_avg_sq"], Sharded)


class Clipped(optim.Optimizer):
    """Not from torch: clips gradients in place, counts its steps in the group, takes no defaults for lr."""

    def __init__(self, params, lr, limit=1.0):
        super().__init__(params, {"lr": lr, "limit": limit, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                param.grad.clamp_(-group["limit"], group["limit"])
                param.sub_(param.grad, alpha=group["lr"] / group["count"])


def test_an_optimizer_from_elsewhere():
    params, grads = {"w": torch.tensor(3.0)}, {"w": torch.tensor(9.0)}
    opt = optimizer(Clipped, lr=1.0)
    opt_state = opt.init(params)
    assert opt_state["hyper"] == {"lr": 1.0, "limit": 1.0, "count": 0}
    for expected in (2.0, 1.5):
        params, opt_state = opt.step(params, grads, opt_state)
        assert params["w"] == expected
    assert opt_state["hyper"]["count"] == 2
    assert grads["w"] == 9
    with pytest.raises(SpecError, match="Clipped needs a value for 'lr'"):
        optimizer(Clipped)


class Registering(type):
    """Keeps its classes by name, of which each may be defined once."""

    known: ClassVar[dict[str, type]] = {}

    def __init__(cls, name, bases, members):
        super().__init__(name, bases, members)
        assert cls.known.setdefault(name, cls) is cls


class Registered(optim.SGD, metaclass=Registering):
    pass


class Named(optim.SGD):
    def __init_subclass__(cls, *, name):
        cls.name = name


class NamedOne(Named, name="one"):
    pass


class LooksAtItsType(optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr if type(self) is LooksAtItsType else 0)


class LooksAtItsClass(optim.SGD):
    def step(self, closure=None):
        if [self.__class__] == [LooksAtItsClass]:
            super().step(closure)


@pytest.mark.parametrize("cls", [Registered, NamedOne, LooksAtItsType, LooksAtItsClass])
def test_an_optimizer_that_knows_its_class(cls):
    params = {"w": torch.tensor(3.0)}
    opt = optimizer(cls, lr=1.0)
    assert opt.step(params, {"w": torch.tensor(1.0)}, opt.init(params))[0] == {"w": 2.0}


class LooksAtAll(optim.Optimizer):
    """Not from torch: scales by the norm of all gradients of all groups, keeps counts that are in no defaults."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("written", torch.zeros(())).add_(1)
            group.setdefault("first_lr", group["lr"])
            for param in group["params"]:
                param.mul_(1 - group["weight_decay"]).sub_(param.grad / norm / group["step"] / group["written"])


@pytest.mark.parametrize("shapes", [[(3, 2), (2,)], [(600, 600), (600,), (1, 600)]], ids=["few", "more than a block"])
@pytest.mark.parametrize("divided", [False, True])
def test_an_optimizer_from_elsewhere_sees_all_at_once_and_finds_what_it_wrote(shapes, divided):
    params, grads = draw(shapes, torch.float32, 0), draw(shapes, torch.float32, 1)
    groups = [{"params": lambda name, value: value.dim() < 2, "weight_decay": 0.1}] if divided else None
    opt = optimizer(LooksAtAll, lr=0.1, groups=groups)
    theirs = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    flat = [value for value in theirs.values() if value.dim() < 2]
    whole = [value for value in theirs.values() if value.dim() > 1]
    reference = LooksAtAll(
        [{"params": whole}, {"params": flat, "weight_decay": 0.1}] if divided else theirs.values(), lr=0.1
    )
    opt_state = opt.init(params)
    for _ in range(3):
        for name, value in theirs.items():
            value.grad = grads[name].clone()
        reference.step()
        params, opt_state = cloudpickle.loads(cloudpickle.dumps(opt)).step(params, grads, opt_state)
        for name, value in theirs.items():
            torch.testing.assert_close(params[name], value.detach(), rtol=0, atol=0)
    assert opt_state["hyper"]["step"] == opt_state["hyper"]["written"] == 3
    assert not divided or opt_state["groups"][0]["step"] == 3
    same_params, again = opt.step(params, dict.fromkeys(params), opt_state)
    assert same(again, opt_state) and same(same_params, params)
    restored, _ = optimizer(LooksAtAll, lr=0.1, groups=groups).step(params, grads, opt_state)
    assert same(restored, opt.step(params, grads, opt_state)[0])
    opt_state["hyper"]["lrr"] = 1.0
    with pytest.raises(SpecError, match=r"opt_state\['hyper'\] has an unknown 'lrr'"):
        opt.step(params, grads, opt_state)


def test_what_an_optimizer_from_elsewhere_cannot_keep_is_refused():
    class Keeps(Clipped):
        def step(self, closure=None):
            super().step()
            self.param_groups[0]["before"] = [param.clone() for param in self.param_groups[0]["params"]]

    opt = optimizer(Keeps, lr=1.0)
    params = {"w": torch.tensor(3.0)}
    with pytest.raises(SpmdError, match=r"Keeps keeps something in its parameter group .*'before', of type list"):
        opt.step(params, params, opt.init(params))


def test_a_count_that_an_optimizer_from_elsewhere_keeps_in_itself_gives_a_warning():
    """A run that is resumed would begin it anew."""

    class Counts(Clipped):
        def __init__(self, params, **options):
            super().__init__(params, **options)
            self.steps, self.limit = 0, 1.0

        def step(self, closure=None):
            super().step()
            self.steps += 1

    opt = optimizer(Counts, lr=1.0)
    params = {"w": torch.tensor(3.0)}
    text = r"Counts changes a number that it keeps in itself, .*got self.steps.*self.param_groups\[0\]\['steps'\]"
    with pytest.warns(UserWarning, match=text):
        new, opt_state = opt.step(params, params, opt.init(params))
    opt.step(new, params, opt_state)  # once is enough


@pytest.mark.parametrize("cls", [optim.SGD, Clipped])
def test_hooks_of_every_optimizer_are_called(cls):
    def halve(stepped, args, kwargs):
        for param in stepped.param_groups[0]["params"]:
            param.grad = param.grad / 2

    params = {"w": torch.tensor(3.0)}
    opt = optimizer(cls, lr=1.0)
    opt_state = opt.init(params)
    handle = register_optimizer_step_pre_hook(halve)
    try:
        assert opt.step(params, {"w": torch.tensor(1.0)}, opt_state)[0]["w"] == 2.5
    finally:
        handle.remove()
    assert opt.step(params, {"w": torch.tensor(1.0)}, opt_state)[0]["w"] == 2


def test_what_is_no_optimizer_is_refused():
    for wrong in (optim.Optimizer, nn.Linear, optim.SGD([torch.ones(1)]), "adam"):
        with pytest.raises(SpecError, match=r"subclass of torch.optim.Optimizer"):
            optimizer(wrong)


def test_keywords_are_checked_at_once():
    with pytest.raises(SpecError, match=r"AdamW does not take 'learning_rate' .*'lr', 'betas'"):
        optimizer(optim.AdamW, learning_rate=1.0)
    with pytest.raises(SpecError, match="does not take 'params'"):
        optimizer(optim.AdamW, params=[])
    with pytest.raises(SpecError, match=r"Invalid learning rate: -1 \(got lr=-1\)"):
        optimizer(optim.AdamW, lr=-1)


def test_closures_are_refused_with_a_way_out():
    with pytest.raises(SpmdError, match=r"LBFGS evaluates a closure .* AdamW.*a closure that calls a step"):
        optimizer(optim.LBFGS)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="came with torch 2.9")
def test_parameters_that_the_class_refuses():
    with pytest.raises(SpecError, match=r"not take params\['b'\]: Muon only supports 2D.*others by another optimizer"):
        optimizer(optim.Muon).init({"w": torch.ones(3, 3), "b": torch.ones(3)})


def step_with(params, grads, **changes):
    opt = optimizer(optim.SGD, lr=0.1, momentum=0.9)
    return opt.step(params, grads, {**opt.init(params), **changes})


def test_gradients_that_do_not_fit_are_named():
    params = {"a": torch.ones(2), "b": [torch.ones(2), torch.ones(3)]}
    a, b = params["a"], params["b"]
    with pytest.raises(SpecError, match=r"grads\['b'\]\[1\] does not fit .*expected \(3,\) .*got \(2,\)"):
        step_with(params, {"a": a, "b": [b[0], b[0]]})
    with pytest.raises(SpecError, match=r"grads\['a'\] does not fit .*torch.float64"):
        step_with(params, {"a": a.double(), "b": b})
    with pytest.raises(SpecError, match=r"grads\['a'\] is no tensor .*got float"):
        step_with(params, {"a": 1.0, "b": b})
    with pytest.raises(SpecError, match=r"grads\['a'\] is no tensor .*got dict"):
        step_with(params, {"a": {}, "b": b})
    with pytest.raises(SpecError, match=r"grads\['b'\]\[1\] is missing"):
        step_with(params, {"a": a, "b": [b[0]]})
    with pytest.raises(SpecError, match=r"grads\['c'\] belongs to no parameter"):
        step_with(params, {"a": a, "b": b, "c": a})
    with pytest.raises(SpecError, match=r"grads\['a'\] is missing"):
        step_with(params, None)
    with pytest.raises(SpecError, match="another structure"):
        step_with(params, {"a": a, "b": tuple(b)})


def test_state_that_does_not_fit_is_named():
    params = {"a": torch.ones(2)}
    with pytest.raises(SpecError, match=r"opt_state has an unexpected form"):
        optimizer(optim.SGD).step(params, params, {})
    with pytest.raises(SpecError, match=r"opt_state has an unexpected form .*got NoneType"):
        optimizer(optim.SGD).step(params, params, None)
    with pytest.raises(SpecError, match=r"\['b'\]"):
        step_with(params, params, state={"['b']": {"momentum_buffer": torch.ones(2)}})
    theirs = optim.SGD(params.values(), momentum=0.9).state_dict()
    with pytest.raises(SpecError, match=r"unexpected form .*torch's optimizers has the parameters' numbers.*how_to.md"):
        optimizer(optim.SGD).step(params, params, theirs)
    state = optimizer(optim.SGD, lr=0.1).init(params)
    with pytest.raises(SpecError, match=r"entry 'lr', which no step reads .*: write opt_state\[.hyper.\]\['lr'\] ="):
        optimizer(optim.SGD, lr=0.1).step(params, params, {**state, "lr": 0.01})
    with pytest.raises(SpecError, match=r"an entry 'rate', which no step reads .*: pass what opt.init"):
        optimizer(optim.SGD, lr=0.1).step(params, params, {**state, "rate": 0.01})
    for key in (0, "a"):
        with pytest.raises(SpecError, match=rf"got opt_state\['state'\]\[{key!r}\]\): state of torch's optimizers"):
            step_with(params, params, state={key: {"momentum_buffer": torch.ones(2)}})
    _, adam = optimizer(optim.Adam).step(params, params, optimizer(optim.Adam).init(params))
    for other, name in ((optimizer(optim.Adamax), "exp_inf"), (optimizer(optim.Adam, amsgrad=True), "max_exp_avg_sq")):
        with pytest.raises(SpecError, match=rf"finds no '{name}' in opt_state, .*'exp_avg_sq'\] for each .*: restore"):
            other.step(params, params, adam)
    hyper = optimizer(optim.SGD).init(params)["hyper"]
    with pytest.raises(SpecError, match="unknown 'rate'"):
        step_with(params, params, hyper={**hyper, "rate": 1.0})
    with pytest.raises(SpecError, match="misses 'lr'"):
        step_with(params, params, hyper={name: value for name, value in hyper.items() if name != "lr"})
    with pytest.raises(SpecError, match=r"\['lr'\] has an unexpected value .*like 0.1, got 'fast'"):
        step_with(params, params, hyper={**hyper, "lr": "fast"})


# -- sharded: ranks are played one after another, all-gather by running every rank up to it --------------------------


class Rank:
    """Stands in for a region on one of `size` ranks along the axis "data"."""

    def __init__(self, index, size, gathered):
        self.index, self.size, self.gathered, self.sent = index, size, gathered, []

    def axis_index(self, axis):
        assert axis == "data"
        return self.index

    def axis_size(self, axis):
        assert axis == "data"
        return self.size

    def all_gather(self, x, axis, *, dim, tiled):
        assert (axis, dim, tiled) == ("data", 0, True)
        self.sent.append(x)
        return torch.cat(self.gathered[len(self.sent) - 1]) if self.gathered else torch.cat([x] * self.size)

    def gather_written(self, length, dtype, axis, write, into=None):
        assert into is None  # nothing is donated here
        out = torch.empty(length, dtype=dtype)
        write(out)
        return self.all_gather(out, axis, dim=0, tiled=True)


def on_ranks(monkeypatch, size, function):
    """The result of `function(rank)` on every rank: once to learn what each sends, once with everybody's."""

    def play(index, gathered):
        rank = Rank(index, size, gathered)
        with monkeypatch.context() as patch:
            for name in ("axis_index", "axis_size", "gather_written"):
                patch.setattr(slices.transforms, name, getattr(rank, name), raising=False)
            return function(index), rank.sent

    sent = [play(index, None)[1] for index in range(size)]
    return [play(index, list(zip(*sent, strict=True)))[0] for index in range(size)]


def step_on_ranks(monkeypatch, opt, params, grads, states):
    return on_ranks(monkeypatch, len(states), lambda rank: opt.step(params, grads, states[rank]))


@pytest.fixture
def outside(monkeypatch):
    def refuse(axis):
        raise MeshError("no region")

    monkeypatch.setattr(slices.transforms, "axis_index", refuse, raising=False)
    monkeypatch.setattr(slices.transforms, "axis_size", refuse, raising=False)


def local(tree):
    """State as the next call gets it: each Sharded node is a plain tensor."""
    return trees.map(lambda x: x.local if isinstance(x, Sharded) else x, tree, is_leaf=lambda x: isinstance(x, Sharded))


SHAPES = [(5, 7), (130,), (), (3, 4, 2, 2), (0,), (70,)]


def mixed(seed):
    params = draw(SHAPES, torch.float32, seed)
    params["p3"] = params["p3"].to(memory_format=torch.channels_last)
    params["double"] = draw([(9,)], torch.float64, seed)["p0"]
    return params


@elementwise
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_steps_are_the_replicated_ones_bit_for_bit(monkeypatch, cls, hyper, size):
    plain, opt = optimizer(cls, **hyper), optimizer(cls, shard="data", **hyper)
    params = expected = mixed(0)
    params["frozen"] = nn.Parameter(torch.ones(2), requires_grad=False)
    reference = plain.init(params)
    states = on_ranks(monkeypatch, size, lambda rank: opt.init(params))
    for step in range(3):
        grads = {**mixed(step + 1), "frozen": None}
        expected, reference = plain.step(expected, grads, reference)
        given = states if step == 1 else [local(state) for state in states]
        before = copy.deepcopy(grads)
        results = step_on_ranks(monkeypatch, opt, params, grads, given)
        assert same(grads, before)
        for new, _ in results:
            assert same(new, expected)
            assert new["p3"].stride() == params["p3"].stride()
        params, states = results[0][0], [state for _, state in results]
    key = next((key for key in states[0]["state"] if key.startswith("float32#")), None)
    for name, value in states[0]["state"].get(key, {}).items():
        replicated = reference["state"]["['p0']"][name]
        if replicated.ndim == 0:
            assert torch.equal(value, replicated)
            continue
        assert all(isinstance(state["state"][key][name], Sharded) for state in states)
        assert value.spec == P("data")
        held = [state["state"][key][name].local for state in states]
        numel = flat.offsets(tuple(map(math.prod, SHAPES)))[-1]
        assert {tuple(piece.shape) for piece in held} == {(slice_length(numel, size),)}
        whole = [reference["state"][f"['p{i}']"][name].reshape(-1) for i in range(len(SHAPES))]
        padded = [F.pad(part, (0, -part.numel() % 64)) for part in whole]
        assert torch.equal(torch.cat(held)[:numel], torch.cat(padded))


@pytest.mark.parametrize("size", [1, 3])
def test_where_leaves_lie_changes_no_bits(monkeypatch, size):
    """Apart, end to end, in another order of elements; small ones are copied where long ones are not."""
    shapes = {
        "a": (7,),
        "long": (300, 101),
        "whole": (160, 128),
        "b": (5, 3),
        "c": (),
        "vector": (32,),
        "longer": (200, 211),
        "d": (64,),
    }
    given = [
        dict(zip(shapes, draw(list(shapes.values()), torch.float32, seed).values(), strict=True)) for seed in (0, 1)
    ]

    def end_to_end(tree):
        laid = [F.pad(leaf.reshape(-1), (0, -leaf.numel() % 64)) for leaf in tree.values()]
        parts = torch.cat(laid).split([len(part) for part in laid])
        return {
            name: part[: leaf.numel()].view(leaf.shape) for part, (name, leaf) in zip(parts, tree.items(), strict=True)
        }

    def turned(tree):
        return {name: leaf.t().contiguous().t() if leaf.ndim == 2 else leaf for name, leaf in tree.items()}

    plain, opt = optimizer(optim.AdamW, lr=0.1), optimizer(optim.AdamW, shard="data", lr=0.1)
    expected = plain.step(*given, plain.init(given[0]))[0]
    for lay, lay_grads in itertools.product([dict, end_to_end, turned], repeat=2):
        params = lay(given[0])
        states = on_ranks(monkeypatch, size, lambda rank, params=params: opt.init(params))
        for new, _ in step_on_ranks(monkeypatch, opt, params, lay_grads(given[1]), states):
            assert same(new, expected)


def test_state_of_one_number_of_ranks_suits_another(monkeypatch):
    opt = optimizer(optim.AdamW, shard="data")
    plain = optimizer(optim.AdamW)
    params = expected = mixed(0)
    reference = plain.init(params)
    states = on_ranks(monkeypatch, 1, lambda rank: opt.init(params))
    for size in (1, 3, 2, 4, 1):
        grads = mixed(size)
        expected, reference = plain.step(expected, grads, reference)
        given = [states[0]] * size
        results = step_on_ranks(monkeypatch, opt, params, grads, given)
        params = results[0][0]
        assert same(params, expected)
        # As a checkpoint has it: the shards of all ranks joined, the same value on every rank of the next mesh.
        pieces = [trees.leaves(state) for _, state in results]
        treedef = trees.flatten(results[0][1])[1]
        joined = [
            torch.cat(leaf) if torch.is_tensor(leaf[0]) and leaf[0].ndim else leaf[0]
            for leaf in zip(*pieces, strict=True)
        ]
        states = [local(trees.unflatten(treedef, joined))]


def test_outside_a_region_shard_changes_nothing(outside):
    plain, opt = optimizer(optim.Adagrad), optimizer(optim.Adagrad, shard="data")
    params = expected = mixed(0)
    opt_state, reference = opt.init(params), plain.init(params)
    for step in range(2):
        params, opt_state = opt.step(params, mixed(step + 1), opt_state)
        expected, reference = plain.step(expected, mixed(step + 1), reference)
        assert same(params, expected)
    assert not any(isinstance(x, Sharded) for x in trees.leaves(opt_state, is_leaf=lambda x: isinstance(x, Sharded)))


def test_parameters_stay_on_their_devices():
    """As those of the host beside those of a GPU, for which "meta" stands here."""
    opt = optimizer(optim.AdamW, lr=0.1, shard="data")
    params = {"a": torch.ones(3), "b": torch.ones(3, device="meta"), "c": torch.ones(2)}
    here = {name: leaf for name, leaf in params.items() if leaf.is_cpu}
    opt_state, its = opt.init(params), opt.init(here)
    for _ in range(2):
        params, opt_state = opt.step(params, params, opt_state)
        here, its = opt.step(here, here, its)
    assert [leaf.device.type for leaf in params.values()] == ["cpu", "meta", "cpu"]
    assert all(torch.equal(params[name], leaf) for name, leaf in here.items())


def test_state_made_in_the_driver_enters_a_region(monkeypatch):
    opt = optimizer(optim.Adagrad, shard="data", initial_accumulator_value=0.5)
    params, grads = mixed(0), mixed(1)

    def no_region(axis):
        raise MeshError("no region")

    with monkeypatch.context() as patch:
        patch.setattr(slices.transforms, "axis_index", no_region, raising=False)
        opt_state = opt.init(params)
    results = on_ranks(monkeypatch, 3, lambda rank: opt.step(params, grads, opt_state))
    plain = optimizer(optim.Adagrad, initial_accumulator_value=0.5)
    assert same(results[2][0], plain.step(params, grads, plain.init(params))[0])


def test_leaves_that_are_cut_already_are_stepped_where_they_are(monkeypatch):
    opt = optimizer(optim.AdamW, shard="data")

    def make(rank):
        params = {
            "replicated": torch.ones(100),
            "over data": torch.full((3, 2), float(rank)),
            "over model": torch.ones(70),
            "over both": torch.ones(4),
        }
        for name, axes in [("replicated", ()), ("over data", ("data",)), ("over model", ("model",))]:
            params[name]._spmd_axes = frozenset(axes)
        params["over both"]._spmd_axes = frozenset({"model", "data"})
        params["over both"]._spmd_spec = P(("model", "data"))
        return params

    ones = {name: torch.ones_like(value) for name, value in make(0).items()}
    plain = optimizer(optim.AdamW)
    results = on_ranks(monkeypatch, 2, lambda rank: opt.step(make(rank), ones, opt.init(make(rank))))
    for rank, (params, opt_state) in enumerate(results):
        assert same(params, plain.step(make(rank), ones, plain.init(make(rank)))[0])
        for name, value in make(rank).items():
            assert getattr(params[name], "_spmd_spec", None) == getattr(value, "_spmd_spec", None)
        assert {key.partition("#")[0]: own["exp_avg"].spec for key, own in opt_state["state"].items()} == {
            "['over data']": P("data"),
            "['over both']": P(("model", "data")),
            "float32": P("data"),
            "float32/model": P(("data", "model")),
        }
        assert opt_state["state"]["['over data']"]["exp_avg"].local.shape == (3, 2)
        assert opt_state["state"]["['over data']"]["step"].ndim == 0
    again = on_ranks(monkeypatch, 2, lambda rank: opt.step(make(rank), ones, results[rank][1]))
    (key,) = (key for key in again[1][1]["state"] if key.startswith("float32#"))
    assert again[1][1]["state"][key]["step"] == 2


@pytest.mark.parametrize(("cls", "hyper"), [(optim.AdamW, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adagrad, {})])
@pytest.mark.parametrize("fused", [{}, {"fused": True}])
def test_gradients_and_state_lie_in_another_order_than_their_parameter(cls, hyper, fused):
    """Torch's fused kernels go over memory, whatever the strides."""
    opt, transposed = optimizer(cls, **hyper, **fused), torch.randn(4, 3).t()
    params, grads = {"w": transposed, "x": torch.randn(3, 4)}, {"w": transposed * 2, "x": torch.randn(3, 4)}
    params, opt_state = opt.step(params, grads, opt.init(params))
    expected, _ = opt.step(params, grads, opt_state)

    def moved(tree):
        order = torch.contiguous_format
        return {name: value.clone(memory_format=order) if value.ndim else value for name, value in tree.items()}

    state = {path: moved(own) for path, own in opt_state["state"].items()}
    for its_grads in (grads, moved(grads), {**grads, "x": grads["x"].t().contiguous().t()}):
        for its_state in (opt_state, {**opt_state, "state": state}):
            found, after = opt.step(params, its_grads, its_state)
            assert same(found, expected) and found["w"].stride() == params["w"].stride()
            assert same(opt.step(found, its_grads, after)[0], opt.step(found, grads, after)[0])


def test_a_missing_gradient_keeps_its_parameter_in_a_sharded_step(monkeypatch):
    opt = optimizer(optim.AdamW, shard="data")
    params = {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(3, dtype=torch.float64)}
    grads = {"a": None, "b": torch.ones(100), "c": None}
    results = on_ranks(monkeypatch, 2, lambda rank: opt.step(params, grads, opt.init(params)))
    plain = optimizer(optim.AdamW)
    for new, opt_state in results:
        assert new["a"] is params["a"] and new["c"] is params["c"]
        assert same(new, plain.step(params, grads, plain.init(params))[0])
        assert [key.partition("#")[0] for key in opt_state["state"]] == ["float32[1]"]


@settings(max_examples=30, deadline=None)
@given(numel=st.integers(0, 1000), parts=st.integers(1, 9))
def test_slices_cover_everything_at_multiples_of_64(numel, parts):
    made = [slices.Slice("", (0,), ((numel,),), 0, slices.Ranks("data", at, parts), ()) for at in range(parts)]
    bounds, numel = [one.bounds for one in made], made[0].numel
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        assert stop == start
        assert start % 64 == 0 or start == numel
    assert max(stop - start for start, stop in bounds) <= made[0].length


def test_state_within_other_values_cannot_be_sharded():
    class Nested(optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        def step(self):
            for param in self.param_groups[0]["params"]:
                moments = self.state[param].setdefault("moments", {"first": torch.zeros_like(param)})
                param.sub_(moments["first"].add_(param.grad), alpha=self.param_groups[0]["lr"])

    params = {"a": torch.ones(64), "b": torch.zeros(64)}  # of one size: each could go on with the other's
    whole, cut = optimizer(Nested), optimizer(Nested, shard="data")
    assert whole.step(params, params, whole.init(params))[1]["state"]
    with pytest.raises(SpecError, match="cannot shard Nested, whose state has tensors within other values"):
        cut.step(params, params, cut.init(params))


def test_what_cannot_be_sharded_is_refused():
    for name in leaves.REFUSED:
        if hasattr(optim, name):
            with pytest.raises(SpecError, match=f"cannot shard {name}, which .*AdamW"):
                optimizer(getattr(optim, name), shard="data")
    with pytest.raises(SpecError, match="expected a mesh axis"):
        optimizer(optim.AdamW, shard=2)


class _Stepping(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for param in self.param_groups[0]["params"]:
            param.data.sub_(self.direction(param, param.grad), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "direction",
    [
        lambda param, grad: grad * param.norm() / grad.norm(),  # LARS
        lambda param, grad: grad - grad.mean(dim=-1, keepdim=True),  # centralised gradients
        lambda param, grad: grad + (0.1 * param if param.ndim > 1 else 0),  # decay of matrices alone
    ],
)
def test_classes_from_elsewhere_that_mix_elements_cannot_be_sharded(direction):
    mixes = type("Mixes", (_Stepping,), {"direction": staticmethod(direction)})
    with pytest.raises(SpecError, match="cannot shard Mixes, which steps a matrix otherwise"):
        optimizer(mixes, shard="data")
    optimizer(mixes)


@pytest.mark.parametrize(
    "direction",
    [
        lambda param, grad: grad.sign() + 0.01 * param,
        lambda param, grad: grad + torch.randn_like(grad),
        lambda param, grad: grad if param.dtype == torch.float32 else 1 / 0,  # not judged
    ],
)
def test_classes_from_elsewhere_that_treat_elements_alike_are_sharded(direction):
    state = torch.get_rng_state()
    optimizer(type("Alike", (_Stepping,), {"direction": staticmethod(direction)}), shard="data")
    assert torch.equal(state, torch.get_rng_state())


class _Replaces(optim.Optimizer):
    """Puts new tensors where others write to those that are there."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["momentum"] = state.get("momentum", torch.zeros_like(param.data)) * 0.9 + param.grad
            param.data = param.data - self.param_groups[0]["lr"] * state["momentum"]


def test_new_tensors_of_a_class_from_elsewhere_are_taken_when_it_is_sharded():
    params = {"w": torch.linspace(-1, 1, 70), "v": torch.ones(3, 5)}
    sharded, plain = (optimizer(_Replaces, shard=shard) for shard in ("data", None))
    (found, state), (expected, alone) = ((params, opt.init(params)) for opt in (sharded, plain))
    for _ in range(3):
        found, state = sharded.step(found, found, state)
        expected, alone = plain.step(expected, expected, alone)
    assert same(found, expected) and not same(found, params)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"float64": {}}, r"opt_state\['state'\]\['float64'\].*: keep them in float64, and cast in the loss"),
        ({"float32#1a2d7ba3": {}}, "other trainable parameters than these"),
        (
            {"float32#5515ff1d": {"momentum_buffer": torch.ones(128)}},
            r"\['momentum_buffer'\] does not fit .*got shape \(128,\).*frozen for a while stays trainable",
        ),
    ],
)
def test_sharded_state_that_does_not_fit_is_named(monkeypatch, state, text):
    opt = optimizer(optim.SGD, shard="data", momentum=0.9)
    params = {"w": torch.ones(300)}
    opt_state = {**optimizer(optim.SGD).init(params), "state": state}
    with pytest.raises(SpecError, match=text):
        step_on_ranks(monkeypatch, opt, params, params, [opt_state] * 2)


def test_conjugated_leaves_are_not_shown_as_what_they_lie_beside() -> None:
    """`as_strided` keeps the first one's bit for all."""
    memory = torch.randn(128, dtype=torch.complex64)
    leaves = [memory[:64].conj(), memory[64:]]
    (run,) = flat.runs((64, 64), [leaves], 0, 128)
    assert torch.equal(run.columns[0], torch.cat(leaves))
