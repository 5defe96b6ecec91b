"""Placing values on a mesh, and calling programs on them: the same two steps in the driver and on launched ranks.

`place` makes Arrays of tensors; `call` runs a `Program` on every rank and makes Arrays of its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..kernels.errors import SpecError, message
from . import tasks, trees
from .array import Array, LocalSource
from .driver import DriverSession, ResidentSource, Task
from .mesh import Mesh
from .region import Entering, Leaving, Program, describe_path, disagreement, execute, is_spec
from .spec import REPLICATED, P


def is_array(x: Any) -> bool:
    return isinstance(x, Array)


def as_tensor(leaf: Any) -> Any:
    """NumPy arrays of numbers as tensors; anything else as it is."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    return leaf


def specs_for(specs: Any, tree: Any, what: str) -> list[Any]:
    """One spec (or None) for every leaf of a tree, from a prefix tree of specs."""
    try:
        return trees.broadcast_prefix(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise SpecError(
            message(f"{what} do not fit the arguments", got=f"{specs!r}: {error}", remedy="give a prefix of their tree")
        ) from None


# -- place -------------------------------------------------------------------------------------------------------------------


def place(mesh: Mesh, tree: Any, spec: Any) -> Any:
    leaves, treedef = trees.flatten(tree, is_leaf=is_array)
    specs = specs_for(spec, tree, "the specs given to put")
    paths = trees.paths(tree, is_leaf=is_array)
    placed: list[Any] = [None] * len(leaves)
    todo: list[tuple[int, torch.Tensor, P]] = []
    for index, (leaf, its_spec, path) in enumerate(zip(leaves, specs, paths, strict=True)):
        its_spec = REPLICATED if its_spec is None else its_spec
        if isinstance(leaf, Array):
            if leaf.mesh is mesh and leaf.spec == its_spec:
                placed[index] = leaf
                continue
            leaf = leaf.full()
        if isinstance(leaf, int | float | complex):
            leaf = torch.tensor(leaf)
        leaf = as_tensor(leaf)
        if not isinstance(leaf, torch.Tensor):
            raise SpecError(
                message(f"put got a leaf {path or '(the whole)'} that is not a tensor", got=type(leaf).__name__)
            )
        mesh.layout.check_shape(tuple(leaf.shape), its_spec, where=f"put, leaf {path}" if path else "put")
        todo.append((index, leaf, its_spec))
    if mesh.is_driver:
        session, out = mesh.driver, mesh.driver.new_ids()
        task = session.submit(tasks.put_values, ([((out, index), leaf, its_spec) for index, leaf, its_spec in todo],))
        for index, leaf, its_spec in todo:
            known = (tuple(leaf.shape), leaf.dtype, its_spec, _frozen(leaf))
            placed[index] = resident(mesh, session, (out, index), task, lambda known=known: known)
    else:
        for index, leaf, its_spec in todo:
            local = mesh.layout.cut(leaf.detach(), its_spec, mesh.session.rank).clone()
            placed[index] = Array(mesh, LocalSource(mesh.session, local, its_spec, tuple(leaf.shape)))
    return trees.unflatten(treedef, placed)


def _frozen(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, torch.nn.Parameter) and not leaf.requires_grad


def resident(mesh: Mesh, session: DriverSession, value: Any, task: Task | None, meta: Any, deal: Any = None) -> Array:
    array = Array(mesh, ResidentSource(session, value, task, meta), deal)
    session.adopt(value, array)
    return array


# -- call --------------------------------------------------------------------------------------------------------------------


class Call:
    """One call of a program: its arguments flattened, each leaf with its spec, checked."""

    def __init__(self, mesh: Mesh, name: str, args: tuple, kwargs: dict[str, Any], specs: Any, batch: tuple | None):
        self.mesh, self.name = mesh, name
        tree = (args, kwargs)
        leaves, self.treedef = trees.flatten(tree, is_leaf=is_array)
        self.leaves = [as_tensor(leaf) for leaf in leaves]
        self.specs: list[P | None] = (
            [None] * len(leaves) if specs is None else specs_for(specs, tree, f"in_specs of {name}")
        )
        self._tree = tree
        self.batch_total: int | None = None
        self.uneven: set[int] = set()
        self.deal: Any = None
        for leaf in self.leaves:
            if isinstance(leaf, Array) and leaf._deal is not None:
                self.deal = leaf._deal
        if batch is not None:
            self._split_batch(*batch)
        self._check()

    def path(self, index: int) -> str:
        return describe_path(trees.paths(self._tree, is_leaf=is_array)[index])

    def _split_batch(self, which: int | str, axis: str) -> None:
        """Give the leaves of the argument `batch` the spec P(axis), and find the size of the whole batch."""
        args, kwargs = self._tree
        here = (tuple(index == which for index in range(len(args))), {name: name == which for name in kwargs})
        marks = trees.broadcast_prefix(here, self._tree)
        sizes = {}
        for index, (leaf, is_batch) in enumerate(zip(self.leaves, marks, strict=True)):
            if not is_batch or not isinstance(leaf, torch.Tensor | Array):
                continue
            shape = tuple(leaf.shape)
            if not shape:
                raise SpecError(
                    message(
                        f"{self.path(index)} of {self.name} is part of the batch but has no dimension to split",
                        remedy="pass scalars in another argument",
                    )
                )
            sizes[index] = shape[0]
            if self.specs[index] is None and not (isinstance(leaf, Array) and axis in leaf.spec.axes):
                self.specs[index] = P(axis)
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{self.path(index)}: {size}" for index, size in sizes.items())
            raise SpecError(
                message(
                    f"the leaves of the batch of {self.name} differ in dimension 0",
                    got=listed,
                    remedy="make them agree",
                )
            )
        self.uneven = set(sizes)
        self.batch_total = next(iter(sizes.values()), None)

    def _check(self) -> None:
        layout = self.mesh.layout
        for index, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if isinstance(leaf, Array):
                leaf._readable()
                if leaf.mesh is not self.mesh:
                    raise SpecError(
                        message(
                            f"{self.path(index)} of {self.name} is on another mesh",
                            got=repr(leaf.mesh),
                            expected=repr(self.mesh),
                            remedy="move it with put(array.full(), mesh=...)",
                        )
                    )
                if spec is not None and spec != leaf.spec:
                    layout.check_shape(
                        tuple(leaf.shape),
                        spec,
                        uneven=index in self.uneven,
                        where=f"{self.path(index)} of {self.name}",
                    )
                    if leaf.spec.entries:
                        self.leaves[index] = place(self.mesh, leaf, spec)
            elif isinstance(leaf, torch.Tensor):
                if spec is not None and spec.entries:
                    layout.check_shape(
                        tuple(leaf.shape),
                        spec,
                        uneven=index in self.uneven,
                        where=f"{self.path(index)} of {self.name}",
                    )
            elif spec is not None and spec.entries and index not in self.uneven:
                raise SpecError(
                    message(
                        f"{self.path(index)} of {self.name} is not a tensor and cannot be sharded",
                        got=f"{type(leaf).__name__} with {spec}",
                        remedy="give it P(), or None",
                    )
                )

    def signature(self) -> tuple:
        """What must be the same for a later call to be like this one: structure, shapes, dtypes, specs."""
        parts: list[Any] = [self.treedef, self.batch_total]
        for leaf, spec in zip(self.leaves, self.specs, strict=True):
            if isinstance(leaf, Array):
                parts.append(_hint(leaf))
            elif isinstance(leaf, torch.Tensor):
                parts.append((tuple(leaf.shape), leaf.dtype, spec))
            else:
                parts.append((type(leaf), leaf if isinstance(leaf, int | str | bool | type(None)) else None))
        return tuple(parts)


def _hint(array: Array) -> Any:
    """An Array's meta without waiting: what its producer made the last time, if it is not done yet."""
    source: Any = array._source
    hint = getattr(source, "hint", None)
    return hint if hint is not None else (tuple(array.shape), array.dtype, array.spec)


def call(mesh: Mesh, program: Program, source: Any, request: Call, *, check: str, slot: Any) -> Any:
    """Run a program on all ranks: its results, as a tree with Arrays for tensors."""
    if mesh.is_driver:
        return _call_from_driver(mesh, program, source, request, check=check, slot=slot)
    return _call_launched(mesh, program, request, check=check, slot=slot)


def _key(mesh: Mesh, request: Call) -> tuple:
    mesh._calls += 1
    if request.deal is not None:
        return (mesh.seed, "batch", *request.deal.position)
    return (mesh.seed, "call", mesh._calls)


def _call_from_driver(mesh: Mesh, program: Program, source: Any, request: Call, *, check: str, slot: Any) -> Any:
    session = mesh.driver
    session.raise_failure()
    shipped = session.ship_function(source, lambda _: program, slot=slot)
    leaves: list[tuple[str, Any, P | None]] = []
    for leaf, spec in zip(request.leaves, request.specs, strict=True):
        if isinstance(leaf, Array):
            resident_source: Any = leaf._readable()
            session.restore(resident_source.value, leaf)
            leaves.append(("resident", resident_source.value, spec))
        elif isinstance(leaf, torch.Tensor):
            leaves.append(("tensor", leaf, spec))
        else:
            leaves.append(("value", leaf, None))
    signature = (shipped, request.signature())
    known = session.known_results.get(signature)
    verify = check == "always" or (check == "first" and known is None)
    out = session.new_ids()
    task = session.submit(
        tasks.run_program,
        (shipped, session.ship_treedef(request.treedef), leaves, out, _key(mesh, request), request.batch_total, verify),
        region=True,
    )
    if known is None or known[1] is None or verify:
        treedef, metas = _results(mesh, session, program, session.wait(task))
        tensors_only = all(spec is not None for _, _, spec, _, _ in metas)
        session.known_results[signature] = (treedef, metas if tensors_only else None)
        made = [
            meta[4] if meta[2] is None else resident(mesh, session, (out, index), task, lambda meta=meta: meta[:4])
            for index, meta in enumerate(metas)
        ]
        return trees.unflatten(treedef, made)
    treedef, guessed = known
    settled: list[Any] = []

    def settle() -> list[Any]:
        if not settled:
            real, metas = _results(mesh, session, program, task)
            if real != treedef or any(meta[2] is None for meta in metas):
                raise SpecError(
                    message(
                        f"{program.name} returned another structure than before for the same kind of arguments",
                        got=str(real),
                        expected=str(treedef),
                        remedy="return the same tree of tensors, or a number, which makes calls synchronous",
                    )
                )
            settled.extend(metas)
        return settled

    made = []
    for index, meta in enumerate(guessed):
        array = resident(mesh, session, (out, index), task, lambda index=index: settle()[index][:4])
        array._source.hint = (meta[0], meta[1], meta[2])  # type: ignore[attr-defined]
        made.append(array)
    session.in_flight(task)
    return trees.unflatten(treedef, made)


@dataclasses.dataclass(frozen=True, slots=True)
class Deal:
    """How a `Loader` dealt a batch: where it stands in the run, and over how many virtual shards."""

    position: tuple[int, int]
    shards: int | None = None


def fill(mesh: Mesh, name: str, reader: Any, arguments: tuple, deal: Deal) -> Callable[[], Any]:
    """Have every rank read its part of a batch; a function that waits for it and gives the tree of Arrays."""
    program = Program(reader, REPLICATED, name)
    if not mesh.is_driver:
        session = mesh.session
        treedef, leaves, said = reader(session, *arguments)

        def here() -> Any:
            made = [
                leaf
                if about.spec is None
                else Array(mesh, LocalSource(session, leaf, about.spec, about.whole or about.shape), deal)
                for leaf, about in zip(leaves, said, strict=True)
            ]
            return trees.unflatten(treedef, made)

        return here
    session = mesh.driver
    shipped = session.ship_function(reader)
    out = session.new_ids()
    task = session.submit(tasks.fill, (shipped, arguments, out))

    def there() -> Any:
        treedef, metas = _results(mesh, session, program, session.wait(task))
        made = [
            meta[4]
            if meta[2] is None
            else resident(mesh, session, (out, index), task, lambda meta=meta: meta[:4], deal)
            for index, meta in enumerate(metas)
        ]
        return trees.unflatten(treedef, made)

    return there


def _results(mesh: Mesh, session: DriverSession, program: Program, task: Task) -> tuple[Any, list[Any]]:
    """The results' treedef and, for each leaf, (global shape, dtype, spec, frozen, value)."""
    answers = {rank: value for rank, (_, value) in task.answers.items()}
    decoded = {rank: _decoded(session, answer) for rank, answer in answers.items()}
    return _assemble(mesh, program, decoded)


def _decoded(session: DriverSession, answer: Any) -> tuple[Any, list[Leaving]]:
    cache = session.decoded
    found = cache.get(answer)
    if found is None:
        if len(cache) > 256:
            cache.clear()
        found = cache[answer] = tasks.decode(answer)
    return found


def _assemble(mesh: Mesh, program: Program, decoded: dict[int, tuple[Any, list[Leaving]]]) -> tuple[Any, list[Any]]:
    treedef, first = decoded[0]
    for rank, (other, _) in decoded.items():
        if other != treedef:
            raise SpecError(
                message(
                    f"{program.name} returned different trees on rank 0 and rank {rank}",
                    got=f"{treedef} and {other}",
                    where=repr(mesh),
                    remedy="return the same structure on every rank",
                )
            )
    said = {rank: leaves for rank, (_, leaves) in decoded.items()}
    for index, leaf in enumerate(first):
        if any(leaves[index].spec != leaf.spec or leaves[index].dtype != leaf.dtype for leaves in said.values()):
            raise SpecError(
                message(
                    f"result {index} of {program.name} differs in kind between ranks",
                    got="; ".join(
                        f"rank {rank}: {leaves[index].dtype} {leaves[index].spec}" for rank, leaves in said.items()
                    ),
                    remedy="return the same kind of value on every rank",
                )
            )
    error = disagreement(mesh.layout, treedef, said, program.name, repr(mesh))
    if error is not None:
        raise error
    metas = []
    for index, leaf in enumerate(first):
        if leaf.spec is None:
            metas.append((None, None, None, False, leaf.value))
        else:
            shapes = [said[rank][index].shape for rank in range(mesh.size)]
            metas.append((mesh.layout.global_shape(shapes, leaf.spec), leaf.dtype, leaf.spec, leaf.frozen, None))
    return treedef, metas


def _call_launched(mesh: Mesh, program: Program, request: Call, *, check: str, slot: Any) -> Any:
    session = mesh.session
    entering = []
    for leaf, spec in zip(request.leaves, request.specs, strict=True):
        if isinstance(leaf, Array):
            cut_here = spec is not None and spec != leaf.spec
            entering.append(Entering(leaf.local, spec if cut_here and spec is not None else leaf.spec, cut_here))
        elif isinstance(leaf, torch.Tensor):
            entering.append(Entering(leaf.detach() if not _frozen(leaf) else leaf, spec or REPLICATED, whole=True))
        else:
            entering.append(Entering(leaf))
    signature = (slot, request.signature())
    known = mesh._known.get(signature)
    verify = check == "always" or (check == "first" and known is None)
    key = _key(mesh, request)

    def run() -> tuple[Any, list[Any], list[Any]]:
        treedef, results, said = execute(
            session,
            mesh,
            program,
            request.treedef,
            entering,
            key=key,
            batch_total=request.batch_total,
            verify=verify,
        )
        if known is not None and not verify and known[0] == treedef:
            return treedef, results, known[1]
        everyone = session.comm().all_gather_bytes(tasks.encode(treedef, said))
        decoded = {rank: tasks.decode(data) for rank, data in enumerate(everyone)}
        _, metas = _assemble(mesh, program, decoded)
        return treedef, results, metas

    treedef, results, metas = mesh._launched_call(run)
    mesh._known[signature] = (treedef, metas)
    made = [
        result if meta[2] is None else Array(mesh, LocalSource(session, result, meta[2], meta[0]))
        for result, meta in zip(results, metas, strict=True)
    ]
    return trees.unflatten(treedef, made)
