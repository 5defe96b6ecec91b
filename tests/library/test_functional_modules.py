"""From functions back to modules, and batch norm over the whole batch."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import parametrizations

from spmd import (
    SpecError,
    count_collectives,
    data_parallel,
    functional,
    functional_with_buffers,
    optimizer,
    put,
    spmd,
    value_and_grad,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


def test_back_to_a_module_with_tied_names(shared_mesh):
    module = Tied()
    apply, params = functional(module)
    doubled = {name: value * 2 for name, value in params.items()}
    for given in (doubled, put(doubled, mesh=shared_mesh({"data": 2}))):
        found = apply.to_module(given)
        assert found.head.weight is found.embedding.weight
        assert torch.equal(found.head.weight, 2 * module.head.weight)
        assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in module.parameters()]
        state = apply.state_dict(given)
        assert [*state] == [*module.state_dict()] and torch.equal(state["head.weight"], state["embedding.weight"])
        other = Tied()
        other.load_state_dict(state)
        x = torch.tensor([0, 3, 4])
        assert torch.equal(other(x), found(x)) and torch.equal(found(x), apply(doubled, x))
    found.embedding.weight.data.zero_()
    assert doubled["embedding.weight"].abs().sum() > 0
    with pytest.raises(SpecError, match=r"misses 'embedding.weight'"):
        apply.to_module({})


def test_a_plain_state_dict_is_taken():
    module, other = Tied(), Tied()
    apply, params = functional(module)
    taken = apply.params(other.state_dict())
    assert [*taken] == [*params] and isinstance(taken["head.bias"], nn.Parameter)
    x = torch.tensor([1, 2])
    assert torch.equal(apply(taken, x), other(x))
    with pytest.raises(SpecError, match=r"apply.params got no 'embedding.weight'"):
        apply.params(nn.Linear(3, 5).state_dict())


class KeepsAFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = lambda x: x @ self.embedding.weight.t()

    def forward(self, x):
        return self.head(self.embedding(x))


def test_a_function_that_a_module_keeps_computes_with_the_weights_given(shared_mesh):
    module, x = KeepsAFunction(), torch.arange(5)
    apply, params = functional(module)
    F.cross_entropy(module(x), x).backward()

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def gradient(params, batch):
        return value_and_grad(lambda params: F.cross_entropy(apply(params, batch), batch))(params)[1]

    torch.testing.assert_close(gradient(params, x)["embedding.weight"].full(), module.embedding.weight.grad)
    exported = apply.to_module({"embedding.weight": torch.ones(5, 3)})
    assert torch.equal(exported(x), torch.full((5, 5), 3.0))
    assert torch.equal(exported.head(torch.ones(1, 3)), torch.full((1, 5), 3.0))


class KeepsOthers(nn.Module):
    """Functions that capture it as hooks, in a dictionary, inside another function, as a default, around `forward`.

    One finds others in the dictionary that it is in.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(2.0))
        plain, inner = self.layer.forward, lambda x: self.layer(x)
        self.layer.forward = lambda x: plain(x) + 1
        self.layer.register_forward_hook(lambda module, args, out: out * self.scale)
        parts = self.parts = {"a": [lambda x: self.layer(x)], "b": lambda x, layer=self.layer: layer(x)}
        self.parts["c"] = lambda x: parts["b"](x)
        self.outer = lambda x: inner(x)

    def forward(self, x):
        return self.parts["a"][0](x) + self.parts["c"](x) * self.outer(x)


class SharesAVariable(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, found = nn.Linear(3, 3), None

        def find(module, args, out):
            nonlocal found
            found = out + self.layer.bias

        self.layer.register_forward_hook(find)
        self.found = lambda: found

    def forward(self, x):
        return self.layer(x) * self.found()


class KeepsItsWeight(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = kept(self.layer.weight)

    def forward(self, x):
        return self.kept(x) if callable(self.kept) else x @ self.kept[0].t()


def test_functions_wherever_a_module_keeps_them_compute_with_the_weights_given():
    module, other, x = KeepsOthers(), KeepsOthers(), torch.randn(2, 3)
    apply, params = functional(module)
    given = apply.params(other.state_dict())
    for function in (apply, cloudpickle.loads(cloudpickle.dumps(apply)), lambda p, x: apply.to_module(p)(x)):
        assert torch.equal(function(given, x), other(x)) and torch.equal(function(params, x), module(x))


def test_functions_that_a_module_keeps_go_on_sharing_a_variable():
    module, x = SharesAVariable(), torch.randn(2, 3)
    apply, params = functional(module)
    assert torch.equal(apply(params, x), module(x))


@pytest.mark.parametrize("kept", [lambda w: [w], lambda w: lambda x: x @ w.t(), lambda w: partial(F.linear, weight=w)])
def test_a_weight_that_is_kept_outside_of_its_place_is_refused(kept):
    """torch would compute with memory of nobody, without an error."""
    apply, params = functional(KeepsItsWeight(kept))
    for _ in range(2):
        with pytest.raises(
            SpecError, match=r"KeepsItsWeight computes with a parameter .*'layer.weight'.*ParameterList"
        ):
            apply(params, torch.randn(2, 3))


def test_a_buffer_that_is_kept_outside_of_its_place_is_refused():
    module = KeepsItsWeight(lambda w: [torch.ones(3, 3)])
    module.register_buffer("scale", module.kept[0])
    apply, params, buffers = functional_with_buffers(module)
    with pytest.raises(SpecError, match="'scale'"):
        apply(params, buffers, torch.randn(2, 3))


class ComputesAShape(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(torch.empty(x.shape, device="meta").flip(0).shape)


def test_a_module_may_compute_without_memory():
    apply, params = functional(ComputesAShape(3, 3))
    assert apply(params, torch.randn(2, 3)).shape == (2, 3)


def test_old_weights_that_a_hook_takes_from_a_global_variable_are_refused():
    global of_a_script
    of_a_script = KeepsAFunction()
    apply, params = functional(of_a_script)
    assert apply(params, torch.arange(5)).shape == (5, 5)
    of_a_script.embedding.register_forward_hook(lambda module, args, out: out * of_a_script.embedding.weight[0])
    apply, params = functional(of_a_script)
    with pytest.raises(SpecError, match=r"of the module that functional was given, .*'embedding.weight'.*global"):
        apply(params, torch.arange(5))


def test_buffers_and_parametrizations_come_back():
    norm = nn.BatchNorm1d(2)
    apply, params, buffers = functional_with_buffers(norm)
    _, new = apply(params, buffers, torch.randn(4, 2))
    assert torch.equal(apply.to_module(params, new).running_mean, new["running_mean"])
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    apply, params = functional(layer)
    assert torch.equal(apply.to_module(params).weight, layer.weight)


class GraphLayer(nn.Module):
    """A layer and a norm over nodes, with a sparse adjacency matrix among the buffers."""

    def __init__(self, adjacency):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5)

    def forward(self, x):
        return self.norm(self.linear((self.adjacency.to(x.dtype) @ x.T).T))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_buffers(shared_mesh, layout, shards):
    torch.manual_seed(0)
    dense, x = torch.randn(4, 4).relu(), torch.randn(8, 4)
    apply, params, buffers = functional_with_buffers(GraphLayer(dense.to_sparse(layout=layout)))
    frozen = functional(GraphLayer(dense.to_sparse(layout=layout)).eval())

    def loss_fn(params, buffers, batch):
        out, buffers = apply(params, buffers, batch)
        return (out - frozen[0](frozen[1], batch)).square().mean(), buffers

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel(shards=shards)
    def step(params, buffers, batch):
        (loss, buffers), grads = value_and_grad(loss_fn, has_aux=True)(params, buffers, batch)
        return loss, buffers, grads

    results = []
    for adjacency in (buffers["adjacency"], dense):
        loss, new, grads = step(params, {**buffers, "adjacency": adjacency}, x)
        assert new["adjacency"].full().layout == adjacency.layout
        results.append((loss.full(), new["norm.running_mean"].full(), grads["linear.weight"].full()))
    torch.testing.assert_close(*results)


class NormWithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


def convolutions(momentum):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3), NormWithActivation(3, momentum=momentum), nn.Flatten()),
        *(nn.Linear(3 * 4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)),
    ).double()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("momentum", "samples"), [(0.3, 7), (None, 7), (0.1, 2)])
def test_batch_norm_of_the_whole_batch(shared_mesh, size, momentum, samples):
    """Uneven and empty parts give what one device with the whole batch gives."""
    module = convolutions(momentum)
    apply, params, buffers = functional_with_buffers(module, sync=True)
    opt = optimizer(optim.SGD, lr=0.1, momentum=0.9)
    opt_state = opt.init(params)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 2, 4, 4, dtype=torch.float64, generator=generator), torch.arange(samples) % 3

    def loss_fn(params, buffers, batch):
        out, new = apply(params, buffers, batch["x"])
        return F.cross_entropy(out, batch["y"]), new

    @spmd(mesh=shared_mesh({"data": size}), check="always")
    @data_parallel
    def step(params, buffers, opt_state, batch):
        (loss, buffers), grads = value_and_grad(loss_fn, has_aux=True)(params, buffers, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, buffers, opt_state, loss

    reference = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        params, buffers, opt_state, loss = step(params, buffers, opt_state, {"x": x, "y": y})
        reference.zero_grad()
        expected = F.cross_entropy(module(x), y)
        expected.backward()
        reference.step()
        assert loss.item() == pytest.approx(expected.item())
    for name, value in module.named_parameters():
        torch.testing.assert_close(params[name].full(), value.detach())
    for name, value in module.named_buffers():
        torch.testing.assert_close(buffers[name].full(), value)


def test_a_synced_batch_norm_sums_no_count_in_the_backward_pass(shared_mesh):
    """Counts are summed by the hosts, which wait for each other."""
    apply, params, buffers = functional_with_buffers(nn.BatchNorm1d(3), sync=True)

    def loss_fn(params, batch):
        return apply(params, buffers, batch)[0].square().mean()

    @spmd(mesh=shared_mesh({"data": 2}))
    @data_parallel
    def step(params, batch):
        return value_and_grad(loss_fn)(params, batch)

    with count_collectives() as counts:
        step(params, torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    # Sums, counts and squares, and the gradients of sums and squares; those of the parameters are one more.
    assert (len(counts.forward), len(counts.backward)) == (3, 3)


def test_synced_batch_norm_elsewhere(shared_mesh):
    module = convolutions(0.1)
    apply, params, buffers = functional_with_buffers(module, sync=True)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(apply(params, buffers, x)[0], module(x))
    assert isinstance(module[1], nn.BatchNorm2d)  # stays as it is
    step = spmd(lambda params, buffers, x: apply(params, buffers, x)[0], mesh=shared_mesh({"data": 2}))
    with pytest.raises(SpecError, match=r"sync=True\) knows of no batch that is split"):
        step(params, buffers, x)
    module.eval()
    apply, params, buffers = functional_with_buffers(module, sync=True)
    torch.testing.assert_close(apply(params, buffers, x)[0], module(x))


def test_a_synced_batch_norm_keeps_the_dtype_of_its_input():
    """As torch's does: in mixed precision, the input has 16 bits, and the parameters have 32."""
    norm = nn.BatchNorm1d(3)
    apply, params, buffers = functional_with_buffers(norm, sync=True)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(apply(params, buffers, x)[0], norm(x), rtol=0, atol=0)


@pytest.mark.parametrize("samples", [0, 1])
def test_a_synced_batch_norm_of_one_value_is_refused(samples):
    """As torch refuses it: there is no variance, and the running one would be no number from then on."""
    apply, params, buffers = functional_with_buffers(nn.BatchNorm1d(2), sync=True)
    with pytest.raises(ValueError, match=r"no more than one value of each channel.*drop_last=True"):
        apply(params, buffers, torch.ones(samples, 2))


def test_a_batch_norm_that_computes_its_statistics_itself_is_refused():
    class Centring(nn.BatchNorm1d):
        def forward(self, x):
            return x - x.mean(0)

    apply, params, buffers = functional_with_buffers(Centring(2), sync=True)
    with pytest.raises(SpecError, match=r"got a Centring, whose forward calls no F\.batch_norm"):
        apply(params, buffers, torch.ones(3, 2))
