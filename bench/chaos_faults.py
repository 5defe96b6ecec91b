"""The faults that `chaos.py` provokes: what is done to ranks, when, and what a program may see of it.

What a rank does to itself within a step is in `chaos_run.py`; the rest is done by a thread of the driver, at a random
moment during one of `DURING`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos_run

from spmd import Mesh, MeshError, PeerLost, RemoteError, SpmdError
from spmd.mesh.driver import spawn

DURING = ("a step", "values fetched", "a batch read", "a checkpoint written", "a resize")


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        inside: what a rank does to itself, at one of `chaos_run.MOMENTS`.
        outside: what the driver does to ranks, during one of `DURING`.
        raises: what the program may see, and answers by repeating the call.
        rare: it takes seconds.
        kills: it ends ranks.
    """

    name: str
    inside: str = ""
    outside: Callable[[Strike], None] | None = None
    raises: tuple[type[BaseException], ...] = ()
    rare: bool = False
    kills: bool = True


class Strike:
    """One fault that is about to happen.

    Args:
        wait: about how many seconds the thing takes during which it happens.

    Attributes:
        at: when it has happened; None before.
        pids: of the ranks that it ends.
    """

    def __init__(self, fault: Fault, during: str, mesh: Mesh, draw: random.Random, folder: Path, wait: float):
        self.fault, self.during, self.mesh, self.draw = fault, during, mesh, draw
        self._folder, self._wait = folder, wait
        self.at: float | None = None
        self.pids: list[int] = []
        self._thread: threading.Thread | None = None
        if fault.inside:
            (folder / "struck").unlink(missing_ok=True)
            chaos_run.fault_file(folder, during, draw.randrange(mesh.size)).write_text(fault.inside)

    def begin(self, during: str) -> None:
        """Something begins; if the fault is to happen during it, start its thread."""
        if self.fault.outside is not None and during == self.during and self._thread is None:
            self._thread = threading.Thread(target=self._happen)
            self._thread.start()

    def _happen(self) -> None:
        assert self.fault.outside is not None
        time.sleep(self.draw.uniform(0.0, self._wait))
        self.at = time.monotonic()
        self.fault.outside(self)

    def join(self) -> None:
        """Wait until it has happened."""
        if self._thread is not None:
            self._thread.join()
        elif self.fault.inside and self.at is None:
            with contextlib.suppress(OSError, ValueError):
                at, pid = (self._folder / "struck").read_text().split()
                self.at = float(at)
                self.pids += [int(pid)] if self.fault.kills else []

    def signal(self, ranks: list[int], number: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, IndexError):  # it has ended, or the mesh has shrunk
                pid = self.mesh.driver.pids[rank]
                os.kill(pid, number)
                if number not in (signal.SIGCONT, signal.SIGSTOP):
                    self.pids.append(pid)

    def one(self) -> list[int]:
        return [self.draw.randrange(self.mesh.size)]

    def all(self) -> list[int]:
        return [*range(self.mesh.size)]


def _kill_one(strike: Strike) -> None:
    strike.signal(strike.one(), signal.SIGKILL)


def _kill_two(strike: Strike) -> None:
    first = strike.one()
    strike.signal(first, signal.SIGKILL)
    time.sleep(strike.draw.uniform(0.0, 0.003))
    strike.signal([(first[0] + 1) % strike.mesh.size], signal.SIGKILL)


def _kill_all(strike: Strike) -> None:
    strike.signal(strike.all(), signal.SIGKILL)


def _terminate(strike: Strike) -> None:
    strike.signal(strike.one(), signal.SIGTERM)


def _kill_during_recovery(strike: Strike) -> None:
    first = strike.one()
    strike.signal(first, signal.SIGKILL)
    time.sleep(strike.draw.uniform(0.0, 0.05))
    strike.signal(strike.all() if strike.draw.random() < 0.5 else first, signal.SIGKILL)


def _stop_and_kill(strike: Strike) -> None:
    rank = strike.one()
    strike.signal(rank, signal.SIGSTOP)
    time.sleep(0.05)
    strike.signal(rank, signal.SIGKILL)


def _stop_and_go_on(strike: Strike) -> None:
    rank = strike.one()
    strike.signal(rank, signal.SIGSTOP)
    time.sleep(strike.draw.uniform(0.0, 0.2))
    strike.signal(rank, signal.SIGCONT)


def _stop_for_ever(strike: Strike) -> None:
    strike.signal(strike.one(), signal.SIGSTOP)


def zygote_of(mesh: Mesh) -> int:
    """The process that ranks are forked from."""
    return int(Path(f"/proc/{mesh.driver.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])


def _kill_zygote(strike: Strike) -> None:
    with contextlib.suppress(OSError):
        pids = strike.mesh.driver.pids
        os.kill(zygote_of(strike.mesh), signal.SIGKILL)
        strike.pids += pids


FAULTS = (
    Fault("kill one", outside=_kill_one),
    Fault("kill two at once", outside=_kill_two),
    Fault("kill all", outside=_kill_all),
    Fault("terminate", outside=_terminate),
    Fault("kill during recovery", outside=_kill_during_recovery),
    Fault("stop and kill", outside=_stop_and_kill),
    Fault("stop and go on", outside=_stop_and_go_on, kills=False),
    Fault("killed within a step", inside="killed"),
    Fault("segfault", inside="segfault"),
    Fault("os._exit", inside="exit_of_the_process"),
    Fault("sys.exit", inside="exit_of_python", raises=(RemoteError, SystemExit), kills=False),
    Fault("limit of memory", inside="limit_of_memory", raises=(RuntimeError, MemoryError), kills=False),
    Fault("killed for memory", inside="killed_for_memory"),
    Fault("no space left", kills=False),
    Fault("kill while a mesh is made"),
    Fault("stop for ever", outside=_stop_for_ever, rare=True),
    Fault("lock of Python held in C", inside="lock_of_python_held_in_c", rare=True),
    Fault("kill what forks them", outside=_kill_zygote, rare=True),
)


def drawn(draw: random.Random, names: list[str], *, resizes: bool) -> tuple[Fault, str]:
    """A fault, and when it is to happen."""
    known = [one for one in FAULTS if one.name in names]
    rare = draw.random() < 0.04 and any(one.rare for one in known)
    fault = draw.choice([one for one in known if one.rare == rare])
    if fault.inside:
        return fault, draw.choice(chaos_run.MOMENTS)
    if fault.outside is None:
        return fault, "another mesh made" if fault.kills else "a checkpoint written"
    moments = [moment for moment in DURING if resizes or moment != "a resize"]  # else the bits would differ
    return fault, draw.choice(moments)


def make_a_mesh(ranks: int, draw: random.Random) -> list[int]:
    """Make a mesh while killing processes started for it at random; it must work. Returns the killed ranks."""
    before, done, pids = set(_children()), threading.Event(), list[int]()

    def kill() -> None:
        end = time.monotonic() + 5.0
        while not (new := sorted(set(_children()) - before)) and time.monotonic() < end and not done.is_set():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.1))
        for pid in new[: draw.randint(1, ranks)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                pids.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with Mesh({"data": ranks}) as mesh:
            thread.join()
            for _ in range(3):  # a failed `run` is not repeated by the library
                with contextlib.suppress(PeerLost):
                    if mesh.run(lambda: 1) == [1] * ranks:
                        return pids
        raise MeshError("a mesh whose ranks were killed while it was made does not work")
    finally:
        done.set()
        thread.join()


def _children() -> list[int]:
    """The processes that this one's zygote has forked."""
    zygote = spawn.zygote()._process.pid
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()]
    return []


@contextlib.contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of 8 MB, or None where none can be had."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "spmd-chaos", name]
        if subprocess.run(command, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def save_on_a_full_disk(run: Any, disk: Path, numbers: Iterator[int], expected: str) -> None:
    """Have a checkpoint meet a full disk: it must raise, the one before must be whole, and the next must be written."""
    run.save(disk, next(numbers), background=False)
    free = os.statvfs(disk)
    with (disk / "full").open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_bsize - (1 << 20)))
    try:
        run.save(disk, next(numbers), background=True).result()
    except (OSError, SpmdError):  # the latter if there was no room for the message, either
        pass
    else:
        raise AssertionError("a checkpoint was written on a full disk")
    finally:
        (disk / "full").unlink()
    if chaos_run.digest_of_saved(disk) != expected:
        raise AssertionError("the checkpoint before is not whole")
    run.save(disk, next(numbers), background=False)
