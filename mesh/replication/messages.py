"""A communicator whose messages the net sees."""

from __future__ import annotations

from typing import Any

from ..spec import Layout
from .following import tensors_in
from .net import Net, Varying, active, joined


class FollowedCommunicator:
    """A communicator whose messages are followed: what comes differs along its axes, unless all get the same."""

    def __init__(self, net: Net, comm: Any, axes: tuple[str, ...]):
        self._net, self._comm, self._axes = net, comm, axes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in _MESSAGES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            net = self._net
            tensors = list(tensors_in([*args, *kwargs.values()]))
            varying = joined(net.of(tensor) for tensor in tensors).without(self._axes)
            if name not in _REPLICATES:
                varying = joined([varying, Varying(dict.fromkeys(self._axes, f"a message ({name})"))])
            written = list(tensors) if name == "gather" else next(iter([*args, *kwargs.values()]))
            with net.pause():
                result = found(*args, **kwargs)
            for tensor in tensors_in(written):
                (net.result if name in _REPLICATES else net.written)(tensor, varying)
            return result

        return call


_REPLICATES = {"broadcast", "all_reduce", "all_gather"}
_MESSAGES = _REPLICATES | {"recv", "irecv", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all"}


def followed(comm: Any, layout: Layout) -> Any:
    """A communicator for a body's own use, whose messages the active net sees."""
    net = active()
    if net is None:
        return comm
    return FollowedCommunicator(net, comm, layout.axes_of(comm.ranks))
