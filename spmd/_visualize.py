"""`visualize`: draw where things are: the ranks of a mesh, the shards of values, the samples of minibatches."""

from __future__ import annotations

import sys
from typing import Any

from .data.loader import Loader
from .kernels.callsite import public
from .kernels.errors import SpecError
from .mesh import trees
from .mesh.array import Array
from .mesh.display import drawing
from .mesh.display.notebook import shell
from .mesh.mesh import Mesh, nearest
from .transforms import Sampler


@public
def visualize(value: Any, *, mesh: Mesh | None = None, epoch: int = 0) -> None:
    """Draw where a value is: in colours in a notebook, else in characters on standard output.

    >>> with Mesh({"data": 2, "model": 2}) as mesh:
    ...     visualize(put(torch.zeros(4, 6), P("data", "model"), mesh=mesh))
    Array(float32[4, 6], P('data', 'model'), Mesh({'data': 2, 'model': 2}, backend='shm', device='cpu'))
          0:3      3:6
    0:2   rank 0   rank 1
    2:4   rank 2   rank 3

    Args:
        value: an Array or a tree of them (which rank holds what), a Sampler or a Loader (which rank takes which
            sample), or a Mesh.
        mesh: for a Sampler: whose ranks share the minibatches. None is the enclosing or default mesh, else the newest.
        epoch: of a Sampler or a Loader.

    Raises:
        SpecError: nothing in the value is on a mesh.
    """
    grids, size = _grids(value, mesh, epoch)
    if shell() is None:
        print("\n".join(map(drawing.text, grids)))
    else:
        display = sys.modules["IPython"].display
        display.display(display.HTML(drawing.html(grids, size)))


def _grids(value: Any, mesh: Mesh | None, epoch: int) -> tuple[list[drawing.Grid], int]:
    if isinstance(value, Mesh):
        return drawing.mesh_grids(value.layout, value.describe()), value.size
    if isinstance(value, Loader):
        return value.grids(epoch)
    if isinstance(value, Sampler):
        mesh = mesh or nearest()
        return value.grids(None if mesh is None else mesh.layout, epoch)
    named = zip(trees.paths(value), trees.leaves(value), strict=True)
    arrays = [(path, leaf) for path, leaf in named if isinstance(leaf, Array)]
    if not arrays:
        raise SpecError(
            "visualize got nothing that is on a mesh",
            got=type(value).__name__,
            expected="an Array, a tree of Arrays, a Sampler, a Loader or a Mesh",
        )
    return [array.grid(f"{path} " if path else "") for path, array in arrays], arrays[0][1].mesh.size
