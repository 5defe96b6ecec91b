"""docs/operations.md says what runs: every cell is run again, and the page made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import operations_table as table
import pytest

from spmd import Mesh


def test_the_page_says_what_runs(shared_mesh: Callable[..., Mesh]) -> None:
    cells = {}
    for backend in table.BACKENDS:
        mesh = shared_mesh({"data": table.RANKS}, backend=backend)
        cells[backend] = mesh.run(table.run_all, mesh)
        for rank, found in enumerate(cells[backend]):
            wrong = {cell: text for cell, text in found.items() if text != table.expected(*cell)}
            assert not wrong, f"{backend}, rank {rank}: {wrong}"
    made = Path(__file__).parents[2] / "docs" / "operations.md"
    if not made.exists():
        pytest.fail("docs/operations.md is missing: python tests/operations_table.py > docs/operations.md")
    # The section of "mpi" comes last, and test_mpi.py compares it: it needs mpirun.
    assert made.read_text().partition("\n## mpi\n")[0] == table.page(cells)
