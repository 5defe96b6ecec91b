"""Authentication of data from sockets and stores: data that does not prove to be this job's is never parsed.

Each job has one key, from which each use derives its own (HMAC-SHA256 of the standard library). Invariant: nothing from
outside is parsed before its code was compared, and data whose code does not fit counts as if it had never come. A job
without a secret has the empty key, whose codes anyone can compute: see docs/security.md for what is open then.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import struct
import time
from typing import Any

import torch.distributed as dist

from ..errors import message

CODE_BYTES = 32
_COUNT = struct.Struct("<Q")
_PAUSE_SECONDS = 0.01  # between two looks at a value that is not the job's own


def code(key: bytes, *parts: bytes) -> bytes:
    """The authentication code of some byte strings; moving a boundary between them changes it. Also derives keys."""
    return hmac.digest(key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), hashlib.sha256)


def same(one: bytes | memoryview, other: bytes | memoryview) -> bool:
    """Whether two codes are equal, compared in constant time."""
    return hmac.compare_digest(one, other)


def seal(key: bytes, name: str, value: bytes) -> bytes:
    """A value behind its code, which is valid for this name only."""
    return code(key, name.encode(), value) + value


def unseal(key: bytes, name: str, data: bytes) -> bytes | None:
    """The value that `seal` was given, or None if `data` was not sealed with this key for this name."""
    value = data[CODE_BYTES:]
    return value if same(data[:CODE_BYTES], code(key, name.encode(), value)) else None


class MessageCodes:
    """The codes of one connection's messages, in one direction; each is valid only at its place in their order.

    Args:
        key: the connection's own key.
    """

    def __init__(self, key: bytes):
        self._heads = hashlib.blake2b(key=code(key, b"heads"), digest_size=CODE_BYTES)
        self._bodies = code(key, b"bodies")
        self._count = 0

    def of_next(self, content: bytes | memoryview) -> bytes:
        """The code of the next message's head, and of its body if that is short.

        Keyed BLAKE2b (RFC 7693): it takes half a microsecond for so little, and does not let other threads take over.
        """
        self._count += 1
        made = self._heads.copy()
        made.update(_COUNT.pack(self._count))
        made.update(content)
        return made.digest()

    def of_body(self) -> hmac.HMAC:
        """The code of that message's body, if it is long; the body is still to be added to it."""
        return hmac.new(self._bodies, _COUNT.pack(self._count), hashlib.sha256)


class AuthenticatedStore(dist.Store):
    """A store that ignores values which the job has not written.

    Args:
        store: any `torch.distributed` store.
        key: derived for this job and this part of the store, so that values of other parts are not accepted here.
    """

    def __init__(self, store: dist.Store, key: bytes, timeout: datetime.timedelta):
        super().__init__()
        self.underlying_store, self.key = store, key
        self.set_timeout(timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self.underlying_store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.underlying_store.set(key, seal(self.key, key, data))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        end = time.monotonic() + self._seconds
        while (value := unseal(self.key, key, self.underlying_store.get(key))) is None:
            if time.monotonic() > end:
                raise dist.DistStoreError(
                    message(
                        "what is in the meeting place is not of this job",
                        got=f"a value under {key!r} that its secret does not vouch for",
                        remedy="see who else can reach the meeting place, and that all ranks have the same secret",
                    )
                )
            time.sleep(_PAUSE_SECONDS)
        return value

    def check(self, keys: list[str]) -> bool:
        if not self.underlying_store.check(keys):
            return False
        return all(unseal(self.key, key, self.underlying_store.get(key)) is not None for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        end = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout, keys: {', '.join(keys)}")
            time.sleep(_PAUSE_SECONDS)

    def add(self, key: str, amount: int) -> int:
        """Increase a counter. Counters have no codes, and others can change them: use them where that is harmless."""
        return self.underlying_store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)


def key_of(store: Any) -> bytes:
    """The key of a store's values; empty for a store without authentication, which the kernel protects from others."""
    while store is not None:
        if isinstance(store, AuthenticatedStore):
            return store.key
        store = getattr(store, "underlying_store", None)
    return b""
