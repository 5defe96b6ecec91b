"""Backends of third parties: registered here, used on the ranks, with every collective working over them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from bodies import (
    NUMELS,
    around_the_ring,
    at_sizes,
    everyone_to_everyone,
    mixed_outstanding,
    reduce_all_ways,
    thousand,
    unequal_pieces,
)
from oracle import reduced, same, value
from patience import soon

from spmd import CollectiveMismatch, Mesh, MeshError, SpecError, register_backend
from spmd.kernels import registry
from spmd.kernels.communicator import Communicator
from spmd.kernels.operations import Steps
from spmd.kernels.progress import ProgressCounters
from spmd.kernels.registry import backends, make_communicator
from spmd.kernels.shm.communicator import ShmCommunicator

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Relay(Communicator):
    """The least that a transport must do: exchange, send and receive, here by handing them to another one."""

    backend = "relay"

    def __init__(self, inner: Any, watch: Any, channel: str):
        super().__init__(inner.ranks, inner.rank, watch, timeout=inner.timeout)
        self._inner, self._channel = inner, channel
        self._counters = ProgressCounters(watch, self.ranks, channel)

    def _open(self) -> None:
        self._inner.renew()
        self._counters = ProgressCounters(self._inner._watch, self.ranks, self._channel)

    def _exchange(self, call: Any, sends: list[Any], recvs: list[Any]) -> Steps:
        return (yield from self._inner._exchange(call, sends, recvs))

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        return (yield from self._inner._send(tensor, dst, tag))

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        return (yield from self._inner._recv(tensor, src, tag))

    def poll_messages(self) -> None:
        self._inner.poll_messages()

    def close(self) -> None:
        self._inner.close()


def relay_over(inner: str) -> Callable[..., Communicator]:
    def factory(*, watch: Any, channel: str, **rest: Any) -> Communicator:
        return Relay(make_communicator(inner, watch=watch, channel=f"relay/{channel}", **rest), watch, channel)

    return factory


class Named(ShmCommunicator):
    """The built-in one under another name, which says so."""

    backend = "named"

    def greeting(self) -> str:
        return f"rank {self.rank} of {self.size}"


def named(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Communicator:
    assert store() is not None
    return Named(watch, ranks, timeout=timeout, channel=channel)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    before = dict(registry._FACTORIES)
    register_backend("relay-shm", relay_over("shm"))
    register_backend("relay-gloo", relay_over("gloo"))
    register_backend("named", named)
    register_backend("nothing", lambda **_: None)
    yield
    registry._FACTORIES.clear()
    registry._FACTORIES.update(before)


def test_names() -> None:
    assert {"shm", "gloo", "named", "relay-shm", "relay-gloo"} <= set(backends())
    assert registry.added_factory("shm") is None
    assert registry.added_factory("named") is named
    backends().clear()  # a copy
    assert "shm" in backends()


def test_a_subclass(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2}, backend="named")
    assert mesh.backend == "named"

    def body() -> tuple[str, str, float]:
        comm: Any = mesh.comm()
        return comm.backend, comm.greeting(), float(comm.all_reduced(torch.ones(90_000))[-1])

    assert mesh.run(body) == [("named", f"rank {rank} of 2", 2.0) for rank in range(2)]


def test_a_built_in_one_replaced(make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORIES, "gloo", named)
    mesh = make_mesh({"data": 2}, backend="gloo")
    assert mesh.run(lambda: mesh.comm().backend) == ["named"] * 2


@pytest.mark.parametrize("backend", ["relay-shm", "relay-gloo"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(make_mesh: Callable[..., Mesh], backend: str, size: int) -> None:
    """What the base class makes of the three operations is the same as what the built-in backends do."""
    mesh = make_mesh({"data": size}, backend=backend)
    assert mesh.run(lambda: mesh.comm().backend) == ["relay"] * size
    cases = [("sum", torch.float32), ("avg", torch.bfloat16), ("bxor", torch.uint16), ("max", torch.int8)]
    for index, (op, dtype) in enumerate(cases):
        total = reduced([value(dtype, (3, 5), rank) for rank in range(size)], op)
        assert all(same(found[index][0], total) for found in mesh.run(reduce_all_ways, mesh, cases))
    built_in = make_mesh({"data": size})
    for body in (at_sizes, mixed_outstanding, unequal_pieces, around_the_ring, everyone_to_everyone):
        found, expected = mesh.run(body, mesh), built_in.run(body, built_in)
        if body is unequal_pieces:
            for ours, theirs in zip(found, expected, strict=True):
                assert all(all(map(same, ours[name], theirs[name])) for name in theirs)
        elif body is at_sizes:
            assert len(found[0]) == len(NUMELS)
            assert found == expected
        else:
            assert found == expected
    if size == 2:
        assert mesh.run(thousand, mesh)[0]


@pytest.mark.parametrize("backend", ["relay-shm", "relay-gloo"])
def test_disagreement_and_absence(make_mesh: Callable[..., Mesh], backend: str) -> None:
    mesh = make_mesh({"data": 2}, backend=backend)
    with pytest.raises(CollectiveMismatch, match=r"rank 0: barrier.*test_backend_registry\S* in <lambda>"):
        mesh.run(lambda: mesh.comm().all_reduce(torch.ones(2)) if mesh.rank else mesh.comm().barrier())
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match=r"rank 1 left the region without its part in (barrier|a collective)"):
        mesh.run(lambda: None if mesh.rank else mesh.comm().barrier())
    assert soon(2.5, began)
    assert mesh.run(lambda: float(mesh.comm().all_reduced(torch.ones(90_000))[-1])) == [2.0] * 2


def test_steps_run_over_it(make_mesh: Callable[..., Mesh]) -> None:
    """The whole library stands on the seam: a decorated step gives the same bits over another backend."""
    from spmd import P, psum, spmd

    answers = []
    for backend in ("shm", "relay-shm"):
        mesh = make_mesh({"data": 2}, backend=backend)
        step = spmd(lambda x: psum((x * x).sum(), "data"), mesh=mesh, in_specs=P("data"))
        answers.append(step(torch.linspace(0, 1, 1000)).item())
    assert answers[0] == answers[1]


def test_unknown_name() -> None:
    with pytest.raises(MeshError, match=r"unknown backend .*expected.*'gloo'.*got 'smoke-signals'"):
        Mesh({"data": 1}, backend="smoke-signals")
    with pytest.raises(MeshError, match=r"'smoke-signals'.*register_backend"):
        make_communicator("smoke-signals")


def test_a_factory_that_takes_other_arguments() -> None:
    with pytest.raises(SpecError, match=r"register_backend got a bad factory .*ranks=, rank=, .*got <class 'object'>"):
        register_backend("plain", object)
    with pytest.raises(SpecError, match=r"missing a required argument: 'size'"):
        register_backend("plain", lambda size, **arguments: None)
    assert "plain" not in backends()


def test_a_factory_that_makes_nothing(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2}, backend="nothing")
    with pytest.raises(MeshError, match=r"'nothing' made no communicator .*kernels\.communicator\.Communicator"):
        mesh.run(lambda: mesh.comm().barrier())


def test_a_factory_that_cannot_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = __import__("threading").Lock()
    monkeypatch.setitem(registry._FACTORIES, "stuck", lambda **_: lock)
    with pytest.raises(MeshError, match="factory of backend 'stuck' cannot be sent to the ranks"):
        Mesh({"data": 1}, backend="stuck")
