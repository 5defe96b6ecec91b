"""The CUDA sources without a GPU: their arithmetic on the host against torch, and compilation for two architectures."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_host import COPIED, PAIRS, alike, extremes, launcher, library_for_host, tool
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANGS
from torch import Tensor

from spmd.kernels.cuda import pack as cuda_pack
from spmd.kernels.cuda.pack import Table, kernel_name

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65519.0, 65520.0, 6e-8, 2.98e-8, 6.1e-5, 3.4e38, 1e-40]


def test_sources_are_installed() -> None:
    """Where the package is, the sources are."""
    assert cuda_pack.SOURCE.exists()
    assert (cuda_pack.SOURCE.parent / "on_host.h").exists()


# -- on the host -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = ctypes.CDLL(library_for_host(tmp_path_factory.mktemp("cuda")))
    made.accesses.restype = ctypes.c_longlong
    return made


@pytest.fixture(scope="module")
def launch(on_host: Any) -> Callable[[str, int, tuple], None]:
    return launcher(on_host)


def leaf_of(length: int, dtype: torch.dtype, offset: int, seed: int) -> Tensor:
    """A leaf that begins `offset` elements into aligned memory, with every special value if it is long enough."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator) * 100
    special = torch.tensor(SPECIAL)[:length]
    values[: len(special)] = special
    whole = torch.empty(length + 64, dtype=dtype)
    offset += -whole.data_ptr() % 64 // dtype.itemsize
    leaf = whole[offset : offset + length]
    return leaf.copy_(values)


def round_trip(launch: Any, lengths: list[int], offsets: list[int], leaf: Any, wire: Any) -> None:
    starts = [sum(-(-length // 32) * 32 for length in lengths[:index]) for index in range(len(lengths))]
    table = Table(starts, lengths, leaf, wire, launch)
    leaves = [leaf_of(length, leaf, offsets[i % len(offsets)], i) for i, length in enumerate(lengths)]
    size = starts[-1] + lengths[-1] + 7
    for _ in range(2):  # the second time the table is on the device already, with other addresses in it
        bucket = leaf_of(size, wire, 0, 99)
        gaps = torch.ones(size, dtype=torch.bool)
        before = bucket.clone()
        table.pack(leaves, bucket)
        for start, one in zip(starts, leaves, strict=True):
            assert alike(bucket[start : start + len(one)], one.float().to(wire))
            gaps[start : start + len(one)] = False
        assert alike(bucket[gaps], before[gaps])  # nothing else is written to
        outs = [leaf_of(length, leaf, offsets[-1 - i % len(offsets)], 7) for i, length in enumerate(lengths)]
        table.unpack(bucket, outs)
        for start, one, out in zip(starts, leaves, outs, strict=True):
            assert alike(out, bucket[start : start + len(one)].float().to(leaf))
        leaves = [one.clone() for one in leaves]


@pytest.mark.parametrize(("leaf", "wire"), PAIRS)
def test_arithmetic(launch: Any, leaf: torch.dtype, wire: torch.dtype) -> None:
    lengths = [0, 1, 7, 8, 31, 4096, 0, 2049, 33, 70001, 0]
    for offsets in ([0, 1, 3, 5], [0]):
        round_trip(launch, lengths, offsets, leaf, wire)


@given(
    lengths=st.lists(st.integers(0, 6000), min_size=1, max_size=6),
    offsets=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    pair=st.sampled_from(PAIRS),
)
@settings(max_examples=60, deadline=None)
def test_any_lengths_and_offsets(launch: Any, lengths: Any, offsets: Any, pair: Any) -> None:
    round_trip(launch, lengths, offsets, *pair)


@pytest.mark.parametrize(("leaf", "wire"), PAIRS)
def test_extremes(launch: Any, leaf: torch.dtype, wire: torch.dtype) -> None:
    """As torch casts them, there and back, where casts go wrong; of 16-bit dtypes all 65,536 numbers."""
    for here, there, way in ((leaf, wire, "pack"), (wire, leaf, "unpack")):
        values = extremes(here)
        length = len(values)
        found = torch.empty(length, dtype=there)
        table = Table([0], [length], leaf, wire, launch)
        table.pack([values], found) if way == "pack" else table.unpack(values, [found])
        assert alike(found, values.to(there)), way


@pytest.mark.parametrize("dtype", COPIED)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_copied_as_bytes(launch: Any, dtype: torch.dtype, offset: int) -> None:
    """Odd lengths, empty leaves, leaves that are not aligned, one that is missing; nothing else is written to."""
    lengths, starts = [1, 0, 15, 16, 33, 5001, 7], [0, 512, 512, 1024, 1536, 2048, 8192]
    whole = torch.empty(8192 + 512, dtype=dtype)
    whole.view(torch.uint8).random_(2 if dtype == torch.bool else 256)
    leaves = [whole[offset:][start : start + length] for start, length in zip(starts, lengths, strict=True)]
    bucket = torch.zeros(8192 + 512, dtype=dtype)
    expected = bucket.clone()
    table = Table(starts, lengths, dtype, dtype, launch)
    table.pack([*leaves[:-1], None], bucket)
    for start, leaf in zip(starts[:-1], leaves[:-1], strict=True):
        expected[start : start + len(leaf)] = leaf
    assert torch.equal(bucket.view(torch.uint8), expected.view(torch.uint8))
    outs = [torch.zeros(length + offset, dtype=dtype)[offset:] for length in lengths]
    table.unpack(bucket, outs)
    for out, leaf in zip(outs[:-1], leaves[:-1], strict=True):
        assert torch.equal(out.view(torch.uint8), leaf.view(torch.uint8))


def test_more_elements_than_32_bits_count() -> None:
    """Every element of a leaf of 2^31 + 5 is in one block's chunk, and no block begins where there is none."""
    started = []
    length, small = (1 << 31) + 5, 100
    table = Table([0, length + 507], [length, small], torch.float32, torch.bfloat16, lambda *call: started.append(call))
    table.pack([None, None], torch.empty(0, dtype=torch.bfloat16))
    ((name, blocks, (address, leaves, chunk, _)),) = started
    assert name == "pack_float32_bfloat16" and leaves == 2 and blocks < 1 << 31
    numbers = torch.frombuffer((ctypes.c_longlong * (3 * 2 + blocks)).from_address(address), dtype=torch.int64)
    assert numbers[:6].tolist() == [0, 0, 0, length + 507, length, small]
    owners, chunks = numbers[6:] >> 32, numbers[6:] & 0xFFFFFFFF
    assert owners.bincount().tolist() == [-(-length // chunk), 1]
    assert chunks[owners == 0].tolist() == list(range(-(-length // chunk)))


def test_tables_that_a_kernel_may_read_are_not_written_to(launch: Any) -> None:
    """What a launch was given keeps its contents when the leaves lie elsewhere the next time."""
    given = []

    def keep(name: str, blocks: int, arguments: tuple) -> None:
        given.append((arguments[0], ctypes.string_at(arguments[0], 8)))

    table = Table([0], [8], torch.float32, torch.float32, keep)
    first, second, bucket = torch.ones(8), torch.ones(8), torch.empty(8)
    tables = []
    for leaf in (first, first, second):
        table.pack([leaf], bucket)
        assert table._known is not None
        tables.append(table._known[1])  # as the stream's order keeps it
    assert given[0] == given[1] and given[0][0] != given[2][0]
    assert ctypes.string_at(given[0][0], 8) == given[0][1] == first.data_ptr().to_bytes(8, "little")


def test_missing_leaf_is_zero(launch: Any) -> None:
    bucket = torch.full((200,), 3.0)
    Table([0, 64], [50, 100], torch.float32, torch.float32, launch).pack([None, torch.ones(100)], bucket)
    assert bucket[:50].eq(0).all() and bucket[64:164].eq(1).all() and bucket[50:64].eq(3).all()


def test_only_empty_leaves() -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing to launch")

    table = Table([0, 0], [0, 0], torch.float32, torch.float32, refuse)
    table.pack([torch.empty(0), None], torch.empty(0))


def test_accesses(on_host: Any, launch: Any) -> None:
    """16 bytes at a time where both sides are aligned, and never at an address that a GPU would refuse."""
    before = on_host.accesses(0)
    leaf, bucket = leaf_of(4096, torch.float32, 0, 1), leaf_of(4096, torch.float32, 0, 2)
    Table([0], [4096], torch.float32, torch.float32, launch).pack([leaf], bucket)
    assert on_host.accesses(0) - before == 2 * 4096 // 4
    assert on_host.accesses(1) == 0


# -- for GPUs ----------------------------------------------------------------------------------------------------------


class Recorder:
    """What `_launch` uses of CuPy, written down."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.calls: list[Any] = []
        self.cuda = SimpleNamespace(Stream=self, Device=lambda device: contextlib.nullcontext())

    @contextlib.contextmanager
    def from_external(self, stream: Any) -> Any:
        self.stream = stream.__cuda_stream__()
        yield
        self.stream = None

    def RawModule(self, code: str, options: tuple[str, ...]) -> Recorder:
        assert code == cuda_pack.SOURCE.read_text() and "--std=c++14" in options
        return self

    def get_function(self, name: str) -> Any:
        return lambda *call: self.calls.append((name, self.stream, *call))


def test_how_kernels_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's stream, as numbers as wide as the kernel's parameters; torch before 2.10 has no stream protocol."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x51))
    cupy = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for cache in (cuda_pack._module, cuda_pack._kernel):
        cache.cache_clear()
    leaf, bucket = torch.ones(3000), torch.empty(3000)
    table = Table([0], [3000], torch.float32, torch.float32)
    table.pack([leaf], bucket)
    for cache in (cuda_pack._module, cuda_pack._kernel):
        cache.cache_clear()
    ((name, stream, grid, block, arguments),) = cupy.calls
    assert (name, stream, grid, block) == ("pack_float32_float32", (0, 0x51), (2,), (256,))
    assert [type(argument) for argument in arguments] == [np.uint64, np.int64, np.int64, np.uint64]
    assert table._known is not None
    assert [int(number) for number in arguments] == [table._known[1].data_ptr(), 1, 2048, bucket.data_ptr()]


def test_streams_as_cupy_takes_them() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    assert cupy.cuda.Stream.from_external(cuda_pack._Stream(0x51)).ptr == 0x51


ARCHITECTURES = [pytest.param(80, marks=pytest.mark.long), 90]


def options_for(architecture: int) -> tuple[str, ...]:
    return (*cuda_pack.OPTIONS, f"--gpu-architecture=sm_{architecture}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(tmp_path: Path, architecture: int) -> None:
    nvcc = tool("nvcc", "/usr/local/cuda/bin/nvcc")
    target = tmp_path / "bucket.ptx"
    command = [nvcc, "--ptx", *options_for(architecture), "-o", target, cuda_pack.SOURCE]
    subprocess.run(command, check=True, timeout=HANGS)
    text = target.read_text()
    assert f".target sm_{architecture}" in text
    entries = set(re.findall(r"\.entry (\w+)\(", text))
    assert entries == {
        kernel_name(way, *pair) for way in ("pack", "unpack") for pair in (*PAIRS, *zip(COPIED, COPIED, strict=True))
    }
    for name in entries:
        body = text.partition(f".entry {name}(")[2].partition(".entry")[0]
        assert "ld.global.v4.u32" in body and "st.global.v4.u32" in body, f"{name} has no 16-byte accesses"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_at_run_time(architecture: int) -> None:
    """By NVRTC, as CuPy does it on a machine with a GPU."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    wheel = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    for folder in () if wheel is None else wheel.submodule_search_locations or ():
        for library in Path(folder).glob("lib/libnvrtc.so.*"):
            ctypes.CDLL(str(library))  # where CuPy would not look for it
    try:
        program = nvrtc.createProgram(cuda_pack.SOURCE.read_text(), "bucket.cu", (), ())
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no NVRTC: {str(error).splitlines()[0]}")
    try:
        nvrtc.compileProgram(program, (*options_for(architecture), "-ftz=true"))  # CuPy's own addition
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_assembles(tmp_path: Path, architecture: int) -> None:
    """To machine code, without registers spilled to memory."""
    nvcc = tool("nvcc", "/usr/local/cuda/bin/nvcc")
    options = [*options_for(architecture), "--resource-usage", "--cubin"]
    target = tmp_path / "bucket.cubin"
    done = subprocess.run(
        [nvcc, *options, "-o", target, cuda_pack.SOURCE], check=True, timeout=HANGS, capture_output=True
    )
    assert target.read_bytes()[:4] == b"\x7fELF"
    spilled = {int(stored) for stored in re.findall(rb"(\d+) bytes spill stores", done.stderr + done.stdout)}
    assert spilled == {0}
