"""How a rank describes a collective to its peers, and the errors for ranks that disagree."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from .errors import CollectiveMismatch, message
from .word_key import word_key

_EVEN = (
    ": pad them to the longest and leave the padding out afterwards, or have the batches divide "
    "(Loader(drop_last=True), and a batch_size that is a multiple of the ranks)"
)
_MOVE = ("all_gather", "all_to_all")  # samples to other ranks, of which ranks may have unequal numbers


class _Labels(threading.local):
    current = ""


labels = _Labels()


class labelled:
    """Label the collectives that this thread starts in a `with` block; ranks compare labels, and messages show them."""

    __slots__ = ("_before", "_label")

    def __init__(self, label: str):
        self._label = label

    def __enter__(self) -> None:
        self._before, labels.current = labels.current, self._label

    def __exit__(self, *_: object) -> None:
        labels.current = self._before


class Call:
    """A rank's description of a collective: peers compare `signature`, people read `text`.

    Args:
        shape: the tensor's shape, if it must be the same on all ranks.
        shown: this rank's shape, if ranks may differ: it is in the text, and is not compared.
    """

    __slots__ = ("signature", "text")
    _known: dict[tuple, tuple[int, str]] = {}  # noqa: RUF012 (a cache, shared on purpose)

    def __init__(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
        detail: object = "",
        *,
        shown: Sequence[int] | None = None,
    ):
        sizes = shape if shown is None else tuple(shown)
        label = labels.current
        key = (name, dtype, shape, detail, label, sizes)
        known = self._known.get(key)
        if known is None:
            kind = "" if dtype is None else " " + str(dtype).removeprefix("torch.")
            text = f"{name}{kind}{'' if sizes is None else list(sizes)}{f' ({detail})' if detail else ''}"
            text += f" {label}" if label else ""
            known = self._known[key] = (word_key(*map(str, key[:5])), text)
        self.signature, self.text = known


def _by_rank(texts: dict[int, str]) -> str:
    """A line for each rank."""
    return "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(texts.items()))


def disagreement(ranks: Sequence[int], calls: dict[int, str]) -> CollectiveMismatch:
    """The error for ranks of a group that disagree; `calls` maps positions in the group to the calls made there."""
    sides = {ranks[position]: text for position, text in calls.items()}
    return CollectiveMismatch(
        message(
            f"ranks disagree on the next collective of group {tuple(ranks)}:{_by_rank(sides)}\n"
            "every rank of the group must make the same calls, in the same order, with the same shapes and dtypes, "
            "and dicts with the same keys in the same order"
            + (_EVEN if any(all(text.startswith(f"{name} ") for text in sides.values()) for name in _MOVE) else "")
        )
    )


def other_calls(calls: dict[int, str]) -> CollectiveMismatch:
    """The error for ranks that are in different calls and so wait for each other; `calls` has each rank's call."""
    return CollectiveMismatch(
        message(
            f"ranks make different calls, and wait for each other:{_by_rank(calls)}\n"
            "make the same calls on all ranks, in the same order: what takes all of them (the value of an Array that "
            "is cut, put, save) on all, and what is done with it, such as print() or torch.save(), on one"
        )
    )


def absent(ranks: Sequence[int], rank: int, gone: int, what: str, site: str) -> CollectiveMismatch:
    """The error for a rank `gone` that has left the region while `rank` waits for its part in `what`."""
    error = CollectiveMismatch(
        message(
            f"rank {ranks[gone]} left the region without its part in {what}, "
            f"for which rank {ranks[rank]} waits at {site}",
            where=f"group {tuple(ranks)}",
            remedy="every rank of the group must make the same calls, and wait for them, in the same region",
        )
    )
    error.rank = ranks[gone]
    return error


class Group(Protocol):
    """A communicator, as far as messages name it."""

    ranks: tuple[int, ...]
    rank: int

    def site(self) -> str: ...


def check_pieces(group: Group, what: str, got: Sequence[int], expected: Sequence[int], *, first: int = 0) -> None:
    """Refuse pieces whose size doesn't fit the memory that receives them; their senders can't see that.

    Args:
        got, expected: bytes from each rank, beginning with rank `first`.
    """
    for source, (sent, wanted) in enumerate(zip(got, expected, strict=True), first):
        if sent != wanted:
            problem = f"{what}: rank {group.ranks[source]} sends {sent} bytes, rank {group.ranks[group.rank]} expects"
            raise CollectiveMismatch(
                message(
                    f"{problem} {wanted}, at {group.site()}",
                    where=f"group {group.ranks}",
                    remedy="make the shapes of both sides agree" + (_EVEN if what.startswith("all_gather") else ""),
                )
            )


def check_size(ranks: Sequence[int], rank: int, *, source: int, tag: int, got: int, expected: int) -> None:
    """Refuse a message that does not fit the tensor it is received into."""
    if got != expected:
        raise CollectiveMismatch(
            message(
                f"recv on rank {ranks[rank]} from rank {ranks[source]} with tag {tag}: sizes differ",
                got=f"a message of {got} bytes",
                expected=f"{expected} bytes",
                remedy="receive into a tensor of the sent shape and dtype",
            )
        )
