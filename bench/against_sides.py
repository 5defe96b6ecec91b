"""What `against.py` has either checkout do from a driver: calls that do nothing, and steps whose loss is fetched.

The processes of both import it, beside their own `peers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peers import FromDriver
from peers import Programs as Calls
from torch import nn

__all__ = ["Calls", "Fetched", "leaves_200", "readme"]


class Fetched(FromDriver):
    """A step from a driver, of which every loss is fetched before the next."""

    def train_step(self, options: Mapping[str, Any], model: Any) -> Any:
        step = super().train_step(options, model)
        return lambda: float(step())


def readme() -> Any:
    """20-64-5, with 256 samples: the README's size, four leaves."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
        torch.randn(256, 20),
        torch.randint(0, 5, (256,)),
    )


def leaves_200() -> Any:
    """A hundred layers of width 8, with 256 samples: two hundred small leaves."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(100)]
    return nn.Sequential(*layers), torch.randn(256, 8), torch.randint(0, 8, (256,))
