"""Every error that a user can meet, and the one form of its message.

A message says what was got, what was expected, on which rank and mesh, for which argument, and what to do
(`message` builds it). All of them are `SpmdError`, and the narrower ones also the built-in type that a user of
PyTorch would have caught: a wrong spec is a `ValueError`, a lost peer a `ConnectionError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class SpmdError(Exception):
    """Base of every error that this library raises on purpose; it is made of the parts of its text: see `message`.

    >>> SpecError("psum got an unknown axis", got="'model'", remedy="name a mesh axis")
    SpecError("psum got an unknown axis (got 'model'): name a mesh axis")
    >>> issubclass(SpecError, SpmdError)
    True
    """

    def __init__(
        self,
        problem: str = "",
        *args: Any,
        got: object = None,
        expected: object = None,
        where: str = "",
        remedy: str = "",
    ):
        # Further arguments are for classes of programs, as those of any exception.
        super().__init__(message(problem, got=got, expected=expected, where=where, remedy=remedy), *args)


class SpecError(SpmdError, ValueError):
    """A partition spec, a shape or an argument does not fit the mesh or the function."""


class MeshError(SpmdError, RuntimeError):
    """A mesh cannot be made, or is used where it cannot be."""


class RankOnly(MeshError, AttributeError):
    """The driver was asked for an attribute that only ranks have; `hasattr` and `inspect.getmembers` pass over it."""


class CollectiveMismatch(SpmdError, RuntimeError):
    """Ranks disagree on which collective comes next; `rank` says who has left the region early, if one has."""

    rank: int | None = None


class PeerLost(SpmdError, ConnectionError, RuntimeError):  # the latter as what torch's process groups raise
    """A rank died, or left, while others needed it; `rank` says which.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(PeerLost("rank 2 is gone", 2, remedy="call again"))).rank
    2
    """

    def __init__(self, problem: str, rank: int | None = None, **parts: Any):
        super().__init__(problem, **parts)
        self.rank = rank

    def __reduce__(self):
        return (type(self), (self.args[0], self.rank), vars(self))


class RemoteError(SpmdError, RuntimeError):
    """An exception on a rank that cannot be raised here as its own type."""


class Aborted(BaseException):
    """Raised inside a collective when another rank ended the region; no `Exception`, so that user code lets it pass."""


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception (from Python 3.11 on), without a method of its class, which may be a program's."""
    if hasattr(error, "add_note"):
        vars(error).setdefault("__notes__", []).append(text)


def message(problem: str, *, got: object = None, expected: object = None, where: str = "", remedy: str = "") -> str:
    """Compose an error text from its parts; parts left out are left out of the text.

    >>> message("psum got an unknown axis", got="'model'", expected="one of ('data',)", remedy="name a mesh axis")
    "psum got an unknown axis (expected one of ('data',), got 'model'): name a mesh axis"
    """
    details = []
    if expected is not None:
        details.append(f"expected {expected}")
    if got is not None:
        details.append(f"got {got}")
    text = problem
    if details:
        text += f" ({', '.join(details)})"
    if where:
        text += f" [{where}]"
    if remedy:
        text += f": {remedy}"
    return text


def dtype_name(dtype: object) -> str:
    """What messages and files call a dtype of torch: "float32"."""
    return str(dtype).removeprefix("torch.")


def kind_text(dtype: object, shape: Iterable[int]) -> str:
    """What messages say of a tensor: "float32[2, 3]"."""
    return f"{dtype_name(dtype)}{list(shape)}"


def no_attribute(obj: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """What an object raises that lacks an attribute, with what to write instead of that of torch's.

    Python asks for it, too, when a property has raised a `RankOnly`; that is then raised again.

    >>> no_attribute(3, "zero_grad", {"zero_grad": "leave it out"})
    AttributeError("spmd's int has no attribute 'zero_grad': leave it out")
    """
    if isinstance(own := getattr(type(obj), name, None), property):
        own.__get__(obj)
    remedy = f": {instead[name]}" if name in instead else ""
    return AttributeError(f"spmd's {type(obj).__name__} has no attribute {name!r}{remedy}", name=name, obj=obj)
