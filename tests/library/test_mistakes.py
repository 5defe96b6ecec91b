"""What a program may give by mistake is refused at the first call, and the message says what to write."""

from __future__ import annotations

import enum
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn

import spmd
from spmd import (
    Loader,
    Mesh,
    P,
    SpmdError,
    Stream,
    axis_index,
    data_parallel,
    ema,
    evaluate,
    functional,
    optimizer,
    put,
    restore,
    save,
    value_and_grad,
)

X = torch.arange(4.0)
ADAMW = optimizer(torch.optim.AdamW, lr=0.1)
HYPER = ADAMW.init({"w": X})["hyper"]


APPLY, PARAMS = functional(nn.Linear(4, 1))


class Axis(str, enum.Enum):
    DATA = "data"


async def waits(x: Any) -> Any:
    return x


def steps(batch: Any) -> Any:
    return batch


def yields(x: Any) -> Any:
    yield x


class Yields:
    def __call__(self, x: Any) -> Any:
        yield x


class Held:
    """An object with a tensor, which is no node of a tree."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Locked:
    """Neither a dataset nor a step that can be sent to a rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index]

    def __call__(self, x: Any) -> Any:
        return x


def rows(batch: Any) -> Any:
    return spmd.Sharded(batch, P("data"))


def nested() -> torch.Tensor:
    with warnings.catch_warnings():  # of a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def in_a_loop(mesh: Mesh) -> list[Any]:
    loader = Loader(X, 2, mesh=mesh)
    return [[*loader] for _ in loader]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh({"data": 2}, timeout=60) as made:
        yield made


# What is written, and words of the message.
MISTAKES: dict[str, tuple[Callable[[Mesh], Any], str]] = {
    "seed": (lambda m: Mesh({"data": 2}, seed="a"), "Mesh got a bad seed .*'a'"),
    "timeout": (lambda m: Mesh({"data": 2}, timeout="5"), "Mesh got a bad timeout .*'5'"),
    "threads": (lambda m: Mesh({"data": 2}, threads=1.5), "Mesh got a bad threads .*1.5"),
    "grace": (lambda m: Mesh({"data": 2}, grace="x"), "Mesh got a bad grace .*'x'"),
    "backend": (lambda m: Mesh({"data": 2}, backend=["shm"]), r"Mesh got an unknown backend .*\['shm'\]"),
    "donate": (lambda m: spmd.spmd(torch.sum, donate=1.5), "spmd got a bad donate for sum .*1.5"),
    "names in a list": (lambda m: spmd.spmd(torch.sum, donate=[["x"]]), r"spmd got a bad donate for sum .*\['x'\]"),
    "axes of a gradient": (lambda m: value_and_grad(torch.sum, axes=1), "value_and_grad got bad axes .*tuple.*got 1"),
    "axes in a list": (lambda m: m.run(lambda: axis_index([["data"]])), r'axis_index got an unknown "axis" .*data'),
    "a step without names": (lambda m: data_parallel(int), "int has arguments whose names Python does not know"),
    "countless shards": (lambda m: data_parallel(steps, shards=1 << 30), "bad shards .*1 to 1048576.*1073741824"),
    "no module": (lambda m: m.reload(3), "mesh.reload reloads modules .*got 3"),
    "spec": (lambda m: put(X, "data", mesh=m), r"not all specs .*write P\('data'\)"),
    "specs": (lambda m: put({"x": X}, {"x": 0}, mesh=m), "not all specs .*got 0"),
    "mesh": (lambda m: put(X, mesh="data"), "this is no mesh .*mesh='data'"),
    "mesh of a step": (lambda m: spmd.spmd(torch.sum, mesh=2)(X), "this is no mesh .*mesh=2"),
    "a number that is cut": (
        lambda m: spmd.spmd(lambda x, y: x, mesh=m, in_specs=(P("data"), P("data")))(X, 0.1),
        r"argument 1 of <lambda> cannot be cut by P\('data'\) .*got 0.1.*write None for numbers",
    ),
    "numbers for a tensor": (
        lambda m: spmd.spmd(lambda x: 0, mesh=m, in_specs=P("data"))([1.0, 2.0]),
        r"argument 0\[0\] of <lambda> cannot be cut by P\('data'\) .*got 1.0.*make a tensor of those",
    ),
    "texts for a tensor": (
        lambda m: spmd.spmd(lambda x: 0, mesh=m, in_specs=P("data"))(["a", "b"]),
        r"argument 0\[0\] of <lambda> cannot be cut by P\('data'\) .*got a str.*write None",
    ),
    "an object that is cut": (
        lambda m: spmd.spmd(lambda x, held: x, mesh=m, in_specs=(P(), P("data")))(X, Held(X)),
        r"argument 1 of <lambda> cannot be cut by P\('data'\) .*got a Held.*write None.*a dataclass",
    ),
    "async step": (lambda m: spmd.spmd(waits, mesh=m), "spmd takes a function .*waits, which is async"),
    "generator": (lambda m: spmd.spmd(yields, mesh=m), "spmd takes a function .*yields, which is a generator"),
    "object": (lambda m: spmd.spmd(Yields(), mesh=m), "spmd takes a function .*Yields, which is a generator"),
    "partial": (lambda m: spmd.spmd(functools.partial(waits), mesh=m), "spmd takes a function .*async"),
    "async loss": (lambda m: value_and_grad(waits), "value_and_grad takes a function .*async"),
    "run nothing": (lambda m: m.run(3), "mesh.run takes a function .*int"),
    "run a step": (
        lambda m: m.run(lambda: spmd.spmd(torch.sum, mesh=m, in_specs=P("data"))(X + axis_index("data"))),
        r"argument 0 of sum should be the same on all ranks.*: give every rank the whole value; call in mesh\.run",
    ),
    "run a step of a DTensor": (
        lambda m: m.run(lambda: spmd.spmd(torch.sum)(put(X, P("data")).to_dtensor())),
        r"argument 0 of sum is no plain tensor \(got DTensor\)",
    ),
    "run async": (lambda m: m.run(waits, 1), "mesh.run takes a function .*async"),
    "submit nothing": (lambda m: m.submit(None, rank=0), "mesh.submit takes a function"),
    "ranks": (lambda m: m.run(int, ranks=1), r"no list of ranks .*write ranks=\[1\]"),
    "rank": (lambda m: m.submit(int, rank="a"), "no such rank .*'a'"),
    "coords": (lambda m: m.coords("a"), "coords got a bad rank .*'a'"),
    "wire_dtype": (lambda m: data_parallel(torch.add, wire_dtype="bf16"), "bad wire_dtype .*'bf16'"),
    "whole wire_dtype": (lambda m: data_parallel(torch.add, wire_dtype=torch.int8), "bad wire_dtype .*torch.int8"),
    "loader's state": (lambda m: Loader(X, 2, mesh=m).load_state_dict({"a": 1}), "Loader got a bad state .*{'a': 1}"),
    "loader's half epoch": (
        lambda m: Loader(X, 2, mesh=m).load_state_dict({"epoch": 0.5, "step": 0}),
        "Loader got a bad state .*0.5",
    ),
    "loader's state as a number": (lambda m: Loader(X, 2, mesh=m).load_state_dict(X), "Loader got a bad state"),
    "prefetch": (lambda m: Loader(X, 2, mesh=m, prefetch=None), "Loader got a bad prefetch .*None"),
    "workers": (lambda m: Loader(X, 2, mesh=m, workers="1"), "Loader got a bad workers .*'1'"),
    "prefetch_mb": (lambda m: Loader(X, 2, mesh=m, prefetch_mb=math.inf), "Loader got a bad prefetch_mb .*inf"),
    "loader's shards": (lambda m: Loader(X, 2, mesh=m, shards=0), "Loader got bad shards .*got 0"),
    "collate_fn": (lambda m: Loader(X, 2, mesh=m, collate_fn=3), "Loader takes a function .*int.*collate_fn="),
    "collated columns": (
        lambda m: Loader({"x": X, "y": X}, 2, mesh=m, collate_fn=list),
        r"dict of columns, and a collate_fn.*StackDataset\(\*\*dataset\)",
    ),
    "a collated tuple": (
        lambda m: Loader((X, np.arange(len(X))), 2, mesh=m, collate_fn=list),
        r"tuple of columns, and a collate_fn.*StackDataset\(\*dataset\)",
    ),
    "no batch": (lambda m: [*Loader(X, 2, mesh=m, collate_fn=print)], "collate_fn made no batch .*return"),
    "order of a stream": (
        lambda m: Loader(Stream([0], iter), 2, mesh=m, order="torch"),
        "Loader got an order for a Stream .*'torch'.*shuffle",
    ),
    "a loop in a loop": (in_a_loop, "another has begun since.*make a Loader for each"),
    "evaluate nothing": (lambda m: evaluate(None, Loader(X, 2, mesh=m)), "evaluate takes a function .*NoneType"),
    "a step without results": (lambda m: evaluate(print, Loader(X, 2, mesh=m)), "step .* returns nothing.*sums"),
    "a step of words": (lambda m: evaluate(str, Loader(X, 2, mesh=m)), "what is no number .*str"),
    "a step of rows": (
        lambda m: evaluate(spmd.spmd(data_parallel(rows), mesh=m), Loader(torch.arange(4), 2, mesh=m)),
        "what each rank has a part of .*sums and counts",
    ),
    "a step of all rows": (
        lambda m: evaluate(lambda batch: batch.full(), Loader(torch.arange(3), 2, mesh=m)),
        r"another shape for each batch .*\[2\], then \[1\].*sums and counts",
    ),
    "mix": (lambda m: Stream.mix([Stream([0], iter), 3]), "mix got streams and weights that don't fit .*3"),
    "mix nothing": (lambda m: Stream.mix(None), "mix got streams and weights that don't fit .*None"),
    "records that are none": (
        lambda m: [*Loader(Stream([7], lambda shard: None), 2, mesh=m)],
        r"open\(shard\) returned nothing to iterate over .*got a NoneType for 7\): yield",
    ),
    "weights": (lambda m: Stream.mix([Stream([0], iter)], ["1"]), "mix got streams and weights .*'1'"),
    "no paths": (lambda m: Stream.jsonl(None), "a Stream got no list of paths .*None"),
    "a column's name": (lambda m: Stream.parquet(["x"], columns="y"), "a Stream got no list of columns .*'y'"),
    "no shards": (lambda m: Stream(4, iter), "Stream got nothing to read .*4 for shards"),
    "keep": (lambda m: save("nowhere", {}, keep="1"), "save got a bad keep .*'1'"),
    "save as torch.save": (lambda m: save({"w": X}, "nowhere"), r"save got a bad path .*a dict.*save\(path, tree\)"),
    "save nowhere": (lambda m: save("", {"w": X}), r"save got an empty path: name a directory"),
    "restore nothing": (lambda m: restore(""), r"restore got an empty path: name a directory"),
    "restore into": (lambda m: restore({"w": X}), r"restore got a bad path .*a dict.*restore\(path, like=tree\)"),
    "the mesh's axis": (
        lambda m: spmd.spmd(data_parallel(lambda batch: 0, axis="rows"), mesh=m)(X),
        r"over an axis that the mesh does not have .*'data'.*got 'rows'.*@data_parallel\(axis='data'\)",
    ),
    "lists of other lengths": (
        lambda m: [*Loader([{"ids": [1] * n} for n in (1, 2)], 2, mesh=m)],
        "dataset returned different trees .*have collate_fn pad",
    ),
    "an iterator as a dataset": (lambda m: Loader(iter([X]), 2, mesh=m), r"can't read .*make a list of it.*Stream\("),
    "several datasets": (
        lambda m: Loader({"train": Locked(), "test": Locked()}, 2, mesh=m),
        r"can't read .*of several datasets give it one, dataset\['train'\]",
    ),
    "a dataset without a length": (
        lambda m: Loader(scipy.sparse.eye_array(4, format="csr"), 2, mesh=m),
        r"without a length .*csr_array: .*ambiguous.*__len__ and __getitem__",
    ),
    "a dataset that can't be sent": (
        lambda m: [*Loader(Locked(), 2, mesh=m)],
        r"the Loader's dataset cannot be sent .*which is its data\.lock .*in a method",
    ),
    "an object that can't be sent": (
        lambda m: spmd.spmd(Locked(), mesh=m)(X),
        r"an object of Locked cannot be sent .*because its lock \(lock\).*in a method",
    ),
    "mesh of restore": (lambda m: restore("nowhere", mesh=2), "this is no mesh .*mesh=2"),
    "check nothing": (lambda m: spmd.check(None, {"data": 2}), "check takes a function .*NoneType"),
    "state_dict": (lambda m: functional(nn.Linear(1, 1))[0].params(None), "apply.params got no state_dict .*NoneType"),
    "axis of comm": (lambda m: m.run(lambda: m.comm(3)), 'comm got a bad "axis" .*got 3'),
    "half a rank": (lambda m: m.coords(1.0), "coords got a bad rank .*1.0"),
    "too large a mesh": (lambda m: Mesh({"data": 10**9}), "so many ranks .*at most 65536, got 1000000000"),
    "rank of a job": (lambda m: spmd.initialize("0", 2), r"initialize got a bad rank .*'0'\): write int\('0'\)"),
    "local size": (lambda m: spmd.initialize(0, 2, local_size=2.0), "initialize got a bad local_size .*2.0"),
    "backend's name": (lambda m: spmd.register_backend("auto", print), "register_backend got a bad name .*'auto'"),
    "backend's factory": (lambda m: spmd.register_backend("own", None), "register_backend takes a function .*NoneType"),
    "a Ref's truth": (lambda m: bool(m.remote(list).copy()), r"a Ref was asked whether it is true.*ref.get\(\)"),
    "no values": (lambda m: put(X.to("meta"), mesh=m), "put has no values .*meta device.*give it values"),
    "an argument without values": (
        lambda m: spmd.spmd(torch.sum, mesh=m)(X.to("meta")),
        "argument 0 of sum has no values .*meta device",
    ),
    "a result without values": (
        lambda m: spmd.spmd(lambda x: {"y": x.to("meta")}, mesh=m)(X),
        r"result \['y'\] of <lambda> has no values .*meta device",
    ),
    "an Array without values": (lambda m: put(X, mesh=m).to("meta"), "result .* of to has no values .*meta device"),
    "a sum of no values": (
        lambda m: m.run(lambda: spmd.psum(X.to("meta"), "data")),
        'psum got a bad "x" .*got a tensor on torch\'s meta device',
    ),
    "a sparse sum": (
        lambda m: m.run(lambda: spmd.psum(X.to_sparse(), "data")),
        'psum got a bad "x" .*layout torch.sparse_coo',
    ),
    "sparse rows": (lambda m: put(X.to_sparse(), P("data"), mesh=m), r"put can't be cut .*sparse_coo.*P\(\), or"),
    "sparse parts": (
        lambda m: spmd.spmd(lambda x: x.to_sparse(), mesh=m, in_specs=P("data"), out_specs=P("data"))(X),
        "result .* can't be cut .*sparse_coo",
    ),
    "sparse data": (lambda m: Loader(X.to_sparse(), 2, mesh=m), "a Loader's dataset can't be cut .*sparse_coo"),
    "a batch of numbers": (
        lambda m: spmd.spmd(data_parallel(lambda batch: 0), mesh=m)({"x": [[0.0] * 4] * 50}),
        r"no tensor to split .*got {.x.: .{280,300}\.\.\. \(200 leaves\)\)",
    ),
    "nested": (lambda m: put(nested(), mesh=m), "put can't be sent .*a nested tensor.*layout=torch.jagged"),
    "nested argument": (
        lambda m: spmd.spmd(lambda x: 0, mesh=m)({"x": nested()}),
        r"argument 0\['x'\] of <lambda> can't be sent .*a nested tensor.*layout=torch.jagged",
    ),
    "nested batch": (
        lambda m: spmd.spmd(data_parallel(lambda batch: 0), mesh=m)(nested()),
        r"argument 0 of <lambda> can't be sent .*a nested tensor.*layout=torch.jagged",
    ),
    "sparse after dense": (
        lambda m: [*map(spmd.spmd(rows, mesh=m, in_specs=P("data"), out_specs=P("data")), (X, X.to_sparse()))],
        r"argument 0 of rows can't be cut .*sparse_coo",
    ),
    "long doubles": (
        lambda m: put(np.ones(2, np.longdouble), mesh=m),
        r"torch has no dtype .*float128.*array.astype\(float\)",
    ),
    "masked": (
        lambda m: spmd.spmd(torch.sum, mesh=m)(np.ma.array([1.0, 2.0], mask=[0, 1])),
        r"a masked array would lose its mask.*array.filled\(value\)",
    ),
    "words beside tensors": (
        lambda m: spmd.spmd(data_parallel(lambda batch: 0), mesh=m)({"x": X, "y": np.array([*"abcd"])}),
        r"batch\['y'\] of <lambda> is an array with an entry for each of 4 samples.*got an array of str",
    ),
    "a range beside tensors": (
        lambda m: spmd.spmd(data_parallel(lambda batch: 0), mesh=m)({"x": X, "y": range(4)}),
        r"batch\['y'\] of <lambda> is a range with an entry for each of 4 samples.*got a range",
    ),
    "a gradient by a module": (
        lambda m: spmd.spmd(value_and_grad(lambda net, x: net(x).mean()), mesh=m)(nn.Linear(4, 1), X),
        r"differentiated by an argument without tensors .*got Linear\): apply, params = functional\(model\)",
    ),
    "a gradient by a number": (
        lambda m: value_and_grad(lambda w: torch.tensor(w))(2.0),
        r"differentiated by an argument without tensors .*got float.*torch.tensor\(2.0\)",
    ),
    "argnums": (lambda m: value_and_grad(torch.sum, argnums=None)(X), "bad argnums for sum .*got None"),
    "no dim": (lambda m: m.run(lambda: spmd.all_gather(X, "data", dim=None)), 'all_gather got a bad "dim" .*got None'),
    "source": (lambda m: m.run(lambda: spmd.pbroadcast(X, "data", "0")), "pbroadcast got a bad \"source\" .*got '0'"),
    "size": (lambda m: m.resize(3), "resize got bad axes .*got 3"),
    "axis": (
        lambda m: data_parallel(torch.add, axis=("data", 1)),
        r"got a bad axis .*or a tuple of them.*\('data', 1\)",
    ),
    "endless bucket": (lambda m: data_parallel(torch.add, bucket_mb=math.inf), "bad bucket_mb .*inf"),
    "bucket_mb": (lambda m: data_parallel(torch.add, bucket_mb="1"), "bad bucket_mb .*'1'"),
    "a state of nothing": (
        lambda m: ADAMW.step({"w": X}, {"w": X}, {**ADAMW.init({"w": X}), "state": None}),
        "opt_state has an unexpected form",
    ),
    "another average": (
        lambda m: ema(ADAMW).step({"w": X}, {"w": X}, {**ADAMW.init({"w": X}), "ema": [X]}),
        r"opt_state\['ema'\] is no tree like the parameters",
    ),
    "no parameter": (lambda m: APPLY({**PARAMS, "bias": None}, X), "a parameter or a buffer that is no tensor .*None"),
    "no weights": (
        lambda m: APPLY.to_module({**PARAMS, "bias": 3}),
        "a buffer that is no tensor .*got 3",
    ),
    "optimizer": (lambda m: ema("adam"), r"ema takes what optimizer\(\) gave .*str"),
    "a state for parameters": (lambda m: ADAMW.init(ADAMW.init({"w": X})), "takes the tree of .*an optimizer's state"),
    "arguments of a step": (
        lambda m: ADAMW.step(ADAMW.init({"w": X}), {"w": X}, {"w": X}),
        "takes .*optimizer's state",
    ),
    "tiled": (
        lambda m: m.run(lambda: spmd.all_gather(X, "data", tiled="no")),
        r"all_gather got a bad tiled \(expected True or False, got 'no'",
    ),
    "tiled parts": (lambda m: m.run(lambda: spmd.psum_scatter(X, "data", tiled="no")), "psum_scatter got a bad tiled"),
    "tiled exchange": (lambda m: m.run(lambda: spmd.all_to_all(X, "data", 0, 1, tiled="")), "all_to_all got a bad til"),
    "has_aux": (lambda m: spmd.grad(torch.sum, has_aux="False"), "grad got a bad has_aux .*'False'"),
    "has_aux with a value": (lambda m: spmd.value_and_grad(torch.sum, has_aux=2), "value_and_grad got a bad has_aux"),
    "sync": (lambda m: spmd.functional_with_buffers(nn.Linear(1, 1), sync="no"), "functional_with_.* got a bad sync"),
    "background": (lambda m: spmd.save("nowhere", X, background="no"), "save got a bad background .*'no'"),
    "restore of an object": (
        lambda m: m.remote(list, restore="a.pt"),
        r"mesh.remote got a bad restore .*'a.pt'.*write restore=True.*functools.partial\(cls, restore=",
    ),
    "wait": (lambda m: m.resize({"data": 2}, wait="no"), "mesh.resize got a bad wait .*'no'"),
    "a Ref and a value": (lambda m: m.remote(list).copy() == [], r"a Ref was compared with a value.*ref\.get\(\)"),
    "a value and a Ref": (lambda m: [3].index(m.remote(list).copy()), "a Ref was compared with a value.*and a int"),
    "a callback": (lambda m: m.remote(list).copy().add_done_callback(3), "add_done_callback takes a function .*int"),
    "a rate on the mesh": (
        lambda m: optimizer(torch.optim.SGD, lr=put(torch.tensor(0.1), mesh=m)),
        r"SGD got a lr that is on a mesh: pass float\(lr\)",
    ),
    "torch's groups": (
        lambda m: optimizer(torch.optim.SGD, lr=0.1, groups=[{"params": nn.Linear(4, 1).parameters(), "lr": 0.2}]),
        r'"params" of groups\[0\] does not name parameters .*got a generator.*lambda name, p: name',
    ),
    "a list of parameters": (
        lambda m: optimizer(torch.optim.SGD, lr=0.1, groups=[{"params": [*nn.Linear(4, 1).parameters()]}]),
        r'"params" of groups\[0\] does not name parameters .*got a list',
    ),
    "a module as a group": (
        lambda m: optimizer(torch.optim.SGD, lr=0.1, groups=[{"params": nn.Linear(4, 1)}]),
        r'"params" of groups\[0\] does not name parameters .*got a Linear',
    ),
    "loss and gradients": (
        lambda m: ADAMW.step(PARAMS, (torch.tensor(1.0), PARAMS), ADAMW.init(PARAMS)),
        r"another structure than params.*got a tuple of 3 leaves.*the grads of loss, grads = value_and_grad",
    ),
    "a path for shards": (
        lambda m: Stream("a.txt", open),
        r"Stream got no list of shards .*Stream\(\['a.txt'\], open\)",
    ),
    "a path for a dataset": (lambda m: Loader("a.pt", 2, mesh=m), r"can't read .*got str.*Stream\.jsonl\(\[path\]\)"),
    "mesh of a loader": (lambda m: Loader(X, 2, mesh={"data": 2}), "this is no mesh .*mesh={'data': 2}"),
    "a pad": (lambda m: Stream([0], iter).pack(2, pad="x"), "pack got a bad pad .*'x'"),
    "packed records": (
        lambda m: [*Loader(Stream([0], lambda shard: [{"x": 1}]).pack(2), 1, mesh=m)],
        "pack got a sample that is not a sequence .*got a dict",
    ),
    "batch_size": (lambda m: Loader(X, 0, mesh=m), 'Loader got an unexpected value for argument "batch_size".*got 0'),
    "a flag of a loader": (lambda m: Loader(X, 2, mesh=m, shuffle="no"), "Loader got a bad shuffle .*'no'"),
    "a rate for each parameter": (
        lambda m: ADAMW.step({"w": X}, {"w": X}, {"state": {}, "hyper": {**HYPER, "lr": torch.ones(2)}}),
        r"opt_state\['hyper'\]\['lr'\] has an unexpected value .*like 0.1",
    ),
    "another module's state_dict": (
        lambda m: APPLY.params(nn.Linear(3, 1).state_dict()),
        r"another shape for 'weight' .*expected \[1, 4\], got \[1, 3\]",
    ),
    "the state_dict of DDP": (
        lambda m: APPLY.params({f"module.{name}": value for name, value in PARAMS.items()}),
        r"got no 'weight' .*'module.weight'.*: write apply.params\({name.removeprefix\('module.'\): value for",
    ),
    "save a model": (
        lambda m: save("nowhere", {"m": nn.Linear(1, 1)}),
        r"\['m'\] .*got Linear\): save what its state_dict",
    ),
    "two averages": (lambda m: ema(ema(ADAMW)).init({"w": X}), "keeps an average already: keep one"),
    "a misspelt option": (lambda m: optimizer(torch.optim.SGD, lr=0.1, momemtum=0.9), "'momemtum'.*: write momentum="),
    "a rate by its name": (lambda m: optimizer(torch.optim.SGD, learning_rate=0.1), "'learning_rate'.*: it is lr="),
    "a norm": (lambda m: optimizer(torch.optim.SGD, lr=0.1, max_norm=1.0), "'max_norm'.*: it is clip="),
    "parameters of an optimizer": (
        lambda m: optimizer(torch.optim.SGD, params=PARAMS, lr=0.1),
        r": opt.init\(params\) t",
    ),
    "a model's input alone": (lambda m: APPLY(X), "got Tensor.*pass what functional returned as params, before the"),
    "loader": (lambda m: evaluate(torch.sum, [X]), "evaluate takes a Loader .*list"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_words(mesh: Mesh, name: str) -> None:
    written, words = MISTAKES[name]
    with pytest.raises(SpmdError, match=words):
        written(mesh)


NAMES: dict[str, tuple[Callable[[Mesh], Any], str]] = {
    "num_workers": (lambda m: Loader(X, 2, num_workers=2), r"Loader has no argument num_workers \(got 2\): .*workers="),
    "pin_memory": (lambda m: Loader(X, 2, pin_memory=True), "leave it out"),
    "batch_sampler": (lambda m: Loader(X, batch_sampler=[[0]]), r"Subset\(dataset, ids\)"),
    "devices": (lambda m: Mesh(devices=[0]), r'Mesh has no argument devices .*Mesh\({"data": 4}\)'),
    "mesh_dim_names": (lambda m: Mesh({}, mesh_dim_names=("data",)), "a dict of names and sizes"),
    "donate_argnums": (lambda m: spmd.spmd(torch.sum, donate_argnums=0), r"donate=\(\"params\""),
    "axis_name": (lambda m: data_parallel(axis_name="i"), "data_parallel has no argument axis_name .*it is axis="),
    "device_ids": (lambda m: data_parallel(torch.sum, device_ids=[0]), "leave it out"),
    "axis_name of psum": (lambda m: m.run(lambda: spmd.psum(X, axis_name="data")), "psum has no argument axis_name"),
    "axis of all_gather": (lambda m: m.run(lambda: spmd.all_gather(X, "data", axis=0)), r"axis twice .*dim="),
    "argnames": (lambda m: value_and_grad(torch.sum, argnames="w"), "argnums="),
    "sharding": (lambda m: put(X, sharding=P("data")), r"put\(tree, P\(\"data\"\)\)"),
    "map_location": (lambda m: restore("nowhere", map_location="cpu"), "it is mesh="),
    "step": (lambda m: restore("nowhere", step=3), "path/step-00000003"),
    "overwrite": (lambda m: save("nowhere", X, overwrite=True), "keep= says how many stay"),
    "world_size": (lambda m: spmd.initialize(rank=0, world_size=2), "it is size="),
    "process_id": (lambda m: spmd.initialize("a:1", 2, process_id=0), "it is rank="),
    "num_replicas": (lambda m: spmd.Sampler(8, 2, num_replicas=2), r"sampler.shard\(epoch, step, rank, size\)"),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_under_the_name_of_another_library(mesh: Mesh, name: str) -> None:
    written, words = NAMES[name]
    with pytest.raises(SpmdError, match=words) as caught:
        written(mesh)
    assert isinstance(caught.value, TypeError)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobody'"):
        Loader(X, 2, nobody=1)


ATTRIBUTES: dict[str, tuple[Callable[[], Any], str]] = {
    "zero_grad": (lambda: ADAMW.zero_grad(), "gradients are values"),
    "lr": (lambda: ADAMW.lr, r'opt_state\["hyper"\]\["lr"\]'),
    "set_epoch": (lambda: Loader(X, 2).set_epoch(1), "each loop over it is the next epoch"),
    "set_epoch of a sampler": (lambda: Loader(X, 2).sampler.set_epoch(1), r"sampler\.batch\(epoch, step\)"),
    "train": (lambda: functional(nn.Linear(1, 1))[0].train(), r"functional\(model\.eval\(\)\)"),
    "parameters": (lambda: functional(nn.Linear(1, 1))[0].parameters(), "what functional returned beside it"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_torchs_says_what_to_write_instead(name: str) -> None:
    read, words = ATTRIBUTES[name]
    with pytest.raises(AttributeError, match=f"has no attribute '{name.split()[0]}': .*{words}"):
        read()


def test_an_attribute_of_arrays_of_others(mesh: Mesh) -> None:
    x = put(X, mesh=mesh)
    for name, words in {"sharding": r"\.spec", "to_local": r"\.local", "full_tensor": r"\.full\(\)"}.items():
        with pytest.raises(AttributeError, match=f"Array has no attribute '{name}': .*{words}"):
            getattr(x, name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape", r"mesh\.axes"),
        ("axis_names", r"mesh\.axes"),
        ("devices", r"mesh\.coords"),
        ("world_size", r"mesh\.size"),
        ("get_rank", r"mesh\.rank"),
        ("all_reduce", r"mesh\.comm\(\)"),
    ],
)
def test_an_attribute_of_meshes_of_others(mesh: Mesh, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=f"spmd's Mesh has no attribute '{name}': .*{words}"):
        getattr(mesh, name)


def test_an_argument_of_a_class_that_has_the_name_of_ours(mesh: Mesh) -> None:
    """As the refusal says."""

    class Kept:
        def __init__(self, restore: str) -> None:
            self.restore = restore

        def get(self) -> str:
            return self.restore

    assert mesh.remote(functools.partial(Kept, restore="a.pt")).get().get() == "a.pt"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pmap", r"it is spmd\(f, mesh=mesh, in_specs=P"),
        ("NamedSharding", "a mesh and a P"),
        ("DistributedDataParallel", "docs/from_ddp.md"),
        ("DataLoader", r"Loader\(dataset, batch_size, mesh=mesh\)"),
        ("all_reduce", "psum, pmean, pmax and pmin"),
    ],
)
def test_a_name_of_torchs_or_jaxs_says_what_it_is_here(name: str, words: str) -> None:
    for error, source in ((AttributeError, f"spmd.{name}"), (ImportError, f"from spmd import Mesh, {name}")):
        with pytest.raises(error, match=f"'spmd' has no attribute '{name}': .*{words}"):
            exec(source)
    assert not hasattr(spmd, name) and name not in dir(spmd)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_ours'"):
        exec("from spmd import nothing_of_ours")


def test_a_value_of_a_mesh_that_is_closed(mesh: Mesh) -> None:
    with Mesh({"data": 2}) as other:
        value = put(X, mesh=other)
    with pytest.raises(SpmdError, match=r"sum is on another mesh, which is closed.*: fetch .*\.full\(\) before"):
        spmd.spmd(torch.sum, mesh=mesh)(value)
    with pytest.raises(SpmdError, match=r"different meshes, of which one is closed: fetch .*\.full\(\) before"):
        put(X, mesh=mesh) + value
    for look in (other.status, other.stacks):
        with pytest.raises(SpmdError, match="this mesh is closed"):
            look()


def test_an_attribute_of_a_remote_object_is_set_by_a_method(mesh: Mesh) -> None:
    words = mesh.remote(list)
    with pytest.raises(AttributeError, match="'seen' would be set on the handle, and not on the list on rank 0"):
        words.seen = 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: comm.empty("a"), "empty got a bad shape .*'a'"),
        (lambda comm: comm.empty((2, -1)), r"empty got a bad shape .*\(2, -1\)"),
        (lambda comm: comm.empty(2, dtype="float32"), "empty got a bad dtype .*'float32'"),
        (lambda comm: comm.all_reduce(3), 'all_reduce got a bad "tensor" .*got int'),
        (lambda comm: comm.all_reduced(3), 'all_reduced got a bad "tensor" .*got int'),
        (lambda comm: comm.all_reduce(X.to_sparse()), 'all_reduce got a bad "tensor" .*layout torch.sparse_coo'),
        (lambda comm: comm.broadcast("x"), 'broadcast got a bad "tensor" .*got str'),
        (lambda comm: comm.broadcast(X, "a"), "broadcast got a bad \"src\" .*'a'"),
        (lambda comm: comm.send(X, 1 - comm.rank, tag="a"), "isend got a bad \"tag\" .*'a'"),
        (lambda comm: comm.recv(None, 0), 'irecv got a bad "tensor" .*NoneType'),
        (lambda comm: comm.scatter(3), 'scatter got a bad "tensor"'),
        (lambda comm: comm.gather(3), 'gather got a bad "tensor"'),
        (lambda comm: comm.reduce(3), 'reduce got a bad "tensor"'),
        (lambda comm: comm.all_gather([1, 2], X), r'all_gather got a bad "tensor_list\[0\]" .*got int'),
        (lambda comm: comm.reduce_scatter(1, []), 'reduce_scatter got a bad "output"'),
    ],
)
def test_messages_of_what_is_no_tensor(mesh: Mesh, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(SpmdError, match=words):
        mesh.run(lambda: call(mesh.comm()))


def test_what_is_no_mistake(mesh: Mesh) -> None:
    assert mesh.run(int, ranks=np.arange(2)) == [0, 0]
    assert mesh.submit(int, rank=np.int64(1)).result() == 0
    assert torch.equal(spmd.spmd(lambda x: x + 1, mesh=mesh, donate=None)(X).full(), X + 1)
    for names in ({"x": X}.keys(), iter(["x"])):
        assert torch.equal(spmd.spmd(lambda x: x + 1, mesh=mesh, donate=names)(X).full(), X + 1)
    assert put({"x": X, "y": X}, {"x": P("data"), "y": None}, mesh=mesh)["x"].spec == P("data")
    assert put({"x": X, "bias": None}, P("data"), mesh=mesh)["bias"] is None
    assert [*P("data", None, ("a", "b"))] == ["data", None, ("a", "b")] and P("data")[0] == "data" and bool(P())
    assert mesh.coords(np.int64(1)) == {"data": 1}
    scaled = spmd.spmd(lambda x, by: by["y"] * x["x"] * x["y"], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert torch.equal(scaled({"x": X, "y": 2}, {"y": 3}).full(), 6 * X)
    assert spmd.Sampler(8, 8, shuffle=False).shard(0, 0, 1, 10**30, shards=2).tolist() == [1, 3, 5, 7]
    model = nn.Linear(4, 1)
    assert spmd.spmd(model, mesh=mesh)(X).full().shape == (1,)
    assert ema(optimizer(torch.optim.SGD, lr=1.0)).init({"w": X})["ema"]["w"].equal(X)
    one = np.int64(1)
    with Mesh({"data": one}, threads=one, seed=np.int64(3), timeout=np.float32(60), grace=math.inf) as small:
        assert evaluate(spmd.spmd(torch.sum, mesh=small), Loader(X, batch_size=2, mesh=small)) == 6
        small.resize({"data": np.int64(2)})
        assert small.axes == {"data": 2} and small.run(int) == [0, 0]


def test_names_of_axes_may_be_members_of_an_enum() -> None:
    """Whose class is the program's, so that a process that begins, or another one, could not read it."""
    with Mesh({Axis.DATA: 2}, timeout=60) as made:
        x = put(X, P(Axis.DATA), mesh=made)
        assert x.spec == P("data") and type(x.spec[0]) is str and [*map(type, made.axes)] == [str]
        total = spmd.spmd(lambda x: spmd.psum(x.sum(), Axis.DATA), mesh=made, in_specs=P((Axis.DATA,)))
        step = spmd.spmd(data_parallel(lambda batch: spmd.pmean(batch.mean(), Axis.DATA), axis=Axis.DATA), mesh=made)
        assert total(x).item() == 6 and step(X[:3]).item() == 1
        assert made.run(lambda: made.comm(Axis.DATA).size) == [2, 2]
        made.resize({Axis.DATA: 1})
        assert total(x).item() == 6
