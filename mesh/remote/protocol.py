"""Every message between the processes that call remote objects and those that have them.

As in `mesh.protocol`, a message is a frozen dataclass whose head any process can read, and what a program has put in it
is its content. Invariant: over one connection messages arrive in the order in which they were sent, and each call is
answered once.
"""

from __future__ import annotations

import dataclasses

from ...kernels.network.codec import Codec, Message

NodeId = tuple[int, int]
"""A process of a mesh: its rank (`DRIVER` for the driver), and a random number that no other process has."""
Name = tuple[NodeId, int]
"""A call, and with it what comes of it: who has made it, and the caller's number for it. Objects are named by the call
that has made them."""

DRIVER = -1
# In the place of a method's name: make an object that is restored, and give it what another one of it has saved.
RESTORABLE, LOAD = ".restorable", ".load"


@dataclasses.dataclass(frozen=True, slots=True)
class Invoke(Message):
    """Call a method of an object; the content is the settings around the call, its arguments and keyword arguments.

    Attributes:
        number: of the call.
        incarnation: the second half of the `NodeId` of the process where the object is; 0 to make one.
        target: the object.
        method: its name; empty: make the object, of a class that is among the arguments.
        caller: the number of the object whose method calls, 0 for none: calls of one caller run in order.
        refs: whose results the content refers to, as (the process that has the result, the call).
        released: of earlier calls over this connection those whose results the caller needs no more.
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
    """The caller needs the results of these calls no more, and no call will be made of these objects."""

    calls: tuple[int, ...]
    objects: tuple[Name, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch(Message):
    """Send the result of a call, as soon as it is there.

    Attributes:
        incarnation: as of an `Invoke`; 0 for that of an object that is made again where its process dies.
    """

    number: int
    incarnation: int
    call: Name


@dataclasses.dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Do not begin this call of the sender's; the result of the request is whether that was in time."""

    number: int
    call: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result(Message):
    """A call is done; the content is its result, unless that is large, and is kept until it is fetched."""

    number: int
    kept: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Raised(Message):
    """A call has failed; the content is a `Failure`."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cancelled(Message):
    """A call was not begun, for its caller has cancelled it."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Probe(Message):
    """Find out whether a call that waits does so for itself: passed on along what each call waits for.

    Attributes:
        waiting: the call that waits, where the probe began.
        call: what it, or another in the chain, waits for.
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
    """To the maker of an object that is restored: it has done this call of the maker's; the content is the result.

    Attributes:
        failed: the content is an error, as of `Raised`.
    """

    target: Name
    call: int
    failed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SavedState(Message):
    """The content is what such an object has become; `Kept` is the answer."""

    number: int
    target: Name


@dataclasses.dataclass(frozen=True, slots=True)
class Kept(Message):
    """A `SavedState` has come."""

    number: int


_codec = Codec(
    *(Invoke, Release, Fetch, Cancel, Result, Raised, Cancelled, Probe, WaitsForItself),
    *(SavedResult, SavedState, Kept),
)
encode, decode = _codec.encode, _codec.decode
