"""`spmd verify`: run a script at several numbers of ranks, and say whether all computed the same bits, or where not.

The script runs unchanged, each time with another SPMD_RANKS; what its @spmd functions return is compared call by call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._trace import VALUES
from .temporary import temporary_folder

CAUSES = """\
The usual causes:
  - values that another run of the script, at whatever size, would not have either: parameters that are initialised
    without torch.manual_seed, dates, the order of a set
  - the script saves and takes itself up, so that each run starts where the one before ended: remove what it saved, or
    have it write to a new directory
  - shards= is not given, or not to both Loader and data_parallel: means over ranks are added in another order
  - shards= is the number of ranks, or made from it: the bits depend on it
  - the script sets threads (torch.set_num_threads, Mesh(threads=)) by the number of ranks
  - sums over exact results outside the step, in another @spmd function, where a rank has the mesh's threads
  - random numbers of a generator made by the step, which nobody seeds alike: seed it with spmd.random_key()
  - what the step takes of its part of the batch: batch.shape, len(batch), numbers, arrays, torch.tensor(batch)
  - a loss that keeps something from one shard to the next, such as a counter or a list: a rank runs several
  - something that depends on mesh.size, axis_size or axis_index, or on when or in which order ranks finish"""


@dataclasses.dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs first differ.

    Attributes:
        call: from 1 on.
        name: the function's.
        leaf: the leaf of its result, as a path.
        values: the beginnings of both, as text.
        kept: where both values are, if they were kept: the place in the file, dtype and shape.
    """

    call: int
    name: str
    leaf: str
    values: tuple[str, str]
    kept: tuple[Any, Any] = (None, None)


def verify(arguments: Sequence[str]) -> int:
    """The command: 0 if all runs agree, 1 if not, or the exit status of a run that failed."""
    parser = argparse.ArgumentParser(
        prog="spmd verify", description="Run a script at several numbers of ranks and compare the bits of all results."
    )
    parser.add_argument(
        "--ranks", type=_numbers, default=[1, 2, 4], metavar="1,2,4", help="numbers of ranks to compare"
    )
    parser.add_argument("script", help="a script whose Mesh has an axis of size -1, or none given")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    first, agreed = options.ranks[0], True
    with temporary_folder("verify") as folder:
        runs: dict[int, list[dict[str, Any]]] = {}
        files: dict[int, Path] = {}
        for ranks in options.ranks:
            files[ranks] = folder / f"{ranks}.jsonl"
            status, runs[ranks] = _run(
                options.script, options.arguments, ranks, files[ranks], "" if ranks == first else "1"
            )
            if status:
                print(f"{ranks} ranks: {options.script} failed with exit status {status}")
                return status
            if not runs[ranks]:
                print(f"{ranks} ranks: {options.script} called no @spmd function")
                return 1
            sizes = [call["ranks"] for call in runs[ranks] if call.get("ranks") not in (None, ranks)]
            if sizes:
                print(f"{ranks} ranks: {options.script} made a mesh of {sizes[0]} ranks; give it an axis of size -1")
                return 1
            parting = None if ranks == first else compare(runs[first], runs[ranks])
            agreed = agreed and parting is None
            apart = "" if parting is None else _difference(parting, files[first], files[ranks])
            print(_line(ranks, first, runs[ranks], parting) + apart, flush=True)
    if not agreed:
        print(CAUSES)
    return 0 if agreed else 1


def _line(ranks: int, first: int, run: list[dict[str, Any]], parting: Parting | None) -> str:
    text = f"{ranks} rank{'s' if ranks > 1 else ''}: "
    if ranks == first:
        return f"{text}{len(run)} calls"
    if parting is None:
        return f"{text}the same bits as {first} in all {len(run)} calls"
    return (
        f"{text}parts from {first} at call {parting.call}, of {parting.name}, in {parting.leaf}: "
        f"{parting.values[1]}, and {parting.values[0]} there"
    )


def _difference(parting: Parting, one: Path, other: Path) -> str:
    """Where in the leaf two runs first differ, and by how much; empty if the values were not kept."""
    a, b = (None if kept is None else _read(file, kept) for file, kept in zip((one, other), parting.kept, strict=True))
    if a is None or b is None:
        return ""
    if a.dtype != b.dtype or (a.shape != b.shape and not a.ndim == b.ndim == 1):
        return f"; it is {a.dtype} of shape {list(a.shape)} there, and {b.dtype} of shape {list(b.shape)} here"
    if a.ndim == 1:  # slices of a sharded optimizer are padded
        length = min(len(a), len(b))
        a, b = a[:length], b[:length]
    differs = (a != b) & ~((a != a) & (b != b))
    count = int(differs.sum())
    if not count:
        return "; the values are equal, in other bits (zeros of another sign, or NaNs)"
    index = [int(i) for i in differs.nonzero()[0]]
    x, y = a[tuple(index)].item(), b[tuple(index)].item()
    text = f"\n  {count} of {a.numel()} elements differ, the first at {index}: {y!r}, and {x!r} there"
    if a.dtype.is_floating_point or a.dtype.is_complex:
        most = (a.to(_wide(a.dtype)) - b.to(_wide(a.dtype))).abs()
        text += f", {abs(x - y):.3g} apart; by at most {float(most.nan_to_num().max()):.3g}"
    return text


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _read(file: Path, kept: Sequence[Any]) -> torch.Tensor:
    at, dtype, shape = kept
    count = math.prod(shape)
    empty = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    with open(f"{file}{VALUES}", "rb") as values:
        values.seek(at)
        data = bytearray(values.read(empty.nbytes))
    return torch.frombuffer(data, dtype=empty.dtype).reshape(shape) if count else empty


def _run(
    script: str, arguments: Sequence[str], ranks: int, trace: Path, stated: str
) -> tuple[int, list[dict[str, Any]]]:
    environ = {**os.environ, "SPMD_RANKS": str(ranks), "SPMD_VERIFY": str(trace), "SPMD_VERIFY_SAID": stated}
    done = subprocess.run([sys.executable, script, *arguments], env=environ, stdout=subprocess.DEVNULL, check=False)
    lines = trace.read_text().splitlines() if trace.exists() else []
    return done.returncode, [json.loads(line) for line in lines]


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Parting | None:
    """Where two runs first differ; None if they don't.

    >>> call = {"name": "step", "leaves": [["[0]", "ab", "1.0", None]]}
    >>> compare([call, call], [call, {"name": "step", "leaves": [["[0]", "cd", "1.5", None]]}])
    Parting(call=2, name='step', leaf='result[0]', values=('1.0', '1.5'), kept=(None, None))
    """
    for number, (a, b) in enumerate(zip(one, other, strict=False), 1):
        if a["name"] != b["name"] or [path for path, *_ in a["leaves"]] != [path for path, *_ in b["leaves"]]:
            return Parting(number, a["name"], "the function called, or the tree it returns", (a["name"], b["name"]))
        for (path, first, shown, kept), (_, second, also, kept_also) in zip(a["leaves"], b["leaves"], strict=True):
            if first != second:
                return Parting(number, a["name"], f"result{path}", (shown, also), (kept, kept_also))
    if len(one) != len(other):
        shorter = min(len(one), len(other))
        return Parting(shorter + 1, "a function", "the number of calls", (str(len(one)), str(len(other))))
    return None


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of ranks such as 1,2,4, got {text!r}")
    if len(set(numbers)) < max(2, len(numbers)):
        raise argparse.ArgumentTypeError(
            f"expected at least two numbers of ranks, all different, such as 1,2,4, got {text!r}: bits are compared "
            "between them"
        )
    return numbers
