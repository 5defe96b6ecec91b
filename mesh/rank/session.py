"""A rank's side of a mesh: its communicators, how it enters and leaves a region, and how it gives up.

The same object serves a rank of a driver (`worker.py` runs it) and a launched rank (the user's script runs it).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...kernels.arguments import checked_ranks
from ...kernels.call import call_of, here
from ...kernels.communicator import Communicator
from ...kernels.errors import Aborted, MeshError, SpecError
from ...kernels.network.hosts import HostWatch
from ...kernels.processes import Owned, forked_cannot, spread
from ...kernels.registry import make_communicator
from ...kernels.shm.arena import Arena
from ...kernels.torch_private import outside_torch_func
from ..failure import text_of
from ..run_state import RunState
from ..spec import Layout
from ..strides import frozen_as
from .counted import CountedCommunicator, thread
from .finished import Finished
from .lasting_values import KnownLayout, LastingValues, copy_out
from .memory import keep_freed_memory, release_freed_memory

_PAGEABLE_BYTES = 1 << 16  # up to so many, CUDA copies without waiting from memory that is not pinned
_TRIM_REGIONS = 16  # after this many, the arena's heap gives back memory that they did not use


class RankSession(Owned):
    """What one rank knows of its mesh.

    Args:
        layout: the axes.
        rank: this process's place in it.
        backend: the name under which the transport is registered.
        watch: through which aborts travel: the arena, a watch over the store, or both joined.
        store: a `torch.distributed` store shared by all ranks, where the backend needs one.
        device: where this rank's tensors are; None is the CPU.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        backend: str,
        watch: Any,
        store: Callable[[], Any],
        timeout: float,
        seed: int,
        launched: bool,
        device: torch.device | None = None,
    ):
        super().__init__()
        keep_freed_memory()
        self.layout, self.rank, self.backend = layout, rank, backend
        self.watch, self.store, self.timeout, self.seed, self.launched = watch, store, timeout, seed, launched
        self.device = torch.device("cpu") if device is None else device
        self.regions = 0
        self.closed = False
        self.finished = Finished()
        self.calls_in_run: dict[Any, int] = {}  # of @spmd functions, by signature; the same on all ranks
        self._steps = 0  # calls of @spmd functions in this region, within `mesh.run`
        self.run_state = RunState()
        # On a launched rank: for each @spmd function, its calls by signature; see `calling`.
        self.calls: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.mesh_text = "a mesh"  # for messages
        # On a driver's rank that computes on the CPU: the memory for values that outlive the rank.
        self.lasting: LastingValues | None = None
        self.copied = False  # values have copies on other hosts; then donated ones are not overwritten
        self.node: Any = None  # on a driver's rank: its part in calls of remote objects
        self.apart = threading.local()  # set on threads of remote objects, which run beside regions
        self._alone = False
        self._comms: dict[tuple[tuple[int, ...], str], Communicator] = {}
        self._groups: dict[Any, tuple[int, ...]] = {}  # by the `axis` that `comm` was given

    @property
    def arena(self) -> Arena | None:
        """The memory that all ranks of the mesh share, if they are on one host."""
        return self.watch if isinstance(self.watch, Arena) else None

    def axes(self, axis: str | tuple[str, ...] | None, *, what: str = "comm") -> tuple[str, ...]:
        """`axis` as a checked tuple of axis names; None is all of them."""
        if axis is not None and (not isinstance(axis, str | tuple | list) or not axis):
            expected = "an axis name or a tuple of them"
            raise SpecError(f'{what} got a bad "axis"', got=repr(axis), expected=expected)
        axes = self.layout.names if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        for name in axes:
            if not isinstance(name, str) or name not in self.layout.axes:
                raise SpecError(
                    f'{what} got an unknown "axis"',
                    got=repr(name),
                    expected=f"one of {self.layout.names}",
                    where=self.where(),
                    remedy="name an axis of the mesh",
                )
        if len(set(axes)) < len(axes):
            raise SpecError(f"{what} names an axis twice", got=repr(axes), remedy="name each axis once")
        return axes

    def where(self) -> str:
        """`rank 2 at (data=1, model=0)`."""
        coords = ", ".join(f"{name}={index}" for name, index in self.layout.coords(self.rank).items())
        return f"rank {self.rank} at ({coords})"

    def comm(self, axis: str | tuple[str, ...] | None = None, channel: str = "main") -> Communicator:
        """The communicator of the ranks that differ from this one in `axis` only."""
        is_key = axis is None or isinstance(axis, str | tuple)  # a list of names can't be looked up
        ranks = self._groups.get(axis) if is_key else None
        if ranks is None:
            ranks = self.layout.group(self.rank, self.axes(axis))
            if is_key:
                self._groups[axis] = ranks
        return self.comm_of(ranks, channel)

    def comm_among(self, ranks: Sequence[int] | None, axis: Any = None) -> Communicator:
        """The communicator of the listed ranks, in that order; without a list, of the ranks along `axis`."""
        if ranks is None:
            return self.comm(axis)
        if axis is not None:
            raise MeshError('comm got both "axis" and "ranks"', remedy="give one of them")
        group = tuple(checked_ranks("mesh.comm", ranks, self.layout.size))
        if self.rank not in group:
            raise MeshError(
                "comm was called on a rank that is not of the group",
                got=list(group),
                where=self.where(),
                remedy="call it only on the ranks that it lists",
            )
        return self.comm_of(group)

    def check_together(self, what: str) -> None:
        """Refuse what all ranks must do together if this rank is running something alone."""
        if self.is_apart:
            problem = f"a method of a remote object cannot {what}: the other ranks take no part in its call"
            remedy = "call other objects, or do that in mesh.run or in the program itself"
            raise MeshError(problem, where=self.where(), remedy=remedy)
        if self._alone:
            raise MeshError(
                f"a function given to mesh.submit cannot {what}: its rank runs it alone",
                where=self.where(),
                remedy="use mesh.run, in which all ranks can do that together",
            )

    @property
    def is_apart(self) -> bool:
        """Whether this thread is a remote object's."""
        return getattr(self.apart, "label", None) is not None

    def comm_of(self, ranks: tuple[int, ...], channel: str = "main") -> Communicator:
        self.check_together("communicate")
        if self.foreign:
            raise forked_cannot("communicate")
        comm = self._comms.get((ranks, channel))
        if comm is None or comm.stale:
            # Otherwise a transform of torch.func would wrap the communicator's own tensors.
            with outside_torch_func():
                comm = self._opened(ranks, channel)
        return self._counted(comm, channel) if comm.size > 1 and thread.counting else comm

    def _counted(self, comm: Communicator, channel: str) -> Communicator:
        axes = self.layout.axes_of(comm.ranks)
        counted: Any = CountedCommunicator(comm, axes, of_gradients=channel == "buckets")
        return counted

    def _opened(self, ranks: tuple[int, ...], channel: str) -> Communicator:
        comm = self._comms.get((ranks, channel))
        if comm is None:
            comm = self._comms[ranks, channel] = make_communicator(
                self.backend,
                ranks=ranks,
                rank=self.rank,
                watch=self.watch,
                store=self.store,
                timeout=self.timeout,
                channel=channel,
            )
        # A replacement rank opens its groups when they are asked for; so do the others.
        comm.renew()
        return comm

    @functools.cached_property
    def host_arena(self) -> Arena | None:
        """The arena of this rank's host, where results may lie that other ranks read, too."""
        return self.watch.arena if isinstance(self.watch, HostWatch) else self.arena

    def lay_out(self, leaves: list[Any], known: KnownLayout | None = None) -> None:
        """Move results, in place in the list, to memory where they may stay when the region is over."""
        if self.host_arena is not None and (borrowed := self.host_arena.borrowed(leaves)):
            copy_out(leaves, borrowed)
        if self.lasting is not None:
            self.lasting.lay_out(leaves, known)

    def allocate(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for `numel` elements of a result like `like`; lasting memory, if there is any and they are many."""
        lasting = self.lasting
        return like.new_empty(numel) if lasting is None else lasting.allocate(numel, like)

    def overwrite(self) -> None:
        """Note that this rank begins to overwrite donated memory: from now on the call can't be run again."""
        if self.host_arena is not None:
            self.host_arena.overwrite()

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on this rank's device: itself, if it is there already; a frozen parameter stays one.

        Large tensors are pinned first, since this process would have to wait while pageable memory is copied to a GPU.
        """
        if tensor.device == self.device:
            return tensor
        given, to_gpu = tensor, self.device.type == "cuda"
        if to_gpu and tensor.is_cpu and tensor.layout is torch.strided and tensor.nbytes > _PAGEABLE_BYTES:
            tensor = tensor.pin_memory()
        return frozen_as(given, tensor.to(self.device, non_blocking=to_gpu))

    def check(self) -> None:
        """Raise the error of an operation that runs asynchronously on a GPU and has failed since it was started."""
        for comm in self._comms.values():
            comm.check()

    def end_call(self) -> None:
        for comm in self._comms.values():
            comm.end_call()

    def _raise_own_failure(self) -> None:
        """Raise this rank's own error, if that is why the region was aborted."""
        try:
            self.check()
        except BaseException as failure:
            raise failure from None

    @contextlib.contextmanager
    def region(self, number: int, call: str = "", *, pure: bool = False) -> Iterator[None]:
        """Tell the peers that this rank is in region `number`, so that they know whether to wait for it.

        A launched rank says which call that is, since another rank's script may make another; a `pure` one is that of
        an @spmd function. An error is reported before this rank leaves: else a peer would only see that it has left.
        """
        if self.arena is not None:
            spread(self.rank, self.layout.size)
        self.watch.enter(number, call)
        self.finished.enter(number)
        here.call, self._steps = call_of(number, pure), 0
        self._begin_task()
        try:
            self._check_driver()
            yield
            if not self.foreign:
                if pure:
                    self.end_call()
                self.check()
        except Aborted:
            if not self.foreign:
                self._raise_own_failure()
            raise
        except BaseException as error:
            if self.foreign:
                raise
            self.watch.abort(f"{self.where()}: {type(error).__qualname__}: {text_of(error)}")
            raise
        finally:
            here.call = 0
            if not self.foreign:
                self.watch.leave()
                self._end_task()
        if self.foreign:
            return
        for comm in self._comms.values():
            comm.reclaim()
        release_freed_memory(number)
        if self.host_arena is not None and number % _TRIM_REGIONS == 0:
            self.host_arena.trim()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a call of an @spmd function within `mesh.run`, all of whose ranks make it: see `call.here`."""
        before, outermost = here.call, not here.call & 1
        self._steps += outermost
        here.call = before + (2 * self._steps + 1) * outermost
        try:
            yield
            if outermost:
                self.end_call()
        finally:
            here.call = before

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """In the block, refuse to communicate: no other rank takes part in what this one does."""
        self._alone = True
        self._begin_task()
        try:
            self._check_driver()
            yield
        finally:
            self._alone = False
            if not self.foreign:
                self._end_task()

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """In the block, refuse to communicate: not all ranks may get there."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def _begin_task(self) -> None:
        if self.host_arena is not None:
            self.host_arena.begin_task()

    def _end_task(self) -> None:
        if self.host_arena is not None:
            self.host_arena.end_task()

    def _check_driver(self) -> None:
        """Refuse to begin after the driver has aborted. (Not after another rank has: this one may fail alike.)"""
        board = self.host_arena
        if board is not None and board.size in board.aborted():
            board.check()

    def renew(self, generation: int, done: int = 0, *, replaced: bool = False) -> None:
        """Begin, or go on after a failure; every communicator is opened again when it is next asked for or used.

        Args:
            done, replaced: see `Finished.renew`.
        """
        self.watch.generation = generation
        self.finished.renew(generation, done, replaced=replaced)
        self.calls_in_run.clear()  # a rank may have failed before the others did

    def close(self) -> None:
        self.closed = True
        if self.foreign:  # its connections are the parent's, too: closing them here would end them there
            return
        for comm in self._comms.values():
            comm.close()
        self._comms.clear()
