"""Messages between processes as bytes: frozen dataclasses whose fields are of built-in types.

Invariant: any process that has the same classes, in the same order, can read them. Only data that is authenticated, or
that comes over sockets of the same host's kernel, may be decoded.
"""

from __future__ import annotations

import dataclasses
import operator
import pickle
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Base class of messages between processes."""


class Codec:
    """Messages of some classes as bytes: a pickle of the class's number and the fields.

    >>> @dataclasses.dataclass(frozen=True, slots=True)
    ... class Exited(Message):
    ...     pid: int
    ...     status: int
    >>> codec = Codec(Exited)
    >>> codec.decode(codec.encode(Exited(3, -9)))
    Exited(pid=3, status=-9)
    """

    def __init__(self, *classes: type[Message]):
        self._classes: tuple[Any, ...] = classes
        # By class: its number, and a function that gives a message's fields.
        self._codes = {cls: (code, _fields_of(cls)) for code, cls in enumerate(classes)}

    def encode(self, message: Message) -> bytes:
        code, fields = self._codes[type(message)]
        return pickle.dumps((code, *fields(message)), pickle.HIGHEST_PROTOCOL)

    def decode(self, data: bytes) -> Any:
        code, *fields = pickle.loads(data)
        return self._classes[code](*fields)


def _fields_of(cls: type) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    if len(names) > 1:
        return operator.attrgetter(*names)
    return (lambda message: (getattr(message, names[0]),)) if names else (lambda message: ())
