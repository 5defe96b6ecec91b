"""Streams stopped at every batch and resumed at every other size: the same samples, the same parameters.

    make resume                           # the two tables of docs/data.md, in some minutes on two free cores
    python tests/stream_matrix.py mix     # the rows of one pipeline

A run trains on a stream with random augmentation and notes, after every step, the ids of the batch's samples in order
and a SHA-256 of loss, parameters and optimizer state. All other runs must equal the one on one rank that never stops:
those that resume from a checkpoint of any batch, on any number of ranks, and those whose processes are killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import torch

from spmd import Loader, Mesh, Stream, data_parallel, fetch, optimizer, restore, save, spmd, value_and_grad

BATCH = SHARDS = 8
PAST = 2  # steps of the second epoch, so that the end of the first lies within every run
RANKS = (1, 2, 3, 4)
CHAIN = (2, 3, 1, 4)
OPT = optimizer(torch.optim.AdamW, lr=0.1, shard="data")
START = {"w": torch.linspace(-1.0, 1.0, 100), "b": torch.tensor(0.5)}


def numbers(shard: int) -> Iterator[int]:
    """Shards of 6 to 10 records each, whose ids are their places."""
    yield from range(100 * shard, 100 * shard + 6 + shard % 5)


def augmented(ids: Any) -> dict[str, torch.Tensor]:
    """A sample: its id (or those that were packed into it), and noise that augmentation has drawn for it."""
    ids = torch.as_tensor(ids)
    return {"id": ids, "x": torch.rand(100) + ids.double().mean().float() / 1000}


def tokens(number: int) -> list[int]:
    return [number] * (1 + number % 4)


def pipelines(folder: Path) -> dict[str, Stream]:
    base, other = Stream(range(9), numbers), Stream(range(50, 56), numbers)
    paths = [folder / f"{part}.jsonl" for part in range(9)]
    if not folder.exists():
        folder.mkdir(parents=True)
        for part, path in enumerate(paths):
            path.write_text("".join(f'{{"id": {x}}}\n' for x in numbers(part)))
    mixed = Stream.mix([base.filter(lambda x: x % 5).shuffle(3), other], [3, 1])
    return {
        "shuffle": base.shuffle(5).map(augmented),
        "filter": base.filter(lambda x: x % 3).shuffle(4).map(augmented),
        "mix": Stream.mix([base.shuffle(3), other], [3, 1]).shuffle(2).map(augmented),
        "pack": base.shuffle(4).map(tokens).pack(3).map(augmented),
        "all of them": mixed.map(tokens).pack(3).shuffle(4).map(augmented),
        "files": Stream.jsonl(paths).shuffle(4).map(lambda row: augmented(row["id"])),
    }


class Run:
    """Training on a mesh, from the beginning or from a checkpoint, until some steps past the first epoch."""

    def __init__(self, mesh: Mesh, stream: Stream, workers: int = 0):
        self._mesh, self._stream, self._workers = mesh, stream, workers

        @spmd(mesh=mesh)
        @data_parallel(shards=SHARDS)
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = value_and_grad(loss_fn)(params, batch)
            return *OPT.step(params, grads, opt_state), loss

        self._step = step

    def steps(self, begin: Path | None = None, saved: Path | None = None) -> Iterator[tuple[int, Any, str]]:
        """For each step, its number, the ids of its batch, and the hash after it.

        Args:
            begin: a checkpoint to go on from.
            saved: where a checkpoint is written after each step, once the step was yielded.
        """
        loader = Loader(self._stream, BATCH, mesh=self._mesh, seed=3, shards=SHARDS, workers=self._workers)
        state: dict[str, Any] = {"params": START, "opt": OPT.init(START), "loader": loader, "done": 0}
        if begin is not None:
            state = restore(begin, like=state, mesh=self._mesh)
        while (position := loader.state_dict())["epoch"] == 0 or position["step"] < PAST:
            for batch in loader:
                params, opt_state, loss = self._step(state["params"], state["opt"], batch)
                state = {"params": params, "opt": opt_state, "loader": loader, "done": state["done"] + 1}
                yield state["done"], batch["id"].full().tolist(), digest(fetch([loss, params, opt_state]))
                if saved is not None:
                    save(saved, state, step=state["done"])
                position = loader.state_dict()
                if position["epoch"] and position["step"] >= PAST:
                    break


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    noise = torch.rand(batch["x"].shape)  # drawn in the step, as dropout is
    return ((batch["x"] + 0.1 * noise) * params["w"] + params["b"]).sin().square().mean()


def digest(tree: Any) -> str:
    """A hash of all numbers in a tree, without the padding of a sharded optimizer's state."""
    found = hashlib.sha256()
    for leaf in optree.tree_leaves(tree, none_is_leaf=True, namespace="spmd"):
        flat = torch.as_tensor(leaf).reshape(-1)
        found.update(flat[: len(START["w"])].numpy().tobytes())
    return found.hexdigest()


def resumed(name: str, stream: Stream, meshes: dict[int, Mesh], folder: Path, every: int = 1) -> Resumed:
    """Stop after each batch on each mesh and resume on each; which of these runs equal the undisturbed one.

    Args:
        every: only one batch of so many.
    """
    expected = list(Run(meshes[min(meshes)], stream).steps())
    found = Resumed(name, len(expected))
    runs = {ranks: Run(mesh, stream) for ranks, mesh in meshes.items()}
    for before, run in runs.items():
        saved = folder / f"{name}-{before}"
        assert list(run.steps(saved=saved)) == expected, f"{name} differs on {before} ranks"
        for after, other in runs.items():
            for stop in range(1, len(expected), every):
                rest = list(other.steps(begin=saved / f"step-{stop:08}"))
                found.tried += 1
                found.same_ids += [ids for _, ids, _ in rest] == [ids for _, ids, _ in expected[stop:]]
                found.same_hashes += rest == expected[stop:]
                if rest != expected[stop:]:
                    found.wrong.append((before, after, stop))
    return found


@dataclasses.dataclass
class Resumed:
    """The outcome of resuming one pipeline."""

    name: str
    steps: int
    tried: int = 0
    same_ids: int = 0
    same_hashes: int = 0
    wrong: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def row(self) -> str:
        return f"| {self.name} | {self.steps} | {self.tried} | {self.same_ids} | {self.same_hashes} |"


def killed(name: str, folder: Path, chain: tuple[int, ...]) -> dict[int, set]:
    """One run in several processes, all but the last of which are killed (SIGKILL): what was printed for each step."""
    found: dict[int, set] = {}
    for turn, ranks in enumerate(chain, 1):
        command = [sys.executable, __file__, "--train", name, "--ranks", str(ranks), "--folder", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for count, line in enumerate(process.stdout, 1):
                number, ids, said = json.loads(line)
                found.setdefault(number, set()).add((json.dumps(ids), said))
                if count == 2 + turn and turn < len(chain):
                    time.sleep(0.005 * turn)  # into the step, or the writing of a checkpoint
                    process.send_signal(signal.SIGKILL)
        if turn == len(chain) and process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
    return found


def train(name: str, ranks: int, folder: Path) -> None:
    """A process of `killed`: continue from the last checkpoint, if there is one, with a worker for each rank."""
    saved = folder / f"run of {name}"
    with Mesh({"data": ranks}) as mesh:
        begin = saved if any(saved.glob("step-*")) else None
        for number, ids, said in Run(mesh, pipelines(folder / "files")[name], workers=1).steps(begin, saved):
            print(json.dumps([number, ids, said]), flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="pipelines; none is all")
    options.add_argument("--train", help=argparse.SUPPRESS)
    options.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.train is not None:
        train(given.train, given.ranks, given.folder)
        return 0
    with tempfile.TemporaryDirectory() as made:
        return tables(Path(made), given.names)


def tables(folder: Path, names: list[str]) -> int:
    wrong, streams = 0, pipelines(folder / "files")
    streams = {name: stream for name, stream in streams.items() if not names or name in names}
    meshes = {ranks: Mesh({"data": ranks}) for ranks in RANKS}
    print(f"Stopped after each batch on each of {', '.join(map(str, RANKS))} ranks, resumed on each:\n")
    print("| pipeline | batches | resumed runs | with the same ids | with the same hashes |\n|---|---|---|---|---|")
    for name, stream in streams.items():
        found = resumed(name, stream, meshes, folder)
        wrong += len(found.wrong)
        print(found.row(), *found.wrong, flush=True)
    print("\nDriver killed (SIGKILL) and started again on another number of ranks, with a worker beside each rank:\n")
    print("| pipeline | numbers of ranks | batches | same as the undisturbed run |\n|---|---|---|---|")
    for place, (name, stream) in enumerate(streams.items()):
        chain = (*CHAIN[place % 4 :], *CHAIN[: place % 4])
        expected = {number: {(json.dumps(ids), said)} for number, ids, said in Run(meshes[1], stream).steps()}
        begun = folder / "killed"
        found = killed(name, begun, chain)
        wrong += found != expected
        shown = " -> ".join(map(str, chain))
        print(f"| {name} | {shown} | {len(expected)} | {'yes' if found == expected else 'NO'} |", flush=True)
    for mesh in meshes.values():
        mesh.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
