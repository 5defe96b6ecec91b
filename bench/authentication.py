"""What authentication costs: a call, messages and an all-reduce of two launched ranks, with codes and without.

    python bench/authentication.py > bench/results/authentication.txt

Two meshes in one job, measured in turn: one with all codes, those of messages between hosts too (though its connections
are on loopback, the fastest and so the hardest case), and one whose messages have none. Each figure is that of the
fastest tenth of the rounds, for a loaded machine makes the others longer by more than codes do; the ratio is that of
the two, and its spread the quartiles of the rounds' own ratios. Last, what the codes of one short message take alone.
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

ROUNDS, SECONDS = 61, 0.015


def without_codes(make: Callable[[], Mesh]) -> Mesh:
    """A mesh whose codes are constants, and whose messages have none."""
    real = mailbox.Mailbox._codes_between
    mailbox.Mailbox._codes_between = lambda *_: None  # type: ignore[method-assign]
    try:
        mesh = make()
        mesh.run(ping, mesh, 12)
        return mesh
    finally:
        mailbox.Mailbox._codes_between = real  # type: ignore[method-assign]


def ping(mesh: Mesh, nbytes: int, count: int = 1) -> float:
    """Seconds of a message from rank 0 to rank 1: half of one there and one back."""
    comm, data = mesh.comm(), torch.zeros(nbytes, dtype=torch.uint8)
    comm.barrier()
    began = time.perf_counter()
    for _ in range(count):
        if comm.rank == 0:
            comm.send(data, 1)
            comm.recv(data, 1)
        else:
            comm.recv(data, 0)
            comm.send(data, 0)
    return (time.perf_counter() - began) / count / 2


def reduce(mesh: Mesh, numel: int, count: int = 1) -> float:
    comm, data = mesh.comm(), torch.ones(numel)
    comm.barrier()
    began = time.perf_counter()
    for _ in range(count):
        comm.all_reduced(data)
    return (time.perf_counter() - began) / count


def calls(mesh: Mesh, count: int = 1) -> float:
    step = spmd(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"))
    x = torch.ones(2)
    float(step(x))
    began = time.perf_counter()
    for _ in range(count):
        float(step(x))
    return (time.perf_counter() - began) / count


CASES: dict[str, Callable[[Mesh, int], float]] = {
    "a call (psum of a number)": lambda mesh, count: calls(mesh, count),
    "message, 12 B": lambda mesh, count: mesh.run(ping, mesh, 12, count)[0],
    "message, 64 KiB": lambda mesh, count: mesh.run(ping, mesh, 1 << 16, count)[0],
    "message, 4 MiB": lambda mesh, count: mesh.run(ping, mesh, 1 << 22, count)[0],
    "all-reduce, 4 B": lambda mesh, count: mesh.run(reduce, mesh, 1, count)[0],
    "all-reduce, 1 MiB": lambda mesh, count: mesh.run(reduce, mesh, 1 << 18, count)[0],
}


def rank() -> None:
    mailbox.is_loopback = lambda host: False  # type: ignore[assignment]
    coded = Mesh(backend="gloo")
    coded.run(ping, coded, 12)
    code = authentication.code
    plain = without_codes(lambda: Mesh(backend="gloo"))
    assert code is authentication.code
    if coded.rank == 0:
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
              f"2 ranks over Gloo on loopback, {ROUNDS} rounds of {SECONDS:g} s")  # fmt: skip
        print(f"{'':28}{'with codes':>14}{'without':>14}{'ratio':>8}  quartiles")
    for name, measure in CASES.items():
        count = max(1, int(SECONDS / max(coded.run(lambda: 0.0)[0], measure(plain, 3))))
        count = plain.run(lambda own: own, count)[0]  # both ranks the same
        taken = [[measure(mesh, count) for mesh in (coded, plain)] for _ in range(ROUNDS)]
        with_codes, without = (statistics.quantiles(column, n=10)[0] for column in zip(*taken, strict=True))
        low, _, high = statistics.quantiles([one / other for one, other in taken], n=4)
        if coded.rank == 0:
            print(f"{name:28}{1e6 * with_codes:11.1f} us{1e6 * without:11.1f} us{with_codes / without:8.3f}  "
                  f"{low:.3f} to {high:.3f}", flush=True)  # fmt: skip
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
