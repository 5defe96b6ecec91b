"""The MPI communicator: ranks that mpirun started, over whatever network its MPI supports.

Bytes travel through mpi4py's nonblocking operations; the arithmetic is done here, in rank order. Invariants: nothing
waits inside MPI, requests are only tested, so that aborts and timeouts are noticed; and memory that MPI may still read
or write is kept until MPI is done with it.

A message is a packet (tag, length, number, stamp) on one MPI tag. The packet includes a short body; a longer body
follows on the MPI tag of its number. So any integer can be a tag, receives match in any order, and sizes are known
beforehand.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..call import Call, check_received
from ..errors import MeshError
from ..flat import sizes
from ..operations import Steps
from ..waiting import Watch
from .communicator import NetworkedCommunicator

_PACKET = struct.Struct("<qQQQ")  # tag, bytes, number, stamp
_INLINE = 2048  # a body up to this size is in its packet; MPIs send so little without waiting for the receiver
_CHUNK = 1 << 30  # MPI before version 4 counts in 32 bits
_PACKETS, _PIECES, _BODIES = 0, 1, 2  # MPI tags; bodies use this one and all above

# mpirun, or srun with an MPI plug-in, sets at least one of these variables.
_STARTED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_FD")

# Requests that could not be ended, with the memory that they read and write.
_abandoned: list[Any] = []


def _mpi() -> Any:
    """mpi4py's module; importing it starts MPI, which ends the process if there is no MPI job to join."""
    if not any(os.environ.get(name) for name in _STARTED):
        raise MeshError(
            "backend 'mpi' needs a process that mpirun started",
            got=f"none of {', '.join(_STARTED)} is set",
            remedy="run under mpirun (mpirun -n 2 python train.py), or use backend='auto'",
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MeshError(
            "backend 'mpi' needs mpi4py", got=str(error), remedy="pip install spmd[mpi], and run under mpirun"
        ) from None
    return MPI


class MpiCommunicator(NetworkedCommunicator):
    """A group of ranks that talk over MPI; see `Communicator`.

    Args:
        store: any `torch.distributed` store that all ranks of the group share.
    """

    backend = "mpi"
    stamped = True

    def __init__(
        self,
        store: dist.Store,
        watch: Watch,
        ranks: Sequence[int],
        global_rank: int,
        *,
        timeout: float,
        channel: str = "main",
    ):
        super().__init__(store, watch, ranks, global_rank, timeout=timeout, channel=channel)
        self._mpi = _mpi()
        world = self._mpi.COMM_WORLD
        if world.rank != global_rank or max(ranks) >= world.size:
            raise MeshError(
                "the ranks are not those of MPI",
                got=f"rank {global_rank} of group {self.ranks}, which MPI calls rank {world.rank} of {world.size}",
                remedy="run under mpirun, and let it number the ranks",
            )
        self._comm: Any = None
        self._under_way: dict[int, tuple[list[Any], list[Any]]] = {}  # sends and receives that may not be over
        self._open()

    def _open(self) -> None:
        self.close()
        self._numbers = [0] * self.size  # messages sent, by destination
        # Meet first, since making a group waits for its ranks without noticing an abort.
        self._meet()
        world = self._mpi.COMM_WORLD
        self._comm = world.Create_group(world.group.Incl(self.ranks))
        self._bodies = self._comm.Get_attr(self._mpi.TAG_UB) - _BODIES  # how many MPI tags there are for bodies

    def close(self) -> None:
        super().close()
        if self._comm is None or self._mpi.Is_finalized():
            return
        for sends, recvs in self._under_way.values():
            for request in recvs:  # they must not write into memory that is reused by now
                with contextlib.suppress(self._mpi.Exception):
                    request.Cancel()
            if not self._mpi.Request.Testall([*sends, *recvs]):
                _abandoned.append((sends, recvs, self._comm))
                self._comm = None
        self._under_way.clear()
        if self._comm is not None:
            self._comm.Free()  # formally collective, but local in practice, as the standard expects
            self._comm = None

    def _done(self, sends: list[Any], recvs: list[Any]) -> Steps:
        requests = [*sends, *recvs]
        self._under_way[id(requests)] = sends, recvs
        try:
            yield lambda: self._mpi.Request.Testall(requests)
        except self._mpi.Exception as error:
            raise self._cut_off(str(error).splitlines()[0]) from None
        del self._under_way[id(requests)]

    def _sending(self, tensor: torch.Tensor, dst: int, mpi_tag: int) -> list[Any]:
        return [self._comm.Isend(self._raw(chunk), dst, mpi_tag) for chunk in tensor.split(_CHUNK) if len(chunk)]

    def _receiving(self, tensor: torch.Tensor, src: int, mpi_tag: int) -> list[Any]:
        return [self._comm.Irecv(self._raw(chunk), src, mpi_tag) for chunk in tensor.split(_CHUNK) if len(chunk)]

    def _raw(self, tensor: torch.Tensor) -> list[Any]:
        return [tensor.numpy(), self._mpi.BYTE]

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _all_gather(self, theirs: list[torch.Tensor], mine: torch.Tensor) -> Steps:
        together = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        yield from self._done([self._comm.Iallgather(self._raw(mine), self._raw(together))], [])
        for target, piece in zip(theirs, together.split(mine.numel()), strict=True):
            target.copy_(piece)

    def _exchange(
        self, call: Call | None, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
    ) -> Steps:
        if call is not None:
            yield from self._agree(call, sizes(sends), sizes(recvs))
        receiving, sending = [], []
        for rank in range(self.size):
            piece, target = sends[rank], recvs[rank]
            if rank == self.rank:
                if piece is not None and target is not None:
                    target.copy_(piece)
                continue
            if target is not None:
                receiving += self._receiving(target, rank, _PIECES)
            if piece is not None:
                sending += self._sending(piece, rank, _PIECES)
        yield from self._done(sending, receiving)

    # -- point to point ------------------------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int = 0) -> Steps:
        number = self._numbers[dst]
        self._numbers[dst] += 1
        packet = torch.frombuffer(bytearray(_PACKET.pack(tag, tensor.numel(), number, stamp)), dtype=torch.uint8)
        short = tensor.numel() <= _INLINE
        sends = self._sending(torch.cat([packet, tensor]) if short else packet, dst, _PACKETS)
        if not short:
            sends += self._sending(tensor, dst, _BODIES + number % self._bodies)
        if self._counters is not None:
            self._counters.send(dst)
        yield from self._done(sends, [])

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int = 0) -> Steps:
        source, _, nbytes, number, body, sent = yield from self._message(src, tag)
        check_received(self, source, tag, got=(nbytes, sent), expected=(tensor.numel(), stamp))
        if nbytes <= _INLINE:
            tensor.copy_(body)
        else:
            yield from self._done([], self._receiving(tensor, source, _BODIES + number % self._bodies))
        return source

    def _takes_messages(self, rank: int) -> bool:
        return False

    def poll_messages(self) -> None:
        while True:
            status = self._mpi.Status()
            packet = self._comm.Improbe(self._mpi.ANY_SOURCE, _PACKETS, status)
            if packet is None:
                return
            data = torch.empty(status.Get_count(self._mpi.BYTE), dtype=torch.uint8, device="cpu")
            packet.Recv(self._raw(data))  # the packet has arrived, and is short: this does not wait
            tag, nbytes, number, stamp = _PACKET.unpack_from(data.numpy().data)
            body = data[_PACKET.size :]  # if it is short
            self._inbox.append((status.Get_source(), tag, nbytes, number, body, stamp))
