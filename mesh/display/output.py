"""What ranks print, merged into the driver's streams.

Every rank of an SPMD program prints the same lines. A reader wants each of them once, as soon as it is printed, but
also wants to see the one line that differs. So rank 0's output passes through at once and untouched; a line of another
rank is held for a short window, and is swallowed if rank 0 prints it too, else shown with the ranks that printed it.

Invariant: within a region and a stream, the k-th occurrence of a line on a rank is either shown with that rank in its
label, or rank 0 has printed its own k-th occurrence of the same bytes. Nothing else is dropped, except a progress line
(ended by a carriage return) that its rank replaced by a newer one while it was held. A rank's lines keep their order.
(A line may be counted anew after half of `REMEMBERED` other ones; one that is longer than `LONGEST` is several.)

Pure logic: no threads, no descriptors; the caller passes in the bytes, and the clock is an argument.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from ..failure import rank_runs
from ..spec import Layout

# If rank 0 has begun a line, other ranks' lines wait this many windows for its end; then they break it.
PATIENCE = 10
REMEMBERED = 1 << 16  # different lines of a region whose occurrences are counted: a region may last for days
LONGEST = 1 << 20  # bytes of a line, whose rest counts as the next; what ranks write may be no text


def rank_label(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, runs of them shortened.

    >>> rank_label([2]), rank_label([1, 2, 3, 5])
    ('[rank 2]', '[ranks 1-3,5]')
    """
    return f"[rank{'s' if len(ranks) > 1 else ''} {','.join(rank_runs(ranks))}]"


def coordinates_label(layout: Layout) -> Callable[[Sequence[int]], str]:
    """Labels that give a single rank's coordinates, if the mesh has several axes.

    >>> label = coordinates_label(Layout((("data", 2), ("model", 2))))
    >>> label([3]), label([1, 2, 3])
    ('[rank 3 data=1 model=1]', '[ranks 1-3]')
    """

    def label(ranks: Sequence[int]) -> str:
        if len(ranks) > 1 or len(layout.names) < 2:
            return rank_label(ranks)
        coords = " ".join(f"{name}={index}" for name, index in layout.coords(ranks[0]).items())
        return f"[rank {ranks[0]} {coords}]"

    return label


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    """A held line of one rank; `gone` once it was shown, swallowed or replaced."""

    rank: int
    occurrence: tuple[bytes, int]
    due: float
    progress: bool
    gone: bool = False


class _Splitter:
    """Cuts one rank's bytes into lines, ended by a newline, a carriage return, or a carriage return and newline."""

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False  # the last byte so far was a carriage return that ended a line

    def completes_return(self, data: bytes) -> bool:
        """Whether `data` begins with the newline that belongs to a carriage return before it."""
        return self._returned and data.startswith(b"\n")

    def feed(self, data: bytes) -> Iterable[tuple[bytes, bool]]:
        """The lines that `data` completes, each with whether it is a progress line."""
        parts = re.split(rb"(\r\n|\r|\n)", data[self.completes_return(data) :])
        self._returned = False
        for text, end in zip(parts[:-1:2], parts[1::2], strict=True):
            yield from self._pieces(text)
            line, self._rest = self._rest, b""
            # Bars often begin with a carriage return, which then ends no line.
            self._returned = end == b"\r" and line != b""
            if line or end != b"\r":
                yield line, end == b"\r"
        if parts[-1]:
            self._returned = False
            yield from self._pieces(parts[-1])

    def _pieces(self, text: bytes) -> Iterable[tuple[bytes, bool]]:
        """Add to the unfinished line; gives pieces of it while it is too long."""
        self._rest += text
        while len(self._rest) > LONGEST:
            piece, self._rest = self._rest[:LONGEST], self._rest[LONGEST:]
            yield piece, False

    def finish(self) -> bytes:
        """The unfinished last line, as if it had ended."""
        line, self._rest, self._returned = self._rest, b"", False
        return line


class _Stream:
    """One of the driver's streams: the lines held for it, and the unfinished line on it."""

    def __init__(self, write: Callable[[str], None], size: int, window: float, label: Callable[[Sequence[int]], str]):
        self._write, self._size, self._window, self._label = write, size, window, label
        self._splitters = [_Splitter() for _ in range(size)]
        self._queues: list[deque[_Held]] = [deque() for _ in range(size)]
        self._waiting: defaultdict[tuple[bytes, int], dict[int, _Held]] = defaultdict(dict)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = ""  # rank 0's unfinished line, from its last carriage return on
        self._broken = False  # other ranks' lines were written after it
        self.begin()

    def begin(self) -> None:
        self._counts: dict[bytes, dict[int, int]] = {}

    def feed(self, rank: int, data: bytes, now: float) -> None:
        if rank == 0:
            self._plain(self._decoder.decode(data))
        elif self._splitters[rank].completes_return(data) and self._queues[rank]:
            self._queues[rank][-1].progress = False
        for line, progress in self._splitters[rank].feed(data):
            self._line(rank, line, progress, now)
        self.release(now)

    def flush(self, now: float) -> None:
        self._plain(self._decoder.decode(b"", final=True))
        # Rank 0 first, so that a line that no rank has ended is merged like any other.
        for rank, splitter in enumerate(self._splitters):
            if line := splitter.finish():
                self._line(rank, line, False, now)
        self.release(now, everything=True)

    def wait(self, now: float) -> float | None:
        """Seconds until a held line is due."""
        heads = self._heads()
        if not heads:
            return None
        return max(0.0, min(held.due for held in heads) + self._patience() - now)

    def _line(self, rank: int, line: bytes, progress: bool, now: float) -> None:
        """Count a line of `rank`, and swallow or hold it; a line of rank 0 swallows those of other ranks."""
        queue, due = self._queues[rank], now + self._window
        if progress and queue and queue[-1].progress and not queue[-1].gone:
            # Keep the due time of the replaced line: a bar that moves faster than the window is shown once per window.
            due = queue[-1].due
            self._drop(queue.pop())
        key = line if len(line) <= 64 else hashlib.blake2b(line, digest_size=16).digest()  # a long one is not kept
        counts = self._counts.setdefault(key, {})
        nth = counts[rank] = counts.get(rank, 0) + 1
        occurrence = (line, nth)
        if rank == 0:
            for held in list(self._waiting.get(occurrence, {}).values()):
                self._drop(held)
        elif counts.get(0, 0) < nth:
            queue.append(_Held(rank, occurrence, due, progress))
            self._waiting[occurrence][rank] = queue[-1]
        # Only differences between the counts matter: forget a line that all ranks printed equally often.
        if len(counts) == self._size and min(counts.values()) == max(counts.values()):
            del self._counts[key]
        elif len(self._counts) > REMEMBERED:
            # Many at once: to find a dictionary's first entry takes longer with each that was removed before it.
            self._counts = dict(itertools.islice(self._counts.items(), REMEMBERED // 2, None))

    def _drop(self, held: _Held) -> None:
        held.gone = True
        ranks = self._waiting.get(held.occurrence, {})
        ranks.pop(held.rank, None)
        if not ranks:
            self._waiting.pop(held.occurrence, None)

    def _heads(self) -> list[_Held]:
        """Each rank's oldest held line."""
        heads = []
        for queue in self._queues:
            while queue and queue[0].gone:
                queue.popleft()
            if queue:
                heads.append(queue[0])
        return heads

    def release(self, now: float, *, everything: bool = False) -> None:
        """Show the lines that are due, each with all the ranks for which it is the next line."""
        shown = []
        while due := [held for held in self._heads() if everything or held.due + self._patience() <= now]:
            # If a line is further back on another rank, show the due lines before it first: one label instead of two.
            first = min(due, key=lambda held: (not self._together(held), held.due, held.rank))
            ranks = [held for held in self._waiting[first.occurrence].values() if self._queues[held.rank][0] is held]
            for held in ranks:
                self._drop(held)
            label = self._label(sorted(held.rank for held in ranks))
            shown.append(f"{label} {first.occurrence[0].decode('utf-8', 'replace')}\n")
        if shown:
            if self._stands_open():
                shown.insert(0, "\n")
                self._broken = True
            self._write("".join(shown))

    def _together(self, held: _Held) -> bool:
        return all(self._queues[rank][0] is other for rank, other in self._waiting[held.occurrence].items())

    def _stands_open(self) -> bool:
        return not self._broken and bool(self._open.strip("\r"))

    def _patience(self) -> float:
        """How much longer than a window lines are held, so that rank 0 can end its line.

        Not for a progress bar, which never ends its line and draws all of it again next time: it is broken at once.
        """
        return PATIENCE * self._window if self._stands_open() and "\r" not in self._open else 0.0

    def _plain(self, text: str) -> None:
        """Pass on what rank 0 printed; when a broken line goes on, its beginning is printed again."""
        if not text:
            return
        written = text
        if self._broken:
            self._broken = False
            if text.startswith(("\n", "\r\n")):
                written = text.partition("\n")[2]  # the line was ended already
            elif text[0] != "\r" and not self._open.endswith("\r"):
                written = self._open + text
        self._open = (self._open + text).rpartition("\n")[2]
        self._open = self._open[max(0, self._open.rfind("\r", 0, -1)) :][-LONGEST:]
        if written:
            self._write(written)


class Collator:
    """Merges the ranks' output: rank 0's plain and at once; other ranks' own lines with a label, equal ones once.

    >>> collator = Collator(lambda stream, text: print(text, end=""), size=4, clock=lambda: 0.0)
    >>> for rank in (3, 1, 2, 0):
    ...     collator.feed(rank, "stdout", b"hello\\n" if rank != 2 else b"odd one out\\n")
    hello
    >>> collator.tick()
    0.1
    >>> collator.flush()
    [rank 2] odd one out

    Args:
        write: takes a stream's name and text for it; called with whole lines, except for an unfinished line of rank 0.
        size: the number of ranks.
        clock: the time in seconds.
        window: for how many seconds a line is held to see who else prints it.
        label: takes ranks in ascending order, and gives the text before their line; `rank_label` if None.

    Attributes:
        streams: the streams on which anything was printed.
    """

    def __init__(
        self,
        write: Callable[[str, str], None],
        size: int,
        clock: Callable[[], float] = time.monotonic,
        window: float = 0.1,
        label: Callable[[Sequence[int]], str] | None = None,
    ):
        self._write, self._size, self._clock, self._window = write, size, clock, window
        self._label = label or rank_label
        self.streams: dict[str, _Stream] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take bytes that `rank` has written to `stream` ("stdout" or "stderr")."""
        if not data:
            return
        if stream not in self.streams:
            self.streams[stream] = _Stream(
                lambda text: self._write(stream, text), self._size, self._window, self._label
            )
        self.streams[stream].feed(rank, data, self._clock())

    def tick(self) -> float | None:
        """Show what is due; returns the seconds until more is, or None if nothing is held."""
        now = self._clock()
        for merged in self.streams.values():
            merged.release(now)
        return min((wait for merged in self.streams.values() if (wait := merged.wait(now)) is not None), default=None)

    def begin(self) -> None:
        """Start a region: lines printed from now on are matched only with each other."""
        self.flush()
        for merged in self.streams.values():
            merged.begin()

    def flush(self) -> None:
        """Show everything that is held, including unfinished lines."""
        now = self._clock()
        for merged in self.streams.values():
            merged.flush(now)
