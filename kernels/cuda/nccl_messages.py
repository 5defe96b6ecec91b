"""Messages between GPUs: NCCL has no tags, and a send waits for its receive, so the hosts arrange each message first.

The sender's host tells the receiver's host (tag, size, number, stamp) and waits for its answer; then each puts its half
on a stream. Each direction of each pair of ranks has an NCCL communicator (`nccl_pairs`) and a stream (`lanes`). So
both sides start their halves in the same order, that of the answers, and no send waits for another direction. The
caller's streams wait for a message only from `wait()` on: before that, its peer may be waiting for something else. A
rank's message to itself is a send and a receive in one group of NCCL calls. Invariant: a half is put on a stream only
when the other half will be, too.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from ..call import check_received
from ..communicator import Communicator
from ..operations import Steps
from .lanes import Direction, Lanes
from .nccl_arithmetic import nccl_type
from .nccl_channel import Channel

_HEAD = struct.Struct("<qqQ128s")  # bytes, number of the message, stamp, unique id of a new communicator


class Messages:
    """The messages of one communicator; their steps return the source, and the event after which the GPU is done.

    Args:
        channel: the channel that they belong to.
        post: a communicator for the host that carries nothing else.
    """

    def __init__(self, channel: Channel, post: Communicator):
        self._channel, self._post = channel, post
        self._sends, self._receives = Lanes(channel.streams), Lanes(channel.streams)
        self._ids: dict[int, bytes] = {}  # destination -> the unique id that was sent to it
        self._own: dict[int, tuple[torch.Tensor, Any]] = {}  # this rank's messages to itself, and the event before each
        self._own_done: dict[int, Any] = {}  # the event after each of these
        self._numbers = 0
        self._answers: dict[int, int] = {}  # source -> answers given
        self._put_so_far: dict[Direction, int] = {}

    def send(self, tensor: torch.Tensor, dst: int, tag: int, stamp: int, before: Any) -> Steps:
        """Send bytes that are ready after the event `before`."""
        rank = self._channel.rank
        if dst not in self._ids:
            self._ids[dst] = self._channel.library.nccl.get_unique_id()
        self._numbers += 1
        number = self._numbers
        if dst == rank:
            self._own[number] = tensor, before
        head = _HEAD.pack(tensor.numel(), number, stamp, self._ids[dst])
        header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        answer = torch.empty(1, dtype=torch.int64, device="cpu")
        answered = self._post.irecv(answer, dst, 2 * number + 1)
        announced = self._post.isend(header, dst, 2 * tag)
        yield lambda: announced.has_ended() and answered.has_ended()
        announced.wait(), answered.wait()
        if dst == rank:
            yield lambda: number in self._own_done
            return None, self._own_done.pop(number)
        direction = rank, dst
        yield lambda: self._put_so_far.get(direction, 0) == int(answer)
        after = None
        if tensor.numel():
            yield lambda: self._channel.pairs.connect(direction, self._ids[dst])
            yield lambda: self._sends.promise(direction)
            after = self._put("send", tensor, direction, self._sends, before)
        self._put_so_far[direction] = self._put_so_far.get(direction, 0) + 1
        return None, after

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, stamp: int, before: Any) -> Steps:
        """Receive bytes into memory that is free after the event `before`."""
        rank = self._channel.rank
        header = torch.empty(_HEAD.size, dtype=torch.uint8, device="cpu")
        coming = self._post.irecv(header, src, 2 * tag)
        yield coming.has_ended
        source = coming.wait()
        nbytes, number, sent, unique = _HEAD.unpack(header.numpy().tobytes())
        check_received(self._channel, source, tag, got=(nbytes, sent), expected=(tensor.numel(), stamp))
        direction = source, rank
        if nbytes:
            yield lambda: self._receives.promise(direction)
        turn = self._answers.get(source, 0)
        self._answers[source] = turn + 1
        answered = self._post.isend(torch.tensor([turn], device="cpu"), source, 2 * number + 1)
        yield answered.has_ended
        answered.wait()
        after = None
        if source == rank:
            yield lambda: not self._channel.connecting
            after = self._own_done[number] = self._to_itself(*self._own.pop(number), tensor, before)
            return source, after
        yield lambda: self._put_so_far.get(direction, 0) == turn
        if nbytes:
            yield lambda: self._channel.pairs.connect(direction, unique)
            after = self._put("recv", tensor, direction, self._receives, before)
        self._put_so_far[direction] = self._put_so_far.get(direction, 0) + 1
        return source, after

    def _put(self, name: str, tensor: torch.Tensor, direction: Direction, lanes: Lanes, before: Any) -> Any:
        """Put one half on the stream of its direction; returns the event after it."""
        channel = self._channel
        what = f"{name} from rank {direction[0]} to rank {direction[1]}"
        with channel.streams.on(lanes.stream(direction), before):
            with channel.inside(what):
                channel.pairs.start(direction, tensor)
            channel.streams.hold(tensor)
            after = channel.streams.event()
        lanes.given(direction, after)
        channel.note(channel.messages, what, after, tensor)
        return after

    def _to_itself(self, source: torch.Tensor, sent: Any, target: torch.Tensor, before: Any) -> Any:
        """Start both halves of a message of this rank to itself; returns the event after them."""
        channel, rank = self._channel, self._channel.rank
        if not source.numel():
            return before
        direction, what = (rank, rank), f"send from rank {rank} to itself"
        byte = nccl_type(channel.library.nccl, torch.uint8)
        with channel.streams.on(self._receives.stream(direction), before):
            channel.streams.wait(sent)
            halves = [
                (name, half.data_ptr(), half.numel(), byte, rank) for name, half in (("send", source), ("recv", target))
            ]
            channel.launch(what, halves, (source, target), grouped=True)
            channel.streams.hold(source)
            channel.streams.hold(target)
            after = channel.streams.event()
        self._receives.given(direction, after)
        channel.note(channel.collectives, what, after, (source, target))
        return after

    def close(self) -> None:
        """Give the streams back."""
        self._sends.close()
        self._receives.close()
