"""The tasks of a driver's ranks that deal with regions and values; each is a function of the `Worker`."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import torch

from . import trees
from .region import Entering, Leaving, Region, execute, inside, seed_generators
from .spec import REPLICATED, P
from .worker import Worker


def run_program(
    worker: Worker,
    program: str,
    tree: str,
    leaves: list[tuple[str, Any, P | None]],
    out: int,
    key: tuple,
    batch_total: int | None,
    verify: bool,
) -> bytes:
    """Run a shipped program on resident and inline leaves; keep its results under (out, index).

    Returns:
        What to say of them, for `decode`.
    """
    entering = []
    for kind, value, spec in leaves:
        if kind == "resident":
            tensor, its_spec = worker.values[value]
            whole = spec is not None and spec != its_spec
            entering.append(Entering(tensor, spec if spec is not None else its_spec, whole))
        elif kind == "tensor":
            entering.append(Entering(value, spec or REPLICATED, whole=True))
        else:
            entering.append(Entering(value))
    treedef, results, said = execute(
        worker.session,
        worker.mesh,
        worker.shipped[program],
        worker.shipped[tree],
        entering,
        key=key,
        batch_total=batch_total,
        verify=verify,
    )
    for index, (result, leaf) in enumerate(zip(results, said, strict=True)):
        if leaf.spec is not None:
            worker.values[out, index] = (result, leaf.spec)
    return encode(treedef, said)


def encode(treedef: Any, said: list[Leaving]) -> bytes:
    """What a rank says of its results; equal bytes at equal results, so that the driver decodes them once."""
    return cloudpickle.dumps((trees.pack(treedef), said))


def decode(encoded: bytes) -> tuple[Any, list[Leaving]]:
    """The results' treedef and what the rank said of each leaf."""
    packed, said = pickle.loads(encoded)
    return packed.unpack(), said


def call_function(worker: Worker, function: str, arguments: tuple, key: tuple) -> Any:
    """`mesh.run`: call a shipped function; its result goes back whole."""
    region = Region(worker.session, key, worker.mesh)
    seed_generators((*key, worker.session.rank))
    with inside(region), torch.enable_grad():
        return worker.shipped[function](*arguments)


def do_nothing(worker: Worker) -> None:
    """The share of a rank that was not asked: it passes through the region, so that nobody waits for it in vain."""


def put_values(worker: Worker, items: list[tuple[Any, torch.Tensor, P]]) -> None:
    """Keep this rank's shards of tensors that come whole."""
    layout, rank = worker.session.layout, worker.session.rank
    for value, tensor, spec in items:
        local = layout.cut(tensor, spec, rank).clone() if spec.entries else tensor
        worker.values[value] = (local, spec)


def fetch_value(worker: Worker, value: Any) -> Any:
    return worker.values[value][0]


def set_values(worker: Worker, items: list[tuple[Any, torch.Tensor, P]]) -> None:
    """Keep shards as they are (for a rank that replaces a dead one)."""
    for value, tensor, spec in items:
        worker.values[value] = (tensor, spec)


def fill(worker: Worker, reader: str, arguments: tuple, out: int) -> bytes:
    """Make resident values by a shipped `reader(session, *arguments) -> (treedef, leaves, Leaving of each)`."""
    treedef, leaves, said = worker.shipped[reader](worker.session, *arguments)
    for index, (leaf, about) in enumerate(zip(leaves, said, strict=True)):
        if about.spec is not None:
            worker.values[out, index] = (leaf, about.spec)
    return encode(treedef, said)
