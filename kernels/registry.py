"""Backends by name: how a communicator is made, and where a third party adds one.

>>> sorted(backends())
['gloo', 'hierarchical', 'mpi', 'nccl', 'shm']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .arguments import check_function
from .callsite import public
from .communicator import Communicator
from .errors import MeshError, SpecError
from .network import hierarchical
from .network.gloo import GlooCommunicator
from .network.hosts import HostWatch
from .shm.arena import Arena
from .shm.communicator import ShmCommunicator

Factory = Callable[..., Communicator]
_ARGUMENTS = ("ranks", "rank", "watch", "store", "timeout", "channel")


def _shm(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Communicator:
    if not isinstance(watch, Arena):
        raise MeshError("backend 'shm' needs all ranks on one host", remedy="use backend='auto' or 'gloo'")
    return ShmCommunicator(watch, ranks, timeout=timeout, channel=channel)


def _gloo(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Communicator:
    interface = "127.0.0.1" if isinstance(watch, Arena) else watch.address
    return GlooCommunicator(store(), watch, ranks, rank, timeout=timeout, channel=channel, interface=interface)


def _hierarchical(
    *, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str
) -> Communicator:
    if not isinstance(watch, HostWatch):
        raise MeshError("backend 'hierarchical' needs ranks that a launcher started", remedy="use backend='auto'")
    return hierarchical.communicator(store(), watch, ranks, rank, timeout=timeout, channel=channel)


def _mpi(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Communicator:
    from .network.mpi import MpiCommunicator

    return MpiCommunicator(store(), watch, ranks, rank, timeout=timeout, channel=channel)


def beside_nccl(watch: Any) -> str:
    """The backend for tensors on the host, beside NCCL for those on GPUs."""
    return "shm" if isinstance(watch, Arena) else "gloo"


def _nccl(*, ranks: tuple[int, ...], rank: int, watch: Any, store: Any, timeout: float, channel: str) -> Communicator:
    from .cuda.nccl import NcclCommunicator
    from .cuda.nccl_library import check_driver, load
    from .cuda.placement import own
    from .cuda.streams import Streams

    check_driver()
    on_host = _BUILT_IN[beside_nccl(watch)]
    device = own()

    def host(name: str) -> Communicator:
        return on_host(ranks=ranks, rank=rank, watch=watch, store=store, timeout=timeout, channel=name)

    # Over a network, an agreement of the hosts before every call would cost more than most calls.
    checked = isinstance(watch, Arena)
    return NcclCommunicator(host, device, load(), streams=Streams(device), channel=channel, checked=checked)


_BUILT_IN: dict[str, Factory] = {
    "shm": _shm,
    "gloo": _gloo,
    "hierarchical": _hierarchical,
    "mpi": _mpi,
    "nccl": _nccl,
}
_FACTORIES = dict(_BUILT_IN)


@public
def register_backend(name: str, factory: Factory) -> None:
    """Make `Mesh(backend=name)` use `factory(ranks=, rank=, watch=, store=, timeout=, channel=) -> Communicator`.

    Args:
        name: as given to `Mesh`.
        factory: called on each rank of a group, with the group's `ranks` and this process's `rank` (numbers in the
            mesh), the `watch` that notices aborts, `store()` for a `torch.distributed.Store`, and a `channel` name
            that keeps several communicators over the same ranks apart. A driver sends it to its ranks, so cloudpickle
            must accept it.

    Raises:
        SpecError: `name` is not a name, or `factory` not a function of these arguments.
    """
    if not isinstance(name, str) or name in ("", "auto"):
        expected = 'a name other than "auto", which chooses one'
        raise SpecError("register_backend got a bad name", got=repr(name), expected=expected)
    check_function("register_backend", factory, "register_backend(name, factory)")
    try:
        inspect.signature(factory, follow_wrapped=False).bind(**dict.fromkeys(_ARGUMENTS))
    except ValueError:  # a function in C that does not say what it takes
        pass
    except TypeError as error:
        expected = f"one that takes {', '.join(f'{argument}=' for argument in _ARGUMENTS)}"
        got, remedy = f"{factory!r}: {error}", "write def factory(**arguments), and return a Communicator"
        raise SpecError("register_backend got a bad factory", got=got, expected=expected, remedy=remedy) from None
    _FACTORIES[name] = factory


def backends() -> dict[str, Factory]:
    return dict(_FACTORIES)


def added_factory(name: str) -> Factory | None:
    """The factory that `register_backend` set for a name; None for built-in backends, which every process knows."""
    factory = _FACTORIES.get(name)
    return None if factory is _BUILT_IN.get(name) else factory


def make_communicator(backend: str, **arguments: Any) -> Communicator:
    if backend not in _FACTORIES:
        raise MeshError(
            "unknown backend",
            got=repr(backend),
            expected=f"one of {sorted(_FACTORIES)}",
            remedy="register_backend adds one",
        )
    made = _FACTORIES[backend](**arguments)
    if not isinstance(made, Communicator):
        problem = f"the factory of backend {backend!r} made no communicator"
        remedy = "have it return an object of a subclass of spmd.kernels.communicator.Communicator"
        raise MeshError(problem, got=type(made).__name__, remedy=remedy)
    return made
