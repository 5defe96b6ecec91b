"""`random_key`: seeds for the user's own random generators."""

from __future__ import annotations

from typing import Any

from ..kernels.call import word_key
from ..kernels.callsite import public
from ..mesh.region import require


@public
def random_key(*data: Any) -> int:
    """A seed for a generator of your own: another one on each rank and in each step, the same if a step runs again.

    Torch's own generator is seeded in the same way, so dropout needs no key; under `data_parallel(shards=)` NumPy's and
    Python's global generators are too. On rank 1 of a mesh, `torch.Generator().manual_seed(random_key("noise"))` draws
    the same noise whenever the same step is run.

    Args:
        data: numbers and strings to be folded in, for several keys in one place.

    Returns:
        An integer, 0 to 2**63 - 1, made from the mesh's seed, the step (a `Loader`'s (epoch, step), else the number of
        the call), and the rank. Under `data_parallel(shards=)` it depends on the virtual shard instead of the rank, and
        outside of `value_and_grad` it is the same on all ranks.

    Raises:
        MeshError: outside a region.

    Source: `jax.random.key` and `fold_in`.
    """
    region = require("random_key")
    region.keys += 1
    return word_key("key", *region.random, *data)
