"""The process group "spmd": torch's collectives over our communicators.

Torch lets Python subclass `ProcessGroup`, and its C++ code then calls these methods, as its Python code does. A call
that is not asynchronous is over when it returns. Invariants: if ranks disagree, all raise at once, and so does every
later call on the group; a destroyed group holds nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.communicator import Communicator
from ..kernels.errors import CollectiveMismatch, MeshError, PeerLost, SpecError
from ..kernels.torch_private import begin_event, end_event, run_as_written
from . import sparse, vouched
from .arguments import check_own, exchanged, listed, one, parts, reducing, reduction, rooted
from .barrier import MonitoredBarrier
from .callbacks import MESSAGES, await_callbacks
from .registration import DEVICES, NAME
from .work import Work, close
from .world import World

_Base: Any = dist.ProcessGroup  # its stubs have other signatures than its callers use


class ProcessGroup(_Base):
    """A process group of torch's whose ranks talk through a communicator.

    Args:
        world: the ranks that have met, this group's among them.
        ranks: this group's, by their numbers in the world.
        store: this group's part of torch's store.
        name: that torch gave it.
        seconds: of silence after which a wait ends.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], rank: int, store: Any, name: str, seconds: float):
        super().__init__(rank, len(ranks))
        self.world, self._ranks, self._rank, self._seconds = world, ranks, rank, seconds
        self._store, self._name, self._sequence, self._since = store, name, 0, world.watch.generation
        self._channel = world.channel(ranks)
        self._comms: dict[str, Communicator] = {}
        self._broken: BaseException | None = None
        self._coalesced: list[Work] | None = None
        self._barrier = MonitoredBarrier(world.store_of(self._channel, store), rank, len(ranks))
        if world.opens_early(rank):
            self._comm("cpu")

    def getBackendName(self) -> str:
        return NAME

    group_name = property(lambda self: self._name)
    _device_types = property(lambda self: list(map(torch.device, DEVICES)))
    supports_splitting = False  # asked when a group is made on a bound device; `new_group` then works as on others

    def _get_backend(self, device: Any) -> Any:
        return self  # torch asks of what kind it is

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._ranks)

    # -- beginning, failure and end ------------------------------------------------------------------------------------

    def _comm(self, device: str) -> Communicator:
        comm = self._comms.get(device)
        if comm is None:
            comm = self._comms[device] = self.world.communicator(self._ranks, self._channel, self._seconds, device)
        return comm

    def _check(self) -> None:
        if self.world.over:
            self._broken = MeshError("the mesh was closed, or replaced a rank", remedy="make new groups")
        if self._broken is not None:
            kind = type(self._broken) if isinstance(self._broken, CollectiveMismatch | PeerLost) else MeshError
            what, remedy = "this process group has failed: its ranks are out of step", "destroy it and make a new one"
            raise kind(what, got=str(self._broken), where=f"rank {self._rank}", remedy=remedy) from None
        self.world.check_together()

    def _failed(self, error: BaseException) -> BaseException:
        """The error to raise for one that an operation raised; bad arguments leave the group usable."""
        error = self.world.raised(error)
        if self._broken is None and not self.world.adopted and not isinstance(error, SpecError | TypeError):
            self._broken = error
        return error

    def shutdown(self) -> None:
        self._close("destroyed")
        if dist.group.WORLD is self or dist.group.WORLD is None or not isinstance(dist.group.WORLD, ProcessGroup):
            self.world.close()

    def abort(self) -> None:
        self._close("aborted")  # which ends what is under way, here and on the other ranks

    def _close(self, how: str) -> None:
        comms, self._comms, world = self._comms, {}, self.world
        if not (comms or self._broken or world.over) and world.opens_alone and world.watch.generation == self._since:
            comms = {"cpu": self._comm("cpu")}  # never used here: the others must hear that it won't be
        self._broken = MeshError(f"this process group was {how}", remedy="make a new one")
        close(comms.values())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._seconds = timeout.total_seconds()
        for comm in self._comms.values():
            comm.set_timeout(self._seconds)

    # -- one form for all ----------------------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        opts: Any,
        start: Callable[[Communicator, bool], Any],
        tensors: Sequence[torch.Tensor],
        result: Any,
    ) -> Work:
        """Start an operation, and finish it unless it is asynchronous.

        Args:
            start: called with the communicator and whether to return works, or to return when all is done.
            tensors: inputs, whose shapes a profiler is told.
        """
        self._check()
        self._sequence += 1
        asynchronous = opts is None or bool(opts.asyncOp)
        event = begin_event(f"{NAME}:{name}", list(tensors))
        try:
            comm = self._comm(tensors[0].device.type if tensors else "cpu")
            await_callbacks(comm, name)
            started = self.world.followed(name, self._ranks, lambda: start(comm, asynchronous), tensors, result)
        except BaseException as error:
            if event is not None:
                end_event(event)
            raise self._failed(error) from None
        works = [] if not asynchronous else started if isinstance(started, list) else [started]
        work = Work(comm, works, result, self._failed, event, is_message=name in MESSAGES)
        if not works:
            work.is_completed()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        works, self._coalesced = self._coalesced or [], None
        comm, messages = works[0].comm if works else self._comm("cpu"), all(work.is_message for work in works)
        return Work(comm, works, [], self._failed, is_message=messages)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors, opts = listed(tensors), reducing(opts, dist.AllreduceOptions)
        tensor, op = one(tensors, "all_reduce"), reduction(opts)
        if tensor.layout is not torch.strided:
            return self._do("all_reduce", opts, lambda comm, _: sparse.all_reduce(comm, tensor, op), tensors, tensors)
        return self._do(
            "all_reduce", opts, lambda comm, later: comm.all_reduce(tensor, op, async_op=later), tensors, tensors
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = reduction(opts := reducing(opts, dist.AllreduceCoalescedOptions))
        return self._do(
            "all_reduce",
            opts,
            lambda comm, later: [comm.all_reduce(tensor, op, async_op=later) for tensor in tensors],
            tensors,
            tensors,
        )

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Work:
        if isinstance(opts, int):
            root, opts = opts, reducing(op, dist.ReduceOptions)
            opts.rootRank = root
        tensor, kind, root = one(tensors := listed(tensors), "reduce"), reduction(opts), opts.rootRank
        return self._do(
            "reduce", opts, lambda comm, later: comm.reduce(tensor, root, kind, async_op=later), tensors, tensors
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs, inputs = listed(outputs), inputs if isinstance(inputs[0], list | tuple) else [inputs]
        opts = reducing(opts, dist.ReduceScatterOptions)
        output, pieces, op = one(outputs, "reduce_scatter"), list(inputs[0]), reduction(opts)
        check_own("reduce_scatter", self._rank, pieces, [output] * self.size())
        return self._do(
            "reduce_scatter",
            opts,
            lambda comm, later: comm.reduce_scatter(output, pieces, op, async_op=later),
            pieces,
            outputs,
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        opts = reducing(opts, dist.ReduceScatterOptions)
        op, size = reduction(opts), self.size()
        pairs = [
            (output, parts(input, size, output.numel(), "reduce_scatter"))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._do(
            "_reduce_scatter_base",
            opts,
            lambda comm, later: [comm.reduce_scatter(*pair, op, async_op=later) for pair in pairs],
            inputs,
            outputs,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies --------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        tensors, opts = listed(tensors), rooted(opts, dist.BroadcastOptions)
        tensor, root = one(tensors, "broadcast"), opts.rootRank
        return self._do(
            "broadcast", opts, lambda comm, later: vouched.broadcast(comm, tensor, root, later), tensors, tensors
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        inputs, outputs = listed(inputs), outputs if isinstance(outputs[0], list | tuple) else [outputs]
        tensor, pieces = one(inputs, "all_gather"), list(outputs[0])
        check_own("all_gather", self._rank, [tensor] * self.size(), pieces)
        result = outputs if tensor.is_cuda else pieces  # as NCCL's, a list for each GPU of a rank; as Gloo's, one list
        return self._do(
            "all_gather", opts, lambda comm, later: vouched.all_gather(comm, pieces, tensor, later), inputs, result
        )

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: Any, opts: Any = None) -> Work:
        return self._do(
            "all_gather",
            opts,
            lambda comm, later: [
                # By rank, then by tensor, as torch has them.
                comm.all_gather([theirs[index] for theirs in outputs], tensor, async_op=later)
                for index, tensor in enumerate(inputs)
            ],
            inputs,
            outputs,
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        size = self.size()
        pairs = [
            (parts(output, size, input.numel(), "all_gather"), input)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._do(
            "_all_gather_base",
            opts,
            lambda comm, later: [comm.all_gather(*pair, async_op=later) for pair in pairs],
            inputs,
            outputs,
        )

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        inputs, opts = listed(inputs), rooted(opts, dist.GatherOptions)
        tensor, root = one(inputs, "gather"), opts.rootRank
        pieces = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs) if self._rank == root else None
        if pieces is not None:
            check_own("gather", root, [tensor] * self.size(), pieces)
        return self._do(
            "gather", opts, lambda comm, later: vouched.gather(comm, tensor, pieces, root, later), inputs, pieces or []
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        outputs, opts = listed(outputs), rooted(opts, dist.ScatterOptions)
        tensor, root = one(outputs, "scatter"), opts.rootRank
        pieces = list(inputs[0] if isinstance(inputs[0], list | tuple) else inputs) if self._rank == root else None
        if pieces is not None:
            check_own("scatter", root, pieces, [tensor] * self.size())
        passed = pieces or outputs
        return self._do(
            "scatter", opts, lambda comm, later: vouched.scatter(comm, tensor, pieces, root, later), passed, outputs
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        outs, ins = list(outputs), list(inputs)
        check_own("all_to_all", self._rank, ins, outs)
        return self._do(
            "all_to_all", opts, lambda comm, later: comm.all_to_all(outs, ins, async_op=later), ins, outputs
        )

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Work:
        outs, ins = exchanged(output, input, output_sizes, input_sizes, self._rank, self.size())
        return self._do(
            "all_to_all", opts, lambda comm, later: comm.all_to_all(outs, ins, async_op=later), [input], [output]
        )

    alltoall_base = all_to_all_single

    # -- messages, barriers --------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = one(tensors := listed(tensors), "send")
        return self._do("send", None, lambda comm, _: comm.isend(tensor, dst, tag), tensors, tensors)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensor = one(tensors := listed(tensors), "recv")
        return self._do("recv", None, lambda comm, _: comm.irecv(tensor, src, tag), tensors, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        tensor = one(tensors := listed(tensors), "recv")
        return self._do("recvAnySource", None, lambda comm, _: comm.irecv(tensor, None, tag), tensors, tensors)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        return self._do("barrier", opts, lambda comm, later: comm.barrier(async_op=later), [], [])

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As Gloo's: rank 0 says which ranks did not come in time. (`dist.monitored_barrier` itself asks for Gloo.)"""
        self._check()
        self._barrier(self._seconds if timeout is None else timeout.total_seconds(), wait_all_ranks)

    # -- what torch asks of a group ------------------------------------------------------------------------------------

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """All ranks begin at 0."""

    def get_group_store(self) -> Any:
        return self._store


run_as_written(each for each in vars(ProcessGroup).values() if hasattr(each, "__code__"))
