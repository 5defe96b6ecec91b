"""The arena, with several participants of it in one process: memory, directory, board."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import until

from spmd import CollectiveMismatch, MeshError, PeerLost
from spmd.kernels.call import word_key
from spmd.kernels.errors import Aborted
from spmd.kernels.shm import arena as arena_module
from spmd.kernels.shm import board, pages
from spmd.kernels.shm import heap as heap_module
from spmd.kernels.shm.arena import Arena
from spmd.kernels.shm.blocks import Result
from spmd.kernels.shm.heap import Heap
from spmd.kernels.shm.pages import PAGE, any_copied

SIZE = 2
EVERYONE = tuple(range(SIZE))


@pytest.fixture
def participants() -> Iterator[list[Arena]]:
    """Ranks 0 and 1 and the driver, each with a mapping of its own."""
    fd = arena_module.create(SIZE)
    made = [Arena(fd, SIZE, rank) for rank in range(SIZE + 1)]
    made[SIZE].clear(1)
    for arena in made:
        arena.generation = 1
    yield made
    for arena in made:
        arena.close()
    os.close(fd)


# -- the heap ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 40))
def test_size_classes(nbytes: int) -> None:
    """Whole pages, at most an eighth or a page more than asked for, few of them, and stable."""
    size = Heap.rounded(nbytes)
    assert size % PAGE == 0
    assert nbytes <= size <= max(PAGE, nbytes + nbytes // 8 + PAGE)
    assert Heap.rounded(size) == size
    octave = {Heap.rounded(n) for n in range(1 << 20, 1 << 21, 4096)}
    assert len(octave) <= 9


def test_blocks_are_used_again() -> None:
    heap = Heap(1 << 20, 1 << 20, lambda *_: None)
    first, second = heap.allocate(5000), heap.allocate(5000)
    assert first == 1 << 20
    assert second - first == Heap.rounded(5000)
    heap.free(first, 5000)
    assert heap.allocate(100) not in (first, second)  # another class
    assert heap.allocate(6000) == first  # the same class
    assert heap.allocate(5000) not in (first, second)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=60))
def test_blocks_never_overlap(steps: list[tuple[int, bool]]) -> None:
    heap = Heap(0, 1 << 30, lambda *_: None)
    held: dict[int, int] = {}
    for nbytes, drop in steps:
        if drop and held:
            heap.free(*held.popitem())
            continue
        offset = heap.allocate(nbytes)
        assert all(offset + nbytes <= at or at + size <= offset for at, size in held.items())
        held[offset] = nbytes


def test_a_full_heap_says_what_to_do() -> None:
    heap = Heap(0, 10 * PAGE, lambda *_: None)
    heap.allocate(8 * PAGE)
    with pytest.raises(MeshError, match=r"arena is full .*12288 bytes asked for.*comm\.empty"):
        heap.allocate(3 * PAGE)


def test_free_memory_is_given_back_past_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 4 * PAGE)
    given_back: list[tuple[int, int]] = []
    heap = Heap(0, 1 << 20, lambda offset, nbytes: given_back.append((offset, nbytes)))
    blocks = [heap.allocate(PAGE) for _ in range(7)]
    for _ in range(3):  # the count of what is kept stays right over many rounds
        given_back.clear()
        for block in blocks:
            heap.free(block, PAGE)
        assert not given_back, "seven were in use at once"
        heap.trim()
        assert not given_back, "and may soon be wanted again"
        heap.trim()
        assert len(given_back) == 3
        assert sorted(heap.allocate(PAGE) for _ in range(7)) == sorted(blocks)


def test_what_a_step_frees_stays_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 0)
    given_back: list[int] = []
    heap = Heap(0, 1 << 30, lambda offset, nbytes: given_back.append(nbytes))
    sizes = [48 * PAGE, 20 * PAGE, 20 * PAGE]

    def step(old: list[int]) -> list[int]:
        gradient = heap.allocate(60 * PAGE)
        heap.free(gradient, 60 * PAGE)
        new = [heap.allocate(size) for size in sizes]
        for offset, size in zip(old, sizes, strict=True):
            heap.free(offset, size)
        return new

    values, tops = [heap.allocate(size) for size in sizes], set()
    for number in range(40):
        values = step(values)
        tops.add(heap.untouched[0])
        if number % 4 == 0:
            heap.trim()
    assert len(tops) == 1 and not given_back
    # Nothing but the values lasts through steps of another kind, and the other kind's memory is kept as well.
    for number in range(40):
        heap.free(heap.allocate(8 * PAGE), 8 * PAGE)
        if number % 4 == 0:
            heap.trim()
    assert sum(given_back) == heap.untouched[0] - sum(sizes) - 8 * PAGE


def test_free_memory_is_given_back_where_the_host_runs_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 0)
    monkeypatch.setattr(heap_module, "available_bytes", lambda: 10 * PAGE)
    given_back: list[int] = []
    heap = Heap(0, 1 << 30, lambda offset, nbytes: given_back.append(nbytes))
    heap.allocate(20 * PAGE)  # so much may be kept
    for nbytes in (4 * PAGE, 6 * PAGE, 8 * PAGE):
        heap.free(heap.allocate(nbytes), nbytes)
    assert not given_back
    heap.allocate(9 * PAGE)
    assert given_back == [4 * PAGE, 6 * PAGE, 8 * PAGE]


def test_what_was_given_back_is_not_given_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    available = [10 * PAGE]
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 0)
    monkeypatch.setattr(heap_module, "available_bytes", lambda: available[0])
    given_back: list[int] = []
    heap = Heap(0, 1 << 30, lambda offset, nbytes: given_back.append(nbytes))
    heap.allocate(50 * PAGE)
    blocks = [heap.allocate(4 * PAGE) for _ in range(3)]
    for block in blocks:
        heap.free(block, 4 * PAGE)
    heap.trim()
    heap.allocate(9 * PAGE)  # the host runs short of memory
    assert given_back == [4 * PAGE] * 3
    available[0] = 1 << 40
    heap.free(heap.allocate(40 * PAGE), 40 * PAGE)
    heap.trim()
    assert given_back == [4 * PAGE] * 3


def resident_pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def test_given_back_memory_is_free(participants: list[Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 0)
    before = resident_pages(participants[0].fd)
    tensor = participants[0].empty((100 * PAGE,), torch.uint8)
    tensor.fill_(1)
    assert resident_pages(participants[0].fd) >= before + 100
    del tensor
    gc.collect()
    participants[0].heap.trim()
    participants[0].heap.trim()
    assert resident_pages(participants[0].fd) <= before + 1


def test_a_rank_that_replaces_another_keeps_what_its_steps_free(
    participants: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap_module, "_KEPT_FREE_BYTES", 0)
    first = participants[0]
    offset = first.heap.allocate(100 * PAGE)
    first.tensor(offset, 100 * PAGE, torch.uint8).fill_(1)
    second = Arena(first.fd, SIZE, 0)
    second.restart_heap([])
    before = resident_pages(first.fd)
    for _ in range(3):  # the dead rank's value goes, and new ones come and go
        second.heap.free(offset, 100 * PAGE)
        assert resident_pages(first.fd) == before
        offset = second.heap.allocate(100 * PAGE)
    second.close()


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_tensors_are_shared(participants: list[Arena]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint16):
        mine = participants[0].empty((3, 5), dtype)
        mine.fill_(1)
        offset = participants[0].offset_of(mine)
        assert offset is not None
        theirs = participants[1].tensor(offset, 15, dtype)
        assert torch.equal(theirs.view(3, 5), mine)
        theirs[0] = 0
        assert not mine[0, 0]


def test_empty_shapes(participants: list[Arena]) -> None:
    assert participants[0].empty((), torch.float64).shape == ()
    nothing = participants[0].empty((2, 0), torch.float32)
    assert nothing.shape == (2, 0)
    assert participants[0].offset_of(nothing) is None
    assert participants[0].tensor(PAGE, 0, torch.float32).shape == (0,)


def test_offset_of(participants: list[Arena]) -> None:
    arena = participants[0]
    whole = arena.empty((4, 6), torch.float32)
    start = arena.offset_of(whole)
    assert start is not None
    assert arena.offset_of(whole[1:3]) == start + 24
    assert arena.offset_of(whole.mT) is None
    assert arena.offset_of(torch.ones(3)) is None


def test_a_block_is_free_once_nothing_refers_to_it(participants: list[Arena]) -> None:
    arena = participants[0]
    first = arena.empty((1000,), torch.float64)
    offset = arena.offset_of(first)
    view = first[10:20].view(2, 5)
    del first
    gc.collect()
    assert arena.offset_of(arena.empty((1000,), torch.float64)) != offset  # the view still needs it
    del view
    gc.collect()
    assert arena.offset_of(arena.empty((1000,), torch.float64)) == offset


# -- results -----------------------------------------------------------------------------------------------------------


def view_of(arena: Arena, result: Result, numel: int) -> torch.Tensor:
    return arena.views.take(result, numel, torch.float32, user=arena.rank, users=SIZE)


def view_all(participants: list[Arena], numel: int) -> tuple[int, list[torch.Tensor]]:
    result = participants[0].results.take(4 * numel, EVERYONE)
    return result.block, [view_of(participants[rank], result, numel) for rank in range(SIZE)]


def test_results_are_private_copies_on_write(participants: list[Arena]) -> None:
    numel = 3000
    for turn in range(1, 4):
        block, views = view_all(participants, numel)
        participants[1].tensor(block, numel, torch.float32).fill_(turn)
        assert all(bool((view == turn).all()) for view in views)
        assert all(participants[rank].is_borrowed(views[rank]) for rank in range(SIZE))
        views[0][1500] = -1.0
        views[1].numpy()[-1] = -2.0
        assert views[1][1500] == turn
        assert views[0][-1] == turn
        assert participants[0].tensor(block, numel, torch.float32)[1500] == turn
        if turn == 1:
            first = block
        assert block == first  # each turn finds it free again, and unwritten
        del views


def test_a_viewed_block_is_not_used_again(participants: list[Arena]) -> None:
    first, views = view_all(participants, 2000)
    second, others = view_all(participants, 2000)
    assert first != second
    part = views[0][5:6]
    del views
    third, _ = view_all(participants, 2000)
    assert third not in (first, second)
    del part, others
    assert view_all(participants, 2000)[0] in (first, second)


def test_blocks_of_a_failed_region_come_back(participants: list[Arena]) -> None:
    """One rank never came to view its result; another still holds one when the next generation begins."""
    result, held_result = (participants[0].results.take(8000, EVERYONE) for _ in range(2))
    block, held_block = result.block, held_result.block
    view_of(participants[0], result, 2000)
    held = view_of(participants[1], held_result, 2000)
    assert participants[0].results.take(8000, EVERYONE).block not in (block, held_block)
    for arena in participants:
        arena.generation = 2
    assert block in {view_all(participants, 2000)[0] for _ in range(3)}
    assert held_block not in {view_all(participants, 2000)[0] for _ in range(5)}
    del held
    assert held_block in {view_all(participants, 2000)[0] for _ in range(5)}


def test_a_block_is_shown_afresh_after_a_change(participants: list[Arena]) -> None:
    """A page that a rank has written is its own copy, and must not outlive the view."""
    for turn in range(4):
        block, (view, other) = view_all(participants, 5000)
        participants[1].tensor(block, 5000, torch.float32).fill_(turn)
        assert bool((view == turn).all())
        view[turn * 1024] = -1.0
        del view, other


# -- directory ---------------------------------------------------------------------------------------------------------


def test_directory(participants: list[Arena]) -> None:
    mine, theirs, driver = participants
    key = word_key("comm", (0, 1), "main")
    assert theirs.directory.lookup(0, key) is None
    mine.directory.publish(key, 12 * PAGE)
    mine.directory.publish(word_key("another"), 13 * PAGE)
    assert theirs.directory.lookup(0, key) == 12 * PAGE
    assert theirs.directory.lookup(0, word_key("another")) == 13 * PAGE
    assert theirs.directory.lookup(1, key) is None  # each rank's own
    driver.clear(2)
    assert theirs.directory.lookup(0, key) is None


def test_what_is_forgotten_makes_room(participants: list[Arena]) -> None:
    mine, theirs, _ = participants
    for number in range(1, 20_000):  # more than there is room for at a time
        mine.directory.publish(number, 10 * number)
        if number > 5:
            mine.directory.forget(number - 5)
    assert [theirs.directory.lookup(0, number) for number in (19_993, 19_994, 19_995, 19_999)] == [
        *(None, None),
        *(199_950, 199_990),
    ]
    mine.directory.forget(123)  # never published


def test_a_full_directory_is_an_error(participants: list[Arena]) -> None:
    with pytest.raises(MeshError, match="too many communicators"):
        for number in range(1 << 16):
            participants[0].directory.publish(number, number)
    assert participants[1].directory.lookup(0, 3) == 3


def test_word_keys() -> None:
    keys = {word_key(*parts) for parts in [("a", 1), ("a", "1"), (("a", 1),), ("a1",), ("a", 2)]}
    assert len(keys) == 5
    assert all(0 <= key < 1 << 63 for key in keys)
    assert word_key("comm", (0, 1)) == word_key("comm", (0, 1))


# -- board -------------------------------------------------------------------------------------------------------------


def test_texts(participants: list[Arena]) -> None:
    mine, theirs, _ = participants
    assert theirs.status(0) == ""
    mine.set_status("waiting in all_reduce, bei Zeile 12 — ü")
    assert theirs.status(0) == "waiting in all_reduce, bei Zeile 12 — ü"
    mine.set_status("x" * 100_000)
    assert set(theirs.status(0)) == {"x"}
    assert 1000 < len(theirs.status(0)) < 4096
    assert theirs.status(1) == ""


def test_abort(participants: list[Arena]) -> None:
    mine, theirs, driver = participants
    theirs.check()
    assert theirs.aborted() == {}
    mine.abort("rank 0: ValueError: no")
    driver.abort("interrupted")
    with pytest.raises(Aborted, match="rank 0: ValueError: no; interrupted"):
        theirs.check()
    assert theirs.aborted() == {0: "rank 0: ValueError: no", SIZE: "interrupted"}
    driver.clear(2)
    theirs.check()
    assert theirs.aborted() == {}
    assert theirs.status(0) == ""
    assert theirs.shared_generation == 2


def test_regions(participants: list[Arena]) -> None:
    mine, theirs, _ = participants
    assert theirs.region(0) == (0, False)
    mine.set_status("from an earlier region")
    mine.enter(4)
    assert theirs.region(0) == (4, True)
    assert theirs.status(0) == ""
    mine.leave()
    assert theirs.region(0) == (4, False)


def test_a_rank_that_enters_never_looks_as_if_it_had_left(participants: list[Arena]) -> None:
    """Whatever moment a peer looks at: it would give up an operation that this rank is about to take part in."""
    mine, theirs, *_ = participants
    seen: list[tuple[int, bool]] = []

    class Watched:
        def __setitem__(self, word: int, value: int) -> None:
            words[word] = value
            seen.append(theirs.region(0))

    words, mine.words = mine.words, Watched()  # type: ignore[assignment]
    try:
        for region in (4, 5):
            mine.enter(region)
            assert seen[-1] == (region, True) and (region, False) not in seen
            mine.leave()
            seen.clear()
    finally:
        mine.words = words


def test_a_rank_that_enters_while_its_call_is_read_makes_no_other_one(
    participants: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before it entered is the name of an earlier call."""
    waiting, late, _ = participants
    late.enter(1, "evaluate")
    late.leave()
    waiting.enter(3, "train")
    read = waiting._call_at

    def read_late(participant: int, region: int) -> bytes:
        text = bytes(read(participant, region))
        if participant == 1:
            late.enter(3, "train")
        return text

    with monkeypatch.context() as patched:
        patched.setattr(waiting, "_call_at", read_late)
        waiting.check_calls([1], lambda: "psum")
    late.enter(3, "evaluate")
    with pytest.raises(CollectiveMismatch, match=r"rank 0: train, waiting in psum\n  rank 1: evaluate\n"):
        waiting.check_calls([1], lambda: "psum")


def test_a_status_that_is_written_while_it_is_read(participants: list[Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not cut off at the length of the one before."""
    writer, reader, _ = participants
    writer.set_status("waiting in barrier")
    memory, text = reader._bytes, "all_reduce float32[2] (sum), call 3, at program.py:7"

    class Memory:
        def __getitem__(self, part: slice) -> memoryview:
            monkeypatch.undo()
            writer.set_status(text)
            return memory[part]

    monkeypatch.setattr(reader, "_bytes", Memory())
    assert reader.status(0) == text


def test_quiet(participants: list[Arena]) -> None:
    assert participants[1].quiet_generation(0) == 0
    participants[0].quiet(3)
    assert participants[1].quiet_generation(0) == 3
    assert participants[1].quiet_generation(1) == 0


def test_a_dead_peer_is_noticed(participants: list[Arena]) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    participants[0].words[participants[0]._status(1) + board._PID] = child.pid
    participants[0].watch_processes()
    participants[0].check_peers()
    child.stdin.close()
    child.wait()
    with pytest.raises(PeerLost, match=r"rank 1 died or exited.*all ranks must make this call") as caught:
        participants[0].check_peers()
    assert caught.value.rank == 1


def test_a_peer_that_was_killed_for_memory(participants: list[Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernel's count of such kills has risen since the ranks met."""
    child = subprocess.Popen(["true"])
    participants[0].words[participants[0]._status(1) + board._PID] = child.pid
    participants[0].watch_processes()
    child.wait()
    monkeypatch.setattr(board, "memory_kills", lambda: 1 << 60)
    with pytest.raises(PeerLost, match=r"rank 1 died or exited.*a kill for memory, by all appearances.*more memory"):
        participants[0].check_peers()


def test_of_several_dead_peers_one_that_did_not_give_up_is_named(participants: list[Arena]) -> None:
    """Rank 0 gave up because of rank 1, and ended, before this rank looked."""
    children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    looking = participants[2]
    for rank, child in enumerate(children):
        looking.words[looking._status(rank) + board._PID] = child.pid
    looking.watch_processes()
    participants[0].abort("rank 0: PeerLost: rank 1 died or exited while rank 0 waited for it")
    for child in children:
        child.communicate()
    with pytest.raises(PeerLost, match="rank 1 died or exited while rank 2 waited") as caught:
        looking.check_peers()
    assert caught.value.rank == 1


def test_a_process_that_replaces_another_has_published_no_stacks_yet(participants: list[Arena]) -> None:
    """It would be killed by the signal that asks for them."""
    driver = participants[SIZE]
    participants[1].publish_stacks(7)
    assert driver.process(1) == (os.getpid(), 7)
    Arena(driver.fd, SIZE, 1).close()
    assert driver.process(1) == (os.getpid(), -1)


def test_who_sleeps_is_woken(participants: list[Arena]) -> None:
    """Rung once, it sleeps no more; what rings before it sleeps counts, too."""
    mine, theirs, _ = participants
    rung: list[int] = []

    def wake() -> None:
        while not mine.words[mine.bells.at[0]]:
            time.sleep(1e-3)
        rung.append(1)
        theirs.bells.ring([0])

    for _ in range(5):
        rung.clear()
        ringer = threading.Thread(target=wake)
        ringer.start()
        while not rung:
            mine.bells.sleep(lambda: False)
        ringer.join()
        assert not mine.words[mine.bells.at[0]]
    mine.bells.sleep(lambda: theirs.bells.ring([0]) is None)  # ready by the time that it looks


def test_answers_come_in_order(participants: list[Arena]) -> None:
    """Of each rank, and after the messages that it had sent before; what has no room is to be answered otherwise."""
    first, second, driver = (each.answers for each in participants)
    assert not driver.waiting()
    assert first.put(7, 0, b"a" * 232) and second.put(7, 2, b"") and second.put(8, 2, b"b")
    assert not first.put(8, 0, b"a" * 233)
    assert driver.waiting()
    assert [*driver.take()] == [(0, 7, b"a" * 232)]
    assert not driver.waiting()
    driver.received[1] = 2
    assert driver.waiting()
    assert [*driver.take()] == [(1, 7, b""), (1, 8, b"b")]
    answered = 0
    while first.put(answered, 0, b""):
        answered += 1
    assert [task for _, task, _ in driver.take()] == [*range(answered)]
    assert first.put(answered, 0, b"") and [*driver.take()] == [(0, answered, b"")]


def test_the_last_to_answer_wakes_the_driver(participants: list[Arena]) -> None:
    first, second, driver = participants
    rung = driver.bells.at[SIZE] + 1

    def times(answer: Callable[[], object]) -> int:
        driver.words[driver.bells.at[SIZE]] = 1  # as if it slept
        before = driver.words[rung]
        answer()
        return driver.words[rung] - before

    assert times(lambda: first.answers.put(1, 0, b"")) == 0
    assert times(lambda: second.answers.put(1, 0, b"")) == 1
    assert times(lambda: second.answers.note(2)) == 0
    assert times(lambda: first.answers.put(2, 0, b"")) == 1


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_has_no_name_and_costs_nothing(participants: list[Arena]) -> None:
    link = os.readlink(f"/proc/self/fd/{participants[0].fd}")
    assert "memfd:spmd-arena" in link
    assert not [name for name in os.listdir("/dev/shm") if "spmd" in name]
    assert resident_pages(participants[0].fd) < 64  # however large the address space
    assert os.fstat(participants[0].fd).st_size > 1 << 29


def test_opened_by_another_process(participants: list[Arena]) -> None:
    fd = arena_module.open_of(os.getpid(), participants[0].fd, participants[0].size)
    other = Arena(fd, SIZE, 1)
    participants[0].set_status("here")
    assert other.status(0) == "here"
    os.close(fd)


def _memfd(name: str, nbytes: int, seals: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, CONTENT)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _of_another_user(name: str, nbytes: int, seals: int) -> int:
    """A memfd that is right but for who made it."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        socket.send_fds(theirs, [b"x"], [_memfd(name, nbytes, seals)])
        os._exit(0)
    os.waitpid(pid, 0)
    _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    theirs.close()
    return fd


CONTENT = b"somebody's own"
WHAT = [
    "a file",
    "a file that is called so",
    "a memfd of another name",
    "another size",
    "not sealed",
    "another user's",
    "a fifo",
    "nothing",
]


@pytest.mark.parametrize("what", WHAT)
def test_what_is_named_as_a_peers_memory_and_is_none(participants: list[Arena], tmp_path: Path, what: str) -> None:
    """It is refused, and stays as it is, byte by byte."""
    nbytes = os.fstat(participants[0].fd).st_size
    name, seals = arena_module._NAME, arena_module._SEALS
    if what.startswith("a file"):
        path = tmp_path / (f"memfd:{name} (deleted)" if "called" in what else "file")
        path.write_bytes(CONTENT)
        os.truncate(path, nbytes)
        fd = os.open(path, os.O_RDWR)
    elif what == "a fifo":
        os.mkfifo(tmp_path / "fifo")
        fd = os.open(tmp_path / "fifo", os.O_RDWR)
    elif what == "another user's":
        if os.getuid() != 0:
            pytest.skip("needs root, for a second user")
        fd = _of_another_user(name, nbytes, seals)
    elif what == "nothing":
        fd = 1 << 20
    else:
        own = "of another name" in what
        fd = _memfd("other" if own else name, nbytes - (what == "another size"), 0 if what == "not sealed" else seals)
    with pytest.raises(OSError):
        arena_module.open_of(os.getpid(), fd, SIZE)
    if what not in ("a fifo", "nothing"):
        assert os.pread(fd, 1 << 12, 0) == CONTENT.ljust(1 << 12, b"\0")
    if what != "nothing":
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("platform.machine", lambda: "aarch64"), "aarch64"),
        (("os.memfd_create", None), "memfd_create"),
    ],
)
def test_unsupported(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, Callable[[], str] | None], reason: str
) -> None:
    assert arena_module.supported() is None
    name, replacement = change
    if replacement is None:
        monkeypatch.delattr(name)
    else:
        monkeypatch.setattr(name, replacement)
    assert reason in str(arena_module.supported())


def test_nothing_is_left_open() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    fd = arena_module.create(1)
    arena = Arena(fd, 1, 0)
    tensor = arena.empty((10,), torch.float32)
    del tensor
    arena.close()
    del arena
    os.close(fd)
    gc.collect()
    assert until(lambda: descriptors() <= before, 10)  # a mesh of another test may open one for a moment


# -- pages that were copied on write, as either of the kernel's ways tells --------------------------------------------

PAGES = 40


@pytest.fixture
def mapping() -> Iterator[torch.Tensor]:
    """A private mapping of a file, of which half the pages hold something."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGES * PAGE)
    os.pwrite(fd, b"x" * (PAGES // 2 * PAGE), 0)
    yield torch.frombuffer(mmap.mmap(fd, PAGES * PAGE, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    os.close(fd)


@pytest.fixture(params=["scan", "entries"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "entries":  # as on a kernel that has no PAGEMAP_SCAN
        monkeypatch.setattr(pages, "_PAGEMAP_SCAN", 0)


@pytest.mark.usefixtures("way")
def test_reading_copies_nothing(mapping: torch.Tensor) -> None:
    assert not any_copied(mapping.data_ptr(), PAGES * PAGE)
    mapping.sum()
    assert not any_copied(mapping.data_ptr(), PAGES * PAGE)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("page", [0, 7, PAGES // 2, PAGES - 1])
def test_writing_copies_the_page(mapping: torch.Tensor, page: int) -> None:
    mapping[page * PAGE + 5] = 1
    start = mapping.data_ptr()
    assert any_copied(start, PAGES * PAGE)
    assert any_copied(start + page * PAGE, 1)
    assert not any_copied(start, page * PAGE) or page == 0
    assert not any_copied(start + (page + 1) * PAGE, (PAGES - 1 - page) * PAGE) or page == PAGES - 1


@pytest.mark.usefixtures("way")
def test_part_of_a_page_counts_as_the_page(mapping: torch.Tensor) -> None:
    mapping[3 * PAGE - 1] = 1
    assert any_copied(mapping.data_ptr(), 2 * PAGE + 1)
    assert not any_copied(mapping.data_ptr(), 2 * PAGE)


@pytest.mark.usefixtures("way")
def test_unknown_means_perhaps(mapping: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    pages._pagemap.cache_clear()
    monkeypatch.setattr(os, "open", refuse)
    assert any_copied(mapping.data_ptr(), PAGE)
    monkeypatch.undo()
    pages._pagemap.cache_clear()
