"""What a rank reports of a call's results: once in full, then only what is other than in the call before.

Values that are no tensors are part of the full report. If a program changes them from call to call, a number of steps
for instance, they are told with each call's prints instead.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .. import trees
from ..pickling import objects
from ..spec import P

TELLABLE = frozenset({bool, int, float, complex, str, type(None)})
_LENGTH = struct.Struct("<I")


class Told:
    """Stands for a value that is told with each call."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutputMeta:
    """What a rank reports of one leaf of its results.

    Attributes:
        spec: None for a value that is not a tensor.
        shape: of this rank's part.
        value: the value, if it is no tensor, or `Told`; the print of a tensor whose spec was another one before.
        whole: the global shape, where the rank knows it.
        varying: axes along which replicas may differ (even if they don't this time), and why; None if there are none.
    """

    spec: P | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None
    whole: tuple[int, ...] | None = None
    varying: tuple[tuple[str, ...], str] | None = None


Outputs = tuple[Any, list[OutputMeta]]  # the results' treedef, and one for each leaf


def tensors_among(leaves: Sequence[Any], metas: Sequence[OutputMeta]) -> list[Any]:
    """The leaves that are tensors."""
    return [leaf for leaf, about in zip(leaves, metas, strict=True) if about.spec is not None]


def specs_of(metas: Sequence[OutputMeta]) -> list[P]:
    """The specs of the leaves that are tensors."""
    return [about.spec for about in metas if about.spec is not None]


def encode(treedef: Any, metas: list[OutputMeta]) -> bytes:
    """A rank's report of its results. Most ranks send equal bytes, so that they are decoded once."""
    return objects.dumps((trees.Packed(treedef), metas))


def decode_all(encoded: Sequence[bytes]) -> dict[int, Outputs]:
    """The reports of all ranks, decoded."""
    decoded: dict[bytes, Outputs] = {}
    for data in encoded:
        if data not in decoded:
            decoded[data] = pickle.loads(data)
    return {rank: decoded[data] for rank, data in enumerate(encoded)}


def told_among(metas: Sequence[OutputMeta]) -> list[int]:
    """The indices of leaves that are told with each call."""
    return [index for index, about in enumerate(metas) if about.value is Told]


def telling(prints: bytes, told: tuple[Any, ...]) -> bytes:
    """The prints of tensors, and values of `TELLABLE` types."""
    data = pickle.dumps(told)
    return b"".join((prints, data, _LENGTH.pack(len(data))))


def what_was_told(prints: bytes) -> tuple[bytes, tuple[Any, ...]]:
    """What `telling` was given."""
    end = len(prints) - _LENGTH.size
    start = end - _LENGTH.unpack_from(prints, end)[0]
    return prints[:start], pickle.loads(prints[start:end])


def with_values(metas: list[OutputMeta], prints: bytes) -> tuple[list[OutputMeta], bytes]:
    """A rank's report with the values that it has told with these prints, and the prints of its tensors alone."""
    indices = told_among(metas)
    if not indices or not prints:
        return metas, prints
    found, (prints, told) = list(metas), what_was_told(prints)
    for index, value in zip(indices, told, strict=True):
        found[index] = dataclasses.replace(metas[index], value=value)
    return found, prints
