"""`Tracked`: a rank's own part of a batch, outside of the virtual shards that it will be cut into.

What a rank computes from it there depends on how many ranks there are. So it is tracked: the result of an operation on
a tracked tensor is tracked too, and operations that would lose track (numbers, writes into other tensors, torch's own
gradients) are refused. Operations are intercepted below autograd and the transforms of torch.func
(`__torch_dispatch__`), which work with tracked tensors as with any others; a step that leaves its batch alone pays
nothing. Invariant: apart from `t.data = batch`, pickles and raw memory, no untracked tensor holds anything that a rank
computed from its part.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ...kernels import torch_private
from ...kernels.errors import SpecError
from ...mesh import trees
from ...mesh.purity.writes import tensors_in, written_by
from ...mesh.region import Region, current
from .._plan import plan_of
from .shards import VirtualShards

# Operations that turn tensors into numbers, booleans, lists, arrays and raw memory, which can't be tracked.
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__complex__"}
_READS |= {"__contains__", "__dlpack__", "__float__", "__index__", "__int__", "apply_", "map_", "map2_"}
_READS |= {"storage", "untyped_storage"}
_READS_BELOW = {torch_private.ITEM, torch.ops.aten.equal}
_GRADIENTS = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_AS_AUX = "return it as aux of the function that is differentiated (has_aux=True)"
_OWN_SAMPLES = "outside value_and_grad, where a rank has its own samples only, so that"


class Tracked(Tensor):
    """A rank's part of a batch, or what a step computed from it, before it is cut into virtual shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        region = current()
        name = getattr(func, "__name__", "an operation")
        if region is not None:
            _refuse_in_a_shard(name, region)
            if plan_of(region).virtual is not None and name in _READS:
                _refuse_to_read(name, [*args, *(kwargs or {}).values()], region)
            if plan_of(region).virtual is not None and func in _GRADIENTS:
                _refuse_gradient(name, region)
        with torch_private.without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        region = current()
        written = [tensor for _, value in written_by(func, args, kwargs) for tensor in tensors_in(value)]
        if region is not None:
            name = func.name().partition("::")[2]
            _refuse_in_a_shard(name, region)
            if plan_of(region).virtual is not None:
                if torch_private.in_backward():
                    _refuse_gradient(name, region)
                if func.overloadpacket in _READS_BELOW:
                    _refuse_to_read(name, list(args), region)
                _refuse_to_write(name, written, region)
        with torch_private.below_subclasses():
            result = func(*args, **kwargs)
        return result if written else _followed(result)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Like that of any tensor, so that a batch can be printed."""
        return "Tracked" + repr(plain(self)).removeprefix("tensor")


def as_tracked(tensor: Tensor) -> Tracked:
    """A tracked view of a tensor, in the same memory."""
    with torch_private.below_subclasses():
        return tensor.detach().as_subclass(Tracked)


def plain(leaf: Any) -> Any:
    """A tensor as an ordinary one again."""
    if not isinstance(leaf, Tracked):
        return leaf
    with torch_private.below_subclasses():
        return leaf.as_subclass(Tensor)


def _followed(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result if isinstance(result, Tracked) else result.as_subclass(Tracked)
    return type(result)(map(_followed, result)) if isinstance(result, list | tuple) else result


def _virtual(region: Region) -> VirtualShards:
    virtual = plan_of(region).virtual
    assert virtual is not None
    return virtual


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refuse_in_a_shard(name: str, region: Region) -> None:
    if plan_of(region).shard is not None:
        raise SpecError(
            "a function that is differentiated under data_parallel(shards=) uses the batch of the step around "
            "it, all of which is not there while a virtual shard runs",
            got=f"the batch in {name}",
            where=region.session.where(),
            remedy="take the batch as an argument: value_and_grad(loss)(params, batch)",
        )


def _refuse_to_read(name: str, args: list[Any], region: Region) -> NoReturn:
    read = next(arg for arg in args if isinstance(arg, Tracked))
    tree = _virtual(region).tree
    leaves = zip(trees.paths(tree), trees.leaves(tree), strict=True)
    leaf = next((f"batch{path}" for path, leaf in leaves if leaf is read), "what was computed from the batch")
    raise SpecError(
        f"a step under data_parallel(shards=) takes numbers from {leaf} {_OWN_SAMPLES} they would depend on the "
        "number of ranks",
        got=f"{name} of {_shown(read)}",
        where=region.session.where(),
        remedy=_AS_AUX,
    )


def _refuse_gradient(name: str, region: Region) -> NoReturn:
    raise SpecError(
        "a step under data_parallel(shards=) takes a gradient of what was computed from the batch "
        f"{_OWN_SAMPLES} it would depend on the number of ranks",
        got=name if name in ("backward", "grad") else f"{name} in a backward pass",
        where=region.session.where(),
        remedy="use spmd's value_and_grad(loss)(params, batch), of a function that takes the batch",
    )


def _refuse_to_write(name: str, written: list[Tensor], region: Region) -> None:
    """Refuse to write into an untracked tensor, and to change the batch itself, which is still to be cut."""
    if not written:
        return
    with torch_private.below_subclasses():
        batch = {leaf.untyped_storage().data_ptr() for leaf in _virtual(region).batch if leaf.numel()}
        target = next((one for one in written if not isinstance(one, Tracked)), None)
        itself = next((one for one in written if one.untyped_storage().data_ptr() in batch), None)
    if target is None and itself is None:
        return
    did = "changes the batch in place" if target is None else "writes what was computed from the batch into a tensor"
    raise SpecError(
        f"a step under data_parallel(shards=) {did} {_OWN_SAMPLES} it would depend on the number of ranks",
        got=f"{name} into {_shown(itself if target is None else target)}",
        where=region.session.where(),
        remedy=_AS_AUX if target is not None else "change it in the function that takes the batch as an argument",
    )


def _shown(tensor: Any) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
