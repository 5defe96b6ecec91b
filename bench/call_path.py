"""Which of the library's files one plain repeated step enters: in the driver, and on one rank.

    python bench/call_path.py

The step is that of the README's program, on two ranks, its loss fetched; its arguments are of a kind seen before. A
file counts once if any of its functions is entered (`sys.setprofile`), in the thread that calls; on a rank from the
message's arrival to the wait for the next one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import Mesh, data_parallel, functional, optimizer, put, value_and_grad

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(spmd.__file__)))
FOLDERS = tuple(os.path.join(ROOT, name, "") for name in ("spmd", "transforms", "mesh", "kernels"))


@contextmanager
def entered(found: set[str]) -> Iterator[None]:
    """Note the library's files that are entered within a `with` block."""

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(FOLDERS):
                found.add(os.path.relpath(file, ROOT))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def noted_on_rank(begin: bool) -> list[str]:
    """Begin to note which files this rank enters, or end that and return them.

    It is one function for both, so that the rank has it from the beginning, and only the step comes between the calls.
    """
    if not begin:
        sys.setprofile(None)
        return sorted(spmd.bench_call_path[1])  # type: ignore[attr-defined]  # 0 and 2 are of the calls around it
    found: list[set[str]] = [set()]  # by message
    spmd.bench_call_path = found  # type: ignore[attr-defined]

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            file = os.path.relpath(frame.f_code.co_filename, ROOT)
            if file == "mesh/wire.py" and frame.f_code.co_name == "receive":
                found.append(set())
            found[-1].add(file)

    sys.setprofile(note)
    return []


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = torch.randint(0, 5, (256,))
    with Mesh({"data": 2}) as mesh:
        apply, params = functional(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
        opt = optimizer(torch.optim.AdamW, lr=1e-2)
        opt_state = opt.init(params)

        def loss_fn(params: Any, batch: Any) -> torch.Tensor:
            return F.cross_entropy(apply(params, batch["x"]), batch["y"])

        @spmd.spmd(mesh=mesh)
        @data_parallel
        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = value_and_grad(loss_fn)(params, batch)
            params, opt_state = opt.step(params, grads, opt_state)
            return params, opt_state, loss

        batch = put({"x": x, "y": y}, spmd.P("data"), mesh=mesh)
        for _ in range(5):
            params, opt_state, loss = train_step(params, opt_state, batch)
            float(loss)
        in_driver: set[str] = set()
        with entered(in_driver):
            params, opt_state, loss = train_step(params, opt_state, batch)
            float(loss)
        mesh.run(noted_on_rank, True, ranks=[0])
        params, opt_state, loss = train_step(params, opt_state, batch)
        (on_rank,) = mesh.run(noted_on_rank, False, ranks=[0])
    both = sorted(in_driver | set(on_rank))
    for file in both:
        print(f"{'driver' if file in in_driver else '':<8}{'rank' if file in on_rank else '':<6}{file}")
    print(f"{len(both)} files: {len(in_driver)} in the driver, {len(on_rank)} on a rank")


if __name__ == "__main__":
    main()
