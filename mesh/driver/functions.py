"""Objects that are shipped to all ranks: sent once for each content, forgotten when nothing here needs them.

Invariant: while a `Shipped` lives, its object is on every rank, also on a rank that replaces a dead one; a function
keeps its `Shipped` while it lives and does not change.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ...kernels.callsite import warn
from ...kernels.errors import MeshError, add_note
from ...kernels.interrupts import uninterrupted
from .. import protocol, trees, wire
from ..array import Array
from ..pickling import beside
from ..pickling.edited import DriverModules
from ..pickling.settings import checked
from ..pickling.unpicklable import unpicklable_part
from . import snapshot
from .session_view import Session

LARGE = 100 << 20  # bytes; of a larger function, with what travels with it, there is a warning
FOLLOWED = 4096  # calls of which it is known


class Shipped:
    """An object that the ranks know by `key`.

    Attributes:
        last_results: for the plan of a call: rank -> its last description of the results; shared by all with this key.
        kind: of a function, see `Snapshot`.
        before: what the function was, if it was sent for a change of what it refers to.
        classes: of a structure, those of its nodes that were sent with it, and what they were.
    """

    __slots__ = ("__weakref__", "before", "classes", "key", "kind", "last_results")

    def __init__(self, key: str, last_results: dict[int, bytes]):
        self.key, self.last_results, self.kind = key, last_results, 0
        self.before: snapshot.Snapshot | None = None
        self.classes: tuple[list[type], snapshot.Snapshot] | None = None

    @property
    def has_classes_as_before(self) -> bool:
        return self.classes is None or self.classes[1].arrays(self.classes[0]) is not None

    def why(self, function: Any) -> str:
        """Why a function was sent again, for messages; empty if it was not, or what has changed has no name."""
        changed = "" if self.before is None else self.before.changed_part(function)
        return changed and f"it captures {changed}, which changes"


_Functions = weakref.WeakKeyDictionary[Any, tuple[snapshot.Snapshot, Shipped]]
# What to do about one that can't be pickled.
_OF_A_FUNCTION = (
    "pass what it needs as an argument, make it inside the function or in a module that it imports, or keep it on a "
    "rank with mesh.remote"
)
_OF_AN_OBJECT = (
    "make it in a method, when it is first needed, and leave it out in __getstate__; or make it in a module that it "
    "imports"
)


class ShippedObjects:
    """What was sent to the ranks of one mesh.

    Attributes:
        followed: the key of a call's plan, and a hash of its values -> axes along which its body was followed
            (`Check.TYPES`), once such a call has ended well.
    """

    def __init__(self, session: Session, whole: tuple[type, ...]):
        self._session, self._whole = session, whole
        self._packets: dict[str, wire.Packet] = {}
        self._uses: Counter[str] = Counter()
        self._last_results: dict[str, dict[int, bytes]] = {}
        self._unused: deque[str] = deque()
        self._naming_values: dict[str, Collection[int]] = {}  # with the calls whose values they are
        self._unread: set[str] = set()  # by some rank, mostly because files or a module are missing there: sent again
        self._treedefs: weakref.WeakValueDictionary[Any, Shipped] = weakref.WeakValueDictionary()
        # By whether values are passed with each call; an `@spmd` function may also be run by `mesh.run`.
        self._functions: tuple[_Functions, _Functions] = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        self._path = list(sys.path)
        self._sources: dict[str, list[str]] = {}
        self.followed: dict[tuple[str, int], frozenset[str]] = {}
        self._to_reload: dict[str, None] = {}  # modules that have failed to load again on ranks
        self._edited: dict[str, list[str]] = {}  # modules, as the ranks were told
        self.modules = DriverModules()
        self.modules.notice()

    def ship(
        self,
        obj: Any,
        function: Any = None,
        held: Sequence[Array] = (),
        names: list[Any] | None = None,
        *,
        in_step: bool = False,
    ) -> Shipped:
        """Send an object to all ranks unless they have it.

        Args:
            function: what it was made from, if anything.
            held: Arrays in it whose values are passed with each call.
            names: a list to which the names used for what is in it are added.
            in_step: see `wire.dumps`.
        """
        names = [] if names is None else names
        packet = self._session.dumps(obj, names, held=held, in_step=in_step)
        if any(name[0] == "ref" for name in names):
            packet.close()
            raise MeshError(
                f"{getattr(function, '__qualname__', 'a function')} refers to a Ref, the result of one remote call",
                where=self._session.describe(),
                remedy="pass it as an argument, where it arrives as the result",
            )
        key = wire.content_hash(packet)
        with self._session.lock:
            if not self.has(key):
                self._session.ready()
                if packet.nbytes > LARGE and (what := beside.largest_part(function)):
                    warn(f"{what} is sent to every rank: put() it once and pass it, or read it on the ranks")
            with uninterrupted():  # what is noted here as sent must have been sent
                if self.has(key):
                    packet.close()
                else:
                    self._drop(key)
                    self._packets[key] = packet
                    if packet.values:
                        self._naming_values[key] = packet.values
                    if self._edited != (edited := self.modules.edited()):  # of one it may be the first use there
                        self._edited = edited
                        self._session.tell(protocol.SetModules(edited))
                    self._session.tell(protocol.Ship(key), packet)
                self._uses[key] += 1
                shipped = Shipped(key, self._last_results.setdefault(key, {}))
                weakref.finalize(shipped, self._unused.append, key).atexit = False
        return shipped

    def has(self, key: str) -> bool:
        """Whether all ranks have an object, and could read it."""
        return key in self._packets and key not in self._unread

    def note_unread(self, key: str) -> None:
        """Have an object sent again when it is needed next, since a rank could not read it."""
        self._unread.add(key)

    def ship_function(self, function: Any) -> Shipped:
        """Ship a function, pickling it again only if what it refers to has changed."""
        self.follow_reloads()
        return self.ship_program(function, function, function, holds=False)[0]

    def ship_program(self, function: Any, obj: Any, holder: Any, *, holds: bool = True) -> tuple[Shipped, list[Array]]:
        """As `ship_function`, for a program `obj` made from a function.

        Args:
            holder: lives as long as the program is worth keeping on the ranks.
            holds: whether the values of the Arrays that it captures are passed with each call; these are returned, too.
        """
        try:
            known = self._functions[holds].get(holder)
        except TypeError:  # it can't be hashed, or not be referred to weakly
            known, holder = None, None
        if known is not None and self.has(known[1].key):
            held = known[0].arrays(function)
            mesh = self._session.mesh if held else None
            if held is not None and all(array.mesh is mesh for array in held):
                return known[1], held
        found = snapshot.Snapshot(function, self._whole, exchanges=holds)
        held = found.arrays(function)
        names: list[Any] = []
        self._prepare(function)
        try:
            shipped = self.ship(checked(obj, found.settings), function, held or (), names, in_step=holds)
        except wire.Unsendable as error:
            part = unpicklable_part(function, self._whole, in_step=holds)
            name, remedy = getattr(function, "__qualname__", None), _OF_A_FUNCTION
            if not isinstance(function, types.FunctionType | types.MethodType | functools.partial):
                name, remedy = name or f"an object of {type(function).__qualname__}", _OF_AN_OBJECT
            raise MeshError(
                f"{name or function} cannot be sent to the ranks, because {part or f'it cannot be pickled: {error}'}",
                where=self._session.describe(),
                remedy=remedy,
            ) from None
        shipped.kind, shipped.before = found.kind, known and known[0]
        sent = [name[1] for name in names if name[0] == "held"]
        if held is None or not found.fix(function, held, sent):  # it is for this call only
            return shipped, held or []
        if holder is not None:
            self._functions[holds][holder] = (found, shipped)
        return shipped, held

    def ship_treedef(self, treedef: Any) -> Shipped:
        shipped = self._treedefs.get(treedef)
        if shipped is None or not self.has(shipped.key) or not shipped.has_classes_as_before:
            packed = trees.Packed(treedef)
            found = (packed.by_value, snapshot.Snapshot(packed.by_value, self._whole)) if packed.by_value else None
            shipped = self._treedefs[treedef] = self.ship(packed)
            shipped.classes = found
        return shipped

    def note_followed(self, call: tuple[str, int], axes: frozenset[str]) -> None:
        """Note along which axes the body of a call was followed; of old calls that is forgotten."""
        self.followed[call] = axes
        if len(self.followed) > FOLLOWED:
            self.followed.pop(next(iter(self.followed)), None)

    def _prepare(self, function: Any) -> None:
        """Send the ranks what they need besides the function: the module path, and source lines for tracebacks."""
        self.modules.notice()
        sources = beside.typed_sources(function)
        self._session.ready()
        with self._session.lock, uninterrupted():
            if self._path != sys.path:
                self._path = list(sys.path)
                self._session.tell(protocol.SetPath(tuple(self._path)))
            if any(self._sources.get(name) != lines for name, lines in sources.items()):
                self._sources.update(sources)
                self._session.tell(protocol.SetSources(sources))

    def unused(self) -> tuple[str, ...]:
        """The keys of objects that nothing here needs any more, for the ranks to forget."""
        if not self._unused:
            return ()
        keys = []
        while self._unused:
            key = self._unused.popleft()
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key], self._last_results[key]
                keys.append(key)
                self._drop(key)
        return tuple(keys)

    def _drop(self, key: str) -> None:
        self._naming_values.pop(key, None)
        self._unread.discard(key)
        packet = self._packets.pop(key, None)
        if packet is not None:
            packet.close()

    def for_newcomer(self, known: Collection[str] = ()) -> Iterator[tuple[protocol.Message, wire.Packet | None]]:
        """What to send to a new rank that has the keys `known`, except objects that name values."""
        yield protocol.SetPath(tuple(self._path)), None
        yield protocol.SetSources(self._sources), None
        if edited := self.modules.edited():
            yield protocol.SetModules(edited), None
        for key, packet in self._packets.items():
            if key not in self._naming_values and key not in known:
                yield protocol.Ship(key), packet

    def naming_values(self) -> Iterator[tuple[protocol.Message, wire.Packet | None]]:
        """The objects that name values, to be sent once the new rank has these values."""
        for key in self._naming_values:
            yield protocol.Ship(key), self._packets[key]

    def tell_naming_values(self) -> None:
        """Send all ranks the objects that name values: they are new, and have these values."""
        with self._session.lock:
            for message, packet in self.naming_values():
                self._session.tell(message, packet)

    def naming(self, calls: Collection[int]) -> set[str]:
        """The keys of the objects that name values of these calls."""
        return {key for key, named in self._naming_values.items() if not set(named).isdisjoint(calls)}

    def drop_naming_values(self, calls: Collection[int] | None = None) -> None:
        """Have objects that name values pickled and sent to all ranks again when they are needed, after the values.

        Args:
            calls: only those that name values of these.
        """
        for key in tuple(self._naming_values) if calls is None else self.naming(calls):
            self._drop(key)

    def forget_last_results(self) -> None:
        """Forget the ranks' descriptions of results, since there are other ranks now."""
        for last_results in self._last_results.values():
            last_results.clear()

    def keys(self) -> set[str]:
        """The keys of objects that the ranks should have, except those that name values."""
        return set(self._packets) - self._naming_values.keys()

    def follow_reloads(self) -> None:
        """Have the ranks reload what the program itself has loaded again, since the last call.

        If that fails there, each call tries it again: the ranks would go on with code that the driver no longer has.
        """
        names = self.modules.loaded_again()
        if self._to_reload:  # but for what the program has given up
            self._to_reload = {name: None for name in self._to_reload if name in sys.modules}
        if names or self._to_reload:
            self.reload_there(names)

    def reload_there(self, names: tuple[str, ...]) -> list[str]:
        """Have the ranks reload modules that have changed, and those named; returns the names of those reloaded."""
        session = self._session
        self._to_reload |= dict.fromkeys(names)
        wanted = tuple(self._to_reload)
        make = functools.partial(protocol.ReloadModules, names=wanted)
        try:
            lists = session.wait(session.submit(make, region=True, reported=True)).values()
        except Exception as error:
            what = ", ".join(wanted) or "what has changed"
            way = "mend the file, or del sys.modules[name] here if it is used no more"
            add_note(error, f"[the ranks could not load {what} again, and each call tries it until they can: {way}]")
            raise
        with session.lock, uninterrupted():
            for name in wanted:
                self._to_reload.pop(name, None)
            self._read_anew()
            session.calls.clear()
        return [name for one in lists for name in one]

    def pickle_again(self) -> None:
        """Pickle functions again before their next calls: what went by its name may be what a module had before."""
        for functions in self._functions:
            functions.clear()

    def _read_anew(self) -> None:
        """Send everything again, since after a reload of modules names mean something else on the ranks."""
        self.drop_naming_values()
        self.followed.clear()  # the same call has other code now
        for what, packet in self.for_newcomer():
            self._session.tell(what, packet)

    def close(self) -> None:
        for key in tuple(self._packets):
            self._drop(key)
