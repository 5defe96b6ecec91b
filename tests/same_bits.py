"""Training runs whose bits must not depend on the number of ranks: for `test_same_bits` and the table.

`python tests/same_bits.py` prints the rows of docs/same_bits.md: the whole matrix, 200 steps a run. Arguments choose
from it: `cnn`, `cnn:8`, `cnn:8:0` are a model, that with V = 8, and that in the first mode. `resume` prints the rows of
runs that were stopped and resumed.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytrees
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd import Loader, Mesh, data_parallel, functional_with_buffers, optimizer, restore, save, spmd, value_and_grad

LENGTH, BATCH = 88, 20  # four whole steps and one of eight samples in every epoch


class Transformer(nn.Module):
    """One layer with dropout over sequences of twelve, and a head on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 4)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (20,)),
    "cnn": (cnn, (3, 8, 8)),
    "transformer": (Transformer, (12, 16)),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


def data(model: str, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, *MODELS[model][1], generator=generator)
    return {"x": x.to(dtype), "y": torch.randint(0, 4, (LENGTH,), generator=generator)}


def clipped(grads: Any, most: float) -> Any:
    """Gradients with a global norm of at most `most`."""
    norm = torch.stack([leaf.float().norm() for leaf in pytrees.leaves(grads)]).norm()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return pytrees.map(lambda leaf: leaf * factor.to(leaf.dtype), grads)


def digest(*values: Any) -> str:
    """SHA-256 of the bytes of all leaves, with their paths."""
    state = hashlib.sha256()
    for path, leaf in zip(pytrees.paths(values), pytrees.leaves(values), strict=True):
        leaf = leaf.full() if hasattr(leaf, "full") else leaf
        state.update(path.encode())
        if isinstance(leaf, Tensor):
            state.update(leaf.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            state.update(repr(leaf).encode())
    return state.hexdigest()


def unpadded(state: Any, numel: int) -> Any:
    """Optimizer state without the padding of sharded slices, which depends on the number of ranks."""

    def cut(leaf: Any) -> Any:
        whole = leaf.full() if hasattr(leaf, "full") else leaf
        flat = isinstance(whole, Tensor) and whole.dim() == 1 and whole.numel() >= numel
        return whole[:numel] if flat else whole

    return pytrees.map(cut, state)


def digests(numel: int, after: list[tuple[Any, ...]]) -> list[str]:
    """On a rank: the digests of what each step returned."""
    return [digest(params, buffers, unpadded(state, numel), *metrics) for params, buffers, state, *metrics in after]


class Run:
    """A training run, to be stepped."""

    def __init__(
        self,
        mesh: Mesh,
        model: str,
        shards: int,
        *,
        opt: str = "adamw",
        dtype: str = "float32",
        shard: bool = False,
        donate: bool = False,
        check: str = "first",
        **hyper: Any,
    ):
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        apply, params, buffers = functional_with_buffers(MODELS[model][0]().to(kind))
        cls, usual = OPTIMIZERS[opt]
        opt_ = optimizer(cls, shard="data" if shard else None, **usual, **hyper)
        self.donate = donate
        # Sharded leaves begin at multiples of 64.
        self.mesh, self.numel = mesh, sum(-(-leaf.numel() // 64) * 64 for leaf in pytrees.leaves(params))
        self.loader = Loader(data(model, kind), BATCH, seed=3, mesh=mesh, shards=shards)

        def loss_of(params: Any, buffers: Any, batch: Any) -> Any:
            logits, new = apply(params, buffers, batch["x"])
            right = (logits.argmax(1) == batch["y"]).float().mean()
            return F.cross_entropy(logits.float(), batch["y"]), (new, right)

        @spmd(mesh=mesh, donate=("params", "buffers", "state") if donate else (), check=check)
        @data_parallel(shards=shards)
        def step(params: Any, buffers: Any, state: Any, batch: Any) -> Any:
            (loss, (buffers, right)), grads = value_and_grad(loss_of, has_aux=True)(params, buffers, batch)
            params, state = opt_.step(params, clipped(grads, 1.0), state)
            return params, buffers, state, loss, right

        self.step = step
        self.state: tuple[Any, ...] = (params, buffers, opt_.init(params))

    def batches(self, steps: int) -> Iterator[Any]:
        done = 0
        while done < steps:
            for batch in self.loader:
                yield batch
                done += 1
                if done == steps:
                    return

    def run(self, steps: int, save_to: Path | None = None) -> list[str]:
        """The digest after every step; also writes a checkpoint after every step, if `save_to` is given."""
        after: list[tuple[Any, ...]] = []
        found: list[str] = []
        for batch in self.batches(steps):
            *state, loss, right = self.step(*self.state, batch)
            self.state = tuple(state)
            after.append((*self.state, loss, right))
            if save_to is not None:
                self.save(save_to)
            if self.donate:  # the next step takes the memory
                found += self.mesh.run(digests, self.numel, after)[0]
                after.clear()
        return found + self.mesh.run(digests, self.numel, after)[0]

    def save(self, path: str | Path) -> None:
        save(path, (*self.state, self.loader))

    def restore(self, path: str | Path) -> None:
        *state, _ = restore(path, like=(*self.state, self.loader), mesh=self.mesh)
        self.state = tuple(state)


# name -> options of a Run
MODES: dict[str, dict[str, Any]] = {
    "AdamW, float32": {},
    "AdamW, float32, sharded": {"shard": True},
    "SGD, float32": {"opt": "sgd"},
    "SGD, float32, sharded": {"opt": "sgd", "shard": True},
    "AdamW, bfloat16": {"dtype": "bfloat16"},
    "SGD, bfloat16, sharded": {"opt": "sgd", "dtype": "bfloat16", "shard": True},
}
RANKS, SHARDS, STEPS = (1, 2, 3, 4, 8), (4, 8, 12), 200


def chained(digests: list[str]) -> str:
    """One digest of those after every step."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def row(model: str, shards: int, mode: str) -> str:
    """A row of the table: the digest, and the numbers of ranks that gave it."""
    found = {}
    for ranks in RANKS:
        with Mesh({"data": ranks}) as mesh:
            found[ranks] = chained(Run(mesh, model, shards, **MODES[mode]).run(STEPS))
    agreed = [str(ranks) for ranks in RANKS if found[ranks] == found[1]]
    others = "".join(f", but {ranks}: `{found[ranks][:16]}`" for ranks in RANKS if found[ranks] != found[1])
    return f"| {model} | {shards} | {mode} | `{found[1][:32]}` | {' '.join(agreed)}{others} |"


RESUMED = ("cnn", 8, "AdamW, float32, sharded")  # running statistics, dropout, and slices cut by the number of ranks
STOPS = 10  # two epochs


def taken_up(mesh: Mesh, paths: dict[int, Path], stops: list[int], whole: list[str]) -> dict[tuple[int, int], bool]:
    """(steps before the stop, ranks before it) -> whether the run, resumed on this mesh, had the bits of `whole`."""
    found = {}
    for ranks, path in paths.items():
        run = Run(mesh, RESUMED[0], RESUMED[1], **MODES[RESUMED[2]])
        for stop in stops:
            run.restore(path / f"step-{stop - 1:08d}")
            found[stop, ranks] = run.run(len(whole) - stop) == whole[stop:]
    return found


def resume_matrix() -> Iterator[str]:
    """The rows of the table: stopped after so many steps, on so many ranks, and the numbers of ranks that agreed."""
    stops = list(range(1, STOPS + 1))
    with tempfile.TemporaryDirectory(prefix="spmd-resume-") as folder:
        paths = {ranks: Path(folder) / str(ranks) for ranks in RANKS}
        runs = {}
        for ranks, path in paths.items():
            with Mesh({"data": ranks}) as mesh:
                runs[ranks] = Run(mesh, RESUMED[0], RESUMED[1], **MODES[RESUMED[2]]).run(STOPS + 2, path)
        agreed: dict[tuple[int, int], list[int]] = {(stop, ranks): [] for stop in stops for ranks in RANKS}
        for after in RANKS:
            with Mesh({"data": after}) as mesh:
                for stopped, same in taken_up(mesh, paths, stops, runs[1]).items():
                    agreed[stopped] += [after] if same else []
        for stop in stops:
            cells = (" ".join(map(str, agreed[stop, ranks])) or "none" for ranks in RANKS)
            yield f"| {stop} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if sys.argv[1:] == ["resume"]:
        for line in resume_matrix():
            print(line, flush=True)
        sys.exit()
    for name in sys.argv[1:] or list(MODELS):
        model, shards, mode = (name + "::").split(":")[:3]
        for count in [int(shards)] if shards else SHARDS:
            for each in [list(MODES)[int(mode)]] if mode else MODES:
                print(row(model, count, each), flush=True)
