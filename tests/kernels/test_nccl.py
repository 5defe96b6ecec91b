"""The NCCL communicator without a GPU: the real library as far as it goes, and the logic against a fake."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import mmap
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import nccl_fake
import operations_table
import pytest
import torch
from nccl_fake import VALUES, Alone, log_of, until
from operations_table import RANKS, expected, run_all
from oracle import DTYPES, FLOATS, OPS, meaningful, same, value
from streams_fake import CURRENT, SIDE

from spmd import CollectiveMismatch, Mesh, MeshError, PeerLost, SpecError, all_gather, psum
from spmd import spmd as on_mesh
from spmd.kernels import registry
from spmd.kernels.cuda import nccl_channel, nccl_connection, nccl_library, nccl_watchdog
from spmd.kernels.cuda.nccl import NcclCommunicator
from spmd.kernels.cuda.nccl_arithmetic import NAMES, way
from spmd.kernels.cuda.nccl_connection import Connection
from spmd.kernels.reduction import Pairwise

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(operations_table)

# -- the real library --------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> nccl_library.Library:
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install spmd[cuda12]")
    try:
        return nccl_library.load()
    except MeshError as error:
        pytest.skip(str(error))


def test_real_library(library: nccl_library.Library) -> None:
    """Unique ids, the version, and the numbers that the fake takes for NCCL's own."""
    first, second = library.nccl.get_unique_id(), library.nccl.get_unique_id()
    assert len(first) == 128 and first != second
    assert library.version == library.nccl.get_version() >= 21801
    assert {name: getattr(library.nccl, name) for name in VALUES} == VALUES
    assert nccl_library.version_text(library.version) in library.describe()


def test_one_libnccl_is_mapped(library: nccl_library.Library) -> None:
    assert nccl_library.mapped_files() in ([library.path], [])
    assert os.path.exists(library.path)


PLUGINS = """\
7f00-7f01 r-xp 00000000 08:01 12  /opt/nccl/lib/libnccl.so.2.32.3
7f01-7f02 rw-p 00001000 08:01 12  /opt/nccl/lib/libnccl.so.2.32.3
7f02-7f03 r-xp 00000000 08:01 13  /opt/amazon/lib/libnccl-net.so
7f03-7f04 r-xp 00000000 08:01 14  /opt/amazon/lib/libnccl-tuner.so
7f04-7f05 r-xp 00000000 08:01 15  /opt/hpcx/lib/libnccl-profiler.so.1
7f05-7f06 r-xp 00000000 08:01 16  /opt/aws-ofi-nccl/lib/libnccl-net-ofi.so
"""


def test_plugins_are_no_second_libnccl() -> None:
    """They are mapped beside it in the images of clouds and of HPC-X."""
    assert nccl_library.mapped_files(PLUGINS) == ["/opt/nccl/lib/libnccl.so.2.32.3"]


def test_a_mapped_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff"
    with open(name, "w+b") as file:
        file.write(b"1")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert not any(path.startswith(str(tmp_path)) for path in nccl_library.mapped_files())


def test_real_communicator_has_what_is_called(library: nccl_library.Library) -> None:
    """The fake's methods are CuPy's."""
    for name in vars(nccl_fake.Raw):
        if not name.startswith("_") and name not in ("fits", "here", "meet"):
            assert hasattr(library.nccl.NcclCommunicator, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nccl_says_so(library: nccl_library.Library) -> None:
    from spmd.kernels.cuda.nccl_connection import joined

    with pytest.raises(MeshError, match=r"NCCL could not connect.*CuPy .* NCCL 2\..*NCCL_DEBUG"):
        joined(library, 1, library.nccl.get_unique_id(), 0, lambda: None)


# -- what is wrong with a machine --------------------------------------------------------------------------------------


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MeshError, match=r"needs CuPy.*pip install spmd\[cuda1[23]\]"):
        nccl_library.load.__wrapped__()


class FakeCupy:
    """`cupy`, and `cupy.cuda`."""

    __version__ = "14.0.0"

    def __init__(self, nccl: Any, cuda: int = 12090):
        self.nccl, self.cuda, self.runtime = nccl, self, self
        self.runtimeGetVersion = lambda: cuda


class FakeNccl:
    available = True

    def __init__(self, version: int):
        self.get_version = lambda: version


def put_in_place(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, cupy)
    monkeypatch.setattr(nccl_library, "mapped_files", lambda: ["/a/libnccl.so.2"])


@pytest.mark.parametrize(
    ("torchs", "cupys", "wheel"),
    [("13.0", 12090, "cupy-cuda13x"), ("12.8", 13000, "cupy-cuda12x"), ("12.8", 12090, ""), (None, 12090, "")],
)
def test_cupy_of_another_cuda(monkeypatch: pytest.MonkeyPatch, torchs: str | None, cupys: int, wheel: str) -> None:
    nccl = FakeNccl(23203)
    put_in_place(monkeypatch, FakeCupy(nccl, cupys))
    monkeypatch.setattr(torch.version, "cuda", torchs)
    if not wheel:
        assert nccl_library.load.__wrapped__().nccl is nccl
        return
    nccl.get_version = lambda: pytest.fail("NCCL was called")
    with pytest.raises(MeshError, match=rf"different CUDA.*for CUDA {cupys // 1000}, torch.*then pip install {wheel}"):
        nccl_library.load.__wrapped__()


def test_both_wheels_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, FakeCupy(FakeNccl(23203)))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.32.3")
    text = nccl_library.load.__wrapped__().describe()
    assert "nvidia-nccl-cu12 2.32.3 and nvidia-nccl-cu13 2.32.3 have overwritten each other" in text

    def only_one(name: str) -> str:
        if name.endswith("13"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.32.3"

    monkeypatch.setattr(importlib.metadata, "version", only_one)
    assert nccl_library.load.__wrapped__().describe() == "CuPy 14.0.0, NCCL 2.32.3 (/a/libnccl.so.2)"


@pytest.mark.parametrize(
    ("available", "version", "paths", "text"),
    [
        (False, 0, [], "CuPy finds no NCCL"),
        (True, 21704, ["/a/libnccl.so.2"], r"too old.*expected 2\.18\.1.*NCCL 2\.17\.4 \(/a/libnccl"),
        (True, 23000, ["/a/libnccl.so.2", "/b/libnccl.so.2"], "several libraries.*/a/libnccl.so.2, /b/libnccl"),
    ],
)
def test_wrong_libraries(
    monkeypatch: pytest.MonkeyPatch, available: bool, version: int, paths: list[str], text: str
) -> None:
    nccl = FakeNccl(version)
    nccl.available = available
    put_in_place(monkeypatch, FakeCupy(nccl))
    monkeypatch.setattr(nccl_library, "mapped_files", lambda: paths)
    with pytest.raises(MeshError, match=text):
        nccl_library.load.__wrapped__()


def test_nonblocking_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "0")
    with pytest.raises(MeshError, match=r"NCCL_COMM_BLOCKING=0.*unset it"):
        nccl_library.load.__wrapped__()


@pytest.mark.parametrize(("cuda", "text"), [(None, "build of torch for CUDA"), ("12.8", "finds no GPU.*nvidia-smi")])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, cuda: str | None, text: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeshError, match=text):
        nccl_library.check_driver()


def test_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, extra in ((None, "cuda12"), ("12.8", "cuda12"), ("13.0", "cuda13")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert nccl_library.extra() == extra


# -- values, against what one process computes -------------------------------------------------------------------------


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setitem(registry._FACTORIES, "nccl-fake", nccl_fake.factory)
    return make_mesh({"data": RANKS}, backend="nccl-fake")


def test_every_operation_and_dtype(mesh: Mesh) -> None:
    wrong = []
    for rank, cells in enumerate(mesh.run(run_all, mesh)):
        for (row, dtype), found in cells.items():
            if found != expected(row, dtype):
                wrong.append(f"rank {rank}: {row} of {dtype} is {found}")
    assert not wrong, "\n".join(wrong)


def test_what_shapes_there_are(mesh: Mesh) -> None:
    """Strided, empty, 0-dim, and pieces whose shapes differ between ranks."""

    def body() -> bool:
        comm = mesh.comm()
        rank, size = comm.rank, comm.size
        strided = torch.arange(12.0).reshape(3, 4).t()
        comm.all_reduce(strided)
        assert torch.equal(strided, size * torch.arange(12.0).reshape(3, 4).t())
        comm.broadcast(strided.copy_(torch.full((4, 3), float(rank))), src=1)
        assert strided.eq(1).all()
        for shape in ((), (0,), (2, 0)):
            mine = torch.full(shape, float(rank))
            comm.all_reduce(mine)
            comm.broadcast(mine)
            comm.all_gather([torch.empty(shape) for _ in range(size)], mine)
            comm.barrier()
        pieces = [torch.empty(r + 1, 2) for r in range(size)]
        comm.all_gather(pieces, torch.full((rank + 1, 2), float(rank)))
        assert all(piece.eq(r).all() for r, piece in enumerate(pieces))
        mine = torch.empty(rank + 2)
        comm.reduce_scatter(mine, [torch.full((r + 2,), float(rank + r)) for r in range(size)])
        assert mine.eq(sum(r + rank for r in range(size))).all()
        together = torch.empty(size, 5)
        comm.all_gather(list(together.unbind(0)), torch.full((5,), float(rank)))
        assert all(row.eq(r).all() for r, row in enumerate(together))
        return bool(comm.all_gathered(3, torch.float32, lambda out: out.fill_(rank)).sum() == 9)

    assert mesh.run(body) == [True] * RANKS


def test_nan_is_the_maximum_and_the_minimum(mesh: Mesh) -> None:
    """NCCL's own pass over NaN; and what is no NaN is in order, infinities and both zeros included."""
    values = [
        [float("nan"), 1.0, -1.0, float("inf"), 0.0, -2.0, 6e-8],
        [1.0, 2.0, -2.5, 3.0, -0.0, float("-inf"), 0.0],
        [-1.0, float("nan"), -3.0, -7.0, 0.0, 2.0, -6e-8],
    ]

    def body(op: str) -> list[list[torch.Tensor]]:
        comm = mesh.comm()
        found = []
        for dtype in FLOATS:
            mine = torch.tensor(values[comm.rank], dtype=dtype)
            everywhere, at_one, piece = mine.clone(), mine.clone(), torch.empty(7, dtype=dtype)
            comm.all_reduce(everywhere, op)
            comm.reduce(at_one, 1, op)
            comm.reduce_scatter(piece, [mine] * comm.size, op)
            found.append([everywhere, piece, at_one if comm.rank == 1 else everywhere])
            assert comm.rank == 1 or torch.equal(at_one.isnan(), mine.isnan())
        return found

    for op, combine in (("max", torch.maximum), ("min", torch.minimum)):
        for found in mesh.run(body, op):
            for dtype, results in zip(FLOATS, found, strict=True):
                tensors = [torch.tensor(row, dtype=dtype) for row in values]
                right = combine(combine(tensors[0], tensors[1]), tensors[2])
                for result in results:
                    torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def test_floats_of_8_bits(mesh: Mesh) -> None:
    """They move as bytes, and are not reduced."""

    def body(dtype: torch.dtype) -> Any:
        comm: Any = mesh.comm()
        rank, size = comm.rank, comm.size
        tensors = [torch.tensor([1.0, -0.5, float(r)]).to(dtype) for r in range(size)]
        outs = [torch.empty(3, dtype=dtype) for _ in range(size)]
        comm.all_gather(outs, tensors[rank])
        right = [all(map(same, outs, tensors))]
        outs[0].copy_(tensors[rank])
        comm.broadcast(outs[0], src=2)
        right.append(same(outs[0], tensors[2]))
        comm.all_to_all(outs, [tensors[rank]] * size)
        right.append(all(map(same, outs, tensors)))
        sending = comm.isend(tensors[rank], (rank + 1) % size)
        comm.recv(outs[0], (rank - 1) % size)
        sending.wait()
        right.append(same(outs[0], tensors[(rank - 1) % size]))
        calls = len(comm.library.nccl.log)
        for op in ("sum", "avg", "max", "product", Pairwise(1.0)):
            for reduce in (comm.all_reduce, comm.all_reduced):
                with pytest.raises(SpecError, match=f"not defined for {dtype}.*cast it to bfloat16 or float32; moving"):
                    reduce(tensors[rank], op)
        assert len(comm.library.nccl.log) == calls
        return right

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert mesh.run(body, dtype) == [[True] * 4] * RANKS


def test_messages(mesh: Mesh) -> None:
    """Tags match in any order, all directions at once, to oneself, from anyone."""

    def body() -> list[float]:
        comm = mesh.comm()
        rank, size = comm.rank, comm.size
        sends = [
            comm.isend(torch.tensor([float(100 * rank + 10 * dst + tag)]), dst, tag)
            for dst in range(size)
            for tag in (1, 2, 3)
        ]
        found = {}
        receives = []
        for src in range(size):
            for tag in (3, 1, 2):
                found[src, tag] = torch.empty(1)
                receives.append(comm.irecv(found[src, tag], src, tag))
        for work in (*receives, *sends):
            work.wait()
        return [found[src, tag].item() for src in range(size) for tag in (1, 2, 3)]

    for rank, found in enumerate(mesh.run(body)):
        assert found == [float(100 * src + 10 * rank + tag) for src in range(RANKS) for tag in (1, 2, 3)]


def test_messages_without_the_first_rank(mesh: Mesh) -> None:
    """It sends nothing, waits for the others, or has left: they need nothing of it."""

    def body(waits: bool) -> float:
        comm, x = mesh.comm(), torch.tensor([float(mesh.rank)])
        if comm.rank:
            comm.send(x, 2) if comm.rank == 1 else comm.recv(x, 1)
        if waits:
            comm.barrier()
        return x.item()

    for waits in (True, False):
        assert mesh.run(body, waits) == [0.0, 1.0, 1.0]


def test_regions(mesh: Mesh) -> None:
    """The named-axis collectives go through it as well."""

    def body(x: torch.Tensor) -> Any:
        return psum(x, "data"), all_gather(x, "data")

    total, everyone = on_mesh(body, mesh=mesh)(torch.arange(4.0))
    assert total.full().tolist() == [0.0, 3.0, 6.0, 9.0]
    assert everyone.full().tolist() == [[0.0, 1.0, 2.0, 3.0]] * RANKS


# -- disagreements and deaths ------------------------------------------------------------------------------------------


def test_ranks_disagree(mesh: Mesh) -> None:
    def body() -> None:
        comm = mesh.comm()
        x = torch.ones(4)
        comm.all_reduce(x) if comm.rank else comm.broadcast(x)

    with pytest.raises(CollectiveMismatch, match=r"broadcast float32\[4\] \(src=0\) on cpu") as caught:
        mesh.run(body)
    assert "all_reduce float32[4] (sum) on cpu" in str(caught.value)
    assert mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1)))) == [3.0] * RANKS  # opened afresh


def test_pieces_that_do_not_fit(mesh: Mesh) -> None:
    def body() -> None:
        comm = mesh.comm()
        outs = [torch.empty(3 if comm.rank == 1 else 2) for _ in range(comm.size)]
        comm.all_to_all(outs, [torch.ones(2)] * comm.size)

    with pytest.raises(CollectiveMismatch, match="sends 8 bytes, rank 1 expects 12"):
        mesh.run(body)


def test_error_of_one_rank(mesh: Mesh) -> None:
    def body() -> None:
        comm = mesh.comm()
        comm.all_reduce(torch.ones(1))
        if comm.rank == 1:
            raise KeyError("mine")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="mine"):
        mesh.run(body)
    assert mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(1)))) == [3.0] * RANKS


def test_the_cause_is_told_where_it_ends_its_own_ranks_wait(mesh: Mesh) -> None:
    """The rank whose NCCL fails waits for something else meanwhile, as all do, and is called off like them."""

    def body() -> None:
        comm: Any = mesh.comm()
        comm.streams.stuck = comm.rank == 1
        comm.broadcast(torch.ones(1), async_op=True)
        if comm.rank == 1:
            comm.library.nccl.async_error = RuntimeError("NCCL_ERROR_SYSTEM_ERROR: a cable")
        comm.host.recv(torch.empty(1), (comm.rank + 1) % comm.size)

    with pytest.raises(PeerLost, match=r"NCCL failed on rank 1 in broadcast.*a cable"):
        mesh.run(body)
    assert mesh.run(lambda: mesh.rank) == [0, 1, 2]


def test_a_rank_that_died_is_replaced(mesh: Mesh) -> None:
    """The others open their communicators afresh in the order in which the new one makes its own."""
    total = on_mesh(lambda x: psum(x, "data"), mesh=mesh)
    for _ in range(2):
        assert total(torch.ones(2)).full().tolist() == [float(RANKS)] * 2
        os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    assert total(torch.ones(2)).full().tolist() == [float(RANKS)] * 2


def test_what_a_death_cuts_short_is_lost(mesh: Mesh) -> None:
    """A call is over on the hosts before it is on the GPUs. What these have not done then is arbitrary, not a value."""
    total = on_mesh(lambda x: psum(x, "data"), mesh=mesh)

    def hold() -> None:
        comm: Any = mesh.comm("data")
        until(comm.channel.quiet)
        comm.streams.stuck = True

    for _ in range(3):
        before = total(torch.ones(2))
    assert before.tolist() == [float(RANKS)] * 2
    mesh.run(hold)
    after = total(torch.ones(2))
    os.kill(mesh.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises(MeshError, match="a value was lost as another rank failed before the GPUs had computed it"):
        until(lambda: total(after).tolist() is None)  # the death may be noticed a moment later
    assert before.tolist() == [float(RANKS)] * 2


# -- the calls, on one rank --------------------------------------------------------------------------------------------


@pytest.fixture
def make_comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    """What never ends is soon given up."""
    monkeypatch.setattr(nccl_channel, "SPARE_SECONDS", 0.5)
    monkeypatch.setattr(nccl_connection, "END_SECONDS", 0.5)
    make = Alone()
    yield make
    make.close()


def test_every_operation_and_dtype_of_one_rank(make_comm: Alone) -> None:
    """A group of one goes through NCCL as well, so that one GPU tests what several do."""
    comm = make_comm()
    for dtype in DTYPES:
        x = value(dtype, (5, 3), 0)
        for op in OPS:
            if not meaningful(op, dtype):
                with pytest.raises(SpecError):
                    comm.all_reduce(x, op)
                continue
            for reduce in (
                lambda out, op=op: comm.all_reduce(out, op),
                lambda out, op=op: out.copy_(comm.all_reduced(out, op)),
                lambda out, op=op: comm.reduce(out, 0, op),
                lambda out, op=op: comm.reduce_scatter(out, [out.clone()], op),
            ):
                out = x.clone()
                del log_of(comm)[:]
                reduce(out)
                assert same(out, x), f"{op} of {dtype}"
                assert any(call[0] in REDUCTIONS for call in log_of(comm)), f"{op} of {dtype}"
        for move in (
            lambda out, x=x: comm.broadcast(out.copy_(x)),
            lambda out, x=x: comm.all_gather([out], x),
            lambda out, x=x: comm.gather(x, [out]),
            lambda out, x=x: comm.scatter(out, [x]),
            lambda out, x=x: comm.all_to_all([out], [x]),
            lambda out, x=x: (comm.isend(x, 0, 3), comm.recv(out, 0, 3)),
        ):
            out = torch.zeros_like(x)
            del log_of(comm)[:]
            move(out)
            assert same(out, x), f"{dtype}"
            assert any(call[0] in MOVEMENTS for call in log_of(comm)), f"{dtype}"


REDUCTIONS, MOVEMENTS = ("allReduce", "allGather", "reduce", "reduceScatter"), ("broadcast", "allGather", "send")
# What an operation of one rank on x, y (ones of 6 elements) and z (the same, not contiguous) calls, on what memory;
# "?" is a tensor of its own.
GROUP = [("groupStart",), ("send", "x", 24, "NCCL_UINT8", 0), ("recv", "y", 24, "NCCL_UINT8", 0), ("groupEnd",)]
DISPATCH: list[tuple[torch.dtype, Callable[..., Any], list[tuple[Any, ...]]]] = [
    (
        torch.float32,
        lambda comm, x, y, z: comm.all_reduce(x),
        [("allReduce", "x", "x", 6, "NCCL_FLOAT32", "NCCL_SUM")],
    ),
    (
        torch.bfloat16,
        lambda comm, x, y, z: comm.all_reduce(z, "avg"),
        [("allReduce", "?", "?", 6, "NCCL_BFLOAT16", "NCCL_AVG")],
    ),
    (
        torch.float32,
        lambda comm, x, y, z: comm.all_reduced(x, "product"),
        [("allReduce", "x", "?", 6, "NCCL_FLOAT32", "NCCL_PROD")],
    ),
    (
        torch.float64,
        lambda comm, x, y, z: comm.all_reduce(x, "max"),
        [("allReduce", "?", "?", 6, "NCCL_INT64", "NCCL_MAX")],
    ),
    (
        torch.float16,
        lambda comm, x, y, z: comm.all_reduce(x, "min"),
        [("allReduce", "?", "?", 6, "NCCL_INT32", "NCCL_MIN")],
    ),
    (
        torch.complex64,
        lambda comm, x, y, z: comm.all_reduce(x),
        [("allReduce", "x", "x", 12, "NCCL_FLOAT32", "NCCL_SUM")],
    ),
    (torch.int16, lambda comm, x, y, z: comm.all_reduce(x, "bxor"), [("allGather", "x", "?", 12, "NCCL_UINT8")]),
    (
        torch.int64,
        lambda comm, x, y, z: comm.reduce(x, 0, "max"),
        [("reduce", "x", "?", 6, "NCCL_INT64", "NCCL_MAX", 0)],
    ),
    (
        torch.uint8,
        lambda comm, x, y, z: comm.reduce_scatter(x, [y], "product"),
        [("reduceScatter", "?", "?", 6, "NCCL_UINT8", "NCCL_PROD")],
    ),
    (torch.complex128, lambda comm, x, y, z: comm.broadcast(x), [("broadcast", "x", "x", 96, "NCCL_UINT8", 0)]),
    (torch.float32, lambda comm, x, y, z: comm.broadcast(z), [("broadcast", "?", "?", 24, "NCCL_UINT8", 0)]),
    (torch.float32, lambda comm, x, y, z: comm.all_gather([y], x), [("allGather", "x", "y", 24, "NCCL_UINT8")]),
    (torch.float16, lambda comm, x, y, z: comm.all_gather([z], x), [("allGather", "x", "?", 12, "NCCL_UINT8")]),
    (torch.float32, lambda comm, x, y, z: comm.gather(x, [y]), GROUP),
    (torch.float32, lambda comm, x, y, z: comm.scatter(y, [x]), GROUP),
    (torch.float32, lambda comm, x, y, z: comm.all_to_all([y], [x]), GROUP),
]


@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize(("dtype", "run", "calls"), DISPATCH)
def test_dispatch(
    make_comm: Alone,
    dtype: torch.dtype,
    run: Callable[..., Any],
    calls: list[tuple[Any, ...]],
    side: bool,
) -> None:
    """Pointers, counts, dtypes, operations, roots, groups, turns and streams."""
    comm = make_comm()
    tensors = {"x": torch.ones(6, dtype=dtype), "y": torch.ones(6, dtype=dtype), "z": torch.ones(6, 2, dtype=dtype)}
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    del log_of(comm)[:]
    with comm.streams.beside() if side else contextlib.nullcontext():
        run(comm, tensors["x"], tensors["y"], tensors["z"][:, 0])
    stream = SIDE if side else CURRENT
    found = []
    for name, *arguments in log_of(comm)[side:]:
        pointers = {"groupStart": 0, "groupEnd": 0, "send": 1, "recv": 1, "turn": 0, "event": 0}.get(name, 2)
        found.append((name, *(names.get(one, "?") for one in arguments[:pointers]), *arguments[pointers:]))
    right = [
        (*(VALUES.get(one, one) for one in call), *(() if call[0].startswith("group") else (stream,))) for call in calls
    ]
    assert found == [("turn", stream), *right, ("event", stream)]


def test_message_of_a_rank_to_itself(make_comm: Alone) -> None:
    """One group, after what made the tensors; the caller's stream waits for it in `wait`, not before."""
    comm = make_comm()
    x, y = torch.ones(3), torch.empty(3)
    sending = comm.isend(x, 0, 1)
    assert not sending.is_completed()
    del log_of(comm)[:]
    receiving = comm.irecv(y, None, 1)
    assert sending.is_completed() and receiving.is_completed()
    (lane,) = comm.streams.made
    assert log_of(comm) == [
        ("event", CURRENT),
        ("wait", lane),
        ("turn", lane),
        ("groupStart",),
        ("send", x.data_ptr(), 12, VALUES["NCCL_UINT8"], 0, lane),
        ("recv", y.data_ptr(), 12, VALUES["NCCL_UINT8"], 0, lane),
        ("groupEnd",),
        ("hold", x.data_ptr(), lane),
        ("hold", y.data_ptr(), lane),
        ("event", lane),
    ]
    del log_of(comm)[:]
    assert receiving.wait() == 0
    assert log_of(comm) == [("wait", CURRENT), ("hold", y.data_ptr(), CURRENT)]


def test_a_message_to_itself_is_sent_once_it_is_on_its_way(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender may then overwrite its tensor: not before, though the answer is there already."""
    comm = make_comm()
    post = comm._messages_of()._post
    isend, answers = post.isend, []

    class Slow:
        """An answer that the receiver does not know to have arrived."""

        def __init__(self, work: Any):
            self._work, self.asked = work, 0

        def has_ended(self) -> bool:
            self.asked += 1
            return self.asked > 3 and self._work.has_ended()

        def wait(self) -> Any:
            return self._work.wait()

    def slow(tensor: torch.Tensor, dst: int, tag: int) -> Any:
        work = isend(tensor, dst, tag)
        if tensor.dtype is torch.uint8:
            return work
        answers.append(Slow(work))
        return answers[-1]

    monkeypatch.setattr(post, "isend", slow)
    x, y = torch.ones(3), torch.empty(3)
    sending, receiving = comm.isend(x, 0), comm.irecv(y, 0)
    until(sending.is_completed)
    until(receiving.is_completed)
    assert y.eq(1).all() and answers[0].asked > 3


def test_own_piece_that_is_in_place(make_comm: Alone) -> None:
    comm = make_comm()
    x = torch.ones(3)
    del log_of(comm)[:]
    comm.gather(x, [x])
    assert [call[0] for call in log_of(comm)] == ["turn", "groupStart", "groupEnd", "event"]


def test_own_piece_that_does_not_fit(make_comm: Alone) -> None:
    """NCCL would hang, or write beyond the tensor."""
    comm = make_comm()
    del log_of(comm)[:]
    with pytest.raises(CollectiveMismatch, match="rank 0 sends 12 bytes, rank 0 expects 8"):
        comm.all_to_all([torch.empty(2)], [torch.empty(3)])
    assert log_of(comm) == []


def test_hosts_agree_where_that_is_cheap(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network (`checked=False`) only for who debugs."""

    def body() -> list[int]:
        counts = []
        for checked, debugging in ((True, ""), (False, ""), (False, "1")):
            os.environ["SPMD_DEBUG"] = debugging
            comm: Any = nccl_fake.communicator(
                mesh.comm()._watch,
                (0, 1, 2),
                mesh.comm().library.nccl.store,
                30.0,
                f"{checked}{debugging}",
                checked=checked,
            )
            del os.environ["SPMD_DEBUG"]
            comm._debug = False  # prints nothing
            agreed: list[Any] = []
            exchange = comm.host._exchange
            comm.host._exchange = lambda *args, seen=agreed, go=exchange: (seen.append(1), go(*args))[1]
            comm.all_reduce(torch.ones(2))
            counts.append(len(agreed))
            comm.close()
        return counts

    assert mesh.run(body) == [[1, 0, 1]] * RANKS


def test_call_on_the_current_stream(make_comm: Alone) -> None:
    comm = make_comm()
    assert log_of(comm)[:2] == [("get_unique_id",), ("NcclCommunicator", 1, 0)]
    x = torch.ones(3, dtype=torch.float64)
    del log_of(comm)[:]
    comm.broadcast(x)
    assert log_of(comm) == [
        ("turn", CURRENT),
        ("broadcast", x.data_ptr(), x.data_ptr(), 24, VALUES["NCCL_UINT8"], 0, CURRENT),
        ("event", CURRENT),
    ]


def test_call_beside_the_current_stream(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts after what the current stream was given, and what is given later waits for it only when told to."""
    monkeypatch.setattr(nccl_watchdog, "watch", lambda comm: None)  # which forgets what is over
    comm = make_comm()
    x = torch.ones(3)
    del log_of(comm)[:]
    work = comm.broadcast(x, async_op=True)
    names = [call[0] for call in log_of(comm)]
    assert names == ["beside", "turn", "broadcast", "event"]
    assert {call[-1] for call in log_of(comm)[1:]} == {SIDE}
    assert comm.channel.collectives.oldest().keepalive.keepalive == (x,)  # it lives until the GPU is done
    work.wait()
    assert log_of(comm)[4:] == [("wait", CURRENT)]
    assert work.is_completed()


def test_result_of_a_side_stream_is_held(make_comm: Alone) -> None:
    comm = make_comm()
    result = comm.all_reduced(torch.ones(3), async_op=True).wait()
    assert log_of(comm)[-1] == ("hold", result.data_ptr(), CURRENT)


def test_channels_are_split_off(make_comm: Alone) -> None:
    first, second = make_comm(), make_comm(channel="buckets")
    assert ("commSplit", 0, 0) in log_of(first)
    assert not any(call[0] == "NcclCommunicator" for call in log_of(second))
    first.close()
    assert not any(call[0] in ("abort", "destroy") for call in log_of(first))  # the other may still split
    second.close()
    assert [call[0] for call in log_of(first)].count("destroy") == 2


def test_closing_twice(make_comm: Alone) -> None:
    comm = make_comm()
    comm.close()
    comm.close()
    assert [call for call in log_of(comm) if call[0] in ("abort", "destroy")] == [("destroy",)]
    with pytest.raises(PeerLost, match="closed communicator"):
        comm.broadcast(torch.ones(1))


def test_calls_in_a_group(mesh: Mesh) -> None:
    """Each rank's sends and receives of one operation start together."""

    def body() -> Any:
        comm: Any = mesh.comm()
        pieces, places = [torch.ones(2) for _ in range(RANKS)], [torch.empty(2) for _ in range(RANKS)]
        del comm.library.nccl.log[:]
        comm.all_to_all(places, pieces)
        own = {tensor.data_ptr(): index for index, tensor in enumerate(pieces)}
        own.update({tensor.data_ptr(): 10 + index for index, tensor in enumerate(places)})
        return [
            call if call[0] not in ("send", "recv") else (call[0], own[call[1]], *call[2:])
            for call in comm.library.nccl.log
        ]

    for rank, log in enumerate(mesh.run(body)):
        calls = [
            (name, first + peer, 8, VALUES["NCCL_UINT8"], peer, CURRENT)
            for peer in range(RANKS)
            for name, first in (("send", 0), ("recv", 10))
        ]
        assert log == [("turn", CURRENT), ("groupStart",), *calls, ("groupEnd",), ("event", CURRENT)], rank


@pytest.mark.parametrize(
    ("dtype", "op", "count", "kind", "number"),
    [
        (torch.float32, "sum", 6, "NCCL_FLOAT32", "NCCL_SUM"),
        (torch.bfloat16, "avg", 6, "NCCL_BFLOAT16", "NCCL_AVG"),
        (torch.complex64, "sum", 12, "NCCL_FLOAT32", "NCCL_SUM"),
        (torch.bool, "band", 6, "NCCL_UINT8", "NCCL_MIN"),
        (torch.int64, "avg", 6, "NCCL_INT64", "NCCL_SUM"),
        (torch.uint32, "avg", 6, "NCCL_UINT32", "NCCL_AVG"),
        (torch.int16, "product", 6, "NCCL_INT32", "NCCL_PROD"),
    ],
)
def test_how_dtypes_travel(mesh: Mesh, dtype: torch.dtype, op: str, count: int, kind: str, number: str) -> None:
    def body() -> Any:
        comm: Any = mesh.comm()
        x = torch.ones(2, 3, dtype=dtype)
        comm.all_reduce(x, op)
        (call,) = [call for call in comm.library.nccl.log if call[0] == "allReduce"]
        del comm.library.nccl.log[:]
        return call[1] == call[2] == x.data_ptr(), call[3:]

    for in_place, rest in mesh.run(body):
        assert in_place == (dtype is not torch.int16)  # no copy, but where the elements must be wider
        assert rest == (count, VALUES[kind], VALUES[number], CURRENT)


def test_every_dtype_has_a_way() -> None:
    assert {way("sum", dtype).op for dtype in (*NAMES, torch.bool, torch.complex128)} <= {"NCCL_SUM", "NCCL_MAX"}
    assert way("bxor", torch.int32).op is None and way("product", torch.complex64).op is None


# -- ending by force ---------------------------------------------------------------------------------------------------


def stuck(comm: NcclCommunicator, timeout: float = 30.0) -> NcclCommunicator:
    """Start something that never ends, and from then on wait so long."""
    comm.streams.stuck = True
    comm.broadcast(torch.ones(1), async_op=True)
    comm.set_timeout(timeout)
    return comm


def test_abort_of_the_region_ends_it(make_comm: Alone) -> None:
    comm = stuck(make_comm())
    comm._watch.abort("rank 7 gave up")
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(BaseException, match="rank 7 gave up"):
        comm.check()
    with pytest.raises(BaseException, match="rank 7 gave up"):
        comm.broadcast(torch.ones(1))


def test_what_is_under_way_ends_after_another_rank_failed(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts agreed on it, so that all GPUs do it: the results of earlier calls stay right. But not for ever."""
    monkeypatch.setattr(nccl_channel, "SPARE_SECONDS", 1e6)
    nccl_watchdog.settled(at_once=True)  # of other tests
    for generation, at_once in ((2, False), (3, True)):
        comm = stuck(make_comm())
        comm._watch.abort("rank 7 raised an exception")
        comm._watch.clear(generation)
        comm._watch.generation = generation
        if not at_once:
            threading.Timer(0.2, lambda comm=comm: setattr(comm.streams, "stuck", False)).start()
        began = time.monotonic()
        moment = nccl_watchdog.settled(at_once=at_once)
        assert (moment < began) if at_once else math.isinf(moment)
        assert not comm.channel.collectives.count() or at_once
        assert math.isinf(nccl_watchdog.settled(at_once=True))  # told once
        comm.close()


def test_timeout_ends_it(make_comm: Alone) -> None:
    comm = stuck(make_comm(), timeout=0.1)
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(PeerLost, match=r"broadcast float32\[1\] \(src=0\) on rank 0 was not over after 0.1 s"):
        comm.check()
    assert "was not over" in "".join(comm._watch.aborted().values())  # the other ranks are told


def test_time_in_which_the_process_was_stopped_does_not_count(
    make_comm: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice a clock jumps while the watchdog sleeps, as if the process had been stopped then."""
    comm = make_comm()
    gone, stops, looks = [0.0], [1e3, 1e3], [0]

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if threading.current_thread().name == "spmd-nccl-watchdog" and comm.streams.stuck:
            looks[0] += 1
            gone[0] += stops.pop() if stops else 0.0

    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + gone[0], sleep=sleep)
    monkeypatch.setattr(nccl_watchdog, "_stops", ())  # what other tests must not find
    for module in (nccl_channel, nccl_watchdog):
        monkeypatch.setattr(module, "time", clock)
    stuck(comm, timeout=100.0)
    until(lambda: looks[0] > 4)
    comm.check()
    comm.set_timeout(0.1)
    until(lambda: ("abort",) in log_of(comm))


def test_timeout_that_is_set_later(make_comm: Alone) -> None:
    """By torch's process groups, say: it is that of the GPU, of the host, and of what is made afterwards."""
    comm = make_comm()
    comm.set_timeout(0.1)
    comm.streams.stuck = True
    comm.broadcast(torch.ones(1), async_op=True)
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(PeerLost, match=r"broadcast float32\[1\] \(src=0\) on rank 0 was not over after 0.1 s"):
        comm.check()
    comm._watch.clear(1)
    with pytest.raises(PeerLost, match=r"recv from 0 on rank 0 got no answer for 0\.1 s"):
        comm.host.recv(torch.empty(1), 0)
    hosts: list[Any] = [comm.host, comm.channel.group.host, comm._messages_of()._post]
    assert [host.timeout for host in hosts] == [0.1, 0.1, 0.1]


def test_errors_of_nccl_end_it(make_comm: Alone) -> None:
    comm = stuck(make_comm())
    comm.library.nccl.async_error = RuntimeError("NCCL_ERROR_REMOTE_ERROR: a peer is gone")
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(PeerLost, match=r"NCCL failed on rank 0 in broadcast.*a peer is gone.*NCCL 2\.32\.3"):
        comm.check()


def test_an_error_of_the_gpu_ends_it(make_comm: Alone) -> None:
    """CUDA reports what went wrong in a kernel at any call, so at the watching thread's; that goes on."""
    comm = stuck(make_comm())
    comm.streams.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(PeerLost, match="illegal memory access"):
        comm.check()
    comm.close()
    comm._watch.clear(1)
    again = stuck(make_comm(), timeout=0.1)
    until(lambda: ("abort",) in log_of(again))


def test_the_watching_thread_takes_the_device(make_comm: Alone) -> None:
    comm = stuck(make_comm())
    until(lambda: "spmd-nccl-watchdog" in comm.streams.entered)


def test_death_of_a_peer_ends_it(make_comm: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = stuck(make_comm())

    def dead() -> None:
        raise PeerLost("rank 3 died", 3)

    monkeypatch.setattr(comm._watch, "check_peers", dead)
    until(lambda: ("abort",) in log_of(comm))
    with pytest.raises(PeerLost, match="rank 3 died"):
        comm.check()


def test_waiting_inside_nccl_is_ended(make_comm: Alone, monkeypatch: Any) -> None:
    """Where a call waits for peers although they are connected, which nothing but an abort can end."""
    monkeypatch.setattr(nccl_connection, "JOIN_SECONDS", 0.05)
    comm = make_comm()
    comm.set_timeout(0.2)

    def wait(raw: Any, *_: Any) -> None:
        until(lambda: bool(raw.ended))
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: it was aborted")

    monkeypatch.setattr(nccl_fake.Raw, "broadcast", wait)
    with pytest.raises(PeerLost, match=r"broadcast .* on rank 0 was not over after 0\.2 s"):
        comm.broadcast(torch.ones(1))


@pytest.fixture
def pair(make_comm: Alone) -> tuple[NcclCommunicator, nccl_fake.Raw, Callable[[], Any]]:
    """A communicator, that of its messages to another rank, and what sends one once the hosts have arranged it."""
    comm = make_comm()
    comm.set_timeout(0.2)
    messages, pairs, x = comm._messages_of(), comm.channel.pairs, torch.ones(3, dtype=torch.uint8)
    raw = nccl_fake.Raw(comm.library.nccl, 2, "pair", 0)
    comm.library.nccl.deferred = True
    for rank in (0, 1):
        comm.library.nccl.store.set(f"fake/pair/meets/half/0/1/{rank}", b"1")
    pairs._connections[0, 1] = Connection(raw, comm.streams.enter)
    messages._sends.promise((0, 1))
    before = comm.streams.event()
    return comm, raw, lambda: messages._put("send", x, (0, 1), messages._sends, before)


def test_waiting_inside_nccl_for_a_message_is_ended(pair: Any, monkeypatch: Any) -> None:
    _, raw, send = pair
    monkeypatch.setattr(nccl_connection, "JOIN_SECONDS", 0.05)

    def wait(*_: Any) -> None:
        until(lambda: bool(raw.ended))
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: it was aborted")

    monkeypatch.setattr(raw, "send", wait)
    with pytest.raises(PeerLost, match=r"send from rank 0 to rank 1 on rank 0 was not over after 0\.2 s"):
        send()


def test_error_of_a_message(pair: Any, monkeypatch: Any) -> None:
    comm, raw, send = pair

    def broken(*_: Any) -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: a cable")

    monkeypatch.setattr(raw, "send", broken)
    with pytest.raises(PeerLost, match=r"NCCL failed on rank 0 in send from rank 0 to rank 1.*a cable"):
        send()
    assert comm._watch.aborted()  # the other ranks hear of it
    until(lambda: raw.ended == "abort")


def test_errors_that_nccl_notices_of_a_message(pair: Any, monkeypatch: Any) -> None:
    comm, raw, send = pair
    comm.set_timeout(30.0)

    def noticed() -> None:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: a cable")

    comm.streams.stuck = True
    send()
    monkeypatch.setattr(raw, "check_async_error", noticed)
    until(lambda: raw.ended == "abort")
    with pytest.raises(PeerLost, match=r"NCCL failed on rank 0 in send from rank 0 to rank 1.*a cable"):
        comm.check()


def test_after_a_recovery_it_is_ended_at_once(make_comm: Alone) -> None:
    """On its own device; what the mesh has begun meanwhile goes on, and what was started before is void."""
    comm = make_comm()
    idle = make_comm(channel="buckets")
    comm.streams.stuck = True
    work = comm.broadcast(torch.ones(1), async_op=True)
    comm.streams.entered.clear()
    comm._watch.clear(2)
    comm._watch.generation = 2
    until(lambda: ("abort",) in log_of(comm))
    until(lambda: log_of(comm).count(("abort",)) == 2)  # the one that was split off as well
    assert "spmd-nccl-ending" in comm.streams.entered
    assert comm._watch.aborted() == {}
    with pytest.raises(PeerLost, match=r"broadcast float32\[1\] \(src=0\) was started before a region failed"):
        work.wait()
    comm.streams.stuck = False
    x = torch.ones(2)
    idle.broadcast(x)
    comm.broadcast(x)
    assert [call[0] for call in log_of(comm)].count("NcclCommunicator") == 2
    for one in (comm, idle):
        one.close()
    assert log_of(comm).count(("abort",)) == 2 and log_of(comm).count(("destroy",)) == 2


def test_a_use_after_a_recovery_does_not_wait(make_comm: Alone, monkeypatch: Any) -> None:
    """Not for what nobody will answer, though the watching thread has not come by yet."""
    monkeypatch.setattr(nccl_watchdog, "watch", lambda comm: None)
    monkeypatch.setattr(nccl_channel, "_CLOSE_SECONDS", 1e6)
    comm = stuck(make_comm())
    comm._watch.clear(2)
    comm._watch.generation = 2
    comm.all_reduce(torch.ones(1))
    assert comm.channel.collectives.oldest().what.startswith("all_reduce")  # what is void is not waited for either
    assert [call[0] for call in log_of(comm) if call[0] in ("abort", "NcclCommunicator")] == [
        "NcclCommunicator",
        "abort",
        "NcclCommunicator",
    ]
    comm._watch.generation = 3  # so that closing does not wait either


def test_closing_with_a_broken_gpu(make_comm: Alone, monkeypatch: Any) -> None:
    monkeypatch.setattr(nccl_watchdog, "watch", lambda comm: None)
    comm = stuck(make_comm())
    comm.streams.broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    comm.close()
    assert log_of(comm)[-1] == ("abort",)


def test_idle_communicators_are_left_alone(make_comm: Alone) -> None:
    comm = make_comm()
    comm.broadcast(torch.ones(1))
    comm._watch.abort("something later")
    time.sleep(0.2)
    assert ("abort",) not in log_of(comm)


def test_nothing_is_noted_while_a_graph_is_captured(make_comm: Alone) -> None:
    comm = make_comm()
    comm.streams.graph = True
    del log_of(comm)[:]
    comm.broadcast(torch.ones(1))
    assert [call[0] for call in log_of(comm)] == ["turn", "broadcast"]


# -- which side --------------------------------------------------------------------------------------------------------


def test_other_tensors_stay_on_the_host(make_comm: Alone) -> None:
    """With tensors of "meta" for those of a GPU, those of the CPU are the host's."""
    comm = make_comm()
    comm.device = torch.device("meta")
    del log_of(comm)[:]
    x, place = torch.arange(3.0), [torch.empty(3)]
    comm.all_reduce(x)
    comm.broadcast(x)
    comm.all_gather(place, x)
    comm.gather(x, place)
    comm.scatter(x, place)
    comm.reduce(x)
    comm.reduce_scatter(x, place)
    comm.all_to_all(place, [x])
    assert comm.all_reduced(x, "max").tolist() == place[0].tolist() == [0.0, 1.0, 2.0]
    assert log_of(comm) == []
    with pytest.raises(SpecError, match="expected all on meta, or all on the CPU, got cpu, meta"):
        comm.all_gather([torch.empty(3, device="meta")], x)
