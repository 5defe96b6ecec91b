"""A rank without samples, whose function fails on an empty batch (batch norm refuses one, for example).

Such a rank contributes nothing, so all it needs to know is what the other ranks' results look like. Where there may be
ranks without samples, all ranks tell each other whether their function failed, before the gradients are summed. An
error after a collective has started is raised all the same: the other ranks are waiting in that collective.
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
from ._backward import Plain
from ._call import Call, Output
from ._tokens import started


class EmptyShards(Plain):
    """`Plain`, where some rank may have no samples and fail to evaluate the function."""

    def evaluate(self, call: Call) -> Output:
        assert call.region is not None
        failed, out, before = None, None, started()
        try:
            out = call.evaluate(call.args, call.kwargs)
        except Exception as error:
            if call.weight(call.over)[1] or started() > before:
                raise
            failed = error
        return _stand_in(call.region, call.over, failed, out)


def _stand_in(region: Region, over: tuple[str, ...], failed: Exception | None, out: Output | None) -> Output:
    """`out`; on a rank that has `failed`, a copy of another rank's, with zeros for floats, on the same devices.

    Raises:
        Exception: `failed`, if no other rank can help.
    """
    comm = region.session.comm(over)
    try:
        own = [failed is None, comm.rank if failed is None else comm.size]
        none_failed, able = comm.all_reduced(torch.tensor(own, device="cpu"), "min")
        if none_failed and out is not None:
            return out
        able = int(able)  # the first rank that can help
        parts = _parts(out)
        on_host = [isinstance(leaf, Tensor) and leaf.is_cpu for leaf in trees.leaves(parts)]
        mine = cloudpickle.dumps((trees.map(blank, parts), on_host)) if able == comm.rank else b""
        described = comm.all_gather_bytes(mine)
    except SpmdError:
        if failed is not None:
            raise failed from None
        raise
    if out is not None:
        return out
    assert failed is not None
    if able == comm.size or not described[able]:  # nobody; `check` has no other ranks
        raise failed
    parts, on_host = pickle.loads(described[able])
    leaves, treedef = trees.flatten(parts)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not on_host[index]:
            leaves[index] = region.session.on_device(leaf)
    return Output(*trees.unflatten(treedef, leaves))


def _parts(out: Output | None) -> tuple[Any, ...]:
    return () if out is None else (out.value, out.count, out.aux)


def blank(leaf: Any) -> Any:
    if isinstance(leaf, float):
        return 0.0
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu") if is_inexact(leaf) else _detached(leaf)


def _detached(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf
