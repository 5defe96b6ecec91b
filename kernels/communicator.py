"""`Communicator`: the message-passing interface of a group of ranks, and the seam for new transports.

Every operation is a generator of *steps*: it yields a condition to wait for and goes on when that holds. So one
piece of code serves the blocking call, the asynchronous one and the wait that must notice aborts. A transport
implements `_exchange` (each rank gives one piece of bytes to each other) and point to point; all collectives
follow from these, in rank order, for every dtype. A faster transport overrides what it can do better.

Ranks (`src`, `dst`, list positions) count within the group, 0 to size-1.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from . import debug
from .arena import word_key
from .errors import CollectiveMismatch, PeerLost, SpecError, message
from .reduction import check_op, reduce_in_order, slice_bounds
from .waiting import Watch, wait_until

Ready = Callable[[], bool]
Steps = Generator[Ready, None, Any]

# Up to here a rank sends its whole contribution to all: one exchange instead of two.
ONE_PHASE_BYTES = 1 << 15


# Communicators of this process with operations under way.
_active: set[Communicator] = set()


class Work:
    """A started operation: `wait()` finishes it and gives its value, `is_completed()` asks without waiting."""

    __slots__ = ("_comm", "_error", "_ready", "_steps", "_value", "done", "what")

    def __init__(self, comm: Communicator, what: str, steps: Steps):
        self._comm, self.what, self._steps = comm, what, steps
        self._ready: Ready | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = False

    def is_completed(self) -> bool:
        self._comm.progress()
        return self.done

    def wait(self) -> Any:
        self._comm.finish(self)
        if self._error is not None:
            raise self._error
        return self._value

    def start(self) -> None:
        """Take the first step, which tells the peers."""
        self._ready = None
        self._step()

    def advance(self) -> bool:
        """Go on as far as no waiting is needed; whether the operation is over."""
        while not self.done and (self._ready is None or self._ready()):
            self._step()
        return self.done

    def _step(self) -> None:
        try:
            self._ready = next(self._steps)
        except StopIteration as end:
            self._value, self.done = end.value, True
        except BaseException as error:
            self._error, self.done = error, True
            raise


class Communicator(abc.ABC):
    """What `mesh.comm()` gives inside a rank.

    Args:
        ranks: the global ranks of the group, in group order.
        rank: this process's position in it.
        watch: where aborts and deaths are noticed.
        timeout: seconds of silence after which a wait ends in an error.
    """

    backend = "abstract"
    # Whether an operation tells its peers when it is started, or only when those before it are over.
    starts_early = False

    def __init__(self, ranks: Sequence[int], rank: int, watch: Watch, *, timeout: float, crowded: bool = True):
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.timeout = timeout
        self._watch, self._crowded, self._debug = watch, crowded, debug.enabled()
        self._queue: deque[Work] = deque()
        self._messages: list[Work] = []
        self.plans: dict[Any, Any] = {}  # bucket plans and their buffers, kept from step to step

    # -- for transports ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _exchange(self, call: Call | None, sends: list[torch.Tensor | None], recvs: list[torch.Tensor | None]) -> Steps:
        """Give `sends[i]` to rank i and fill `recvs[i]` from it; flat uint8 tensors, None where nothing goes.

        With a `call`, first see that all ranks of the group make the same one, else raise `mismatch`.
        """

    @abc.abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Steps:
        """Send flat uint8 bytes."""

    @abc.abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Steps:
        """Receive into flat uint8 bytes; returns the source."""

    def abort(self, reason: str = "aborted by the user") -> None:
        """Make every rank that waits in this mesh give up."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the operating system holds for this communicator."""

    def empty(self, shape: Sequence[int] | int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor where this transport reduces fastest (shared memory, if it has any)."""
        return torch.empty(shape, dtype=dtype)

    def is_leased(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor must be copied to outlive the region."""
        return False

    # -- driving ------------------------------------------------------------------------------------------------------

    def progress(self) -> None:
        """Advance what can be advanced without waiting."""
        self._watch.check()
        while self._queue and self._queue[0].advance():
            self._queue.popleft()
        self._progress_messages()
        if not self._queue and not self._messages:
            _active.discard(self)

    def _progress_messages(self) -> None:
        if self._messages:
            self._poll_messages()
            self._messages = [work for work in self._messages if not work.advance()]

    def _poll_messages(self) -> None:
        """Look once for what has arrived; receives then match it in the order in which they were posted."""

    def finish(self, work: Work) -> None:
        """Wait for one operation, and so for those started before it."""
        while not work.done:
            first = work if work in self._messages or not self._queue else self._queue[0]

            def ready(first: Work = first) -> bool:
                self._progress_messages()
                if len(_active) > 1:  # peers may wait for our part in what was started elsewhere
                    for other in tuple(_active):
                        if other is not self:
                            other.progress()
                return first.advance()

            try:
                wait_until(
                    ready,
                    self._watch,
                    timeout=self.timeout,
                    crowded=self._crowded,
                    overdue=lambda first=first: self._overdue(first),  # type: ignore[misc]
                    late=self._late,
                )
            finally:
                if self._queue and self._queue[0].done:
                    self._queue.popleft()

    def _late(self) -> None:
        """Called now and then while a wait lasts: a transport looks for the reason here."""

    def _overdue(self, work: Work) -> BaseException:
        return PeerLost(
            message(
                f"{work.what} on rank {self.ranks[self.rank]} got no answer for {self.timeout:g} s",
                where=f"group {self.ranks}",
                remedy="see what the other ranks do, or raise Mesh(timeout=)",
            )
        )

    def _renew(self) -> None:
        """Open the communicator afresh if the mesh has recovered from a failure since it was last used."""

    def _start(self, what: str, steps: Steps, async_op: bool) -> Any:
        self._renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        work = Work(self, what, steps)
        self._queue.append(work)
        if self.starts_early:
            work.start()
        if async_op:
            _active.add(self)
        return work if async_op else work.wait()

    def _start_message(self, what: str, steps: Steps, async_op: bool) -> Any:
        self._renew()
        if self._debug:
            steps = debug.traced(steps, self.ranks[self.rank], what, self.backend)
        work = Work(self, what, steps)
        self._messages.append(work)
        _active.add(self)
        self._progress_messages()
        return work if async_op else work.wait()

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to rank `dst`; returns when the tensor may be reused."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> int:
        """Receive into `tensor` from rank `src` (None: from any); returns the source."""
        return self.irecv(tensor, src, tag).wait()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Start sending; the tensor must not change before `wait()`."""
        self._check_rank("isend", "dst", dst)
        return self._start_message(f"send to {dst}", self._send(as_bytes(tensor), dst, tag), True)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Work:
        """Start receiving; `wait()` returns the source."""
        if src is not None:
            self._check_rank("irecv", "src", src)

        def steps() -> Steps:
            target = (
                tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
            )
            source = yield from self._recv(as_bytes(target), src, tag)
            if target is not tensor:
                tensor.copy_(target)
            return source

        return self._start_message(f"recv from {'any rank' if src is None else src}", steps(), True)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False) -> Any:
        """Wait until every rank of the group is here."""
        call = Call("barrier")
        nothing: list[torch.Tensor | None] = [None] * self.size
        return self._start(call.text, self._exchange(call, nothing, nothing), async_op)

    def broadcast(self, tensor: torch.Tensor, src: int = 0, *, async_op: bool = False) -> Any:
        """Overwrite `tensor` on all ranks with that of rank `src`."""
        self._check_rank("broadcast", "src", src)
        call = Call("broadcast", tensor.dtype, tuple(tensor.shape), f"src={src}")

        def steps() -> Steps:
            mine = self.rank == src
            buffer = _contiguous(tensor) if mine else _like(tensor)
            data = as_bytes(buffer)
            sends = [data if mine and rank != src else None for rank in range(self.size)]
            recvs = [data if not mine and rank == src else None for rank in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            if not mine:
                _copy_back([tensor], [buffer])

        return self._start(call.text, steps(), async_op)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Overwrite `tensor` with the reduction of all ranks' tensors, combined in rank order."""
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            result = yield from self._all_reduce(call, _contiguous(tensor).view(-1), op)
            tensor.copy_(result.view(tensor.shape))

        return self._start(call.text, steps(), async_op)

    def all_reduced(self, tensor: torch.Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """The reduction of all ranks' tensors as a new tensor; on shared memory all ranks read one copy of it.

        A tensor made by `empty` is reduced where it lies. The result behaves as private (a change of it stays on
        this rank), but must be copied to outlive the region.
        """
        check_op(op, tensor.dtype)
        call = Call("all_reduce", tensor.dtype, tuple(tensor.shape), op)

        def steps() -> Steps:
            result = yield from self._all_reduce(call, _contiguous(tensor).view(-1), op)
            return result.view(tensor.shape)

        return self._start(call.text, steps(), async_op)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        """Overwrite rank `dst`'s tensor with the reduction of all; the others' stay as they are."""
        self._check_rank("reduce", "dst", dst)
        check_op(op, tensor.dtype)
        call = Call("reduce", tensor.dtype, tuple(tensor.shape), f"{op}, dst={dst}")

        def steps() -> Steps:
            flat = _contiguous(tensor).view(-1)
            parts = [torch.empty_like(flat) if self.rank == dst and r != dst else flat for r in range(self.size)]
            sends = [as_bytes(flat) if r == dst and self.rank != dst else None for r in range(self.size)]
            recvs = [as_bytes(parts[r]) if self.rank == dst and r != dst else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            if self.rank == dst:
                tensor.copy_(reduce_in_order(parts, op, torch.empty_like(flat)).view(tensor.shape))

        return self._start(call.text, steps(), async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Fill rank `dst`'s `gather_list` with the tensors of all ranks (shapes may differ between ranks)."""
        self._check_rank("gather", "dst", dst)
        mine = self.rank == dst
        outs = self._check_list("gather", "gather_list", gather_list, wanted=mine)
        call = Call("gather", tensor.dtype, None, f"dst={dst}")

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            sends = [as_bytes(_contiguous(tensor)) if r == dst else None for r in range(self.size)]
            recvs = [as_bytes(buffers[r]) if mine else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Overwrite each rank's `tensor` with its entry of rank `src`'s `scatter_list` (shapes may differ)."""
        self._check_rank("scatter", "src", src)
        mine = self.rank == src
        ins = self._check_list("scatter", "scatter_list", scatter_list, wanted=mine)
        call = Call("scatter", tensor.dtype, None, f"src={src}")

        def steps() -> Steps:
            buffer = _like(tensor)
            sends = [as_bytes(_contiguous(ins[r])) if mine else None for r in range(self.size)]
            recvs = [as_bytes(buffer) if r == src else None for r in range(self.size)]
            yield from self._exchange(call, sends, recvs)
            _copy_back([tensor], [buffer])

        return self._start(call.text, steps(), async_op)

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Fill every rank's `tensor_list` with the tensors of all ranks (shapes may differ between ranks)."""
        outs = self._check_list("all_gather", "tensor_list", tensor_list)
        call = Call("all_gather", tensor.dtype, None, "")

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            data = as_bytes(_contiguous(tensor))
            yield from self._exchange(call, [data] * self.size, [as_bytes(buffer) for buffer in buffers])
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: list[torch.Tensor], op: str = "sum", *, async_op: bool = False
    ) -> Any:
        """Overwrite rank i's `output` with the reduction of all ranks' `input_list[i]`."""
        check_op(op, output.dtype)
        ins = self._check_list("reduce_scatter", "input_list", input_list)
        call = Call("reduce_scatter", output.dtype, None, op)

        def steps() -> Steps:
            parts = [torch.empty(output.numel(), dtype=output.dtype) for _ in range(self.size)]
            sends = [as_bytes(_contiguous(piece)) for piece in ins]
            yield from self._exchange(call, sends, [as_bytes(part) for part in parts])
            output.copy_(reduce_in_order(parts, op, torch.empty_like(parts[0])).view(output.shape))

        return self._start(call.text, steps(), async_op)

    def all_to_all(
        self, output_list: list[torch.Tensor], input_list: list[torch.Tensor], *, async_op: bool = False
    ) -> Any:
        """Rank i's `output_list[j]` becomes rank j's `input_list[i]` (shapes may differ)."""
        outs = self._check_list("all_to_all", "output_list", output_list)
        ins = self._check_list("all_to_all", "input_list", input_list)
        call = Call("all_to_all", ins[0].dtype, None, "")

        def steps() -> Steps:
            buffers = [_like(out) for out in outs]
            sends = [as_bytes(_contiguous(piece)) for piece in ins]
            yield from self._exchange(call, sends, [as_bytes(buffer) for buffer in buffers])
            _copy_back(outs, buffers)

        return self._start(call.text, steps(), async_op)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in rank order."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self.all_gather(lengths, torch.tensor([len(data)]))
        pieces = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
        self.all_gather(pieces, torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)])
        return [bytes(piece.numpy().tobytes()) for piece in pieces]

    # -- the algorithm behind all_reduce -----------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, flat: torch.Tensor, op: str) -> Steps:
        """Reduce a flat contiguous tensor; returns a result that the caller may keep.

        Small: everybody sends everything to all and adds for itself. Large: rank i adds slice i and sends it round,
        2(n-1)/n of the bytes per rank, as a ring does, but in rank order.
        """
        if flat.numel() * flat.element_size() <= ONE_PHASE_BYTES:
            parts = [torch.empty_like(flat) if rank != self.rank else flat for rank in range(self.size)]
            sends = [as_bytes(flat) if rank != self.rank else None for rank in range(self.size)]
            recvs = [as_bytes(part) if rank != self.rank else None for rank, part in enumerate(parts)]
            yield from self._exchange(call, sends, recvs)
            return reduce_in_order(parts, op, torch.empty_like(flat))
        bounds = slice_bounds(flat.numel(), self.size)
        slices = [flat[bounds[rank] : bounds[rank + 1]] for rank in range(self.size)]
        parts = [torch.empty_like(slices[self.rank]) for _ in range(self.size)]
        parts[self.rank] = slices[self.rank]
        others = [rank != self.rank for rank in range(self.size)]
        yield from self._exchange(
            call,
            [as_bytes(slices[rank]) if others[rank] else None for rank in range(self.size)],
            [as_bytes(parts[rank]) if others[rank] else None for rank in range(self.size)],
        )
        result = torch.empty_like(flat)
        pieces = [result[bounds[rank] : bounds[rank + 1]] for rank in range(self.size)]
        reduce_in_order(parts, op, pieces[self.rank])
        yield from self._exchange(
            None,  # the same call goes on: nothing more to compare
            [as_bytes(pieces[self.rank]) if others[rank] else None for rank in range(self.size)],
            [as_bytes(pieces[rank]) if others[rank] else None for rank in range(self.size)],
        )
        return result

    # -- checks ---------------------------------------------------------------------------------------------------------------

    def _check_rank(self, name: str, argument: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise SpecError(
                message(
                    f'{name} got a bad "{argument}"', got=rank, expected=f"a rank of the group, 0 to {self.size - 1}"
                )
            )

    def _check_list(
        self, name: str, argument: str, tensors: list[torch.Tensor] | None, wanted: bool = True
    ) -> list[torch.Tensor]:
        if not wanted:
            return []
        if tensors is None or len(tensors) != self.size:
            got = "None" if tensors is None else f"{len(tensors)} tensors"
            raise SpecError(
                message(f'{name} got a bad "{argument}"', got=got, expected=f"{self.size} tensors, one per rank")
            )
        return list(tensors)

    def wrong_size(self, source: int, tag: int, got: int, expected: int) -> CollectiveMismatch:
        """The error for a message that does not fit the tensor it is received into."""
        return CollectiveMismatch(
            message(
                f"recv on rank {self.ranks[self.rank]} from rank {self.ranks[source]} with tag {tag}: sizes differ",
                got=f"a message of {got} bytes",
                expected=f"{expected} bytes",
                remedy="receive into a tensor of the sent shape and dtype",
            )
        )

    def mismatch(self, mine: str, others: dict[int, str]) -> CollectiveMismatch:
        """The error for ranks that disagree; `others` maps group ranks to what they called."""
        sides = {self.ranks[self.rank]: mine, **{self.ranks[rank]: text for rank, text in others.items()}}
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(sides.items()))
        return CollectiveMismatch(
            message(
                f"ranks disagree on the next collective of group {self.ranks}:{lines}\n"
                "every rank of the group must make the same calls, in the same order, with the same shapes and dtypes"
            )
        )


class Call:
    """What a rank says about a collective: peers compare `signature`, people read `text`."""

    __slots__ = ("signature", "text")
    _known: dict[tuple, tuple[int, str]] = {}  # noqa: RUF012 (a cache, shared on purpose)

    def __init__(
        self, name: str, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None, detail: str = ""
    ):
        key = (name, dtype, shape, detail)
        known = self._known.get(key)
        if known is None:
            kind = "" if dtype is None else " " + str(dtype).removeprefix("torch.")
            sizes = "" if shape is None else str(list(shape))
            text = f"{name}{kind}{sizes}{f' ({detail})' if detail else ''}"
            known = self._known[key] = (word_key(*map(str, key)), text)
        self.signature, self.text = known


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 view of it (of a copy, if it is not contiguous)."""
    return _contiguous(tensor).detach().view(-1).view(torch.uint8)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if bytes can be written into it, else a contiguous stand-in."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _copy_back(outs: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for out, buffer in zip(outs, buffers, strict=True):
        if buffer.data_ptr() != out.data_ptr():
            out.copy_(buffer)
