"""What launched ranks are given that all must be given alike: each has made its own, and may have made another.

A `DataLoader` that shuffles without a seed gives every rank other batches, of which each would then take its part.
Compared on the schedule of results (`replication.values`): numbers on every call, tensors on calls 1, 2, 4, 8, ...
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from ...kernels.errors import SpecError, message
from ..agreement import path_in
from ..failure import ranks_text
from ..program import InputPlan, describe_path
from ..replication.values import Check, same_bytes, shown, tensor_print

# What is compared of values that are no tensors; of an object nobody knows whether it should be the same.
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})

Given = tuple[tuple[Any, bytes | None], ...]  # of each replicated leaf: of what kind it is, and what is compared of it


class ReplicatedInputs:
    """The arguments of calls of one signature that every rank passes whole.

    Args:
        treedef: of (args, kwargs).
    """

    def __init__(self, treedef: Any, plan: InputPlan, name: str):
        self._treedef, self._name = treedef, name
        self._tensors = [index for index, leaf in enumerate(plan.leaves) if leaf.kind == "tensor"]
        self._values = [index for index, leaf in enumerate(plan.leaves) if leaf.kind == "value"]

    def prints(self, values: list[Any], check: Check) -> Given:
        """What is to be compared of the leaves of a call."""
        if not check:
            return ()
        found: list[tuple[Any, bytes | None]] = []
        for index in self._tensors:
            tensor = values[index]
            looked_at = check >= Check.VALUES or (tensor.numel() == 1 and not tensor.is_cuda)
            found.append(((tuple(tensor.shape), tensor.dtype), tensor_print(tensor) if looked_at else None))
        for index in self._values:
            value = values[index]
            plain = type(value) in _PLAIN
            found.append((type(value).__name__, pickle.dumps(value) if plain else None))
        return tuple(found)

    def compare(self, gathered: list[bytes], where: str) -> None:
        """Refuse what was not given alike.

        Args:
            gathered: of each rank its pickled `prints`.
        """
        given: list[Given] = [pickle.loads(data) for data in gathered]
        if len({len(one) for one in given}) > 1:
            got = "; ".join(f"{ranks_text([rank])}: {len(one)} leaves" for rank, one in enumerate(given))
            raise _differ(f"the arguments of {self._name}", got, where)
        for position, index in enumerate([*self._tensors, *self._values] if given[0] else []):
            kind, printed = given[0][position]
            shape = kind[0] if isinstance(kind, tuple) else ()
            if any(one[position][0] != kind or not same_bytes(printed, one[position][1], shape) for one in given):
                got = "; ".join(f"{ranks_text([rank])}: {_show(*one[position])}" for rank, one in enumerate(given))
                what = f"{describe_path(path_in(self._treedef, index))} of {self._name}"
                raise _differ(what, got, where)


def _differ(what: str, got: str, where: str) -> SpecError:
    return SpecError(
        message(
            f"{what} should be the same on all ranks, and is not",
            got=got,
            where=where,
            remedy="give every rank the same: seed what is drawn (torch.manual_seed(0) before a model is made), have a "
            "DataLoader shuffle with one seed (generator=torch.Generator().manual_seed(0)), or take spmd.Loader",
        )
    )


def _show(kind: Any, printed: bytes | None) -> str:
    if isinstance(kind, str):
        return kind if printed is None else repr(pickle.loads(printed))[:60]
    shape, dtype = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}" if printed is None else shown(printed, shape, dtype)


def number_of(given: Given, prints: bytes) -> int:
    """A number that is the same on all ranks if what they tell is."""
    if not given and not prints:
        return 0
    state = hashlib.blake2b(prints, digest_size=8)
    for kind, printed in given:
        state.update(repr(kind).encode())
        state.update(printed or b"")
    return int.from_bytes(state.digest(), "little") >> 2
