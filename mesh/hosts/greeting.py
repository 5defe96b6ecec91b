"""Mutual authentication of a connection's two ends: each proves, with a number used once, that it has the key.

The end that opens the connection sends a number; the other end sends another number, who it is, and a code of these;
then the first sends who it is, with its own code. Both blocking (`link`) and non-blocking ends (`remote.connections`)
use this. Invariant: until the other end has proved that it has the key, nothing is read but the greeting's fixed
number of bytes.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator

from ...kernels.network.authentication import CODE_BYTES, code, same
from .coded import NotOfThisMesh


@dataclasses.dataclass(frozen=True, slots=True)
class Greeted:
    """The outcome: who the other end says it is, and the keys of the two directions."""

    peer: bytes
    sending: bytes
    receiving: bytes


Greeting = Generator[tuple[bytes, int], bytes, Greeted]
"""A generator: yields (bytes to send, how many bytes to receive), takes those; raises `NotOfThisMesh`."""


def opening(key: bytes, own: bytes, theirs: int, is_wanted: Callable[[bytes], bool] = lambda peer: True) -> Greeting:
    """The greeting of the end that opens the connection.

    Args:
        own, theirs: who this end is, and in how many bytes the other end says who it is.
        is_wanted: whether that is the process that should be reached.
    """
    mine = secrets.token_bytes(CODE_BYTES)
    said = yield mine, CODE_BYTES + theirs + CODE_BYTES
    number, peer, proof = said[:CODE_BYTES], said[CODE_BYTES:-CODE_BYTES], said[-CODE_BYTES:]
    if not same(proof, code(key, b"answers", mine, number, peer)) or not is_wanted(peer):
        raise NotOfThisMesh("who listens there is not the process of this mesh that should")
    yield own + code(key, b"opens", mine, number, peer, own), 0
    to_who_opened, to_who_answered = _keys(key, mine, number)
    return Greeted(peer, to_who_answered, to_who_opened)


def answering(key: bytes, own: bytes, theirs: int) -> Greeting:
    """The greeting of the other end; see `opening`."""
    mine = secrets.token_bytes(CODE_BYTES)
    number = yield b"", CODE_BYTES
    said = yield mine + own + code(key, b"answers", number, mine, own), theirs + CODE_BYTES
    peer, proof = said[:theirs], said[theirs:]
    if not same(proof, code(key, b"opens", number, mine, own, peer)):
        raise NotOfThisMesh("a connection that is not of a process of this mesh")
    return Greeted(peer, *_keys(key, number, mine))


def _keys(key: bytes, opened: bytes, answered: bytes) -> tuple[bytes, bytes]:
    """The keys for data sent to the end that opened, and to the end that answered."""
    return code(key, b"to who opened", opened, answered), code(key, b"to who answered", opened, answered)
