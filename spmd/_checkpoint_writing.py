"""A checkpoint being written: every rank writes a file, and one process commits when all are there.

What a rank has written it tells in a file too, so that ranks and the one who commits meet on the disk only: a thread
that waits there disturbs no collective. Invariant: all ranks hear the same of how it went.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _checkpoint_files as files
from . import _checkpoint_pieces as pieces
from ._checkpoint_keeping import keep_last
from .kernels.errors import MeshError, PeerLost, SpmdError, message
from .kernels.hosts import out_of_reach
from .mesh import strides, wire
from .mesh.array import Array
from .mesh.mesh import Mesh
from .mesh.region import require

POLL_SECONDS = 0.01
STORE_SECONDS = 0.05  # between two questions to the process that has the store, of every rank


class Writing:
    """A checkpoint on its way to disk."""

    def __init__(
        self,
        path: Path,
        step: int | None,
        keep: int | None,
        mesh: Mesh | None,
        manifest: dict,
        tensors: dict[str, Any],
        *,
        background: bool,
    ):
        self._path, self._step, self._keep, self._mesh = path, step, keep, mesh
        self._launched = mesh is not None and not mesh.is_driver
        self._first = mesh is None or mesh.is_driver or mesh.rank == 0
        self._background, self._manifest, self._tensors = background, manifest, tensors
        self._ranks = 1 if mesh is None else mesh.size
        if background:
            # Arrays never change; what the caller has of plain tensors may.
            self._tensors = {key: _kept(value) for key, value in tensors.items()}

    def start(self) -> None:
        """Have every rank begin to write, or do it, if nothing else goes on meanwhile."""
        begun = _attempt(self._begin) if self._first else None
        if self._launched:
            begun = self._on_ranks(lambda: begun)[0]  # the first rank's, or all others would wait for it
        self._folder, self._number = _done(begun)
        self._pids = self._processes()
        if self._mesh is None:
            return
        try:
            self._writers = self._on_ranks(_write_part, self._folder, self._tensors, not self._background)
        except BaseException:
            if self._first:
                files.give_up(self._folder)
            raise

    def _begin(self) -> tuple[Path, int]:
        step = files.next_step(self._path) if self._step is None else self._step
        return files.begin(self._path, step), step

    def finish(self) -> Path:
        """Wait for all ranks' files, and commit; on launched ranks all hear of how it went."""
        outcome = _attempt(self._commit) if self._first else None
        if self._launched and not self._background:
            outcome = self._on_ranks(lambda: outcome)[0]
        elif self._launched:
            outcome = self._told_to_all(outcome)
        return _done(outcome)

    def _on_ranks(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        assert self._mesh is not None
        return self._mesh.run_uncounted(call, *args)

    def _commit(self) -> Path:
        folder = self._folder
        try:
            if self._mesh is None:
                _write_here(0, 1, folder, self._tensors, {})
            parts = [self._part(rank) for rank in range(self._ranks)]
            written: dict[str, list[Any]] = {}
            for part in parts:
                for key, place, name in part["pieces"]:
                    written.setdefault(key, []).append([place, part["file"], name])
            said = {key: about for part in reversed(parts) for key, about in part["about"].items()}  # the first one's
            leaves = [{**entry, **said.get(entry["key"], {})} for entry in self._manifest["leaves"]]
            manifest = {
                "format": files.FORMAT,
                "files": [{key: part[key] for key in ("file", "bytes", "sha256")} for part in parts],
                "pieces": written,
                **self._manifest,
                "leaves": leaves,
            }
            for rank in range(self._ranks):
                (folder / f"rank-{rank:05d}.json").unlink()
            final = files.commit(folder, self._path, self._number, manifest, replace=self._step is not None)
        except BaseException:
            files.give_up(folder)
            raise
        if self._keep is not None:
            keep_last(self._path, self._keep, final)
        return final

    def _told_to_all(self, outcome: Any) -> Any:
        """In threads, where no collective may run, the ranks hear of the outcome through the store they met in."""
        assert self._mesh is not None
        store, key = self._mesh.session.store(), f"checkpoint/{self._folder.name}"
        try:
            if self._first:
                store.set(key, wire.to_bytes(outcome))
                return outcome
            while not store.check([key]):
                if self._mesh.closed or files.is_left_over(self._folder.name):
                    return MeshError(message(f"the first rank was lost before {self._path} was written"))
                time.sleep(STORE_SECONDS)
            return wire.from_bytes(store.get(key))
        except dist.DistError as error:
            return outcome if self._first else PeerLost(out_of_reach(self._mesh.session.rank, error), 0)

    def _processes(self) -> list[int]:
        return self._mesh.driver.pids if self._mesh is not None and self._mesh.is_driver else []

    def _part(self, rank: int) -> dict[str, Any]:
        """What a rank says that it has written."""
        file = self._folder / f"rank-{rank:05d}.json"
        while not file.exists():
            if self._mesh is not None and self._mesh.closed:
                raise MeshError(message(f"the mesh was closed before {self._path} was written"))
            # A driver's mesh is ready for what comes next once it has replaced them.
            if self._processes() != self._pids or (self._launched and files.is_gone(*self._writers[rank])):
                raise MeshError(message(f"a rank was lost before {self._path} was written"))
            if not file.parent.exists():
                raise SpmdError(message(f"{file.parent} could not be written", remedy="make room on the disk"))
            time.sleep(POLL_SECONDS)
        said = json.loads(file.read_text())
        if "error" in said:
            raise OSError(said["errno"], said["error"], said["file"]) if said["errno"] else SpmdError(said["error"])
        return said


def _kept(value: Any) -> Any:
    """A plain tensor as it is now."""
    if not isinstance(value, Tensor):
        return value
    copy = strides.copied(value.detach())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_() if value.requires_grad and value.is_leaf else copy


def _attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call()
    except Exception as error:
        return error


def _done(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _write_part(folder: Path, tensors: dict[str, Any], wait: bool) -> tuple[str, int]:
    """On a rank: write what it holds, in a thread of its own if nobody waits. Returns the process, (host, pid)."""
    session = require("save").session
    rank, size = session.rank, session.layout.size
    # Taken before this returns, and thereby disowned: a step that the Arrays are donated to will not overwrite them.
    held = {key: value.local for key, value in tensors.items() if isinstance(value, Array)}
    if wait:
        _write_here(rank, size, folder, tensors, held)
    else:
        arguments = (rank, size, folder, tensors, held)
        threading.Thread(target=_write_quietly, args=arguments, name="spmd-checkpoint").start()
    return files.this_process()


def _write_quietly(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    try:
        _write_here(rank, size, folder, tensors, held)
    except BaseException as error:
        told = {
            "error": str(error.args[-1] if error.args else error),
            "errno": getattr(error, "errno", None),
            "file": getattr(error, "filename", None),
        }
        (folder / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)  # makes room for the message
        try:
            _tell(folder, rank, told)
        except OSError:
            files.give_up(folder)  # its absence tells


def _write_here(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    mine: dict[str, Tensor] = {}
    written: list[Any] = []
    about: dict[str, Any] = {}
    shares = [0] * size  # bytes of replicated leaves that each rank writes
    for key, value in tensors.items():
        place: int | list[int] = 0
        shape = value.shape
        if isinstance(value, Array):
            layout, spec = value.mesh.layout, value.spec
            nbytes = held[key].numel() * held[key].element_size()
            if spec.entries:
                if layout.owner(spec, rank) != rank:
                    continue
                place = pieces.place_of(layout, spec, rank)
            else:
                writer = min(range(size), key=lambda one: shares[one])
                shares[writer] += nbytes
                if writer != rank:
                    continue
            value = held[key]
        elif rank != 0:
            continue
        if said := pieces.about(value, shape):
            about[key] = said
        written.append([key, place, key])
        value = value.detach().resolve_conj().resolve_neg()
        mine[key] = (torch.view_as_real(value) if value.is_complex() else value).contiguous().clone()
    file = files.write_tensors(folder, f"rank-{rank:05d}.safetensors", mine)
    _tell(folder, rank, {**file, "pieces": written, "about": about})


def _tell(folder: Path, rank: int, said: dict[str, Any]) -> None:
    """Where the one who commits looks for it."""
    part = folder / f".rank-{rank:05d}.json"
    files.write(part, json.dumps(said).encode())
    os.rename(part, folder / f"rank-{rank:05d}.json")
