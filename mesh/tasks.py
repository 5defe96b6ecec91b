"""The tasks of a driver's ranks that deal with regions and values; each is a function of the `Worker`."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from ..kernels.errors import SpecError, message
from . import trees
from .agreement import Leaving, Said, alike
from .program import Entering, execute
from .region import Region, inside, reseed
from .spec import REPLICATED, P

if TYPE_CHECKING:
    from .worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What calls of one program have in common whose arguments are of the same kinds: shipped once, named afterwards.

    Attributes:
        program, tree: keys of the shipped program and of its arguments' structure.
        leaves: for each leaf of the arguments ("resident", "donated", "tensor" or "value", how it is cut).
        batch_total, dealt: as in `execute`.
    """

    program: str
    tree: str
    leaves: list[tuple[str, P | None]]
    batch_total: int | None
    dealt: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What to say of a call's results, for `decode_all`; the driver keeps it for later calls of the program."""

    data: bytes


AS_BEFORE = object()  # the results are of the kinds that the driver was last told of for this program


def call_again(worker: Worker, template: str, values: Sequence[Any], out: int, key: tuple) -> Any:
    """`run_program` with the leaves `values`, and all else as the template says."""
    like = worker.shipped(template)
    leaves = [(kind, value, spec) for (kind, spec), value in zip(like.leaves, values, strict=True)]
    return run_program(worker, like.program, like.tree, leaves, out, key, like.batch_total, like.dealt, False)


def run_program(
    worker: Worker,
    program: str,
    tree: str,
    leaves: list[tuple[str, Any, P | None]],
    out: int,
    key: tuple,
    batch_total: int | None,
    dealt: int | None,
    verify: bool,
) -> bytes | Told | object:
    """Run a shipped program on resident and inline leaves; keep its results under (out, index).

    Returns:
        What to say of them, for `decode_all`; `AS_BEFORE` if that is what was said at the last call.
    """
    program_, treedef = worker.shipped(program), worker.shipped(tree)
    told = worker.told.get(program)
    entering = []
    for kind, value, spec in leaves:
        if kind in ("resident", "donated"):
            tensor, its_spec = worker.value(value)
            again = spec is not None and spec != its_spec
            if again and its_spec.entries:
                raise SpecError(
                    message(
                        f"an argument of {program_.name} came back with another spec than before",
                        got=str(its_spec),
                        expected=str(spec),
                        remedy="declare the same specs at every call",
                    )
                )
            entering.append(Entering(tensor, spec if spec is not None else its_spec, again, kind == "donated"))
        elif kind == "tensor":
            entering.append(Entering(value, spec or REPLICATED, whole=True))
        else:
            entering.append(Entering(value))
    treedef, results, said = execute(
        worker.session,
        worker.mesh,
        program_,
        treedef,
        entering,
        key=key,
        batch_total=batch_total,
        dealt=dealt,
        verify=verify,
        before=None if told is None else told[1],
    )
    for index, (result, leaf) in enumerate(zip(results, said, strict=True)):
        if leaf.spec is not None:
            worker.values[out, index] = (result, leaf.spec)
    if verify:
        return encode(treedef, said)
    # Pickling this costs more than a small step, and mostly the same is said as at the call before.
    if told is not None and told[0] == treedef and alike(said, told[1]):
        return AS_BEFORE
    worker.told[program] = (treedef, said)
    return Told(encode(treedef, said))


def encode(treedef: Any, said: list[Leaving]) -> bytes:
    """What a rank says of its results; mostly equal bytes on all ranks, so that they are decoded once."""
    return cloudpickle.dumps((trees.pack(treedef), said))


def decode_all(encoded: Sequence[bytes]) -> dict[int, Said]:
    """What each rank said of its results."""
    decoded: dict[bytes, Said] = {}
    for data in encoded:
        if data not in decoded:
            packed, said = pickle.loads(data)
            decoded[data] = packed.unpack(), said
    return {rank: decoded[data] for rank, data in enumerate(encoded)}


def call_function(worker: Worker, function: str, arguments: tuple, key: tuple) -> Any:
    """`mesh.run`: call a shipped function; its result goes back whole."""
    region = Region(worker.session, key, worker.mesh)
    reseed(region, worker.session.rank)
    with inside(region), torch.enable_grad():
        return worker.shipped(function)(*arguments)


def do_nothing(worker: Worker) -> None:
    """The share of a rank that was not asked: it passes through the region, so that nobody waits for it in vain."""


def put_values(worker: Worker, items: list[tuple[Any, torch.Tensor, P]]) -> None:
    """Keep this rank's shards of tensors that come whole."""
    layout, rank = worker.session.layout, worker.session.rank
    for name, tensor, spec in items:
        # Nobody else holds what came with the task, so that it need not be copied whole.
        local = layout.take(tensor, spec, rank) if spec.entries or tensor.requires_grad else tensor
        worker.values[name] = (worker.session.placed(local), spec)


def reload_modules(worker: Worker, names: Sequence[str]) -> list[str]:
    """Load again what has changed on disk, and these modules if this rank has them."""
    return worker.modules.reload(names)


def fetch_value(worker: Worker, name: Any) -> Any:
    found = worker.value(name)[0].cpu()
    worker.session.check()  # a GPU that was stopped has left anything in it
    return found


def set_value(worker: Worker, name: Any, tensor: torch.Tensor, spec: P) -> None:
    """Keep a shard as it is (on a rank that replaces a dead one)."""
    worker.values[name] = (worker.session.placed(tensor), spec)


def fill(worker: Worker, reader: str, arguments: tuple, out: int) -> bytes:
    """Make resident values by a shipped `reader(session, *arguments) -> (treedef, leaves, Leaving of each)`."""
    treedef, leaves, said = worker.shipped(reader)(worker.session, *arguments)
    for index, (leaf, about) in enumerate(zip(leaves, said, strict=True)):
        if about.spec is not None:
            worker.values[out, index] = (leaf, about.spec)
    return encode(treedef, said)
