"""Calling a program on all ranks: arguments go out, results come back as Arrays.

The driver sends the call (`DriverCall`); a launched rank runs its own part (`LaunchedCall`). The first call of each
signature makes one of these, with everything that the signature settles; later calls look it up. Invariant: equal
signatures mean equal structure, shapes, dtypes and specs of the arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..kernels.torch_private import in_forward_mode
from . import trees
from .ambient import Ambient, ambient, refuse_tangents
from .array import Array
from .batch import Deal
from .driver.calls import DriverCall
from .driver.functions import Shipped
from .driver.pending import Resized, made_for_its_size
from .launch.calls import LaunchedCall
from .mesh import Mesh
from .program import InputPlan, Program
from .put import as_tensor, put_on
from .rank import counted
from .remote.reference import Ref
from .replication.first_calls import CHOICES, Kind, Renewals, enough, renewals_of
from .replication.values import flag_in
from .request import Request, Settled, Span, spans_of

Signature = tuple[tuple, tuple]  # the kinds of the arguments, and the numbers and names among them


class HasRefs(Exception):
    """The arguments of a call contain results of remote calls, which must be brought to the ranks first."""


SIGNATURES = 256  # remembered for each program


@dataclasses.dataclass(frozen=True, slots=True)
class Callee:
    """What is called.

    Attributes:
        source: the function whose changes mean that the program must be sent again; None if it never changes.
        request: checks the arguments of a call on a mesh: for the first call of a signature, and if something is wrong.
        check: when replicas of results are compared: "first", "always" or "never".
        holder: lives as long as the program is worth keeping on the ranks.
        donates: whether some arguments are donated.
    """

    program: Program
    source: Any
    request: Callable[[Mesh, tuple, dict[str, Any]], Request]
    check: str
    holder: Any
    donates: bool = False


@made_for_its_size
def call(
    mesh: Mesh, callee: Callee, tree: tuple[tuple, dict[str, Any]], flat: tuple[list[Any], Any] | None = None
) -> Any:
    """Run a program on all ranks: its results, as a tree with Arrays for tensors.

    Args:
        tree: (args, kwargs).
        flat: the leaves and the structure of `tree`, if the caller has them.
    """
    settings = ambient()
    if counted.thread.asked:
        counted.note_mesh(mesh)
    session: Any = mesh.driver if mesh.is_driver else mesh.session
    if mesh.is_driver:
        if (resizing := session.resizing) is not None:
            resizing.switch_if_ready()
        session.shipped.follow_reloads()
    layout = mesh.layout
    calls = session.calls.get(callee.holder)
    if calls is None:
        calls = session.calls[callee.holder] = Calls()
        if callee.check != "never":  # as with torch's functions on Arrays
            calls.renewals = renewals_of(session, callee.source)
    leaves, treedef = flat or calls.flatten(tree)
    if in_forward_mode():
        refuse_tangents(f"a call of {callee.program.name}", leaves)
    ready = _ready(mesh, callee, calls, tree, leaves, treedef, settings)
    deal, spans, name = ready.deal, ready.spans, callee.program.name
    if mesh.is_driver:
        session.raise_failure()  # an earlier call's, before this one gets its number
    this = session.run_state.begin_call(name, counted=deal is None)
    key = (mesh.seed, "call", this.number) if deal is None else (mesh.seed, "batch", *deal.position)
    given = spans if callee.donates else ()
    try:
        if mesh.layout is not layout:  # since what is ready now was made for that
            raise Resized(mesh.describe())
        compiled, held = _compiled(mesh, session, callee, calls, ready)
        inputs = (ready.leaves, spans) if not held else _with_held(ready.leaves, spans, held)
        results = compiled(*inputs, given, key, this, check=callee.check)
    except BaseException:
        session.run_state.fail_call(this)
        raise
    calls.add(ready.signature, compiled)
    return results


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    """The arguments of a call as they are sent, and the call that an earlier one of their signature has made."""

    leaves: list[Any]
    spans: Sequence[Span]
    signature: Signature
    deal: Deal | None
    settled: Settled
    known: DriverCall | LaunchedCall | None


def _ready(
    mesh: Mesh, callee: Callee, calls: Calls, tree: Any, leaves: list[Any], treedef: Any, settings: Ambient | None
) -> _Ready:
    spans = spans_of(leaves, calls.lengths)
    calls.lengths = [span.stop - span.start for span in spans]
    signature, deal = _signature(leaves, spans, treedef, settings)
    known = calls.find(signature)
    if known is not None and known.settled.sized and _were_resized([leaves[index] for index in known.settled.sized]):
        signature, deal = _signature(leaves, spans, treedef, settings)
        known = calls.find(signature)
    if known is None or not known.accepts(mesh, leaves, spans):
        wanted = callee.request(mesh, *tree)
        signature, deal = _signature(leaves, spans, treedef, settings)  # `request` has waited for the shapes
        settled = Settled(treedef, wanted.plan(settings), _moves(leaves, wanted), wanted.total, _sized(wanted))
        return _Ready(wanted.leaves, spans_of(wanted.leaves), signature, deal, settled, None)
    for index, spec in known.settled.moves:
        leaves[index] = put_on(mesh, leaves[index], spec)
    spans = spans_of(leaves) if known.settled.moves else spans
    return _Ready(leaves, spans, signature, deal, known.settled, known)


def _with_held(leaves: list[Any], spans: Sequence[Span], held: list[Array]) -> tuple[list[Any], list[Span]]:
    """The arguments, and after them the Arrays that the function captures; None for those that were donated."""
    readable = [array if array.donated_to is None else None for array in held]
    return [*leaves, *readable], [*spans, *(span._replace(at=span.at + len(leaves)) for span in spans_of(readable))]


def _compiled(
    mesh: Mesh, session: Any, callee: Callee, calls: Calls, ready: _Ready
) -> tuple[DriverCall | LaunchedCall, list[Array]]:
    """The compiled call for these arguments: made, if there is none of the program as the ranks have it.

    With the Arrays that the function captures.
    """
    program, known = callee.program, ready.known
    shipped, held = None, list[Array]()
    if mesh.is_driver:
        shipped, held = session.shipped.ship_program(callee.source, program, callee.holder)
    if known is not None and known.is_of(shipped):
        calls.renewals.count = 0
        return known, held
    if known is not None or calls.empty:
        why = functools.partial(_why_anew, known, shipped, callee.source)
        calls.renewals.note(program.name, why, quiet=mesh.rank not in (None, 0))
    settled = ready.settled
    choice = _choice(ready.leaves, settled.plan)
    if shipped is not None:
        kind = calls.kind_of(shipped.kind, ready.signature)
        checked = known is not None and enough(kind.times)
        return DriverCall(mesh, session, program, shipped, settled, choice, kind, checked=checked), held
    if (alike := calls.planned.get((settled.treedef, settled.plan, choice))) is not None:
        return alike.for_other_shapes(settled), held
    return LaunchedCall(mesh, session, program, settled, choice), held


def _why_anew(known: DriverCall | LaunchedCall | None, shipped: Shipped | None, source: Any) -> str:
    """Why a call had to be made, for messages; empty if that is not known."""
    if isinstance(known, DriverCall) and known.shipped is shipped:
        return "a class of its arguments, or what that refers to, changes"
    return "" if shipped is None else shipped.why(source)


class Calls:
    """The calls of one function on one mesh, by signature, each with what the first such call has settled.

    Attributes:
        lengths: of the spans in the last call's arguments.
        renewals: shared with other functions of the same code.
        planned: of a launched rank, by all but the shapes and dtypes of the arguments, the last call that was made.
    """

    def __init__(self) -> None:
        self._known: dict[Signature, DriverCall | LaunchedCall] = {}
        # By the kinds of arguments: how many signatures there were, the last call, and the flags that it or others had.
        self._alike: dict[tuple, tuple[int, DriverCall | LaunchedCall | None, set[tuple]]] = {}
        self.planned: dict[Any, LaunchedCall] = {}
        self.lengths: list[int] = []
        self.renewals = Renewals()
        self._kinds: dict[tuple[int, tuple], Kind] = {}
        self._structure: trees.Structure | None = None  # of arguments alike twice in a row
        self._treedef: Any = None  # of the last arguments that did not match `_structure`

    def flatten(self, tree: Any) -> tuple[list[Any], Any]:
        """The leaves and the structure of arguments."""
        structure = self._structure  # read once: another thread may make a call of another structure meanwhile
        leaves = None if structure is None else structure.leaves(tree)
        if leaves is not None and structure is not None:
            return leaves, structure.treedef
        leaves, treedef = trees.flatten(tree)
        if treedef == self._treedef:
            self._structure = trees.Structure.of(tree)
        self._treedef = treedef
        return leaves, treedef

    @property
    def empty(self) -> bool:
        """Whether no call has ended well."""
        return not self._known

    def kind_of(self, program: int, signature: Signature) -> Kind:
        """The kind of a call; `program` is a hash of the code and classes of its program."""
        kind = self._kinds.setdefault((program, signature[0]), Kind())
        if len(self._kinds) > SIGNATURES:
            del self._kinds[next(iter(self._kinds))]
        return kind

    def find(self, signature: Signature) -> DriverCall | LaunchedCall | None:
        """The call of a signature, perhaps made from one that had other numbers or names."""
        known = self._known.get(signature)
        if known is None:
            count, alike, seen = self._alike.get(signature[0], (0, None, set()))
            if enough(count) and alike is not None:
                return alike.for_other_values(flags=len(seen) < CHOICES and _flags(signature[1]) not in seen)
        return known

    def add(self, signature: Signature, call: DriverCall | LaunchedCall) -> None:
        known = self._known.get(signature)
        if known is call:
            return
        kinds = signature[0]
        count, _, seen = self._alike.get(kinds, (0, None, set()))
        if isinstance(call, DriverCall):
            call.kind.times += known is not None or not count
        else:
            self.planned[call.key] = call
            if len(self.planned) > SIGNATURES:
                del self.planned[next(iter(self.planned))]
        if known is None and len(self._known) >= SIGNATURES:
            del self._known[next(iter(self._known))]
        if not count and len(self._alike) >= SIGNATURES:
            del self._alike[next(iter(self._alike))]
        self._known[signature] = call
        if len(seen) < CHOICES:
            seen.add(_flags(signature[1]))
        self._alike[kinds] = count + (known is None), call, seen


def _flags(values: tuple) -> tuple:
    """Those that are no integers, which may count the calls."""
    return tuple(value for value in values if type(value) is not int)


def _signature(
    leaves: list[Any], spans: Sequence[Span], treedef: Any, settings: Ambient | None
) -> tuple[Signature, Deal | None]:
    """The signature of a call, and how a `Loader` dealt the batch in it.

    NumPy arrays among the leaves are replaced by tensors.
    """
    deal: Deal | None = None
    parts: list[Any] = [treedef, settings]
    values: list[Any] = []
    for source, index, start, stop in spans:
        if source is not None:
            deal = source.deal or deal
            parts += source.hints[start:stop]
            continue
        leaf = leaves[index]
        kind = type(leaf)
        if isinstance(leaf, np.ndarray):
            leaf = leaves[index] = as_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            parts.append(_form(leaf))
        elif kind is Ref:
            raise HasRefs
        else:
            parts.append(kind)
            values.append(flag_in(leaf))
    parts.append(None if deal is None else (deal.shards, deal.sizes))
    return (tuple(parts), tuple(values)), deal


def _form(tensor: torch.Tensor) -> tuple:
    """What decides whether a tensor may be an argument, and how it is cut; it is checked once for each of these."""
    kind, layout = type(tensor), tensor.layout
    # torch's older kind of nested tensors has no shape, and is refused.
    shape = None if tensor.is_nested and layout is torch.strided else tuple(tensor.shape)
    return shape, tensor.dtype, layout, tensor.is_meta, torch.Tensor if kind is torch.nn.Parameter else kind


def _sized(wanted: Request) -> list[int]:
    """Indices of the Arrays on whose shapes a call depends: whole ones that are cut when they are passed, and a batch.

    A `Loader`'s has the shape that it shows.
    """
    return [
        index
        for index, (leaf, spec) in enumerate(zip(wanted.leaves, wanted.specs, strict=True))
        if type(leaf) is Array
        and leaf.deal is None
        and (index in wanted.uneven or (spec is not None and spec.entries and not leaf.hint().spec.entries))
    ]


def _were_resized(arrays: list[Array]) -> bool:
    """Wait for some Arrays; whether they turned out other than their hints said."""
    unsure = [array for array in arrays if not array._source.sure]
    hints = [array.hint() for array in unsure]
    found = [array._source.meta(array._index) for array in unsure]
    return any(map(operator.is_not, found, hints))


def _choice(leaves: list[Any], plan: InputPlan) -> int:
    """A hash of what may choose a branch of the body; of texts, since -1 and -2, and 1 and True have equal hashes."""
    values = [leaf for leaf, planned in zip(leaves, plan.leaves, strict=True) if planned.kind == "value"]
    return hash(tuple((type(value), repr(flag_in(value))) for value in values))


def _moves(leaves: list[Any], wanted: Request) -> list[tuple[int, Any]]:
    """The indices of the Arrays that must get another spec before a call, with that spec."""
    return [
        (index, wanted.specs[index])
        for index, (before, after) in enumerate(zip(leaves, wanted.leaves, strict=True))
        if type(before) is Array and after is not before
    ]
