"""SPMD_DEBUG=1 prints one line for each operation on each rank, and nothing is printed without it."""

from __future__ import annotations

import pytest
from scripts import run

PROGRAM = """
import sys
import torch
from spmd import Mesh

mesh = Mesh({"data": 2}, backend=sys.argv[1])

def body():
    comm = mesh.comm()
    one, many = torch.ones(3, 4), [torch.ones(3, 4) for _ in range(2)]
    root = comm.rank == 0
    comm.barrier()
    comm.broadcast(one, src=1)
    comm.all_reduce(torch.ones(1024))
    comm.all_reduced(one.double(), "max")
    comm.reduce(one, dst=1)
    comm.gather(one, many if root else None)
    comm.scatter(one, many if root else None)
    comm.all_gather([torch.ones(5), torch.ones(6)], torch.ones(5 + comm.rank))
    comm.reduce_scatter(one.int(), [part.int() for part in many], "avg")
    comm.all_to_all(many, [torch.ones(3, 4) for _ in range(2)], async_op=True).wait()
    sending = comm.isend(one, 1 - comm.rank)
    comm.recv(one, 1 - comm.rank)
    sending.wait()

mesh.run(body)
"""


def printed(backend: str, **environ: str) -> list[str]:
    """The lines on standard error, which a driver marks with the rank unless it is 0."""
    status, out, err = run("-c", PROGRAM, backend, without=["SPMD_DEBUG"], env=environ)
    assert (status, out) == (0, "")
    return [line.removeprefix("[rank 1] ") for line in err.splitlines()]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_line_for_each_operation(backend: str) -> None:
    lines = printed(backend, SPMD_DEBUG="1")
    for rank in range(2):
        operations = [
            "barrier",
            "broadcast float32[3, 4] (src=1)",
            "all_reduce float32[1024] (sum)",
            "all_reduce float64[3, 4] (max)",
            "reduce float32[3, 4] (sum, dst=1)",
            "gather float32[3, 4] (dst=0)",
            "scatter float32[3, 4] (src=0)",
            f"all_gather float32[{5 + rank}]",
            "reduce_scatter int32[3, 4] (avg)",
            "all_to_all float32[3, 4]",
        ]
        mine = [line for line in lines if line.startswith(f"r{rank} | ")]
        what, times = zip(*(line.rsplit(" ", 2)[:2] for line in mine), strict=True)
        assert list(what[:10]) == [f"r{rank} | {operation} -> {backend}" for operation in operations]
        assert set(what[10:]) == {f"r{rank} | {way} {1 - rank} -> {backend}" for way in ("send to", "recv from")}
        assert all(0 < int(time) < 10**8 for time in times)
        assert all(line.endswith(" us") for line in mine)
    assert len(lines) == 24


@pytest.mark.parametrize("environ", [{}, {"SPMD_DEBUG": ""}, {"SPMD_DEBUG": "0"}], ids=str)
def test_silent_otherwise(environ: dict[str, str]) -> None:
    assert printed("shm", **environ) == []
