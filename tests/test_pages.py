"""Telling which pages of a mapping were copied on write, by either of the kernel's ways."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from spmd.kernels import pages
from spmd.kernels.pages import PAGE, any_copied

COUNT = 40


@pytest.fixture
def mapping() -> Iterator[torch.Tensor]:
    """A private mapping of a file, of which half the pages hold something."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, COUNT * PAGE)
    os.pwrite(fd, b"x" * (COUNT // 2 * PAGE), 0)
    yield torch.frombuffer(mmap.mmap(fd, COUNT * PAGE, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    os.close(fd)


@pytest.fixture(params=["scan", "entries"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "entries":  # as on a kernel that has no PAGEMAP_SCAN
        monkeypatch.setattr(pages, "_PAGEMAP_SCAN", 0)


def test_reading_copies_nothing(mapping: torch.Tensor) -> None:
    assert not any_copied(mapping.data_ptr(), COUNT * PAGE)
    mapping.sum()
    assert not any_copied(mapping.data_ptr(), COUNT * PAGE)


@pytest.mark.parametrize("page", [0, 7, COUNT // 2, COUNT - 1])
def test_writing_copies_the_page(mapping: torch.Tensor, page: int) -> None:
    mapping[page * PAGE + 5] = 1
    start = mapping.data_ptr()
    assert any_copied(start, COUNT * PAGE)
    assert any_copied(start + page * PAGE, 1)
    assert not any_copied(start, page * PAGE) or page == 0
    assert not any_copied(start + (page + 1) * PAGE, (COUNT - 1 - page) * PAGE) or page == COUNT - 1


def test_part_of_a_page_counts_as_the_page(mapping: torch.Tensor) -> None:
    mapping[3 * PAGE - 1] = 1
    assert any_copied(mapping.data_ptr(), 2 * PAGE + 1)
    assert not any_copied(mapping.data_ptr(), 2 * PAGE)


def test_unknown_means_perhaps(mapping: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    pages._pagemap.cache_clear()
    monkeypatch.setattr(os, "open", refuse)
    assert any_copied(mapping.data_ptr(), PAGE)
    monkeypatch.undo()
    pages._pagemap.cache_clear()
