"""Launched ranks: what a program computes there is what it computes from a driver, and failures reach all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fork_server import shared_server
from scripts import ENDS_WHOLLY, FORKED_CHILDREN, HANGS, run, script, two_ranks

COMMON = """
import dataclasses
import enum
import gc
import threading
import time
import typing
import weakref
import numpy as np
import torch
from patience import soon
from spmd import Mesh, MeshError, P, PeerLost, Sharded, axis_index, barrier, data_parallel, pmean, psum, put, spmd
from spmd import value_and_grad

def plain(x):
    if isinstance(x, (list, tuple)):
        return [plain(one) for one in x]
    return x.tolist() if isinstance(x, torch.Tensor) else x

class Pair(typing.NamedTuple):
    first: object
    second: object

class Large:
    pass

class Phase(enum.Enum):
    MAIN = 1

class Seconds(float):
    pass

@dataclasses.dataclass
class Held:
    x: object

class Failed(Exception):
    pass

def with_a_large_one(x, large):
    return x

def results(mesh):
    found = {}
    whole = torch.arange(8.0).reshape(4, 2)

    cut = {"cut": P("data"), "uneven": P("data"), **dict.fromkeys(("mean", "noise", "number", "same"))}

    @spmd(mesh=mesh, in_specs=(P("data"), None), out_specs=cut)
    def step(x, scale):
        return {
            "cut": x * scale,
            "mean": pmean(x, "data"),
            "noise": Sharded(torch.rand(1, 2), P("data")),
            "uneven": torch.full((1 + 2 * axis_index("data"),), axis_index("data")),
            "number": int(scale) + 1,
            "same": torch.tensor(5.0),
        }

    for name, x in (("tensor", whole), ("array", put(whole, P("data"), mesh=mesh)), ("numpy", whole.numpy())):
        for scale in (2, 3):
            out = step(x, scale)
            found[f"step {name} {scale}"] = {k: plain(getattr(v, "full", lambda: v)()) for k, v in out.items()}
            arrays = [value for key, value in out.items() if key != "number"]
            found[f"kinds {name} {scale}"] = [[list(v.shape), str(v.spec), str(v.dtype)] for v in arrays]
            found[f"shards {name}"] = plain(out["uneven"].shards())
    turn = spmd(lambda x: x, mesh=mesh, in_specs=P(None, "data"), out_specs=P("data"))
    found["resharded"] = plain(turn(whole).shards())

    for _ in range(2):
        pair = spmd(lambda x: Pair(x + 1, [x]), mesh=mesh)(whole)
    made = {"phase": Phase.MAIN, "seconds": Seconds(2), "held": Held(1), "nested": [(Held(Phase.MAIN),)]}
    made["tensors"] = Held(whole)
    for name, one in made.items():
        result = spmd(lambda one=one: one, mesh=mesh)()
        of_run = mesh.run(lambda one=one: one)
        assert all(type(each) is type(one) for each in (result, *of_run)), name
        assert name == "tensors" or all(each == one for each in (result, *of_run)), name

    def fails():
        if axis_index("data"):
            raise Failed("on rank 1")

    for call in (spmd(fails, mesh=mesh), lambda: mesh.run(fails)):
        try:
            call()
            raise AssertionError
        except Failed as error:
            assert error.args == ("on rank 1",)
    found["a class of the script"] = [type(pair).__name__, plain(pair.first.full()), plain(pair.second[0].full())]

    same, frozen = spmd(lambda x: x, mesh=mesh), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    placed = put(frozen, mesh=mesh)
    for value in (placed, same(placed), same(frozen), same(same(frozen))):
        found.setdefault("frozen", []).append([type(value.full()).__name__, value.full().requires_grad])

    weight = put(torch.ones(2), mesh=mesh)

    @spmd(mesh=mesh)
    @data_parallel
    def train(w, batch):
        loss, gradient = value_and_grad(lambda w, b: ((b @ w) ** 2).mean())(w, batch)
        return w - 0.01 * gradient, loss

    for length in (4, 3, 1):  # uneven, and with nothing on one rank
        weight, loss = train(weight, whole[:length])
    found["trained"] = [plain(weight.full()), round(float(loss), 4), np.asarray(weight).shape]

    found["put"] = [plain(put(whole, spec, mesh=mesh).full()) for spec in (P(), P("data"), P(None, "data"))]
    large = put(torch.arange(1 << 17), P("data"), mesh=mesh)
    found["large"] = [int(large.full().sum()), float(spmd(lambda x: psum(x.double().sum(), "data"), mesh=mesh)(large))]
    found["run"] = plain(mesh.run(lambda a: (mesh.rank, a, torch.full((2,), mesh.rank)), "text"))
    found["random"] = plain(mesh.run(lambda: torch.rand(2)))
    found["ranks"] = [mesh.run(lambda: mesh.rank, ranks=ranks) for ranks in ([1], [1, 0], [])]
    found["submit"] = [mesh.submit(lambda: mesh.rank + 10, rank=1).result(), mesh.submit(lambda: mesh.size).result()]
    found["random after"] = plain(mesh.run(lambda: torch.rand(1)))
    found["mesh"] = mesh.run(lambda: mesh)[1] is mesh
    captured = put(whole, P("data"), mesh=mesh)
    found["captured"] = plain(spmd(lambda x: {"w": captured, "x": captured.full() + x}, mesh=mesh)(1.0)["w"].full())

    sparse = whole.to_sparse()
    for value in (sparse, put(sparse, mesh=mesh)):
        returned = spmd(lambda x: [x, (x.to_dense() + 1).to_sparse()], mesh=mesh)(value)
        found.setdefault("sparse", []).append([plain(one.full().to_dense()) for one in returned])

    mine = torch.zeros(2)
    kept, same = put(mine, mesh=mesh), spmd(lambda x: x, mesh=mesh)(mine)
    mine += 1
    kept.full().add_(7)
    found["own memory"] = [plain(kept.full()), plain(same.full())]
    captured, numbers, held = torch.zeros(2), np.zeros(2), {}
    give = spmd(lambda: [captured, captured[:1], torch.from_numpy(numbers), held["latest"]], mesh=mesh)
    for _ in range(2):
        held["latest"] = torch.zeros(2)
        of_captured = give()
    for one in (captured, numbers, held["latest"]):
        one += 1
    found["memory of its own, not captured"] = [plain(one.full()) for one in of_captured]
    frozen = put(torch.nn.Parameter(whole, requires_grad=False), P("data"), mesh=mesh)
    found["frozen parts"] = [type(one).__name__ for one in (frozen.full(), *frozen.shards())]

    def later(x, how):
        return [x, x[:1], x.double()][int(how)]
    changing = spmd(later, mesh=mesh)
    found["changing"] = [plain([changing(torch.ones(2), torch.tensor(how)).shape for how in (0, 1, 2, 0)])]

    unchanged, take = put(torch.ones(2), mesh=mesh), spmd(with_a_large_one, mesh=mesh)
    for _ in range(3):
        large = Large()
        unchanged = take(unchanged, large)
        unchanged.full()  # a driver has it until then, to run the call again
    held = weakref.ref(large)
    del large
    gc.collect()
    found["not held"] = held() is None
    return found

def failures(mesh):
    found = {}

    def attempt(name, call):
        began = time.monotonic()
        try:
            call()
        except BaseException as error:
            text = str(error) + (str(error.__cause__) if error.__cause__ is not None else "")
            found[name] = [type(error).__name__, text]
        else:
            found[name] = "nothing"
        found[name + " soon"] = soon(1.5, began)
        found[name + " goes on"] = mesh.run(lambda: int(psum(torch.tensor(1), "data")))

    class Local(Exception):
        pass

    def one(x):
        if axis_index("data") == 1:
            raise Local("only here")
        return psum(x, "data")

    def before(x):
        if axis_index("data") == 0:
            raise ValueError("at once")
        return x

    def last(x):
        out = psum(x, "data")
        if axis_index("data") == 0:
            raise KeyError("after all collectives")
        return out

    def every(x):
        raise RuntimeError(f"rank {axis_index('data')}")

    x = torch.ones(2)
    for body in (one, before, last, every):
        attempt(body.__name__, lambda: spmd(body, mesh=mesh)(x))
    attempt("run", lambda: mesh.run(one, x))
    attempt("run on one", lambda: mesh.run(before, x, ranks=[0]))
    attempt("submit", lambda: mesh.submit(before, x, rank=0).result())
    attempt("differs", lambda: spmd(lambda: torch.tensor(axis_index("data")), mesh=mesh)())
    attempt("number differs", lambda: spmd(lambda: axis_index("data"), mesh=mesh)())
    attempt("trees", lambda: spmd(lambda: [1] * axis_index("data"), mesh=mesh)())
    attempt("spec", lambda: spmd(one, mesh=mesh, in_specs=P("data"))(torch.ones(3)))
    attempt("in place", lambda: spmd(lambda x: x.add_(1), mesh=mesh)(x.clone()))
    attempt("mismatch", lambda: spmd(lambda x: psum(x[: 1 + axis_index("data")], "data"), mesh=mesh)(x))
    attempt("left out", lambda: spmd(lambda x: psum(x, "data") if axis_index("data") else x, mesh=mesh)(x))
    attempt("run unsendable", lambda: mesh.run(lambda: (i for i in "ab")))
    attempt("unsendable", lambda: spmd(lambda x: {"a": [x, threading.Lock()]}, mesh=mesh)(x))
    attempt("vmapped", lambda: torch.func.vmap(spmd(lambda x: x, mesh=mesh))(x))
    attempt("later", lambda: [later_fails(mesh)(x, torch.tensor(n)) for n in range(4)])
    return found

def later_fails(mesh):
    def body(x, n):
        return x[: int(n) == 2] if axis_index("data") == 1 and int(n) == 2 else x
    return spmd(body, mesh=mesh)
"""

LAUNCHED = (
    COMMON
    + """
import json, os, signal, sys

def tell(what, value):
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "a") as file:
        print(json.dumps([what, value]), file=file)

try:
    Mesh({"data": 3})
except MeshError as error:
    tell("misfit", str(error))
for backend in ("shm", "gloo"):
    mesh = Mesh({"data": -1}, backend=backend, timeout=30)
    tell(f"kind {backend}", [mesh.rank, mesh.size, mesh.is_driver, mesh.backend, mesh.coords()])
    tell(f"results {backend}", results(mesh))
    tell(f"failures {backend}", failures(mesh))
    cut = put(torch.arange(4.0), P("data"), mesh=mesh)
    mesh.close()
    mesh.close()
    closed = []
    for call in (lambda: mesh.run(len, "x"), mesh.comm, cut.full):
        try:
            call()
        except MeshError as error:
            closed.append("this mesh is closed" in str(error))
    tell(f"closed {backend}", closed)
with Mesh() as mesh:
    tell("default", [mesh.backend, float(put(torch.tensor(2.0)))])
torch.set_default_device("meta")
for backend in ("shm", "gloo"):
    with Mesh({"data": -1}, backend=backend, timeout=30) as mesh:
        step = spmd(data_parallel(lambda w, batch: value_and_grad(lambda w, x: (x @ w).mean())(w, batch)))
        value, gradient = step(torch.ones(2, device="cpu"), torch.ones(3, 2, device="cpu"))
        cut = put(torch.ones(4, device="cpu"), P("data"))
        tell(f"device {backend}", [float(value), gradient.tolist(), cut.tolist(), mesh.run(len, "x")])
torch.set_default_device(None)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that of the launcher, which notices the death, too
mesh, made = Mesh({"data": 2}), f"{sys.argv[1]}/made"
if mesh.rank == 1:
    while not os.path.exists(made):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
open(made, "w").close()
began = time.monotonic()
try:
    mesh.run(lambda: barrier())
except PeerLost as error:
    tell("lost", [error.rank, str(error), soon(1.5, began)])
"""
)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict[int, object]]:
    """What the ranks of one launched program told, by subject and rank."""
    folder = tmp_path_factory.mktemp("launched")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _, out, err = run(*launcher, script(folder, LAUNCHED), str(folder), env=FORKED_CHILDREN)
    found: dict[str, dict[int, object]] = {}
    for rank in (0, 1):
        for line in (folder / str(rank)).read_text().splitlines():
            what, value = json.loads(line)
            found.setdefault(what, {})[rank] = value
    assert "lost" in found, out + err
    return found


def space() -> dict:
    names: dict = {"__name__": "__main__"}
    exec(compile(COMMON, "<program>", "exec"), names)
    return names


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_results_are_those_of_a_driver(told, shared_mesh, make_mesh, backend):
    expected = json.loads(json.dumps(space()["results"](make_mesh({"data": 2}, backend=backend))))
    for rank in (0, 1):
        found = told[f"results {backend}"][rank]
        for name, value in expected.items():
            assert found[name] == value, name
    assert told[f"kind {backend}"] == {rank: [rank, 2, False, backend, {"data": rank}] for rank in (0, 1)}


SAME = [
    ("one", "Local", "only here", "on rank 1 of Mesh", 'raise Local("only here")'),
    ("before", "ValueError", "at once", "on rank 0 of Mesh"),
    ("last", "KeyError", "after all collectives", "on rank 0 of Mesh"),
    ("every", "RuntimeError", "rank 0", "on ranks 0-1 of Mesh"),
    ("run", "Local", "only here", "on rank 1"),
    ("run on one", "ValueError", "at once", "on rank 0"),
    ("submit", "ValueError", "at once"),
    ("differs", "SpecError", "should be the same on all ranks along data"),
    ("number differs", "SpecError", "rank 0: 0; rank 1: 1"),
    ("trees", "SpecError", "returned different trees on rank 0 and rank 1"),
    ("spec", "SpecError", "dimension 0 of size 3 is not divisible", "[argument 0 of one]"),
    ("in place", "SpecError", "changed its input argument 0 in place"),
    ("mismatch", "CollectiveMismatch", "ranks disagree on the next collective", "float32[1]", "float32[2]"),
    ("left out", "CollectiveMismatch"),
    ("run unsendable", "MeshError", "because of what the function returned (generator): cannot pickle 'generator'"),
    ("unsendable", "MeshError", "because of result ['a'][1] (lock): cannot pickle '_thread.lock' object"),
    ("vmapped", "SpecError", "within a transform of torch.func", "vmap within"),
    ("later", "SpecError", "should be the same"),
]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_failures_are_raised_on_all_ranks(told, backend):
    found = told[f"failures {backend}"]
    for name, kind, *words in SAME:
        for rank in (0, 1):
            assert found[rank][name][0] == kind, (name, rank, found[rank][name])
            assert all(word in found[rank][name][1] for word in words), (name, found[rank][name])
            assert found[rank][f"{name} soon"], (name, rank)
            assert found[rank][f"{name} goes on"] == [2, 2], (name, rank)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_program_s_default_device_is_for_its_own_tensors(told, backend):
    """What ranks tell each other stays on the host, with `torch.set_default_device("cuda")` as well."""
    assert told[f"device {backend}"] == {rank: [2.0, [1.0, 1.0], [1.0] * 4, [1, 1]] for rank in (0, 1)}


def test_a_mesh_that_does_not_fit_the_job(told):
    for rank in (0, 1):
        text = told["misfit"][rank]
        assert (
            "the mesh does not fit the job (got {'data': 3}, 3 ranks, but this job has 2 ranks (from torchrun's" in text
        )
        assert "start as many ranks as the mesh has, or give one axis the size -1" in text


def test_the_end(told):
    for rank in (0, 1):
        assert told["default"][rank] == ["shm", 2.0]
        assert told["closed shm"][rank] == told["closed gloo"][rank] == [True, True, True]


def test_a_rank_that_dies_is_noticed(told):
    rank, text, soon = told["lost"][0]
    assert rank == 1 and "rank 1" in text and soon and 1 not in told["lost"]


STOPPED = """
import os, signal, torch
from spmd import Mesh, psum, spmd
def train(mesh):
    step = spmd(lambda x: psum(x, "data"), mesh=mesh)
    for number in range(30):
        if number == 20 and mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        step(torch.ones(100_000)).full()
train(Mesh(backend="gloo", timeout=2))
"""


def test_a_program_ends_though_an_operation_is_under_way(tmp_path):
    """torch would wait for it at the end of the interpreter, for a peer that is stopped."""
    told = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"file://{tmp_path}/meet", "OMP_NUM_THREADS": "1"}
    ranks = [
        shared_server().run(
            [sys.executable, script(tmp_path, STOPPED)],
            env={**os.environ, **ENDS_WHOLLY, **told, "SPMD_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert "PeerLost" in ranks[0].communicate(timeout=HANGS)[1]
        assert ranks[0].returncode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


OTHERWISE = """
import os
from spmd import Mesh, MeshError
rank = int(os.environ["SPMD_RANK"])
for options in ({"seed": rank}, {"axes": {"ab"[rank]: 2}}, {"backend": ["gloo", "auto"][rank]}):
    try:
        Mesh(timeout=20, **options)
    except MeshError as error:
        print(error)
print(Mesh(timeout=20, threads=1 + rank).size)
"""


def test_ranks_that_are_given_different_arguments_say_so(tmp_path):
    """With seeds of their own, random numbers that should be the same on all ranks were not."""
    (out, _), (other, _) = two_ranks(tmp_path, OTHERWISE)
    assert out == other
    seed, axes, backend, size = out.splitlines()
    assert seed.startswith("ranks make their mesh with different seed (got rank 0: 0; rank 1: 1): give Mesh")
    assert "different axes (got rank 0: {'a': 2}; rank 1: {'b': 2})" in axes
    assert "different backend (got rank 0: 'gloo'; rank 1: 'auto')" in backend and size == "2"


OF_ANOTHER_VERSION = """
import os
import torch
torch.__version__ = f"2.{os.environ['SPMD_RANK']}.0"
from spmd import Mesh, MeshError
try:
    Mesh(timeout=20)
except MeshError as error:
    print(error)
"""


def test_ranks_of_different_versions_say_so(tmp_path):
    """Their results need not have the same bits, nor their messages the same meaning."""
    (out, _), (other, _) = two_ranks(tmp_path, OF_ANOTHER_VERSION)
    assert out == other
    assert out.startswith("ranks run with different torch (got rank 0: 2.0.0; rank 1: 2.1.0): install the same")


COUNTED = """
import sys
import torch
from spmd import Mesh, data_parallel, spmd, value_and_grad

def loss(w, batch):
    return (batch * w).square().mean()

def note(frame, event, argument):
    looked.add((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))

mesh, followed = Mesh(timeout=20), []
step = spmd(data_parallel(lambda w, batch, number: (value_and_grad(loss)(w, batch), number)), mesh=mesh)
for number in range(20):
    looked = set()
    sys.setprofile(note)
    assert step(torch.ones(3), torch.ones(4, 3), number)[1] == number
    sys.setprofile(None)
    followed.append(("following.py", "settle") in looked)
if mesh.rank == 0:
    print(followed)
"""


def test_a_number_that_counts_calls_does_not_make_each_a_first_call(tmp_path):
    """Values may be flags: the first eight, the 9th and the 17th are taken for such."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _, out, _ = run(*launcher, script(tmp_path, COUNTED), env=FORKED_CHILDREN)
    assert out.splitlines()[-1] == str([number < 9 or number == 16 for number in range(20)])


OTHER_LENGTHS = (
    "import warnings"
    + COUNTED.partition("step = ")[0]
    + """
step = spmd(data_parallel(lambda w, batch: (value_and_grad(loss)(w, batch)[0], w + 1)), mesh=mesh)
for length in (3, 4, 5, 3, 4, 6, 3):
    w, batch = torch.arange(float(length)), torch.ones(4, length)
    looked = set()
    sys.setprofile(note)
    value, more = step(w, batch)
    sys.setprofile(None)
    followed.append(("following.py", "settle") in looked)
    assert torch.allclose(value.full(), loss(w, batch)) and more.shape == (length,) and torch.equal(more.full(), w + 1)
step(torch.ones(2), torch.ones(5, 2))  # another number of samples, which may be split otherwise
try:  # what the body does to other shapes is compared all the same
    spoilt = spmd(lambda x: x + (mesh.rank if len(x) > 2 else 0), mesh=mesh)
    spoilt(torch.ones(2)), spoilt(torch.ones(3))
except Exception as error:
    followed.append(type(error).__name__)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for turn in range(201):
        spmd(lambda x: x + 1, mesh=mesh)(torch.ones(2))
followed += [str(one.message)[:42] for one in found]
if mesh.rank == 0:
    print(followed)
else:
    assert not found
"""
)


def test_other_shapes_do_not_make_a_call_a_first_call(tmp_path):
    """As with a driver: batches of many lengths would cost many times as much. To define it anew for each does."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    _, out, _ = run(*launcher, script(tmp_path, OTHER_LENGTHS), env=FORKED_CHILDREN)
    assert out.splitlines()[-1] == str([True, *[False] * 6, "SpecError", "each of the last 200 calls of <lambda> was"])
