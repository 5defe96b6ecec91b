"""Ranks are killed at random moments of a training run, which must be the undisturbed one, bit for bit.

    make chaos    # python bench/chaos.py [--seconds 300] [--seed 0] [--ranks 2] [--peer]

Runs follow each other on one mesh: after a call of the step a fault is provoked at a random moment (in the forward
pass, the backward pass, a reduction, the optimizer, while a batch is read or a value fetched), and some steps later
the next. The oracle is the undisturbed run: the hash of parameters and loss after every step, and the ids of the
samples of every batch. Prints for each fault: trials; steps with another hash; batches with lost or repeated samples;
errors; the milliseconds from the fault to the end of the step that it fell into (or the one after); and what was left.
A stopped rank counts as dead after `GRACE` seconds, which are part of its time. `--peer` does the same to torchrun
(chaos_peer.py) in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import logging
import os
import platform
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos_peer
import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

SAMPLES, BATCH, STEPS = 520, 48, 200  # of a run, after which it begins again
HANG_SECONDS = 60.0
CALM_STEPS = 3  # between two faults
GRACE = 2.0


def digest(params: dict[str, Any], loss: Any) -> str:
    found = hashlib.sha256(loss.full().numpy().tobytes())
    for name in sorted(params):
        found.update(params[name].full().numpy().tobytes())
    return found.hexdigest()


def run(mesh: Mesh, shards: int | None) -> Iterator[tuple[str, list[int], Callable[[], None]]]:
    """A training run: after each step its hash and the ids of its samples; what is set is called when one has begun."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    data = {"x": x, "y": (x @ torch.randn(16, 4)).argmax(1), "id": torch.arange(SAMPLES)}
    # Above and below what the ledger takes, and with random numbers.
    layers = nn.Linear(16, 1200), nn.Dropout(0.1), nn.ReLU(), nn.Linear(1200, 200), nn.ReLU(), nn.Linear(200, 4)
    apply, params = functional(nn.Sequential(*layers))
    opt = optimizer(torch.optim.AdamW, lr=1e-3)
    state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel(shards=shards)
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda p, b: F.cross_entropy(apply(p, b["x"]), b["y"]))(params, batch)
        params, state = opt.step(params, grads, state)
        return params, state, loss

    done = 0
    loader = Loader(data, batch_size=BATCH, seed=0, mesh=mesh, shards=shards)
    while True:
        for batch in loader:
            params, state, loss = step(params, state, batch)
            begun = yield "", [], None  # type: ignore[misc]
            if begun is not None:
                begun()
            yield digest(params, loss), batch["id"].full().tolist(), None  # type: ignore[misc]
            done += 1
            if done == STEPS:
                return


class Faults:
    """Ways for ranks to end, each done from another thread at some moment."""

    def __init__(self, mesh: Mesh, draw: random.Random):
        self._mesh, self._draw = mesh, draw

    def _signal(self, ranks: list[int], number: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, IndexError):  # it has ended, or the mesh is smaller by now
                os.kill(self._mesh.driver.pids[rank], number)

    def _one(self) -> list[int]:
        return [self._draw.randrange(self._mesh.size)]

    def kill_one(self) -> None:
        self._signal(self._one(), signal.SIGKILL)

    def kill_all(self) -> None:
        self._signal([*range(self._mesh.size)], signal.SIGKILL)

    def segfault(self) -> None:
        self._signal(self._one(), signal.SIGSEGV)

    def terminate(self) -> None:
        self._signal(self._one(), signal.SIGTERM)

    def kill_during_recovery(self) -> None:
        first = self._one()
        self._signal(first, signal.SIGKILL)
        time.sleep(self._draw.uniform(0.0, 0.05))
        self._signal([*range(self._mesh.size)] if self._draw.random() < 0.5 else first, signal.SIGKILL)

    def stop_and_kill(self) -> None:
        rank = self._one()
        self._signal(rank, signal.SIGSTOP)
        time.sleep(0.05)
        self._signal(rank, signal.SIGKILL)

    def stop_and_go_on(self) -> None:
        rank = self._one()
        self._signal(rank, signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.0, 0.2))
        self._signal(rank, signal.SIGCONT)

    def stop_for_ever(self) -> None:
        self._signal(self._one(), signal.SIGSTOP)

    def kill_in_a_resize(self) -> None:
        self.kill_one()  # what calls it resizes the mesh meanwhile

    def kill_what_they_are_forked_from(self) -> None:
        os.kill(self._mesh.driver.ranks.all[0]._zygote._process.pid, signal.SIGKILL)


NAMES = (
    *("kill_one", "kill_all", "segfault", "terminate", "kill_during_recovery", "stop_and_kill", "stop_and_go_on"),
    *("kill_in_a_resize", "stop_for_ever", "kill_what_they_are_forked_from"),
)
RARE = ("stop_for_ever", "kill_what_they_are_forked_from")  # they take seconds


class Tally:
    """What became of the trials of one fault."""

    def __init__(self) -> None:
        self.trials = self.hashes = self.samples = self.errors = 0
        self.seconds: list[float] = []


def steps_of(mesh: Mesh, shards: int | None) -> list[tuple[str, list[int]]]:
    turns = run(mesh, shards)
    found = []
    for _ in turns:
        state, ids, _ = turns.send(None)  # type: ignore[attr-defined]
        found.append((state, ids))
    return found


def chaos(mesh: Mesh, shards: int | None, seconds: float, draw: random.Random, tallies: dict[str, Tally]) -> int:
    """Provoke faults for so long; how many steps there were."""
    expected = steps_of(mesh, shards)
    faults, end, steps, ranks = Faults(mesh, draw), time.monotonic() + seconds, 0, mesh.size
    typical = 0.01
    while time.monotonic() < end:
        turns, calm = run(mesh, shards), 0
        turn = 0
        try:
            for _ in turns:
                fault, at = None, [0.0]
                if calm >= CALM_STEPS and time.monotonic() < end:
                    names = RARE if draw.random() < 0.03 else [name for name in NAMES if name not in RARE]
                    if shards is None:  # another number of ranks has other bits then
                        names = [name for name in names if name != "kill_in_a_resize"]
                    fault, calm = draw.choice(names), 0

                def strike(name: str | None = fault, at: list[float] = at, wait: float = 1.2 * typical) -> None:
                    time.sleep(draw.uniform(0.0, 0.3 if name == "kill_in_a_resize" else wait))
                    at[0] = time.monotonic()
                    getattr(faults, str(name))()

                thread = threading.Thread(target=strike) if fault else None

                def begin(name: str | None = fault, thread: threading.Thread | None = thread) -> None:
                    assert thread is not None
                    thread.start()
                    if name == "kill_in_a_resize":
                        mesh.resize({"data": ranks + 1 if mesh.size == ranks else ranks})

                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                began = time.monotonic()
                state, ids, _ = turns.send(begin if thread else None)  # type: ignore[attr-defined]
                passed = time.monotonic()
                steps += 1
                if thread is None or fault is None:
                    typical = 0.9 * typical + 0.1 * (passed - began)
                    calm += 1
                    tally = None
                else:
                    thread.join()
                    tally = tallies[fault]
                    tally.trials += 1
                    tally.seconds.append(max(0.0, passed - at[0]))
                if (state, ids) != expected[turn]:
                    tally = tally or tallies["between faults"]
                    tally.hashes += state != expected[turn][0]
                    tally.samples += ids != expected[turn][1]
                turn += 1
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            tallies[fault or "between faults"].errors += 1
        if turn < STEPS and time.monotonic() < end:
            turns.close()  # type: ignore[attr-defined]
    faulthandler.cancel_dump_traceback_later()
    mesh.resize({"data": ranks})
    return steps


def shared_bytes(mesh: Mesh) -> int:
    return os.fstat(mesh.driver.ranks._arena_fd).st_blocks * 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    logging.getLogger("spmd").setLevel(logging.ERROR)
    draw = random.Random(options.seed)
    tallies = {name: Tally() for name in (*NAMES, "between faults")}
    before = set(os.listdir("/dev/shm"))
    steps, pids, grown = 0, set[int](), []
    for shards in (None, 4):
        with Mesh({"data": options.ranks}, timeout=HANG_SECONDS, grace=GRACE) as mesh:
            for _ in run(mesh, shards):
                pass
            held = shared_bytes(mesh)
            steps += chaos(mesh, shards, options.seconds / 2, draw, tallies)
            grown.append((shared_bytes(mesh) - held) / (1 << 20))
            pids.update(mesh.driver.pids)
    orphans = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    print(f"{os.cpu_count()} cores, {platform.release()}, torch {torch.__version__}, {options.ranks} ranks")
    print(f"{steps} steps in {options.seconds:g} s, half of them with shards=4; seed {options.seed}")
    print(f"{'fault':<32}{'trials':>7}{'hashes':>8}{'samples':>9}{'errors':>8}{'median ms':>11}{'p99 ms':>9}")
    for name, tally in tallies.items():
        times = sorted(tally.seconds)
        median = f"{1e3 * statistics.median(times):.0f}" if times else "-"
        most = f"{1e3 * times[min(len(times) - 1, int(0.99 * len(times)))]:.0f}" if times else "-"
        counts = f"{tally.trials:>7}{tally.hashes:>8}{tally.samples:>9}{tally.errors:>8}"
        print(f"{name.replace('_', ' '):<32}{counts}{median:>11}{most:>9}")
    print(f"hangs 0, orphans {len(orphans)}, new in /dev/shm {len(set(os.listdir('/dev/shm')) - before)}")
    print("shared memory more than before the first fault: " + ", ".join(f"{each:.1f} MB" for each in grown))
    trials = sum(tally.trials for tally in tallies.values())
    killed = trials - tallies["stop_and_go_on"].trials
    print(f"{killed} times ranks were killed, in runs of {STEPS} steps")
    if options.peer:
        print(chaos_peer.line(chaos_peer.seconds_to_train_again(20, options.ranks), options.ranks), flush=True)
    wrong = sum(tally.hashes + tally.samples + tally.errors for tally in tallies.values()) + len(orphans)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
