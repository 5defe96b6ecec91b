"""How a rank describes a collective, or a message, to its peers, and the errors for ranks that disagree."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from .callsite import call_site, warn
from .errors import CollectiveMismatch, MeshError, PeerLost, dtype_name

_EVEN = (
    ": pad them to the longest and leave the padding out afterwards, or have the batches divide "
    "(Loader(drop_last=True), and a batch_size that is a multiple of the ranks)"
)
_PERM = (
    "give all ranks the same perm, with a pair for every rank that sends: perm=[(i, (i + 1) % n) for i in range(n)], "
    "without axis_index"
)
_CALLS = 4096  # that are remembered
_MOVE = ("all_gather", "all_to_all")  # samples to other ranks, of which ranks may have unequal numbers


def word_key(*parts: object) -> int:
    """A 63-bit number for names and numbers, equal in every process: ranks compare it, or find things by it."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return struct.unpack("<Q", digest)[0] >> 1


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
            kind = "" if dtype is None else " " + dtype_name(dtype)
            text = f"{name}{kind}{'' if sizes is None else list(sizes)}{f' ({detail})' if detail else ''}"
            text += f" {label}" if label else ""
            if len(self._known) >= _CALLS:
                self._known.clear()
            known = self._known[key] = (word_key(*map(str, key[:5])), text)
        self.signature, self.text = known


def _by_rank(texts: dict[int, str]) -> str:
    """A line for each rank."""
    return "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(texts.items()))


def disagreement(ranks: Sequence[int], calls: dict[int, str]) -> CollectiveMismatch:
    """The error for ranks of a group that disagree; `calls` maps positions in the group to the calls made there."""
    sides = {ranks[position]: text for position, text in calls.items()}
    return CollectiveMismatch(
        f"ranks disagree on the next collective of group {tuple(ranks)}:{_by_rank(sides)}\n"
        "every rank of the group must make the same calls, in the same order, with the same shapes and dtypes, "
        "and dicts with the same keys in the same order"
        + (_EVEN if any(all(text.startswith(f"{name} ") for text in sides.values()) for name in _MOVE) else "")
    )


def other_calls(calls: dict[int, str]) -> CollectiveMismatch:
    """The error for ranks that are in different calls and so wait for each other; `calls` has each rank's call."""
    return CollectiveMismatch(
        f"ranks make different calls, and wait for each other:{_by_rank(calls)}\n"
        "make the same calls on all ranks, in the same order: what takes all of them (the value of an Array that "
        "is cut, put, save) on all, and what is done with it, such as print() or torch.save(), on one"
    )


def all_wait(calls: dict[int, str]) -> CollectiveMismatch:
    """The error for ranks that all wait for each other; `calls` has what each one waits in."""
    return CollectiveMismatch(
        f"all ranks wait for each other, and none goes on:{_by_rank(calls)}\n"
        "make the same calls on all ranks, in the same order, and send before you receive; what runs on some ranks "
        "only (a branch, the backward of a torch.autograd.Function that not every rank's result depends on) can't "
        "communicate"
    )


def absent(ranks: Sequence[int], rank: int, gone: int, what: str, site: str) -> CollectiveMismatch:
    """The error for a rank `gone` that has left the region while `rank` waits for its part in `what`."""
    error = CollectiveMismatch(
        f"rank {ranks[gone]} left the region without its part in {what}, for which rank {ranks[rank]} waits at {site}",
        where=f"group {tuple(ranks)}",
        remedy="every rank of the group must make the same calls, and wait for them, in the same region",
    )
    error.rank = ranks[gone]
    return error


def no_answer(ranks: Sequence[int], rank: int, what: str, seconds: float) -> PeerLost:
    """The error for a wait of `rank` that lasts too long, for a reason that it does not know."""
    return PeerLost(
        f"{what} on rank {ranks[rank]} got no answer for {seconds:g} s",
        where=f"group {tuple(ranks)}",
        remedy="see what the other ranks do, or raise the timeout (timeout= of Mesh or init_process_group)",
    )


def shut_down(ranks: Sequence[int], rank: int, gone: int, what: str) -> MeshError:
    """The error for a rank `gone` that uses the group no more, while `rank` waits for its part in `what`."""
    return MeshError(
        f"the group was shut down on rank {ranks[gone]} without its part in {what}, for which rank {ranks[rank]} waits "
        f"at {call_site()}",
        where=f"group {tuple(ranks)}",
        remedy="every rank of the group must make the same calls before any of them destroys, aborts or closes it",
    )


class Receiver(Protocol):
    """A communicator, as far as a message's receiver is named."""

    ranks: tuple[int, ...]
    rank: int


class Group(Receiver, Protocol):
    """A communicator, as far as messages name what it does."""

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
                f"{problem} {wanted}, at {group.site()}",
                where=f"group {group.ranks}",
                remedy=_PERM
                if "ppermute" in what
                else "make the shapes of both sides agree" + (_EVEN if what.startswith("all_gather") else ""),
            )


# -- messages ----------------------------------------------------------------------------------------------------------

# Of a message's stamp: the dtype that was sent, since sizes alone would let the bits of a float32 arrive as an int32;
# and the call in which it was sent, since what one call leaves behind would let the next read each message too late.
_KIND_BITS, _CALL_BITS = 16, 47
_STEPS = 1 << 16  # numbers for calls of @spmd functions within a region; of more, some share them with the next region
_KIND, _CALL = (1 << _KIND_BITS) - 1, (1 << _CALL_BITS) - 1


def _number(dtype: torch.dtype) -> int:
    return word_key("dtype", str(dtype)) & _KIND  # by name: hosts may have other versions of torch, with more dtypes


_NUMBERS = {dtype: _number(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DTYPES = {number: dtype for dtype, number in _NUMBERS.items()}


class _Here(threading.local):
    """What call of the mesh a thread is in.

    Attributes:
        call: its number, and within a `mesh.run` that of the @spmd function that is called; 0 in none, and in threads
            of the program's own. It is odd for an @spmd function, which may leave nothing for later calls.
    """

    call = 0


here = _Here()


def call_of(region: int, pure: bool) -> int:
    """The number of a region's call, odd if it is `pure`; those of steps within the region follow it."""
    return 2 * _STEPS * region + pure


def stamp_of(dtype: torch.dtype) -> int:
    """The word, of 63 bits, for a message of this thread."""
    return (here.call & _CALL) << _KIND_BITS | _NUMBERS[dtype]


def check_received(group: Receiver, source: int, tag: int, *, got: tuple[int, int], expected: tuple[int, int]) -> None:
    """Refuse a message that doesn't fit the tensor it is received into, or the call of a pure step; else warn of that.

    Args:
        got, expected: bytes and stamp, of the message and of the receive; a stamp of 0 is not compared.
    """
    (_, sent), (_, wanted) = got, expected
    if got == expected:
        return
    what = f"recv on rank {group.ranks[group.rank]} from rank {group.ranks[source]} with tag {tag}"
    is_other = bool(sent and wanted and (sent ^ wanted) & _KIND)
    if is_other or got[0] != expected[0]:
        problem = f"{what}: {'dtypes' if is_other else 'sizes'} differ"
        remedy = "receive into a tensor of the sent dtype, with as many elements, and convert it afterwards"
        got_text = f"a message of {_text(*got)}"
        raise CollectiveMismatch(problem, got=got_text, expected=_text(*expected), remedy=remedy)
    sent_in, wanted_in = sent >> _KIND_BITS, wanted >> _KIND_BITS
    if not sent_in or not wanted_in or sent_in >> 1 == wanted_in >> 1:
        return
    why = "the message was sent in one call of the mesh, and its receive was started in another"
    remedy = "receive in each call what is sent in it, and wait() there for each irecv"
    if (sent_in | wanted_in) & 1:
        raise CollectiveMismatch(f"{what}: {why}", remedy=remedy)
    # Without the tag, so that it is said once.
    warn(f"recv of mesh.comm(): {why}", remedy=f"{remedy}; if calls are to share messages, ignore this warning")


def _text(nbytes: int, stamp: int) -> str:
    if not stamp:
        return f"{nbytes} bytes"
    dtype = _DTYPES.get(stamp & _KIND)
    if dtype is None:
        return f"{nbytes} bytes of a dtype that torch {torch.__version__} lacks"
    return f"{nbytes // dtype.itemsize} elements of {dtype_name(dtype)} ({nbytes} bytes)"
