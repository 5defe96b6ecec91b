"""What the notebooks draw: what each rank has before and after a collective, and what pipeline stages do when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from IPython.display import HTML, display

from spmd import Mesh

COLOURS = ["#f2a0a0", "#f2d28c", "#9fd8a6", "#9cc3f0"]
STAGES = ["#f2a0a0", "#f2c48c", "#ece08a", "#9fd8a6", "#9cc3f0", "#c9a6ee"]


def mine(rank: int) -> torch.Tensor:
    """Four numbers of a rank, each a power of two of its own: a sum of any tells which are in it."""
    return 2 ** torch.arange(4 * rank, 4 * rank + 4)


def on(mesh: Mesh) -> Callable[..., list]:
    """`draw(title, f, mesh=mesh)`: call `f(mine(rank))` on the ranks, and draw what went in and what came out."""

    def draw(title: str, f: Callable[[Any], Any], mesh: Mesh = mesh) -> list:
        results = mesh.run(lambda: f(mine(mesh.rank)))
        look = "text-align:left;padding:4px 14px;font:13px/24px monospace;white-space:nowrap"
        cell = f"<td style='{look};color:#111;background:#fff'>"
        rows = "".join(
            f"<tr>{cell}rank {rank}</td>{cell}{row(mine(rank))}</td>{cell}→</td>{cell}{row(result)}</td></tr>"
            for rank, result in enumerate(results)
        )
        display(HTML(f"<b><code>{title}</code></b><table>{rows}</table>"))
        return results

    return draw


def row(tensor: torch.Tensor) -> str:
    lines = [tensor] if tensor.dim() < 2 else tensor
    return "<br>".join(" ".join(chip(int(n)) for n in line.reshape(-1)) for line in lines)


def chip(number: int) -> str:
    """One number as the sources that are summed in it, striped in their ranks' colours."""
    sources = [bit for bit in range(16) if number >> bit & 1]
    stripes = [COLOURS[bit // 4] for bit in sources] or ["#f4f4f4"]
    ends = [100 * i // len(stripes) for i in range(len(stripes) + 1)]
    steps = ",".join(f"{colour} {a}% {b}%" for colour, a, b in zip(stripes, ends, ends[1:], strict=False))
    name = "+".join("abcd"[bit // 4] + str(bit % 4) for bit in sources) or "0"
    return f"<b style='padding:2px 5px;margin:1px;background:linear-gradient(90deg,{steps})'>{name}</b>"


def timeline(ticks: Sequence[Sequence[int | None]]) -> HTML:
    """A row for each stage: the number of the microbatch that it works on at each tick, or None."""
    cell = "<td style='text-align:center;min-width:2.2em;color:#111;background:{}'>{}</td>"
    rows = "".join(
        f"<tr><td>stage {stage}</td>"
        + "".join(cell.format("#eee", "") if n is None else cell.format(STAGES[n], n) for n in log)
        + "</tr>"
        for stage, log in enumerate(ticks)
    )
    head = "".join(f"<td>{tick}</td>" for tick in range(len(ticks[0])))
    return HTML(f"<table><tr><td>tick</td>{head}</tr>{rows}</table>")
