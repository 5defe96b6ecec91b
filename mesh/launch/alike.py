"""Comparing what every launched rank should be given alike, since each rank makes its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.errors import SpecError, kind_text
from ..batch import Deal
from ..failure import ranks_text
from ..replication.values import Check, flag_in, same_bytes, shown, tensor_print

# Types of non-tensor values that are compared, besides flags; of others it isn't known whether they should be the same.
PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})

# First the keys of all leaves, then for each leaf its kind, and its print.
Given = tuple[tuple[Any, bytes | None], ...]

SEED = (
    "give every rank the same: seed what is drawn (torch.manual_seed(0) before a model is made), have a DataLoader "
    "shuffle with one seed (generator=torch.Generator().manual_seed(0)), or take spmd.Loader; choose among results by "
    "what is the same on all ranks, and not by the time, say"
)
WHOLE = (
    "give every rank the same whole value, of which put takes the rank's part (torch.manual_seed(0) before it is "
    "drawn); what is each rank's own comes from an @spmd function, with out_specs"
)
_ORDER = "make dicts with their keys in one order on all ranks, as sorted(...) gives it"


def given_tensor(tensor: torch.Tensor, *, looked_at: bool = True) -> tuple[Any, bytes | None]:
    """The kind and the print of a tensor; no print unless it is `looked_at`."""
    return (tuple(tensor.shape), tensor.dtype), tensor_print(tensor) if looked_at else None


def given_argument(leaf: Any, check: Check) -> tuple[Any, bytes | None]:
    """The kind and the print of an argument; tensors of several elements have one only where `check` asks for it."""
    if isinstance(leaf, torch.Tensor):
        return given_tensor(leaf, looked_at=check >= Check.VALUES or (leaf.numel() == 1 and not leaf.is_cuda))
    if type(leaf) in PLAIN:
        return type(leaf).__name__, pickle.dumps(leaf)
    flag = flag_in(leaf)
    return type(leaf).__name__, None if flag is None else pickle.dumps(flag)


def refuse_differing(
    gathered: Sequence[bytes], all_of_them: str, leaf: Callable[[int], str], where: str, remedy: str
) -> None:
    """Refuse leaves that are not the same on all ranks.

    Args:
        gathered: what each rank was given, a pickled `Given`.
        all_of_them, leaf: what messages call all leaves together, and each by its number.
        remedy: what to do about a leaf.
    """
    given: list[Given] = [pickle.loads(data) for data in gathered]
    keys = [one[0][0] if one else None for one in given]
    if len(set(keys)) > 1:
        got = "; ".join(f"{ranks_text([rank])}: {one or 'a bare leaf'}" for rank, one in enumerate(keys))
        raise _differ(f"the keys of {all_of_them}", got, where, _ORDER)
    for number, (kind, printed) in enumerate(given[0][1:]):
        shape = kind[0] if isinstance(kind, tuple) else ()
        theirs = [one[number + 1] for one in given]
        if any(other != kind or not same_bytes(printed, its, shape) for other, its in theirs):
            got = "; ".join(f"{ranks_text([rank])}: {_show(*one)}" for rank, one in enumerate(theirs))
            raise _differ(leaf(number), got, where, remedy)


def refuse_other_batches(deals: Sequence[Deal | None], name: str, where: str) -> None:
    """Refuse a batch whose parts on the ranks do not belong together.

    Args:
        deals: how a `Loader` dealt each rank's part.
        name: of the function that is called.
    """
    told = [None if deal is None else (deal.position, deal.source) for deal in deals]
    if len(set(told)) > 1:
        got = "; ".join(f"{ranks_text([rank])}: {_show_batch(one)}" for rank, one in enumerate(deals))
        remedy = (
            "give every rank's Loader the same arguments and a dataset of the same length, and have all ranks load or "
            "restore its position, and iterate over it"
        )
        raise _differ(f"the batch of {name}", got, where, remedy)


def _show_batch(deal: Deal | None) -> str:
    return "of no Loader" if deal is None else "epoch {}, step {} of Loader({})".format(*deal.position, deal.source)


def _differ(what: str, got: str, where: str, remedy: str) -> SpecError:
    return SpecError(f"{what} should be the same on all ranks, and is not", got=got, where=where, remedy=remedy)


def _show(kind: Any, printed: bytes | None) -> str:
    if isinstance(kind, str):
        return kind if printed is None else repr(pickle.loads(printed))[:60]
    shape, dtype = kind
    return kind_text(dtype, shape) if printed is None else shown(printed, shape, dtype)
