"""Point to point on every backend: matching by source and tag, many and large messages, errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from bodies import amid_collectives, any_source, around_the_ring, both_ways, everyone_to_everyone, thousand, to_itself
from oracle import DTYPES, bits, value
from patience import soon

from spmd import CollectiveMismatch, Mesh, SpecError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=["shm", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[1, 2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def mesh(shared_mesh: Callable[..., Mesh], backend: str, size: int) -> Mesh:
    return shared_mesh({"data": size}, backend=backend)


@pytest.fixture
def pair(shared_mesh: Callable[..., Mesh], backend: str) -> Mesh:
    return shared_mesh({"data": 2}, backend=backend)


def test_around_the_ring(mesh: Mesh, size: int) -> None:
    for rank, found in enumerate(mesh.run(around_the_ring, mesh)):
        assert found == [bits(value(dtype, (3, 4), (rank - 1) % size)) for dtype in DTYPES]


def test_tags_and_sources(mesh: Mesh, size: int) -> None:
    for rank, found in enumerate(mesh.run(everyone_to_everyone, mesh)):
        assert found == {
            (peer, tag): bits(value(torch.float64, (5 + peer,), peer, rank + 10 * (tag + 3)))
            for tag in (0, 7, -3)
            for peer in range(size)
        }


def test_any_source(mesh: Mesh, size: int) -> None:
    found = mesh.run(any_source, mesh)[0]
    for rank in range(1, size):  # each sender's messages come in its order
        assert [number for source, number in found if source == rank] == [10.0 * rank + turn for turn in range(3)]
    assert len(found) == 3 * (size - 1)


def test_thousand_outstanding(pair: Mesh) -> None:
    completed, numbers = pair.run(thousand, pair)
    assert completed
    assert numbers == [10 * (i // 10) + 9 - i % 10 for i in range(1000)]


def test_large_and_empty(pair: Mesh) -> None:
    assert pair.run(both_ways, pair) == [[True] * 3] * 2


def test_to_itself(mesh: Mesh, size: int) -> None:
    assert mesh.run(to_itself, mesh) == [[1.0, 2.0]] * size


def layouts(mesh: Mesh) -> list[torch.Tensor]:
    """Into and out of tensors that are not contiguous, need gradients or are views that conjugate."""
    comm = mesh.comm()
    peer = 1 - comm.rank
    base = value(torch.complex64, (4, 6), 5)
    sources = [base.real.mT, base.conj(), base[:, ::2].imag, base.real.contiguous().requires_grad_(), base[0, 0]]
    found = []
    for source in sources:
        target = torch.empty_like(base)
        view = {0: target.imag.mT, 1: target.conj(), 2: target[:, ::2].real, 3: target.real, 4: target[1, 1]}[
            len(found)
        ]
        if source.requires_grad:
            view = torch.zeros(4, 6, requires_grad=True)
        work = comm.isend(source, peer)
        comm.recv(view, peer)
        work.wait()
        found.append(view.detach().resolve_conj().resolve_neg().clone())
    return found


def test_layouts(pair: Mesh) -> None:
    base = value(torch.complex64, (4, 6), 5)
    for found in pair.run(layouts, pair):
        expected = [base.real.mT, base.conj(), base[:, ::2].imag, base.real, base[0, 0]]
        for got, tensor in zip(found, expected, strict=True):
            assert torch.equal(got, tensor)


def test_amid_collectives(pair: Mesh) -> None:
    assert pair.run(amid_collectives, pair)[0] == [1.0, 99.0]


def a_stream(mesh: Mesh) -> int | None:
    """Many large messages, one of which nobody asks for until the end."""
    comm: Any = mesh.comm()
    target = torch.empty(50_000)
    if comm.rank == 0:
        comm.isend(torch.zeros(3), 1, tag=9)
        for turn in range(60):
            comm.send(torch.full((50_000,), float(turn)), 1)
            comm.recv(torch.empty(0), 1)
        comm.barrier()
        return comm.arena.heap._top
    for turn in range(60):
        comm.recv(target, 0)
        assert float(target[-1]) == turn
        comm.send(torch.empty(0), 0)
    comm.recv(torch.empty(3), 0, tag=9)
    comm.barrier()
    return None


@pytest.mark.parametrize("backend", ["shm"])
def test_blocks_are_used_again(pair: Mesh) -> None:
    first, second = (pair.run(a_stream, pair)[0] for _ in range(2))
    assert first is not None
    assert second - first <= 4 * 2**18


def with_bad_arguments(mesh: Mesh) -> list[str]:
    comm = mesh.comm()
    found = []
    for call in (lambda: comm.send(torch.ones(1), comm.size), lambda: comm.recv(torch.ones(1), -1)):
        try:
            call()
        except SpecError as error:
            found.append(str(error))
    return found


def test_bad_arguments(mesh: Mesh) -> None:
    for found in mesh.run(with_bad_arguments, mesh):
        assert len(found) == 2
        assert '"dst"' in found[0]
        assert '"src"' in found[1]


# -- what ends the region ----------------------------------------------------------------------------------------------


def test_size_mismatch(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)

    def body() -> None:
        comm = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(3), 1, tag=4)
        else:
            comm.recv(torch.empty(4), 0, tag=4)

    with pytest.raises(CollectiveMismatch, match="recv on rank 1 from rank 0 with tag 4") as caught:
        mesh.run(body)
    assert "expected 16 bytes, got a message of 12 bytes" in str(caught.value)
    assert mesh.run(both_ways, mesh) == [[True] * 3] * 2


@pytest.mark.parametrize("source", [0, None])
def test_sender_that_left(make_mesh: Callable[..., Mesh], backend: str, source: int | None) -> None:
    mesh = make_mesh({"data": 3}, backend=backend)

    def body() -> float:
        comm = mesh.comm()
        comm.barrier()
        target = torch.zeros(())
        if comm.rank == 0:
            comm.send(torch.ones(()), 2)
        elif comm.rank == 2:
            time.sleep(0.02)  # what was sent before the sender left still comes
            comm.recv(target, source)
            comm.recv(target, source)
        return float(target)

    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match="rank 0 left the region without its part in recv"):
        mesh.run(body)
    assert soon(3.0, began)
    assert mesh.run(around_the_ring, mesh)
