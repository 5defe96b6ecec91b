"""Drawings of meshes and of values on them, as text and HTML: which rank is where, and which rank holds what.

A drawing is a `Grid` of cells; `text` and `html` render it. Nothing here touches a rank or a value.
"""

from __future__ import annotations

import colorsys
import dataclasses
import html as escape
import itertools
from collections.abc import Callable, Sequence

from ..failure import ranks_text
from ..spec import RAGGED, Layout, P


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Cells in rows, with a label for each row and column. A cell is its text and ranks; the first rank colours it."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[tuple[str, tuple[int, ...]]]]]


# Ranks; a larger mesh is described in one line.
MOST_DRAWN = 64
# Ids of samples of one rank in one step; of more only the number is given.
MOST_IDS = 8


def mesh_grids(layout: Layout, title: str, hosts: Sequence[str] = ()) -> list[Grid]:
    """The ranks of a mesh by coordinates: the last axis across, the one before down, a grid for each place on the rest.

    Args:
        hosts: each rank's host, if there are several.
    """
    names, axes = layout.names, layout.axes
    across = names[-1]
    down = names[-2] if len(names) > 1 else None
    rest = names[:-2]
    grids = []
    for fixed in itertools.product(*(range(axes[name]) for name in rest)):
        at = dict(zip(rest, fixed, strict=True))
        where = ", ".join(f"{name}={index}" for name, index in at.items())
        rows = []
        for row in range(axes[down] if down else 1):
            cells: list[tuple[str, tuple[int, ...]]] = []
            for column in range(axes[across]):
                coords = {**at, across: column, **({down: row} if down else {})}
                rank = layout.rank(coords)
                cells.append((f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}", (rank,)))
            rows.append((f"{down}={row}" if down else "", cells))
        columns = [f"{across}={column}" for column in range(axes[across])]
        grids.append(Grid(f"{title}{f' at {where}' if where else ''}", columns, rows))
    return grids


def array_grid(layout: Layout, spec: P, shape: tuple[int, ...], title: str) -> Grid:
    """Which ranks hold which part of a value; the first two dimensions are drawn, cuts of others are in the title."""
    cuts = [layout.parts(spec.dim_axes(dim)) for dim in range(len(shape))]
    tall = cuts[0] if shape else 1
    wide = cuts[1] if len(shape) > 1 else 1
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(layout.size):
        row = layout.part(rank, spec.dim_axes(0)) if shape else 0
        column = layout.part(rank, spec.dim_axes(1)) if len(shape) > 1 else 0
        holders.setdefault((row, column), []).append(rank)
    spans = [_spans(layout, spec, shape, dim) for dim in range(min(2, len(shape)))]
    rows = []
    for row in range(tall):
        cells = [(ranks_text(holders[row, column]), tuple(holders[row, column])) for column in range(wide)]
        rows.append((spans[0][row] if shape else "", cells))
    columns = spans[1] if len(shape) > 1 else [""]
    hidden = [f"dim {dim} in {cuts[dim]}" for dim in range(2, len(shape)) if cuts[dim] > 1]
    return Grid(f"{title}{', cut further: ' + ', '.join(hidden) if hidden else ''}", columns, rows)


def batch_grid(layout: Layout | None, steps: int, shard: Callable[[int, int, int], list[int]], title: str) -> Grid:
    """Which ranks take which samples of some minibatches; just the minibatches if there is no mesh.

    Args:
        layout: the mesh's axes, or None; batches are cut along its batch axis.
        steps: how many minibatches are drawn, from step 0 on.
        shard: `shard(step, part, parts)` gives the sample ids of one part.
    """
    if layout is None:
        return Grid(title, [""], [(f"step {step}", [(_ids(shard(step, 0, 1)), ())]) for step in range(steps)])
    axis = layout.batch_axis
    parts = layout.axes[axis]
    ranks = [tuple(rank for rank in range(layout.size) if layout.coords(rank)[axis] == part) for part in range(parts)]
    rows = []
    for step in range(steps):
        rows.append((f"step {step}", [(_ids(shard(step, part, parts)), ranks[part]) for part in range(parts)]))
    return Grid(title, [ranks_text(list(group)) for group in ranks], rows)


def _ids(ids: list[int]) -> str:
    shown = " ".join(map(str, ids[:MOST_IDS]))
    return shown if len(ids) <= MOST_IDS else f"{shown} … ({len(ids)})"


def _spans(layout: Layout, spec: P, shape: tuple[int, ...], dim: int) -> list[str]:
    found: dict[int, str] = {}
    for rank in range(layout.size):
        cuts = layout.slices(shape, spec, rank)
        cut = cuts[dim] if dim < len(cuts) else slice(0, shape[dim])
        found[layout.part(rank, spec.dim_axes(dim))] = f"{cut.start}:{'?' if cut.stop == RAGGED else cut.stop}"
    return [found[part] for part in sorted(found)]


def text(grid: Grid) -> str:
    """A grid as text.

    >>> print(text(mesh_grids(Layout((("data", 2), ("model", 2))), "Mesh")[0]))
    Mesh
             model=0   model=1
    data=0   rank 0    rank 1
    data=1   rank 2    rank 3
    """
    left = max((len(label) for label, _ in grid.rows), default=0)
    widths = [
        max(len(grid.columns[column]), 0, *(len(cells[column][0]) for _, cells in grid.rows))
        for column in range(len(grid.columns))
    ]
    lines = [grid.title]
    if any(grid.columns):
        lines.append(_line("", left, grid.columns, widths))
    lines.extend(_line(label, left, [name for name, _ in cells], widths) for label, cells in grid.rows)
    return "\n".join(lines)


def _line(label: str, left: int, cells: list[str], widths: list[int]) -> str:
    padded = [label.ljust(left)] if left else []
    return "   ".join(padded + [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]).rstrip()


def html(grids: list[Grid], size: int) -> str:
    """Grids as one HTML fragment; a rank has the same colour everywhere on a mesh of `size` ranks."""
    parts = []
    for grid in grids:
        head = "".join(f"<th style='{_HEAD}'>{escape.escape(column)}</th>" for column in grid.columns)
        body = "".join(
            f"<tr style='background:none'><th style='{_HEAD}'>{escape.escape(label)}</th>"
            + "".join(
                f"<td style='{_CELL}background:{_colour(ranks, size)}'>{escape.escape(name)}</td>"
                for name, ranks in cells
            )
            + "</tr>"
            for label, cells in grid.rows
        )
        parts.append(
            f"<div style='margin:4px 0'><code>{escape.escape(grid.title)}</code>"
            f"<table style='border-collapse:collapse;margin:4px 0'><tr><th></th>{head}</tr>{body}</table></div>"
        )
    return "".join(parts)


_HEAD = "font-weight:normal;color:#777;padding:2px 8px;text-align:center"
_CELL = "border:1px solid #fff;padding:6px 12px;text-align:center;color:#111;"


def _colour(ranks: tuple[int, ...], size: int) -> str:
    """A light colour with a hue for each rank; cells that several ranks hold are paler."""
    if not ranks:
        return "#eeeeee"
    red, green, blue = colorsys.hls_to_rgb(ranks[0] / max(1, size), 0.78 if len(ranks) == 1 else 0.88, 0.65)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
