"""The plots: latency and bandwidth against size, step times as bars, and how times grow with ranks and parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from targets import size_text

Record = dict[str, Any]
# What the plots call the contenders of the suites, for readers who have only the plots.
SHOWN = {
    "ours, in the arena, given up": "spmd, a buffer that its sum replaces (gradients)",
    "ours, in the arena, kept": "spmd, a buffer in shared memory, kept",
    "ours, in the arena, overwritten": "spmd, a buffer in shared memory, in place",
    "ours, any tensor": "spmd, any tensor",
    "gloo": "Gloo",
    "gloo, placed as woken": "Gloo, ranks not bound to cores",
    "open mpi": "Open MPI",
    "adding alone": "the additions alone",
}
# Those of the train step: first what a program runs without options, then the rest. `optimizer` shards and fuses by
# default.
DEFAULTS = {"ours, sharded, fused": "spmd", "ddp": "DDP", "one process": "one process", "jax": "JAX"}
OPTIONS = {
    "ours, sharded, fused, donated": "spmd, donated",
    "ours, fused, donated": "spmd, replicated, donated",
    "ours": "spmd, replicated, not fused",
    "ours, donated": "spmd, replicated, not fused, donated",
    "ours, from a driver, sharded, fused, donated": "spmd, donated, from a driver",
    "ours, from a driver": "spmd, replicated, not fused, from a driver",
    "ddp, foreach": "DDP, foreach",
    "ddp, fused": "DDP, fused",
}


def all_reduce(suite: Record, folder: Path) -> list[Path]:
    """Time per call, and bytes a second, against size; a figure for every number of ranks."""
    made = []
    for ranks in sorted({case["ranks"] for case in suite["cases"]}):
        cases = sorted((c for c in suite["cases"] if c["ranks"] == ranks), key=lambda case: case["case"])
        sizes = [case["case"] for case in cases]
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
        for name in cases[0]["quartiles"]:
            low, middle, high = zip(*(case["quartiles"][name] for case in cases), strict=True)
            (line,) = left.plot(sizes, middle, marker="o", markersize=3, label=SHOWN.get(name, name))
            left.fill_between(sizes, low, high, alpha=0.2, color=line.get_color())
            right.plot(sizes, [s / t for s, t in zip(sizes, middle, strict=True)], marker="o", markersize=3)
        for axes, what in ((left, "seconds per call (median, quartiles)"), (right, "bytes a second")):
            axes.set(xscale="log", yscale="log", xlabel="bytes of float32", ylabel=what)
            axes.grid(alpha=0.3)
        for axes in (left, right):
            axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60, fontsize=8)
            axes.minorticks_off()
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        figure.suptitle(f"all-reduce, {ranks} ranks on {suite['machine']['cores']} cores: {suite['machine']['cpu']}")
        made.append(save(figure, folder / f"all_reduce_{ranks}.png"))
    return made


def train_step(suite: Record, folder: Path) -> list[Path]:
    """Step times as bars, one panel for every model: default settings on top, in dark; below them the others."""
    made = []
    for ranks in sorted({case["ranks"] for case in suite["cases"]}):
        cases = [case for case in suite["cases"] if case["ranks"] == ranks]
        columns = min(2, len(cases))
        rows = -(-len(cases) // columns)
        figure, panels = plt.subplots(
            rows, columns, figsize=(6 * columns, 3.6 * rows), layout="constrained", squeeze=False
        )
        for axes in panels.flat[len(cases) :]:
            axes.remove()
        for axes, case in zip(panels.flat, cases, strict=False):
            defaults = [name for name in DEFAULTS if name in case["quartiles"]]
            others = [name for name in (*OPTIONS, *case["quartiles"]) if name in case["quartiles"]]
            names = list(dict.fromkeys([*defaults, *others]))[::-1]
            low, middle, high = zip(*([1e3 * x for x in case["quartiles"][name]] for name in names), strict=True)
            colours = ["C0" if name.startswith("ours") else "C1" if name.startswith("ddp") else "C7" for name in names]
            errors = [
                [m - x for x, m in zip(low, middle, strict=True)],
                [x - m for x, m in zip(high, middle, strict=True)],
            ]
            bars = axes.barh(range(len(names)), middle, xerr=errors, color=colours)
            for bar, name in zip(bars, names, strict=True):
                bar.set_alpha(1.0 if name in defaults else 0.5)
            if defaults:
                axes.axhline(len(names) - len(defaults) - 0.5, color="0.3", linewidth=0.8)
            axes.set(title=case["case"].rpartition(":")[2], xlabel="ms per step (median, quartiles)")
            axes.set_yticks(range(len(names)), [(DEFAULTS | OPTIONS).get(name, name) for name in names])
            axes.tick_params(axis="y", labelsize=7)
        figure.suptitle(f"train step, {ranks} ranks on {suite['machine']['cores']} cores: {suite['machine']['cpu']}")
        made.append(save(figure, folder / f"train_step_{ranks}.png"))
    return made


def scaling(suite: Record, folder: Path) -> list[Path]:
    """All-reduce and step times for growing ranks; points are measured, lines are the fitted model's."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
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
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
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
