"""What a driver's rank does for each kind of task: one function for each, of the rank's state and the message.

It returns the content of the `Answer`, or another message that is the answer.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.shm.blocks import Result
from .. import protocol, wire
from ..failure import capture
from ..region import Region, run_body
from ..replication.reports import specs_of, tensors_among
from ..replication.values import Check
from ..resizing.pieces import Pieces
from ..resizing.shares import Shares
from ..strides import frozen_as
from .state import RankState


def call_program(state: RankState, task: protocol.CallProgram, packet: wire.Packet) -> Any:
    call = state.compiled(task.call)
    tensors, specs = state.values.gather(task.arrays)
    if call.held is not None:
        tensors, specs = call.bind(tensors, specs)
    others = state.read(packet) if task.values is None else task.values
    leaves, check = call.together(tensors, others), Check(task.check)
    outcome = call(leaves, specs, task.key, check=check, again=task.again, total=task.total)
    state.values.keep(task.out, outcome.tensors, outcome.specs, known=outcome.known)
    if outcome.unchanged:
        return protocol.Unchanged(task.number, outcome.prints)
    data = outcome.encoded(state.session.where())
    return protocol.Metadata(task.number, data, lasting=True, prints=outcome.prints)


def call_function(state: RankState, task: protocol.CallFunction, packet: wire.Packet) -> Any:
    settings, arguments = state.read(packet)
    region = Region(state.session, task.key, state.mesh, by_some=task.by_some)
    return run_body(region, settings, state.shipped(task.function), arguments)


def pass_through(state: RankState, task: protocol.PassThrough, packet: wire.Packet) -> None:
    pass


def put_values(state: RankState, task: protocol.PutValues, packet: wire.Packet) -> None:
    layout, rank = state.session.layout, state.session.rank
    kept, arena = [], state.session.host_arena
    given = None
    if task.given is not None and arena is not None:
        *result, nbytes = task.given
        given = arena.views.show(Result(*result), nbytes, user=arena.rank, users=arena.size)
    values = state.read(packet, given)
    if isinstance(values, Shares):
        kept = values.take(layout, task.specs, rank, state.who, state.session.allocate)
    for value, spec in () if kept else zip(values, task.specs, strict=True):
        if isinstance(value, Pieces):
            kept.append(value.take(layout, spec, rank, state.session.allocate))
            continue
        # A whole value need not be copied: nobody else holds what came with the task.
        local = layout.take(value, spec, rank) if spec.entries or value.requires_grad else value
        kept.append(state.session.on_device(local))
    state.session.lay_out(kept)
    state.values.keep(task.out, kept, list(task.specs))


def fill_values(state: RankState, task: protocol.FillValues, packet: wire.Packet) -> Any:
    read, failure, began, since = state.shipped(task.reader), None, time.monotonic(), 0
    described: list[tuple] = []  # for each batch its description, and what is new with every batch
    for arguments, out in task.batches:
        try:
            treedef, leaves, metas, *more = read(state.session, *arguments)
        except Exception as error:
            if not described or state.session.foreign:  # a child process that the reader has forked must not answer
                raise
            failure = capture(error)  # of this batch only: those before it have been read
            break
        state.values.keep(out, tensors_among(leaves, metas), specs_of(metas), lasts=False)
        description, since = state.description(task.reader, treedef, metas, task.number)
        described.append((description, *more))
    brief, last = time.monotonic() - began < task.brief * len(described), described[-1][0]
    same = all(len(one) == 1 and one[0] is last for one in described)
    if since <= task.known and brief and failure is None and same:
        return protocol.Unchanged(task.number, b"")
    return protocol.Metadata(task.number, pickle.dumps((described, failure, brief)), lasting=False)


def fetch_values(state: RankState, task: protocol.FetchValues, packet: wire.Packet) -> Any:
    tensors, _ = state.values.gather(task.spans)
    # Detached, as a step may return one tensor twice, and one tensor would arrive.
    found = [frozen_as(tensor, tensor.detach().cpu()) for tensor in tensors]
    state.session.check()  # if the GPU was stopped, the contents are arbitrary
    return found


def move_values(state: RankState, task: protocol.MoveValues, packet: wire.Packet) -> None:
    comm, rank, copier = state.session.comm(), state.session.rank, state.values.copier
    for (call, index), tensor, spec in () if copier is None else copier.fetch(task.copies):
        state.values.store(call, index, tensor, spec)
    for source, target, names in task.moves:
        if rank == source:
            held = [name for name in names if state.values.has(*name)]  # others were lost here, too
            spans = tuple(word for call, index in held for word in (call, index, index + 1))
            data = torch.frombuffer(bytearray(wire.to_bytes((held, *state.values.gather(spans)))), dtype=torch.uint8)
            comm.send(torch.tensor([data.numel()], device="cpu"), target)
            comm.send(data, target)
        elif rank == target:
            size = torch.empty(1, dtype=torch.int64, device="cpu")
            comm.recv(size, source)
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
            comm.recv(data, source)
            held, tensors, specs = wire.from_bytes(data.numpy().tobytes())
            for (call, index), tensor, spec in zip(held, tensors, specs, strict=True):
                state.values.store(call, index, tensor, spec)


def reload_modules(state: RankState, task: protocol.ReloadModules, packet: wire.Packet) -> Any:
    return state.reload(task.names)


DO: dict[type, Callable[[RankState, Any, wire.Packet], Any]] = {
    protocol.CallProgram: call_program,
    protocol.CallFunction: call_function,
    protocol.PassThrough: pass_through,
    protocol.PutValues: put_values,
    protocol.FillValues: fill_values,
    protocol.FetchValues: fetch_values,
    protocol.MoveValues: move_values,
    protocol.ReloadModules: reload_modules,
}
