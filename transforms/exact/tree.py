"""A binary tree over virtual shards, by position: node (level, i) is the sum of 2**level shards from i * 2**level on.

The order of additions depends on the positions only, however the shards lie on ranks.

Source: pairwise summation, Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Node = tuple[int, int]  # (level, index)


def maximal_nodes(shards: Iterable[int]) -> list[Node]:
    """The largest nodes that consecutive shards fill, in order of position.

    >>> maximal_nodes(range(3, 8)), maximal_nodes(range(0, 3))
    ([(0, 3), (2, 1)], [(1, 0), (0, 2)])
    """
    found: list[Node] = []
    for shard in shards:
        level, index = 0, shard
        while found and index % 2 and found[-1] == (level, index - 1):
            found.pop()
            level, index = level + 1, index // 2
        found.append((level, index))
    return found


class Partials:
    """The sums of one leaf over the shards that have run, one for each of `maximal_nodes`: about log2 of the shards."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, Tensor]] = []

    def push(self, shard: int, value: Tensor) -> None:
        """Add the next shard's value."""
        level, index = 0, shard
        while self.nodes and index % 2 and self.nodes[-1][0] == (level, index - 1):
            _, left = self.nodes.pop()
            # At level 0 the gradient may share memory with another leaf's, so it is not changed; sums are our own.
            value = torch.add(left, value) if level == 0 else left.add_(value)
            level, index = level + 1, index // 2
        self.nodes.append(((level, index), value))


def combine(nodes: Mapping[Node, Tensor]) -> Tensor:
    """The root's sum, from nodes that do not overlap; missing nodes add nothing.

    >>> float(combine({(1, 0): torch.tensor(1.0), (0, 2): torch.tensor(2.0), (0, 3): torch.tensor(4.0)}))
    7.0
    """
    level, waiting = 0, dict(sorted(nodes.items(), key=lambda item: item[0][1] << item[0][0]))
    while len(waiting) > 1:
        above: dict[Node, Tensor] = {}
        for (at, index), value in waiting.items():
            node = (at, index) if at > level else (level + 1, index // 2)
            above[node] = above[node] + value if node in above else value
        level, waiting = level + 1, above
    (root,) = waiting.values()
    return root
