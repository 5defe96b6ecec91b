"""What every call of an @spmd function returned, as checksums in a file: what `spmd verify` compares.

Written where SPMD_VERIFY names a file, one line of JSON for each call.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np

from .kernels.flat import as_bytes
from .mesh import trees
from .mesh.array import Array
from .mesh.put import is_array

_FILE = os.environ.get("SPMD_VERIFY", "")
ON = bool(_FILE)


def note(name: str, results: Any) -> None:
    """Add a call."""
    leaves = zip(trees.paths(results, is_leaf=is_array), trees.leaves(results, is_leaf=is_array), strict=True)
    seen = [(path, _checksum(leaf), _shown(leaf)) for path, leaf in leaves]
    sizes = [leaf.mesh.size for leaf in trees.leaves(results, is_leaf=is_array) if isinstance(leaf, Array)]
    with open(_FILE, "a") as file:
        file.write(json.dumps({"name": name, "leaves": seen, "ranks": max(sizes, default=None)}) + "\n")


def _checksum(leaf: Any) -> str:
    if not isinstance(leaf, Array):
        return hashlib.sha256(repr(leaf).encode()).hexdigest()
    data = as_bytes(leaf.full()).numpy()
    if leaf.spec.entries and leaf.ndim == 1:
        # Slices of a sharded optimizer are padded to equal length, by as much as there are ranks.
        data = np.trim_zeros(data, "b")
    return hashlib.sha256(f"{leaf.dtype}".encode() + data.tobytes()).hexdigest()


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, Array):
        return repr(leaf)[:40]
    value = leaf.full().flatten()
    return repr(value[:3].tolist()) + ("..." if value.numel() > 3 else "")
