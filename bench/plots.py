"""The plots: latency and bandwidth against size, step times as bars, and how times grow with ranks and parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from targets import best, size_text

Record = dict[str, Any]


def all_reduce(suite: Record, folder: Path) -> list[Path]:
    """Time per call, and bytes a second, against size; a figure for every number of ranks."""
    made = []
    for ranks in sorted({case["ranks"] for case in suite["cases"]}):
        cases = sorted((c for c in suite["cases"] if c["ranks"] == ranks), key=lambda case: case["case"])
        sizes = [case["case"] for case in cases]
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for name in cases[0]["quartiles"]:
            low, middle, high = zip(*(case["quartiles"][name] for case in cases), strict=True)
            (line,) = left.plot(sizes, middle, marker="o", markersize=3, label=name)
            left.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
            right.plot(sizes, [s / t for s, t in zip(sizes, middle, strict=True)], marker="o", markersize=3)
        for axes, what in ((left, "seconds per call (median, quartiles)"), (right, "bytes a second")):
            axes.set(xscale="log", yscale="log", xlabel="bytes of float32", ylabel=what)
            axes.grid(alpha=0.3)
        for axes in (left, right):
            axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60, fontsize=8)
            axes.minorticks_off()
        left.legend(fontsize=8)
        figure.suptitle(f"all-reduce, {ranks} ranks on {suite['machine']['cores']} cores: {suite['machine']['cpu']}")
        made.append(save(figure, folder / f"all_reduce_{ranks}.png"))
    return made


def train_step(suite: Record, folder: Path) -> list[Path]:
    """Step times as bars, one panel for every model."""
    made = []
    for ranks in sorted({case["ranks"] for case in suite["cases"]}):
        cases = [case for case in suite["cases"] if case["ranks"] == ranks]
        figure, panels = plt.subplots(
            1, len(cases), figsize=(max(8, 4 * len(cases)), 4.5), layout="constrained", squeeze=False
        )
        for axes, case in zip(panels[0], cases, strict=True):
            names = list(case["quartiles"])[::-1]
            low, middle, high = zip(*([1e3 * x for x in case["quartiles"][name]] for name in names), strict=True)
            fastest = {pair[0] for start in ("ours", "ddp") if (pair := best(case, start)) is not None}
            colours = ["C0" if name.startswith("ours") else "C1" if name.startswith("ddp") else "C7" for name in names]
            errors = [
                [m - x for x, m in zip(low, middle, strict=True)],
                [x - m for x, m in zip(high, middle, strict=True)],
            ]
            bars = axes.barh(names, middle, xerr=errors, color=colours)
            for bar, name in zip(bars, names, strict=True):
                bar.set_alpha(1.0 if name in fastest or not name.startswith(("ours", "ddp")) else 0.5)
            axes.set(title=case["case"].rpartition(":")[2], xlabel="ms per step (median, quartiles)")
            axes.tick_params(axis="y", labelsize=7)
        figure.suptitle(f"train step, {ranks} ranks on {suite['machine']['cores']} cores: {suite['machine']['cpu']}")
        made.append(save(figure, folder / f"train_step_{ranks}.png"))
    return made


def scaling(suite: Record, folder: Path) -> list[Path]:
    """All-reduce and step times for growing ranks; points are measured, lines are the fitted model's."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, (work, size_of) in zip(panels, (("all_reduce", "bytes"), ("train_step", "parameters")), strict=True):
        points = [case for case in suite["cases"] if case["work"] == work]
        for number, ranks in enumerate(sorted({case["ranks"] for case in points})):
            mine = sorted((c for c in points if c["ranks"] == ranks), key=lambda case: case["size"])
            sizes = [case["size"] for case in mine]
            axes.plot(
                sizes,
                [c["median"] for c in mine],
                "o",
                markersize=4,
                color=f"C{number}",
                label="1 rank" if ranks == 1 else f"{ranks} ranks",
            )
            axes.plot(sizes, [c["predicted"] for c in mine], color=f"C{number}", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=size_of, ylabel="seconds", title=work.replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"points: medians; lines: the fitted model ({suite['machine']['cores']} cores)")
    return [save(figure, folder / "scaling.png")]


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


PLOTS: dict[str, Callable[[Record, Path], list[Path]]] = {
    "all_reduce": all_reduce,
    "train_step": train_step,
    "scaling": scaling,
}
