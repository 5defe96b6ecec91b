"""A keyed shuffle that is computed index by index: O(1) memory at any length.

`torch.randperm` makes the whole permutation even for one index; a Feistel network computes only the indices asked for.
Invariant: for every length and key, `permute` is a bijection of range(length). Each round changes one half by a
function of the other half, so it can be undone whatever the function is. An index that falls outside the range is
permuted again until it is inside; this follows one cycle of a bijection, so no two indices end at the same place.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_IN_CACHE = 4096  # ids that are computed at a time, so that they stay in the processor's cache
# The increment and the finalizer of splitmix64, which passes BigCrush: Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", OOPSLA 2014, with the constants of Stafford's variant 13.
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def derive_key(*values: int) -> int:
    """A 64-bit key for a tuple of integers of any size and sign; the tuple's order and length matter.

    >>> derive_key(0, 1) == derive_key(1, 0), derive_key(5) == derive_key(5 + 2**64), derive_key(-1) == derive_key(1)
    (False, False, False)
    """
    key = 0
    for value in values:
        limbs = value.bit_length() // 64 + 1  # two's complement, with room for the sign
        # The number of limbs goes in too: else one long integer and two short ones could share a key.
        for word in (limbs, *(value >> 64 * index & _MASK for index in range(limbs))):
            key = _mix((key ^ word) + _GAMMA & _MASK)
    return key


def permute(index: npt.NDArray[np.uint64], length: int, key: int) -> npt.NDArray[np.uint64]:
    """Where the keyed shuffle of range(length) sends each of `index`.

    >>> permute(np.arange(5, dtype=np.uint64), 5, key=7)
    array([3, 0, 4, 1, 2], dtype=uint64)
    >>> sorted(permute(np.arange(65537, dtype=np.uint64), 65537, key=7).tolist()) == list(range(65537))
    True

    Args:
        index: unsigned 64-bit integers below `length`, in one dimension, in any number and order.
        length: how many indices there are, 1 to 2**63.
        key: 64 bits; equal keys give equal shuffles.

    Source:
        Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput.
        1988 (the network); Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle-walking);
        NIST SP 800-38G, FF1 (alternating halves that may differ by a bit); Mitchell et al., "Bandwidth-optimal random
        shuffling for GPUs", ACM TOPC 2022 (the same idea as a shuffle).
    """
    bits = (length - 1).bit_length()
    # Few bits mix slowly: with 12 rounds the 120 orders of 5 things are visibly uneven, with 24 they are not.
    rounds = 24 if bits < 8 else 12
    keys = [_mix(key + number * _GAMMA & _MASK) for number in range(1, rounds + 1)]
    half, tables = (bits + 1) // 2, None
    if len(index) >> half > 1:  # two indices or more for each value of a half: compute each round's function per value
        tables = np.arange(1 << half, dtype=np.uint64) + np.array(keys, dtype=np.uint64)[:, None]
        _mix_array(tables, np.empty_like(tables))
    network = functools.partial(_network, bits=bits, keys=keys, tables=tables)
    found = network(index)
    # The domain is below twice the length, so a walk takes two steps on average at worst.
    outside = np.flatnonzero(found >= np.uint64(length))
    while outside.size:
        found[outside] = network(found[outside])
        outside = outside[found[outside] >= np.uint64(length)]
    return found


def permutation(length: int, key: int) -> npt.NDArray[np.uint64]:
    """The whole keyed shuffle of range(length).

    >>> permutation(5, key=7), permutation(0, key=7)
    (array([3, 0, 4, 1, 2], dtype=uint64), array([], dtype=uint64))
    """
    index = np.arange(length, dtype=np.uint64)
    return permute(index, length, key) if length else index


def numbered(key: int, index: int) -> int:
    """The random number of 63 bits that belongs to a key and an index.

    >>> numbered(7, 0), numbered(7, 1)
    (3595544800446187243, 154844686297477902)
    """
    return _mix(key + (index + 1) * _GAMMA & _MASK) >> 1


def _network(
    index: npt.NDArray[np.uint64], bits: int, keys: list[int], tables: npt.NDArray[np.uint64] | None
) -> npt.NDArray[np.uint64]:
    """A bijection of range(2**bits). With an odd number of bits one half has one bit more.

    Args:
        tables: each round's function of every value that a half can have, before masking; None: compute it per index.
    """
    found = np.empty_like(index)
    for first in range(0, len(index), _IN_CACHE):
        part = slice(first, first + _IN_CACHE)
        found[part] = _network_of_few(index[part], bits, keys, tables)
    return found


def _network_of_few(
    index: npt.NDArray[np.uint64], bits: int, keys: list[int], tables: npt.NDArray[np.uint64] | None
) -> npt.NDArray[np.uint64]:
    low_bits = np.uint64((bits + 1) // 2)
    high_mask, low_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits + 1) // 2) - 1)
    high, low = index >> low_bits, index & low_mask
    words, shifted = np.empty_like(index), np.empty_like(index)
    for number, key in enumerate(keys):
        source, target, mask = (high, low, low_mask) if number % 2 else (low, high, high_mask)
        if tables is None:
            np.add(source, np.uint64(key), out=words)
            _mix_array(words, shifted)
        else:  # without mode="wrap" NumPy would make a copy first, and unsigned indices it would convert
            np.take(tables[number], source.view(np.int64), out=words, mode="wrap")
        words &= mask
        target ^= words
    return high << low_bits | low


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def _mix_array(words: npt.NDArray[np.uint64], shifted: npt.NDArray[np.uint64]) -> None:
    """`_mix` of every element, in place; `shifted` is scratch memory. Unsigned arrays wrap by themselves."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        np.right_shift(words, np.uint64(shift), out=shifted)
        words ^= shifted
        if factor is not None:
            words *= np.uint64(factor)
