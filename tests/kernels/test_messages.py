"""Point to point on every backend: matching by source and tag, many and large messages, errors."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from bodies import amid_collectives, any_source, around_the_ring, both_ways, everyone_to_everyone, thousand, to_itself
from internals import messages_of_call
from oracle import DTYPES, bits, value
from patience import soon

from spmd import CollectiveMismatch, Mesh, P, SpecError, spmd

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
    x = torch.ones(1)
    for call in (lambda: comm.send(x, comm.size), lambda: comm.recv(x, -1), lambda: comm.isend(x, comm.rank, 1 << 62)):
        try:
            call()
        except SpecError as error:
            found.append(str(error))
    return found


def test_bad_arguments(mesh: Mesh) -> None:
    for found in mesh.run(with_bad_arguments, mesh):
        assert len(found) == 3
        assert '"dst"' in found[0]
        assert '"src"' in found[1]
        assert '"tag"' in found[2]


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
    assert "expected 4 elements of float32 (16 bytes), got a message of 3 elements of float32 (12 bytes)" in str(
        caught.value
    )
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


@pytest.mark.parametrize(("sent", "received"), [("float32", "int32"), ("uint8", "bool"), ("bfloat16", "float16")])
def test_dtype_mismatch(make_mesh: Callable[..., Mesh], backend: str, sent: str, received: str) -> None:
    """Of as many bytes: they would be read as other numbers."""
    mesh = make_mesh({"data": 2}, backend=backend)

    def body() -> None:
        comm = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(2, 3, dtype=getattr(torch, sent)), 1, tag=4)
        else:
            comm.recv(torch.empty(2, 3, dtype=getattr(torch, received)), 0, tag=4)

    told = f"recv on rank 1 from rank 0 with tag 4: dtypes differ.*6 elements of {received}.*6 elements of {sent}"
    with pytest.raises(CollectiveMismatch, match=told):
        mesh.run(body)
    assert mesh.run(both_ways, mesh) == [[True] * 3] * 2


def test_another_shape_of_as_many_elements(pair: Mesh) -> None:
    def body() -> list[float]:
        comm, found = pair.comm(), torch.empty(3, 2)
        comm.send(torch.arange(6.0).view(2, 3), 1 - comm.rank)
        comm.recv(found)
        return found.view(-1).tolist()

    assert pair.run(body) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2


# -- what is left at the end of a call ---------------------------------------------------------------------------------


def sends_twice(mesh: Mesh, number: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends two messages, of which rank 1 receives one."""
    comm, found = mesh.comm(), torch.zeros(1)
    if comm.rank == 0:
        comm.send(number.view(1), 1)
        comm.send(number.view(1) + 0.5, 1)
    else:
        comm.recv(found, 0)
    return found


def test_a_step_leaves_no_message_to_the_next_call(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)
    step = spmd(lambda number: sends_twice(mesh, number), mesh=mesh, out_specs=P("data"))
    assert step(torch.tensor(1.0)).full().tolist() == [0.0, 1.0]
    with pytest.raises(CollectiveMismatch, match=r"1 from rank 0 with tag 0: .*sent in one call .*in another: receive"):
        step(torch.tensor(2.0)).full()
    assert step(torch.tensor(3.0)).full().tolist() == [0.0, 3.0]  # the failure has cleared what was left


def test_messages_from_one_run_to_the_next(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """They may be meant, so they arrive."""
    mesh = make_mesh({"data": 2}, backend=backend)
    assert mesh.run(sends_twice, mesh, torch.tensor(1.0)) == [0.0, 1.0]
    with pytest.warns(UserWarning, match=r"sent in one call .*in another.*ignore this warning"):
        assert mesh.run(sends_twice, mesh, torch.tensor(2.0)) == [0.0, 1.5]


def test_a_step_within_a_run(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """Its messages are its own, as those of any call; a receive of the body around it may wait meanwhile."""
    mesh = make_mesh({"data": 2}, backend=backend)
    step = spmd(lambda number: sends_twice(mesh, number), mesh=mesh, out_specs=P("data"))
    nothing = spmd(lambda x: x + 1, mesh=mesh)

    def around() -> float:
        comm, found = mesh.comm(), torch.empty(1)
        receiving = comm.irecv(found, 1 - comm.rank)
        nothing(torch.zeros(1))
        comm.send(torch.full((1,), float(comm.rank)), 1 - comm.rank)
        receiving.wait()
        return float(found)

    def twice() -> None:
        for number in range(2):
            step(torch.tensor(float(number)))

    assert mesh.run(around) == [1.0, 0.0]
    with pytest.raises(CollectiveMismatch, match=r"sent in one call .*in another: receive in each call"):
        mesh.run(twice)
    assert mesh.run(around) == [1.0, 0.0]


def posts(mesh: Mesh, first: bool) -> float:
    """Rank 1 posts a receive and does not wait for it; in the next call it waits for a message that this one takes."""
    comm, found = mesh.comm(), torch.zeros(1)
    comm.barrier()
    if first and comm.rank == 1:
        comm.irecv(torch.zeros(1), 0)
    elif not first and comm.rank == 0:
        comm.send(torch.ones(1), 1)
        comm.send(torch.full((1,), 2.0), 1)
    elif not first:
        comm.recv(found, 0)
    return float(found)


def test_a_receive_from_one_run_to_the_next(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)
    mesh.run(posts, mesh, True)
    with pytest.warns(UserWarning, match=r"its receive was started in another.*wait\(\) there for each irecv"):
        assert mesh.run(posts, mesh, False) == [0.0, 2.0]


def test_messages_of_a_step_are_kept_while_they_are_under_way(pair: Mesh) -> None:
    """Then they are let go of, without a look at all of them whenever another begins."""

    def step(x: torch.Tensor) -> tuple[int, int, int]:
        comm = pair.comm()
        for _ in range(50):
            sending = comm.isend(x, 1 - comm.rank)
            comm.recv(torch.empty_like(x), 1 - comm.rank)
            sending.wait()
        left, works, looks = len(messages_of_call(comm)), [], []
        for _ in range(100):
            works += [comm.isend(x, 1 - comm.rank), comm.irecv(torch.empty_like(x), 1 - comm.rank)]
            if not looks or messages_of_call(comm) is not looks[-1]:
                looks.append(messages_of_call(comm))
        kept = len(messages_of_call(comm))
        for work in works:
            work.wait()
        return left, kept, len(looks)

    left, kept, looks = spmd(step, mesh=pair)(torch.ones(1))
    assert left <= 5 and 200 <= kept <= 205 and looks < 10


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_waits_for_what_it_receives(make_mesh: Callable[..., Mesh], backend: str, size: int) -> None:
    """Whether the message is there or not: that would depend on how fast the ranks are."""
    mesh = make_mesh({"data": size}, backend=backend)

    def step(x: torch.Tensor, *, late: bool) -> torch.Tensor:
        comm, found = mesh.comm(), torch.zeros(1)
        receiving = comm.irecv(found, (comm.rank - 1) % comm.size)
        sending = comm.isend(x, (comm.rank + 1) % comm.size)
        if late:
            comm.barrier()
        else:
            receiving.wait()
        sending.wait()
        return found

    call = spmd(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = torch.arange(float(size))
    assert call(x, late=False).full().tolist() == x.roll(1).tolist()
    with pytest.raises(CollectiveMismatch, match=r"nobody has waited for the end of its recv from \d.*call wait\(\)"):
        call(x, late=True).full()
    assert call(x, late=False).full().tolist() == x.roll(1).tolist()


def test_a_step_ends_its_sends(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """That they are not waited for matters no more than that a rank goes on with other things."""
    mesh = make_mesh({"data": 2}, backend=backend)

    @spmd(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def step(x: torch.Tensor) -> torch.Tensor:
        comm, found = mesh.comm(), torch.empty_like(x)
        for _ in range(2):
            comm.isend(x, 1 - comm.rank)
        comm.recv(found)
        comm.recv(found)
        return found

    x = torch.arange(4.0e6)
    for _ in range(3):
        assert torch.equal(step(x).full(), x.view(2, -1).flip(0).view(-1))


@pytest.mark.parametrize("backend", ["gloo"])
def test_a_message_that_nobody_can_take(make_mesh: Callable[..., Mesh], backend: str) -> None:
    """Its receiver has left, and has never opened its mailbox."""
    mesh = make_mesh({"data": 2}, backend=backend, timeout=120.0)

    def body() -> None:
        comm = mesh.comm()
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)

    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match="rank 1 left the region without its part in send to 1"):
        mesh.run(body)
    assert soon(3.0, began)


def test_a_thread_s_messages_belong_to_no_step(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)
    step = spmd(lambda x: x + 1, mesh=mesh)

    def body() -> int:
        comm, found = mesh.comm(), []

        def beat() -> None:
            for number in range(100):
                target = torch.empty(1)
                receiving = comm.irecv(target, 1 - comm.rank, tag=7)
                comm.send(torch.full((1,), float(number)), 1 - comm.rank, tag=7)
                receiving.wait()
                found.append(float(target) == number)

        thread = threading.Thread(target=beat)
        thread.start()
        for _ in range(20):
            step(torch.ones(4))
        thread.join()
        return sum(found)

    assert mesh.run(body) == [100, 100]
