"""Messages between a driver and the per-host processes of its mesh, over one connection to each host.

Messages to and from ranks (see `mesh.protocol`) are passed on unchanged, with the ranks' numbers. Invariant: both sides
take messages in the order in which they were sent.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform

import torch

from ...kernels.network.codec import Codec, Message


@dataclasses.dataclass(frozen=True, slots=True)
class Hello(Message):
    """From a host, first of all: the versions of what runs there."""

    versions: dict[str, str]


PULSE_SECONDS = 3.0  # between two signs of life of a host to the driver
CALLS = "calls"  # key in the driver's store: the address and port where each rank accepts remote calls


def versions() -> dict[str, str]:
    """The versions of what runs here, which must be the same on all hosts, since messages depend on them."""
    python = ".".join(platform.python_version_tuple()[:2])
    spmd = importlib.metadata.version("spmd")
    return {"spmd": spmd, "torch": torch.__version__, "python": python, "machine": platform.machine()}


@dataclasses.dataclass(frozen=True, slots=True)
class Begin(Message):
    """To a host: fork its ranks.

    Attributes:
        ranks: of this host.
        request: what they need to know, a `RankRequest` as bytes. If it names no store, this link carries the store's
            connections. In place of the mesh's key, which is never sent, it has the number that the key is made from.
        title: the mesh's description.
        same_machine: they begin with the driver's environment, not with the host's.
    """

    ranks: tuple[int, ...]
    request: bytes
    title: str
    same_machine: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Started(Message):
    """From a host: it has forked ranks, given as (rank, pid, port where it accepts calls of remote objects).

    Attributes:
        copies: the port at which the host takes copies of other hosts' values, 0 if it takes none.
    """

    ranks: tuple[tuple[int, int, int], ...]
    copies: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Message):
    """From a host: ranks could not be forked, and why."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToRanks(Message):
    """To a host: pass the content, a packet, to these of its ranks."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FromRanks(Message):
    """From a host: the content is a framed packet that each of these ranks has sent."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Printed(Message):
    """From a host: the content is what a rank has written to "stdout" or "stderr"."""

    rank: int
    stream: str


@dataclasses.dataclass(frozen=True, slots=True)
class Died(Message):
    """From a host: a rank's process has ended; how, and its last region. Nothing more comes from it."""

    rank: int
    how: str
    region: int


@dataclasses.dataclass(frozen=True, slots=True)
class Signal(Message):
    """To a host: send a signal to a rank's process."""

    rank: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Abort(Message):
    """To a host: abort the region, so that its ranks stop waiting."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class BeginAnew(Message):
    """To a host whose ranks are quiet: open the next generation, and replace dead ranks; answered with `Started`."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ask(Message):
    """To a host: report its ranks' "status" or "stacks", one rank's "stack", or whether ranks have "overwritten" memory
    in a region; `number` is the rank's or the region's."""

    what: str
    number: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DropGiven(Message):
    """To a host: free values of these calls, which lie in its memory."""

    calls: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer(Message):
    """To a host with idle ranks: offer their values to the ranks of a mesh whose key is made from this number."""

    number: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Offered(Message):
    """From a host, the answer to `Offer`: the port."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tunnelled(Message):
    """Either way: the content was sent over one of a host's connections to the store; without content it has ended.

    Attributes:
        opens: the connection was just opened, and has sent nothing yet.
    """

    connection: int
    opens: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Report(Message):
    """From a host, the answer to `Ask`: the fields of each `RankStatus`, the stacks, or "yes"."""

    rows: tuple[tuple[int, str, int, int, str, int], ...]
    text: str


# -- from a rank to a host that keeps copies of its values, each answered ----------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class ListCopies(Message):
    """List the copies of this rank's values; from the driver: of all ranks' values."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopiesHeld(Message):
    """The answer to `ListCopies`: (rank, call, index) of each copy."""

    names: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KeepCopies(Message):
    """Keep values of a call, given as (index, number of bytes); the content has them one after another."""

    call: int
    values: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DropCopies(Message):
    """Drop the copies of values, given as in `mesh.protocol.Spans`."""

    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Message):
    """The answer to `KeepCopies` and `DropCopies`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendCopies(Message):
    """Send copies of a rank's values, given as (call, index)."""

    rank: int
    names: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CopiesSent(Message):
    """The answer to `SendCopies`: the content has them one after another, with these sizes in bytes."""

    sizes: tuple[int, ...]


# -- from a new rank of a resized mesh to a host of old ranks, answered ------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class SendParts(Message):
    """Send parts of shards of a call's values, given as (rank, index, begin of the part in the shard, its end)."""

    call: int
    parts: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PartsSent(Message):
    """The answer: the content has them one after another; `sizes` are the bytes of each shard's layout, and part."""

    sizes: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse(Message):
    """From a host to the driver, regularly: it is alive, and its ranks do this; see `Look`, by rank the fields of each
    `Activity`."""

    at: float
    in_debugger: bool
    ranks: dict[int, tuple[int, tuple[int, bool], int, int, bool, bool, bool, bool]]


_codec = Codec(
    *(Hello, Begin, Started, Refused, ToRanks, FromRanks, Printed, Died, Signal, Abort, BeginAnew, Ask, Report),
    *(DropGiven, Tunnelled, ListCopies, CopiesHeld, KeepCopies, DropCopies, Done, SendCopies, CopiesSent),
    *(Offer, Offered, SendParts, PartsSent, Pulse),
)
encode, decode = _codec.encode, _codec.decode
