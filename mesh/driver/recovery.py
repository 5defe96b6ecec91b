"""What a driver does when one of its ranks fails or dies.

The receiving thread reports here. A failed region raises the arena's abort flag, so that no rank waits in vain. When
all living ranks have fallen quiet, dead ones are replaced and the next *generation* begins, which knows nothing of the
failed region. Whoever waits for a task gets its error earlier: as soon as the other ranks have had a moment to give up.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence

from ...kernels.errors import MeshError
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from .. import protocol
from ..failure import combine, ranks_text, text_of, unexplained
from ..hosts.moving import Moves, moves_of
from .answers import Answers, Session
from .pending import Outcome, Stopped, Task
from .ranks import Rank
from .rerun import blamed, donated_to, freed_meanwhile, send_again, send_read, tell, to_rerun
from .stuck import Stuck

INTERRUPT_SECONDS = 0.3  # after Ctrl-C, for calls under way to end by themselves
WAIT_SECONDS = 1.0  # after Ctrl-C, for ranks to stop, before the user is told which don't
GRACE_SECONDS = 0.75  # for ranks to give up by themselves once one has failed
# By then a call that has failed was interrupted wherever Python can do that: after GRACE_SECONDS, if that was in the
# end of a `with` statement after its BLOCK_SECONDS (rank.worker), and some time for a busy machine.
INTERRUPTED_SECONDS = 2.0
_CALL_AGAIN = (  # what to do about a call that can't be run again by itself, where values outlive their ranks
    "the mesh has replaced it and goes on, with its values; this call may have had effects and was not run again: "
    "make it again if they may happen twice"
)
_RAISED = (  # the same where another rank has raised an exception
    "the mesh has replaced it and goes on, with its values; this call was not run again, since another rank has "
    "raised an exception: see above"
)
# For ranks to give up a call that is to run again, then they are killed; and for the first that failed to say why.
FENCE_SECONDS = 10.0


class Recovery:
    """The receiving thread's half of a session.

    Attributes:
        answers: takes the ranks' answers.
        under_way: not all ranks have left a failed region yet.
        interrupted: the user's Ctrl-C is the reason.
        failed_starts: how many ranks in a row died before they were ready.
    """

    def __init__(self, session: Session, grace: float):
        self._session = session
        self.under_way = self.interrupted = False
        self.answers = Answers(session, self)
        self._since = 0.0
        self._first_failed = 0  # the number of the first task that failed; earlier ones may end
        self._lost: dict[int, str] = {}  # ranks that died, and how
        self.stuck = Stuck(session, grace)
        self._moves: Moves | None = None
        self.failed_starts = 0

    @property
    def closed(self) -> str | None:
        return self._session.closed

    def flush(self, rank: Rank) -> bool:
        with self._session.lock:
            return rank.flush()

    def died(self, rank: Rank) -> None:
        how = self.stuck.killed.pop(rank.pid, None) or rank.end_text()
        with self._session.lock:
            self.answers.collect()  # what it answered before it died counts
            rank.alive = False
            self._session.receiving.remove(rank)
            if self._session.closing:
                return
            if not self._session.ranks.has(rank):  # its host has replaced it before this was heard
                rank.close()
                return
            self._lost[rank.rank] = how
            self.failed_starts += not rank.ready
            self._session.pending.lose(rank.rank)
            self.begin(f"rank {rank.rank} {how}")
            self.carry_on()

    def broke(self, error: BaseException) -> None:
        self._session.shut(f"listening to its ranks failed: {type(error).__name__}: {error}")

    def begin(self, why: str | None = None, *, first_failed: int = 0) -> None:
        """Make every rank give up (`why` is None if a rank's failure has already done so); new tasks are held back."""
        if why is not None:
            self._session.ranks.abort(why)
        if not self.under_way:
            self.under_way, self._since, self._first_failed = True, time.monotonic(), first_failed
            self._session.receiving.wake()
        self._first_failed = min(self._first_failed, first_failed)

    def carry_on(self) -> None:
        """Settle tasks after the grace time, and begin anew once all ranks are quiet; called repeatedly until then."""
        session = self._session
        with session.lock:
            if not self.under_way or session.closed is not None:
                return
            self.answers.collect()
            busy = session.pending.busy()
            if busy and time.monotonic() - self._since < (FENCE_SECONDS if self._is_unexplained() else GRACE_SECONDS):
                return
            again, why = self._to_rerun()
            if busy and again and self._lost and time.monotonic() - self._since > FENCE_SECONDS:
                for rank in busy:
                    session.ranks.all[rank].signal(signal.SIGKILL)
            if busy and not self.interrupted and session.lasting:
                left = [rank for rank, number in busy.items() if number >= self._first_failed]
                self.stuck.end_timed_out(left, time.monotonic() - self._since - INTERRUPTED_SECONDS)
            failure, at_fault = self._failure(why if self._lost else None), self._at_fault()
            for task in sorted(session.pending.tasks.values(), key=lambda task: task.number):
                if task.settled.is_set() or task in again:
                    continue
                if task.fine:
                    self.answers.settle(task)
                elif task.complete or not (busy and (self.interrupted or task.number < self._first_failed)):
                    self.answers.settle(task, failure if task.caller in at_fault else self._stopped(task, failure))
            if busy:
                self.signal_busy()
            elif not session.ranks.dying:
                self._begin_anew(again)

    def _to_rerun(self) -> tuple[list[Task], str | None]:
        """The tasks that will run again, and why others that could won't."""
        session = self._session
        tasks = session.pending.tasks.values()
        if self.interrupted or not (self._lost or any(task.raised for task in tasks)):
            return [], None
        if not session.reruns and any(task.region and not task.fine for task in tasks):
            return [], None  # what is fetched may be what one of these was to make
        return to_rerun(tasks, session.ranks.overwritten, session.run_state.saved)

    def interrupt(self) -> None:
        """On Ctrl-C, let what is about to end do so, interrupt the rest, and wait; a second Ctrl-C kills the ranks.

        Called by the thread that was interrupted.
        """
        session = self._session
        try:
            session.run_state.note_failure()
            if self.answers.all_settled(INTERRUPT_SECONDS) or session.closed:
                return
            with session.lock:
                left = [task for task in session.pending.tasks.values() if not task.settled.is_set()]
                while True:
                    # If a failure came first, it is reported, and what it has stopped may run again.
                    self.interrupted = not self.under_way
                    self.begin("interrupted by the user")
                    self._await_quiet()
                    if session.closed is not None or all(task.settled.is_set() for task in left):
                        break
        except KeyboardInterrupt:
            count = len(session.values)
            session.shut(f"killed by a second Ctrl-C; {count} values that were on it are lost")
            raise KeyboardInterrupt(f"mesh killed: {count} values that were on its ranks are lost") from None

    def _await_quiet(self) -> None:
        """Interrupt the ranks until all are quiet, and the next generation has begun; the lock must be held."""
        session, warned = self._session, False
        while self.under_way and session.closed is None:
            self.signal_busy()
            over = session.changed.wait_for(lambda: not self.under_way or session.closed, WAIT_SECONDS)
            if not over and not warned:
                warned = True
                print(self._waits(), file=sys.stderr, flush=True)

    def _waits(self) -> str:
        busy = sorted(self._session.pending.busy())
        return (
            f"spmd: interrupted; {ranks_text(busy)} of {self._session.describe()} "
            f"{'is' if len(busy) == 1 else 'are'} in a call that Python can't interrupt (a long operation of torch?): "
            "waiting for its end. Press Ctrl-C again to kill the ranks and lose what is on them"
        )

    def signal_busy(self) -> None:
        """Interrupt the ranks that are still busy, except with tasks that came before the one that failed."""
        for rank, number in self._session.pending.busy().items():
            if number >= self._first_failed:
                self._session.ranks.all[rank].signal(signal.SIGINT)

    def _is_unexplained(self) -> bool:
        """Whether somebody waits for a cause that its rank has not reported yet."""
        known = self._session.pending.failures(unsettled=True)
        return not (self._lost or self.interrupted) and bool(unexplained(known))

    def _failure(self, why: str | None = None) -> Callable[[], BaseException]:
        failures, lost = self._session.pending.failures(), dict(self._lost)
        where, interrupted, why = self._session.describe(), self.interrupted, self._session.ranks.remark or why
        if why is None and self._session.lasting:
            why = _RAISED if any(one.kind == "error" for one in failures.values()) else _CALL_AGAIN
        return lambda: combine(failures, lost, where, interrupted=interrupted, remedy=why)

    def _at_fault(self) -> Container[threading.Thread]:
        """The threads whose calls have failed, if it is known; calls that others made meanwhile are only stopped."""
        tasks = self._session.pending.tasks.values()
        failed = {task.caller for task in tasks if task.raised}
        return {task.caller for task in tasks} if self._lost or self.interrupted or not failed else failed

    def _stopped(self, task: Task, failure: Callable[[], BaseException]) -> Outcome:
        """The failure of a call that was stopped since a call of another thread has failed."""
        where, donated = self._session.describe(), donated_to(task.again)
        remedy = "make it again; if it has effects, they may happen twice"
        if donated:
            remedy = f"{donated} was donated to it, and is lost: restore a checkpoint, or leave donate= out"

        def make() -> Stopped:
            cause = failure()
            problem = "this call was stopped, because a call that another thread made has failed"
            error = Stopped(problem, got=f"{type(cause).__name__}: {text_of(cause)}", where=where, remedy=remedy)
            error.__cause__ = cause
            return error

        return make

    def _begin_anew(self, again: Sequence[Task]) -> None:
        session = self._session
        if self.failed_starts > 2 * session.layout.size:
            ends = "; ".join(f"rank {rank} {how}" for rank, how in sorted(self._lost.items()))
            count = f"{self.failed_starts} times in a row, the last: {ends}"
            session.shut(f"its ranks die before they are ready, {count}; their error output says why")
            return
        session.pending.tasks = {task.number: task for task in again}
        session.debugging.forget()
        dead = [rank.rank for rank in session.ranks.all if not rank.alive and rank.ready]
        for task in blamed(again, {rank: session.ranks.region_of(rank) for rank in dead}):
            task.again.losses += 1
        try:
            with named_limits():
                replaced = session.ranks.begin_anew()
        except MeshError as error:
            session.shut(f"ranks that died could not be replaced: {error}")
            return
        done = session.pending.done
        generation, bare = session.ranks.generation, session.ranks.bare if session.lasting else {*replaced}
        undone = self._moves is not None and self._moves.take_back()
        kept, freed = session.values.needed()
        others = {*range(session.layout.size)}.difference(replaced)
        session.tell(protocol.Renew(generation, bool(replaced), done), ranks=others)
        if replaced:
            session.tell(protocol.Renew(generation, True, done, kept), ranks=replaced)
            session.tell(protocol.Free(freed, ()), ranks=replaced)
            for message, packet in session.shipped.for_newcomer():
                session.tell(message, packet, replaced)
        for rank in replaced:
            session.values.lost_on(rank, lasting=rank not in bare)
        if bare or undone:
            again = self._with_values(again, replaced)
        if replaced:
            session.uncopied.copy_to_hosts(session)
            self._give_values(again, replaced)
        for task in again:
            send_again(session, task, replaced)
        if freed_again := freed_meanwhile(again):
            session.tell(protocol.Free(freed_again, ()))
        if replaced:
            lasting = session.lasting and (not session.ranks.bare or self._moves is None or not self._moves.lost)
            tell(self._lost, again, time.monotonic() - self._since, session.describe(), lasting=lasting)
        self._lost.clear()
        self.under_way = self.interrupted = False
        session.changed.notify_all()

    def _with_values(self, again: Sequence[Task], replaced: Sequence[int]) -> Sequence[Task]:
        """Bring values back that were lost with a host, whether a call waits for them or not; gives the calls that can
        run again.

        If no rank was replaced, the move itself has failed: then it is tried again only if a call needs it.
        """
        session = self._session
        moves = self._moves = moves_of(session, again)
        again = [*session.uncopied.tasks_for(moves.lost, session), *again]
        ready = list(itertools.takewhile(lambda task: not moves.needed_by(task), again))
        for task in again[len(ready) :]:
            session.pending.tasks.pop(task.number, None)
            self.answers.settle(task, self._failure(moves.lack(task)))
        if send := bool(ready or replaced):
            moves.send(session)
        session.shipped.drop_naming_values({values.number for values in moves.lost} if send else None)
        return ready

    def move_values(self) -> bool:
        """Try again to bring values back, since a call needs some of them; whether there were any that somebody has.

        Raises the error if it fails once more.
        """
        session = self._session
        with session.lock:
            session.ready()
            moves = moves_of(session, ())
            if not moves.sends and not moves.fetches:
                return False  # an earlier move may be under way, and stays noted
            self._moves = moves
            with uninterrupted():
                moves.send(session)
            task = moves.task
        assert task is not None
        session.wait(task)
        return True

    def _give_values(self, again: Sequence[Task], replaced: Sequence[int]) -> None:
        """Have replaced ranks read the batches that these tasks need, and send them the objects that name values."""
        session = self._session
        held = [one for task in again for one in (*task.again.call.arguments, task.again.call.holds)]
        for values in session.values.unread(held):
            send_read(session, values)
        for message, packet in session.shipped.naming_values():
            session.tell(message, packet, replaced)
