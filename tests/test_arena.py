"""The arena, with several participants of it in one process: memory, directory, board."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.kernels import arena as arena_module
from spmd.kernels.arena import PAGE, Arena, Heap, word_key
from spmd.kernels.errors import Aborted, MeshError, PeerLost

SIZE = 2


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
    monkeypatch.setattr(arena_module, "_KEPT_FREE_BYTES", 4 * PAGE)
    given_back: list[tuple[int, int]] = []
    heap = Heap(0, 1 << 20, lambda offset, nbytes: given_back.append((offset, nbytes)))
    blocks = [heap.allocate(PAGE) for _ in range(7)]
    for _ in range(3):  # the count of what is kept stays right over many rounds
        given_back.clear()
        for block in blocks:
            heap.free(block, PAGE)
        assert len(given_back) == 3
        assert sorted(heap.allocate(PAGE) for _ in range(7)) == sorted(blocks)


def resident_pages(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512 // PAGE


def test_given_back_memory_is_free(participants: list[Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_KEPT_FREE_BYTES", 0)
    before = resident_pages(participants[0].fd)
    tensor = participants[0].empty((100 * PAGE,), torch.uint8)
    tensor.fill_(1)
    assert resident_pages(participants[0].fd) >= before + 100
    del tensor
    gc.collect()
    assert resident_pages(participants[0].fd) <= before + 1


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


def lease_all(participants: list[Arena], numel: int) -> tuple[int, list[torch.Tensor]]:
    block, word = participants[0].result_block(4 * numel, SIZE)
    leases = [participants[rank].lease(block, numel, torch.float32, word + rank, SIZE) for rank in range(SIZE)]
    return block, leases


def test_results_are_private_copies_on_write(participants: list[Arena]) -> None:
    numel = 3000
    for turn in range(1, 4):
        block, leases = lease_all(participants, numel)
        participants[1].tensor(block, numel, torch.float32).fill_(turn)
        assert all(bool((lease == turn).all()) for lease in leases)
        assert all(participants[rank].is_leased(leases[rank]) for rank in range(SIZE))
        leases[0][1500] = -1.0
        leases[1].numpy()[-1] = -2.0
        assert leases[1][1500] == turn
        assert leases[0][-1] == turn
        assert participants[0].tensor(block, numel, torch.float32)[1500] == turn
        if turn == 1:
            first = block
        assert block == first  # each turn finds it free again, and unwritten
        del leases


def test_a_leased_block_is_not_used_again(participants: list[Arena]) -> None:
    first, leases = lease_all(participants, 2000)
    second, others = lease_all(participants, 2000)
    assert first != second
    part = leases[0][5:6]
    del leases
    third, _ = lease_all(participants, 2000)
    assert third not in (first, second)
    del part, others
    assert lease_all(participants, 2000)[0] in (first, second)


def test_blocks_of_a_failed_region_come_back(participants: list[Arena]) -> None:
    """One rank never came to lease its result; another still holds one when the next generation begins."""
    block, word = participants[0].result_block(8000, SIZE)
    participants[0].lease(block, 2000, torch.float32, word, SIZE)
    held_block, held_word = participants[0].result_block(8000, SIZE)
    held = participants[1].lease(held_block, 2000, torch.float32, held_word + 1, SIZE)
    assert participants[0].result_block(8000, SIZE)[0] not in (block, held_block)
    for arena in participants:
        arena.generation = 2
    assert block in {lease_all(participants, 2000)[0] for _ in range(3)}
    assert held_block not in {lease_all(participants, 2000)[0] for _ in range(5)}
    del held
    assert held_block in {lease_all(participants, 2000)[0] for _ in range(5)}


def test_a_block_is_shown_afresh_after_a_change(participants: list[Arena]) -> None:
    """A page that a rank has written is its own copy, and must not outlive the lease."""
    for turn in range(4):
        block, (lease, other) = lease_all(participants, 5000)
        participants[1].tensor(block, 5000, torch.float32).fill_(turn)
        assert bool((lease == turn).all())
        lease[turn * 1024] = -1.0
        del lease, other


# -- directory ---------------------------------------------------------------------------------------------------------


def test_directory(participants: list[Arena]) -> None:
    mine, theirs, driver = participants
    key = word_key("comm", (0, 1), "main")
    assert theirs.lookup(0, key) is None
    mine.publish(key, 12 * PAGE)
    mine.publish(word_key("another"), 13 * PAGE)
    assert theirs.lookup(0, key) == 12 * PAGE
    assert theirs.lookup(0, word_key("another")) == 13 * PAGE
    assert theirs.lookup(1, key) is None  # each rank's own
    driver.clear(2)
    assert theirs.lookup(0, key) is None


def test_a_full_directory_is_an_error(participants: list[Arena]) -> None:
    with pytest.raises(MeshError, match="too many communicators"):
        for number in range(1 << 16):
            participants[0].publish(number, number)
    assert participants[1].lookup(0, 3) == 3


def test_word_keys() -> None:
    keys = {word_key(*parts) for parts in [("a", 1), ("a", "1"), (("a", 1),), ("a1",), ("a", 2)]}
    assert len(keys) == 5
    assert all(0 <= key < 1 << 63 for key in keys)
    assert word_key("comm", (0, 1)) == word_key("comm", (0, 1))


# -- board -------------------------------------------------------------------------------------------------------------


def test_texts(participants: list[Arena]) -> None:
    mine, theirs, _ = participants
    assert theirs.said(0) == ""
    mine.say("waiting in all_reduce, bei Zeile 12 — ü")
    assert theirs.said(0) == "waiting in all_reduce, bei Zeile 12 — ü"
    mine.say("x" * 100_000)
    assert set(theirs.said(0)) == {"x"}
    assert 1000 < len(theirs.said(0)) < 4096
    assert theirs.said(1) == ""


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
    assert theirs.said(0) == ""
    assert theirs.shared_generation == 2


def test_regions(participants: list[Arena]) -> None:
    mine, theirs, _ = participants
    assert theirs.region(0) == (0, False)
    mine.say("from an earlier region")
    mine.enter(4)
    assert theirs.region(0) == (4, True)
    assert theirs.said(0) == ""
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


def test_quiet(participants: list[Arena]) -> None:
    assert participants[1].quiet_generation(0) == 0
    participants[0].quiet(3)
    assert participants[1].quiet_generation(0) == 3
    assert participants[1].quiet_generation(1) == 0


def test_a_dead_peer_is_noticed(participants: list[Arena]) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    participants[0].words[participants[0]._status(1) + arena_module._PID] = child.pid
    participants[0].watch_processes()
    participants[0].check_peers()
    child.stdin.close()
    child.wait()
    with pytest.raises(PeerLost, match="rank 1 died or exited while rank 0 waited") as caught:
        participants[0].check_peers()
    assert caught.value.rank == 1


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_has_no_name_and_costs_nothing(participants: list[Arena]) -> None:
    link = os.readlink(f"/proc/self/fd/{participants[0].fd}")
    assert "memfd:spmd-arena" in link
    assert not [name for name in os.listdir("/dev/shm") if "spmd" in name]
    assert resident_pages(participants[0].fd) < 64  # however large the address space
    assert os.fstat(participants[0].fd).st_size > 1 << 29


def test_opened_by_another_process(participants: list[Arena]) -> None:
    fd = arena_module.open_inherited(f"/proc/{os.getpid()}/fd/{participants[0].fd}")
    other = Arena(fd, SIZE, 1)
    participants[0].say("here")
    assert other.said(0) == "here"
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
    assert descriptors() <= before
