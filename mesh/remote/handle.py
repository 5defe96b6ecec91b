"""`Remote`: the handle of an object that lives on a rank; calling its methods makes `Ref`s.

The object lives as long as the handle that `mesh.remote` returned: handles that were passed to calls refer to it but do
not keep it alive.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...kernels.callsite import public
from ...kernels.errors import MeshError
from ..array import Array
from .protocol import Name, NodeId
from .reference import Caller, Ref


class Remote:
    """An object on a rank of a mesh; `Mesh.remote` makes it.

    >>> class Words:
    ...     def __init__(self):
    ...         self.seen = []
    ...     def add(self, word):
    ...         self.seen.append(word)
    ...         return len(self.seen)
    >>> with Mesh({"data": 2}) as mesh:
    ...     words = mesh.remote(Words, rank=1)
    ...     refs = [words.add(word) for word in ("one", "two", "three")]
    ...     [ref.get() for ref in refs]
    [1, 2, 3]

    Its methods are called like those of the object, and return a `Ref` at once. The handle may be passed to other calls
    and to functions that run on ranks, and be captured by them: ranks call the object as the driver does. The object
    lives as long as the handle that `Mesh.remote` has returned.

    Args:
        all: only the library makes them.

    Raises:
        MeshError: what is called cannot be sent; AttributeError: the class has no such method.
    """

    def __init__(self, caller: Caller, owner: NodeId, name: Name, label: str, methods: frozenset[str]):
        self._caller, self._owner, self._named, self._label = caller, owner, name, label
        self._methods = methods

    @staticmethod
    def _changing(handle: Remote) -> list[Any]:
        """What a function that captures the handle is sent again for."""
        return [handle._owner]

    @public
    def __getattr__(self, name: str) -> Method:
        if name not in self._methods:
            raise AttributeError(
                f"{self._label} on rank {self._owner[0]} has no method {name!r} to call from here; it has: "
                f"{', '.join(dir(self)) or 'none'}; what is no method, a method of the class returns"
            ) from None
        return Method(self, name)

    @public
    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"{name!r} would be set on the handle, and not on the {self._label} on rank {self._owner[0]}; give the "
                "class a method that sets it"
            ) from None
        super().__setattr__(name, value)

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Ref:
        if "__call__" not in self._methods:
            raise TypeError(f"{self._label} objects are not callable; call one of their methods") from None
        return self._caller.invoke(self, "__call__", args, kwargs)

    def __eq__(self, other: object) -> bool:
        return self._named == other._named if isinstance(other, Remote) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._named)

    @public
    def __bool__(self) -> bool:
        if "__bool__" not in self._methods:
            return True
        problem = f"a handle was asked whether it is true, and whether the {self._label} is, only its rank knows"
        raise MeshError(problem, got=repr(self), remedy="ask a method of the class, or write `handle is not None`")

    def __dir__(self) -> list[str]:
        return sorted(self._methods - {"__bool__"})

    @public
    def __reduce__(self) -> Any:
        raise MeshError(
            "a Remote cannot be pickled: it stands for an object on a rank",
            got=repr(self),
            remedy="give it to a call, or let a function that runs on the ranks refer to it",
        )

    def __repr__(self) -> str:
        return f"Remote({self._label}, rank={self._owner[0]})"


class Method:
    """A method of a remote object, ready to be called."""

    __slots__ = ("_handle", "_named")

    def __init__(self, handle: Remote, name: str):
        self._handle, self._named = handle, name

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Ref:
        return self._handle._caller.invoke(self._handle, self._named, args, kwargs)

    def __repr__(self) -> str:
        return f"{self._handle!r}.{self._named}"


def methods_of(cls: type) -> frozenset[str]:
    """The methods that can be called remotely: public ones, `__call__`; and `__bool__` if not all objects are true."""
    names = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
    if any(inspect.isfunction(vars(base).get("__call__")) for base in cls.__mro__):
        names.append("__call__")
    if hasattr(cls, "__bool__") or hasattr(cls, "__len__"):
        names.append("__bool__")
    return frozenset(names)


def named(obj: Remote | Ref, caller: Caller) -> tuple:
    """The name under which a handle, or a Ref, is sent to a process of its mesh."""
    if obj._caller is not caller:
        raise MeshError(
            f"{obj!r} is of another mesh, or of one that was restarted",
            remedy="use it on the mesh that it was made on; give a result to another one as ref.get()",
        )
    if isinstance(obj, Ref):
        obj.future.unseen.see()  # an error is raised by what the Ref is given to
        return ("ref", obj.owner, obj.name)
    return ("remote", obj._owner, obj._named, obj._label, obj._methods)


def handle_of(name: tuple, caller: Caller) -> Remote:
    """The handle that a name stands for, in another process."""
    _, owner, call, label, methods = name
    return Remote(caller, owner, call, label, methods)


def plain_name_of(obj: Any, mesh: Callable[[], Any]) -> Any:
    """The mesh's name; None for what is no mesh. Refuses Arrays: a remote call's rank may not have made them yet."""
    if isinstance(obj, Array):
        raise MeshError(
            "an Array was given to a call of a remote object, which runs beside the calls that make Arrays",
            got=repr(obj),
            remedy="give it the value, array.full(), or fetch(tree)",
        )
    here = mesh()
    if here is None or type(obj) is not type(here):
        return None
    if obj.same_as(here):
        return ("mesh",)
    raise MeshError("a remote call was given another mesh than its own", remedy="pass what it needs of it")
