"""Messages between GPUs: NCCL has no tags and lets a send wait for its receive, so the hosts arrange each first.

The sender's host tells the receiver's (tag, size, number) and waits for its answer; then both put their half on a
stream. There is one NCCL communicator for each direction of each pair: so halves are started in one order on both
sides, that of the answers, and no send waits for another direction's. Such a communicator is made in a thread, since
that waits for the other side, which may be waiting for a third. A rank's messages to itself are a send and a receive
of one group of NCCL's calls. Invariant: a half is put on a stream only when the other will be.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import torch

from .communicator import Communicator, Steps
from .nccl_raw import Making, end, joined

if TYPE_CHECKING:
    from .nccl_base import NcclBase

_HEAD = struct.Struct("<qq128s")  # bytes, number of the message, unique id of a new communicator
Direction = tuple[int, int]  # source, destination


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
        self._makings: dict[Direction, Making] = {}
        self._own: dict[int, tuple[torch.Tensor, Any]] = {}  # messages of this rank to itself, and the event before
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
            self._own[number] = tensor, before
        header = torch.frombuffer(bytearray(_HEAD.pack(tensor.numel(), number, self._offered[dst])), dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.int64)
        answered = self._post.irecv(answer, dst, 2 * number + 1)
        told = self._post.isend(header, dst, 2 * tag)
        yield lambda: told.is_completed() and answered.is_completed()
        told.wait(), answered.wait()
        if dst == comm.rank:
            yield lambda: number not in self._own  # until then the tensor must not change
        else:
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
            self._to_itself(*self._own[number], tensor)
            del self._own[number]
            return source
        yield from self._put("recv", tensor, (source, comm.rank), turn, unique, before)
        return source

    def _to_itself(self, source: torch.Tensor, before: Any, target: torch.Tensor) -> None:
        comm = self._comm
        if not source.numel():
            return
        comm.streams.wait(before)
        with comm._grouped() as launch:
            launch("send", source.data_ptr(), source.numel(), comm._type(torch.uint8), comm.rank)
            launch("recv", target.data_ptr(), target.numel(), comm._type(torch.uint8), comm.rank)
        comm.streams.hold(source)
        comm.note(f"send from rank {comm.rank} to itself", comm.streams.event(), target)

    def _put(
        self, name: str, tensor: torch.Tensor, direction: Direction, turn: int, unique: bytes, before: Any
    ) -> Steps:
        """Put one half on the stream of its direction, after those answered before; the current stream then waits."""
        comm = self._comm
        yield lambda: self._put_so_far.get(direction, 0) == turn
        if tensor.numel():
            if direction not in self._raw:
                library, rank = comm.library, int(name == "recv")
                making = Making(lambda: joined(library, 2, unique, rank), comm.streams.enter)
                self._makings[direction] = making
                yield making.done
                self._raw[direction] = making.result()
                self._makings.pop(direction, None)
            what = f"{name} from rank {direction[0]} to rank {direction[1]}"
            with comm.streams.beside(f"{direction[0]} to {direction[1]}", before):
                with comm.inside(what):  # the first message of a direction connects, and waits there for its peer
                    start, peer = getattr(self._raw[direction], name), int(name == "send")
                    start(tensor.data_ptr(), tensor.numel(), comm._type(torch.uint8), peer, comm.streams.pointer())
                comm.streams.hold(tensor)
                after = comm.streams.event()
            comm.streams.wait(after)
            comm.note(what, after, tensor)
        self._put_so_far[direction] = self._put_so_far.get(direction, 0) + 1

    def check_async_error(self) -> None:
        """Raise what NCCL has noticed of any direction."""
        for raw in tuple(self._raw.values()):
            raw.check_async_error()

    def abort(self) -> None:
        """End what is under way at once; from another thread, while this one may wait for it."""
        self._end(abort=True)

    def close(self, *, abort: bool) -> None:
        """End all directions; a second call does nothing."""
        self._end(abort=abort)
        self._post.close()

    def _end(self, *, abort: bool) -> None:
        # Until there is none: the thread that watches may end them at the same time.
        with contextlib.suppress(KeyError):
            while True:
                self._makings.popitem()[1].give_up()
        with contextlib.suppress(KeyError):
            while True:
                end(self._raw.popitem()[1], abort=abort, enter=self._comm.streams.enter)
