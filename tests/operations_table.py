"""Which operation works on which dtype over which backend: every cell is run on three ranks and compared.

    python tests/operations_table.py > docs/operations.md

A test fails when the page differs from what runs.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import cloudpickle
import torch
from oracle import DTYPES, OPS, exact, meaningful, reduced, same, value

from spmd import Mesh, SpecError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKENDS = ("shm", "gloo")
RANKS = 3
SHAPE = (5, 3)
WORKS, REFUSED, WRONG = "yes", "refused", "WRONG"
ROWS = (
    *(f"all_reduce {op}" for op in OPS),
    *(f"reduce {op}" for op in ("sum", "max")),
    "reduce_scatter sum",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "all_to_all",
    "send, recv",
)


def run_cell(mesh: Mesh, row: str, dtype: torch.dtype) -> str:
    """Run one operation on this rank and compare with what one process computes."""
    comm = mesh.comm()
    rank, size = comm.rank, comm.size
    name, _, op = row.partition(" ")
    inputs = [value(dtype, SHAPE, r) for r in range(size)]
    mine = inputs[rank].clone()
    outs = [torch.empty(SHAPE, dtype=dtype) for _ in range(size)]
    try:
        if name == "all_reduce":
            comm.all_reduce(mine, op)
            right = reduced(inputs, op)
            return verdict(same(mine, right) if exact(op, dtype) else torch.allclose(mine, right))
        if name == "reduce":
            comm.reduce(mine, dst=1, op=op)
            return verdict(same(mine, reduced(inputs, op) if rank == 1 else inputs[rank]))
        if name == "reduce_scatter":
            comm.reduce_scatter(mine, [value(dtype, SHAPE, rank, part) for part in range(size)], op)
            return verdict(same(mine, reduced([value(dtype, SHAPE, r, rank) for r in range(size)], op)))
    except SpecError:
        return REFUSED
    if name == "broadcast":
        comm.broadcast(mine, src=2)
        return verdict(same(mine, inputs[2]))
    if name == "gather":
        comm.gather(mine, outs if rank == 1 else None, dst=1)
        return verdict(rank != 1 or all(map(same, outs, inputs)))
    if name == "scatter":
        comm.scatter(mine, inputs if rank == 0 else None, src=0)
        return verdict(same(mine, inputs[rank]))
    if name == "all_gather":
        comm.all_gather(outs, mine)
        return verdict(all(map(same, outs, inputs)))
    if name == "all_to_all":
        comm.all_to_all(outs, [value(dtype, SHAPE, rank, part) for part in range(size)])
        return verdict(all(same(outs[r], value(dtype, SHAPE, r, rank)) for r in range(size)))
    sending = comm.isend(mine, (rank + 1) % size, tag=7)
    source = comm.recv(outs[0], None, tag=7)
    sending.wait()
    return verdict(source == (rank - 1) % size and same(outs[0], inputs[source]))


def verdict(right: bool) -> str:
    return WORKS if right else WRONG


def run_all(mesh: Mesh) -> dict[tuple[str, torch.dtype], str]:
    return {(row, dtype): run_cell(mesh, row, dtype) for row in ROWS for dtype in DTYPES}


def expected(row: str, dtype: torch.dtype) -> str:
    """What a cell should say: an operation without meaning for a dtype is refused, all else works."""
    op = row.partition(" ")[2]
    return WORKS if op not in OPS or meaningful(op, dtype) else REFUSED


def page(cells: dict[str, list[dict[tuple[str, torch.dtype], str]]]) -> str:
    """The page, from what every rank of every backend found."""
    lines = [
        "# Operations",
        "",
        "What `mesh.comm()` does, by backend and dtype. Every cell was run on three ranks and compared, bit for",
        "bit (complex products and averages: to rounding), with what one process computes. The suite runs it all;",
        "`python tests/operations_table.py > docs/operations.md` makes this page.",
        "*refused*: the operation has no meaning for the dtype (`SpecError`).",
    ]
    for backend, ranks in cells.items():
        lines += section(backend, ranks)
    return "\n".join(lines) + "\n"


def section(backend: str, ranks: list[dict[tuple[str, torch.dtype], str]]) -> list[str]:
    """The part of the page about one backend."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = ["", f"## {backend}", "", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for row in ROWS:
        found = [{rank[row, dtype] for rank in ranks} for dtype in DTYPES]
        texts = ["*refused*" if cell == {REFUSED} else "yes" if cell == {WORKS} else "**wrong**" for cell in found]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return lines


def under_mpirun() -> list[dict[tuple[str, torch.dtype], str]]:
    """The cells of backend "mpi", which needs ranks that mpirun started."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells"
        suite = str(Path(__file__).with_name("mpi_suite.py"))
        command = ["mpirun", "--oversubscribe", "-np", str(RANKS), sys.executable, suite, str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    found = {}
    for backend in BACKENDS:
        with Mesh({"data": RANKS}, backend=backend) as mesh:
            found[backend] = mesh.run(run_all, mesh)
    found["mpi"] = under_mpirun()
    print(page(found), end="")
