"""Every message between a driver and its ranks.

A message is a frozen dataclass. Its class and fields travel as its *head*, of built-in types that any process can
read. What the program has put in it (functions, arguments, results) is its *content*, a `wire.Packet`. Reading the
content may fail; since the head can be read, the receiver can answer with the error. Invariant: ranks take messages in
order, and answer every `Task` once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ..kernels.network.codec import Codec, Message
from .display.bars import BarState
from .spec import P

Spans = tuple[int, ...]
"""Names of values: triples (number of the call that made them, first index, index after the last) in one flat tuple;
as the last index, `ALL` means all of the call's values."""
ALL = -1


def each_span(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """The triples, one by one."""
    return zip(*[iter(spans)] * 3, strict=True)


# -- from the driver, without an answer --------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Ship(Message):
    """Keep the content, an object, under a key; sent back by a rank, without content, it says that reading failed."""

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
class SetModules(Message):
    """The driver's modules whose files have changed since it imported them: each one's file, and the text it had."""

    modules: dict[str, list[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Renew(Message):
    """All ranks have left the failed region: go on in this generation. A replacement rank keeps these calls' values."""

    generation: int
    replaced: bool  # whether a rank was
    done: int  # the last region that all ranks have finished
    kept: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CopyTo(Message):
    """Keep copies of sharded values at these addresses and ports, one for each host, and nowhere else.

    Attributes:
        number: counts these messages.
        needed: the calls whose values may be needed. Copies of other calls are dropped; those of these calls are kept
            even if what they copy is gone, since a rank may be about to fetch them.
    """

    number: int
    hosts: tuple[tuple[str, int], ...]
    needed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Populate(Message):
    """To a rank that gets ready for a resize: reserve this many bytes for the values that will come, and for what a
    step makes of them. `results` are bytes of what all ranks make together, in the first rank's memory."""

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
        region: its number as a region; 0 for what a rank does alone.
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
        check: how thoroughly to check what should be the same on several ranks, a `replication.values.Check`.
        again: 2 if such a call has succeeded before, perhaps on ranks that these have replaced; 1 if that had other
            numbers and names; else 0.
        arrays: the arguments that are on the ranks, and then the Arrays that the program captures, by the numbers that
            they have in it; zeros stand for one that was donated before.
        values: the others, in order; None: they are the content.
        total: how many rows the batch has, if there is one and that is known.
    """

    call: str
    out: int
    key: tuple
    check: int
    again: int
    arrays: Spans
    values: tuple | None
    total: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class CallFunction(Task):
    """Call a shipped function (`mesh.run`, `mesh.submit`) with the content's arguments; the answer is its result.

    Attributes:
        by_some: other ranks are not asked to.
    """

    function: str
    key: tuple
    by_some: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PassThrough(Task):
    """Enter the region and leave it, so that the ranks that take part in it do not wait for this one in vain."""


@dataclasses.dataclass(frozen=True, slots=True)
class PutValues(Task):
    """Keep this rank's shards of whole tensors. If their bytes lie in the arena, `given` is (block, release, bytes)."""

    out: int
    specs: tuple[P, ...]
    given: tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class FillValues(Task):
    """Keep what a reader reads for each (arguments, out). The answer is `Unchanged` if all batches are described as in
    the task `known`, and reading took less than `brief` seconds a batch."""

    reader: str
    batches: tuple[tuple[tuple, int], ...]
    known: int
    brief: float


@dataclasses.dataclass(frozen=True, slots=True)
class FetchValues(Task):
    """Send this rank's shards of values."""

    spans: Spans


@dataclasses.dataclass(frozen=True, slots=True)
class MoveValues(Task):
    """Bring values, named (call, index), to ranks that lack them. A move is (sender, receiver, values); an entry of
    `copies` is (receiver, address, port, the rank whose copies they are, values)."""

    moves: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
    copies: tuple[tuple[int, str, int, int, tuple[tuple[int, int], ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReloadModules(Task):
    """Reload modules that have changed on disk, and those named; the answer is the names of those reloaded."""

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
    """A warning, and where; `kinds` are (module, name) of its category and of the category's base classes."""

    text: str
    kinds: tuple[tuple[str, str], ...]
    file: str
    line: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unchanged(Message):
    """`CallProgram` or `FillValues` is done, and its results are described as before; `prints` are to be compared."""

    task: int
    prints: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata(Message):
    """`CallProgram` or `FillValues` is done; `data` describes its results, and those of `Unchanged` if `lasting`."""

    task: int
    data: bytes
    lasting: bool
    prints: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Copying(Message):
    """Results of these calls will be copied to other hosts (sent before the calls' answers), or have been (`done`).
    `number` is that of the last `CopyTo`: all copies that were pending before it are done, too."""

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
    """A task was not begun, because another had failed before it."""

    task: int


_codec = Codec(
    *(Ship, Free, SetPath, SetSources, SetModules, Renew, CopyTo, Populate, Exit, DebuggerLine),
    *(CallProgram, CallFunction, PassThrough, PutValues, FillValues, FetchValues, MoveValues, ReloadModules),
    *(Ready, Progress, DebuggerPrompt, Logged, Warned, Unchanged, Metadata, Copying, Answer, Failed, Skipped),
)
encode, decode = _codec.encode, _codec.decode
