"""Ranks fail at random moments of a training run, which must equal the undisturbed one, bit for bit.

    make chaos    # python bench/chaos.py [--seconds 600] [--kills 0] [--steps 200] [--seed 0] [--peer] [--hosts]

Runs follow each other on one mesh, of 2 ranks, and then with `shards=4` of 3, which is resized, too; every few steps
there is a fault (`chaos_faults.py`). The oracle is the undisturbed run: the hash of parameters and loss after every
step, and the ids of the samples of every batch. Prints for each fault, and for each moment at which it came: trials;
hangs (nothing for `HANG_SECONDS`, which ends it all); steps with another hash; batches with lost or repeated samples;
errors that a program should not see; processes that were left; how far shared memory exceeded its previous maximum; and
the milliseconds from the fault to the end of the first step with the ranks that are there afterwards. Stopped and stuck
ranks count as dead after `GRACE` seconds, which are part of that. `--peer` does the same to torchrun (`chaos_peer.py`),
`--hosts` cuts the wire between two hosts (`chaos_hosts.py`) and kills hosts whose values have copies
(`chaos_copies.py`), in the same run.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import chaos_copies
import chaos_faults
import chaos_hosts
import chaos_peer
import chaos_run
import torch
from chaos_faults import FAULTS, Strike
from chaos_run import Run

from spmd import Mesh

HANG_SECONDS = 60.0
CALM_STEPS = 2  # between two faults
GRACE = 0.5
WAITS = {"a batch read": 0.003, "values fetched": 0.005, "a checkpoint written": 0.02, "a resize": 0.3}
NUMBERS = itertools.count()  # of checkpoints
TRIES = 3  # by a program that repeats a failed call


class Tally:
    """The outcomes of one fault's trials."""

    def __init__(self) -> None:
        self.trials = self.hashes = self.samples = self.errors = self.orphans = 0
        self.leaked = 0.0
        self.seconds: list[float] = []

    def line(self, name: str) -> str:
        times = sorted(self.seconds)
        median = f"{1e3 * statistics.median(times):.0f}" if times else "-"
        most = f"{1e3 * times[min(len(times) - 1, int(0.99 * len(times)))]:.0f}" if times else "-"
        counts = f"{self.trials:>7}{0:>7}{self.hashes:>8}{self.samples:>9}{self.errors:>8}{self.orphans:>9}"
        return f"{name:<28}{counts}{self.leaked:>8.1f}{median:>11}{most:>9}"


HEAD = f"{'':<28}{'trials':>7}{'hangs':>7}{'hashes':>8}{'samples':>9}{'errors':>8}{'orphans':>9}{'MB':>8}"
HEAD += f"{'median ms':>11}{'p99 ms':>9}"


class Watch(threading.Thread):
    """Ends the program, with all stacks, when nothing has been done for too long."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.last, self.doing = time.monotonic(), "no fault"
        self.mesh: Mesh | None = None

    def run(self) -> None:
        while time.monotonic() - self.last < HANG_SECONDS + GRACE:
            time.sleep(1.0)
            if not self.doing:
                return
        print(f"hangs 1: {self.doing}", flush=True)
        faulthandler.dump_traceback()
        if self.mesh is not None:
            print(self.mesh.stacks(), file=sys.stderr, flush=True)
        os._exit(2)

    def note(self, doing: str) -> None:
        self.last, self.doing = time.monotonic(), doing


class Chaos:
    """Faults on one mesh, and their outcomes."""

    def __init__(self, mesh: Mesh, shards: int | None, options: Any, draw: random.Random, folder: Path, watch: Watch):
        self.mesh, self._shards, self._options, self._draw, self._watch = mesh, shards, options, draw, watch
        self._folder, self._ranks = folder, mesh.size
        self.by_fault = {fault.name: Tally() for fault in FAULTS} | {"between faults": Tally()}
        self.by_moment: dict[str, Tally] = {}
        self.steps = self.killed = 0
        self._names = [fault.name for fault in FAULTS if fault.name not in options.without]
        self._typical = 0.01
        self._most: dict[int, int] = {}  # the most shared memory that was seen, by the mesh's size
        self._past: tuple[list[int], Tally] = ([], Tally())  # the processes that the last fault must have ended
        watch.mesh = mesh

    def expected(self) -> list[tuple[str, list[int]]]:
        """The undisturbed run, with checkpoints, too; the memory that it takes is the limit for the others."""
        run, found = Run(self.mesh, self._shards, self._folder), []
        batches = run.batches()
        for turn in range(self._options.steps):
            found.append(run.step(next(batches), lambda what: None))
            if turn % 10 == 0:
                run.save(self._folder / "checkpoints", next(NUMBERS), background=turn % 20 == 0).result()
            self._most[self.mesh.size] = max(self._most.get(self.mesh.size, 0), shared_bytes(self.mesh))
        return found

    def disturb(self, seconds: float, disk: Path | None) -> None:
        """Provoke faults for at least this time and the wanted number of kills, in runs from the beginning."""
        expected, end = self.expected(), time.monotonic() + seconds

        def over() -> bool:
            return time.monotonic() >= end and self.killed >= self._options.kills / 2

        while not over():
            run, calm, pending = Run(self.mesh, self._shards, self._folder), 0, None
            batches = run.batches()
            for turn in range(self._options.steps):
                if over() and pending is None:
                    break
                if pending is None and calm >= CALM_STEPS:
                    pending, calm = self._armed(), 0
                calm += pending is None
                began = time.monotonic()
                self._watch.note(f"{pending.fault.name}, {pending.during}" if pending else "no fault")
                tally = self.by_fault[pending.fault.name if pending else "between faults"]
                try:
                    found = self._turn(run, batches, pending, turn, disk)
                except Exception:
                    print(f"-- {self._watch.doing}", file=sys.stderr)
                    traceback.print_exc()
                    tally.errors += 1
                    break
                self.steps += 1
                tally.hashes += found[0] != expected[turn][0]
                tally.samples += found[1] != expected[turn][1]
                if pending is None:
                    self._typical = 0.9 * self._typical + 0.1 * (time.monotonic() - began)
                elif self._is_over(pending):
                    pending = None
            if pending is not None:
                pending.join()
        self.mesh.resize({"data": self._ranks})
        self._look_at_what_is_left()

    def _armed(self) -> Strike:
        self._look_at_what_is_left()
        fault, during = chaos_faults.drawn(self._draw, self._names, resizes=self._shards is not None)
        wait = WAITS.get(during, 1.2 * self._typical)
        strike = Strike(fault, during, self.mesh, self._draw, self._folder, wait)
        self.by_fault[fault.name].trials += 1
        self.by_moment.setdefault(during, Tally()).trials += 1
        return strike

    def _turn(self, run: Run, batches: Any, strike: Strike | None, turn: int, disk: Path | None) -> tuple[str, list]:
        """A step, with everything else that a program does."""
        begins = strike.begin if strike is not None else lambda what: None
        if strike is not None and strike.during == "a resize" and strike.at is None:
            begins("a resize")
            size = self._ranks if self.mesh.size != self._ranks else self._ranks + self._draw.choice((-1, 1))
            self.mesh.resize({"data": size})
        begins("a batch read")
        batch = next(batches)
        raises = strike.fault.raises if strike is not None else ()
        for left in reversed(range(TRIES)):
            try:
                found = run.step(batch, begins)
                break
            except raises:
                if not left:
                    raise
        if strike is not None and strike.during == "a checkpoint written" and strike.at is None:
            self._save(run, strike, found[0], disk)
        if strike is not None and strike.during == "another mesh made":
            strike.at = time.monotonic()
            strike.pids += chaos_faults.make_a_mesh(2, self._draw)
        return found

    def _save(self, run: Run, strike: Strike, expected: str, disk: Path | None) -> None:
        if strike.fault.outside is None:
            strike.at = time.monotonic()
            assert disk is not None
            chaos_faults.save_on_a_full_disk(run, disk, NUMBERS, expected)
            return
        folder = self._folder / "checkpoints"
        strike.begin(strike.during)
        run.save(folder, next(NUMBERS), background=self._draw.random() < 0.5).result()
        if chaos_run.digest_of_saved(folder) != expected:
            raise AssertionError("the checkpoint has other values")

    def _is_over(self, strike: Strike) -> bool:
        """Whether a step was finished since the fault without the ranks that it ended; if so, notes the time."""
        now = time.monotonic()
        strike.join()
        if strike.at is None or set(strike.pids) & set(self.mesh.driver.pids) or strike.at > now:
            return False
        name = strike.fault.name
        for tally in (self.by_fault[name], self.by_moment[strike.during]):
            if strike.during != "another mesh made":
                tally.seconds.append(now - strike.at)
        self.killed += strike.fault.kills
        self._past = (strike.pids, self.by_fault[name])
        return True

    def _look_at_what_is_left(self) -> None:
        """Some steps after a fault, note what it left: processes, and more shared memory than ever before."""
        pids, tally = self._past
        end = time.monotonic() + 2.0
        while (left := [*filter(runs, pids)]) and time.monotonic() < end:
            time.sleep(0.005)
        tally.orphans += len(left)
        held = shared_bytes(self.mesh)
        before = self._most.setdefault(self.mesh.size, held)
        self._most[self.mesh.size] = max(held, before)
        tally.leaked += max(0, held - before) / (1 << 20)
        self._past = ([], tally)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def shared_bytes(mesh: Mesh) -> int:
    return os.fstat(mesh.driver.ranks._arena_fd).st_blocks * 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=0, help="longer, until ranks were ended so often")
    parser.add_argument("--steps", type=int, default=200, help="of a run, after which it begins again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", nargs="*", default=[], help="faults that are left out")
    parser.add_argument("--peer", type=int, default=0, help="so many kills of a rank of torchrun")
    parser.add_argument("--hosts", action="store_true", help="also what happens between two hosts")
    options = parser.parse_args()
    logging.getLogger("spmd").setLevel(logging.ERROR)
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}, seed {options.seed}")
    draw, before, files = random.Random(options.seed), set(os.listdir("/dev/shm")), 0
    watch = Watch()
    watch.start()
    total: dict[str, dict[str, Tally]] = {"fault": {}, "moment": {}}
    steps = killed = 0
    with tempfile.TemporaryDirectory() as name, chaos_faults.small_disk() as disk:
        if (why := chaos_run.no_groups_of_memory()) is not None:
            options.without.append("killed for memory")
            print(f"left out, killed for memory: {why}")
        if disk is None:
            options.without.append("no space left")
            print("left out, no space left: no small file system can be mounted here")
        for shards, ranks in ((None, 2), (4, 3)):
            with Mesh({"data": ranks}, timeout=HANG_SECONDS, grace=GRACE) as mesh:
                one = Chaos(mesh, shards, options, draw, Path(name), watch)
                one.disturb(options.seconds / 2, disk)
                pids = mesh.driver.pids
            one.by_fault["between faults"].orphans += sum(map(runs, pids))
            for kind, found in (("fault", one.by_fault), ("moment", one.by_moment)):
                for key, tally in found.items():
                    add(total[kind].setdefault(key, Tally()), tally)
            steps, killed = steps + one.steps, killed + one.killed
            files = len(os.listdir("/proc/self/fd")) if shards is None else len(os.listdir("/proc/self/fd")) - files
    watch.note("")  # it is over
    chaos_run.remove_groups()
    print(f"{steps} steps in runs of {options.steps}, in {options.seconds:g} s; ranks were ended {killed} times")
    for kind, found in total.items():
        print(f"\n{HEAD.replace(' ' * len(kind), kind, 1)}")
        for key, tally in found.items():
            print(tally.line(key))
    shm = len(set(os.listdir("/dev/shm")) - before)
    print(f"\nnew in /dev/shm {shm}; open files of the driver more than after the first half: {files}")
    wrong = sum(tally.hashes + tally.samples + tally.errors + tally.orphans for tally in total["fault"].values())
    if options.hosts:
        wrong += chaos_hosts.report() + chaos_copies.report()
    if options.peer:
        print(chaos_peer.line(chaos_peer.seconds_to_train_again(options.peer, 2), 2), flush=True)
    sys.exit(bool(wrong))


def add(total: Tally, tally: Tally) -> None:
    for name in ("trials", "hashes", "samples", "errors", "orphans", "leaked", "seconds"):
        setattr(total, name, getattr(total, name) + getattr(tally, name))


if __name__ == "__main__":
    main()
