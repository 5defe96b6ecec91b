"""`Mesh`: named axes over ranks, wherever they come from.

Three ways to be one. In the driver a mesh owns rank processes (`DriverSession`); in a launched script it is this rank's
place among its peers (`RankSession`); and a mesh captured by a function that was shipped to a driver's rank arrives
there as that rank's view.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ..kernels import arena as arena_module
from ..kernels.callsite import hide_our_frames
from ..kernels.communicator import Communicator
from ..kernels.errors import MeshError, message
from ..kernels.registry import backends
from . import launched, tasks, wire
from .array import Array, LocalSource
from .driver import DriverSession, ResidentSource
from .rank import RankSession
from .region import Region, current, inside, seed_generators
from .rendezvous import launch_of_process
from .spec import REPLICATED, Layout


class Mesh:
    """Named axes over ranks: the processes that a program's steps run on.

    >>> with Mesh({"data": 2}) as mesh:
    ...     mesh.run(lambda: mesh.rank)
    [0, 1]

    Args:
        axes: name -> size, the first varying slowest; one size may be -1, meaning all ranks there are: in a launched
            job its size, else SPMD_RANKS if that is set, else this host's cores. None is {"data": -1}.
        backend: "auto", "shm" (one host), "gloo", or a name given to `register_backend`.
        device: "auto" or "cpu".
        threads: torch threads of each rank; None shares the host's cores among its ranks, at least 1 each.
        seed: what the random numbers of all regions are made from.
        timeout: seconds of silence after which a wait ends in an error.

    Attributes:
        axes, size: as made.
        rank: this process's rank, None in the driver.
        backend, device: as chosen.

    Raises:
        MeshError: the ranks cannot be had, or do not fit the axes.
    """

    def __init__(
        self,
        axes: dict[str, int] | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
    ):
        if current() is not None:
            raise MeshError(message("a Mesh cannot be made inside a region", remedy="make it outside and use it here"))
        _check_arguments(backend, device, threads, timeout)
        launch = launch_of_process()
        layout = _layout({"data": -1} if axes is None else dict(axes), launch)
        self._layout, self.seed, self.timeout = layout, seed, timeout
        self.device = "cpu"
        self._depth = self._calls = self._runs = 0
        self._known: dict[Any, Any] = {}
        self._rank_session: RankSession | None = None
        self._driver: DriverSession | None = None
        if launch is not None:
            self.threads = launched.set_threads(threads, launch, layout.size)
            self._rank_session, self.backend = launched.join(
                layout, launch, backend=backend, seed=seed, timeout=timeout
            )
        else:
            self.threads = threads or max(1, len(os.sched_getaffinity(0)) // layout.size)
            self.backend = ("gloo" if arena_module.supported() else "shm") if backend == "auto" else backend
            self._driver = DriverSession(
                self, layout, backend=self.backend, threads=self.threads, seed=seed, timeout=timeout
            )
            weakref.finalize(self, _close_quietly, self._driver).atexit = False

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def axes(self) -> dict[str, int]:
        return self._layout.axes

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def rank(self) -> int | None:
        return None if self._rank_session is None else self._rank_session.rank

    @property
    def is_driver(self) -> bool:
        return self._rank_session is None

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """A rank's coordinates by axis name (this rank's own, on a rank)."""
        rank = self.rank if rank is None else rank
        if rank is None or not 0 <= rank < self.size:
            raise MeshError(message("coords got a bad rank", got=rank, expected=f"0 to {self.size - 1}"))
        return self._layout.coords(rank)

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, backend={self.backend!r}, device={self.device!r})"

    # -- using it ----------------------------------------------------------------------------------------------------------

    def comm(self, axis: str | tuple[str, ...] | None = None) -> Communicator:
        """The message-passing interface among the ranks along `axis` (None: all), inside a rank.

        Raises:
            MeshError: called in the driver, which is no rank.
        """
        if self._rank_session is None:
            raise MeshError(
                message("mesh.comm was called in the driver, which is not a rank", remedy="call it inside mesh.run")
            )
        return self._rank_session.comm(axis)

    def run(self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call `fn(*args)` on every rank, or on some; collectives work in it.

        Returns:
            The results, of any type, in rank order (of `ranks`, in the order given).

        Raises:
            what `fn` raises on a rank, as its own type, with that rank's traceback.
        """
        try:
            return self._run(fn, args, self._check_ranks(ranks))
        except BaseException as error:
            raise hide_our_frames(error) from error.__cause__

    def _run(self, fn: Callable[..., Any], args: tuple, chosen: list[int]) -> list[Any]:
        if self._driver is not None:
            driver = self._driver
            key = driver.ship_function(fn)
            return driver.wait(
                driver.submit(tasks.call_function, (key, args, self._run_key()), ranks=chosen, region=True)
            ).values()
        session = self.session
        result = self._launched_call(lambda: self._call_here(fn, args)) if session.rank in chosen else None
        everyone = session.comm().all_gather_bytes(wire.dumps(result).data if session.rank in chosen else b"")
        return [result if rank == session.rank else wire.loads(wire.Packet(everyone[rank])) for rank in chosen]

    def submit(self, fn: Callable[..., Any], *args: Any, rank: int = 0) -> Future:
        """Start `fn(*args)` on one rank and return a future of its result; collectives do not work in it."""
        (chosen,) = self._check_ranks([rank])
        future: Future = Future()
        future.set_running_or_notify_cancel()
        if self._driver is not None:
            key = self._driver.ship_function(fn)
            self._driver.submit(tasks.call_function, (key, args, self._run_key()), ranks=[chosen], future=future)
            return future
        try:
            future.set_result(self.run(fn, *args, ranks=[chosen])[0])
        except BaseException as error:
            future.set_exception(error)
        return future

    def _call_here(self, fn: Callable[..., Any], args: tuple) -> Any:
        region = Region(self.session, self._run_key(), self)
        state = torch.get_rng_state()
        seed_generators((*region.key, self.session.rank))
        try:
            with inside(region), torch.enable_grad():
                return fn(*args)
        finally:
            torch.set_rng_state(state)

    def _launched_call(self, call: Callable[[], Any]) -> Any:
        """A region on a launched rank: all ranks raise what one of them raises."""
        session = self.session
        session.regions += 1
        failed: BaseException
        try:
            with session.region(session.regions):
                return call()
        except BaseException as error:
            failed = launched.recover(session, error, repr(self))
        raise failed

    def _run_key(self) -> tuple:
        self._runs += 1
        return (self.seed, "run", self._runs)

    def _check_ranks(self, ranks: Sequence[int] | None) -> list[int]:
        if current() is not None:
            raise MeshError(
                message(
                    "mesh.run and mesh.submit were called inside a region", remedy="call the function directly there"
                )
            )
        chosen = list(range(self.size)) if ranks is None else [int(rank) for rank in ranks]
        for rank in chosen:
            if not 0 <= rank < self.size:
                raise MeshError(message("there is no such rank", got=rank, expected=f"0 to {self.size - 1}"))
        return chosen

    @property
    def session(self) -> RankSession:
        if self._rank_session is None:
            raise MeshError(message("this needs a rank, and the driver is none", remedy="call it inside mesh.run"))
        return self._rank_session

    @property
    def driver(self) -> DriverSession:
        assert self._driver is not None
        return self._driver

    # -- beginning and end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the ranks and free what they hold; values on the mesh are gone. Raises an error not yet seen."""
        if _default_mesh() is self:
            _set_default(None)
        if self._driver is not None:
            self._driver.close()
        elif self._rank_session is not None and self._rank_session.launched:
            self._rank_session.close()

    def __enter__(self) -> Mesh:
        if self._driver is not None and self._driver.closed is not None:
            raise MeshError(message(f"this mesh is closed: {self._driver.closed}", remedy="make a new Mesh"))
        self._depth += 1
        _entered().append(self)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _entered().remove(self)
        self._depth -= 1
        if self._depth == 0 and current() is None:
            if error is None:
                self.close()
            else:
                with contextlib.suppress(BaseException):  # the error under way says more
                    self.close()


def _close_quietly(driver: DriverSession) -> None:
    with contextlib.suppress(BaseException):
        driver.close("nothing refers to it any more")


def _check_arguments(backend: str, device: str, threads: int | None, timeout: float) -> None:
    if backend != "auto" and backend not in backends():
        raise MeshError(
            message("Mesh got an unknown backend", got=repr(backend), expected=f'"auto" or one of {sorted(backends())}')
        )
    if backend == "shm" and arena_module.supported():
        raise MeshError(message("backend 'shm' can't be used here", got=arena_module.supported(), remedy="use 'gloo'"))
    if device not in ("auto", "cpu"):
        raise MeshError(message("Mesh got a device it can't use yet", got=repr(device), expected='"auto" or "cpu"'))
    if threads is not None and threads < 1:
        raise MeshError(message("Mesh got a bad threads", got=threads, expected="at least 1, or None"))
    if not timeout > 0:
        raise MeshError(message("Mesh got a bad timeout", got=timeout, expected="seconds, more than 0"))


def _layout(axes: dict[str, int], launch: Any) -> Layout:
    """The axes with -1 filled in; refuses what does not fit the launched job."""
    if not axes:
        raise MeshError(message("Mesh got no axes", remedy='name at least one, such as {"data": -1}'))
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise MeshError(message("Mesh got a bad axis name", got=repr(name), expected="a non-empty string"))
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(
                message(f"axis {name!r} got a bad size", got=repr(size), expected="a positive integer or -1")
            )
    free = [name for name, size in axes.items() if size == -1]
    if len(free) > 1:
        raise MeshError(message("only one axis may have size -1", got=repr(axes)))
    known = math.prod(size for size in axes.values() if size != -1)
    if launch is not None:
        total, origin = launch.size, f"this job has {launch.size} ranks (from {launch.source}'s variables)"
    else:
        total = int(os.environ.get("SPMD_RANKS") or max(known, len(os.sched_getaffinity(0))))
        origin = "SPMD_RANKS" if os.environ.get("SPMD_RANKS") else f"this host has {total} cores"
    if free:
        if total % known:
            raise MeshError(
                message(
                    f"axis {free[0]!r} cannot be filled in",
                    got=f"{axes}, and {origin}",
                    remedy="make the sizes divide it",
                )
            )
        axes = {**axes, free[0]: total // known}
    elif launch is not None and known != total:
        raise MeshError(
            message(
                "the mesh does not fit the job",
                got=f"{axes}, {known} ranks, but {origin}",
                remedy="start as many ranks as the mesh has, or give one axis the size -1",
            )
        )
    return Layout(tuple(axes.items()))


# -- which mesh is meant --------------------------------------------------------------------------------------------------

_state = threading.local()
_default: Mesh | None = None


def _entered() -> list[Mesh]:
    if not hasattr(_state, "meshes"):
        _state.meshes = []
    return _state.meshes


def _default_mesh() -> Mesh | None:
    return _default


def _set_default(mesh: Mesh | None) -> None:
    global _default
    _default = mesh


def resolve(mesh: Mesh | None) -> Mesh:
    """`mesh`, or that of the region, of the enclosing `with mesh:`, or the process's default (made on first use)."""
    if mesh is not None:
        return mesh
    region = current()
    if region is not None and region.mesh is not None:
        return region.mesh
    if _entered():
        return _entered()[-1]
    if _default is None:
        _set_default(Mesh())
    assert _default is not None
    return _default


# -- meshes and values on their way between processes -----------------------------------------------------------------------


def name_in_driver(session: DriverSession, obj: Any) -> Any:
    if isinstance(obj, Mesh):
        if obj._driver is not session:
            raise MeshError(message("a function refers to another mesh than the one it runs on", got=repr(obj)))
        return ("mesh",)
    if isinstance(obj, Array):
        source = obj._readable()
        if not isinstance(source, ResidentSource) or obj.mesh.driver is not session:
            raise MeshError(
                message(
                    "an Array of another mesh was passed",
                    got=repr(obj),
                    expected=f"one on {session.describe()}",
                    remedy="move it with put(array.full(), mesh=...)",
                )
            )
        session.restore(source.value, obj)
        shape, _, spec, _ = source.settle()
        return ("array", source.value, tuple(shape), spec)
    return None


def object_in_driver(session: DriverSession, name: Any) -> Any:
    if name[0] == "mesh":
        return session._mesh()
    return session.arrays[name[1]]


def name_on_rank(worker: Any, obj: Any) -> Any:
    if isinstance(obj, Mesh):
        return ("mesh",)
    if isinstance(obj, Array):
        source: Any = obj._source
        if getattr(source, "value", None) is None:
            raise MeshError(
                message("an Array made on a rank cannot be returned from mesh.run", remedy="return its local tensor")
            )
        return ("array", source.value)
    return None


def object_on_rank(worker: Any, name: Any) -> Any:
    if name[0] == "mesh":
        return worker.mesh
    _, value, shape, spec = name
    source = LocalSource(worker.session, worker.values[value][0], spec, shape)
    source.value = value  # type: ignore[attr-defined]
    return Array(worker.mesh, source)


def mesh_on_rank(session: RankSession, request: dict[str, Any]) -> Mesh:
    """A driver's mesh as its ranks see it."""
    mesh = Mesh.__new__(Mesh)
    mesh._layout, mesh.seed, mesh.timeout = session.layout, session.seed, session.timeout
    mesh.backend, mesh.device, mesh.threads = session.backend, "cpu", request["threads"]
    mesh._depth = mesh._calls = mesh._runs = 0
    mesh._known, mesh._driver, mesh._rank_session = {}, None, session
    return mesh


def put(tree: Any, spec: Any = REPLICATED, *, mesh: Mesh | None = None) -> Any:
    """Place a tree of tensors on a mesh.

    >>> with Mesh({"data": 2}) as mesh:
    ...     put(torch.arange(4), P("data"), mesh=mesh).shards()
    [tensor([0, 1]), tensor([2, 3])]

    Args:
        tree: of tensors, NumPy arrays, numbers or Arrays.
        spec: a P, or a prefix tree of P.
        mesh: None is the enclosing or default mesh.

    Returns:
        The tree with an Array for every leaf.

    Raises:
        SpecError: a spec does not fit the mesh, or a dimension is not divisible.
    """
    from .placing import place

    return place(resolve(mesh), tree, spec)
