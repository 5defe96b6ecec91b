"""Arguments and results of remote calls, pickled, with names for what exists on one side only."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from ...kernels.errors import MeshError
from .. import trees, wire
from ..ambient import ambient
from ..pickling.sendable import packed
from .answers import refuse_gradients
from .handle import Remote, handle_of, named
from .reference import Ref

# Types that any pickle can take; a call with nothing else needs no search for names and tensors.
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


class Contents:
    """Pickles for the other processes of a mesh, and reads what they have pickled.

    Args:
        caller: whose handles and Refs travel as names.
        describe: the mesh in a line, for messages.
        name_of: the name of anything else that only this process has; None for others.
        object_of: what such a name of another process stands for here.
    """

    def __init__(
        self,
        caller: Any,
        describe: Callable[[], str],
        name_of: Callable[[Any], Any],
        object_of: Callable[[Any], Any],
    ):
        self._caller, self._describe, self._name_of, self._object_of = caller, describe, name_of, object_of

    def of_call(self, args: tuple, kwargs: dict[str, Any], label: str) -> tuple[wire.Packet, tuple[Ref, ...]]:
        """The content of a call (the settings around it, and its arguments), and the Refs that are in it."""
        settings = ambient()
        if settings is None and _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
            return wire.Packet(pickle.dumps((None, args, kwargs), pickle.HIGHEST_PROTOCOL)), ()
        refuse_gradients(trees.flatten((args, kwargs))[0], label)
        return self.dumps((settings, args, kwargs), f"a call of {label}")

    def of_result(self, result: Any, label: str) -> tuple[wire.Packet, tuple[Ref, ...]]:
        if type(result) in _PLAIN:
            return wire.Packet(pickle.dumps(result, pickle.HIGHEST_PROTOCOL)), ()
        return self.dumps(result, f"the result of {label}")

    def dumps(self, obj: Any, what: str) -> tuple[wire.Packet, tuple[Ref, ...]]:
        """Pickle an object; returns the packet and the Refs in it.

        Raises:
            MeshError: `what` can't be sent.
        """
        refs: list[Ref] = []

        def name_of(one: Any) -> Any:
            if isinstance(one, Ref):
                named(one, self._caller)
                refs.append(one)
                return ("argument", len(refs) - 1)
            return named(one, self._caller) if isinstance(one, Remote) else self._name_of(one)

        try:
            return packed(obj, name_of), tuple(refs)
        except wire.Unsendable as error:
            raise MeshError(
                f"{what} cannot be sent",
                got=str(error),
                where=self._describe(),
                remedy="pass what it is made of, or make it in the object's own methods",
            ) from None

    def loads(self, packet: wire.Packet, arguments: Callable[[int], Any] | None = None) -> Any:
        """Read what another process has pickled; `arguments` gives the results of the Refs in it."""

        def object_of(name: Any) -> Any:
            if name[0] == "argument":
                assert arguments is not None
                return arguments(name[1])
            return handle_of(name, self._caller) if name[0] == "remote" else self._object_of(name)

        return wire.loads(packet, object_of)
