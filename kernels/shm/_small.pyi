"""What `_small.c` compiles to; see there."""

ASLEEP: int
UNREADY: int
KEPT: int

class Small:
    def __init__(
        self,
        arena: memoryview,
        places: tuple[tuple[int, int, int, int], ...],
        rank: int,
        signature: int,
        kind: str,
        numel: int,
        slots: tuple[int, int, int],
        spins: int,
    ) -> None: ...
    def run(self, sequence: int, source: int, target: int, yields: int, /) -> int: ...
    def finish(self, sequence: int, target: int, /) -> int: ...
