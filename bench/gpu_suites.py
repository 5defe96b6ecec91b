"""What is measured on a GPU, suite by suite; each yields results as it gets them, so that a later failure loses none.

A suite is a generator of (name, result); a repeated name replaces the earlier result. If a contender raises, its result
is the error, and the others go on.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_models import loss_of, make
from gpu_targets import BUCKET_MIB, STEPS, WIRES, case_name
from gpu_times import Run, failure, on_gpu, spread, wall
from torch import Tensor, nn

MIB = 1 << 20
Results = Iterator[tuple[str, Any]]


def environment(end: float, quick: bool) -> Results:
    """The machine; says what is missing where there is no GPU that can be used."""
    from spmd.kernels.cuda.nccl_library import check_driver, load, version_text
    from spmd.kernels.errors import MeshError

    try:
        check_driver()
        library = load()
    except MeshError as error:
        yield "missing", str(error)
        return
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    yield "device", torch.cuda.get_device_name(0)
    yield "driver", driver
    yield "torch", torch.__version__
    yield "torch's CUDA", torch.version.cuda
    yield "CuPy", library.cupy
    yield "NCCL", version_text(library.version)
    yield "libnccl", library.path


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


def packing(end: float, quick: bool) -> Results:
    """Pack and unpack, `torch._foreach_copy_`, and a plain copy of as many bytes."""
    for name, mib in itertools.product(WIRES, BUCKET_MIB[:1] if quick else BUCKET_MIB):
        wire, case = getattr(torch, name), case_name(name, mib)
        lengths = lengths_of(mib * MIB, 4)
        row: dict[str, Any] = {
            "wire": name,
            "MiB": mib,
            "leaves": len(lengths),
            "bytes moved": sum(lengths) * (4 + wire.itemsize),  # read and written
        }
        try:
            runs = packers(lengths, wire, row["bytes moved"])
        except Exception as error:
            yield case, {**row, **failure(error)}
            continue
        found = row["seconds"] = {}
        for contender, run in runs.items():
            if time.monotonic() > end:
                return
            found[contender] = measured(run, len(lengths) if contender.startswith("foreach") else 1)
            yield case, with_shares(row)


def packers(lengths: list[int], wire: torch.dtype, moved: int) -> dict[str, Run]:
    from spmd.kernels.cuda.pack import Table

    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += -(-length // 256) * 256
    leaves = [torch.randn(length, device="cuda") for length in lengths]
    bucket = torch.empty(at, dtype=wire, device="cuda")
    views = [bucket[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    table = Table(starts, lengths, torch.float32, wire)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {
        "copy": lambda: target.copy_(source),
        "pack": lambda: table.pack(leaves, bucket),
        "unpack": lambda: table.unpack(bucket, leaves),
        "foreach in": lambda: torch._foreach_copy_(views, leaves),
        "foreach out": lambda: torch._foreach_copy_(leaves, views),
    }


def measured(run: Run, launches: int) -> dict[str, Any]:
    """Times on the GPU alone, and on the clock with the host's share; or the error."""
    try:
        return {**spread(on_gpu(run, launches)), "wall": statistics.median(wall(run, 5, 20))}
    except Exception as error:
        return failure(error)


def with_shares(row: dict[str, Any]) -> dict[str, Any]:
    """A row with every contender's share of the bandwidth of the plain copy, where both have been measured."""
    ceiling = row["seconds"].get("copy", {}).get("median")
    share = {name: ceiling / its["median"] for name, its in row["seconds"].items() if ceiling and "median" in its}
    return {**row, "share of the copy ceiling": share}


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()
        optimizer.step()

    return run


def ddp_step(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    folder = tempfile.mkdtemp()
    dist.init_process_group("nccl", init_method=f"file://{folder}/ddp", rank=0, world_size=1)
    return plain_step(DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True), x, y)


def our_step(mesh: Any, model: nn.Module, x: Tensor, y: Tensor) -> Run:
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


def our_launched_step(model: nn.Module, x: Tensor, y: Tensor) -> Run:
    """As the one rank of a launched program, in this process as the others are."""
    from spmd import Mesh, initialize

    initialize(0, 1, init_method=f"file://{tempfile.mkdtemp()}/ours")
    return our_step(Mesh({"data": 1}, device="cuda"), model, x, y)


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Run]] = {
    "plain torch": plain_step,
    "DDP on NCCL": ddp_step,
    "spmd": our_launched_step,
}


def steps(name: str, end: float, quick: bool, device: str = "cuda") -> Results:
    """The whole train step of every contender in turn, round after round."""
    runs: dict[str, Run] = {}
    times: dict[str, list[float]] = {}
    for contender, maker in CONTENDERS.items():
        try:
            run = maker(*make(name, quick, device))
            wall(run, 1)
            runs[contender], times[contender] = run, []
        except Exception as error:
            yield contender, failure(error)
    for number in range(2 if quick else 20):
        yield "rounds", number
        for contender, run in tuple(runs.items()):
            if time.monotonic() > end:
                return
            try:
                times[contender] += wall(run, 2)
            except Exception as error:
                del runs[contender], times[contender]
                yield contender, failure(error)
                continue
            yield contender, spread(times[contender])
        for peer in ("plain torch", "DDP on NCCL"):
            if peer in times and "spmd" in times:
                ratio = statistics.median(times["spmd"]) / statistics.median(times[peer])
                yield f"spmd over {peer}", ratio


def transformer(end: float, quick: bool) -> Results:
    return steps("transformer", end, quick)


def cnn(end: float, quick: bool) -> Results:
    return steps("cnn", end, quick)


def memory(end: float, quick: bool) -> Results:
    """Whether memory stays flat over many steps of the transformer."""
    run = our_launched_step(*make("transformer", quick))
    return sampled(run, in_use, end, STEPS // 10 if quick else STEPS)


def in_use() -> dict[str, int]:
    """Bytes that torch has allocated, and bytes of the device that are free."""
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "free": torch.cuda.mem_get_info()[0]}


def sampled(run: Run, look: Callable[[], dict[str, int]], end: float, steps: int) -> Results:
    """What `look` sees after every tenth of the steps, the first of which warms up."""
    samples: list[dict[str, int]] = []
    for step in range(1, steps + 1):
        run()
        if step % (steps // 10) == 0:
            samples.append({"step": step, **look()})
            yield "samples", samples
        if time.monotonic() > end:
            return


def capture(end: float, quick: bool) -> Results:
    """Whether gradients and the optimizer's step, pure as they are, can be captured into a graph and replayed."""
    try:
        yield "result", captured(quick)
    except Exception as error:
        yield "result", f"fails: {failure(error)['error']}"


def captured(quick: bool) -> str:
    from spmd import functional, optimizer, value_and_grad

    model, x, y = make("transformer", quick)
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-4, capturable=True)

    def step(params: Any, state: Any) -> Any:
        loss, grads = value_and_grad(lambda params: loss_of(apply(params, x), y))(params)
        return (*opt.step(params, grads, state), loss)

    state = opt.init(params)
    torch.cuda.synchronize()  # the other stream's inputs are ready
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
    right = abs(float(loss) - expected) < 1e-2 * abs(expected)
    return "works" if right else f"wrong loss: {float(loss)}, not {expected}"
