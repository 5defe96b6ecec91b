"""Collectives are counted where a body asks for a communicator: it gets one that notes what it is asked for.

A driver asks its ranks to count with the call itself (`ambient.Ambient.counting`), and for what they have counted
afterwards. Invariant: where nobody counts, communicators are handed out as they are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...kernels.torch_private import in_backward


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One operation of a communicator.

    Attributes:
        operation: as a communicator calls it: `psum` is an all_reduce, `ppermute` an all_to_all.
        axes: of the mesh, along which the ranks that took part differ.
        bytes: of what this rank gave to it.
        backward: it ran in a backward pass, or sums gradients.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    backward: bool


class Counts:
    """Collectives in the order in which they were started, with what they come to."""

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
        """How many there were of each operation."""
        return dict(collections.Counter(one.operation for one in self._collectives))

    @property
    def bytes(self) -> int:
        """What this rank gave to all of them together."""
        return sum(one.bytes for one in self._collectives)

    @property
    def axes(self) -> dict[str, int]:
        """How many there were along each axis of the mesh; one along several counts for each."""
        return dict(collections.Counter(name for one in self._collectives for name in one.axes))

    @property
    def forward(self) -> Counts:
        """Those of forward passes."""
        return Counts(one for one in self._collectives if not one.backward)

    @property
    def backward(self) -> Counts:
        """Those of backward passes, with the sums of gradients."""
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
        counting: what it notes collectives in.
        asked: what those of its calls are to be noted in; not what the library does around their bodies.
        meshes: to whose ranks such calls have gone.
    """

    counting: tuple[Counts, ...] = ()
    asked: tuple[Counts, ...] = ()
    meshes: tuple[Any, ...] = ()


thread = _Thread()
_kept = Counts()  # on a driver's rank: of the calls that were to be counted


@contextlib.contextmanager
def counted_in(*counts: Counts) -> Iterator[None]:
    """Note this thread's collectives."""
    before = thread.counting
    thread.counting = (*before, *counts)
    try:
        yield
    finally:
        thread.counting = before


@contextlib.contextmanager
def asked_in(*counts: Counts) -> Iterator[None]:
    """Note those of calls in these, and in no others."""
    before, thread.asked = thread.asked, counts
    try:
        yield
    finally:
        thread.asked = before


def body_counted() -> contextlib.AbstractContextManager[None]:
    """Around a body that is to be counted: for who has asked, on a launched rank, or for the driver, which will ask."""
    return counted_in(*(thread.asked or [_kept]))


def take() -> tuple[Collective, ...]:
    """What this rank has counted for its driver since it was last asked."""
    global _kept
    taken, _kept = _kept, Counts()
    return taken.collectives


def note_mesh(mesh: Any) -> None:
    """Note that a call goes to the ranks of a driver's mesh, which count it."""
    thread.meshes = (*(one for one in thread.meshes if one is not mesh), mesh)


def taken_meshes() -> tuple[Any, ...]:
    """Those noted since this was last asked."""
    found, thread.meshes = thread.meshes, ()
    return found


# -- the communicator --------------------------------------------------------------------------------------------------


def _all(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors or ())


# By method: the operation, and the bytes that this rank gives to it.
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
    """A communicator that notes what it is asked for; see `kernels.communicator.Communicator`.

    Args:
        axes: along which its ranks differ.
        of_gradients: it sums gradients.
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
            one = Collective(operation, self._axes, nbytes(*args, **kwargs), backward)
            for counts in self._in:
                counts.note(one)
            return found(*args, **kwargs)

        return call
