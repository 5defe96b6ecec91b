"""What a machine with GPUs shows, on one page to send back: `make gpu` runs this.

    python bench/gpu_page.py --is-there    whether there is a GPU: says so in one sentence if not, and exits with 1
    python bench/gpu_page.py --extra       which extra of this package fits the installed torch: cuda12 or cuda13
    python bench/gpu_page.py               tests on GPUs, `spmd doctor` and bench/gpu.py; writes bench/results/gpu.md

Invariant: the page gives the outcome of every test and every target, also of those that did not run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def missing_gpu() -> str:
    """Why there is no GPU here; "" if there is one. Asks the driver alone, so that nothing need be installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not on the PATH"
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 and "GPU " in done.stdout else "nvidia-smi lists none"


def extra() -> str:
    """The extra for the installed torch; "" if that is built without CUDA."""
    import torch

    cuda = torch.version.cuda
    return "" if cuda is None else "cuda13" if cuda.startswith("13") else "cuda12"


def tests() -> tuple[dict[str, list[str]], str]:
    """The tests on GPUs by outcome, each with the reason; and the last line of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "gpu", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["pytest said nothing"])[-1]
        return (outcomes(report.read_text()) if report.exists() else {}), last


def outcomes(report: str) -> dict[str, list[str]]:
    """Tests of a report of pytest's, by outcome.

    >>> outcomes('<suite><testcase name="a"/><testcase name="b"><skipped message="no GPU"/></testcase></suite>')
    {'passed': ['a'], 'skipped': ['b: no GPU']}
    """
    found: dict[str, list[str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        what, text = "passed", case.get("name", "?")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                what = "skipped" if child.tag == "skipped" else "failed"
                text += f": {(child.get('message') or '').splitlines()[0] if child.get('message') else ''}"
        found.setdefault(what, []).append(text)
    return found


def page(found: dict[str, Any], ran: dict[str, list[str]], last: str, doctor: str) -> str:
    """The page, in markdown."""
    lines = ["# On GPUs", "", "## Versions", ""]
    lines += [f"* {name}: {value}" for name, value in found.get("environment", {}).items()] or ["* unknown"]
    lines += ["", "## Tests", "", f"`pytest -m gpu tests/gpu`: {last}", ""]
    for what in ("passed", "failed", "skipped"):
        lines.append(f"* {what}: {len(ran.get(what, ()))}")
        lines += [f"  * {text}" for text in ran.get(what, ()) if what != "passed"]
    lines += ["", "## Targets", "", "| | what | figure | target |", "|---|---|---|---|"]
    for verdict in found.get("targets", ()):
        lines.append(f"| {verdict['verdict']} | {verdict['what']} | {verdict['figure']} | {verdict['target']} |")
    if not found.get("targets"):
        lines.append("| not measured | all | bench/gpu.py ended without results | |")
    return "\n".join([*lines, "", "## `spmd doctor`", "", "```", doctor.strip(), "```", ""])


def main(arguments: list[str]) -> int:
    why = missing_gpu()
    if why:
        print(f"make gpu needs a machine with an NVIDIA GPU, and this one has none that can be used: {why}.")
        return 1
    if arguments == ["--is-there"]:
        return 0
    if arguments == ["--extra"]:
        fits = extra()
        print(fits or "make gpu needs a build of torch for CUDA: install one (see pytorch.org), and run it again.")
        return 0 if fits else 1
    ran, last = tests()
    results = RESULTS / "gpu.json"
    results.unlink(missing_ok=True)  # an earlier run's
    measured = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu.py"), str(RESULTS)]).returncode
    found = json.loads(results.read_text()) if results.exists() else {}
    doctor = subprocess.run(
        [sys.executable, "-m", "spmd", "doctor"], cwd=ROOT / "tests", capture_output=True, text=True
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "gpu.md").write_text(page(found, ran, last, doctor.stdout + doctor.stderr))
    print(f"written: {RESULTS / 'gpu.md'}")
    return int(bool(ran.get("failed")) or not ran or measured != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
