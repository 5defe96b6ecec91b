"""Messages between a driver and the per-host processes of its mesh, over one connection a host.

What is for a rank, or from it, goes as it is (see `mesh.protocol`), with a note of whom it is for. Invariant: both
sides take them in the order in which they were sent.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform

import torch

from ...kernels.network.codec import Codec, Message


@dataclasses.dataclass(frozen=True, slots=True)
class Hello(Message):
    """From a host, first of all: what runs there, by name."""

    versions: dict[str, str]


CALLS = "calls"  # in the store that the driver keeps: at which address and port each rank hears calls


def versions() -> dict[str, str]:
    """What this process runs, by name: it has to be the same on all hosts, since it makes the bytes between them."""
    python = ".".join(platform.python_version_tuple()[:2])
    spmd = importlib.metadata.version("spmd")
    return {"spmd": spmd, "torch": torch.__version__, "python": python, "machine": platform.machine()}


@dataclasses.dataclass(frozen=True, slots=True)
class Begin(Message):
    """To a host: fork its ranks.

    Attributes:
        ranks: of this host.
        request: what they need to know, a `RankRequest` as bytes; without a store this link carries what
            is for it; and instead of the mesh's key, which does not travel, there is what it is made from.
        title: what the mesh is called.
        same_machine: they begin with the driver's environment, not with the host's.
    """

    ranks: tuple[int, ...]
    request: bytes
    title: str
    same_machine: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Started(Message):
    """From a host: these ranks were forked, as these processes, and hear calls of remote objects at these ports.

    Attributes:
        copies: the port at which it takes copies of other hosts' values, 0 if it takes none.
    """

    ranks: tuple[tuple[int, int, int], ...]
    copies: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refused(Message):
    """From a host: ranks could not be forked, and why."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToRanks(Message):
    """To a host: hand the content, a packet, to these of its ranks; without any: to all, as all hosts are told to."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class FromRanks(Message):
    """From a host: the content is a packet, framed, that each of these ranks has sent; without any: each of all."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Printed(Message):
    """From a host: the content is what a rank has written to "stdout" or "stderr"."""

    rank: int
    stream: str


@dataclasses.dataclass(frozen=True, slots=True)
class Died(Message):
    """From a host: a rank's process has ended, so, in or after a region; nothing more comes from it."""

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
    """To a host: end the region for its ranks that wait."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class BeginAnew(Message):
    """To a host, whose ranks are quiet: open the next generation, and replace those that died (`Started` says so)."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ask(Message):
    """To a host: what its ranks do, "status" or "stacks", or whether they have "overwritten" memory in a region."""

    what: str
    region: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DropGiven(Message):
    """To a host: values of these calls, which lay in its memory, are needed no more."""

    calls: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Offer(Message):
    """To a host, whose ranks rest: let the ranks of a mesh whose key is made of this number read what they have."""

    number: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Offered(Message):
    """From a host: at this port."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Carried(Message):
    """Either way: the content is what one of a host's connections to the store has sent; without content it has ended.

    Attributes:
        opens: it begins, and has sent nothing yet.
    """

    connection: int
    opens: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Report(Message):
    """From a host: the answer to an `Ask`: the fields of each `RankStatus`, or the stacks, or whether it is so."""

    rows: tuple[tuple[int, str, int, int, str, int], ...]
    text: str


# -- from a rank to a host that keeps copies of its values, each answered ----------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class ListCopies(Message):
    """Say what copies there are of this rank's values; from the driver: of all ranks of other hosts."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopiesHeld(Message):
    """These, as (rank, call, index)."""

    names: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KeepCopies(Message):
    """Keep values of a call, which the content has one after another, as (index, bytes)."""

    call: int
    values: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DropCopies(Message):
    """Values are needed no more, as (call, first, behind the last), one after another; see `mesh.protocol.Spans`."""

    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Done(Message):
    """It is done."""


@dataclasses.dataclass(frozen=True, slots=True)
class SendCopies(Message):
    """Send copies of a rank's values, as (call, index)."""

    rank: int
    names: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CopiesSent(Message):
    """The content has them, one after another, of so many bytes each."""

    sizes: tuple[int, ...]


# -- from a rank of a mesh that takes over the values of another, to a host of that, answered --------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class SendParts(Message):
    """Send parts of shards of a call's values, as (rank, index, where the part begins in the shard, and ends)."""

    call: int
    parts: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PartsSent(Message):
    """The content has them, one after another: of each so many bytes that say how its shard lies in memory, and so many
    of its own."""

    sizes: tuple[tuple[int, int], ...]


# -- over relays, where hosts are many: see `relaying` -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class OpenRelay(Message):
    """To a host: be a relay to hosts that will come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relaying(Message):
    """From a host: it is one, and listens at this port."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class DialRelay(Message):
    """To a host: have the relay that listens there.

    Attributes:
        number: by which the relay and the driver know this host's process.
    """

    address: str
    port: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class HasRelay(Message):
    """From a host: it has a relay from now on, or none any more."""

    there: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Numbered(Message):
    """Either way: a message, which comes after the one with the number before; its content is this one's."""

    number: int
    encoded: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Had(Message):
    """Either way: messages up to this number were taken."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Forward(Message):
    """To a relay: a message for it, and for these, as (host, number of the message for that)."""

    numbers: tuple[tuple[int, int], ...]
    encoded: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered(Message):
    """To a relay, from a host: a `Numbered` for the driver.

    Attributes:
        done: the task that all ranks of the host have answered with this, 0 if none.
    """

    number: int
    encoded: bytes
    done: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle(Message):
    """From a relay: what hosts have said, one content after another.

    Attributes:
        groups: of each content how long it is, and whose, as (host, number, said).
    """

    groups: tuple[tuple[int, tuple[tuple[int, int, bytes], ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse(Message):
    """From a relay, first of all and then again and again: it runs."""


_codec = Codec(
    *(Hello, Begin, Started, Refused, ToRanks, FromRanks, Printed, Died, Signal, Abort, BeginAnew, Ask, Report),
    *(DropGiven, Carried, ListCopies, CopiesHeld, KeepCopies, DropCopies, Done, SendCopies, CopiesSent),
    *(Offer, Offered, SendParts, PartsSent),
    *(OpenRelay, Relaying, DialRelay, HasRelay, Numbered, Had, Forward, Gathered, Bundle, Pulse),
)
encode, decode = _codec.encode, _codec.decode
