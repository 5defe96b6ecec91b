"""Rendezvous: how launched ranks find each other, and the errors if they don't.

A `torch.distributed` store is the meeting place: the user's own, or one made from `env://`, `tcp://host:port` or
`file:///path`. Then comes the roll call. Invariant: a mesh only sees entries of the store that ranks of the job have
written; and a job on one host listens on loopback, if at all.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import itertools
import os
import socket
import time
import urllib.parse
from typing import Any

import torch.distributed as dist

from ...kernels.arguments import is_whole
from ...kernels.callsite import public
from ...kernels.errors import MeshError
from ...kernels.network.authentication import AuthenticatedStore, code
from ...kernels.network.interface import address_of, chosen, is_loopback, towards
from ...kernels.network.stores import innermost, leads_nowhere_else, limit_silence
from ...kernels.processes import ancestors, environ_of, listens, stat_of
from .environments import Launch, detect, variables_of
from .meeting import url
from .roll_call import RollCall, started_by
from .secret import open_own, own_folders, secret_of_user

_explicit: Launch | None = None
_given_store: dist.Store | None = None
_met: tuple[dist.Store, bytes] | None = None  # the store, and the key of the job
_interface: str | None = None


@public
def initialize(
    rank: int,
    size: int,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    interface: str | None = None,
) -> None:
    """Make this process a rank by explicit arguments, which override environment variables.

    Call it before the first Mesh, in every process of the job; `Mesh(...)` then spans them.

    Args:
        rank: 0 to size - 1, each once.
        size: number of ranks of the job.
        init_method: where to meet: "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" (of rank 0), "file:///path"
            (on a file system that all share).
        store: an existing `torch.distributed.Store` to meet in instead.
        local_rank, local_size: this rank's number on its host, and how many ranks are there.
        interface: the network interface, or the address, at which other hosts reach this one; None takes
            SPMD_INTERFACE, then GLOO_SOCKET_IFNAME, then the interface that leads to the meeting place.

    Raises:
        MeshError: bad numbers, both or neither of `init_method` and `store`, or called after the ranks had met.
    """
    global _explicit, _given_store, _interface
    if _met is not None:
        raise MeshError("initialize was called after the ranks had met", remedy="call it before the first Mesh")
    numbers = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    for name, number in numbers.items():
        if not is_whole(number) and (number is not None or name in ("rank", "size")):
            remedy = f"write int({number!r})" if isinstance(number, str) else ""
            raise MeshError(f"initialize got a bad {name}", got=repr(number), expected="a whole number", remedy=remedy)
    if not 0 <= rank < size:
        raise MeshError("initialize got a bad rank", got=f"rank {rank} of {size}", expected=f"0 to {size - 1}")
    if (init_method is None) == (store is None):
        raise MeshError("initialize needs one of init_method and store", remedy="say where the ranks meet")
    _explicit = Launch(rank, size, rank if local_rank is None else local_rank, local_size, init_method, "initialize")
    _given_store, _interface = store, interface


def launch_of_process() -> Launch | None:
    """How this process was made a rank, or None if it is none."""
    return _explicit if _explicit is not None else detect()


def meet(launch: Launch, timeout: float, part: str) -> AuthenticatedStore:
    """A part of the authenticated store in which all ranks of the job meet; they sign in once for each process."""
    global _met
    if _met is None:
        secret = secret_of_user()
        method = launch.init_method or _beside_parent()
        store = _given_store if _given_store is not None else _store_at(method, launch, timeout)
        limit_silence(store, max(1.0, timeout / 2))
        restarts = "TORCHELASTIC_RUN_ID" in os.environ
        store = dist.PrefixStore("spmd/restarts" if restarts else "spmd/0", store)
        where = "the given store" if _given_store is not None else method
        one_host = launch.local_size == launch.size or leads_nowhere_else(store)
        key = RollCall(store, launch, where, secret, one_host=one_host, restarts=restarts).key(timeout)
        if restarts:  # a prefix of its own hides what ranks of earlier starts have left
            store = dist.PrefixStore(code(key, b"store").hex()[:16], store)
        _met = store, key
    store, key = _met
    return AuthenticatedStore(
        dist.PrefixStore(part, store), code(key, part.encode()), datetime.timedelta(seconds=timeout)
    )


def address() -> str | None:
    """The address where other hosts reach this one, as far as this rank knows; to be called after `meet`."""
    return chosen_address() if _met is None else address_beside(_met[0])


def address_beside(store: Any) -> str | None:
    """The address where other hosts that meet in this store reach this one, as far as this rank knows."""
    given = chosen_address()
    if given is not None:
        return given
    host = getattr(innermost(store), "host", None)  # a FileStore has no host
    return None if host is None else towards(host)


def chosen_address() -> str | None:
    """The address at which the user wants this host to be reached, if any."""
    interface = _interface or chosen()
    return None if interface is None else address_of(interface)


def _beside_parent() -> str:
    """Where ranks of one parent process on one host meet by default: a file of the user, named after the parent."""
    started = stat_of(os.getppid())[19]
    for folder in own_folders(home_first=False):
        return f"file://{folder}/meet-{os.getppid()}-{started}"
    raise MeshError(
        "the ranks have no place to meet: neither the temporary nor the home directory has a folder of this user's",
        remedy="say where with SPMD_INIT_METHOD, or set TMPDIR to a directory of your own",
    )


def _store_at(method: str, launch: Launch, timeout: float) -> dist.Store:
    limit, scheme = datetime.timedelta(seconds=timeout), urllib.parse.urlparse(method).scheme
    if scheme == "file":
        return _file_store(method, launch, limit)
    host, port = _host_and_port(_of_environment() if scheme == "env" else method)
    # torchrun's agent keeps the store itself, and says so.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    private = is_loopback(host)
    if host == "localhost":
        host = "127.0.0.1"  # one address family, so that listener and clients don't miss each other
    if not hosts:
        _wait_for_listener(host, port, launch, timeout)
    listener = _listener(host if private else "", port, launch) if hosts else None
    try:
        # The first TCPStore in a process looks up its peer's name: 5 to 10 s if a name service does not answer.
        return dist.TCPStore(host, port, None, hosts, limit, wait_for_workers=False, master_listen_fd=listener)
    except (RuntimeError, ValueError) as error:
        raise MeshError(
            f"rank {launch.rank} cannot meet the others at {url(host, port)}",
            got=str(error).splitlines()[0],
            remedy="name an address of rank 0's host, which it reaches itself, and a port that nothing else uses",
        ) from None


def _file_store(method: str, launch: Launch, limit: datetime.timedelta) -> dist.Store:
    path = urllib.parse.urlparse(method).path
    try:
        os.close(open_own(path))
    except (OSError, MeshError) as error:
        raise MeshError(
            f"rank {launch.rank} cannot meet the others at {method}", got=str(error), remedy="choose another path"
        ) from None
    store = dist.FileStore(path, launch.size)
    # When a store is freed, its rank signs off, and the last one removes the file: a fork must never free it.
    os.register_at_fork(after_in_child=functools.partial(ctypes.pythonapi.Py_IncRef, ctypes.py_object(store)))
    store.set_timeout(limit)
    return store


def _of_environment() -> str:
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise MeshError("env:// needs MASTER_ADDR and MASTER_PORT", got=f"no {', '.join(missing)}")
    return url(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])


def _host_and_port(method: str) -> tuple[str, int]:
    address = urllib.parse.urlparse(method)
    try:
        host, port = address.hostname or "", address.port or 0
        host.encode("idna")  # as for looking it up
    except ValueError:  # a port, or a name, that is none
        host, port = "", 0
    if address.scheme != "tcp" or not host or not port:
        raise MeshError("cannot meet there", got=repr(method), expected='"env://", "tcp://host:port" or "file:///path"')
    return host, port


def _wait_for_listener(host: str, port: int, launch: Launch, timeout: float) -> None:
    """Wait until something listens there: TCPStore's own retries overrun the timeout and print stack traces."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise MeshError(
                    f"rank {launch.rank} of {launch.size} (from {launch.source}) found nobody at {host}:{port} "
                    f"within {timeout:g} s, where rank 0 should be",
                    got=str(error),
                    remedy="check that rank 0 was started and that its host is reachable under that name",
                ) from None
            time.sleep(0.05)


def _listener(host: str, port: int, launch: Launch) -> int:
    """A listening socket for the store, as a descriptor: at one address, or at all of them.

    TCPStore itself always listens at all addresses, and may share a port that is in use, which must be an error.
    """
    everywhere = not host and socket.has_ipv6
    family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=everywhere and socket.has_dualstack_ipv6()
        ).detach()
    except OSError as error:
        for parent, name in itertools.product(ancestors(), variables_of(launch.source)[:1]):
            if environ_of(parent).get(name) == os.environ.get(name) and listens(parent, port):
                raise started_by(launch, parent) from None
        raise MeshError(
            f"rank {launch.rank} cannot meet the others at port {port}",
            got=os.strerror(error.errno or 0),
            remedy="end what uses the port, or choose another",
        ) from None
