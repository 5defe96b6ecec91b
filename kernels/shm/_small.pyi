"""What `_small.c` compiles to; see there."""

from array import array
from collections.abc import Sequence

import torch

ASLEEP: int
UNREADY: int
KEPT: int
FULL: int

class Small:
    def __init__(
        self,
        arena: memoryview | bytearray,
        begun: array[int],
        places: tuple[tuple[int, int, int, int], ...],
        rank: int,
        signature: int,
        kind: str,
        numel: int,
        slots: tuple[int, int, int],
        spins: int,
        tensor_type: type[torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        op: object,
        label: str,
    ) -> None: ...
    def address(self, tensor: object, op: object, label: str, /) -> int: ...
    def run(self, source: int, target: int, yields: int, /) -> int: ...
    def finish(self, sequence: int, target: int, /) -> int: ...
