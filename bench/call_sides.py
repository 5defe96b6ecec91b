"""What `call_cost.py` has either checkout do: calls with trees of small tensors.

The processes of both import it, beside their own `peers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peers import Programs

import spmd


class Calls(Programs):
    """Calls that compute nothing; a call with a tree gets the last one's result."""

    def tree(self, options: Mapping[str, Any], leaves: int) -> Any:
        """A body that returns its argument, or (`made`) a new tensor for each leaf, and a number."""
        made, fetched = options.get("made", False), options.get("fetched", False)
        carried = spmd.put({f"layer{index}": torch.ones(4) for index in range(leaves)}, mesh=self.mesh)

        def body(tree: Any) -> Any:
            tree = {name: leaf.clone() for name, leaf in tree.items()} if made else tree
            return tree, torch.zeros(())

        call = spmd.spmd(body, mesh=self.mesh)

        def step() -> None:
            nonlocal carried
            carried, number = call(carried)
            if fetched:
                float(number)

        return step

    def capturing(self, options: Mapping[str, Any], layers: int) -> Any:
        """A body that refers to a module, which is checked for changes before every call."""
        module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))).requires_grad_(False)
        carried = spmd.put(torch.ones(4), mesh=self.mesh)
        call = spmd.spmd(lambda x: (module, x)[1], mesh=self.mesh)

        def step() -> None:
            nonlocal carried
            carried = call(carried)

        return step
