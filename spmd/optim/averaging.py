"""An exponential moving average of the parameters, kept beside the state of any optimizer.

Invariant: the average of a sharded parameter is sharded the same way, and declared as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._spmd import spmd
from ..kernels.arguments import is_number
from ..kernels.callsite import public
from ..kernels.errors import SpecError
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.region import current
from ..mesh.spec import Sharded, is_sharded
from .leaves import layout_of, localized
from .optimizer import Optimizer


@public
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
        decay: from 0 to 1. In a step the average becomes `decay * average + (1 - decay) * params`.

    Returns:
        An `Optimizer` whose state is that of `opt` with one more entry: a tree like the parameters, which starts as
        their copy. Leaves other than floating-point tensors are kept as they are. In a step, the averages of sharded
        parameters are `Sharded`, as is the rest of their state.

    Raises:
        SpecError: `decay` is no number from 0 to 1; later, what `opt` raises.

    Source: Polyak and Juditsky, https://doi.org/10.1137/0330046; `torch.optim.swa_utils.AveragedModel`.
    """
    if not isinstance(opt, Optimizer):
        remedy = "write ema(optimizer(torch.optim.AdamW, lr=1e-3))"
        raise SpecError("ema takes what optimizer() gave", got=type(opt).__name__, remedy=remedy)
    if not is_number(decay) or not 0 <= decay <= 1:
        raise SpecError("ema got an unexpected argument 'decay'", got=repr(decay), expected="a number, 0 to 1")

    @public
    def init(params: Any) -> dict[str, Any]:
        state = opt.init(params)
        if "ema" in state:
            remedy = "keep one average; another is a tree that the step takes, averages and returns"
            raise SpecError("ema was given an optimizer that keeps an average already", remedy=remedy)
        return {**state, "ema": _copies(params)}

    @public
    @torch.no_grad()
    def step(params: Any, grads: Any, opt_state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not isinstance(opt_state, Mapping) or "ema" not in opt_state:
            expected, remedy = "the state of an optimizer in ema(...)", "pass what its init or step returned"
            raise SpecError("opt_state has no 'ema'", expected=expected, remedy=remedy)
        params, new_state = opt.step(params, grads, opt_state)
        before = trees.map(lambda node: node.local if is_sharded(node) else node, opt_state["ema"], is_leaf=is_sharded)
        try:
            average = trees.map(lambda old, new: _averaged(old, new, decay), before, params)
        except ValueError as error:  # of trees
            remedy = "pass what init or step returned with these parameters"
            raise SpecError(
                "opt_state['ema'] is no tree like the parameters", got=str(error)[:80], remedy=remedy
            ) from None
        return params, {**new_state, "ema": average}

    return Optimizer(init, step)


def _copies(params: Any) -> Any:
    """Copies of the parameters. If some are sharded, the copies are made on the ranks."""
    cut = [leaf for leaf in trees.leaves(params) if isinstance(leaf, Array) and leaf.spec.entries]
    if cut and current() is None:
        return spmd(_copies, mesh=cut[0].mesh)(params)
    return trees.map(_copied, params)


def _copied(leaf: Any) -> Any:
    leaf = leaf.full() if isinstance(leaf, Array) else leaf
    return _declared(leaf.detach().clone(), leaf) if isinstance(leaf, Tensor) else leaf


def _averaged(old: Any, new: Any, decay: float) -> Any:
    if not isinstance(new, Tensor) or not (new.is_floating_point() or new.is_complex()):
        return new
    own = localized({"ema": old}, new, layout_of(new))["ema"]  # the average may have been given whole
    return _declared(torch.lerp(own, new, float(1 - decay)), new)


def _declared(average: Tensor, param: Tensor) -> Any:
    """Declare the average of a sharded parameter as sharded: a step's results otherwise count as replicated."""
    spec = layout_of(param)
    return Sharded(average, spec) if current() is not None and spec.entries else average
