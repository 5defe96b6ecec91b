"""The states of generators of random numbers: what a program would keep, and whether one comes of another by draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_TWISTER, _TWISTS = 624, 256  # words of a Mersenne Twister, which it makes anew together; how often one looks


def generator_state(obj: Any) -> Any:
    """What a program would return of a generator, to continue with it elsewhere; an empty tuple for other objects."""
    if isinstance(obj, torch.Generator):
        return obj.get_state()
    if isinstance(obj, random.Random):
        return obj.getstate()
    return obj.bit_generator.state if isinstance(obj, np.random.Generator) else ()


def random_state(obj: Any) -> tuple[str, dict[str, Any]]:
    """A generator's whole state as text, and the part of it that draws change in a way of their own."""
    if isinstance(obj, random.Random):
        found: dict[str, Any] = {"state": {"key": np.array(obj.getstate()[1][:-1], np.uint32)}, "all": obj.getstate()}
    else:
        found = obj.get_state(legacy=False) if isinstance(obj, np.random.RandomState) else obj.state
    with np.printoptions(threshold=1 << 20):
        return repr(found), found.get("state", {})


def is_seeded(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a state can't come of an earlier one by draws, of which there are not very many."""
    if len(before.get("key", ())) != _TWISTER:  # PCG64 and Philox draw from a sequence that their seed has chosen
        return before.get("inc") != now.get("inc") or not np.array_equal(before.get("key", ()), now.get("key", ()))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": before["key"], "pos": _TWISTER}}
    for _ in range(_TWISTS):
        if np.array_equal(twister.state["state"]["key"], now["key"]):
            return False
        twister.random_raw(_TWISTER)
    return True
