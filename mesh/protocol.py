"""Every message between a driver and its ranks.

A message is a frozen dataclass. What it is travels as its *head*, a pickle of built-in types that any process can
read; what a program has put in it (functions, arguments, results) is its *content*, a `wire.Packet` whose reading may
fail, which the other side can then answer. Invariant: ranks take messages in order, and answer every `Task` once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..kernels.network.codec import Codec, Message
from .display.bars import BarState
from .spec import P

Spans = tuple[int, ...]
"""Values by name: (number of the call that made them, first, behind the last), one after another; `ALL` is "all"."""
ALL = -1


def each_span(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Them one by one."""
    return zip(*[iter(spans)] * 3, strict=True)


# -- from the driver, without an answer --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Ship(Message):
    """Keep the content, an object, under a key; from a rank, without content: it could not read that."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Free(Message):
    """Nothing in the driver refers any more to these values, and to objects shipped under these keys."""

    values: Spans
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SetPath(Message):
    """Where the program's modules lie: the driver's `sys.path`."""

    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SetSources(Message):
    """Source lines of functions that were typed, not read from a file, for tracebacks."""

    lines: dict[str, list[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Renew(Message):
    """All ranks have left the region that failed: go on, in this generation; a new rank keeps these calls' values."""

    generation: int
    kept: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CopyTo(Message):
    """Have copies of the values that are cut at these addresses and ports, one for each host, and nowhere else.

    Attributes:
        number: counts these messages.
        needed: the calls whose values may be needed; copies of others are dropped, and of these none is for want of
            what is copied, since a rank may be about to fetch it.
    """

    number: int
    hosts: tuple[tuple[str, int], ...]
    needed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Populate(Message):
    """To a rank that gets ready: have memory at hand, so many bytes for values that are about to come, and for what a
    step makes of them; `results` are what all ranks make together, in memory of the first."""

    values: int
    step: int
    results: int


@dataclasses.dataclass(frozen=True, slots=True)
class Exit(Message):
    """The mesh is closed: end this process."""


@dataclasses.dataclass(frozen=True, slots=True)
class DebuggerLine(Message):
    """The answer to a `DebuggerPrompt`, by its number; None is the end of the input."""

    number: int
    text: str | None


# -- from the driver, answered -----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Task(Message):
    """Something to do.

    Attributes:
        number: of the task, named in the answer.
        region: the number of the region that it is; 0 for what a rank does alone.
        freed, forgotten: as in `Free`.
    """

    number: int
    region: int
    freed: Spans
    forgotten: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallProgram(Task):
    """Call an `@spmd` function; its results stay on the rank.

    Attributes:
        call: the key of the shipped `InputPlan`.
        out: the number under which to keep the results.
        key: what random numbers are made from.
        check: how far to look at what should be the same on several ranks, a `replication.values.Check`.
        arrays: the arguments that are on the ranks.
        values: the others, in order; None: they are the content.
    """

    call: str
    out: int
    key: tuple
    check: int
    arrays: Spans
    values: tuple | None


@dataclasses.dataclass(frozen=True, slots=True)
class CallFunction(Task):
    """Call a shipped function (`mesh.run`, `mesh.submit`) with the content's arguments; its result comes back whole."""

    function: str
    key: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class PassThrough(Task):
    """Enter the region and leave it, so that those ranks that were asked do not wait for this one in vain."""


@dataclasses.dataclass(frozen=True, slots=True)
class PutValues(Task):
    """Keep this rank's shards of whole tensors; their bytes may be `given` in the arena: block, release, bytes."""

    out: int
    specs: tuple[P, ...]
    given: tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class FillValues(Task):
    """Keep what a reader reads for each (arguments, out); `Unchanged` if all is as in `known`, read in `brief` s."""

    reader: str
    batches: tuple[tuple[tuple, int], ...]
    known: int
    brief: float


@dataclasses.dataclass(frozen=True, slots=True)
class FetchValue(Task):
    """Send this rank's shard of a value."""

    call: int
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class StoreValue(Task):
    """Keep the content, a shard, as it is (on a rank that replaces a dead one)."""

    call: int
    index: int
    spec: P


@dataclasses.dataclass(frozen=True, slots=True)
class MoveValues(Task):
    """Send values to ranks that lack them: of each move who sends, to whom, and what, as (call, index); and what is
    fetched from copies: by whom, at which address and port, whose these are, and what."""

    moves: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    copies: tuple[tuple[int, str, int, int, tuple[tuple[int, int], ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReloadModules(Task):
    """Load again what has changed on disk, and these modules if this rank has them; the names of those loaded."""

    names: tuple[str, ...]


# -- from a rank -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Ready(Message):
    """The process runs and takes tasks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress(Message):
    """The state of a progress bar that a task has made."""

    task: int
    bar: BarState


@dataclasses.dataclass(frozen=True, slots=True)
class DebuggerPrompt(Message):
    """A debugger has printed this and wants a line, a `DebuggerLine`; the number counts the questions of a rank."""

    number: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Logged(Message):
    """A record of `logging`: its attributes of built-in types, the message formatted."""

    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Warned(Message):
    """A warning, and where; `kinds` are module and name of its category, and of the classes that this is made from."""

    text: str
    kinds: tuple[tuple[str, str], ...]
    file: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unchanged(Message):
    """`CallProgram` or `FillValues` is done; nothing is new of its results but `prints`, what is to be compared."""

    task: int
    prints: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata(Message):
    """`CallProgram` or `FillValues` is done; what it tells of its results, which `Unchanged` means if `lasting`."""

    task: int
    data: bytes
    lasting: bool
    prints: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Copying(Message):
    """Results of these calls are about to be copied to other hosts, told before the calls' answers, or were (`done`);
    `number` is the last `CopyTo`'s: all that was about to be copied before that one is done, too."""

    number: int
    calls: tuple[int, ...]
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Answer(Message):
    """A task is done; the content is what came of it."""

    task: int


@dataclasses.dataclass(frozen=True, slots=True)
class Failed(Message):
    """A task has failed; the content is a `Failure`."""

    task: int


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped(Message):
    """A task was not begun, for another had failed before it."""

    task: int


_codec = Codec(
    *(Ship, Free, SetPath, SetSources, Renew, CopyTo, Populate, Exit, DebuggerLine),
    *(CallProgram, CallFunction, PassThrough, PutValues, FillValues, FetchValue, StoreValue, MoveValues, ReloadModules),
    *(Ready, Progress, DebuggerPrompt, Logged, Warned, Unchanged, Metadata, Copying, Answer, Failed, Skipped),
)
encode, decode = _codec.encode, _codec.decode
