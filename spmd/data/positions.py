"""A position that another `Loader` saved: what it means here, or that it means nothing.

A step number counts batches of one size in one order. Invariant: a Loader goes on with the sample that would have come
next, or raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.errors import SpecError

# These may differ: the order of the samples stays the same. A Stream compares its count with the state itself.
_ANY = {"batch_size", "drop_last", "shards", "count"}


def step_here(step: int, before: Mapping[str, Any], now: Mapping[str, Any], epoch: int) -> int:
    """The step at which a Loader of settings `now` goes on, from step `step` of an epoch of one of settings `before`.

    >>> old = {"length": 90, "batch_size": 10, "shuffle": False}
    >>> step_here(6, old, {**old, "batch_size": 20}, 0)
    3

    Raises:
        SpecError: its samples come in another order, or there is no batch that begins with the next sample.
    """
    in_order = "length" in now and not now["shuffle"] and not before.get("shuffle", True)
    ignored = _ANY | {"seed", "order"} if in_order else _ANY
    other = [name for name in now if name not in ignored and before.get(name) != now[name]]
    again = f'{{"epoch": {epoch + 1}, "step": 0}}'
    if other:
        raise SpecError(
            "a Loader can't go on within an epoch of another one, whose samples come in another order",
            got=", ".join(f"{name}: {before.get(name)!r}, now {now[name]!r}" for name in other),
            remedy=f"make it as that was until the epoch ends; or begin the next, load_state_dict({again})",
        )
    if "length" not in now:  # a Stream's positions count samples
        return step
    done, size = step * before["batch_size"], now["batch_size"]
    if done % size:
        here = f'{{"epoch": {epoch}, "step": {done // size}}}'
        raise SpecError(
            "a Loader can't go on within one of its batches, where another one of another batch_size stopped",
            got=f"{done} samples of the epoch read, batch_size={size}",
            remedy=f"keep batch_size={before['batch_size']} until the epoch ends; or repeat some samples, "
            f"load_state_dict({here}); or begin the next epoch, load_state_dict({again})",
        )
    return int(done // size)
