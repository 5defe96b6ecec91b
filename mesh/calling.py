"""Calling a program on all ranks: arguments go out, results come back as Arrays.

Two ways to the same end. The driver sends the call and, once it knows what comes back, does not wait for it; a launched
rank runs its own part, and the ranks tell each other of their results only when they may have changed in kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..kernels.errors import SpecError, message
from . import launched, tasks, trees
from .agreement import Leaving, Result, alike, assemble
from .array import Array, LocalSource
from .driver import DriverSession
from .mesh import Mesh
from .pending import Task
from .program import Entering, Program, execute
from .request import Request
from .resident import Outputs
from .shipped import Shipped
from .spec import REPLICATED

_PLAIN = (int, float, complex, str, bytes, bool, type(None))  # what any pickle can take to the ranks


def call(mesh: Mesh, program: Program, source: Any, request: Request, *, check: str, holder: Any) -> Any:
    """Run a program on all ranks: its results, as a tree with Arrays for tensors.

    Args:
        source: the function whose changes mean that the program must be sent again.
        check: when replicas of results are compared: "first", "always" or "never".
        holder: lives as long as the program is worth keeping on the ranks.
    """
    position = ("call", mesh.next_call()) if request.deal is None else ("batch", *request.deal.position)
    key = (mesh.seed, *position)
    if mesh.is_driver:
        mesh.driver.raise_failure()  # of what was called before, which it is then told of
    mesh.begin_call(program.name)
    if mesh.is_driver:
        return _from_driver(mesh, program, source, request, key, check=check, holder=holder)
    return _launched(mesh, program, request, key, check=check, holder=holder)


# -- from the driver ---------------------------------------------------------------------------------------------------


def _from_driver(
    mesh: Mesh, program: Program, source: Any, request: Request, key: tuple, *, check: str, holder: Any
) -> Any:
    driver = mesh.driver
    shipped = driver.shipped.ship_function(source, lambda _: program, holder=holder)
    kinds, values, needs, plain = [], [], [], True
    for leaf, donated in zip(request.leaves, request.donated, strict=True):
        if isinstance(leaf, Array):
            resident: Any = leaf._readable()
            resident.check()
            needs.append(leaf)
            kinds.append("donated" if donated else "resident")
            values.append(resident.name)
        else:
            kinds.append("tensor" if isinstance(leaf, torch.Tensor) else "value")
            values.append(leaf)
            plain = plain and type(leaf) in _PLAIN
    signature = request.signature()
    known: _Known | None = shipped.results.get(signature)
    verify = check == "always" or (check == "first" and known is None)
    hasty = known is not None and known.of_tensors and not verify
    outputs = Outputs(mesh, driver)
    treedef = driver.shipped.ship_treedef(request.treedef)
    if known is not None and plain and not verify:
        if known.template is None:
            parts = list(zip(kinds, request.specs, strict=True))
            template = tasks.Template(shipped.key, treedef.key, parts, request.batch_total, request.dealt)
            known.template = driver.shipped.ship(template)
        task = driver.submit_again((known.template.key, values, outputs.number, key), told=shipped.told, needs=needs)
    else:
        leaves = list(zip(kinds, values, request.specs, strict=True))
        task = driver.submit(
            tasks.run_program,
            (shipped.key, treedef.key, leaves, outputs.number, key, request.batch_total, request.dealt, verify),
            region=True,
            told=shipped.told,
            needs=needs,
            parts=lambda: [(request.where(index), leaf) for index, (_, leaf, _) in enumerate(leaves)],
        )
    finish = _Finish(mesh, driver, program, shipped, task, compare=check != "never")
    if known is not None and hasty:
        finish.expect(known.treedef)
    else:
        found = _Known(*finish())
        if known is not None:
            found.template = known.template
        known = shipped.results[signature] = found
    made = []
    for index, result in enumerate(known.results):
        if result.spec is None:
            made.append(result.value)
            continue
        made.append(outputs.array(index, task, functools.partial(finish.meta, index), hint=result.hint))
    outputs.taken()
    if hasty:
        driver.in_flight(task)
    return trees.unflatten(known.treedef, made)


class _Known:
    """What is known of calls with arguments of one kind.

    Attributes:
        treedef, results: what they return.
        of_tensors: nothing of it is a value that the caller must have at once.
        template: what the ranks know of such a call, once there was a second.
    """

    def __init__(self, treedef: Any, results: list[Result]):
        self.treedef, self.results = treedef, results
        self.of_tensors = all(result.spec is not None for result in results)
        self.template: Shipped | None = None


class _Finish:
    """What a call's results turned out to be, found out once, when somebody asks."""

    def __init__(
        self, mesh: Mesh, driver: DriverSession, program: Program, shipped: Shipped, task: Task, *, compare: bool
    ):
        self._layout, self._where, self._name = mesh.layout, mesh.describe(), program.name
        self._driver, self._shipped, self._task, self._compare = driver, shipped, task, compare
        self._expected: Any = None
        self._found: tuple[Any, list[Result]] | None = None

    def expect(self, treedef: Any) -> None:
        """Arrays were made for results of this structure."""
        self._expected = treedef

    def __call__(self) -> tuple[Any, list[Result]]:
        if self._found is None:
            try:
                self._found = self._find()
            except BaseException:
                self._driver.pending.note_failure()
                raise
        return self._found

    def _find(self) -> tuple[Any, list[Result]]:
        encoded = self._driver.wait(self._task).values()
        before, found = self._shipped.assembled
        if encoded != before:
            said = tasks.decode_all(encoded)
            found = assemble(self._layout, said, name=self._name, where=self._where, compare=self._compare)
            self._shipped.assembled = encoded, found
        if self._expected is not None and (
            found[0] != self._expected or any(result.spec is None for result in found[1])
        ):
            raise SpecError(
                message(
                    f"{self._name} returned another structure than before for the same kind of arguments",
                    got=str(found[0]),
                    expected=str(self._expected),
                    where=self._where,
                    remedy="return the same tree of tensors, or a number, which makes calls synchronous",
                )
            )
        return found

    def meta(self, index: int) -> Any:
        return self()[1][index].meta()


# -- on a launched rank ------------------------------------------------------------------------------------------------


def _launched(mesh: Mesh, program: Program, request: Request, key: tuple, *, check: str, holder: Any) -> Any:
    session = mesh.session
    entering, theirs = [], set()
    for leaf, spec, donated in zip(request.leaves, request.specs, request.donated, strict=True):
        if isinstance(leaf, Array):
            source = leaf._readable()
            its_spec = source.spec()
            cut_here = spec is not None and spec != its_spec
            entering.append(Entering(source.value(), spec if spec is not None else its_spec, cut_here, donated))
        elif isinstance(leaf, torch.Tensor):
            entering.append(Entering(leaf, spec or REPLICATED, whole=True))
            theirs.add(leaf.untyped_storage().data_ptr())
        else:
            entering.append(Entering(leaf))
    signature = request.signature()
    results_of = mesh.known_results.setdefault(holder, {})
    known: tuple[Any, list[Result], list[Leaving]] | None = results_of.get(signature)
    verify = check == "always" or (check == "first" and known is None)

    def run() -> tuple[list[Any], tuple[Any, list[Result], list[Leaving]]]:
        treedef, results, said = execute(
            session,
            mesh,
            program,
            request.treedef,
            entering,
            key=key,
            batch_total=request.batch_total,
            dealt=request.dealt,
            verify=verify,
            before=None if known is None else known[2],
        )
        comm = session.comm()
        news = known is None or verify or treedef != known[0] or not alike(said, known[2])
        # All must know whether any rank has news, or that rank would wait for the others to hear them.
        any_news = check == "always" or bool(comm.all_reduced(torch.tensor(int(news)), "max"))
        if known is not None and not any_news:
            return results, known
        everyone = tasks.decode_all(comm.all_gather_bytes(tasks.encode(treedef, said)))
        everyone = {rank: (_as_here(its, treedef), leaves) for rank, (its, leaves) in everyone.items()}
        found = assemble(mesh.layout, everyone, name=program.name, where=mesh.describe(), compare=check != "never")
        return results, (*found, [leaf if leaf.digest is None else leaf._replace(digest=None) for leaf in said])

    results, found = launched.call(session, run)
    results_of[signature] = found
    made = []
    for value, result in zip(results, found[1], strict=True):
        if result.spec is None:
            made.append(value)
            continue
        if theirs and value.untyped_storage().data_ptr() in theirs:
            value = value.clone()  # the tensor passed is the caller's, who may change it
        made.append(Array(mesh, LocalSource(session, value, result.spec, result.shape, result.shapes, result.hint)))
    return trees.unflatten(found[0], made)


def _as_here(theirs: Any, mine: Any) -> Any:
    """This rank's structure for one that differs in nothing but that a class of the script has arrived as a copy."""
    return mine if theirs != mine and str(theirs) == str(mine) else theirs
