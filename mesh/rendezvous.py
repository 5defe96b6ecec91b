"""Meeting: how launched ranks find each other, and what is said when they don't.

A `torch.distributed` store is the meeting place: one that the user has, or one made from `env://`, `tcp://host:port`
or `file:///path`. Then comes a roll call: every rank signs in, and nobody goes on before all have. Invariant: a rank
that is missing, there twice or of another opinion on the number of ranks is named within the timeout, on all ranks.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
import tempfile
import time
import urllib.parse

import torch.distributed as dist

from ..kernels.errors import MeshError, message
from ..kernels.hosts import innermost, limit_silence
from ..kernels.interface import address_of, chosen, towards
from .environments import Launch, detect

_explicit: Launch | None = None
_given_store: dist.Store | None = None
_met: dist.Store | None = None
_interface: str | None = None
_host_of_store: str | None = None


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
    """Make this process a rank by explicit arguments, which go before any environment variable.

    Call it before the first Mesh, in every process of the job; `Mesh(...)` then spans them.

    Args:
        rank: 0 to size - 1, each once.
        size: number of ranks of the job.
        init_method: where to meet: "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" (of rank 0), "file:///path"
            (on a file system that all share).
        store: an existing `torch.distributed.Store` to meet in instead.
        local_rank, local_size: this rank's number on its host, and how many are there.
        interface: the network interface, or the address, at which the other hosts reach this one; None takes
            SPMD_INTERFACE, then GLOO_SOCKET_IFNAME, then the one that leads to where the ranks meet.

    Raises:
        MeshError: bad numbers, both or none of the meeting places, or called after the first Mesh.
    """
    global _explicit, _given_store, _interface
    if _met is not None:
        raise MeshError(
            message("initialize was called after the ranks had met", remedy="call it before the first Mesh")
        )
    if not 0 <= rank < size:
        raise MeshError(message("initialize got a bad rank", got=f"rank {rank} of {size}", expected=f"0 to {size - 1}"))
    if (init_method is None) == (store is None):
        raise MeshError(message("initialize needs one of init_method and store", remedy="say where the ranks meet"))
    _explicit = Launch(rank, size, rank if local_rank is None else local_rank, local_size, init_method, "initialize")
    _given_store, _interface = store, interface


def launch_of_process() -> Launch | None:
    """How this process was made a rank, or None if it is none."""
    return _explicit if _explicit is not None else detect()


def meet(launch: Launch, timeout: float) -> dist.Store:
    """The store in which all ranks of the job have signed in; made once in a process."""
    global _met, _host_of_store
    if _met is None:
        method = launch.init_method or _beside_parent()
        store = _given_store if _given_store is not None else _store_at(method, launch, timeout)
        _host_of_store = getattr(innermost(store), "host", None)  # a file is nowhere
        limit_silence(store, max(1.0, timeout / 2))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"spmd/{attempt}", store)
        _roll_call(store, launch, timeout, "the given store" if _given_store is not None else method)
        _met = store
    return _met


def address() -> str | None:
    """Where the other hosts reach this one, as far as this rank knows; call it after `meet`."""
    interface = _interface or chosen()
    if interface is not None:
        return address_of(interface)
    return None if _host_of_store is None else towards(_host_of_store)


def _beside_parent() -> str:
    """Where ranks of one parent on one host meet when nothing says it: a file named after that process."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    return f"file://{tempfile.gettempdir()}/spmd-{os.getuid()}-{os.getppid()}-{started}"


def _store_at(method: str, launch: Launch, timeout: float) -> dist.Store:
    address = urllib.parse.urlparse(method)
    limit = datetime.timedelta(seconds=timeout)
    if address.scheme == "file":
        try:
            with open(address.path, "ab"):
                pass
        except OSError as error:
            raise MeshError(
                message(
                    f"rank {launch.rank} cannot meet the others at {method}",
                    got=str(error),
                    remedy="choose another path",
                )
            ) from None
        store = dist.FileStore(address.path, launch.size)
        store.set_timeout(limit)
        return store
    if address.scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise MeshError(message("env:// needs MASTER_ADDR and MASTER_PORT", got=f"no {', '.join(missing)}"))
        host = os.environ["MASTER_ADDR"]
        method = f"tcp://{f'[{host}]' if ':' in host else host}:{os.environ['MASTER_PORT']}"
        address = urllib.parse.urlparse(method)
    try:
        host, port = address.hostname or "", address.port or 0
    except ValueError:  # a port that is none
        host, port = "", 0
    if address.scheme != "tcp" or not host or not port:
        raise MeshError(
            message("cannot meet there", got=repr(method), expected='"env://", "tcp://host:port" or "file:///path"')
        )
    # torchrun's agent keeps the store itself, and says so.
    hosts = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if hosts:
        _check_port_free(host, port, launch)
    else:
        _wait_for_listener(host, port, launch, timeout)
    try:
        # The first of these in a process asks for its peer's name: 5 to 10 s where a name service does not answer.
        return dist.TCPStore(host, port, None, hosts, limit, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise _port_error(port, launch, str(error).splitlines()[0]) from None


def _wait_for_listener(host: str, port: int, launch: Launch, timeout: float) -> None:
    """TCPStore's own retries overrun the timeout and print stack traces."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise MeshError(
                    message(
                        f"rank {launch.rank} of {launch.size} (from {launch.source}) found nobody at {host}:{port} "
                        f"within {timeout:g} s, where rank 0 should be",
                        got=str(error),
                        remedy="check that rank 0 was started and that its host is reachable under that name",
                    )
                ) from None
            time.sleep(0.05)


def _check_port_free(host: str, port: int, launch: Launch) -> None:
    """TCPStore may share a port with whoever has it; a stranger's port must be an error, at once."""
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        except OSError as error:
            raise _port_error(port, launch, str(error)) from None


def _port_error(port: int, launch: Launch, reason: str) -> MeshError:
    return MeshError(
        message(
            f"rank {launch.rank} cannot meet the others at port {port}",
            got=reason,
            remedy="end what uses the port, or choose another",
        )
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """Who signed in as a rank."""

    host: str
    pid: int
    size: int

    @staticmethod
    def parse(text: str) -> _Signature:
        host, pid, size = text.rsplit(" ", 2)
        return _Signature(host, int(pid), int(size))

    def stale(self) -> bool:
        """Whether that process was on this host and is no more."""
        return self.host == socket.gethostname() and not os.path.exists(f"/proc/{self.pid}")


def _roll_call(store: dist.Store, launch: Launch, timeout: float, where: str) -> None:
    rank, size = launch.rank, launch.size
    mine = f"{socket.gethostname()} {os.getpid()} {size}"
    if store.add(f"count/{rank}", 1) > 1:
        other = _Signature.parse(store.get(f"rank/{rank}").decode())
        if other.stale():
            problem = (
                f"the meeting place {where} is left over from an earlier run (process {other.pid}, which has ended)"
            )
            remedy = "remove it, or choose another for each run"
        else:
            here = f"{os.getpid()} on {socket.gethostname()}"
            problem = f"two processes are rank {rank}: {other.pid} on {other.host} and {here}"
            remedy = "give each process a rank of its own, and each run a meeting place of its own"
            store.set("refused", problem)
        raise MeshError(message(problem, where=f"size {size}, from {launch.source}", remedy=remedy))
    store.set(f"rank/{rank}", mine)
    end = time.monotonic() + timeout
    missing = set(range(size)) - {rank}
    pause = 1e-3
    while missing:
        for peer in sorted(missing):
            if not store.check([f"rank/{peer}"]):
                continue
            missing.discard(peer)
            signature = _Signature.parse(store.get(f"rank/{peer}").decode())
            if signature.size != size:
                problem = (
                    f"ranks disagree on how many there are: rank {peer} says {signature.size}, rank {rank} says {size}"
                )
                store.set("refused", problem)
                raise MeshError(message(problem, remedy="start all ranks with the same number"))
        if store.check(["refused"]):
            raise MeshError(
                message(store.get("refused").decode(), where=f"rank {rank}", remedy="correct the start of the job")
            )
        if missing and time.monotonic() > end:
            raise MeshError(
                message(
                    f"{len(missing)} of {size} ranks did not come within {timeout:g} s: {sorted(missing)}",
                    where=f"rank {rank}, at {where}",
                    remedy="check that they were started, with the same number of ranks and the same meeting place",
                )
            )
        if missing:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
