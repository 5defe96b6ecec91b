"""A job of two ranks that trains until it is told to stop, and what a stranger can see of it and send to it."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from fork_server import Forked, ForkServer
from patience import HANGS
from ports import free_port

JOB = """
import os, sys, torch
from pathlib import Path
from spmd import Mesh

mesh = Mesh(backend=sys.argv[1], timeout=60)
folder, steps = Path(sys.argv[2]), 0

def step():
    comm = mesh.comm()
    total = comm.all_reduced(torch.full((1000,), 1.0 + comm.rank))
    assert bool((total == 3.0).all()), total
    if comm.rank == 0:
        comm.send(torch.full((3,), float(steps)), 1, tag=5)
    else:
        got = torch.zeros(3)
        comm.recv(got, 0, tag=5)
        assert got.tolist() == [float(steps)] * 3, got
    over = torch.tensor(float(comm.rank == 0 and (folder / "stop").exists()))
    return bool(comm.all_reduced(over, "max"))

while not mesh.run(step)[0]:
    steps += 1
    (folder / f"trains-{os.environ.get('RANK', os.environ.get('SPMD_RANK'))}").touch()
print("right")
"""


class Job:
    """Two ranks, started one by one."""

    def __init__(self, server: ForkServer, folder: Path, backend: str, **environ: str):
        self._server, self.folder, self.backend, self.port = server, folder, backend, free_port()
        bare = {name: text for name, text in os.environ.items() if not name.startswith(("SPMD_", "MASTER_"))}
        meeting = {"SPMD_SIZE": "2", "SPMD_INIT_METHOD": f"tcp://127.0.0.1:{self.port}", "OMP_NUM_THREADS": "1"}
        self.environ = {**bare, **meeting, "SPMD_SECRET": secrets.token_hex(), **environ}
        self.ranks: list[Forked] = []

    def start(self, rank: int) -> None:
        environ = {**self.environ, "SPMD_RANK": str(rank)}
        self.ranks.append(self._server.start(JOB, self.backend, str(self.folder), environ=environ))

    def wait_until_it_trains(self) -> None:
        end = time.monotonic() + HANGS
        while not all((self.folder / f"trains-{rank}").exists() for rank in range(2)):
            for process in self.ranks:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)

    def trains_on(self) -> None:
        """It still makes steps."""
        for rank in range(2):
            (self.folder / f"trains-{rank}").unlink(missing_ok=True)
        self.wait_until_it_trains()

    def end(self) -> list[str]:
        """Have it stop after its current step; returns what each rank printed."""
        (self.folder / "stop").touch()
        return ["".join(process.communicate()) for process in self.ranks]


@contextlib.contextmanager
def job(server: ForkServer, folder: Path, backend: str = "gloo", **environ: str) -> Iterator[Job]:
    made = Job(server, folder, backend, **environ)
    try:
        yield made
    finally:
        for process in made.ranks:
            process.kill()
            process.communicate()


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The (address, port) at which these processes listen, as the kernel says."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                found.add((socket.inet_ntop(family, struct.pack(f"<{len(words)}I", *words)), int(port, 16)))
    return found


def allow_files(pid: int, *, more: bool) -> None:
    """Let a process open more files, or not one more."""
    most, opened = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1], {*map(int, os.listdir(f"/proc/{pid}/fd"))}
    free = next(number for number in range(most) if number not in opened)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if more else free, most))


# What a scanner sends, and what somebody sends who knows the protocol: a hello as rank 0, and a message from it.
GREETINGS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "zeros": bytes(4096),
    "giant lengths": b"\xff" * 4096,
    "half": b"\0\0\0",
    "forged frame": struct.pack("<q", 0) + struct.pack("<qQ", 5, 12) + struct.pack("<3f", 9, 9, 9),
    "forged hello": struct.pack("<q32s", 0, bytes(32)) + struct.pack("<qQ", 5, 12) + struct.pack("<3f", 9, 9, 9),
}


@contextlib.contextmanager
def scanned(address: tuple[str, int], idle: int) -> Iterator[None]:
    """Send all that to a port; then, within the block, keep many silent connections open. All on loopback.

    Not to one for which the kernel drops everything: each attempt would take until its timeout.
    """
    dropped = False
    try:
        socket.create_connection(address, timeout=1).close()
    except TimeoutError:
        dropped = True
    except OSError:
        pass
    if dropped:
        yield
        return
    for greeting in GREETINGS.values():
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as connection:
            connection.sendall(greeting)
            connection.settimeout(0.05)
            connection.recv(1 << 16)
    with contextlib.ExitStack() as stack:
        for _ in range(idle):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(address, timeout=0.5))
        yield
