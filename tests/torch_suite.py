"""torch's own tests of `torch.distributed`, as its wheel ships them, run on the backend "spmd" beside Gloo.

    python tests/torch_suite.py --ranks 2 3 4                    # both backends, and what differs
    python tests/torch_suite.py --backends spmd --only barrier   # those with "barrier" in the name

The suite decides by name what a backend can do. So for "spmd" the questions "is it Gloo?" and "does it have CPU
all_to_all, as MPI has?" are answered with yes, and tests that assert the name "gloo" itself are left out: each of them
is in `NAMED`, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import types
import unittest
import warnings
from typing import Any

import torch
import torch.distributed as dist

# Tests that pass on Gloo and can't on any backend of another name.
NAMED: dict[str, str] = {}


def suite(backend: str) -> types.ModuleType:
    """The wheel's suite for a backend."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    if backend != "gloo":
        for old, new in (
            ('BACKEND != "gloo"', f'BACKEND not in ("gloo", "{backend}")'),
            ('BACKEND != "mpi", "Only MPI supports', f'BACKEND not in ("mpi", "{backend}"), "Only MPI supports'),
            ('@require_backend_is_available({"gloo"})', ""),
            ('BACKEND == "mpi" or BACKEND == "gloo"', f'BACKEND in ("mpi", "gloo", "{backend}")'),
            ("PROFILING_SUPPORTED_BACKENDS = [", f'PROFILING_SUPPORTED_BACKENDS = ["{backend}",'),
        ):
            assert old in source, f"the suite of this torch does not say {old}"
            source = source.replace(old, new)
        if int(os.environ["WORLD_SIZE"]) > 2:  # they need three ranks, and are left out below eight
            source = source.replace("@skip_if_small_worldsize\n        def test_all_to_all", "def test_all_to_all")
    module = types.ModuleType("distributed_suite")
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Calls the group's own, since `dist.monitored_barrier` accepts only a backend called "gloo"."""
    if dist.get_rank(group) >= 0:
        seconds = datetime.timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or dist.group.WORLD).monitored_barrier(seconds, wait_all_ranks)


def run(backend: str, size: int, only: str) -> dict[str, str]:
    """Run the suite at one size, in this process; returns the outcome of each test."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(size), TEMP_DIR=tempfile.mkdtemp(), INIT_METHOD="env://")
    if importlib.util.find_spec("expecttest") is None:  # torch's tests are written with it, these don't use it
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases

    import spmd.torch_distributed.creation  # noqa: F401 (before the forks

    torch.set_num_threads(1)
    for feature in ("ddp", "subgroup", "gpu", "plugin"):
        DistTestCases.backend_feature[feature].add(backend)
    module = suite(backend)
    if backend != "gloo":
        dist.monitored_barrier = monitored_barrier

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            # Forks: nothing has computed here, and importing torch takes longer than most of the tests.
            self._start_processes(multiprocessing.get_context("fork").Process)

    found: dict[str, str] = {}
    skips = {skip.exit_code for skip in TEST_SKIPS.values()}
    assert skips
    for name in unittest.TestLoader().getTestCaseNames(Suite):
        if only not in name:
            continue
        began, result = time.monotonic(), unittest.TestResult()
        Suite(name).run(result)
        if result.skipped:
            found[name] = "skipped"
        elif result.errors or result.failures:
            found[name] = "failed"
            print(f"-- {name}\n{(result.errors or result.failures)[0][1][-3000:]}", file=sys.stderr, flush=True)
        else:
            found[name] = "passed"
        if found[name] != "skipped":
            print(f"{found[name]} {name} {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return found


def compare(sizes: list[int], backends: list[str], only: str) -> bool:
    """Print what passes on each backend, and where they differ; whether all that passes on Gloo does on "spmd"."""
    good = True
    for size in sizes:
        found: dict[str, dict[str, str]] = {}
        for backend in backends:
            command = [sys.executable, __file__, "--inner", backend, "--ranks", str(size), "--only", only]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            found[backend] = dict(line.split() for line in done.stdout.splitlines() if line.startswith("test_"))
            counts = {kind: list(found[backend].values()).count(kind) for kind in ("passed", "failed", "skipped")}
            print(f"{size} ranks, {backend}: {counts}", flush=True)
            for name in sorted(name for name, kind in found[backend].items() if kind == "failed"):
                print(f"    failed: {name}{f' ({NAMED[name]})' if name in NAMED and backend != 'gloo' else ''}")
        if len(found) == 2:
            gloo, ours = (found[backend] for backend in ("gloo", "spmd"))
            less = [name for name, kind in gloo.items() if kind == "passed" != ours.get(name)]
            more = [name for name, kind in ours.items() if kind == "passed" != gloo.get(name)]
            for name in less:
                print(f"    on Gloo only: {name} ({NAMED.get(name, 'not explained')})")
                good = good and name in NAMED
            print(f"    on spmd only: {len(more)}: {', '.join(more)}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--backends", nargs="+", default=["gloo", "spmd"])
    parser.add_argument("--only", default="", help="a part of the names of the tests to run")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner is None:
        sys.exit(not compare(arguments.ranks, arguments.backends, arguments.only))
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    with contextlib.redirect_stdout(io.StringIO()):
        found = run(arguments.inner, arguments.ranks[0], arguments.only)
    for name, kind in found.items():
        print(name, kind)


if __name__ == "__main__":
    main()
