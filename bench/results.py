"""The results' JSON: one file a suite, with the machine and the versions that it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("spmd", "torch", "numpy", "jax", "mpi4py")


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=20).stdout
        found["mpirun"] = said.splitlines()[0] if said else "unknown"
    except (OSError, subprocess.TimeoutExpired):
        found["mpirun"] = "not installed"
    return found


def save(suite: str, cases: list[dict[str, Any]], folder: Path = FOLDER, **more: Any) -> Path:
    """Write `folder/suite.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}.json"
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {"suite": suite, "measured": now, "machine": machine(), "versions": versions(), **more, "cases": cases}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def load(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """All suites that were measured, by name; without what `gpu.py` writes there, which has another form."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: suite for name, suite in found.items() if "cases" in suite}
