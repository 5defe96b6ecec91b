"""Who is at the other end of a connection: each end proves, with a key and a number used once, that it has the key.

Who opens says a number; who answers another one, who it is, and a code of these; then the first says who it is, with a
code of its own. The same bytes whether an end waits for them (`link`) or not (`remote.connections`). Invariant: nothing
is read but so many bytes as the greeting has, until the other end has proved that it has the key.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator

from ...kernels.network.authentication import CODE_BYTES, code, same
from .coded import NotOfThisMesh


@dataclasses.dataclass(frozen=True, slots=True)
class Greeted:
    """What an end knows then: who is at the other, as it says, and the keys of the two directions."""

    peer: bytes
    sending: bytes
    receiving: bytes


Greeting = Generator[tuple[bytes, int], bytes, Greeted]
"""Gives what to send, and how many bytes to wait for then, which it takes; raises `NotOfThisMesh`."""


def opening(key: bytes, own: bytes, theirs: int, is_wanted: Callable[[bytes], bool] = lambda peer: True) -> Greeting:
    """For who opens.

    Args:
        own, theirs: who this is, and in how many bytes the other end says who it is.
        is_wanted: whether that is who was to be reached.
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
    """For who is connected to; see `opening`."""
    mine = secrets.token_bytes(CODE_BYTES)
    number = yield b"", CODE_BYTES
    said = yield mine + own + code(key, b"answers", number, mine, own), theirs + CODE_BYTES
    peer, proof = said[:theirs], said[theirs:]
    if not same(proof, code(key, b"opens", number, mine, own, peer)):
        raise NotOfThisMesh("a connection that is not of a process of this mesh")
    return Greeted(peer, *_keys(key, number, mine))


def _keys(key: bytes, opened: bytes, answered: bytes) -> tuple[bytes, bytes]:
    """Of what is sent to who opened, and to who answered."""
    return code(key, b"to who opened", opened, answered), code(key, b"to who answered", opened, answered)
