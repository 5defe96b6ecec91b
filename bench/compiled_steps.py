"""A training step whose loss is compiled by `torch.compile`, beside the same step in eager, in turn, on the same ranks.

`python bench/compiled_steps.py | tee bench/results/compiled_steps.txt`: milliseconds a step, median and quartiles of
rounds, and how many times as fast the compiled one is. The GPT has many small operations, the others few large ones.
Beside it is the speed-up that torch's compiler gives the loss by itself: forward and backward over half of the batch,
in this process, with one thread.
"""

from __future__ import annotations

import dataclasses
import functools
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import encoder, mlp_1k, mlp_4k
from torch import Tensor, nn

from spmd import Mesh, P, data_parallel, functional, optimizer, psum, put, spmd, value_and_grad

ROUNDS, STEPS, WARM = 9, 6, 4
VOCABULARY, WIDTH, HEADS, LENGTH = 64, 64, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """Eight layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(8)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.place)).flatten(0, 1)


def gpt(sequences: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (sequences, LENGTH + 1))
    return GPT(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclasses.dataclass(slots=True)
class Contender:
    """A step, and the values that it starts from."""

    step: Callable[..., Any]
    params: Any
    state: Any
    batch: Any

    def run(self, steps: int) -> float:
        """Seconds a step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.params, self.state, loss = self.step(self.params, self.state, self.batch)
        float(loss)
        return (time.perf_counter() - begin) / steps


def contender(mesh: Mesh, *, model: Callable[[], Any], compiled: bool) -> Contender:
    module, x, y = model()
    apply, params = functional(module)
    opt = optimizer(torch.optim.AdamW, lr=1e-3)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, batch["x"]), batch["y"].flatten())

    loss = torch.compile(loss_fn) if compiled else loss_fn

    @spmd(mesh=mesh, donate=("params", "opt_state"))
    @data_parallel
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        params, opt_state = opt.step(params, grads, opt_state)
        return params, opt_state, value

    batch = put({"x": x, "y": y}, P("data"), mesh=mesh)
    return Contender(step, put(params, mesh=mesh), opt.init(params), batch)


def alone(model: Callable[[], Any]) -> float:
    """How many times as fast the compiled loss is without a mesh."""
    module, x, y = model()
    x, y = x[: len(x) // 2], y[: len(y) // 2].flatten()
    params = dict(module.named_parameters())

    def loss_fn(params: Any) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(module, params, (x,)), y)

    losses = {"eager": loss_fn, "compiled": torch.compile(loss_fn)}
    times: dict[str, list[float]] = {kind: [] for kind in losses}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for turn in range(WARM + ROUNDS):
        for kind, loss in losses.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                torch.autograd.grad(loss(params), [*params.values()])
            if turn >= WARM:
                times[kind].append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return statistics.median(times["eager"]) / statistics.median(times["compiled"])


def tensor_parallel(mesh: Mesh, *, compiled: bool) -> Contender:
    """Eight layers of two small products and a psum, each rank with half of the features."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x = batch["x"]
        for up, down in zip(params["up"], params["down"], strict=True):
            x = x + psum(F.gelu(F.layer_norm(x, (WIDTH,)) @ up) @ down, "data")
        return (x - batch["y"]).square().mean()

    loss = torch.compile(loss_fn, fullgraph=True) if compiled else loss_fn
    cut = {"up": P(None, "data"), "down": P("data")}

    @spmd(mesh=mesh, in_specs=(cut, None, P()), out_specs=(cut, None, P()))
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        new = {name: [p - 1e-3 * g for p, g in zip(params[name], grads[name], strict=True)] for name in ("up", "down")}
        return new, opt_state, value

    torch.manual_seed(0)
    params = {
        "up": [torch.randn(WIDTH, 4 * WIDTH) / 16 for _ in range(8)],
        "down": [torch.randn(4 * WIDTH, WIDTH) / 16 for _ in range(8)],
    }
    return Contender(step, params, None, put({"x": torch.randn(256, WIDTH), "y": torch.randn(256, WIDTH)}, mesh=mesh))


MODELS: dict[str, Callable[[], Any]] = {
    "GPT, 8 layers, d=64, batch of 2": lambda: gpt(2),
    "GPT, 8 layers, d=64, batch of 16": lambda: gpt(16),
    "mlp_1k": mlp_1k,
    "mlp_4k": mlp_4k,
    "encoder": encoder,
}
TENSOR_PARALLEL = "tensor-parallel, 8 layers, d=64"


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, torch {torch.__version__}, 2 ranks, {ROUNDS} rounds of {STEPS} steps in turn")
    for name in sys.argv[1:] or [*MODELS, TENSOR_PARALLEL]:
        model = MODELS.get(name)
        with Mesh({"data": 2}) as mesh:
            make = tensor_parallel if model is None else functools.partial(contender, model=model)
            sides = {kind: make(mesh, compiled=kind == "compiled") for kind in ("eager", "compiled")}
            for side in sides.values():
                side.run(WARM)
            times: dict[str, list[float]] = {kind: [] for kind in sides}
            for _ in range(ROUNDS):
                for kind, side in sides.items():
                    times[kind].append(1e3 * side.run(STEPS))
        shown = []
        for kind, found in times.items():
            low, middle, high = statistics.quantiles(found, n=4)
            shown.append(f"{kind} {middle:8.2f} ms ({low:.2f} to {high:.2f})")
        gain = statistics.median(times["eager"]) / statistics.median(times["compiled"])
        torchs = "" if model is None else f", torch alone {alone(model):.2f}"
        print(f"{name:32} {', '.join(shown)}: {gain:.2f} times as fast{torchs}", flush=True)


if __name__ == "__main__":
    main()
