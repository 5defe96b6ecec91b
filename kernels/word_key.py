"""A number for names and numbers that is the same in every process: what ranks compare, and look each other up by."""

from __future__ import annotations

import hashlib
import struct


def word_key(*parts: object) -> int:
    """A 63-bit number for a tuple of names and numbers, equal in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return struct.unpack("<Q", digest)[0] >> 1
