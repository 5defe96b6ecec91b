"""A rank without samples whose function can't run on none (batch norm refuses an empty batch, for one).

It contributes nothing, so all it needs is what the others' results look like. Where fewer samples than ranks make this
possible, the ranks tell each other before the gradients are summed. A rank that has started a collective cannot be
excused: its peers are waiting in it.
"""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ..kernels.errors import SpmdError
from ..mesh import trees
from ..mesh.region import Region
from ._arguments import is_inexact


def possible(region: Region, over: tuple[str, ...]) -> bool:
    """Whether some rank has no samples; the same answer on all ranks."""
    sizes = region.session.layout.axes
    return any(total < sizes[name] for name, (_, total) in region.totals.items() if name in over)


def stand_in(region: Region, over: tuple[str, ...], failed: Exception | None, result: Any) -> Any:
    """`result`, or on a rank that has `failed` a twin of another rank's, zeros for its floats.

    Raises:
        Exception: `failed`, if no other rank can help.
    """
    comm = region.session.comm(over)
    try:
        flags = [torch.empty(1, dtype=torch.bool) for _ in range(comm.size)]
        comm.all_gather(flags, torch.tensor([failed is not None]))
        if not any(flags):
            return result
        able = [index for index, flag in enumerate(flags) if not flag]
        mine = cloudpickle.dumps(trees.map(blank, result)) if able and able[0] == comm.rank else b""
        described = comm.all_gather_bytes(mine)
    except SpmdError:
        if failed is not None:
            raise failed from None
        raise
    if failed is None:
        return result
    if not able:
        raise failed
    twin = pickle.loads(described[able[0]])
    return trees.map(lambda leaf: region.session.placed(leaf) if isinstance(leaf, Tensor) else leaf, twin)


def blank(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return 0.0
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if is_inexact(leaf) else _detached(leaf)


def _detached(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf
