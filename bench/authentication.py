"""What authentication costs: a call, messages and an all-reduce of two launched ranks, with codes and without.

    python bench/authentication.py > bench/results/authentication.txt

Two meshes in one job: one with all codes, those of messages between hosts too (though its connections are on loopback,
the fastest and so the hardest case), and one whose messages have none. One operation of each in turn, thousands of
times, so that what else the machine does meets both alike; the figures are medians, the ratio is that of the two, and
its spread that of nine parts of the run. Last, what the codes of one short message take alone.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable

import torch

from spmd import Mesh, P, psum, spmd
from spmd.kernels.network import authentication, mailbox

PARTS = 9


def without_codes(make: Callable[[], Mesh]) -> Mesh:
    """A mesh whose codes are constants, and whose messages have none."""
    real = mailbox.Mailbox._codes_between
    mailbox.Mailbox._codes_between = lambda *_: None  # type: ignore[method-assign]
    try:
        mesh = make()
        ping(mesh, 12)()
        return mesh
    finally:
        mailbox.Mailbox._codes_between = real  # type: ignore[method-assign]


def ping(mesh: Mesh, nbytes: int) -> Callable[[], float]:
    """A message from rank 0 to rank 1, half of one there and one back."""
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
    "message, 12 B": (4000, lambda mesh: ping(mesh, 12)),
    "message, 64 KiB": (2000, lambda mesh: ping(mesh, 1 << 16)),
    "message, 4 MiB": (100, lambda mesh: ping(mesh, 1 << 22)),
    "all-reduce, 4 B": (2000, lambda mesh: reduce(mesh, 1)),
    "all-reduce, 1 MiB": (500, lambda mesh: reduce(mesh, 1 << 18)),
}


def rank() -> None:
    mailbox.is_loopback = lambda host: False  # type: ignore[assignment]
    coded = Mesh(backend="gloo")
    ping(coded, 12)()
    plain = without_codes(lambda: Mesh(backend="gloo"))
    if coded.rank == 0:
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
              "2 ranks over Gloo on loopback")  # fmt: skip
        print(f"{'':28}{'with codes':>14}{'without':>14}{'ratio':>8}  spread")
    for name, (rounds, make) in CASES.items():
        both = [make(mesh) for mesh in (coded, plain)]
        for once in both * 20:
            once()
        # Who goes first takes turns too: what follows another operation finds its threads awake.
        taken = [[once() for once in both] if turn % 2 else [once() for once in both[::-1]][::-1]
                 for turn in range(rounds)]  # fmt: skip
        with_codes, without = (statistics.median(column) for column in zip(*taken, strict=True))
        parts = [
            statistics.median(one for one, _ in part) / statistics.median(other for _, other in part)
            for part in (taken[start::PARTS] for start in range(PARTS))
        ]
        if coded.rank == 0:
            print(f"{name:28}{1e6 * with_codes:11.1f} us{1e6 * without:11.1f} us{with_codes / without:8.3f}  "
                  f"{min(parts):.3f} to {max(parts):.3f}", flush=True)  # fmt: skip
    if coded.rank == 0:
        codes = [authentication.MessageCodes(b"a key") for _ in range(2)]
        head, body = bytes(16), bytes(12)
        alone = timeit.repeat(
            lambda: authentication.same(codes[0].of_next(head, body), codes[1].of_next(head, body)),
            number=1000,
            repeat=99,
        )
        print(f"the codes of a message of 12 B, at both ends: {1e3 * min(alone):.2f} us")


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
