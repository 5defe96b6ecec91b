"""What went wrong on which rank, and the one exception that the user sees for it.

Each rank reports a `Failure`; `combine` picks the cause (a rank that only gave up because another did is not one),
groups identical failures, and makes an exception of the original type whose `__cause__` prints the remote traceback.
"""

from __future__ import annotations

import builtins
import dataclasses
import pickle
import re
import traceback
from collections.abc import Iterable
from typing import Any

from ..kernels.callsite import is_our_file, users_frames
from ..kernels.errors import Aborted, CollectiveMismatch, MeshError, PeerLost, RemoteError, SpmdError, add_note
from .display.notebook import name_cells, shorten
from .pickling import objects


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it travels: `kind` is "error", "aborted" (another rank's fault) or "interrupted".

    Attributes:
        ends: why the rank's process ends with it; "" if it goes on.
        notes: the exception's, which its class may leave out of a pickle, as `json.JSONDecodeError` does.
    """

    kind: str
    type_name: str
    text: str
    traceback: str
    pickled: bytes | None
    ends: str = ""
    notes: tuple[str, ...] = ()


class RemoteTraceback(Exception):
    """Carries the traceback text of another process; shown as the cause of the exception raised here."""

    def __str__(self) -> str:
        return str(self.args[0])


def capture(error: BaseException, *, ends: str = "") -> Failure:
    """Describe an exception so that another process can raise it.

    Args:
        ends: why this process ends with it.
    """
    if ends:
        add_note(error, f"[the rank {ends}; it is replaced, and the values that it alone had are lost]")
    kind = "error"
    if isinstance(error, Aborted):
        kind = "aborted"
    elif isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    text = "".join(_formatted(error))
    pickled = _pickled(error.with_traceback(None)) or _pickled(_Parts.of(error))
    notes = vars(error).get("__notes__")
    known = tuple(note for note in notes if type(note) is str) if type(notes) is list else ()
    return Failure(kind, type(error).__qualname__, text_of(error), text, pickled, ends, known)


def text_of(error: BaseException) -> str:
    """An exception's text, or a note that making it failed."""
    try:
        return str(error)
    except Exception as why:
        return f"{type(error).__name__}, whose text can't be had: {type(why).__name__}: {why}"


_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


def _pickled(obj: Any) -> bytes | None:
    """The pickle of an object, or None if it can't be pickled or read again."""
    try:
        data = objects.dumps(obj)
        pickle.loads(data)
    except Exception:
        return None
    return data


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of an exception that pickle can't rebuild: its class may take other arguments than it keeps.

    Attributes:
        group: of the exceptions in an `ExceptionGroup`.
    """

    cls: type[BaseException]
    args: tuple
    state: dict[str, Any]
    group: tuple[_Parts, ...] = ()

    @staticmethod
    def of(error: BaseException) -> _Parts:
        args = error.args if _pickled(error.args) is not None else (text_of(error),)
        state = {name: value for name, value in vars(error).items() if _pickled(value) is not None}
        if isinstance(error, _GROUPS):
            return _Parts(type(error), error.args[:1], state, tuple(map(_Parts.of, error.exceptions)))
        return _Parts(type(error), args, state)

    def join(self) -> BaseException:
        args = (*self.args, [one.join() for one in self.group]) if self.group else self.args
        error = self.cls.__new__(self.cls, *args)
        error.args = args
        error.__dict__.update(self.state)
        return error


def _formatted(error: BaseException) -> list[str]:
    """The traceback without this library's own frames."""
    shown = users_frames(error)
    summary = traceback.TracebackException(type(error), error, shown or error.__traceback__)
    if shown is error.__traceback__:  # all frames are to be seen
        return list(summary.format())
    parts: list[traceback.TracebackException | None] = [summary]
    while parts:
        part = parts.pop()
        if part is not None:
            kept = [frame for frame in part.stack if not is_our_file(frame.filename)]
            if kept or isinstance(error, SpmdError):
                part.stack[:] = kept
            parts.extend((part.__cause__, part.__context__))
    return list(summary.format())


def rank_runs(ranks: Iterable[int]) -> list[str]:
    """Ranks in ascending order, runs of them shortened.

    >>> rank_runs([5, 1, 2, 3])
    ['1-3', '5']
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def ranks_text(ranks: list[int]) -> str:
    """`rank 2`, `ranks 0-2, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(rank_runs(ranks))}"


def _remote(report: list[str]) -> RemoteTraceback:
    return RemoteTraceback("\n\n" + name_cells("\n".join(report)))


def original(failure: Failure) -> BaseException:
    """The exception that was captured, of its own type if it can be rebuilt."""
    error: Any = None
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)
            error = error.join() if isinstance(error, _Parts) else error
        except Exception:
            error = None
    if not isinstance(error, BaseException):
        error = RemoteError(f"{failure.type_name}: {failure.text}")
    if failure.notes:
        vars(error)["__notes__"] = [*failure.notes]
    return error


def _distance(failure: Failure, failures: dict[int, Failure]) -> int:
    """How far a failure probably is from the first: the program's own error, a mismatch, what follows from another."""
    if failure.type_name == CollectiveMismatch.__qualname__:  # a rank that left may have done so because of another
        return 2 if getattr(original(failure), "rank", None) in failures else 1
    return 2 if failure.type_name == PeerLost.__qualname__ else 0


_NOTES = (  # on errors of torch's: a part of the type's name, a part of the text, and what to write instead
    (
        "HigherOrderOpError",
        "do not support aliasing",
        "[parameters of a step lie side by side in one memory, which torch takes for aliases in functions that it "
        "compiles within others, as those of torch.cond, scan and nested_compile_region: give these copies, "
        "params = {name: value.clone() for name, value in params.items()} in the loss (docs/compile.md)]",
    ),
    (
        "ValueError",
        "Default process group has not been initialized",
        '[in a step write psum(x, "data") for torch.distributed.all_reduce, and all_gather, ppermute and others; code '
        'that is written for torch.distributed runs in mesh.run, after init_process_group("spmd")]',
    ),
)


def unexplained(failures: dict[int, Failure]) -> str:
    """If all of these ranks only gave up because of another, what they were told of its reason; else ""."""
    kinds = {failure.kind for failure in failures.values()}
    return next(iter(failures.values())).text if kinds == {"aborted"} else ""


def combine(
    failures: dict[int, Failure],
    lost: dict[int, str],
    mesh: str,
    *,
    interrupted: bool = False,
    remedy: str | None = None,
) -> BaseException:
    """The exception to raise for one failed region.

    Args:
        failures: by rank, of the ranks that are alive.
        lost: by rank, how it died.
        mesh: the mesh's description, for the message.
        interrupted: the user's Ctrl-C ended the region.
        remedy: what to do about lost ranks, if there is more to say than that they were replaced.
    """
    causes = {rank: failure for rank, failure in sorted(failures.items()) if failure.kind == "error"}
    lost = {rank: how for rank, how in lost.items() if rank not in causes or not causes[rank].ends}
    if lost:
        waiting = sorted(rank for rank, failure in failures.items() if failure.kind == "aborted")
        return _of_lost(lost, causes, waiting, mesh, remedy)
    if not causes and interrupted:
        return MeshError("this call was interrupted, and has no results", where=mesh, remedy="call it again")
    if not causes and (aborted := unexplained(failures)):
        problem = f"a rank has ended this call for all, and has not reported back since: {aborted}"
        return RemoteError(problem, where=mesh, remedy="see what that rank does, or waits for")
    if not causes:
        return KeyboardInterrupt()  # on one rank alone, or on all launched ranks
    first_ranks, *other_groups = _groups(causes, failures)
    first, who = causes[first_ranks[0]], ranks_text(first_ranks)
    error = original(first)
    if isinstance(error, SystemExit) and not error.code:  # raised here, it would end the program as if all were well
        problem = f"{who} called sys.exit({'' if error.code is None else repr(error.code)}) in a call of the mesh"
        error = RemoteError(problem, where=mesh, remedy="return from the function, or raise an error")
    report = [f"on {who} of {mesh}:\n{first.traceback}"]
    for ranks in other_groups:
        failure = causes[ranks[0]]
        # A mismatch already tells every side; for the rest each group is told once.
        if not isinstance(error, CollectiveMismatch) or failure.type_name != first.type_name:
            report.append(f"on {ranks_text(ranks)} of {mesh}:\n{failure.traceback}")
    if isinstance(error, SpmdError):
        error.args = tuple(name_cells(arg) if isinstance(arg, str) else arg for arg in error.args)
    error.__cause__ = _remote(report)
    note = f" of {mesh}" if len(report) == 1 else "; other ranks failed in another way, see above"
    add_note(error, f"[raised on {who}{note}]")
    for kind, text, note in _NOTES:
        if kind in first.type_name and text in first.text:
            add_note(error, note)
    return shorten(error)


def _of_lost(
    lost: dict[int, str], causes: dict[int, Failure], waiting: list[int], mesh: str, remedy: str | None
) -> PeerLost:
    """The exception for ranks that died while others `waiting` gave up; `causes` are errors of ranks that are alive."""
    ends = "; ".join(f"rank {rank} {lost[rank]}" for rank in sorted(lost))
    others = f"; {ranks_text(waiting)} waited for it and gave up" if waiting else ""
    remedy = remedy or "the mesh has replaced it and goes on; a value lost with it says so when it is used"
    error = PeerLost(f"{ends}{others}", where=mesh, remedy=remedy, rank=min(lost))
    if causes:
        report = [f"on {ranks_text([rank])} of {mesh}:\n{failure.traceback}" for rank, failure in causes.items()]
        error.__cause__ = _remote(report)
    return error


def _groups(causes: dict[int, Failure], failures: dict[int, Failure]) -> list[list[int]]:
    """The ranks whose errors tell the same, together; first those whose error probably came first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in causes.items():
        # Texts that differ in numbers only (a rank, a size, an address) tell the same story.
        groups.setdefault((failure.type_name, re.sub(r"0x[0-9a-f]+|\d+", "#", failure.text)), []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (_distance(causes[ranks[0]], failures), ranks[0]))
