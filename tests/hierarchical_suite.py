"""Run by test_hierarchical.py on every rank: backend "hierarchical", with one machine's ranks posing as several hosts'.

    SPMD_RANK=0 SPMD_SIZE=3 SPMD_INIT_METHOD=file:///tmp/meet python tests/hierarchical_suite.py '[[0, 1], [2]]'

Rank 0 prints for each layout given how many checks held.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mpi_suite as suite
import operations_table as table
import pytest
import torch
from internals import pretend_host, without_shared_memory
from oracle import HALVES, bits, reduced, value
from patience import soon, until

from spmd import CollectiveMismatch, Mesh, MeshError, P, PeerLost, pmean, psum, put, spmd
from spmd.kernels.reduction import Pairwise, reduce_in_order

TYPES = (torch.float32, torch.float64, torch.complex64, *HALVES)
NUMELS = (1, 5, 8192, 8193, 100_001)  # 8192 float32 are the most that go in one phase
OPS = {
    torch.complex64: ("sum", "avg"),
    torch.float32: ("sum", "avg", "max", "product"),
    **dict.fromkeys(HALVES, ("sum", "avg", "product")),
}
# 16-bit floats: the table wants one rounding; order_of_additions checks these.
ROUNDED_TWICE = ("all_reduce sum", "all_reduce avg", "all_reduce product")
check = suite.check


def pretend(hosts: list[list[int]]) -> None:
    """Have each rank pretend to be on the host that this list gives it."""
    mine = next(index for index, host in enumerate(hosts) if int(os.environ["SPMD_RANK"]) in host)
    pretend_host(f"pretended host {mine}")


def in_hosts_order(parts: list[torch.Tensor], hosts: list[list[int]], op: str) -> torch.Tensor:
    """The ranks of each host first, then the hosts; an average is divided last, one of 16-bit floats on each host."""
    if op == "avg" and parts[0].dtype in HALVES:
        means = [reduced([parts[rank] for rank in host], op) * (len(host) / len(parts)) for host in hosts]
        return reduced(means, "sum")
    added = "sum" if op == "avg" else op
    total = reduced([reduced([parts[rank] for rank in host], added) for host in hosts], added)
    return total / len(parts) if op == "avg" else total


def order_of_additions(mesh: Mesh, hosts: list[list[int]]) -> None:
    def body(types: Sequence[torch.dtype]) -> list[list[str]]:
        comm, found = mesh.comm(), []
        for dtype in types:
            for numel in NUMELS:
                x = value(dtype, (numel,), comm.rank)
                for op in OPS.get(dtype, ("sum", "product")):
                    resident = comm.empty(numel, dtype=dtype)
                    resident.copy_(x)
                    own = x.clone()
                    comm.all_reduce(own, op)
                    every = [comm.all_reduced(x, op), comm.all_reduced(resident, op), own]
                    found.append([bits(each) for each in every])
        return found

    expected = []
    for dtype in TYPES:
        for numel in NUMELS:
            parts = [value(dtype, (numel,), rank) for rank in range(mesh.size)]
            for op in OPS.get(dtype, ("sum", "product")):
                expected.append([bits(in_hosts_order(parts, hosts, op))] * 3)
    first, again = mesh.run(body, TYPES), mesh.run(body, TYPES[:1])
    check(again == [found[: len(again[0])] for found in first], "a run repeats exactly")
    for rank, found in enumerate(first):
        for index, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            check(got == wanted, f"all_reduce {index} on rank {rank}, in the order of the hosts")


def averages_of_large_values(mesh: Mesh) -> None:
    """Of values whose sum is more than 16 bits hold."""

    def body() -> list[bool]:
        comm, found = mesh.comm(), []
        for numel in NUMELS:
            large = torch.full((numel,), 40_000.0, dtype=torch.float16)
            found.append(torch.allclose(comm.all_reduced(large, "avg"), large, rtol=2e-3))
        return found

    for rank, found in enumerate(mesh.run(body)):
        check(all(found), f"averages of large values on rank {rank}: {found}")


def sums_in_tree_order(mesh: Mesh) -> None:
    """They have the same bits as on one host, whatever the hosts, and only the root is scaled."""

    def body() -> list[bool]:
        comm, found = mesh.comm(), []
        for numel in NUMELS:
            parts = [value(torch.float32, (numel,), rank) for rank in range(comm.size)]
            expected = reduce_in_order(parts, Pairwise(0.3), torch.empty(numel))
            found.append(bits(comm.all_reduced(parts[comm.rank], Pairwise(0.3))) == bits(expected))
        return found

    for rank, found in enumerate(mesh.run(body)):
        check(all(found), f"sums in tree order on rank {rank}: {found}")


def many_at_once(mesh: Mesh, hosts: list[list[int]]) -> None:
    """More reductions under way than there are slots, begun at different times on different ranks."""

    def body() -> list[float]:
        comm = mesh.comm()
        works = []
        for index in range(50):
            if (index + comm.rank) % 17 == 0:
                time.sleep(0.01)
            works.append(comm.all_reduced(torch.full((90_000 if index % 3 else 5,), index + 1.0), async_op=True))
            if index % 20 == 5:
                comm.barrier()
        return [float(work.wait()[-1]) for work in works]

    check(mesh.run(body) == [[mesh.size * (index + 1.0) for index in range(50)]] * mesh.size, "many at once")


def results_are_private(mesh: Mesh) -> None:
    def body() -> list[float]:
        comm = mesh.comm()
        result = comm.all_reduced(torch.ones(100_000))
        comm.barrier()
        result += comm.rank
        comm.barrier()
        return [float(result[0]), float(comm.all_reduced(torch.ones(100_000))[0])]

    check(mesh.run(body) == [[mesh.size + rank, float(mesh.size)] for rank in range(mesh.size)], "results are private")
    step = spmd(lambda x: psum(x, "data"), mesh=mesh)
    kept = [step(torch.full((100_000,), float(n))) for n in range(6)]
    check([float(array.full()[7]) for array in kept] == [float(n * mesh.size) for n in range(6)], "kept results")


def along_axes(hosts: list[list[int]]) -> None:
    """On a 2 x 2 mesh one axis stays within the hosts, and one crosses."""
    with Mesh({"host": 2, "core": 2}, timeout=30.0) as mesh:
        across = hosts[0] == [0, 2]
        kinds = ["shm", "gloo"] if across else ["gloo", "shm"]
        found = mesh.run(lambda: [mesh.comm(axis).backend for axis in ("host", "core", None)])
        check(found == [[*kinds, "hierarchical"]] * 4, f"backends by axis: {found}")
        sums = spmd(
            lambda x: (psum(x.sum(), "host"), psum(x.sum(), "core"), pmean(x.sum(), ("host", "core"))),
            mesh=mesh,
            in_specs=P("host", "core"),
            out_specs=(P(), P(), P()),
            check="never",
        )
        by_host, by_core, mean = sums(torch.arange(16.0).reshape(4, 4))
        corner = [10.0, 18.0, 42.0, 50.0]
        row, column = divmod(mesh.rank or 0, 2)
        check(float(by_host.local) == corner[column] + corner[column + 2], "a sum over the hosts")
        check(float(by_core.local) == corner[2 * row] + corner[2 * row + 1], "a sum over a host")
        check(mean.item() == 30.0, "a mean over all")
        along = "host" if across else "core"

        one, other = hosts[0]

        def differ() -> None:
            """On the first host alone: else the others might be told first."""
            comm = mesh.comm(along)
            comm.all_reduce(torch.ones(2)) if mesh.rank == other else comm.barrier()

        with pytest.raises(CollectiveMismatch, match=rf"rank {one}: barrier(.|\n)*rank {other}: all_red"):
            mesh.run(differ)

        def leave_out(axis: str) -> None:
            if mesh.rank != 0:
                mesh.comm(axis).all_reduce(torch.ones(2))

        for axis in ("host", "core"):  # rank 0 is waiting for all ranks by then, to tell its result
            with pytest.raises(CollectiveMismatch, match=r"wait for each other:\n  rank 0: waiting in all_gather"):
                mesh.run(leave_out, axis)


def silence(hosts: list[list[int]]) -> None:
    """A rank that waits too long says for whom, and what the other ranks of its host do."""
    given_up = Path(os.environ["SPMD_INIT_METHOD"].removeprefix("file://")).with_name("given up")
    with Mesh(timeout=4.0) as mesh:
        mesh.run(lambda: mesh.comm().barrier())
        late = hosts[-1][-1]

        def body() -> None:
            if mesh.rank == late:
                until(given_up.exists)
            try:
                mesh.comm().all_reduced(torch.ones(3))
            except PeerLost:
                given_up.touch()
                raise

        began = time.monotonic()
        with pytest.raises(PeerLost, match=r"all_reduce float32\[3\] \(sum\) on rank \d got no answer for 4 s") as told:
            mesh.run(body)
        check(soon(8.0, began), "in time")
        check("it waited for" in str(told.value), str(told.value))


def backends() -> None:
    with pytest.raises(MeshError, match=r"backend 'shm' can't be used \(got the ranks are on 2 hosts: ranks? 0"):
        Mesh(backend="shm")
    with Mesh(backend="gloo", timeout=30.0) as flat:
        check(flat.run(lambda: flat.comm().backend) == ["gloo"] * flat.size, "gloo, when asked for")
        check(put(torch.ones(2), mesh=flat).full().tolist() == [1.0, 1.0], "gloo works")
    with without_shared_memory() if os.environ["SPMD_RANK"] == "0" else contextlib.nullcontext():
        fallen = Mesh(timeout=30.0)
    with fallen:  # one host has no shared memory: nobody uses it
        check(fallen.backend == "gloo", "without shared memory on one host")
        check(fallen.run(lambda: float(fallen.comm().all_reduced(torch.ones(())))) == [fallen.size] * fallen.size, "")


def main(hosts: list[list[int]]) -> None:
    pretend(hosts)
    suite.checks = 0
    mesh = Mesh({"data": -1}, timeout=30.0)
    check(mesh.backend == "hierarchical" and "backend='hierarchical'" in repr(mesh), "the backend")
    order_of_additions(mesh, hosts)
    averages_of_large_values(mesh)
    sums_in_tree_order(mesh)
    many_at_once(mesh, hosts)
    results_are_private(mesh)
    suite.messages(mesh, mesh.size)
    if hosts[0] == [0, 1]:
        suite.failures(mesh, mesh.size)
        silence(hosts)
    if mesh.size == table.RANKS:
        table.ROWS = tuple(row for row in table.ROWS if row not in ROUNDED_TWICE)  # this size comes once
        suite.operations(mesh, mesh.size)
        suite.collectives(mesh, mesh.size)  # with ranks 0 and 1 on one host the order is that of the ranks
    if mesh.size == 4:
        along_axes(hosts)
    backends()
    if mesh.rank == 0:
        print(f"ok {suite.checks} checks")
    mesh.close()


if __name__ == "__main__":
    for layout in sys.argv[1:]:
        main(json.loads(layout))
