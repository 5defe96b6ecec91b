"""Calls of one signature, as the driver makes them.

The driver sends the call, and does not wait for it once it knows what kind of results come back. Ranks describe their
results if these may have changed in kind; mostly they answer that nothing has changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from ...kernels.errors import SpecError
from .. import protocol, trees
from ..array import Meta
from ..program import PlannedCall, Program, describe_path
from ..replication import agreement
from ..replication.first_calls import Kind
from ..replication.reports import decode_all, what_was_told
from ..replication.values import Check, check_of
from ..request import Settled, Span, donate, passable
from ..run_state import Call
from . import sending
from .functions import Shipped
from .mesh_view import MeshView
from .pending import Make, Outcome, Pure, Task
from .session import DriverSession
from .values import CallValues

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})  # what any pickle can take to the ranks


class DriverCall:
    """A program with arguments of one kind on a driver's mesh; call it with the leaves.

    Args:
        shipped: the program, as shipped to the ranks.
        values: a hash of the numbers and names among the leaves, which may be flags.
        kind: of the call.
        checked: enough calls of this kind were first calls, when the function captured other data.
    """

    def __init__(
        self,
        mesh: MeshView,
        driver: DriverSession,
        program: Program,
        shipped: Shipped,
        settled: Settled,
        values: int,
        kind: Kind,
        *,
        checked: bool,
    ):
        self._layout, self._driver, self._name, self._where = mesh.layout, driver, program.name, mesh.describe()
        self.shipped, self.settled, plan = shipped, settled, settled.plan
        self._tree = driver.shipped.ship_treedef(settled.treedef)
        first = None if kind.first is None else kind.first.key
        self._planned = driver.shipped.ship(PlannedCall(shipped.key, self._tree.key, plan, first))
        kind.first = kind.first or self._planned
        # After a resize, types need not be followed again unless an axis had size 1 before and has more now.
        # Virtual shards differ along theirs in any case.
        batch = plan.batch.axis if plan.batch.in_shards else None
        self._axes = frozenset(name for name, size in mesh.layout.sizes if size > 1 or name == batch)
        self._follows = self._planned.key, values
        followed = driver.shipped.followed.get(self._follows)
        self._followed, self._again = self._axes <= (followed or frozenset()), 0 if followed is None else 2
        self.kind, self._earlier = kind, kind.times if checked else 0
        if checked:
            self._followed, self._again = True, 2
        # The ranks' descriptions of the results, and what was put together from them. One attribute, since several
        # threads may wait for calls.
        self._found: tuple[list[bytes], agreement.Assembled] | None = None
        self._count = self._earlier
        # What the last call that was waited for gave, if only Arrays: then later ones are not waited for.
        self._expected: agreement.Assembled | None = None

    def for_other_values(self, *, flags: bool) -> DriverCall:
        """The same for other numbers and names, with which results of another structure may come back.

        Args:
            flags: not only integers are other ones; then the results are compared by value.
        """
        other = copy.copy(self)
        other._expected, other._followed, other._again = None, True, 1
        other._count = self._earlier if flags else self._count
        return other

    def is_of(self, shipped: Shipped | None) -> bool:
        """Whether it is of this program, and classes of its arguments are as the ranks have them."""
        return self.shipped is shipped and self._tree.has_classes_as_before

    def accepts(self, mesh: Any, leaves: list[Any], spans: Sequence[Span]) -> bool:
        """Whether all Arrays among the arguments can be passed, and the mesh still has the layout that this is for."""
        return self._layout is mesh.layout and passable(mesh, leaves, spans)

    def __call__(
        self, leaves: list[Any], spans: Sequence[Span], given: Sequence[Span], key: tuple, this: Call, *, check: str
    ) -> Any:
        driver = self._driver
        self._count += 1
        first = self._found is None and not self._followed
        looked = check_of(check, self._count, self._layout.size, first=first)
        asked = max(looked, Check.SCALARS)  # numbers come with the answer, whether or not they are compared
        waits = self._expected is None or check == "always"
        names, values = self._named(leaves, spans)
        plain = not values or _PLAIN.issuperset(map(type, values))
        results = driver.new_values()
        make = functools.partial(
            protocol.CallProgram,
            call=self._planned.key,
            out=results.number,
            key=key,
            check=int(asked),
            again=0 if looked is Check.TYPES else self._again,
            arrays=names,
            values=tuple(values) if plain else None,
            total=self.settled.total,
        )
        task = driver.submit(
            functools.partial(self._donating, given, make) if given else make,
            None if plain else lambda: sending.content(driver, values, lambda: self._parts(leaves)),
            region=True,
            layout=self._layout,
            pure=Pure(self._name, functools.partial(self._lacking, spans), self, tuple(leaves), (results,)),
            last_results=self._planned.last_results,
            compare=None if waits or not looked else functools.partial(self._compare, looked),
            reported=waits,
        )
        this.started = task
        results.tells_numbers = asked is Check.SCALARS
        expected = self._expected
        if expected is not None and not waits:
            arrays = results.arrays(task, expected.metas, functools.partial(self._as_expected, task, expected, looked))
            driver.in_flight(task)
            return trees.unflatten(expected.treedef, arrays)
        found = self._finish(task, looked)
        if looked is Check.TYPES or not self._again:
            driver.shipped.note_followed(self._follows, self._axes if looked is Check.TYPES else frozenset())
        self._again = 2
        self._expected = found if found.arrays_only else None
        prints = task.prints[task.ranks[0]]
        prints, told = what_was_told(prints) if found.told else (prints, ())
        results.take_numbers(prints)
        return found.tree(results.arrays(None, found.metas), told)

    def _donating(self, given: Sequence[Span], make: Make, *about: Any) -> protocol.Task:
        """The message, just before it is sent: a call that could not be sent has taken nothing."""
        donate(given, self.settled.plan, self._name)
        return make(*about)

    def donated(self) -> list[str]:
        """The arguments that it may overwrite, for messages."""
        places = zip(trees.places(self.settled.treedef), self.settled.plan.leaves, strict=True)
        names = [path[: path.index("]", 3) + 1] for path, leaf in places if leaf.donated]
        return [describe_path(name) for name in dict.fromkeys(names)]

    def _named(self, leaves: list[Any], spans: Sequence[Span]) -> tuple[protocol.Spans, list[Any]]:
        """The names of the leaves on the mesh, and the other leaves."""
        names: list[int] = []
        others: list[Any] = []
        for span in spans:
            if span.source is None:
                if span.at < self.settled.treedef.num_leaves:
                    others.append(leaves[span.at])
                else:  # a captured Array that was donated
                    names += (0, 0, 0)
                continue
            span.source.check(self._driver)
            names += (span.source.number, span.start, span.stop)
        return tuple(names), others

    def _parts(self, leaves: list[Any]) -> list[tuple[str, Any]]:
        return [(self.path_of(index), leaf) for index, leaf in enumerate(leaves)]

    def path_of(self, index: int) -> str:
        """What a leaf of the arguments is called."""
        if index >= self.settled.treedef.num_leaves:
            return f"an Array that {self._name} captures"
        return f"{describe_path(trees.places(self.settled.treedef)[index])} of {self._name}"

    def _lacking(self, spans: Sequence[Span]) -> list[tuple[CallValues, int, str]]:
        """The arguments that some rank lacks."""
        return [
            (span.source, index, self.path_of(span.at + index - span.start))
            for span in spans
            if span.source is not None and span.source.missing
            for index in range(span.start, span.stop)
            if index in span.source.missing
        ]

    def _finish(self, task: Task, looked: Check) -> agreement.Assembled:
        """Wait for a call, and put its results together."""
        try:
            encoded, found = self._driver.wait(task).values(), self._found
            if found is None or encoded != found[0] or len(set(task.prints.values())) > 1:
                found = self._found = encoded, self._assembled(task, looked)
            return found[1]
        except BaseException:
            self._driver.run_state.note_failure(task)
            raise

    def _assembled(self, task: Task, looked: Check) -> agreement.Assembled:
        return agreement.assemble(
            self._layout,
            decode_all(task.values()),
            name=self._name,
            where=self._where,
            prints=[task.prints[rank] for rank in task.ranks],
            check=looked,
        )

    def _compare(self, looked: Check, task: Task) -> Outcome:
        """What is wrong with a call that nobody waits for, whose ranks sent different prints."""
        try:
            self._assembled(task, looked)
        except SpecError as error:
            found = error
            return lambda: found
        return None

    def _as_expected(self, task: Task, expected: agreement.Assembled, looked: Check) -> Sequence[Meta]:
        """Shapes, dtypes and specs of a call's results, which must have the structure that Arrays were made for."""
        found = self._finish(task, looked)
        if found.treedef != expected.treedef or not found.arrays_only:
            self._driver.run_state.note_failure(task)
            got, wanted = str(found.treedef), str(expected.treedef)
            if found.treedef == expected.treedef:
                index, value = next((n, leaf.value) for n, leaf in enumerate(found.leaves) if leaf.meta is None)
                got, wanted = f"{value!r:.60} for result {agreement.path_in(found.treedef, index)}", "a tensor"
            raise SpecError(
                f"{self._name} returned another structure than before for the same kind of arguments",
                got=got,
                expected=wanted,
                where=self._where,
                remedy="return the same tree of tensors, or a number, which makes calls synchronous",
            )
        return found.metas
