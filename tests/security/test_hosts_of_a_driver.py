"""Strangers at the ports of a mesh over several hosts, while its hosts come and while it trains."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import threading
from typing import Any

import pytest
import torch
from attacks import allow_files, listening, scanned
from host_processes import host_process
from patience import HANGS, until

from spmd import Mesh, PeerLost, SpmdError, data_parallel, put, spmd, value_and_grad
from spmd.mesh.hosts import launchers

IDLE = 100  # connections to each port


class Counter:
    def add(self, more: int) -> int:
        return more + 1


def stranger(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=5)
    connection.setblocking(False)  # with a timeout, what is asked of it waits for as long, MSG_DONTWAIT or not
    return connection


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed it; nothing of what it says is taken."""
    try:
        return bool(connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_strangers_that_drip_do_not_keep_hosts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They connect before the hosts do, and send a byte now and then; of so many few are let stand."""
    monkeypatch.setattr("spmd.mesh.hosts.link.GREETING_SECONDS", 1000.0)  # they are not only ended for being late
    before, held, over = listening([os.getpid()]), [], threading.Event()
    start = launchers.started

    def started(*command: Any) -> subprocess.Popen:
        assert until(lambda: len(held) >= 300)
        return start(*command)

    monkeypatch.setattr(launchers, "started", started)

    def drip() -> None:
        while not over.is_set():
            for address in listening([os.getpid()]) - before if len(held) < 300 else ():
                with contextlib.suppress(OSError):
                    held.extend(stranger(address) for _ in range(300))
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            over.wait(0.5 if held else 0.01)

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with Mesh({"data": 2}, hosts="local:2x1") as mesh:
            assert until(lambda: sum(map(is_open, held)) <= 32)
            assert mesh.run(lambda: int(mesh.comm().rank)) == [0, 1]
    finally:
        over.set()
        thread.join()
        for connection in held:
            connection.close()


def test_strangers_while_the_driver_can_start_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are turned away, and hosts that come later are let in."""
    before, start, begin = listening([os.getpid()]), threading.Thread.start, launchers.started
    starts: list[threading.Thread] = []

    def starts_few(thread: threading.Thread) -> None:
        if thread.name == "spmd-meeting":
            starts.append(thread)
            if 1 < len(starts) <= 4:  # the first accepts connections
                raise RuntimeError("can't start new thread")
        start(thread)

    def started(*command: Any) -> subprocess.Popen:
        with contextlib.ExitStack() as stack:
            for address in listening([os.getpid()]) - before if len(starts) == 1 else ():
                for _ in range(3):
                    stack.enter_context(stranger(address))
            assert until(lambda: len(starts) >= 4)
        return begin(*command)

    monkeypatch.setattr(threading.Thread, "start", starts_few)
    monkeypatch.setattr(launchers, "started", started)
    with Mesh({"data": 2}, hosts="local:2x1") as mesh:
        assert mesh.run(lambda: int(mesh.comm().rank)) == [0, 1]


def test_a_host_that_can_open_no_more_files() -> None:
    """Its process hands large arguments on all the same, and says what it can't do, until it can."""
    large = torch.ones(1 << 20)
    with Mesh({"data": 2}, hosts="local:2x1", timeout=HANGS) as mesh:
        pids = mesh.run(os.getpid)
        host = mesh.run(host_process)[1]
        works = [float(1 << 20)] * 2
        for more in (False, True, False):
            allow_files(host, more=more)
            value = put(large, mesh=mesh)
            assert mesh.run(lambda x: float(x.sum()), large) == works
            assert mesh.run(lambda value=value: float(value.local.sum())) == works
            if more:
                assert [float(one.sum()) for one in mesh.run(lambda: torch.ones(1 << 20))] == works
            else:
                for _ in range(2):
                    with pytest.raises(SpmdError, match="RLIMIT_NOFILE"):
                        mesh.run(lambda: torch.ones(1 << 20))
            assert "rank 1" in mesh.stacks() and len(mesh.status()) == 2 and mesh.run(os.getpid) == pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(SpmdError, match=r"host local1 can't start ranks.*RLIMIT_NOFILE"):
            while True:  # first the death, then what became of it
                with contextlib.suppress(PeerLost):
                    mesh.run(os.getpid)


def test_scanner_of_a_job_over_several_hosts() -> None:
    """Every port of the driver, of the hosts' processes and of their ranks, while it trains."""
    before = listening([os.getpid()])
    with Mesh({"data": 2}, hosts="local:2x1") as mesh:
        counter = mesh.remote(Counter, rank=1)
        x = torch.linspace(-1.0, 1.0, 64).reshape(16, 4)

        @spmd(mesh=mesh)
        @data_parallel
        def step(w: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss, slope = value_and_grad(lambda w, batch: (batch @ w - 1.0).square().mean())(w, batch)
            return w - 0.1 * slope, loss

        def exchange() -> list[float]:
            comm, got = mesh.comm(), torch.zeros(3)
            sent = comm.isend(torch.full((3,), 1.0 + comm.rank), 1 - comm.rank)
            comm.recv(got, 1 - comm.rank)
            sent.wait()
            return got.tolist()

        def trained() -> tuple[list[float], list[list[float]], int]:
            w, losses = torch.zeros(4), []
            for _ in range(5):
                w, loss = step(w, batch=x)
                losses.append(float(loss))
            return losses, mesh.run(exchange), counter.add(1).get(timeout=HANGS)

        right, pids = trained(), mesh.run(os.getpid)
        assert right[1:] == ([[2.0] * 3, [1.0] * 3], 2)
        parents = mesh.run(os.getppid)
        ports = listening([os.getpid(), *pids, *parents]) - before
        assert len(ports) >= 4, ports  # of each rank, for remote calls and for messages
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in ports), ports
        for port in sorted(ports):
            with scanned(port, IDLE):
                assert trained() == right
        assert mesh.run(os.getpid) == pids  # nobody was lost and replaced
