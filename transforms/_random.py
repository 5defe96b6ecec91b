"""The key of the random numbers that are drawn here and now, for generators of one's own."""

from __future__ import annotations

from typing import Any

from ..kernels.word_key import word_key
from ..mesh.region import require


def random_key(*data: Any) -> int:
    """A number that tells this stream of random numbers from all others, to seed a generator with.

    Torch's own generator is seeded alike, so that dropout needs none of this; under `data_parallel(shards=)` NumPy's
    and Python's global ones are too. On rank 1 of a mesh, `torch.Generator().manual_seed(random_key("noise"))` draws
    the same noise whenever the same step is run.

    Args:
        data: numbers and strings to be folded in, for several keys in one place.

    Returns:
        An integer, 0 to 2**63 - 1, made from the mesh's seed, the step (a `Loader`'s (epoch, step), else the number of
        the call), and the rank. Under `data_parallel(shards=)` the place of the virtual shard takes that of the rank,
        and outside of `value_and_grad` all ranks have one key.

    Raises:
        MeshError: outside a region.

    Source: `jax.random.key` and `fold_in`.
    """
    region = require("random_key")
    region.keys += 1
    return word_key("key", *region.random, *data)
