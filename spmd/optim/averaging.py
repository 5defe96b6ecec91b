"""An exponential moving average of the parameters, kept beside the state of any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.arguments import is_number
from ..kernels.errors import SpecError, message
from ..mesh import trees
from ..mesh.array import Array
from .optimizer import Optimizer


def ema(opt: Optimizer, decay: float = 0.999) -> Optimizer:
    """Wrap an optimizer so that its state has an exponential moving average of the parameters, under "ema".

    >>> from spmd import optimizer
    >>> opt = ema(optimizer(torch.optim.SGD, lr=1.0), decay=0.75)
    >>> params = {"w": torch.tensor([4.0])}
    >>> opt_state = opt.init(params)
    >>> params, opt_state = opt.step(params, {"w": torch.tensor([4.0])}, opt_state)
    >>> params, opt_state["ema"]
    ({'w': tensor([0.])}, {'w': tensor([3.])})

    Args:
        opt: what `optimizer` gave, or another wrapper.
        decay: what is left of the average in a step, 0 to 1: it becomes `decay * average + (1 - decay) * params`.

    Returns:
        An `Optimizer` whose state is that of `opt` with one entry more: a tree like the parameters, which starts as
        their copy. Leaves that are no floating-point tensors are in it as they are.

    Raises:
        SpecError: `decay` is no number from 0 to 1; later, as `opt`.

    Source: Polyak and Juditsky, https://doi.org/10.1137/0330046; `torch.optim.swa_utils.AveragedModel`.
    """
    if not isinstance(opt, Optimizer):
        remedy = "write ema(optimizer(torch.optim.AdamW, lr=1e-3))"
        raise SpecError(message("ema takes what optimizer() gave", got=type(opt).__name__, remedy=remedy))
    if not is_number(decay) or not 0 <= decay <= 1:
        raise SpecError(message("ema got an unexpected argument 'decay'", got=repr(decay), expected="a number, 0 to 1"))

    def init(params: Any) -> dict[str, Any]:
        return {**opt.init(params), "ema": trees.map(_copied, params)}

    @torch.no_grad()
    def step(params: Any, grads: Any, opt_state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not isinstance(opt_state, Mapping) or "ema" not in opt_state:
            expected, remedy = "the state of an optimizer in ema(...)", "pass what its init or step returned"
            raise SpecError(message("opt_state has no 'ema'", expected=expected, remedy=remedy))
        params, new_state = opt.step(params, grads, opt_state)
        average = trees.map(lambda old, new: _averaged(old, new, decay), opt_state["ema"], params)
        return params, {**new_state, "ema": average}

    return Optimizer(init, step)


def _copied(leaf: Any) -> Any:
    leaf = leaf.full() if isinstance(leaf, Array) else leaf
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _averaged(old: Any, new: Any, decay: float) -> Any:
    if not isinstance(new, Tensor) or not (new.is_floating_point() or new.is_complex()):
        return new
    return torch.lerp(old, new, float(1 - decay))
