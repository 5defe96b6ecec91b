"""What ranks print: rank 0 at once, others labelled, identical lines once, and no line lost."""

import doctest
import io
import re
import sys
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd import axis_index
from spmd.mesh.display import output
from spmd.mesh.display.output import Collator, rank_label

WINDOW = 0.1


class Screen:
    """A collator over a clock that the test moves, and what it wrote."""

    def __init__(self, size=4, **options):
        self.now = 0.0
        self.writes: list[tuple[str, str]] = []
        self.collator = Collator(
            lambda stream, text: self.writes.append((stream, text)),
            size,
            clock=lambda: self.now,
            window=WINDOW,
            **options,
        )

    def feed(self, rank, text, stream="stdout"):
        self.collator.feed(rank, stream, text if isinstance(text, bytes) else text.encode())

    def wait(self, seconds=WINDOW):
        self.now += seconds
        return self.collator.tick()

    def text(self, stream="stdout"):
        return "".join(text for name, text in self.writes if name == stream)


@pytest.fixture
def screen():
    return Screen()


def test_examples():
    assert doctest.testmod(output).failed == 0


def test_labels_name_single_ranks_and_runs():
    assert [rank_label(ranks) for ranks in ([2], [1, 2], [1, 2, 3, 5], [0, 2, 4])] == [
        "[rank 2]",
        "[ranks 1-2]",
        "[ranks 1-3,5]",
        "[ranks 0,2,4]",
    ]


def test_rank_0_comes_out_at_once_and_plain(screen):
    screen.feed(0, "loss ")
    assert screen.text() == "loss "
    screen.feed(0, "0.5\nnext")
    assert screen.text() == "loss 0.5\nnext"
    assert screen.collator.tick() is None


def test_the_same_line_of_all_ranks_is_shown_once(screen):
    for rank in (2, 0, 3, 1):
        screen.feed(rank, "epoch 1\n")
    screen.wait()
    screen.collator.flush()
    assert screen.text() == "epoch 1\n"


def test_a_line_of_one_rank_waits_for_the_window_and_no_longer(screen):
    screen.feed(2, "only here\n")
    assert screen.collator.tick() == pytest.approx(WINDOW)
    assert screen.wait(0.06) == pytest.approx(0.04)
    assert screen.text() == ""
    assert screen.wait(0.04) is None
    assert screen.text() == "[rank 2] only here\n"


def test_several_ranks_with_the_same_line_share_a_label():
    screen = Screen(size=6)
    for rank in (5, 1, 3, 2):
        screen.feed(rank, "not on 0\n")
    screen.wait()
    assert screen.text() == "[ranks 1-3,5] not on 0\n"


def test_the_kth_occurrence_matches_the_kth(screen):
    screen.feed(0, "step\n" * 2)
    screen.feed(1, "step\n" * 3)
    screen.collator.flush()
    assert screen.text() == "step\nstep\n[rank 1] step\n"


def test_a_region_matches_its_own_lines_only(screen):
    screen.feed(0, "step\n")
    screen.collator.begin()
    screen.feed(1, "step\n")
    screen.collator.flush()
    assert screen.text() == "step\n[rank 1] step\n"


def test_streams_are_separate(screen):
    screen.feed(0, "x\n", "stdout")
    screen.feed(1, "x\n", "stderr")
    screen.collator.flush()
    assert screen.writes == [("stdout", "x\n"), ("stderr", "[rank 1] x\n")]


def test_rank_0_is_never_lost_when_it_is_late(screen):
    screen.feed(1, "slow\n")
    screen.wait()
    screen.feed(0, "slow\n")
    screen.feed(2, "slow\n")
    screen.collator.flush()
    assert screen.text() == "[rank 1] slow\nslow\n"


def test_lines_of_a_rank_keep_their_order(screen):
    screen.feed(1, "a\nb\n")
    screen.feed(2, "b\na\n")
    screen.collator.flush()
    shown = screen.text().splitlines()
    for rank, order in ((1, ["a", "b"]), (2, ["b", "a"])):
        assert [line[-1] for line in shown if re.match(rf"\[ranks? [^]]*{rank}", line)] == order


def test_a_shared_line_waits_for_the_lines_before_it_that_are_due_as_well(screen):
    for rank in (1, 2, 3):
        screen.feed(rank, f"hello from {rank}\ndone\n")
    screen.wait()
    assert screen.text() == ("[rank 1] hello from 1\n[rank 2] hello from 2\n[rank 3] hello from 3\n[ranks 1-3] done\n")


def test_an_earlier_line_still_waiting_is_not_overtaken(screen):
    screen.feed(1, "shared\n")
    screen.now = 0.09
    screen.feed(2, "first\nshared\n")
    screen.wait(0.02)
    assert screen.text() == "[rank 1] shared\n"
    screen.feed(0, "first\n")
    screen.wait()
    assert screen.text() == "[rank 1] shared\nfirst\n[rank 2] shared\n"


def test_unfinished_lines_of_others_wait_for_their_end_or_the_flush(screen):
    screen.feed(1, "half")
    assert screen.wait(10) is None
    screen.feed(1, " whole\nrest")
    screen.wait()
    assert screen.text() == "[rank 1] half whole\n"
    screen.collator.flush()
    assert screen.text() == "[rank 1] half whole\n[rank 1] rest\n"


def test_dots_without_a_newline_are_collapsed_region_by_region(screen):
    for _ in range(3):
        screen.collator.begin()
        for rank in (1, 0, 2):
            screen.feed(rank, ".")
        screen.collator.flush()
    assert screen.text() == "..."


def test_a_character_may_be_split_across_feeds(screen):
    for byte in "ä€😀\n".encode():
        for rank in (0, 1, 2):
            screen.feed(rank, bytes([byte]) if rank < 2 else bytes([byte]).replace(b"\n", b"!\n"))
    screen.collator.flush()
    assert screen.text() == "ä€😀\n[rank 2] ä€😀!\n"


def test_bytes_that_are_no_text_are_replaced_but_told_apart(screen):
    screen.feed(0, b"\xff\n")
    screen.feed(1, b"\xfe\n")
    screen.feed(2, b"\xff\n")
    screen.collator.flush()
    assert screen.text() == "\ufffd\n[rank 1] \ufffd\n"


def test_a_progress_line_shows_its_last_state_in_a_window(screen):
    for percent in (10, 20, 30):
        screen.feed(1, f"{percent}%\r")
    screen.wait()
    assert screen.text() == "[rank 1] 30%\n"
    for percent in range(40, 100):
        screen.feed(1, f"{percent}%\r")
        screen.wait(0.03)
    assert len(screen.text().splitlines()) == pytest.approx(60 * 0.03 / WINDOW, abs=3)
    screen.feed(1, "100%\n")
    screen.collator.flush()
    assert screen.text().endswith("[rank 1] 100%\n")


def test_progress_lines_that_rank_0_draws_too_are_collapsed(screen):
    for percent in (10, 20, 100):
        for rank in (1, 0, 2):
            screen.feed(rank, f"\r{percent}%")
    for rank in (1, 0, 2):
        screen.feed(rank, "\n")
    screen.collator.flush()
    assert screen.text() == "\r10%\r20%\r100%\n"


@pytest.mark.parametrize("chunks", [["a\r\nb\r\n"], ["a\r", "\nb\r", "\n"], ["a\r\n", "b", "\r\n"], list("a\r\nb\r\n")])
def test_carriage_return_and_newline_are_one_end(screen, chunks):
    for chunk in chunks:
        screen.feed(1, chunk)
    screen.feed(0, "a\n")
    screen.collator.flush()
    assert screen.text() == "a\n[rank 1] b\n"


@pytest.mark.parametrize("chunks", [["\r\n"], ["\r", "\n"]])
def test_an_empty_line_stays_a_line(screen, chunks):
    for chunk in chunks:
        screen.feed(1, chunk)
    screen.collator.flush()
    assert screen.text() == "[rank 1] \n"


def test_others_wait_while_rank_0_has_begun_a_line(screen):
    screen.feed(0, "compiling ... ")
    screen.feed(1, "here\n")
    assert screen.wait() > 0
    assert screen.text() == "compiling ... "
    screen.feed(0, "done\n")
    assert screen.text() == "compiling ... done\n[rank 1] here\n"


def test_a_line_that_rank_0_leaves_open_is_broken_and_drawn_again(screen):
    screen.feed(0, "compiling ... ")
    screen.feed(1, "here\n")
    screen.wait(10 * screen.wait())
    assert screen.text() == "compiling ... \n[rank 1] here\n"
    screen.feed(0, "done")
    assert screen.text() == "compiling ... \n[rank 1] here\ncompiling ... done"
    screen.feed(2, "there\n")
    screen.collator.flush()
    screen.feed(0, "\n")
    assert screen.text() == "compiling ... \n[rank 1] here\ncompiling ... done\n[rank 2] there\n"


def test_a_progress_bar_of_rank_0_is_broken_at_once(screen):
    screen.feed(0, "\r10% ")
    screen.feed(1, "here\n")
    screen.wait()
    screen.feed(0, "\r20% ")
    assert screen.text() == "\r10% \n[rank 1] here\n\r20% "


def test_a_label_of_your_own():
    screen = Screen(label=lambda ranks: f"<{ranks}>")
    screen.feed(2, "x\n")
    screen.feed(1, "x\n")
    screen.collator.flush()
    assert screen.text() == "<[1, 2]> x\n"


SIZE = 4
LINES = st.sampled_from(["a\n", "b\n", "é\n", "\n", "a b\n"])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, SIZE - 1), st.lists(LINES, min_size=1, max_size=4).map("".join)),
        st.sampled_from([0.0, 0.03, 0.1, 2.0]),
    ),
    max_size=40,
)


def ranks_of(label):
    for run in label.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def is_subsequence(part, whole):
    rest = iter(whole)
    return all(item in rest for item in part)


@given(EVENTS, st.integers(1, 5))
def test_no_line_is_lost(events, chunk):
    screen = Screen(SIZE)
    printed = [""] * SIZE
    for event in events:
        if isinstance(event, float):
            screen.wait(event)
        else:
            rank, text = event
            printed[rank] += text
            # In small pieces, so that characters and lines are cut anywhere.
            data = text.encode()
            for start in range(0, len(data), chunk):
                screen.feed(rank, data[start : start + chunk])
    screen.collator.flush()
    assert screen.collator.tick() is None

    shown: list[list[str]] = [[] for _ in range(SIZE)]
    for line in screen.text().split("\n")[:-1]:
        label = re.fullmatch(r"\[ranks? ([\d,-]+)\] (.*)", line)
        for rank in ranks_of(label[1]) if label else [0]:
            shown[rank].append(label[2] if label else line)
    lines = [text.split("\n")[:-1] for text in printed]
    assert shown[0] == lines[0]
    by_zero = Counter(lines[0])
    for rank in range(1, SIZE):
        assert is_subsequence(shown[rank], lines[rank])
        for line, count in Counter(lines[rank]).items():
            assert count - by_zero[line] <= shown[rank].count(line) <= count


@given(EVENTS, st.integers(1, 5))
def test_lines_ready_before_any_window_ends_are_collapsed_exactly(events, chunk):
    screen = Screen(SIZE)
    counts: list[Counter[str]] = [Counter() for _ in range(SIZE)]
    for event in events:
        if isinstance(event, tuple):
            rank, text = event
            counts[rank].update(text.split("\n")[:-1])
            screen.feed(rank, text)
    screen.collator.flush()
    shown: Counter[tuple[int, str]] = Counter()
    for label, line in re.findall(r"\[ranks? ([\d,-]+)\] (.*)\n", screen.text()):
        shown.update((rank, line) for rank in ranks_of(label))
    assert shown == Counter(
        {
            (rank, line): count - counts[0][line]
            for rank in range(1, SIZE)
            for line, count in counts[rank].items()
            if count > counts[0][line]
        }
    )


def memory_of(feed):
    """Bytes that are held after 3000 calls of `feed`, each with a number, over those after 1000."""
    tracemalloc.start()
    try:
        for number in range(1000):
            feed(number)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000, 3000):
            feed(number)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_region_of_many_lines_takes_no_more_memory(rank, monkeypatch):
    monkeypatch.setattr(output, "REMEMBERED", 100)
    collator = Collator(lambda stream, text: None, 2, window=0.0)
    assert memory_of(lambda number: collator.feed(rank, "stdout", b"line %d of one rank\n" % number)) < 1 << 15


@pytest.mark.parametrize("rank", [0, 1])
def test_a_line_without_end_takes_no_more_memory(rank, monkeypatch):
    monkeypatch.setattr(output, "LONGEST", 1000)
    monkeypatch.setattr(output, "REMEMBERED", 100)
    collator = Collator(lambda stream, text: None, 2, window=0.0)
    assert memory_of(lambda number: collator.feed(rank, "stdout", b"%0100d" % number)) < 1 << 15


def test_a_line_that_is_too_long_comes_in_pieces(screen, monkeypatch):
    monkeypatch.setattr(output, "LONGEST", 8)
    for part in (b"abc", b"defghijklm", b"nopqrs\n"):
        screen.feed(1, part)
    screen.feed(2, "abcdefghijklmnopqrs\n")
    screen.wait()
    assert screen.text() == "[ranks 1-2] abcdefgh\n[ranks 1-2] ijklmnop\n[ranks 1-2] qrs\n"


def test_characters_that_the_programs_encoding_lacks(shared_mesh, monkeypatch):
    mesh, screen = shared_mesh({"data": 2}), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, encoding="ascii"))
    mesh.run(lambda: axis_index("data") or print("10 \u00b5s"))
    assert screen.getvalue() == b"10 \\xb5s\n"
