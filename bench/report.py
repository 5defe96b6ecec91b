"""The table and the plots of what was measured.

python bench/report.py        prints bench/results/*.json beside the targets, and draws the plots again
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import results
from targets import Row, rows, size_text, time_text

MARKS = {True: "yes", False: "NO", None: ""}


def text(suites: dict[str, Any]) -> str:
    """The machine, the medians with their quartiles, and the targets."""
    parts = [heading(suite) for suite in list(suites.values())[:1]]
    parts += [medians(suite) for suite in suites.values() if any("quartiles" in case for case in suite["cases"])]
    parts.append(table(["target", "measured", "wanted", "met"], [cells(row) for row in rows(suites)]))
    return "\n\n".join(parts)


def heading(suite: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {version}" for name, version in suite["versions"].items())
    machine = suite["machine"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}\n{found}\nMedians [lower quartile, upper quartile] of seconds, "
        "the slowest rank's; contenders in turn."
    )


def medians(suite: dict[str, Any]) -> str:
    """A row for every case and contender."""
    lines = []
    for case in suite["cases"]:
        what = size_text(case["case"]) if isinstance(case["case"], int) else str(case["case"]).rpartition(":")[2]
        for name, (low, middle, high) in case.get("quartiles", {}).items():
            spread = f"[{time_text(low)}, {time_text(high)}]"
            lines.append([what, str(case["ranks"]), name, time_text(middle), spread])
        lines += [[what, str(case["ranks"]), name, "missing", why] for name, why in case.get("missing", {}).items()]
    return table([suite["suite"], "ranks", "contender", "median", "quartiles"], lines)


def cells(row: Row) -> list[str]:
    return [row.what, row.measured, row.target, MARKS[row.met]]


def table(head: list[str], lines: list[list[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in [head, rule, *lines]]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def plot(suites: dict[str, Any], folder: Path) -> list[Path]:
    """Draw every suite that has a plot."""
    import plots

    return [path for name, draw in plots.PLOTS.items() if name in suites for path in draw(suites[name], folder)]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else results.FOLDER
    found = results.load(folder)
    print(text(found))
    for path in plot(found, folder):
        print(f"wrote {path}")
