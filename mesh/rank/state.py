"""What a driver's rank holds: its session, its values, the objects shipped to it, and its compiled calls."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from ...kernels.errors import MeshError, add_note
from .. import wire
from ..array import Array, meta
from ..hosts.copier import Copier
from ..pickling import classes, edited
from ..pickling.reloading import LoadedModules
from ..program import CompiledCall, PlannedCall, Program
from ..protocol import ALL, Spans, each_span
from ..region import Noted
from ..remote.handle import Remote, named
from ..remote.reference import Ref
from ..replication.reports import OutputMeta, encode
from ..spec import REPLICATED, P
from .held import HeldArrays
from .lasting_values import KnownLayout, LastingValues
from .local_values import LocalValues
from .session import RankSession

_REMEMBERED = 4096  # kinds of calls


class _Kept:
    """What is left of a call's results: None for a value that was freed, or never was here."""

    __slots__ = ("lasts", "live", "since", "specs", "tensors")

    def __init__(self, tensors: list[Any], specs: list[P], lasts: bool = True):
        self.tensors, self.specs, self.lasts, self.since = tensors, specs, lasts, time.monotonic()
        self.live = sum(tensor is not None for tensor in tensors)


class Values:
    """Tensors and their specs, by (number of the call that made them, index).

    Args:
        where: which rank this is, for messages.
        lasting: makes what is kept here available to a process that replaces this one.

    Attributes:
        copier: copies what is kept here to other hosts, if `Mesh(copies=)` asks for that.
    """

    def __init__(self, where: str, lasting: LastingValues | None = None):
        self._where, self._lasting = where, lasting
        self._calls: dict[int, _Kept] = {}
        self._cut_short: set[int] = set()  # calls whose values the GPU had not computed when a rank failed
        self.copier: Copier | None = None
        self._replaces = False

    def take_over(self) -> None:
        """Take over what the process before this one kept."""
        self._replaces = True
        if self._lasting is not None:
            self._calls = {call: _Kept(*kept) for call, kept in self._lasting.take_over().items()}

    def keep(
        self,
        call: int,
        tensors: list[torch.Tensor],
        specs: list[P],
        *,
        lasts: bool = True,
        known: KnownLayout | None = None,
    ) -> None:
        """Keep what a call has made.

        Args:
            lasts: it must outlive this process; else it can be had again.
            known: the tensors' memory layout, if it is known.
        """
        if tensors:
            if lasts and self._lasting is not None:
                self._lasting.keep(call, tensors, specs, known)
            self._calls[call] = _Kept(tensors, specs, lasts)
            if lasts and self.copier is not None:
                self.copier.keep(call, tensors, specs)

    def kept(self) -> list[tuple[int, list[Any], list[P]]]:
        """What is here and can't be had again, with the number of its call."""
        return [(call, list(kept.tensors), kept.specs) for call, kept in self._calls.items() if kept.lasts]

    def store(self, call: int, index: int, tensor: torch.Tensor, spec: P) -> None:
        """Keep one value of a call; this rank may not have the others."""
        kept = self._calls.setdefault(call, _Kept([], []))
        while len(kept.tensors) <= index:
            kept.tensors.append(None)
            kept.specs.append(REPLICATED)
        kept.live += kept.tensors[index] is None
        kept.tensors[index], kept.specs[index] = tensor, spec
        if self._lasting is not None:
            found = [tensor]
            self._lasting.lay_out(found)
            kept.tensors[index] = found[0]
            self._lasting.keep(call, kept.tensors, kept.specs)

    def keep_only(self, calls: Iterable[int]) -> None:
        """Forget the values of all other calls."""
        wanted = set(calls)
        for call in [call for call in self._calls if call not in wanted]:
            self._forget(call)

    def drop_since(self, moment: float) -> None:
        """Drop what was kept after a moment (`time.monotonic`), since the GPU was stopped before it was computed."""
        for call in [call for call, kept in self._calls.items() if kept.since > moment and kept.lasts]:
            self._cut_short.add(call)
            self._forget(call)

    def has(self, call: int, index: int) -> bool:
        kept = self._calls.get(call)
        return kept is not None and index < len(kept.tensors) and kept.tensors[index] is not None

    def gather(self, spans: Spans) -> tuple[list[Any], list[P]]:
        """The values that the spans name, in order."""
        tensors: list[Any] = []
        specs: list[P] = []
        for call, start, stop in each_span(spans):
            kept = self._calls.get(call)
            if not call:  # stands for none: for one that was donated, and that a function only refers to
                tensors.append(None)
                specs.append(REPLICATED)
                continue
            if kept is None:
                raise self._lost(call)
            found = kept.tensors[start:stop]
            if kept.live < len(kept.tensors) and any(tensor is None for tensor in found):
                raise self._lost(call)
            tensors += found
            specs += kept.specs[start:stop]
        return tensors, specs

    def _lost(self, call: int) -> MeshError:
        what = "with the rank that this one has replaced"
        if not self._replaces:  # Python tells weak references first, and calls `__del__` then
            what = "before an object's `__del__` used it: in a reference cycle Arrays go first"
        if call in self._cut_short:
            what = "as another rank failed before the GPUs had computed it"
        return MeshError(
            f"a value was lost {what}",
            got=f"the results of call {call}",
            where=self._where,
            remedy="run the call again, on values from before or from a checkpoint",
        )

    def free(self, spans: Spans) -> None:
        if self.copier is not None:
            self.copier.free(spans)
        shrunk = set[int]()
        dropped: list[Any] = []  # alive until the ledger is updated
        for call, start, stop in each_span(spans):
            kept = self._calls.get(call)
            if kept is None:
                continue
            found = kept.tensors if stop == ALL else kept.tensors[start:stop]
            kept.live -= sum(tensor is not None for tensor in found)
            if stop == ALL or not kept.live:
                self._forget(call)
                shrunk.discard(call)
                continue
            dropped += found
            kept.tensors[start:stop] = [None] * len(found)
            shrunk.add(call)
        for call in shrunk:
            if self._lasting is not None:
                self._lasting.shrink(call, self._calls[call].tensors, self._calls[call].specs)

    def _forget(self, call: int) -> None:
        if self._lasting is not None:
            self._lasting.forget(call)
        del self._calls[call]

    def __len__(self) -> int:
        return sum(kept.live for kept in self._calls.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for a shipped object that this rank could not read, mostly because a module is not on its path."""

    error: BaseException
    traceback: TracebackType | None


class RankState:
    """A rank of a driver, between two tasks.

    Args:
        own_path: where modules lie on this host, if it is not the driver's.
        who: this host's address, if there are several hosts, and the key of the mesh.
    """

    def __init__(self, session: RankSession, mesh: Any, *, own_path: Sequence[str] = (), who: tuple[str, bytes]):
        self.session, self.mesh, self._own_path, self.who = session, mesh, own_path, who
        self.values = Values(session.where(), session.lasting)
        self.modules = LoadedModules()
        self._shipped: dict[str, Any] = {}
        self._classes: dict[str, list[classes.Content]] = {}  # that came with them
        self._calls: dict[str, CompiledCall] = {}
        self._held: dict[str, HeldArrays] = {}  # by program
        self._holding = HeldArrays(session, mesh)  # of what is being read
        self._noted: dict[str, Noted] = {}  # by the first plan, also of functions that were dropped
        # By reader: its last batch, how it is described, and since which task that has not changed.
        self._described: dict[str, tuple[Any, list[OutputMeta], bytes, int]] = {}

    def keep(self, key: str, packet: wire.Packet) -> bool:
        """Keep a shipped object under its key; whether it could be read."""
        if key in self._shipped:
            self._calls.clear()  # calls compiled with the old object are out of date
            self._classes.pop(key, None)
        try:
            self._holding = HeldArrays(self.session, self.mesh)
            with classes.arriving() as arrived:
                self._shipped[key] = self.read(packet)
            if arrived:
                self._classes[key] = arrived
            if self._holding:
                self._held[key] = self._holding
            self.modules.notice()
        except BaseException as error:
            add_note(error, "[this rank was reading a function that was sent to it, with what it refers to]")
            self._shipped[key] = _Unreadable(error, error.__traceback__)
            return False
        return True

    def reload(self, names: Iterable[str]) -> list[str]:
        """Load modules again, see `LoadedModules`; what calls have noted was of the old code."""
        self._noted.clear()
        edited.keep({})
        return self.modules.reload(names)

    def set_path(self, path: Sequence[str]) -> None:
        """Look for modules where the driver does."""
        sys.path[:] = dict.fromkeys([*path, *self._own_path])

    def shipped(self, key: str) -> Any:
        """The object shipped under a key, with its classes as they were then; raises the error if reading it failed."""
        found = self._shipped[key]
        if isinstance(found, _Unreadable):
            raise found.error.with_traceback(found.traceback)  # the same traceback, however often it is raised
        for content in self._classes.get(key, ()):
            content.take_over()
        return found

    def compiled(self, key: str) -> CompiledCall:
        call = self._calls.get(key)
        if call is not None and not self._classes:
            return call
        planned: PlannedCall = self.shipped(key)
        tree = self.shipped(planned.tree)
        program: Program = self.shipped(planned.program)
        if call is None:
            noted = self._noted.get(planned.first or key)
            if noted is None or planned.first is None:  # of a function that is there no more, one thing is remembered
                noted = self._noted[planned.first or key] = Noted(differing={} if noted is None else noted.differing)
            if len(self._noted) > _REMEMBERED:
                self._noted.pop(next(iter(self._noted)))
            held = self._held.get(planned.program)
            call = CompiledCall(self.session, self.mesh, program, tree, planned.plan, noted, held)
            self._calls[key] = call
        return call

    def description(self, reader: str, treedef: Any, metas: list[OutputMeta], task: int) -> tuple[bytes, int]:
        """The description of a batch that a reader has read in a task, and since which task it has been the same.

        Mostly it is the same object as for the batch before.
        """
        known = self._described.get(reader)
        if known is None or known[0] != treedef or any(about.spec is None for about in metas) or known[1] != metas:
            known = self._described[reader] = treedef, metas, encode(treedef, metas), task
        return known[2:]

    def free(self, values: tuple[int, ...], keys: tuple[str, ...]) -> None:
        """Forget values and shipped objects that nothing in the driver refers to any more."""
        if values:
            self.values.free(values)
        for key in keys:
            self._shipped.pop(key, None)
            self._classes.pop(key, None)
            self._calls.pop(key, None)
            self._held.pop(key, None)
            if (noted := self._noted.get(key)) is not None and not any(map(any, noted.differing.values())):
                del self._noted[key]  # else the function may be made anew
            self._described.pop(key, None)

    def forget_last_results(self) -> None:
        """Make every call describe its next results in full: the driver may not have received the last description."""
        self._described.clear()
        for call in self._calls.values():
            call.forget()

    # -- meshes and values travel as names ----------------------------------------------------------------------------

    def read(self, packet: wire.Packet, memory: memoryview | None = None) -> Any:
        """The content of a packet.

        Args:
            memory: where its tensors are, if they don't travel with it.
        """
        return wire.loads(packet, self._object_of, memory)

    def _object_of(self, name: Any) -> Any:
        if name[0] == "mesh":
            return self.mesh
        if name[0] in ("remote", "ref"):
            return self.session.node.caller.object_of(name)
        if name[0] == "held":
            _, number, shape, call, index = name
            # One that is not here yet has a value when the program is called.
            which = (call, index, index + 1) if self.values.has(call, index) else (0, 0, 0)
            (tensor,), (spec,) = self.values.gather(which)
            return self._holding.array(number, shape, tensor, spec)
        _, call, index, shape = name
        (tensor,), (spec,) = self.values.gather((call, index, index + 1))
        about = meta(tuple(shape), tensor.dtype, spec)
        (array,) = LocalValues(self.session, [tensor], [about], name=(call, index)).arrays(self.mesh)
        return array

    def name_of(self, obj: Any) -> Any:
        if isinstance(obj, Remote | Ref):
            return named(obj, self.session.node.caller)
        if isinstance(obj, Array):
            name = getattr(obj._source, "name", None)
            if name is None:
                raise MeshError(
                    "an Array made on a rank cannot be returned from mesh.run", remedy="return its local tensor"
                )
            return ("array", *name)
        return ("mesh",) if isinstance(obj, type(self.mesh)) else None
