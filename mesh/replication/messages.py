"""`mesh.comm()` on a call that is followed: what messages bring, and that they bring no gradients.

A communicator moves bytes, and autograd knows nothing of it: what was received is a constant, and what was reduced in
place keeps the gradient of this rank's own values. So in a function that is differentiated a tensor that requires
gradients, or has a tangent, is refused; in the `forward` of a `torch.autograd.Function` none is recorded, and messages
are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...kernels.errors import SpecError
from ...kernels.torch_private import in_forward_mode, in_torch_func
from ..ambient import has_tangent
from ..purity.writes import tensors_in
from ..region import current
from ..spec import Layout
from .net import Net, Varying, active, joined


class FollowedCommunicator:
    """A communicator whose messages are followed: what arrives differs along its axes, unless all get the same."""

    def __init__(self, net: Net, comm: Any, axes: tuple[str, ...]):
        self._net, self._comm, self._axes = net, comm, axes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in _MESSAGES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            net = self._net
            tensors = list(tensors_in([*args, *kwargs.values()]))
            _refuse_gradients(name, tensors)
            written = list(tensors) if name == "gather" else next(iter([*args, *kwargs.values()]))
            return follow_message(
                net,
                self._axes,
                name,
                lambda: found(*args, **kwargs),
                tensors,
                lambda result: result if name == "all_reduced" else written,
            )

        return call


def follow_message(
    net: Net,
    axes: tuple[str, ...],
    name: str,
    send: Callable[[], Any],
    tensors: Iterable[torch.Tensor],
    written: Callable[[Any], Any],
) -> Any:
    """What `send` returns, a message among the ranks along some axes; `written` gives the tensors that it wrote."""
    varying = joined(net.of(tensor) for tensor in tensors).without(axes)
    if name not in _REPLICATES:
        varying = joined([varying, Varying(dict.fromkeys(axes, f"a message ({name})"))])
    with net.pause():
        result = send()
    for tensor in () if name in _SENDS else tensors_in(written(result)):
        (net.result if name in _REPLICATES else net.written)(tensor, varying)
    return result


_REPLICATES = {"broadcast", "all_reduce", "all_reduced", "all_gather", "_all_gather_base"}
_SENDS = {"send", "isend"}
_MESSAGES = _REPLICATES | _SENDS | {"recv", "irecv", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all"}


def _refuse_gradients(name: str, tensors: list[torch.Tensor]) -> None:
    region = current()
    if region is None:
        return
    backward, forward = (region.in_gradient or in_torch_func()) and torch.is_grad_enabled(), in_forward_mode()
    for tensor in tensors if backward or forward else ():
        is_dual = forward and has_tangent(tensor)
        if is_dual or (backward and tensor.requires_grad):
            raise SpecError(
                f"{name} of a communicator, in a function that is differentiated, was given a tensor that "
                f"{'has a tangent' if is_dual else 'requires gradients'}, which do not go through messages",
                got=f"shape {tuple(tensor.shape)}",
                where=region.session.where(),
                remedy="call psum, all_gather, ppermute or another collective over an axis of the mesh (one axis "
                "more makes groups of ranks); or give it x.detach().clone(), if the result is a constant, "
                "or call it in a torch.autograd.Function of your own (docs/gradients.md)",
            )


def followed(comm: Any, layout: Layout) -> Any:
    """A communicator for a body's own use, whose messages the active net sees."""
    net = active()
    if net is None:
        return comm
    return FollowedCommunicator(net, comm, layout.axes_of(comm.ranks))
