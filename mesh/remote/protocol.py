"""Every message between processes that call remote objects and processes where these live.

As in `mesh.protocol`, a message is a frozen dataclass whose head any process can read; the program's data is its
content. Invariant: over one connection messages arrive in the order in which they were sent, and each call is answered
once.
"""

from __future__ import annotations

import dataclasses

from ...kernels.network.codec import Codec, Message

NodeId = tuple[int, int]
"""A process of a mesh: its rank (`DRIVER` for the driver), and a random number that no other process has."""
Name = tuple[NodeId, int]
"""The name of a call and of its result: (the process that made the call, its number for it). An object has the name of
the call that made it."""

DRIVER = -1
# In place of a method's name: make an object that can be restored; load into it what its predecessor has saved.
RESTORABLE, LOAD = ".restorable", ".load"


@dataclasses.dataclass(frozen=True, slots=True)
class Invoke(Message):
    """Call a method of an object; the content is the settings around the call, its arguments and keyword arguments.

    Attributes:
        number: of the call.
        incarnation: the second half of the `NodeId` of the process where the object lives; 0 to make an object.
        target: the object.
        method: its name; empty: make the object, of a class that is among the arguments.
        caller: the number of the object whose method makes this call, 0 if none does: calls of one caller run in order.
        refs: the calls whose results the content refers to, as (the process that has the result, the call).
        released: earlier calls over this connection whose results the caller no longer needs.
    """

    number: int
    incarnation: int
    target: Name
    method: str
    caller: int
    refs: tuple[tuple[NodeId, Name], ...]
    released: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Release(Message):
    """The caller no longer needs the results of these calls, and will make no more calls of these objects."""

    calls: tuple[int, ...]
    objects: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Send the result of a call, as soon as it is there.

    Attributes:
        incarnation: as in `Invoke`; 0 for a call of an object that is restored, in whichever process it is now.
    """

    number: int
    incarnation: int
    call: Name


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Do not begin this call of the sender; the result says whether that was in time."""

    number: int
    call: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result(Message):
    """A call is done; the content is its result. A large result is `kept` until it is fetched."""

    number: int
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Raised(Message):
    """A call has failed; the content is a `Failure`."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cancelled(Message):
    """A call was not begun, because its caller has cancelled it."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Probe(Message):
    """Find out whether a call waits for itself; passed on along what each call waits for.

    Attributes:
        waiting: the waiting call where the probe began.
        call: what it, or another call in the chain, waits for.
        seen: the calls that the probe has passed.
    """

    waiting: Name
    call: Name
    seen: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WaitsForItself(Message):
    """A call waits for something that waits for it."""

    waiting: Name
    chain: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedResult(Message):
    """To the maker of a restorable object: it has done this call of the maker; the content is the result.

    Attributes:
        failed: whether the content is an error, as in `Raised`.
    """

    target: Name
    call: int
    failed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SavedState(Message):
    """To the maker: the content is the object's state after the call; answered with `Kept`."""

    number: int
    target: Name


@dataclasses.dataclass(frozen=True, slots=True)
class Kept(Message):
    """A `SavedState` has arrived."""

    number: int


_codec = Codec(
    *(Invoke, Release, Fetch, Cancel, Result, Raised, Cancelled, Probe, WaitsForItself),
    *(SavedResult, SavedState, Kept),
)
encode, decode = _codec.encode, _codec.decode
