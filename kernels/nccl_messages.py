"""Messages between GPUs: NCCL has no tags and lets a send wait for its receive, so the hosts arrange each first.

The sender's host tells the receiver's (tag, size, number) and waits for its answer; then both put their half on a
stream. There is one NCCL communicator for each direction of each pair: so halves are started in one order on both
sides, that of the answers, and no send waits for another direction's. Such a communicator is made in a thread, since
that waits for the other side, which may be waiting for a third. Invariant: a half is put on a stream only when the
other will be.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from .communicator import Communicator, Steps
from .nccl_raw import end, joined

if TYPE_CHECKING:
    from .nccl_base import NcclBase

_HEAD = struct.Struct("<qq128s")  # bytes, number of the message, unique id of a new communicator
Direction = tuple[int, int]  # source, destination
# As many as may wait for each other.
_JOINERS = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="spmd-nccl-join")


class Messages:
    """The messages of one communicator.

    Args:
        comm: whose they are.
        post: a communicator of the host that carries nothing else.
    """

    def __init__(self, comm: NcclBase, post: Communicator):
        self._comm, self._post = comm, post
        self._raw: dict[Direction, Any] = {}  # NCCL's communicators
        self._offered: dict[int, bytes] = {}  # destination -> the unique id that it was told
        self._own: dict[int, torch.Tensor] = {}  # messages of this rank to itself
        self._numbers = 0
        self._answers: dict[int, int] = {}  # source -> answers given
        self._put_so_far: dict[Direction, int] = {}

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        comm, direction = self._comm, (self._comm.rank, dst)
        before = comm.streams.event()
        if dst not in self._offered:
            self._offered[dst] = comm.library.nccl.get_unique_id()
        self._numbers += 1
        number = self._numbers
        if dst == comm.rank:
            self._own[number] = tensor
        header = torch.frombuffer(bytearray(_HEAD.pack(tensor.numel(), number, self._offered[dst])), dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.int64)
        answered = self._post.irecv(answer, dst, 2 * number + 1)
        told = self._post.isend(header, dst, 2 * tag)
        yield lambda: told.is_completed() and answered.is_completed()
        told.wait(), answered.wait()
        if dst != comm.rank:
            yield from self._put("send", tensor, direction, int(answer), self._offered[dst], before)

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        comm = self._comm
        before = comm.streams.event()
        header = torch.empty(_HEAD.size, dtype=torch.uint8)
        coming = self._post.irecv(header, src, 2 * tag)
        yield coming.is_completed
        source = coming.wait()
        nbytes, number, unique = _HEAD.unpack(header.numpy().tobytes())
        if nbytes != tensor.numel():
            raise comm.wrong_size(source, tag, nbytes, tensor.numel())
        turn = self._answers.get(source, 0)
        self._answers[source] = turn + 1
        answered = self._post.isend(torch.tensor([turn]), source, 2 * number + 1)
        yield answered.is_completed
        answered.wait()
        if source == comm.rank:
            tensor.copy_(self._own.pop(number))
            return source
        yield from self._put("recv", tensor, (source, comm.rank), turn, unique, before)
        return source

    def _put(
        self, name: str, tensor: torch.Tensor, direction: Direction, turn: int, unique: bytes, before: Any
    ) -> Steps:
        """Put one half on the stream of its direction, after those answered before; the current stream then waits."""
        comm = self._comm
        yield lambda: self._put_so_far.get(direction, 0) == turn
        if tensor.numel():
            if direction not in self._raw:
                joining = _JOINERS.submit(self._joined, unique, int(name == "recv"))
                yield joining.done
                self._raw[direction] = joining.result()
            with comm.streams.beside(f"{direction[0]} to {direction[1]}", before):
                start, peer = getattr(self._raw[direction], name), int(name == "send")
                start(tensor.data_ptr(), tensor.numel(), comm._type(torch.uint8), peer, comm.streams.pointer())
                comm.streams.hold(tensor)
                after = comm.streams.event()
            comm.streams.wait(after)
            comm.note(f"{name} from rank {direction[0]} to rank {direction[1]}", after, tensor)
        self._put_so_far[direction] = self._put_so_far.get(direction, 0) + 1

    def _joined(self, unique: bytes, rank: int) -> Any:
        self._comm.streams.enter()
        return joined(self._comm.library, 2, unique, rank)

    def abort(self) -> None:
        """End what is under way at once; from another thread, while this one may wait for it."""
        for raw in tuple(self._raw.values()):
            end(raw, abort=True)
        self._raw.clear()

    def close(self, *, abort: bool) -> None:
        """End all directions; a second call does nothing."""
        while self._raw:
            end(self._raw.popitem()[1], abort=abort)
        self._post.close()
