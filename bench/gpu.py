"""All that is measured on a GPU, in one run of less than eight minutes.

    python bench/gpu.py [--quick] [folder]

Packing and unpacking of buckets against `torch._foreach_copy_` and against a plain copy of as many bytes; the whole
train step on one GPU against plain torch and against DDP on NCCL; whether a step can be captured into a CUDA graph;
and memory over 1,000 steps. Then it says of every target (`gpu_targets.py`) whether it is met, missed, or was not
measured, and why. Writes `gpu.json` and `gpu.txt` into the folder (default: bench/results). Without a GPU it says so
and exits with 1.

Every suite (`gpu_suites.py`) runs in a process of its own: if one breaks its CUDA context the next is not affected, and
one that hangs inside CUDA is killed when its time is up. Invariant: after every suite the files have all that was
measured so far, whatever happens in the next.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_targets import verdicts


@dataclasses.dataclass(frozen=True)
class Suite:
    """A generator of `gpu_suites`, and how many seconds it may take, its start included."""

    name: str
    seconds: float


SUITES = (
    Suite("environment", 40),
    Suite("packing", 80),
    Suite("capture", 50),
    Suite("memory", 60),
    Suite("transformer", 110),
    Suite("cnn", 120),
)
LIMIT = 460.0  # seconds; a suite that begins late gets what is left
MARGIN = 0.15  # of a suite's time, for it to end by itself


def command_of(suite: Suite, seconds: float, out: Path, quick: bool) -> list[str]:
    """What runs a suite: this script, which writes a line of JSON to `out` for each result."""
    more = ["--quick"] if quick else []
    return [sys.executable, __file__, str(out), "--suite", suite.name, "--seconds", str(seconds), *more]


def within(name: str, seconds: float, out: Path, quick: bool) -> None:
    """A suite, in its own process."""
    end = time.monotonic() + seconds
    import gpu_suites

    with out.open("w", buffering=1) as file:
        for key, value in getattr(gpu_suites, name)(end, quick):
            file.write(json.dumps([key, value]) + "\n")


def run(suite: Suite, limit: float, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A suite's results, how long it took, and what ended it if it did not end by itself."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "results", Path(folder) / "said"
        command = command_of(suite, limit * (1 - MARGIN), out, quick)
        with said.open("w") as file:
            environ = {**os.environ, "TMPDIR": folder}
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
            how: dict[str, Any] = {}
            try:
                if process.wait(limit):
                    how["error"] = f"exit status {process.returncode}"
            except subprocess.TimeoutExpired:
                how["error"] = f"killed after {limit:.0f} s"
            finally:
                _kill(process)
        if how:
            how["last lines"] = said.read_text(errors="replace").splitlines()[-5:]
        lines = out.read_text().splitlines() if out.exists() else []
    how["seconds"] = round(time.monotonic() - start, 1)
    return _results(lines), how


def _kill(process: subprocess.Popen) -> None:
    """End a suite and all that it started; a process that hangs in the kernel is left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        pass


def _results(lines: list[str]) -> dict[str, Any]:
    found = {}
    for line in lines:
        try:
            key, value = json.loads(line)
        except ValueError:  # it was killed as it wrote
            break
        found[key] = value
    return found


def measure(folder: Path, quick: bool, limit: float = LIMIT) -> dict[str, Any]:
    """Every suite in turn, each within its time and all within `limit`; the files are written after each."""
    start = time.monotonic()
    found: dict[str, Any] = {"quick": quick, "suites": {}}
    for suite in SUITES:
        seconds = min(suite.seconds, limit - (time.monotonic() - start))
        if seconds <= 1:
            found["suites"][suite.name] = {"error": "no time was left"}
        else:
            found[suite.name], found["suites"][suite.name] = run(suite, seconds, quick)
        if "missing" in found.get("environment", {}):
            break
        found["seconds"] = round(time.monotonic() - start, 1)
        found["targets"] = [verdict._asdict() for verdict in verdicts(found)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "gpu.txt").write_text(text_of(found))
    return found


def text_of(found: dict[str, Any]) -> str:
    """The results as people read them, as far as there are any."""
    lines = [f"{name}: {value}" for name, value in found.get("environment", {}).items()]
    lines += ["", "targets", *(f"  {verdict.text()}" for verdict in verdicts(found))]
    lines += ["", "packing: share of the bandwidth of a plain copy (median); pack, unpack, _foreach_copy_ in and out"]
    for row in found.get("packing", {}).values():
        share = row.get("share of the copy ceiling", {})
        names = ("pack", "unpack", "foreach in", "foreach out")
        shares = "  ".join(f"{share[name]:6.1%}" if name in share else "     -" for name in names)
        lines.append(f"  {row['wire']:>8} {row['MiB']:4} MiB, {row['leaves']:4} leaves: {shares}")
        lines += [f"{'':12}{name}: {its['error']}" for name, its in row.get("seconds", {}).items() if "error" in its]
        lines += [f"{'':12}{row['error']}"] if "error" in row else []
    lines += ["", "train step, milliseconds: median (quartiles)"]
    for model in ("transformer", "cnn"):
        for name, its in found.get(model, {}).items():
            if not isinstance(its, dict):
                lines.append(f"  {model:12} {name}: {its:.3f}")
            elif "error" in its:
                lines.append(f"  {model:12} {name:12} {its['error']}")
            else:
                low, middle, high = (1e3 * its[key] for key in ("quartile1", "median", "quartile3"))
                lines.append(f"  {model:12} {name:12} {middle:8.2f} ({low:.2f} to {high:.2f})")
    captured = found.get("capture", {}).get("result")
    lines += ["", f"capture into a CUDA graph: {captured or 'was not tried to the end'}"]
    lines += ["", "memory after so many steps: bytes that torch gave out, bytes of the device that nobody has"]
    for sample in found.get("memory", {}).get("samples", ()):
        lines.append(f"  {sample['step']:6} {sample['allocated']:16,} {sample['free']:16,}")
    for name, how in found["suites"].items():
        if "error" in how:
            lines += [f"suite {name}: {how['error']}", *(f"    {line}" for line in how.get("last lines", ()))]
    lines.append(f"the whole run: {found.get('seconds', 0):.0f} s")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    arguments.add_argument("--quick", action="store_true", help="small models and few rounds, to see that it runs")
    arguments.add_argument("--suite", choices=[suite.name for suite in SUITES], help=argparse.SUPPRESS)
    arguments.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.suite is not None:
        within(given.suite, given.seconds, given.folder, given.quick)
        os._exit(0)  # everything is written; shutting NCCL down is not measured, and may hang
    found = measure(given.folder, given.quick)
    missing = found.get("environment", {}).get("missing")
    if missing is not None:
        print(f"bench/gpu.py measures on a GPU, and there is none that it can use.\n{missing}", file=sys.stderr)
        print("\n".join(verdict.text() for verdict in verdicts(found)))
        return 1
    print(text_of(found), end="")
    return int(any("error" in how for how in found["suites"].values()))


if __name__ == "__main__":
    sys.exit(main())
