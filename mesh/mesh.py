"""`Mesh`: named axes over ranks, in a driver, a launched script or a driver's rank.

In the driver, a mesh owns rank processes (`DriverSession`). In a launched script, it is this rank's place among its
peers (`RankSession`). In a function that was shipped to a driver's rank, a captured mesh arrives as that rank's view.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from ..kernels.arguments import is_whole, plain_text
from ..kernels.callsite import public
from ..kernels.communicator import Communicator
from ..kernels.errors import MeshError, RankOnly
from ..kernels.interrupts import uninterrupted
from . import running
from .arguments import check_arguments, check_same, hosts_of, layout_of, no_mesh, threads_of
from .display import drawing, stacks, status
from .driver import lost_values
from .driver.session import DriverSession
from .hosts.host_list import HostList
from .launch import launched
from .launch.rendezvous import launch_of_process
from .rank import devices
from .rank.session import RankSession
from .region import current, planned_session
from .replication.messages import followed
from .resizing import resize as resizing
from .run_state import RunState
from .spec import Layout


@public
class Mesh:
    """Named axes over ranks: the processes that a program's steps run on.

    >>> with Mesh({"data": 2}) as mesh:
    ...     mesh.run(lambda: mesh.rank)
    [0, 1]

    Args:
        axes: name -> size, the first varying slowest; one size may be -1, meaning all ranks there are: in a launched
            job its size, else SPMD_RANKS if that is set, else as many as this process sees GPUs if `device` is to be
            "cuda", else this host's cores. None is {"data": -1}.
        backend: "auto", "shm" (one host), "hierarchical" (several), "gloo", "mpi" (under mpirun), "nccl" (GPUs), or a
            name given to `register_backend`.
        device: "cpu", "cuda" (one GPU a rank), or "auto": "cuda" if every rank can have a GPU of its own.
        threads: torch threads of each rank; None shares the host's cores among its ranks, at least 1 each (under
            `data_parallel(shards=)` None is 1, since the number of threads may change the bits).
        seed: what the random numbers of all regions are made from.
        timeout: seconds of silence after which a wait ends in an error.
        on_loss: what happens to @spmd calls under way when ranks of a driver die and are replaced: "rerun" runs them
            again, with the same values and random numbers; "raise" raises `PeerLost`, as `mesh.run` always does.
        grace: seconds for which a driver's rank may do nothing (make no progress, use no processor time) while it is
            waited for. Then it is killed, its stack is shown, and it counts as dead. `math.inf`: never.
        hosts: where a driver's ranks run: ["a:2", "b:2"] by ssh, "slurm", "ray", "local:2x2": docs/hosts.md; None: here
        copies: how many other hosts keep a copy of each value, so that it survives the loss of that many hosts:
            docs/survival.md

    Attributes:
        axes: name -> size. `size`, `backend` and `device` are as given or chosen; `rank` is None in a driver.

    Raises:
        MeshError: the ranks cannot be started or found, or their number does not fit the axes.
    """

    _driver: DriverSession | None  # set in a driver, else None
    _rank_session: RankSession | None  # set on a rank, else None
    hosts: HostList | None  # in a driver that was given hosts=
    threads: int
    pinned_threads: int

    def __init__(
        self,
        axes: dict[str, int] | None = None,
        *,
        backend: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        on_loss: str = "rerun",
        grace: float = 30.0,
        hosts: Any = None,
        copies: int = 0,
    ):
        if current() is not None:
            raise MeshError("a Mesh cannot be made inside a region", remedy="make it outside and use it here")
        seed, timeout, grace = check_arguments(backend, device, threads, seed, timeout, on_loss, grace)
        backend, device, threads = plain_text(backend), plain_text(device), None if threads is None else int(threads)
        launch = launch_of_process() if _here is None else None
        default_size = functools.partial(devices.default_size, device, backend)
        host_list = hosts_of(hosts, copies, launch, backend, device)
        layout = layout_of({"data": -1} if axes is None else axes, launch, default_size, host_list)
        if _here is not None:
            check_same(layout, _here.layout, _here.describe())
            self._be_view(_here.session, _here.threads, _here.pinned_threads)
            return
        self._set(layout, seed, timeout, grace, on_loss)
        global _newest
        _newest = weakref.ref(self)
        self._threads, self.pinned_threads = threads, threads or 1
        if launch is not None:
            self.threads = launched.set_threads(threads, launch, layout.size)
            joined = launched.join(layout, launch, backend=backend, device=device, seed=seed, timeout=timeout)
            self._rank_session, self.backend = joined
            self.device = self._rank_session.device.type
            self._rank_session.mesh_text = self.describe()
        else:
            self.hosts, self.copies, self.threads = host_list, int(copies), threads_of(threads, layout.size, host_list)
            self.device, self.backend = devices.chosen(device, backend, layout.size, several=host_list is not None)
            self._start()

    def _start(self) -> None:
        try:
            with uninterrupted():
                self._driver = DriverSession(self)
            self._driver.start()
        except BaseException:
            if self._driver is not None:
                self._driver.shut("it could not be made")
            raise

    def _set(self, layout: Layout, seed: int, timeout: float, grace: float = 0.0, on_loss: str = "raise") -> None:
        self._layout, self.seed, self.timeout, self.grace, self.device = layout, seed, timeout, grace, "cpu"
        self.on_loss, self._depth, self.most_ranks = on_loss, 0, layout.size  # the most so far
        self.at_close: list[Future] = []  # what to wait for before the ranks are stopped
        self._restarting = threading.RLock()
        self._rank_session = self._driver = self.hosts = None

    @classmethod
    def on_rank(cls, session: RankSession, threads: int, pinned: int) -> Mesh:
        """A driver's mesh as its rank sees it; from now on it is the only mesh in this process."""
        global _here
        mesh = cls.__new__(cls)
        mesh._be_view(session, threads, pinned)
        _here = mesh
        return mesh

    def _be_view(self, session: RankSession, threads: int, pinned: int) -> None:
        self._set(session.layout, session.seed, session.timeout)
        self._rank_session, self.backend, self.device = session, session.backend, session.device.type
        self.threads, self.pinned_threads = threads, pinned

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def axes(self) -> dict[str, int]:
        return dict(self._layout.axes)

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def rank(self) -> int | None:
        return None if self._rank_session is None else self._rank_session.rank

    @property
    def is_driver(self) -> bool:
        return self._rank_session is None

    @public
    def coords(self, rank: int | None = None) -> dict[str, int]:
        """A rank's coordinates by axis name (this rank's own, on a rank)."""
        rank = self.rank if rank is None else rank
        if rank is None or not is_whole(rank) or rank not in range(self.size):
            raise MeshError("coords got a bad rank", got=repr(rank), expected=f"0 to {self.size - 1}")
        return self._layout.coords(int(rank))

    @public
    def __reduce__(self) -> Any:
        raise MeshError("a Mesh cannot be pickled: it is processes", remedy="make one where you need it")

    def describe(self) -> str:
        """The mesh in one line."""
        return f"Mesh({self.axes}, backend={self.backend!r}, device={self.device!r})"

    def __repr__(self) -> str:
        few = self.size <= drawing.MOST_DRAWN
        return "\n".join(map(drawing.text, self._grids())) if few else self.describe()

    def _repr_html_(self) -> str:
        return drawing.html(self._grids(), self.size)

    def _grids(self) -> list[drawing.Grid]:
        return drawing.mesh_grids(self._layout, self.describe(), () if self.hosts is None else self.hosts.by_rank())

    @property
    def run_state(self) -> RunState:
        """How far the program has got on these ranks."""
        return (self._rank_session or self.driver).run_state

    def same_as(self, other: Mesh) -> bool:
        """Whether two objects stand for one mesh."""
        return self is other or (self._rank_session is not None and self._rank_session is other._rank_session)

    @public
    def comm(self, axis: str | tuple[str, ...] | None = None, *, ranks: Sequence[int] | None = None) -> Communicator:
        """On a rank, a communicator (messages, collectives) of the ranks along `axis` (None: all), or of `ranks`.

        Args:
            ranks: any ranks of the mesh, including this one. All of them must make the call with the same list, and its
                order is the group's.

        Raises:
            MeshError: called in the driver, which is no rank; or `ranks` can't be a group.
        """
        session = planned_session() or (None if self._rank_session is None else self.session)
        if session is None:
            raise MeshError("mesh.comm was called in the driver, which is not a rank", remedy="call it inside mesh.run")
        return followed(session.comm_among(ranks, axis), session.layout)

    device_mesh = property(running.device_mesh)
    run, submit, remote, reload = running.run, running.submit, running.remote, running.reload
    if not TYPE_CHECKING:  # for type checkers a name that is not there is an error
        __getattr__ = running.refuse_attribute

    @property
    def session(self) -> RankSession:
        if self._rank_session is None:
            raise RankOnly("this needs a rank, and the driver is none", remedy="call it inside mesh.run")
        if self._rank_session.closed:
            raise MeshError("this mesh is closed", where=self.describe(), remedy="make a new Mesh")
        return self._rank_session

    @property
    def driver(self) -> DriverSession:
        assert self._driver is not None
        return self._driver

    @property
    def closed(self) -> bool:
        return bool(getattr(self._driver or self._rank_session, "closed", True))

    @public
    def close(self) -> None:
        """Stop the ranks and free what they hold; values on the mesh are lost. Raises an error that nobody has seen."""
        global _default
        if _default is self:
            _default = None
        if getattr(self._driver or self._rank_session, "foreign", False):  # in a fork: the parent's goes on
            return
        if self._driver is not None:
            self._driver.close()
        elif self._rank_session is not None and self._rank_session.launched:
            wait(self.at_close)
            self._rank_session.close()
        at_close, self.at_close = self.at_close, []
        for future in (one for one in at_close if not getattr(one, "reported", True)):
            future.result()  # raises its error, which nobody has seen

    @public
    def restart(self) -> None:
        """Kill the ranks, whatever they are doing, and start new ones: the mesh is as if it had just been made.

        Values on it are lost, and reading one raises MeshError. Works on a closed mesh, too.

        Raises:
            MeshError: called on a rank.
        """
        self.check_driver("restart", "end the job and launch it again")
        with self._restarting:
            self.driver.shut(lost_values.RESTARTED, "make them again")
            self._start()

    stacks, status = stacks.stacks, status.status
    resize, retire = resizing.resize, resizing.retire

    def set_layout(self, layout: Layout, threads: int, hosts: HostList | None) -> None:
        """From now on, stand for ranks with this layout and this many threads each, on these hosts."""
        self._layout, self.threads, self.hosts = layout, threads, hosts
        self.most_ranks = max(self.most_ranks, layout.size)

    def threads_for(self, layout: Layout) -> int:
        """How many threads a rank has if this driver's mesh has that layout."""
        return threads_of(self._threads, layout.size, self.hosts)

    def check_driver(self, what: str, remedy: str) -> None:
        """Refuse what only a driver can do, between the calls of its steps."""
        if self._driver is None or current() is not None:
            problem = f"mesh.{what} is for the program that started the ranks"
            raise MeshError(problem, where=self.describe(), remedy=remedy)

    @public
    def __enter__(self) -> Mesh:
        if self._driver is not None:
            self._driver.check_open()
        self._depth += 1
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        entered = _entered.get()
        if self in entered:  # else another thread has begun the block
            last = len(entered) - 1 - entered[::-1].index(self)
            _entered.set(entered[:last] + entered[last + 1 :])
        self._depth -= 1
        if self._depth == 0 and current() is None:
            with contextlib.suppress(*([] if error is None else [Exception])):  # the error under way says more
                self.close()


# -- which mesh is meant ----------------------------------------------------------------------------------------------


# The meshes of the `with mesh:` blocks that a thread is in, or a task of asyncio: tasks of one thread take turns.
_entered: contextvars.ContextVar[tuple[Mesh, ...]] = contextvars.ContextVar("entered", default=())
_default: Mesh | None = None
_making = threading.RLock()  # so that threads get the same one
_newest: weakref.ref[Mesh] | None = None
_here: Mesh | None = None  # in a driver's rank: its view of the driver's mesh


def resolve(mesh: Mesh | None) -> Mesh:
    """`mesh`, or that of the region, of the enclosing `with mesh:`, or the process's default (made on first use)."""
    global _default
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise no_mesh(mesh)
        return mesh
    region = current()
    if region is not None and region.mesh is not None:
        return region.mesh
    for mesh in reversed(_entered.get()):
        if mesh._depth:  # else another thread has ended the block
            return mesh
    while (found := _default) is None or found.closed:
        with _making:
            if _default is found:
                _default = Mesh()
    return found


def nearest() -> Mesh | None:
    """The mesh that a drawing most likely means: as in `resolve`, else the newest open one. Never makes a mesh."""
    region, newest = current(), None if _newest is None else _newest()
    for mesh in (region.mesh if region is not None else None, *_entered.get()[-1:], _default, _here, newest):
        if mesh is not None and not mesh.closed:
            return mesh
    return None
