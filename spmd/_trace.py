"""Checksums of what every call of an @spmd function returned, in a file that `spmd verify` compares.

If SPMD_VERIFY names a file, each call adds one line of JSON to it. A second file holds the values themselves of the
first calls, as many as fit: runs that differ mostly do so early, and then `verify` can say by how much.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .kernels.errors import dtype_name
from .kernels.flat import as_bytes
from .mesh import trees
from .mesh.array import Array
from .mesh.put import is_array

_FILE = os.environ.get("SPMD_VERIFY", "")
ON = bool(_FILE)
VALUES = ".values"  # added to the first file's name
_MOST_VALUES = 256 << 20  # bytes
_warned: set[str] = set()
_WARNS = not os.environ.get("SPMD_VERIFY_SAID")  # unless an earlier run has warned


def note(name: str, results: Any, settings: Mapping[str, Any] | None) -> None:
    """Add a call.

    Args:
        settings: those of `data_parallel`, if the function is one.
    """
    if _WARNS and settings is not None and settings["shards"] is None and name not in _warned:
        _warned.add(name)
        print(
            f"spmd verify: {name} is data_parallel without shards=, and not expected to give the same bits at other "
            "numbers of ranks: means over ranks are added in another order. Give shards= to Loader and data_parallel.",
            file=sys.stderr,
            flush=True,
        )
    leaves = zip(trees.paths(results, is_leaf=is_array), trees.leaves(results, is_leaf=is_array), strict=True)
    seen = [(path, *_seen(leaf)) for path, leaf in leaves]
    sizes = [leaf.mesh.size for leaf in trees.leaves(results, is_leaf=is_array) if isinstance(leaf, Array)]
    with open(_FILE, "a") as file:
        file.write(json.dumps({"name": name, "leaves": seen, "ranks": max(sizes, default=None)}) + "\n")


def _seen(leaf: Any) -> tuple[str, str, Any]:
    """A leaf's checksum, a short text, and where its values are: the offset in the file, dtype and shape."""
    if not isinstance(leaf, Array):
        return hashlib.sha256(repr(leaf).encode()).hexdigest(), repr(leaf)[:40], None
    value = leaf.full()
    data = as_bytes(value).numpy()
    # A sharded optimizer's slices are padded to equal lengths, by an amount that depends on the number of ranks.
    its = np.trim_zeros(data, "b") if leaf.spec.entries and value.ndim == 1 else data
    checksum = hashlib.sha256(f"{value.dtype}".encode() + its.tobytes()).hexdigest()
    shown = repr(value.flatten()[:3].tolist()) + ("..." if value.numel() > 3 else "")
    with open(_FILE + VALUES, "ab") as file:
        at = file.tell()
        if at + data.nbytes > _MOST_VALUES:
            return checksum, shown, None
        file.write(data.tobytes())
    return checksum, shown, (at, dtype_name(value.dtype), list(value.shape))
