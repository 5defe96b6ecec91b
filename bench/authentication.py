"""What authentication costs: a call, messages and an all-reduce of two launched ranks, with codes and without.

    python bench/authentication.py > bench/results/authentication.txt

One mesh whose messages have codes, as between hosts (though its connections are on loopback, the fastest and so the
hardest case). Each operation is done with codes and without in turn, thousands of times, over the same connections and
threads: between two meshes, or two runs, it matters more which threads share a core than whether there are codes. The
figures are medians, the ratio is that of the two, and its spread that of nine parts of the run. Last comes the time
that a short message takes in this library alone, in one thread that waits for nobody.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

from spmd import Mesh, P, psum, spmd
from spmd.kernels.network import communicator, mailbox
from spmd.kernels.network.authentication import MessageCodes
from spmd.kernels.network.frames import Frames
from spmd.kernels.network.messages import Incoming, Outgoing

PARTS = 9


class Codes:
    """The codes of a mesh's messages and results, taken away and put back, at this rank."""

    def __init__(self, mesh: Mesh):
        comm: Any = mesh.comm()
        self._mailbox = comm._mailbox
        found = [key.data for key in self._mailbox._selector.get_map().values() if isinstance(key.data, Incoming)]
        (self._frames,) = [incoming._frames for incoming in found if incoming._frames is not None]
        self._peer = 1 - comm.rank
        self._known: Any = (
            self._mailbox._codes[self._peer],
            self._frames._codes,
            communicator.seal,
            communicator.unseal,
        )
        assert None not in self._known

    def set(self, on: bool) -> None:
        outgoing, incoming, seal, unseal = self._known
        self._mailbox._codes[self._peer] = outgoing if on else None
        self._frames._codes = incoming if on else None
        communicator.seal = seal if on else lambda key, name, value: value
        communicator.unseal = unseal if on else lambda key, name, data: data


def ping(mesh: Mesh, nbytes: int) -> Callable[[], float]:
    """A message from rank 0 to rank 1: half of a round trip."""
    comm, data = mesh.comm(), torch.zeros(nbytes, dtype=torch.uint8)

    def once() -> float:
        comm.barrier()
        began = time.perf_counter()
        if comm.rank == 0:
            comm.send(data, 1)
            comm.recv(data, 1)
        else:
            comm.recv(data, 0)
            comm.send(data, 0)
        return (time.perf_counter() - began) / 2

    return once


def reduce(mesh: Mesh, numel: int) -> Callable[[], float]:
    comm, data = mesh.comm(), torch.ones(numel)
    return lambda: timed(lambda: comm.all_reduced(data))


def call(mesh: Mesh) -> Callable[[], float]:
    step = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    x = torch.ones(2)
    return lambda: timed(lambda: float(step(x)))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


CASES: dict[str, tuple[int, Callable[[Mesh], Callable[[], float]]]] = {
    "a call (psum of a number)": (1000, call),
    "message, 12 B": (6000, lambda mesh: ping(mesh, 12)),
    "message, 64 KiB": (2000, lambda mesh: ping(mesh, 1 << 16)),
    "message, 4 MiB": (100, lambda mesh: ping(mesh, 1 << 22)),
    "all-reduce, 4 B": (2000, lambda mesh: reduce(mesh, 1)),
    "all-reduce, 1 MiB": (500, lambda mesh: reduce(mesh, 1 << 18)),
}


def rank() -> None:
    mailbox.is_loopback = lambda host: False  # type: ignore[assignment]
    mesh = Mesh(backend="gloo")
    ping(mesh, 12)()
    codes = Codes(mesh)
    if mesh.rank == 0:
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
              "2 ranks over Gloo on loopback")  # fmt: skip
        print(f"{'':28}{'with codes':>14}{'without':>14}{'ratio':>8}  spread")

    def both(once: Callable[[], float], first: bool) -> list[float]:
        taken = {}
        for on in (first, not first):
            codes.set(on)
            taken[on] = once()
        return [taken[True], taken[False]]

    for name, (rounds, make) in CASES.items():
        once = make(mesh)
        for turn in range(20):
            both(once, bool(turn % 2))
        # The two take turns in going first, too: what follows another operation finds its threads awake.
        taken = [both(once, bool(turn % 2)) for turn in range(rounds)]
        with_codes, without = (statistics.median(column) for column in zip(*taken, strict=True))
        parts = [
            statistics.median(one for one, _ in part) / statistics.median(other for _, other in part)
            for part in (taken[start::PARTS] for start in range(PARTS))
        ]
        if mesh.rank == 0:
            print(f"{name:28}{1e6 * with_codes:11.1f} us{1e6 * without:11.1f} us{with_codes / without:8.3f}  "
                  f"{min(parts):.3f} to {max(parts):.3f}", flush=True)  # fmt: skip
    if mesh.rank == 0:
        with_codes, without = both_ends(codes=True), both_ends(codes=False)
        taken = [(min(timeit.repeat(with_codes, number=200, repeat=3)),
                  min(timeit.repeat(without, number=200, repeat=3))) for _ in range(99)]  # fmt: skip
        one, other = (1e6 * statistics.median(column) / 200 for column in zip(*taken, strict=True))
        print(f"12 B through a pair of sockets, both ends in one thread: {one:.2f} us with codes, {other:.2f} without: "
              f"codes take {one - other:.2f} us")  # fmt: skip


def both_ends(*, codes: bool) -> Callable[[], None]:
    """Send and receive a message with this library's code, in one thread that waits for nobody."""
    here, there = socket.socketpair()
    sending, receiving = (MessageCodes(b"a key") if codes else None for _ in range(2))
    found: list[int] = []
    frames = Frames(there, receiving, lambda number, body: found.append(number))
    data = torch.zeros(12, dtype=torch.uint8)

    def once() -> None:
        message = Outgoing(1, data, sending)
        assert message.piece is not None
        here.send(message.piece)
        frames.read()
        found.clear()

    return once


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"file://{folder}/meet", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([sys.executable, __file__, "rank"], env={**os.environ, **told, "SPMD_RANK": str(number)})
            for number in range(2)
        ]
        sys.exit(max(abs(process.wait()) for process in ranks))


if __name__ == "__main__":
    rank() if sys.argv[1:] else main()
