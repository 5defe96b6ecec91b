"""Contenders that share the processes of a launched job: all ranks take the same turns, agreed upon by ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...mesh.launch.environments import Launch
from ...mesh.launch.rendezvous import meet
from .contenders import Gloo, Ours
from .groups import MOST_STEPS
from .worker import run


class Within:
    """Both sides of this rank."""

    def __init__(self, launch: Launch, rounds: int):
        self.rounds = rounds
        self.ours = Ours.launched()
        store = meet(launch, 60, "bench")
        self.sides: dict[str, Any] = {"ours": self.ours, "gloo": Gloo.launched(store, launch)}

    @property
    def backend(self) -> str:
        return self.ours.mesh.backend

    def measure(
        self, work: str, case: Any, contenders: Mapping[str, tuple[str, dict]], *, seconds: float
    ) -> dict[str, list[float]]:
        """As `in_turn` does for groups."""
        steps = {name: getattr(self.sides[side], work)(options, case) for name, (side, options) in contenders.items()}

        def turn(name: str, count: int) -> float:
            self.ours.barrier()
            each = run(self.sides[contenders[name][0]], steps[name], count)
            return self.ours.comm.all_reduced(torch.tensor(each, dtype=torch.float64), "max").item()

        counts = {}
        for name in steps:
            turn(name, 1)
            counts[name] = max(1, min(MOST_STEPS, round(seconds / turn(name, 1))))
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.rounds):
            for name in steps:
                samples[name].append(turn(name, counts[name]))
        return samples

    def close(self) -> None:
        dist.destroy_process_group()
        self.ours.mesh.close()
