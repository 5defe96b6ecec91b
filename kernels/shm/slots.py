"""The slots: what the ranks of a group tell each other about their operations, in words of one block.

Each rank has a line: up to which of the group's operations it has posted, reduced and read, and a slot for each of the
last few operations. The slot says which call the rank makes (a signature), where its part lies, and on the first rank
where the result goes, which it may announce before it posts. Invariants: a rank writes only its own line, and fills a
slot before it counts the operation as posted; and it reuses a slot only when every peer has read past its last use.
See docs/architecture.md, section 9.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from ..call import Call, disagreement
from ..operations import Operations, Ready
from ..processes import nanoseconds_of, status_of
from ..waiting import SAVED_SECONDS, cores, yielded
from .arena import Arena
from .blocks import Result, Staging
from .pages import PAGE

SLOTS = 8
SPINS = 400
_MOMENT_SECONDS = 0.5  # how long ranks that aren't held up get to say which call they made instead
_LOOK_NANOSECONDS = 50e6  # of processor time; a waiting rank that had so much has looked

# words of a rank's line
_POSTED, _REDUCED, _READ, _ANNOUNCED, _CLOSED, _LINE = 0, 1, 2, 3, 4, 8
# words of a slot: from `_TENSOR` on those of `Part`, from `_TABLE` on two for each rank
_SIGNATURE, _RESULT, _RELEASE, _TENSOR, _TABLE = 0, 1, 2, 3, 7


class Part(NamedTuple):
    """Where a rank's part of a large reduction lies, in words of its slot.

    Attributes:
        tensor: the offset of the whole tensor in the arena; 0 if it is not there.
        in_place: whether this tensor is to be overwritten with the result.
        staged: the offset of the slices that it has copied for others; 0 without any.
        direct: whether its first slice is in the result block, to be added to there.
    """

    tensor: int = 0
    in_place: int = 0
    staged: int = 0
    direct: int = 0


def block_bytes(size: int) -> tuple[int, int]:
    """(bytes of the lines of `size` ranks, bytes of lines and slots' data together)."""
    lines = size * _line_words(size) * 8
    return lines, lines + size * SLOTS * small_bytes(size)


def small_bytes(size: int) -> int:
    """Bytes of data in each slot of `size` ranks; in a reduction up to this size every rank adds all parts itself."""
    # Above, slices are cheaper: with two ranks sooner than with four, and with many, since each would add much.
    return 1 << 17 if size < 3 else max(1 << 15, (1 << 20) // size // PAGE * PAGE)


def _line_words(size: int) -> int:
    return _LINE + SLOTS * (_TABLE + 2 * size)


class Slots:
    """The slots of one group in one generation, as the rank at `rank` sees them.

    Args:
        ranks: the group's ranks in the mesh.
        block: the offset of the lines, which are zeroed.
        key: a number that no other group has, nor this one in another generation.
        operations: the operations under way, which go on while a call waits for a condition.
        site: tells where the user called the running operation.
    """

    def __init__(
        self,
        arena: Arena,
        ranks: Sequence[int],
        rank: int,
        block: int,
        key: int,
        *,
        operations: Operations,
        site: Callable[[], str],
        spin: bool,
    ):
        self.arena, self.ranks, self.rank, self.size = arena, ranks, rank, len(ranks)
        self.words = arena.words
        self.staging = Staging(arena.heap, arena.results, leads=rank == 0, members=tuple(map(arena.participant, ranks)))
        self.begun = array.array("Q", [0])  # how many operations were begun; not in the line, which peers read
        self._key, self._operations, self._wait, self._site = key, operations, operations.wait_until, site
        self.spins, self._tries = spin, range(SPINS if spin else 1)
        self._free_through = SLOTS  # operations whose slots are known to be free
        self.small_bytes = small_bytes(self.size)
        self._inline = block + block_bytes(self.size)[0]
        self._lines = [block // 8 + each * _line_words(self.size) for each in range(self.size)]
        self._line = self._lines[rank]
        self._slot_words = _TABLE + 2 * self.size
        self._others = [arena.participant(member) for member in ranks if member != ranks[rank]]
        self._sleeping = [arena.bells.at[other] for other in self._others]
        self._own = [self._slot(rank, slot) for slot in range(SLOTS)]
        # By slot, for each peer: the word that says how far it has posted, and the word of its signature.
        self._peers = [
            [(line + _POSTED, self._slot(peer, slot)) for peer, line in enumerate(self._lines) if peer != rank]
            for slot in range(SLOTS)
        ]

    def _slot(self, rank: int, sequence: int) -> int:
        return self._lines[rank] + _LINE + (sequence % SLOTS) * self._slot_words

    def inline(self, rank: int, sequence: int) -> int:
        """The offset of a rank's data that is small enough for its slot."""
        return self._inline + (rank * SLOTS + sequence % SLOTS) * self.small_bytes

    def reserve(self, sequence: int, nbytes: int) -> int:
        """The offset at which this rank stages `nbytes` for others to read."""
        return self.inline(self.rank, sequence) if nbytes <= self.small_bytes else self.staging.stage(sequence, nbytes)

    def offsets(self) -> tuple[tuple[int, int, int, int], ...]:
        """For each rank the offsets of its word of how far it has posted, first slot, that slot's data, and bell."""
        bells = [self.arena.bells.at[self.arena.participant(member)] for member in self.ranks]
        return tuple(
            (8 * (line + _POSTED), 8 * self._slot(rank, 0), self.inline(rank, 0), 8 * bells[rank])
            for rank, line in enumerate(self._lines)
        )

    def strides(self) -> tuple[int, int, int]:
        """How many slots a rank has, the bytes of each slot, and the bytes of its data."""
        return SLOTS, 8 * self._slot_words, self.small_bytes

    # -- beginning and end of an operation -----------------------------------------------------------------------------

    def begin(self, what: str) -> int:
        """Begin the next operation; returns its number, once its slot is free."""
        self.begun[0] = sequence = self.begun[0] + 1
        if not self.is_free(sequence):
            self._wait(lambda: self.is_free(sequence), what)
        self.reclaim()
        return sequence

    def is_free(self, sequence: int) -> bool:
        if sequence > self._free_through:
            self._free_through = SLOTS + self._read_by_all()
        return sequence <= self._free_through

    def _read_by_all(self) -> int:
        return min(self.words[line + _READ] for line in self._lines)

    def reclaim(self) -> None:
        """Free what was staged for operations that all ranks have read."""
        if self.staging.staged:
            self.staging.free_through(self._read_by_all())

    def reduced(self, sequence: int) -> None:
        """Publish that this rank's slice of the result is written."""
        self.words[self._line + _REDUCED] = sequence
        self.wake()

    def read(self, sequence: int) -> None:
        """Publish that this rank reads nothing of this operation any more."""
        self.words[self._line + _READ] = sequence
        self.wake()

    def finish_small(self, sequence: int) -> None:
        """`reduced` and `read` in one, for an operation without a second half; wakes no rank, since none waits."""
        self.words[self._line + _REDUCED] = self.words[self._line + _READ] = sequence

    def all_reduced_by(self, sequence: int) -> Ready:
        """A condition: every rank has written its slice of the result."""
        return lambda: self._all_past(_REDUCED, sequence)

    def all_read(self, sequence: int) -> Ready:
        """A condition: no rank reads another's memory for this operation any more."""
        return lambda: self._all_past(_READ, sequence)

    def _all_past(self, word: int, sequence: int) -> bool:
        words = self.words
        for line in self._lines:  # noqa: SIM110 (a generator expression costs three times as much)
            if words[line + word] < sequence:
                return False
        return True

    def took_part(self, rank: int, sequence: int) -> bool:
        """Whether a rank has done its part of an operation so far: posted, or in the second half, reduced."""
        word = _REDUCED if self.words[self._line + _REDUCED] >= sequence else _POSTED
        return self.words[self._lines[rank] + word] >= sequence

    def calls_of(self, rank: int) -> int:
        """How many operations a rank has posted."""
        return self.words[self._lines[rank] + _POSTED]

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, stage: int) -> None:
        """Publish how far this rank has closed the group: 1, it begins nothing any more; 2, it reads nothing of it."""
        if not self._operations.stale:  # else the first rank may have freed the lines, which are another group's now
            self.words[self._line + _CLOSED] = stage

    def closed(self, rank: int) -> int:
        """How far a rank has closed the group."""
        return self.words[self._lines[rank] + _CLOSED]

    # -- posting -------------------------------------------------------------------------------------------------------

    def post(self, sequence: int, call: Call | None) -> None:
        """Publish which call this rank makes."""
        self.words[self._own[sequence % SLOTS]] = 0 if call is None else call.signature
        self.words[self._line + _POSTED] = sequence
        self.wake()

    def wake(self) -> None:
        """Wake peers that sleep, since this rank has written something that they may wait for."""
        for sleeping in self._sleeping:
            if self.words[sleeping]:
                self.arena.bells.ring(self._others)
                return

    def post_part(self, sequence: int, call: Call, part: tuple[int, int, int, int]) -> None:
        """Publish which call this rank makes, and its part: a `Part`, or four other words for another kind of call."""
        at, words = self._own[sequence % SLOTS] + _TENSOR, self.words
        words[at], words[at + 1], words[at + 2], words[at + 3] = part
        self.post(sequence, call)

    def post_table(self, sequence: int, entries: Sequence[tuple[int, int]]) -> None:
        """Before posting, write (offset, bytes) of the piece for each rank."""
        at, words = self._slot(self.rank, sequence) + _TABLE, self.words
        for rank, (offset, nbytes) in enumerate(entries):
            words[at + 2 * rank], words[at + 2 * rank + 1] = offset, nbytes

    def entry(self, sequence: int, rank: int) -> tuple[int, int]:
        """(offset, bytes) of the piece that a rank has for this one."""
        at = self._slot(rank, sequence) + _TABLE + 2 * self.rank
        return self.words[at], self.words[at + 1]

    def posted(self, sequence: int, call: Call | None) -> Ready:
        """A condition: every peer has posted this operation; raises if one has posted another."""
        words, peers, signature = self.words, self._peers[sequence % SLOTS], call.signature if call is not None else 0

        def ready() -> bool:
            complete = True
            for posted, stated in peers:
                if words[posted] < sequence:
                    complete = False
                elif words[stated] != signature:
                    self._disagree(sequence, call)
            return complete

        return ready

    def await_posted(self, sequence: int, call: Call) -> None:
        """Wait until every peer has posted this operation, in a call that is not driven by steps."""
        words, signature = self.words, call.signature
        if not self.spins and yielded(self.posted(sequence, call)):
            return
        for posted, stated in self._peers[sequence % SLOTS]:
            for _ in self._tries:
                if words[posted] >= sequence:
                    cores.lost -= SAVED_SECONDS
                    break
            else:
                self._wait(lambda posted=posted: words[posted] >= sequence, call.text)  # type: ignore[misc]
            if words[stated] != signature:
                self._disagree(sequence, call)

    def await_ready(self, ready: Ready, call: Call) -> None:
        """Wait for a step's condition, in a call that is not in the queue of operations."""
        for _ in self._tries:
            if ready():
                cores.lost -= SAVED_SECONDS
                return
        if self.spins or not yielded(ready):
            self._wait(ready, call.text)

    def parts(self, sequence: int) -> list[int]:
        """The words of all ranks' parts, four per rank."""
        words, at = self.words, _LINE + (sequence % SLOTS) * self._slot_words + _TENSOR
        found: list[int] = []
        for line in self._lines:
            found += words[line + at : line + at + 4].tolist()
        return found

    # -- where the result goes -----------------------------------------------------------------------------------------

    def announce(self, sequence: int, call: Call, result: Result) -> None:
        """On the first rank, publish where the result goes, before it posts."""
        slot, words = self._slot(self.rank, sequence), self.words
        words[slot + _SIGNATURE] = call.signature
        words[slot + _RESULT], words[slot + _RELEASE] = result
        words[self._line + _ANNOUNCED] = sequence
        self.wake()

    def announced(self, sequence: int, call: Call) -> Ready:
        """A condition: the first rank has said where the result goes; raises if it makes another call."""
        words, leader, slot = self.words, self._lines[0], self._slot(0, sequence)

        def ready() -> bool:
            # A different kind of call is posted without an announcement.
            if words[leader + _ANNOUNCED] < sequence and words[leader + _POSTED] < sequence:
                return False
            if words[slot + _SIGNATURE] != call.signature:
                self.post(sequence, call)
                self._disagree(sequence, call)
            return True

        return ready

    def result(self, sequence: int) -> Result:
        """Where the first rank has said that the result goes."""
        slot = self._slot(0, sequence)
        return Result(self.words[slot + _RESULT], self.words[slot + _RELEASE])

    # -- disagreement --------------------------------------------------------------------------------------------------

    def _disagree(self, sequence: int, call: Call | None) -> NoReturn:
        """Publish what this rank called, wait to learn what the others called, and raise."""
        arena = self.arena
        mine = f"{call.text if call else 'the second half of an operation'}, call {sequence}, at {self._site()}"
        arena.dispute(self._key, mine)
        sides, computed = {self.rank: mine}, dict[int, int]()
        began = held_up = time.monotonic()
        over = False
        while len(sides) < self.size and not over:
            now = time.monotonic()
            if any(self._held_up(rank, computed) for rank in range(self.size) if rank not in sides):
                held_up = now
            over = now - held_up > _MOMENT_SECONDS or now - began > self._operations.timeout or bool(arena.aborted())
            for rank, member in enumerate(self.ranks):
                stated = arena.disputed(arena.participant(member), self._key)
                if rank != self.rank and stated:
                    sides[rank] = stated
            time.sleep(1e-3)
        for rank in range(self.size):
            sides.setdefault(rank, f"is at call {self.calls_of(rank)}, and did not say which")
        raise disagreement(self.ranks, sides)

    def _held_up(self, rank: int, computed: dict[int, int]) -> bool:
        """Whether a rank has had no chance to look yet: it waits for a core, or is stopped.

        Args:
            computed: by rank, its nanoseconds of processor time when it was first asked about.
        """
        pid, _ = self.arena.process(self.arena.participant(self.ranks[rank]))
        status, now = status_of(pid), nanoseconds_of(pid)
        if status is None or not status.get("State", "").startswith(("R", "T")):
            return False
        return now - computed.setdefault(rank, now) < _LOOK_NANOSECONDS
