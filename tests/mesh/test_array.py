"""Arrays: what is known of a value on a mesh without fetching it, and how it is fetched."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
from tqdm import tqdm

from spmd import Array, MeshError, P, SpecError, put, spmd

DEVICES = "Mesh({'data': 2, 'model': 2}, backend='shm', device='cpu')"


@pytest.fixture
def mesh(shared_mesh):
    return shared_mesh({"data": 2, "model": 2})


def test_what_is_known_of_it(mesh):
    array = put(torch.arange(8.0).reshape(4, 2), P("data", "model"), mesh=mesh)
    assert isinstance(array, Array) and array.mesh is mesh
    assert isinstance(array.shape, torch.Size) and array.shape == (4, 2)
    assert (array.ndim, len(array), array.dtype, array.spec) == (2, 4, torch.float32, P("data", "model"))
    assert repr(array) == f"Array(float32[4, 2], P('data', 'model'), {DEVICES})"
    assert [shard.tolist() for shard in array.shards()] == [[[0], [2]], [[1], [3]], [[4], [6]], [[5], [7]]]
    assert torch.equal(array.full(), torch.arange(8.0).reshape(4, 2))
    with pytest.raises(AttributeError):
        array.anything = 1


@pytest.mark.parametrize(
    ("value", "number"),
    [(torch.tensor(2.5), 2.5), (torch.tensor([[3]]), 3), (torch.tensor(True), True), (torch.tensor(1 + 2j), 1 + 2j)],
)
def test_numbers(mesh, value, number):
    array = put(value, mesh=mesh)
    assert array.item() == number and type(array.item()) is type(number)
    assert bool(array) and complex(array) == number
    if not isinstance(number, complex):
        assert float(array) == float(number) and int(array) == int(number)
    assert f"{array:.1f}" == f"{number:.1f}" and f"{array}" == (f"{value}" if not value.ndim else str(array))


@pytest.mark.filterwarnings("ignore:Tensor.T is deprecated on 0-D tensors")
def test_a_number_turned(mesh):
    assert put(torch.tensor(2.5), mesh=mesh).T.item() == 2.5


def test_what_is_no_number(mesh):
    array = put(torch.arange(4), P("data"), mesh=mesh)
    with pytest.raises(RuntimeError):
        array.item()
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(array)
    with pytest.raises(TypeError, match=r"len\(\) of a 0-d Array"):
        len(put(1.0, mesh=mesh))


def test_numpy(mesh):
    array = put(torch.arange(4, dtype=torch.int16), P("data"), mesh=mesh)
    assert np.asarray(array).dtype == np.int16 and np.asarray(array).tolist() == [0, 1, 2, 3]
    assert np.asarray(array, dtype=np.float64).dtype == np.float64
    assert np.array(array, copy=True).sum() == 6 and np.mean(array) == 1.5
    assert array.numpy(force=True).tolist() == array.numpy().tolist() == [0, 1, 2, 3]
    assert np.asarray(put(torch.ones(2, dtype=torch.bfloat16), mesh=mesh)).dtype == np.float32
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert np.asarray(put({"w": frozen}, mesh=mesh)["w"]).tolist() == [1, 1]
    assert np.asarray(put(torch.tensor([1 - 1j]).conj(), mesh=mesh)).tolist() == [1 + 1j]


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray, torch.from_dlpack])
def test_a_tensor_of_it_is_the_whole_value(mesh, make):
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for value, spec in (
        (torch.arange(8.0).view(4, 2), P("data")),
        (torch.arange(4).bfloat16(), P()),
        (torch.tensor([True, False]), P("data")),
        (torch.tensor([1 - 1j]).conj(), P()),
        (torch.zeros(0, 3), P()),
        (torch.tensor(2), P()),
        (frozen, P()),
    ):
        found = make(put(value, spec, mesh=mesh))
        assert type(found) is torch.Tensor and found.dtype is value.dtype and torch.equal(found, value)
    array = put(torch.zeros(3), mesh=mesh)
    make(array).add_(1)
    assert array.full().tolist() == [0, 0, 0]
    assert torch.as_tensor(array, dtype=torch.float64).dtype is torch.float64


def test_what_is_fetched_belongs_to_the_caller(mesh):
    source = torch.zeros(3)
    array = put(source, mesh=mesh)
    source += 1
    array.full().add_(5)
    np.asarray(array)[0] = 9
    array.shards()[0].add_(3)
    assert array.full().tolist() == [0, 0, 0]


def test_frozen_parameters_stay_frozen_on_another_device(mesh):
    """As where ranks have GPUs: a step trained them there."""
    frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def moved():
        mesh.session.device = torch.device("meta")
        try:
            part = mesh.session.on_device(frozen)
            return type(part), part.requires_grad, part.is_meta
        finally:
            mesh.session.device = torch.device("cpu")

    assert mesh.run(moved) == [(torch.nn.Parameter, False, True)] * mesh.size


def test_parameters_keep_what_they_are(mesh):
    frozen, trainable = torch.nn.Parameter(torch.ones(1), requires_grad=False), torch.nn.Parameter(torch.ones(1))
    arrays = put({"frozen": frozen, "trainable": trainable}, mesh=mesh)
    sharded = put(torch.nn.Parameter(torch.ones(4), requires_grad=False), P("data"), mesh=mesh)
    assert all(isinstance(shard, torch.nn.Parameter) and not shard.requires_grad for shard in sharded.shards())
    assert not put(torch.ones(4, requires_grad=True) * 2, P("data"), mesh=mesh).shards()[0].requires_grad
    kept = arrays["frozen"].full()
    assert isinstance(kept, torch.nn.Parameter) and not kept.requires_grad
    kinds = spmd(lambda t: {k: type(v).__name__ + str(v.requires_grad) for k, v in t.items()}, mesh=mesh)
    assert kinds(arrays) == kinds({"frozen": frozen, "trainable": trainable})
    assert kinds(arrays) == {"frozen": "ParameterFalse", "trainable": "TensorFalse"}
    large = put({"frozen": frozen, "rest": torch.ones(30000)}, mesh=mesh)  # in one block, which it alone does not hold
    assert kinds(spmd(lambda x: {"frozen": x}, mesh=mesh)(large["frozen"])) == {"frozen": "ParameterFalse"}
    twice = spmd(lambda x: (x["frozen"], x["trainable"] * 2), mesh=mesh)
    for _ in range(6):  # repeated calls answer with the numbers themselves
        assert [type(one.full()) for one in twice(arrays)] == [torch.nn.Parameter, torch.Tensor]


def test_the_driver_holds_no_shard(mesh):
    with pytest.raises(MeshError, match=r"the driver is not a rank and holds no shard: use \.shards"):
        put(torch.ones(2), mesh=mesh).local  # noqa: B018
    with pytest.raises(MeshError, match=r"this needs a rank, and the driver is none: call it inside mesh\.run"):
        mesh.device_mesh  # noqa: B018


def test_tools_can_list_attributes(mesh):
    """As debuggers, mocks and completions do; those that only ranks have are passed over."""
    array = put(torch.ones(2), mesh=mesh)
    assert not hasattr(array, "local") and not hasattr(mesh, "device_mesh")
    assert {"shape", "spec", "full"} <= dict(inspect.getmembers(array)).keys()
    assert {"axes", "size", "run"} <= dict(inspect.getmembers(mesh)).keys()
    assert mesh.run(lambda: "local" in dict(inspect.getmembers(array))) == [True] * mesh.size


def test_an_array_stays_where_it_is(mesh):
    array = put(torch.ones(2), mesh=mesh)
    assert copy.deepcopy({"x": array})["x"] is array and copy.copy(array) is array  # values never change
    for thing in (array, mesh):
        with pytest.raises(MeshError, match="cannot be pickled"):
            pickle.dumps({"x": thing})


def test_donated(mesh):
    @spmd(mesh=mesh, donate=("state", "more"))
    def step(state, x, more=None):
        return {"w": state["w"] + x}

    state, x, more = put({"w": torch.ones(2)}, mesh=mesh), put(torch.ones(2), mesh=mesh), put(1.0, mesh=mesh)
    new = step(state, x, more=[more])
    assert new["w"].full().tolist() == [2, 2] and x.full().tolist() == [1, 1]
    assert repr(state["w"]) == "Array(donated to step)" and repr(more) == "Array(donated to step)"
    for use in (
        lambda: state["w"].full(),
        lambda: state["w"].shards(),
        lambda: np.asarray(state["w"]),
        lambda: torch.tensor(state["w"]),
        lambda: put(state["w"], mesh=mesh),
        lambda: step(state, x),
        lambda: mesh.run(lambda: state["w"].local),
    ):
        with pytest.raises(SpecError, match="this Array was donated to step and its memory reused: use the value"):
            use()
    assert state["w"].shape == (2,)  # what it was may still be asked


def test_a_closed_mesh(make_mesh):
    mesh = make_mesh({"data": 2})
    array = put(torch.arange(4), P("data"), mesh=mesh)
    result = spmd(lambda x: x.sum()[None], mesh=mesh, out_specs=P("data"))(array)
    mesh.close()
    for use in (array.full, array.shards, lambda: result.full(), lambda: put(array, P(), mesh=mesh)):
        with pytest.raises(MeshError, match=r"closed: Mesh.close\(\) was called.*: make a new Mesh, and fetch .*full"):
            use()
    assert array.shape == (4,) and "P('data')" in repr(array)


@pytest.mark.parametrize("size", [1, 2])
def test_numbers_come_with_the_answer(make_mesh, size):
    """They need no message of their own: what was told with the call is there when the ranks are gone."""
    mesh = make_mesh({"data": size})

    @spmd(mesh=mesh)
    def step(x, k):
        total = x.sum() * k
        return [x, total, x[:1] * k, (total > 0).view(1, 1), total.to(torch.bfloat16), total * 1j, x.long().sum(), 3]

    x = torch.arange(1.0, 5.0)
    calls = [step(x, torch.tensor(float(k))) for k in range(7)]
    expected = [step(x, torch.tensor(float(k))) for k in range(7)]  # another order of looks at larger values
    for results, others in zip(calls, expected, strict=True):
        assert all(torch.equal(a.full(), b.full()) for a, b in zip(results[:-1], others[:-1], strict=True))
    assert [float(results[1]) for results in calls] == [10.0 * k for k in range(7)]
    results = expected[5]
    mesh.close()
    assert [one.full().tolist() for one in results[1:-1]] == [50.0, [5.0], [[True]], 50.0, 50j, 10]
    with pytest.raises(MeshError, match="closed"):
        results[0].full()


def test_what_logs_numbers_takes_a_loss(shared_mesh):
    """`np.isscalar` is what TensorBoard's `add_scalar` asks, `numbers.Number` what tqdm does."""
    mesh = shared_mesh({"data": 2})
    loss, row = put(torch.tensor(0.25), mesh=mesh), put(torch.ones(3), mesh=mesh)
    assert np.isscalar(loss) and np.array([loss]).squeeze() == 0.25
    with tqdm(file=io.StringIO()) as bar:
        bar.set_postfix(loss=loss)
        assert bar.postfix == "loss=0.25"
        bar.set_postfix(row=row)
        assert "1.0, 1.0, 1.0" in bar.postfix


def test_a_number_counts_and_indexes(shared_mesh):
    mesh = shared_mesh({"data": 2})
    number = put(torch.tensor(2), mesh=mesh)
    assert ["a", "b", "c"][number] == "c" and list(range(number)) == [0, 1]
    with pytest.raises(TypeError, match="index"):
        [1][put(torch.tensor(2.0), mesh=mesh)]


def test_numpy_leaves_operators_to_arrays(shared_mesh):
    x = torch.arange(4.0)
    array = put(x, P("data"), mesh=shared_mesh({"data": 2}))
    for result in (np.ones(4, np.float32) + array, np.float32(1) + array, array + np.ones(4, np.float32)):
        assert isinstance(result, Array) and torch.equal(result.full(), x + 1)
