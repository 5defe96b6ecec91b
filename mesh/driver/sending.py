"""Packing a program's objects for the ranks: values on the mesh travel as names, the rest as bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...kernels.errors import MeshError
from ...kernels.torch_private import in_torch_func
from .. import protocol, wire
from ..ambient import made_within_torch_func
from ..array import Array
from ..pickling.sendable import packed
from ..pickling.unpicklable import unpicklable_among
from ..protocol import Spans
from ..remote.handle import Remote, named
from ..remote.reference import Ref
from ..spec import P
from .pending import Make
from .session_view import Session
from .values import CallValues, Values


def content(session: Session, obj: Any, parts: Callable[[], Iterable[tuple[str, Any]]]) -> wire.Packet:
    """What a program has passed, packed to be sent.

    Args:
        parts: gives its pieces, with what to call each; asked if it can't be sent.
    """
    try:
        return session.dumps(obj)
    except wire.Unsendable as error:
        if in_torch_func():
            raise made_within_torch_func(session.describe()) from None
        found = unpicklable_among(parts(), session.whole)
        raise MeshError(
            f"a call cannot be sent to the ranks, because of {found or f'an argument: {error}'}",
            where=session.describe(),
            remedy="pass what it is made of, or make it inside the function",
        ) from None


def dumps(
    values: Values,
    obj: Any,
    names: list[Any] | None,
    *,
    allocate: Callable[[int], memoryview] | None = None,
    held: Sequence[Array] = (),
    in_step: bool = False,
) -> wire.Packet:
    """Pickle for the ranks; raises `Unsendable`, or the error of a value in it.

    Args:
        names: a list to which the names used in the pickle are added.
        allocate, in_step: see `wire.dumps`.
        held: Arrays whose values are passed with each call.
    """
    numbers = {id(array): number for number, array in enumerate(held)}
    names = [] if names is None else names

    def name_of(one: Any) -> Any:
        name = _name_of(values, one, numbers)
        if name is not None:
            names.append(name)
        return name

    packet = packed(obj, name_of, allocate=allocate, in_step=in_step)
    packet.values = {name[1] for name in names if name[0] == "array"}
    return packet


def _name_of(values: Values, obj: Any, held: Mapping[int, int]) -> Any:
    """The name under which an object is sent; None if the object itself is sent."""
    session, mesh = values.session, values.session.mesh
    if isinstance(obj, Remote | Ref):
        return named(obj, session.node.caller)
    if isinstance(obj, Array):
        obj.check_readable()
        source = obj._source
        if not isinstance(source, CallValues) or obj.mesh is not mesh:
            raise MeshError(
                "an Array of another mesh was passed",
                got=repr(obj),
                expected=f"one on {session.describe()}",
                remedy="move it with put(array.full(), mesh=...)",
            )
        source.check(session)
        if id(obj) in held:
            return ("held", held[id(obj)], tuple(obj.hint().shape), source.number, obj._index)
        source.restore(obj._index)
        source.named[obj._index] = weakref.ref(obj)
        return ("array", source.number, obj._index, tuple(source.meta(obj._index).shape))
    if type(obj) is not type(mesh):
        return None
    if obj is not mesh:
        raise MeshError(
            "a function refers to another mesh than the one it runs on",
            got=obj.describe(),
            expected=session.describe(),
            remedy="pass what it needs of that mesh, such as its size, as an argument",
        )
    return ("mesh",)


def put_message(
    session: Session, values: CallValues, tensors: Sequence[torch.Tensor], specs: tuple[P, ...]
) -> tuple[Make, Callable[[], wire.Packet]]:
    """The message that makes every rank keep its shards of whole tensors, and its content, which must be made first.

    Their bytes lie once in a host's arena, where all its ranks see them, and outlive the ranks. The block of the arena
    belongs to the values for as long as the driver has a name for them.
    """
    arena = session.ranks.arena if session.lasting else None
    given: list[tuple[int, int, int]] = []

    def allocate(nbytes: int) -> memoryview:
        assert arena is not None
        result = arena.given.take(nbytes)
        given.append((*result, nbytes))
        values.given = weakref.finalize(values, arena.given.drop, result)
        values.given.atexit = False
        return arena.given.memory(result, nbytes)

    def make(number: int, region: int, freed: Spans, forgotten: tuple[str, ...]) -> protocol.Task:
        where = given[-1] if given else None
        return protocol.PutValues(number, region, freed, forgotten, out=values.number, specs=specs, given=where)

    def content() -> wire.Packet:
        packet = session.dumps([*tensors], allocate=None if arena is None else allocate)
        if packet.fd is not None and values.given is None:  # each host keeps it in its own memory
            values.given = weakref.finalize(values, session.ranks.drop_given, values.number)
            values.given.atexit = False
        return packet

    return make, content
