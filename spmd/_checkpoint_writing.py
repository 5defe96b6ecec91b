"""A checkpoint being written: every rank writes a file, and one process commits when all are there.

What a rank has written it tells in a file too, so that ranks and the one who commits meet on the disk only: a thread
that waits there disturbs no collective.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _checkpoint_files as files
from ._fingerprint import fingerprint
from .kernels.errors import MeshError, SpmdError, message
from .mesh.array import Array
from .mesh.mesh import Mesh

POLL_SECONDS = 0.01


class Writing:
    """A checkpoint on its way to disk."""

    def __init__(
        self, path: Path, step: int, keep: int | None, mesh: Mesh | None, manifest: dict, tensors: dict[str, Any]
    ):
        self._path, self._step, self._keep, self._mesh = path, step, keep, mesh
        self._first = mesh is None or mesh.is_driver or mesh.rank == 0
        self._manifest, self._tensors = manifest, tensors
        self._folder: Path | None = None
        self._ranks = 1 if mesh is None else mesh.size

    def hold(self) -> None:
        self._tensors = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in self._tensors.items()}

    def start(self, wait: bool = False) -> None:
        """Have every rank begin to write."""
        folder = files.begin(self._path, self._step) if self._first else None
        if self._mesh is not None and not self._mesh.is_driver:
            folder = self._mesh.run(lambda: folder)[0]
        assert folder is not None
        self._folder, self._pids = folder, self._processes()
        try:
            if self._mesh is None:
                _write_here(0, 1, folder, self._tensors, {})
            else:
                self._mesh.run(_write_part, folder, self._tensors, wait)
        except BaseException:
            if self._first:
                files.give_up(folder)
            raise

    def finish(self) -> Path:
        """Wait for all ranks' files, and commit."""
        folder, final = self._folder, self._path / f"step-{self._step:08d}"
        assert folder is not None
        if not self._first:
            while folder.exists():
                time.sleep(POLL_SECONDS)
            if not final.exists():
                raise SpmdError(message(f"{final} was not written", remedy="see the error on rank 0"))
            return final
        try:
            parts = [self._part(folder / f"rank-{rank:05d}.json") for rank in range(self._ranks)]
            pieces: dict[str, list[Any]] = {}
            for part in parts:
                for key, offset, name in part["pieces"]:
                    pieces.setdefault(key, []).append([offset, part["file"], name])
            manifest = {
                "format": files.FORMAT,
                "step": self._step,
                "fingerprint": fingerprint(self._mesh),
                "files": [{key: part[key] for key in ("file", "bytes", "sha256")} for part in parts],
                "pieces": pieces,
                **self._manifest,
            }
            for rank in range(self._ranks):
                (folder / f"rank-{rank:05d}.json").unlink()
            files.commit(folder, self._path, self._step, manifest)
        except BaseException:
            files.give_up(folder)
            raise
        if self._keep is not None:
            files.keep_last(self._path, self._keep, final)
        return final

    def _processes(self) -> list[int]:
        return self._mesh.driver.pids if self._mesh is not None and self._mesh.is_driver else []

    def _part(self, file: Path) -> dict[str, Any]:
        while not file.exists():
            if self._mesh is not None and self._mesh.closed:
                raise MeshError(message(f"the mesh was closed before {self._path} was written"))
            if self._processes() != self._pids:
                raise MeshError(message(f"a rank was lost before {self._path} was written"))
            if not file.parent.exists():
                raise SpmdError(message(f"{file.parent} could not be written", remedy="make room on the disk"))
            time.sleep(POLL_SECONDS)
        said = json.loads(file.read_text())
        if "error" in said:
            raise OSError(said["errno"], said["error"]) if said["errno"] else SpmdError(said["error"])
        return said


def _write_part(folder: Path, tensors: dict[str, Any], wait: bool) -> None:
    """On a rank: write what it holds, in a thread of its own if nobody waits."""
    session = _session_of(tensors)
    rank, size = session.rank, session.layout.size
    # Taken before this returns, and thereby disowned: a step that the Arrays are donated to will not overwrite them.
    held = {key: value.local for key, value in tensors.items() if isinstance(value, Array)}
    if wait:
        _write_here(rank, size, folder, tensors, held)
    else:
        arguments = (rank, size, folder, tensors, held)
        threading.Thread(target=_write_quietly, args=arguments, name="spmd-checkpoint").start()


def _session_of(tensors: dict[str, Any]) -> Any:
    return next(value.mesh.session for value in tensors.values() if isinstance(value, Array))


def _write_quietly(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    try:
        _write_here(rank, size, folder, tensors, held)
    except BaseException as error:
        told = {"error": str(error.args[-1] if error.args else error), "errno": getattr(error, "errno", None)}
        (folder / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)  # makes room for the message
        try:
            _tell(folder, rank, told)
        except OSError:
            files.give_up(folder)  # its absence tells


def _write_here(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    mine: dict[str, Tensor] = {}
    pieces = []
    shares = [0] * size  # bytes of replicated leaves that each rank writes
    for key, value in tensors.items():
        offset = 0
        if isinstance(value, Array):
            layout, spec = value.mesh.layout, value.spec
            nbytes = held[key].numel() * held[key].element_size()
            if spec.entries:
                if layout.owner(spec, rank) != rank:
                    continue
                offset = layout.part(rank, spec.dim_axes(0))
            else:
                writer = min(range(size), key=lambda one: shares[one])
                shares[writer] += nbytes
                if writer != rank:
                    continue
            value = held[key]
        elif rank != 0:
            continue
        value = value.detach()
        pieces.append([key, offset, key])
        mine[key] = (torch.view_as_real(value) if value.is_complex() else value).contiguous().clone()
    about = files.write_tensors(folder, f"rank-{rank:05d}.safetensors", mine)
    _tell(folder, rank, {**about, "pieces": pieces})


def _tell(folder: Path, rank: int, said: dict[str, Any]) -> None:
    """Where the one who commits looks for it."""
    part = folder / f".rank-{rank:05d}.json"
    files.write(part, json.dumps(said).encode())
    os.rename(part, folder / f"rank-{rank:05d}.json")
