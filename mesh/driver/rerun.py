"""Which of the calls that a dead rank, or a call that fails, leaves unfinished run again, and how.

A call of an @spmd function is pure, and its inputs are held until every rank has its outputs: so it can be sent again,
with the same values and random keys. Not run again are calls that may have had effects (`mesh.run`), that have raised
an exception, or that had begun to overwrite donated memory, nor calls after the latter two (after an exception, those
of the same thread), nor what reads their results. Invariant: calls run again in the order in which they were made.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from .. import wire
from ..array import Array
from ..failure import ranks_text
from ..protocol import Spans
from .pending import Again, Make, Pure, Task
from .session_view import Session
from .values import CallValues

LOSSES = 3  # of ranks in a row in one call: then the call is blamed, and not run again
logger = logging.getLogger("spmd")


def to_rerun(
    tasks: Iterable[Task], overwritten: Callable[[int], bool], checkpoint: str | None
) -> tuple[list[Task], str | None]:
    """The tasks that are to be run again, in order, and why those after them are not, if there are any.

    Tasks that need no other rank come first: they may read what other tasks need.

    Args:
        overwritten: whether a region may have changed donated memory.
        checkpoint: the run's newest, if there is one.
    """
    found: list[Task] = []
    at_fault, void = set[threading.Thread](), set[Task | None]()
    for task in sorted(tasks, key=_order):
        if task.fine:
            continue
        raised = task.raised
        if raised and task.region:
            at_fault.add(task.caller)
        skipped = task.region and task.caller in at_fault
        if raised or skipped or task.settled.is_set() or task.again is None or void & _made_by(task.again.call):
            void.add(task)
            continue
        if task.region and overwritten(task.region):
            return found, _lost(task.again, checkpoint)
        if task.again.losses >= LOSSES:
            return found, (
                f"{task.again.call.name} has lost ranks {LOSSES} times in a row, and is not run again: see what ends "
                "them (too little memory, perhaps)"
            )
        found.append(task)
    return found, None


def _made_by(call: Pure) -> set[Task | None]:
    """The tasks that make what a call reads."""
    sources = [one._source for one in call.arguments if isinstance(one, Array)]
    return {source.task for source in [*sources, *([call.holds] if call.fetches else [])]}


def _lost(again: Again, checkpoint: str | None) -> str:
    """The message for a call that can't run again because ranks have overwritten what it reads."""
    donated = donated_to(again)
    what = f"{donated} of it, donated and lost" if donated else "what a later call was donated, and it reads"
    newest = (
        f"the newest checkpoint, {checkpoint}," if checkpoint is not None else "a checkpoint (this run has none yet)"
    )
    problem = f"{again.call.name} can't run again: ranks had begun to overwrite {what}"
    return f"{problem}; restore {newest} or leave donate= out"


def donated_to(again: Again | None) -> str:
    """The arguments that a call may overwrite, for messages; "" if there are none."""
    if again is None or again.call.holds is None or again.call.fetches:
        return ""
    return ", ".join(again.call.holds.donated())


def _order(task: Task) -> tuple[bool, bool, int]:
    """The order to run in: tasks that make values on their own, then tasks that fetch values, then regions."""
    fetches = task.again is not None and not task.again.call.values
    return task.region > 0, fetches, task.number


def blamed(tasks: Sequence[Task], dead: Mapping[int, int]) -> list[Task]:
    """Those of the tasks that are to run again in which ranks have died.

    Args:
        dead: rank -> the last region that it had entered; -1 if that is not known.
    """
    regions = {task.region for task in tasks if task.region}
    found = [task for task in tasks if task.region in dead.values() or -1 in dead.values()]
    for rank, region in dead.items():
        if region not in regions:  # it was in the first task that it has not done, or on the way into that region
            undone = (task for task in tasks if rank in task.ranks and rank not in _done(task))
            found += [task for task in itertools.islice(undone, 1) if task not in found]
    return found


def send_again(session: Session, task: Task, replaced: Collection[int]) -> None:
    """Send a task again: a region to all ranks, with a new number; another task to ranks that have not done it."""
    again, ranks = task.again, _ranks_to_ask(task, replaced)
    session.regions += task.region > 0
    task.region = session.regions if task.region else 0
    for rank in ranks:
        task.answers.pop(rank, None)
        task.prints.pop(rank, None)
    for values in again.call.values:
        values.was_read(ranks)
    session.tell(again.make(task.number, task.region, (), ()), again.packet, ranks)


def send_read(session: Session, values: CallValues) -> None:
    """Have the ranks that lack a batch read it again; nobody waits for this task."""
    assert values.read is not None
    ranks = sorted(values.unread_on)
    values.was_read(ranks)
    send_at_once(session, Pure("a batch", values=(values,)), values.read, wire.Packet(b""), ranks)


def send_at_once(session: Session, call: Pure, make: Make, packet: wire.Packet, ranks: Sequence[int]) -> Task:
    """Send a task that ranks do alone, while other tasks are held back; whoever waits for it gets its error."""
    task = Task(next(session.numbers), tuple(ranks), again=Again(call, make, packet), reported=True)
    session.pending.tasks[task.number] = task
    session.tell(make(task.number, 0, (), ()), packet, ranks)
    return task


def _ranks_to_ask(task: Task, replaced: Collection[int]) -> list[int]:
    if task.region:
        return [*task.ranks]
    done = _done(task)
    return [rank for rank in task.ranks if rank in replaced or rank not in done]


def _done(task: Task) -> set[int]:
    return {rank for rank, (kind, _) in task.answers.items() if kind == "ok"}


def freed_meanwhile(tasks: Sequence[Task]) -> Spans:
    """The outputs of these tasks that were freed already, and are made again when the tasks run again."""
    spans: list[int] = []
    for task in tasks:
        for values in task.again.call.values if task.again is not None else ():
            spans += values.freed_names()
    return tuple(spans)


def tell(lost: dict[int, str], tasks: Sequence[Task], seconds: float, where: str, *, lasting: bool) -> None:
    """Log what has happened."""
    alike: dict[str, list[int]] = {}
    for rank, how in sorted(lost.items()):
        alike.setdefault(how, []).append(rank)
    ends = "; ".join(
        f"{ranks_text(ranks)} {how if len(ranks) == 1 else how.replace('was ', 'were ', 1)}"
        for how, ranks in alike.items()
    )
    calls = [task.again.call.name for task in tasks if task.region and task.again is not None]
    what = f"; {', '.join(calls)} {'runs' if len(calls) == 1 else 'run'} again" if calls else ""
    values = f", with {'its' if len(lost) == 1 else 'their'} values," if lasting else ""
    logger.warning("%s [%s]: replaced%s in %.0f ms%s", ends, where, values, 1e3 * seconds, what)
