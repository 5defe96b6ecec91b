"""What ranks that get ready are told, and others are not; see `mesh/protocol.py`."""

from __future__ import annotations

import dataclasses

from ...kernels.network.codec import Message


@dataclasses.dataclass(frozen=True, slots=True)
class Populate(Message):
    """Have memory at hand: so many bytes for values that are about to come, and for what a step makes of them.

    Attributes:
        results: of what all ranks make together; it lies in memory of the first.
    """

    values: int
    step: int
    results: int
