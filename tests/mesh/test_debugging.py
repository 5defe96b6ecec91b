"""`breakpoint()` in a step: the rank's debugger talks through the terminal that the program has."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import shared_server
from patience import HANGS, until
from scripts import HERE, run, script

STEP = """
import os, sys
import torch
import spmd

if __name__ == "__main__":
    mesh = spmd.Mesh({"data": 2}, timeout=float(os.environ.get("TIMEOUT", "300")))

    @spmd.spmd(mesh=mesh)
    def step(x):
        doubled = 2 * x
        breakpoint()
        total = spmd.psum(doubled + spmd.axis_index("data"), "data")
        return total

    print("result", float(step(torch.tensor(3.0))), flush=True)
    print("after", mesh.run(lambda: 5), flush=True)
"""

PASSED_BY = "passed a breakpoint by: SPMD_DEBUG_RANK names the ranks that stop (0 if unset)\n"


class Terminal:
    """A program at a terminal of its own, without what another launched rank writes there, also into a prompt."""

    def __init__(self, fd: int, process: subprocess.Popen):
        self._fd, self.process, self.shown = fd, process, ""

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until something is shown, and take all up to its end."""
        end = time.monotonic() + HANGS
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except OSError:
                    data = b""
                assert data, f"it ended without {pattern!r}: {self.shown}"
                self.shown = (self.shown + data.decode().replace("\r", "")).replace(PASSED_BY, "")
        self.shown = self.shown[found.end() :]
        return found

    def type(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    def press_ctrl_c(self) -> None:
        """Once the prompt is read from: a signal between the two interrupts no program, nothing wakes the read then."""
        assert until(self._reads)
        os.kill(self.process.pid, signal.SIGINT)

    def _reads(self) -> bool:
        call = Path(f"/proc/{self.process.pid}/syscall").read_text().split()
        return call[0] in ("0", "63") and call[1] == "0x0"  # `read` of x86-64 or aarch64, of standard input


@contextlib.contextmanager
def at_terminal(*arguments: str, **environ: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = shared_server().run(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE, "TERM": "dumb", **environ},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


TIMEOUT = 300.0
LATER = f"""
        import internals
        internals.let_time_fly(os.environ["LATER"] + str(spmd.axis_index("data")), {TIMEOUT})
        breakpoint()
"""


def long_after(later: Path) -> None:
    """A rank that waits has found several timeouts gone."""
    later.touch()
    assert until(lambda: not later.exists())


def test_breaking_printing_stepping_and_going_on(tmp_path: Path) -> None:
    program, later = script(tmp_path, STEP.replace("        breakpoint()\n", LATER)), tmp_path / "later"
    with at_terminal(program, TIMEOUT=str(TIMEOUT), LATER=str(later)) as terminal:
        terminal.expect(r"total = spmd.psum.*\n\(Pdb rank 0\) ")
        terminal.type("p doubled")
        terminal.expect(r"tensor\(6\.\)\n\(Pdb rank 0\) ")
        long_after(tmp_path / "later1")  # rank 1 waits in the psum
        terminal.type("doubled = doubled + 1")
        terminal.expect(r"\(Pdb rank 0\) ")
        terminal.type("n")
        terminal.expect(r"return total\n\(Pdb rank 0\) ")
        terminal.type("print(float(total))")
        terminal.expect(r"14\.0\n\(Pdb rank 0\) ")
        terminal.type("n")
        terminal.expect(r"--Return--")
        terminal.expect(r"\(Pdb rank 0\) ")
        terminal.type("n")
        terminal.expect(r"result 14\.0\n")
        terminal.expect(r"after \[5, 5\]\n")
        assert terminal.process.wait(HANGS) == 0


def test_two_ranks_talk_one_after_the_other(tmp_path: Path) -> None:
    program = STEP.replace("import spmd\n", "import spmd, internals\ninternals.keep_the_turn(5.0)\n")
    with at_terminal(script(tmp_path, program), SPMD_DEBUG_RANK="all") as terminal:
        ranks = []
        for _ in range(2):
            rank = int(terminal.expect(r"\(Pdb rank (\d)\) ")[1])
            ranks.append(rank)
            terminal.type("p spmd.axis_index('data')")
            assert int(terminal.expect(r"\n(\d)\n\(Pdb rank \d\) ")[1]) == rank
            terminal.type("c")
        assert sorted(ranks) == [0, 1]
        terminal.expect(r"result 13\.0\n")


def test_a_rank_that_waits_for_another_gives_it_the_turn(tmp_path: Path) -> None:
    with at_terminal(script(tmp_path, STEP), SPMD_DEBUG_RANK="0,1") as terminal:
        first = int(terminal.expect(r"\(Pdb rank (\d)\) ")[1])
        terminal.type("n")  # into the psum, for which the other is needed
        assert int(terminal.expect(r"\(Pdb rank (\d)\) ")[1]) == 1 - first
        terminal.type("c")
        terminal.expect(rf"return total\n\(Pdb rank {first}\) ")
        terminal.type("c")
        terminal.expect(r"result 13\.0\n")


def test_leaving_by_q_ends_the_call_alone(tmp_path: Path) -> None:
    program = STEP.replace('    print("result", float(step(torch.tensor(3.0))), flush=True)', QUIT)
    with at_terminal(script(tmp_path, program)) as terminal:
        terminal.expect(r"\(Pdb rank 0\) ")
        terminal.type("q")
        terminal.expect(r"ended by BdbQuit\n")
        terminal.expect(r"after \[5, 5\]\n")


QUIT = """    try:
        float(step(torch.tensor(3.0)))
    except BaseException as error:
        print("ended by", type(error).__name__, flush=True)
"""


def test_ctrl_c_at_the_prompt(tmp_path: Path) -> None:
    program = STEP.replace('    print("result", float(step(torch.tensor(3.0))), flush=True)', QUIT)
    with at_terminal(script(tmp_path, program)) as terminal:
        terminal.expect(r"\(Pdb rank 0\) ")
        terminal.press_ctrl_c()
        terminal.expect(r"ended by KeyboardInterrupt\n")
        terminal.expect(r"after \[5, 5\]\n")


def test_without_a_terminal_it_ends_with_a_sentence(tmp_path: Path) -> None:
    code, out, err = run(script(tmp_path, STEP), text="")
    assert code == 1 and "result" not in out
    assert "MeshError: the debugger at a breakpoint came to the end of its input" in err and "at (data=0)" in err
    code, out, err = run(script(tmp_path, STEP), env={"PYTHONBREAKPOINT": "0"})
    assert code == 0 and "result 13.0" in out, err


@pytest.mark.parametrize("chosen", ["", pytest.param("1", marks=pytest.mark.long)])
def test_under_a_launcher_the_chosen_rank_stops(tmp_path: Path, chosen: str) -> None:
    forked, rank = str(Path(HERE) / "forked.py"), int(chosen or 0)
    program, later = script(tmp_path, STEP.replace("        breakpoint()\n", LATER)), tmp_path / "later"
    environ = {"SPMD_DEBUG_RANK": chosen, "TIMEOUT": str(TIMEOUT), "LATER": str(later)}
    with at_terminal(forked, "2", program, **environ) as terminal:
        terminal.expect(rf"\(Pdb rank {rank}\) ")
        terminal.type("p spmd.axis_index('data')")
        terminal.expect(rf"\n{rank}\n\(Pdb rank {rank}\) ")
        long_after(tmp_path / f"later{1 - rank}")
        terminal.type("c")
        terminal.expect(r"result 13\.0\n")
        terminal.expect(r"result 13\.0\n")
        assert terminal.process.wait(HANGS) == 0


def test_a_rank_that_is_no_number_is_refused(tmp_path: Path) -> None:
    code, _, err = run(script(tmp_path, STEP), env={"SPMD_DEBUG_RANK": "first"})
    assert code == 1 and "SPMD_DEBUG_RANK is no rank" in err and "several with commas, or all" in err
