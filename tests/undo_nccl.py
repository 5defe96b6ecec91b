"""Undo the fixes in the use of NCCL one at a time, and check that the tests notice: `python undo_nccl.py`.

The fake and the product were written together, so passing tests say little about either. Here each fix is taken out of
a copy of the tree by replacing a few lines, and its tests run against the copy: they have to fail, for the reason
given, and to pass in a copy from which nothing was taken out. Prints the table in gpu/found.md; the exit status is 1 if
a line of it is not as it should be. Takes about two minutes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "mesh", "transforms")  # of which `spmd` is made, beside its own folder
SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Undo:
    """One fix, and how it is taken out.

    Attributes:
        point: its number in gpu/found.md.
        what: what happens without the fix.
        edits: file, text that is there once, and what takes its place.
        tests: those that have to fail, as pytest names them.
        because: a part of the message that each of them then gives.
    """

    point: int
    what: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]
    because: str


MESSAGES, CHANNELS, GROUPS = (f"kernels/test_{name}.py" for name in ("nccl_messages", "nccl", "nccl_group"))
THERE_AFTER_WAIT = f"{MESSAGES}::test_what_is_received_is_there_after_wait"
UNDOS = (
    Undo(
        1,
        "the first message connects, in the thread that sends it",
        (("kernels/cuda/nccl_pairs.py", "            if abandoned():\n", "            if True:\n"),),
        (f"{MESSAGES}::test_first_messages_that_cross",),
        "waits inside NCCL to connect",
    ),
    Undo(
        2,
        "the stream that is current when a message is put waits for it, and `wait()` for nothing",
        (
            (
                "kernels/cuda/nccl_messages.py",
                "        lanes.given(direction, after)\n",
                "        lanes.given(direction, after)\n        channel.streams.wait(after)\n",
            ),
            (
                "kernels/cuda/nccl_work.py",
                "        if event is not None:\n            self._channel.streams.wait(event)\n",
                "",
            ),
        ),
        (f"{THERE_AFTER_WAIT}[False]", f"{THERE_AFTER_WAIT}[True]"),
        "is not ordered after NCCL's launch",
    ),
    Undo(
        3,
        "the stream that is current when a message is put waits for it",
        (
            (
                "kernels/cuda/nccl_messages.py",
                "        lanes.given(direction, after)\n",
                "        lanes.given(direction, after)\n        channel.streams.wait(after)\n",
            ),
        ),
        (f"{MESSAGES}::test_a_message_under_way_holds_up_no_collective",),
        "the GPUs wait for each other",
    ),
    Undo(
        4,
        "what to keep is looked for in the frame of the generator",
        (
            (
                "kernels/cuda/nccl.py",
                "        with self.streams.beside() if async_op else contextlib.nullcontext():\n"
                "            value = self._through(what, steps)\n",
                "        kept = dict(steps.gi_frame.f_locals)\n"
                "        with self.streams.beside() if async_op else contextlib.nullcontext():\n"
                "            value = self._through(what, steps)\n",
            ),
            (
                "kernels/cuda/nccl.py",
                "self.channel.collectives, what, event, work)",
                "self.channel.collectives, what, event, kept)",
            ),
        ),
        (f"{MESSAGES}::test_what_an_operation_works_on_lives_until_it_is_over[1]",),
        "False",
    ),
    Undo(
        5,
        "every file whose name begins with `libnccl` is a libnccl",
        (("kernels/cuda/nccl_library.py", r"/libnccl\.so[.\d]*)$", r"/libnccl[^/\s]*)$"),),
        (f"{CHANNELS}::test_plugins_are_no_second_libnccl",),
        "assert ['/opt/amazon",
    ),
    Undo(
        6,
        "streams for messages without a bound",
        (("kernels/cuda/lanes.py", "self._streams.new()) if len(self._of) < MOST else None", "self._streams.new())"),),
        (
            f"{MESSAGES}::test_directions_share_no_stream_while_they_are_under_way",
            f"{MESSAGES}::test_more_messages_than_streams",
        ),
        "assert",
    ),
    Undo(
        6,
        "side streams are taken from torch's 32",
        (
            (
                "kernels/cuda/streams.py",
                "    external = torch.cuda.ExternalStream(stream.ptr, device=device)\n",
                "    external = torch.cuda.Stream(device)\n",
            ),
        ),
        ("kernels/test_cuda_streams.py::test_side_streams_are_nobody_else_s",),
        "assert not",
    ),
    Undo(
        7,
        "ranks that share a GPU may take as many blocks as they like",
        (("kernels/cuda/nccl_library.py", '{_SHARE: "1", "NCCL_MAX_CTAS": "4"}', '{_SHARE: "1"}'),),
        (
            "gpu/test_shared_gpu.py::test_the_tests_give_ranks_of_one_gpu_few_blocks",
            "library/test_cli.py::test_nccl_is_tried_on_gpus",
        ),
        "",
    ),
    Undo(
        7,
        "`spmd doctor` does not hand that on to the process that tries",
        (("spmd/cli/doctor.py", "env={**os.environ, **environ}, capture_output", "capture_output"),),
        ("library/test_cli.py::test_two_ranks_on_one_gpu_are_told_to_share_it",),
        "",
    ),
    Undo(
        8,
        "twenty runs a sample, however many launches",
        (("bench/gpu_times.py", "max(1, min(20, QUEUE // launches))", "20"),),
        (
            "library/test_gpu_bench.py::test_what_is_timed_fits_the_queue_of_launches[177]",
            "library/test_gpu_bench.py::test_contenders_say_how_many_launches_they_make",
        ),
        "< 1000",
    ),
    Undo(
        8,
        "all contenders pass for one launch",
        (("bench/gpu_suites.py", 'len(lengths) if contender.startswith("foreach") else 1', "1"),),
        ("library/test_gpu_bench.py::test_contenders_say_how_many_launches_they_make",),
        "< 1000",
    ),
    Undo(
        9,
        "an end waits for nobody",
        (
            (
                "kernels/cuda/nccl_connection.py",
                "            self._changed.wait_for(lambda: not self._waiting)\n"
                "            self._changed.wait_for(lambda: not self._inside, JOIN_SECONDS)\n",
                "            pass\n",
            ),
        ),
        (
            f"{GROUPS}::test_an_end_waits_for_who_is_inside",
            f"{GROUPS}::test_nothing_is_freed_under_a_call_that_connects",
        ),
        "is inside'] == []",
    ),
)


def copied(folder: Path, edits: Sequence[tuple[str, str, str]] = ()) -> Path:
    """A copy of the tree in which the package can be imported as users' is, with these edits."""
    hidden = shutil.ignore_patterns("__pycache__", ".*", "results")
    for name in ("tests", "bench", "spmd"):
        shutil.copytree(ROOT / name, folder / name, ignore=hidden)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "spmd" / name, ignore=hidden)
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "tests" / "conftest.py").open("a") as file:  # it is this copy's package that the tests import
        file.write(f"\nimport spmd.kernels\nassert spmd.kernels.__path__ == [{str(folder / 'spmd' / 'kernels')!r}]\n")
    for name, old, new in edits:
        path = folder / ("spmd" if name.partition("/")[0] in PACKAGES else "") / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))
    return folder


def outcomes(tree: Path, tests: Sequence[str]) -> dict[str, str]:
    """For each test, "passed" or its message."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "1000", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree / "tests", env=environ, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, "did not end")
    said = dict.fromkeys(tests, f"did not run: {(done.stdout.splitlines() or [done.stderr])[-1]}")
    for verdict, test, reason in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)(?: - (.*))?$", done.stdout, re.MULTILINE):
        name = test.removeprefix("tests/")
        if name in said:
            said[name] = "passed" if verdict == "PASSED" else reason
    return said


def main() -> int:
    began, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        everything = sorted({test for undo in UNDOS for test in undo.tests})
        whole = outcomes(copied(Path(folder) / "whole"), everything)
        print("| point | without the mending | test | says then | with it |\n|---|---|---|---|---|", flush=True)
        for number, undo in enumerate(UNDOS):
            without = outcomes(copied(Path(folder) / str(number), undo.edits), undo.tests)
            for test in undo.tests:
                says = without[test]
                right = undo.because in says and says != "passed" and whole[test] == "passed"
                wrong += not right
                cells = undo.point, undo.what, f"`{test.partition('::')[2]}`", says, whole[test]
                print("|", " | ".join(map(str, cells)), "|" if right else "| WRONG |", flush=True)
    print(f"\n{wrong} lines are wrong; {time.monotonic() - began:.0f} s", file=sys.stderr)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
