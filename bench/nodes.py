"""Bytes on the wire and times of all-reduces between nodes: hierarchical against flat, and 16-bit floats on the wire.

    python bench/nodes.py [--nodes 2 3] [--ranks 2] [--mib 4 25] [--rate 1gbit] [--json]

Needs root and iproute2: the nodes are network namespaces of this machine (see namespaces.py). Each node runs `--ranks`
ranks; each size is reduced by backend "hierarchical" and by "gloo" over all ranks, in turn, and the bytes that a node
sends for one reduction are compared with the theory: 2(h-1)/h of the buffer with one leader on each of h nodes, and
2k(n-k)/n with n ranks, k on each node. Then a network is trained with float32 and with bfloat16 on the wire.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import namespaces
import torch
import torch.nn.functional as F
from torch import nn

from spmd import Loader, Mesh, data_parallel, functional, optimizer, spmd, value_and_grad

REPEATS, ROUNDS, STEPS = 5, 4, 30


def reductions(meshes: dict[str, Mesh], mib: float) -> dict[str, dict[str, float]]:
    """For each backend: the node's bytes for one reduction, as a multiple of the buffer, and seconds (median)."""
    nbytes = int(mib * (1 << 20))
    ratios: dict[str, list[float]] = {name: [] for name in meshes}
    seconds: dict[str, list[float]] = {name: [] for name in meshes}

    def measure(mesh: Mesh) -> tuple[float, list[float]]:
        comm = mesh.comm()
        buffer = comm.empty(nbytes // 4, dtype=torch.float32).fill_(1.0)
        comm.all_reduced(buffer)
        comm.barrier()
        time.sleep(0.02)  # until messages on their way have arrived
        before, took = namespaces.sent_bytes(), []
        for _ in range(REPEATS):
            began = time.perf_counter()
            comm.all_reduced(buffer)
            took.append(time.perf_counter() - began)
        time.sleep(0.02)
        sent = namespaces.sent_bytes() - before
        comm.barrier()
        return sent / REPEATS / nbytes, took

    for _ in range(ROUNDS):
        for name, mesh in meshes.items():
            found = mesh.run(measure, mesh)
            ratios[name].append(max(ratio for ratio, _ in found))
            seconds[name] += [max(times) for times in zip(*(took for _, took in found), strict=True)]
    return {name: {"bytes": min(ratios[name]), "seconds": statistics.median(seconds[name])} for name in meshes}


def training(mesh: Mesh, wire_dtype: torch.dtype | None) -> dict[str, Any]:
    """Losses, and the node's bytes for each step as a multiple of the float32 gradients."""
    torch.manual_seed(0)
    x = torch.randn(2048, 256)
    y = (x @ torch.randn(256, 16)).argmax(1)
    apply, params = functional(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 16)))
    size = 4 * sum(leaf.numel() for leaf in params.values())
    opt = optimizer(torch.optim.AdamW, lr=1e-3)
    state = opt.init(params)

    @spmd(mesh=mesh)
    @data_parallel(wire_dtype=wire_dtype)
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(lambda params, batch: F.cross_entropy(apply(params, batch["x"]), batch["y"]))(
            params, batch
        )
        params, state = opt.step(params, grads, state)
        return params, state, loss

    losses, before = [], 0
    batches = Loader({"x": x, "y": y}, 128, seed=0, mesh=mesh)
    for number, batch in enumerate((*batches, *batches)):
        if number == 2:  # by then everything is connected, and results are no longer compared
            before = namespaces.sent_bytes()
        params, state, loss = step(params, state, batch)
        losses.append(loss)
        if number == STEPS:
            break
    curve = [float(loss) for loss in losses]
    mesh.run(lambda: mesh.comm().barrier())
    return {"bytes": (namespaces.sent_bytes() - before) / (STEPS - 1) / size, "losses": curve, "gradients": size}


def as_rank(sizes: list[float]) -> None:
    """What every rank runs; rank 0 prints what it found as JSON."""
    with Mesh(timeout=60.0) as mesh, Mesh(backend="gloo", timeout=60.0) as flat:
        assert mesh.backend == "hierarchical", mesh.backend
        found: dict[str, Any] = {"reductions": [], "training": {}}
        for mib in sizes:
            found["reductions"].append({"mib": mib, **reductions({"hierarchical": mesh, "gloo": flat}, mib)})
        for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
            found["training"][name] = training(mesh, dtype)
        if mesh.rank == 0:
            print(json.dumps(found))


def measured(count: int, per_node: int, sizes: list[float], rate: str | None) -> dict[str, Any]:
    """Rank 0's findings on so many nodes."""
    with namespaces.nodes(count) as places:
        for node in places if rate else ():
            node.limit(rate)  # type: ignore[arg-type]
        started = namespaces.on_nodes(places, per_node, [__file__, "--mib", *map(str, sizes)])
        try:
            told = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(err for _, err in told))
    return json.loads(told[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--mib", type=float, nargs="+", default=[4.0, 25.0])
    parser.add_argument("--rate", help="what each node may send, such as 1gbit (default: no limit)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if "SPMD_RANK" in os.environ:
        as_rank(asked.mib)
        return
    if reason := namespaces.unavailable():
        raise SystemExit(reason)
    found = {count: measured(count, asked.ranks, asked.mib, asked.rate) for count in asked.nodes}
    if asked.json:
        print(json.dumps(found))
        return
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {asked.ranks} ranks on each node, "
        f"link {asked.rate or 'without limit'}\n"
    )
    print("| nodes | MiB | backend | sent by a node, x buffer | theory | ms (median) |\n|---|---|---|---|---|---|")
    for count, its in found.items():
        size = count * asked.ranks
        theory = {"hierarchical": 2 * (count - 1) / count, "gloo": 2 * asked.ranks * (size - asked.ranks) / size}
        for row in its["reductions"]:
            for name, expected in theory.items():
                numbers = f"{row[name]['bytes']:.3f} | {expected:.3f} | {1e3 * row[name]['seconds']:.1f}"
                print(f"| {count} | {row['mib']:g} | {name} | {numbers} |")
    print(
        "\n| nodes | wire | sent by a node for a step, x gradients | loss after 1, 11, 21, 31 steps |\n"
        "|---|---|---|---|"
    )
    for count, its in found.items():
        for name, run in its["training"].items():
            curve = ", ".join(f"{run['losses'][index]:.4f}" for index in range(0, STEPS + 1, 10))
            print(f"| {count} | {name} | {run['bytes']:.3f} | {curve} |")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr.decode())
