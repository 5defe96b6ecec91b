"""Where `torch.compile` may be put, in a driver and on launched ranks, for three models: equal to eager, or refused.

`python bench/compile_matrix.py` prints the table (`make test-compile` keeps it as bench/results/compile_matrix.txt) and
fails if anything is wrong: losses and parameters after three steps are those of the same program uncompiled, or an
error says what to do instead. Beside each are the graphs that a rank compiled, and the breaks between them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd
from spmd import Mesh, P, SpmdError, data_parallel, functional, optimizer, psum, value_and_grad

STEPS, WIDTH, LENGTH, BATCH, VOCABULARY = 3, 16, 6, 8, 12
RANKS = 2
Loss = Callable[[Any, Any], Tensor]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, VOCABULARY))
    return module, {"x": torch.randn(BATCH, WIDTH), "y": torch.randint(0, VOCABULARY, (BATCH,))}


def transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return Transformer(), {"x": tokens, "y": torch.randint(0, VOCABULARY, (BATCH,))}


MODELS = {"MLP": mlp, "transformer": transformer, "tensor-parallel MLP": mlp}


def cross_entropy(apply: Callable, params: Any, batch: Any) -> Tensor:
    return F.cross_entropy(apply(params, batch["x"]), batch["y"])


def tensor_parallel(apply: Callable, params: Any, batch: Any) -> Tensor:
    """Each rank has half of the hidden features: its rows of the first weight, its columns of the second."""
    hidden = F.gelu(F.linear(batch["x"], params["0.weight"], params["0.bias"]))
    return F.cross_entropy(psum(hidden @ params["2.weight"].t(), "model") + params["2.bias"], batch["y"])


CUT = {"0.weight": P("model"), "0.bias": P("model"), "2.weight": P(None, "model"), "2.bias": P()}


def at_module_level(compiled: Loss) -> Loss:
    """As a loss that is defined in the program's module: the step refers to it by name."""
    global _loss
    _loss = compiled
    return lambda params, batch: _loss(params, batch)


def nothing(function: Any) -> Any:
    return function


# Where the compiler is put: around the module, apply, the loss, the gradient, the update, the step, or outside.
PLACES = {
    "eager": {},
    "module.compile()": {"module": lambda module, **options: (module.compile(**options), module)[1]},
    "torch.compile(apply)": {"apply": torch.compile},
    "loss": {"loss": torch.compile},
    "loss, a global": {"loss": lambda f, **options: at_module_level(torch.compile(f, **options))},
    "loss, fullgraph": {"loss": lambda f, **options: torch.compile(f, fullgraph=True, **options)},
    "value_and_grad(loss)": {"gradient": torch.compile},
    "opt.step": {"update": torch.compile},
    "the step, inside": {"step": torch.compile},
    "the @spmd step": {"outside": torch.compile},
}


def sgd(params: Any, grads: Any, state: Any) -> Any:
    return {name: value - 0.5 * grads[name] for name, value in params.items()}, state


def train(mesh: Mesh, model: str, place: str, backend: str) -> list[Tensor]:
    """Losses and parameters of a few steps."""
    put = {what: functools.partial(compiler, backend=backend) for what, compiler in PLACES[place].items()}
    module, batch = MODELS[model]()
    apply, params = functional(put.get("module", nothing)(module))
    run = put.get("apply", nothing)(apply)
    opt = optimizer(torch.optim.Adam, lr=0.05, shard=None)
    cut = model.startswith("tensor")

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (tensor_parallel if cut else cross_entropy)(run, params, batch)

    gradient = put.get("gradient", nothing)(value_and_grad(put.get("loss", nothing)(loss_fn)))
    update = put.get("update", nothing)(sgd if cut else opt.step)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = gradient(params, batch)
        params, state = update(params, grads, state)
        return params, state, loss

    body = put.get("step", nothing)(step)
    if cut:
        wrapped = spmd.spmd(body, mesh=mesh, in_specs=(CUT, None, P()), out_specs=(CUT, None, P()))
    else:
        wrapped = spmd.spmd(data_parallel(body), mesh=mesh)
    wrapped = put.get("outside", nothing)(wrapped)
    state, losses = None if cut else opt.init(params), []
    for _ in range(STEPS):
        params, state, loss = wrapped(params, state, batch)
        losses.append(loss.full())
    return [*losses, *(params[name].full() for name in sorted(params))]


def graphs() -> tuple[int, int]:
    """On a rank: how many graphs were compiled, and how many breaks there were, since the last call of this."""
    counters = torch._dynamo.utils.counters
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    counters.clear()
    torch._dynamo.reset()
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """The outcome of one way to compile one model."""

    verdict: str
    graphs: int = 0
    breaks: int = 0

    def __str__(self) -> str:
        return (
            f"{self.verdict}, {self.graphs} graphs, {self.breaks} breaks" if self.verdict == "equal" else self.verdict
        )


def cell(mesh: Mesh, model: str, place: str, backend: str, expected: list[Tensor]) -> Cell:
    mesh.run(graphs)
    try:
        found = train(mesh, model, place, backend)
    except Exception as error:
        first = str(error).splitlines()[0].partition(" [Mesh")[0]
        return Cell(f"{'refused' if isinstance(error, SpmdError) else 'ERROR ' + type(error).__name__}: {first[:100]}")
    compiled, breaks = mesh.run(graphs)[0]
    close = all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(found, expected, strict=True))
    return Cell("equal" if close else "WRONG", compiled, breaks)


def column(backend: str, places: Iterable[str], models: Iterable[str]) -> Iterator[tuple[str, str, Cell]]:
    """All cells of this way to start ranks."""
    for model in models:
        with Mesh({"model" if model.startswith("tensor") else "data": -1 if launched() else RANKS}) as mesh:
            expected = train(mesh, model, "eager", backend)
            for place in places:
                if model.startswith("tensor") and ("module" in place or "apply" in place):
                    continue  # its loss calls neither
                yield model, place, cell(mesh, model, place, backend, expected)


def launched() -> bool:
    return "--launched" in sys.argv


def main() -> int:
    warnings.simplefilter("ignore")
    backend = os.environ.get("BACKEND", "aot_eager")
    if launched():
        for found in column(backend, PLACES, MODELS):
            if os.environ["RANK"] == "0":
                print(json.dumps((*found[:2], dataclasses.asdict(found[2]))), flush=True)
        return 0
    command = [sys.executable, "-m", "spmd", "run", "-n", str(RANKS), __file__, "--launched"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    there = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            model, place, fields = json.loads(line)
            there[model, place] = Cell(**fields)
    print(
        f"torch {torch.__version__}, backend {backend}, {RANKS} ranks, {STEPS} steps; each beside its eager program\n"
    )
    failed = done.returncode
    rows = []
    for model, place, here in column(backend, PLACES, MODELS):
        other = there.get((model, place), Cell("MISSING"))
        rows.append((model, place, str(here), str(other)))
        failed += any(word in f"{here} {other}" for word in ("WRONG", "ERROR", "MISSING"))
    for row in [("model", "what is compiled", "driver", "launched"), *rows]:
        print(" | ".join(f"{one:28}" for one in row).rstrip())
    if failed:
        print(done.stderr[-3000:], file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
