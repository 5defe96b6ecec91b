"""All that is measured on a GPU, in one run of less than eight minutes.

    python bench/gpu.py [--quick] [folder]

Packing and unpacking of buckets against `torch._foreach_copy_` and against a plain copy of as many bytes; the whole
train step on one GPU against plain torch and against DDP on NCCL; and whether a step can be captured into a CUDA graph.
Writes `gpu.json` and `gpu.txt` into the folder (default: bench/results). Without a GPU it says so and exits with 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SECONDS = 450.0
MIB = 1 << 20


# -- the models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """As large as GPT-2 small: 12 layers of width 768, 50,257 tokens."""

    def __init__(self, layers: int = 12, width: int = 768, tokens: int = 50257, length: int = 512):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.last(self.blocks(self.tokens(x) + self.places(places)))).flatten(0, 1)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()

        def norm(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels, track_running_stats=False)  # a step without buffers

        outputs = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU()),
            *(nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)),
        )
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.past(x))


def cnn(blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """As large as ResNet-50: 16 bottlenecks."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not index else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def make(name: str, quick: bool = False, device: str = "cuda") -> tuple[nn.Module, Tensor, Tensor]:
    """A model with its inputs and labels."""
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer(*((2, 128, 1000, 64) if quick else ())).to(device, torch.bfloat16)
        shape, tokens = ((2, 64), 1000) if quick else ((8, 512), 50257)
        x = torch.randint(0, tokens, shape, device=device)
        return model, x, torch.randint(0, tokens, shape, device=device)
    model = cnn(*(((1, 1), 16, 10) if quick else ())).to(device)
    x = torch.randn(*((4, 3, 32, 32) if quick else (64, 3, 224, 224)), device=device)
    return model, x, torch.randint(0, 10, (len(x),), device=device)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels.flatten())


# -- measuring ---------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], times: int = 50) -> list[float]:
    """What each of several runs takes on the GPU, in the middle of others."""
    for _ in range(5):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile1": low, "quartile3": high}


def lengths_of(nbytes: int, itemsize: int) -> list[int]:
    """Leaves as a transformer has them: a few large, many small, until the bucket is full."""
    left, lengths = nbytes // itemsize, []
    while left > 0:
        for length in (768 * 768, 768, 768 * 192, 1001, 2304):
            lengths.append(min(length, left))
            left -= lengths[-1]
            if not left:
                break
    return lengths


def packing() -> list[dict[str, Any]]:
    from spmd.kernels.cuda_pack import Table

    rows = []
    for wire in (torch.float32, torch.bfloat16):
        for mib in (1, 4, 25, 100):
            lengths = lengths_of(mib * MIB, 4)
            starts, at = [], 0
            for length in lengths:
                starts.append(at)
                at += -(-length // 256) * 256
            leaves = [torch.randn(length, device="cuda") for length in lengths]
            bucket = torch.empty(at, dtype=wire, device="cuda")
            views = [bucket[start : start + length] for start, length in zip(starts, lengths, strict=True)]
            table = Table(starts, lengths, torch.float32, wire)
            moved = sum(lengths) * (4 + wire.itemsize)  # read and written
            source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            runs: dict[str, Callable[[], Any]] = {
                "pack": lambda t=table, v=leaves, b=bucket: t.pack(v, b),
                "unpack": lambda t=table, v=leaves, b=bucket: t.unpack(b, v),
                "foreach in": lambda v=leaves, w=views: torch._foreach_copy_(w, v),
                "foreach out": lambda v=leaves, w=views: torch._foreach_copy_(v, w),
                "copy": lambda s=source, t=target: t.copy_(s),
            }
            found = {name: spread(seconds(run)) for name, run in runs.items()}
            share = {name: found["copy"]["median"] / found[name]["median"] for name in runs}
            rows.append(
                {
                    "wire": str(wire).removeprefix("torch."),
                    "MiB": mib,
                    "leaves": len(lengths),
                    "bytes moved": moved,
                    "seconds": found,
                    "share of the copy ceiling": share,
                }
            )
    return rows


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()
        optimizer.step()

    return run


def ddp_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    return plain_step(DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True), x, y)


def our_step(mesh: Any, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    from spmd import data_parallel, functional, optimizer, put, spmd, value_and_grad
    from spmd.mesh.spec import P

    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-4)

    @spmd(mesh=mesh, donate=("params", "state"))
    @data_parallel
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda params, batch: loss_of(apply(params, batch["x"]), batch["y"]))(
            params, batch
        )
        params, state = opt.step(params, grads, state)
        return params, state, loss

    carry = [put(params, mesh=mesh), opt.init(params)]
    batch = put({"x": x, "y": y}, P("data"), mesh=mesh)

    def run() -> None:
        carry[0], carry[1], _ = step(carry[0], carry[1], batch)

    return run


def steps(mesh: Any, end: float, quick: bool) -> dict[str, Any]:
    """Every contender in turn, round after round; one that fails says why."""
    found: dict[str, Any] = {}
    for name in ("transformer", "cnn"):
        makers: dict[str, Callable[..., Callable[[], None]]] = {
            "plain torch": plain_step,
            "DDP on NCCL": ddp_step,
            "spmd": lambda *model: our_step(mesh, *model),
        }
        runs = {contender: maker(*make(name, quick)) for contender, maker in makers.items()}
        times: dict[str, list[float]] = {contender: [] for contender in runs}
        for _ in range(2 if quick else 8):
            if time.monotonic() > end:
                break
            for contender, run in runs.items():
                times[contender] += seconds(run, 3 if quick else 6)
        found[name] = {contender: spread(values) for contender, values in times.items() if values}
        if found[name]:
            ours = found[name]["spmd"]["median"]
            found[name]["spmd over plain torch"] = ours / found[name]["plain torch"]["median"]
            found[name]["spmd over DDP"] = ours / found[name]["DDP on NCCL"]["median"]
        del runs
        torch.cuda.empty_cache()
    return found


def capture(quick: bool) -> str:
    """Whether gradients and the optimizer's step, pure as they are, can be captured into a graph and replayed."""
    from spmd import functional, optimizer, value_and_grad

    model, x, y = make("transformer", quick)
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-4, capturable=True)

    def step(params: Any, state: Any) -> Any:
        loss, grads = value_and_grad(lambda params: loss_of(apply(params, x), y))(params)
        return (*opt.step(params, grads, state), loss)

    try:
        state = opt.init(params)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                params, state, _ = step(params, state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may go on asking CUDA things meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            *_, loss = step(params, state)
        graph.replay()
        torch.cuda.synchronize()
        expected = float(step(params, state)[2])
        return "works" if abs(float(loss) - expected) < 1e-2 * abs(expected) else f"wrong loss: {loss}, not {expected}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error).splitlines()[0]}"


def environment() -> dict[str, Any]:
    from spmd.kernels.nccl_library import load, version_text

    library = load()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": driver,
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "CuPy": library.cupy,
        "NCCL": version_text(library.version),
        "libnccl": library.path,
    }


def text_of(found: dict[str, Any]) -> str:
    lines = [f"{name}: {value}" for name, value in found["environment"].items()]
    lines += ["", "packing: share of the bandwidth of a plain copy (median); pack, unpack, _foreach_copy_ in and out"]
    for row in found["packing"]:
        share = row["share of the copy ceiling"]
        names = ("pack", "unpack", "foreach in", "foreach out")
        shares = "  ".join(f"{share[name]:6.1%}" for name in names)
        lines.append(f"  {row['wire']:>8} {row['MiB']:4} MiB, {row['leaves']:4} leaves: {shares}")
    lines += ["", "train step, milliseconds: median (quartiles)"]
    for model, contenders in found["steps"].items():
        for name, its in contenders.items():
            if isinstance(its, dict):
                low, middle, high = (1e3 * its[key] for key in ("quartile1", "median", "quartile3"))
                lines.append(f"  {model:12} {name:12} {middle:8.2f} ({low:.2f} to {high:.2f})")
            else:
                lines.append(f"  {model:12} {name}: {its:.3f}")
    lines += ["", f"capture into a CUDA graph: {found['capture']}", f"the whole run: {found['seconds']:.0f} s"]
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "results")
    arguments.add_argument("--quick", action="store_true", help="small models and few rounds, to see that it runs")
    given = arguments.parse_args()
    from spmd import Mesh, MeshError, initialize
    from spmd.kernels.nccl_library import check_driver

    try:
        check_driver()
        found: dict[str, Any] = {"environment": environment()}
    except MeshError as error:
        print(f"bench/gpu.py measures on a GPU, and there is none that it can use.\n{error}", file=sys.stderr)
        return 1
    start = time.monotonic()
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        import torch.distributed as dist

        dist.init_process_group("nccl", init_method=f"file://{folder}/ddp", rank=0, world_size=1)
        initialize(0, 1, init_method=f"file://{folder}/ours")
        mesh = Mesh({"data": 1}, device="cuda")
        found["packing"] = packing()
        found["capture"] = capture(given.quick)
        found["steps"] = steps(mesh, start + SECONDS, given.quick)
        mesh.close()
        dist.destroy_process_group()
    found["seconds"] = time.monotonic() - start
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    text = text_of(found)
    (given.folder / "gpu.txt").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
