"""How torch makes a process group of ours: its ranks meet for it, or have met already."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .group import ProcessGroup
from .world import World

_world: World | None = None  # of a mesh, while its default group is made


def create(options: Any) -> ProcessGroup:
    """What torch calls to make a process group; `options` say its ranks, its name and where they meet."""
    default = dist.group.WORLD if dist.is_initialized() else None
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    seconds = options.timeout.total_seconds()
    if isinstance(default, ProcessGroup):
        world = default.world
    elif _world is not None:
        world = _world
    else:  # these have not met before; where another backend is the default, each group is a world of its own
        ranks = tuple(range(options.group_size))
        world = World.met(options.store, options.group_rank, options.group_size, seconds)
    return ProcessGroup(world, ranks, options.group_rank, options.store, options.group_id, seconds)


class adopting:
    """Within it, torch's default group is made of ranks that have met already."""

    def __init__(self, world: World):
        self._adopted = world

    def __enter__(self) -> None:
        global _world
        _world = self._adopted

    def __exit__(self, *error: object) -> None:
        global _world
        _world = None
