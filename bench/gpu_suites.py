"""What is measured on a GPU, suite by suite; each yields results as it has them, so that a later failure costs nothing.

A suite is a generator of (name, result); a name that comes again replaces what it had. A contender that raises has the
error for its result, and the others go on. Invariant: every time is of finished work, never of launching it.
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
from torch import Tensor, nn

MIB = 1 << 20
Results = Iterator[tuple[str, Any]]
Run = Callable[[], Any]

# -- measuring ---------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile1": low, "quartile3": high}


def failure(error: Exception) -> dict[str, str]:
    """An error as the result of the contender that raised it."""
    return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def on_gpu(run: Run, samples: int = 15, repeats: int = 20) -> list[float]:
    """Seconds that the GPU needs for one run, several times over, without those that the host needs to launch it.

    The launches of a sample are queued behind a kernel that only waits, and run back to back between two events.
    """
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(repeats):
        run()
    to_launch = time.perf_counter() - before
    found = []
    for _ in range(samples):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2e9 * (2 * to_launch + 1e-3)))  # cycles, of which no GPU has more than 2e9 a second
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / repeats)
    return found


def wall(run: Run, samples: int, repeats: int = 3) -> list[float]:
    """Seconds on the clock for one run, several times over; each sample ends when the GPU has finished."""
    found = []
    for _ in range(samples):
        _finish()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _finish()
        found.append((time.perf_counter() - start) / repeats)
    return found


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- the suites --------------------------------------------------------------------------------------------------------


def environment(end: float, quick: bool) -> Results:
    """The machine; says what is missing where there is no GPU that can be used."""
    from spmd.kernels.errors import MeshError
    from spmd.kernels.nccl_library import check_driver, load, version_text

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
    for wire, mib in itertools.product((torch.float32, torch.bfloat16), (1,) if quick else (1, 4, 25, 100)):
        lengths = lengths_of(mib * MIB, 4)
        row: dict[str, Any] = {
            "wire": str(wire).removeprefix("torch."),
            "MiB": mib,
            "leaves": len(lengths),
            "bytes moved": sum(lengths) * (4 + wire.itemsize),  # read and written
        }
        try:
            runs = packers(lengths, wire, row["bytes moved"])
        except Exception as error:
            yield f"{row['wire']} {mib} MiB", {**row, **failure(error)}
            continue
        found = row["seconds"] = {}
        for name, run in runs.items():
            if time.monotonic() > end:
                return
            found[name] = measured(run)
            yield f"{row['wire']} {mib} MiB", with_shares(row)


def packers(lengths: list[int], wire: torch.dtype, moved: int) -> dict[str, Run]:
    from spmd.kernels.cuda_pack import Table

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


def measured(run: Run) -> dict[str, Any]:
    """On the GPU alone, and on the clock with the host's share; or the error."""
    try:
        return {**spread(on_gpu(run)), "wall": statistics.median(wall(run, 5, 20))}
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
    for _ in range(2 if quick else 20):
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


def capture(end: float, quick: bool) -> Results:
    """Whether gradients and the optimizer's step, pure as they are, can be captured into a graph and replayed."""
    from spmd import functional, optimizer, value_and_grad

    model, x, y = make("transformer", quick)
    apply, params = functional(model)
    opt = optimizer(torch.optim.AdamW, lr=1e-4, capturable=True)

    def step(params: Any, state: Any) -> Any:
        loss, grads = value_and_grad(lambda params: loss_of(apply(params, x), y))(params)
        return (*opt.step(params, grads, state), loss)

    state = opt.init(params)
    torch.cuda.synchronize()  # what the other stream reads has been made
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
    yield "result", "works" if right else f"wrong loss: {float(loss)}, not {expected}"
