"""Ranks that one `init_process_group` has brought together: how they watch each other, and one arena for all groups.

They meet in the store that torch gives, with the job's secret, as the ranks of a mesh do, and as often as the program
likes. Ranks of a mesh have met already: their process groups are on the mesh's arena. Invariant: what a group holds of
the arena goes when the group is destroyed, and the arena with the last group.
"""

from __future__ import annotations

import datetime
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..kernels.communicator import Communicator
from ..kernels.errors import Aborted, PeerLost
from ..kernels.network.authentication import AuthenticatedStore, code
from ..kernels.network.hosts import HostWatch, StandingHostArena
from ..kernels.network.stores import leads_nowhere_else, limit_silence
from ..kernels.registry import beside_nccl, make_communicator
from ..kernels.shm.arena import Arena, StandingArena
from ..kernels.waiting import turn
from ..mesh.launch import joining
from ..mesh.launch.environments import Launch
from ..mesh.launch.roll_call import RollCall
from ..mesh.launch.secret import secret_of_user
from ..mesh.rank import counted
from ..mesh.rank.memory import keep_freed_memory
from ..mesh.rank.session import RankSession
from ..mesh.region import current
from ..mesh.replication.messages import follow_message
from ..mesh.replication.net import active
from .arguments import check_device

_COUNTED_AS = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "recvAnySource": "recv"}
_RECEIVING = ("recv", "recvAnySource", "scatter")  # a rank that receives passes nothing
_MEETING = ("gloo", "mpi")  # backends whose ranks wait for each other to open a group, on one host, too
# How often a mesh's ranks have made groups of each name; after a failure, before which some may not have come so far,
# or a new rank has made none, all begin anew.
_times: weakref.WeakKeyDictionary[RankSession, Counter[str]] = weakref.WeakKeyDictionary()


class World:
    """Ranks that have met.

    Args:
        watch: what notices aborts and deaths: the arena, if one is shared by all.
        store: gives a store that all ranks share.
        backend: of their communicators.
        session: of the mesh whose ranks they are.
    """

    def __init__(self, watch: Any, rank: int, store: Callable[[], Any], backend: str, session: Any = None):
        self.watch, self.rank, self.store, self.backend, self.session = watch, rank, store, backend, session
        self._begun = (1, 0) if session is None else session.finished.now
        self._times = Counter[str]() if session is None else _times.setdefault(session, Counter())

    @classmethod
    def met(cls, store: Any, rank: int, size: int, timeout: float) -> World:
        """Meet in a store of torch's; all `size` ranks do so, each for the same number of times."""
        keep_freed_memory()
        time = store.add(f"spmd/joins/{rank}", 1)
        store = dist.PrefixStore(f"spmd/{time}", store)
        launch = Launch(rank, size, rank, None, None, "init_process_group")
        where, one_host = "the store of init_process_group", leads_nowhere_else(store)
        key = RollCall(store, launch, where, secret_of_user(), one_host=one_host).key(timeout)
        met = AuthenticatedStore(store, code(key, b"process group"), datetime.timedelta(seconds=timeout))
        joined = joining.join(
            met,
            rank,
            size,
            backend="auto",
            timeout=timeout,
            make_arena=StandingArena,
            make_host_arena=StandingHostArena,
        )
        if isinstance(joined.arena, StandingArena):
            joined.arena.begin()
        if len(joined.hosts) > 1:
            limit_silence(store, max(1.0, timeout / 2))
        joined.watch.generation = 1
        backend = "gloo" if joined.arena is None else "hierarchical" if len(joined.hosts) > 1 else "shm"
        return cls(joined.watch, rank, lambda: met, backend)

    @classmethod
    def of_mesh(cls, session: RankSession) -> World:
        """The ranks of a mesh."""
        backend = beside_nccl(session.watch) if session.backend == "nccl" else session.backend
        return cls(session.watch, session.rank, session.store, backend, session)

    @property
    def adopted(self) -> bool:
        """Whether they have met as a mesh."""
        return self.session is not None

    @property
    def over(self) -> bool:
        """Whether the mesh whose ranks they are was closed, or has replaced one, or one may not know of this world."""
        return self.session is not None and (self.session.closed or self.session.finished.is_over(self._begun))

    def check_together(self) -> None:
        """Refuse to communicate where the ranks of a mesh do not run the same: in remote objects and `mesh.submit`.

        A program's own threads are in no region; it must see to them itself.
        """
        if self.session is not None and current() is not None:
            self.session.check_together("communicate")

    def store_of(self, channel: str, store: Any) -> Any:
        """A store for one group; `store` is torch's own. In it, what no rank of ours wrote counts as missing."""
        return dist.PrefixStore(channel, store if self.adopted else self.store())

    def channel(self, ranks: tuple[int, ...]) -> str:
        """A name that no other group has, not even an earlier one of the same ranks.

        Torch's name won't do: each rank numbers the groups that it is in, so the name of one may differ between ranks.
        """
        name = f"torch {','.join(map(str, ranks))} {self.watch.generation}"
        self._times[name] += 1
        return f"{name} {self._times[name]}"

    @property
    def opens_alone(self) -> bool:
        """Whether the first rank of a group opens it without waiting for the others."""
        return isinstance(self.watch, Arena) and self.backend not in _MEETING

    def opens_early(self, rank: int) -> bool:
        """Whether this rank of a group opens it as soon as it is made, so that nobody waits when it is used.

        On a network, a rank that replaces a dead one does not: the others have the group, and open it afresh on use.
        """
        return rank == 0 if self.opens_alone else not self.adopted or self.watch.generation == 1

    def communicator(self, ranks: tuple[int, ...], channel: str, timeout: float, device: str) -> Communicator:
        """The communicator of some of the ranks, this one with them."""
        check_device(device)
        with turn:
            return make_communicator(
                "nccl" if device == "cuda" else self.backend,
                ranks=ranks,
                rank=self.rank,
                watch=self.watch,
                store=self.store,
                timeout=timeout,
                channel=f"{channel} cuda" if device == "cuda" else channel,
            )

    def followed(self, name: str, ranks: tuple[int, ...], start: Callable[[], Any], inputs: Any, outputs: Any) -> Any:
        """What `start` returns: an operation of a group, counted, and on the first call of a step followed by type."""
        net, session = active(), self.session
        if len(ranks) > 1 and counted.is_counting():
            received = inputs is outputs and name in _RECEIVING
            nbytes = 0 if received else sum(tensor.nbytes for tensor in inputs)
            axes = () if session is None else session.layout.axes_of(ranks)
            counted.note(_COUNTED_AS.get(name, name), axes, nbytes)
        if net is None or net.paused or session is None:
            return start()
        axes = session.layout.axes_of(ranks)
        if sorted(ranks) != sorted(session.layout.group(session.rank, axes)):  # only some of those along an axis
            return start()
        return follow_message(net, axes, name, start, inputs, lambda _: outputs)

    def raised(self, error: BaseException) -> BaseException:
        """The error to raise for one that a wait raised: outside a region nobody catches `Aborted`."""
        return PeerLost(str(error)) if isinstance(error, Aborted) and not self.adopted else error

    def close(self) -> None:
        """This rank takes part in nothing any more."""
        arena = self.watch.arena if isinstance(self.watch, HostWatch) else self.watch
        if isinstance(arena, StandingArena):
            arena.end()
