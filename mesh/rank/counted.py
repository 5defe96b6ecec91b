"""Counting collectives: while somebody counts, a body that asks for a communicator gets one that notes its calls.

A driver's call asks the ranks to count (`ambient.Ambient.counting`), and afterwards the driver asks for the counts.
Invariant: if nobody counts, communicators are handed out as they are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...kernels.torch_private import in_backward


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One operation of a communicator.

    Attributes:
        operation: the communicator's name for it: `psum` is an all_reduce, `ppermute` an all_to_all.
        axes: the mesh axes along which the participating ranks differ.
        bytes: what this rank contributed.
        backward: whether it ran in a backward pass, or sums gradients.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    backward: bool


# Each step of a program that counts makes the same ones as the step before.
_collective = functools.lru_cache(maxsize=1024)(Collective)


class Counts:
    """Collectives in the order in which they were started, with totals."""

    def __init__(self, collectives: Iterable[Collective] = ()):
        self._collectives = list(collectives)

    def note(self, collective: Collective) -> None:
        self._collectives.append(collective)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them."""
        return tuple(self._collectives)

    @property
    def operations(self) -> dict[str, int]:
        """The number of collectives of each operation."""
        return dict(collections.Counter(one.operation for one in self._collectives))

    @property
    def bytes(self) -> int:
        """The bytes that this rank contributed to all of them together."""
        return sum(one.bytes for one in self._collectives)

    @property
    def axes(self) -> dict[str, int]:
        """The number of collectives along each mesh axis; one along several axes counts for each of them."""
        return dict(collections.Counter(name for one in self._collectives for name in one.axes))

    @property
    def forward(self) -> Counts:
        """The collectives of forward passes."""
        return Counts(one for one in self._collectives if not one.backward)

    @property
    def backward(self) -> Counts:
        """The collectives of backward passes, including sums of gradients."""
        return Counts(one for one in self._collectives if one.backward)

    def __len__(self) -> int:
        return len(self._collectives)

    def __repr__(self) -> str:
        each = ", ".join(f"{name} x{count}" for name, count in self.operations.items())
        along = ", ".join(f"{name} x{count}" for name, count in self.axes.items())
        return (
            f"Counts({each or 'no collectives'}; {self.bytes} bytes; along {along or 'no axis'}; "
            f"{len(self.forward)} forward, {len(self.backward)} backward)"
        )


# -- who counts --------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """What a thread counts.

    Attributes:
        counting: where its communicators note collectives now.
        asked: where the collectives of its calls' bodies are to be noted (not those of the library around the bodies).
        meshes: the driver's meshes that such calls have gone to.
    """

    counting: tuple[Counts, ...] = ()
    asked: tuple[Counts, ...] = ()
    meshes: tuple[Any, ...] = ()


thread = _Thread()
_kept: dict[int, Counts] = {}  # on a driver's rank: collectives of the calls that a thread of the driver wants counted


@contextlib.contextmanager
def counted_in(*counts: Counts) -> Iterator[None]:
    """In the block, note this thread's collectives in `counts`, too."""
    before = thread.counting
    thread.counting = (*before, *counts)
    try:
        yield
    finally:
        thread.counting = before


@contextlib.contextmanager
def asked_in(*counts: Counts) -> Iterator[None]:
    """In the block, note the collectives of this thread's calls in `counts` only."""
    before, thread.asked = thread.asked, counts
    try:
        yield
    finally:
        thread.asked = before


def body_counted(caller: int) -> contextlib.AbstractContextManager[None]:
    """Around a body to be counted: on a launched rank for whoever asked, on a driver's rank until its thread asks."""
    return counted_in(*(thread.asked or [_kept.setdefault(caller, Counts())]))


def is_counting() -> bool:
    """Whether collectives of this thread that are no body's communicator's, but a torch group's, are to be noted."""
    return bool(thread.counting or thread.asked)


def note(operation: str, axes: tuple[str, ...], nbytes: int) -> None:
    """Note one of those."""
    one = _collective(operation, axes, nbytes, in_backward())
    for counts in thread.counting or thread.asked:
        counts.note(one)


def take(caller: int) -> tuple[Collective, ...]:
    """What this rank has counted for a thread of its driver since that last asked."""
    return _kept.pop(caller, Counts()).collectives


def note_mesh(mesh: Any) -> None:
    """Note that a call goes to the ranks of a driver's mesh, which count it."""
    thread.meshes = (*(one for one in thread.meshes if one is not mesh), mesh)


def taken_meshes() -> tuple[Any, ...]:
    """The meshes noted since the last call of this function."""
    found, thread.meshes = thread.meshes, ()
    return found


# -- the communicator --------------------------------------------------------------------------------------------------


def _all(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors or ())


# Method -> the operation, and the bytes that this rank contributes.
_OPERATIONS: dict[str, tuple[str, Callable[..., int]]] = {
    "all_reduce": ("all_reduce", lambda tensor, *_, **__: tensor.nbytes),
    "all_reduced": ("all_reduce", lambda tensor, *_, **__: tensor.nbytes),
    "sum_of_products": (
        "all_reduce",
        lambda rows, columns, dtype, given, **_: given.nbytes if isinstance(given, Tensor) else _all(given),
    ),
    "can_rewrite": ("all_reduce", lambda result: 16),
    "reduce": ("reduce", lambda tensor, *_, **__: tensor.nbytes),
    "broadcast": ("broadcast", lambda tensor, *_, **__: tensor.nbytes),
    "gather": ("gather", lambda tensor, *_, **__: tensor.nbytes),
    "scatter": ("scatter", lambda tensor, scatter_list=None, *_, **__: _all(scatter_list)),
    "all_gather": ("all_gather", lambda tensor_list, tensor, **_: tensor.nbytes),
    "all_gathered": ("all_gather", lambda length, dtype, *_, **__: length * dtype.itemsize),
    "all_gather_bytes": ("all_gather", lambda data: len(data)),
    "reduce_scatter": ("reduce_scatter", lambda output, input_list, *_, **__: _all(input_list)),
    "all_to_all": ("all_to_all", lambda output_list, input_list, **_: _all(input_list)),
    "barrier": ("barrier", lambda **_: 0),
    "send": ("send", lambda tensor, *_, **__: tensor.nbytes),
    "isend": ("send", lambda tensor, *_, **__: tensor.nbytes),
    "recv": ("recv", lambda *_, **__: 0),
    "irecv": ("recv", lambda *_, **__: 0),
}


class CountedCommunicator:
    """A communicator that notes which operations are called; see `kernels.communicator.Communicator`.

    Args:
        axes: along which its ranks differ.
        of_gradients: whether it sums gradients.
    """

    def __init__(self, comm: Any, axes: tuple[str, ...], of_gradients: bool):
        self._counted, self._axes, self._of_gradients, self._in = comm, axes, of_gradients, thread.counting

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._counted, name)
        if name not in _OPERATIONS:
            return found
        operation, nbytes = _OPERATIONS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            backward = self._of_gradients or in_backward()
            one = _collective(operation, self._axes, nbytes(*args, **kwargs), backward)
            for counts in self._in:
                counts.note(one)
            return found(*args, **kwargs)

        return call
