"""The CUDA sources without a GPU: their arithmetic on the host against torch, and compilation for two architectures."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_host import launcher, library_for_host, tool
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd.kernels import cuda_pack
from spmd.kernels.cuda_pack import DTYPES, Table, kernel_name

PAIRS = [(leaf, wire) for leaf in DTYPES for wire in DTYPES]
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


def alike(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()], b[~b.isnan()])


def scaled(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (values.float() * scale).to(dtype)


def round_trip(launch: Any, lengths: list[int], offsets: list[int], leaf: Any, wire: Any, scale: float) -> None:
    starts = [sum(-(-length // 32) * 32 for length in lengths[:index]) for index in range(len(lengths))]
    table = Table(starts, lengths, leaf, wire, launch)
    leaves = [leaf_of(length, leaf, offsets[i % len(offsets)], i) for i, length in enumerate(lengths)]
    size = starts[-1] + lengths[-1] + 7
    for _ in range(2):  # the second time the table is on the device already, with other addresses in it
        bucket = leaf_of(size, wire, 0, 99)
        gaps = torch.ones(size, dtype=torch.bool)
        before = bucket.clone()
        table.pack(leaves, bucket, scale)
        for start, one in zip(starts, leaves, strict=True):
            assert alike(bucket[start : start + len(one)], scaled(one, scale, wire))
            gaps[start : start + len(one)] = False
        assert alike(bucket[gaps], before[gaps])  # nothing else is written to
        outs = [leaf_of(length, leaf, offsets[-1 - i % len(offsets)], 7) for i, length in enumerate(lengths)]
        table.unpack(bucket, outs, scale)
        for start, one, out in zip(starts, leaves, outs, strict=True):
            assert alike(out, scaled(bucket[start : start + len(one)], scale, leaf))
        leaves = [one.clone() for one in leaves]


@pytest.mark.parametrize(("leaf", "wire"), PAIRS)
def test_arithmetic(launch: Any, leaf: torch.dtype, wire: torch.dtype) -> None:
    lengths = [0, 1, 7, 8, 31, 4096, 0, 2049, 33, 70001, 0]
    round_trip(launch, lengths, [0, 1, 3, 5], leaf, wire, 1.0)
    round_trip(launch, lengths, [0], leaf, wire, 0.3)


@given(
    lengths=st.lists(st.integers(0, 6000), min_size=1, max_size=6),
    offsets=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    pair=st.sampled_from(PAIRS),
    scale=st.sampled_from([1.0, -0.5, 1 / 3]),
)
@settings(max_examples=60, deadline=None)
def test_any_lengths_and_offsets(launch: Any, lengths: Any, offsets: Any, pair: Any, scale: float) -> None:
    round_trip(launch, lengths, offsets, *pair, scale)


def test_every_half(launch: Any) -> None:
    """All 65,536 of each 16-bit dtype, there and back."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        bucket = torch.empty(65536)
        Table([0], [65536], dtype, torch.float32, launch).pack([every], bucket)
        assert alike(bucket, every.float())
        back = torch.empty_like(every)
        Table([0], [65536], dtype, torch.float32, launch).unpack(bucket, [back])
        assert alike(back, every)


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


@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles(tmp_path: Path, architecture: int) -> None:
    nvcc = tool("nvcc", "/usr/local/cuda/bin/nvcc")
    target = tmp_path / "bucket.ptx"
    command = [nvcc, "--ptx", *cuda_pack.compile_options(architecture), "-o", target, cuda_pack.SOURCE]
    subprocess.run(command, check=True, timeout=100)
    text = target.read_text()
    assert f".target sm_{architecture}" in text
    entries = set(re.findall(r"\.entry (\w+)\(", text))
    assert entries == {kernel_name(way, *pair) for way in ("pack", "unpack") for pair in PAIRS}
    for name in entries:
        body = text.partition(f".entry {name}(")[2].partition(".entry")[0]
        assert "ld.global.v4.u32" in body and "st.global.v4.u32" in body, f"{name} has no 16-byte accesses"


@pytest.mark.parametrize("architecture", [80, 90])
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
        nvrtc.compileProgram(program, cuda_pack.compile_options(architecture))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", [80, 90])
def test_assembles(tmp_path: Path, architecture: int) -> None:
    """To machine code, without registers spilled to memory."""
    nvcc = tool("nvcc", "/usr/local/cuda/bin/nvcc")
    options = [*cuda_pack.compile_options(architecture), "--resource-usage", "--cubin"]
    target = tmp_path / "bucket.cubin"
    done = subprocess.run(
        [nvcc, *options, "-o", target, cuda_pack.SOURCE], check=True, timeout=100, capture_output=True
    )
    assert target.read_bytes()[:4] == b"\x7fELF"
    spilled = {int(stored) for stored in re.findall(rb"(\d+) bytes spill stores", done.stderr + done.stdout)}
    assert spilled == {0}
