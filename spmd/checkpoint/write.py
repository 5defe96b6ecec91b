"""A checkpoint being written: every rank writes a file, and one process commits when all are there.

A rank reports what it wrote in a file, too, so that the ranks and the process that commits meet only on the disk: a
thread that waits there disturbs no collective. Invariant: all ranks raise the same, or return the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.errors import MeshError, PeerLost, SpecError, SpmdError
from ..kernels.flat import resolved
from ..kernels.interrupts import uninterrupted
from ..kernels.network.hosts import out_of_reach
from ..kernels.processes import gone
from ..mesh import protocol, strides
from ..mesh.array import Array
from ..mesh.driver.pending import Pure, Stopped, Task, aside
from ..mesh.mesh import Mesh
from ..mesh.region import require
from . import folder as folders
from . import leaves, tensor_file
from .background import in_thread
from .manifest import FORMAT

POLL_SECONDS = 0.01
ASK_SECONDS = 0.5  # that a rank may take to write its part until it is asked for a sign of life
TRIES = 5  # to begin writing: ranks may be killed, or stopped by another thread's failure, again and again
STORE_SECONDS = 0.05  # between two polls of the store by each rank: one process answers them all


def begin(path: Path, step: int | None) -> tuple[Path, int]:
    """A new folder to write a checkpoint into, and the number that it gets."""
    step = folders.next_step(path) if step is None else step
    return folders.begin(path, step), step


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
        started: Any = None,
    ):
        """`started` is the outcome of `begin`, if launched ranks have called it already: the same on all."""
        self._path, self._step, self._keep, self._mesh = path, step, keep, mesh
        self._launched = mesh is not None and not mesh.is_driver
        self._first = mesh is None or mesh.is_driver or mesh.rank == 0
        self._background, self._manifest, self._tensors = background, manifest, tensors
        self._started = started
        self._folder: Any = None  # until it is made
        self._ranks = 1 if mesh is None else mesh.size
        if background:
            self._tensors = {key: _copied(value) for key, value in tensors.items()}  # the caller may write to them

    def start(self) -> None:
        """Have every rank begin to write, or, without `background`, write its file."""
        for left in reversed(range(TRIES)):
            with uninterrupted():  # Ctrl-C would leave a folder to nobody
                self._folder, self._number = _result(self._started or attempt(begin, self._path, self._step))
            self._pids = self._processes()
            if self._mesh is None:
                return
            try:
                self._writers = self._on_ranks(_write_part, self._folder, self._tensors, not self._background)
                self._pids = [pid for _, pid in self._writers] if self._survives else self._pids
                return
            except (PeerLost, Stopped) as error:
                if not (left and (self._survives or isinstance(error, Stopped))):
                    raise
                self.abandon(error)

    def abandon(self, error: BaseException) -> None:
        """Remove the folder; after Ctrl-C when the ranks have written, which else would fail the next call."""
        driver = self._mesh.driver if self._mesh is not None and self._mesh.is_driver else None
        try:
            if driver is not None and not isinstance(error, Exception):
                with contextlib.suppress(Exception), aside():
                    driver.wait(driver.submit(protocol.PassThrough, pure=Pure("a checkpoint"), reported=True))
        finally:
            if self._folder is not None and self._first:
                folders.abandon(self._folder)

    @property
    def _survives(self) -> bool:
        """Whether values outlive the ranks that were to write them, so that the program need not notice a loss."""
        return self._mesh is not None and self._mesh.is_driver and self._mesh.driver.reruns

    def finish(self) -> Path:
        """Wait for all ranks' files, and commit; launched ranks all get the outcome."""
        outcome = attempt(self._commit) if self._first else None
        if self._launched and not self._background:
            outcome = self._on_ranks(lambda: outcome)[0]
        elif self._launched:
            outcome = self._shared(outcome)
        folder = _result(outcome)
        if self._mesh is not None:
            self._mesh.run_state.saved = str(folder)
        return folder

    def _on_ranks(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        assert self._mesh is not None
        with self._mesh.run_state.uncounted():
            return self._mesh.run(call, *args)

    def _commit(self) -> Path:
        folder = self._folder
        try:
            if self._mesh is None:
                _write_here(0, 1, folder, self._tensors, {})
            parts = [self._part(rank) for rank in range(self._ranks)]
            written: dict[str, list[Any]] = {}
            for part in parts:
                for key, position, name in part["pieces"]:
                    written.setdefault(key, []).append([position, part["file"], name])
            about = {key: more for part in reversed(parts) for key, more in part["about"].items()}  # the first rank's
            manifest = {
                "format": FORMAT,
                "files": [{key: part[key] for key in ("file", "bytes", "sums")} for part in parts],
                "pieces": written,
                **self._manifest,
                "leaves": [{**entry, **about.get(entry["key"], {})} for entry in self._manifest["leaves"]],
            }
            for rank in range(self._ranks):
                _report_of(folder, rank).unlink()
            final = folders.commit(folder, self._path, self._number, manifest, replace=self._step is not None)
        except BaseException as error:
            folders.abandon(folder)
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = str(folder)  # system calls on an open file do not know it
            raise
        with contextlib.suppress(OSError):  # this one is written; the next one that is removes what is left over
            folders.keep_last(self._path, self._keep, final)
        return final

    def _shared(self, outcome: Any) -> Any:
        """Give all ranks the outcome through the store that they met in: in threads, no collective may run."""
        assert self._mesh is not None
        store, key = self._mesh.session.store(), f"checkpoint/{self._folder.name}"
        try:
            if self._first:
                store.set(key, json.dumps(_encoded(outcome)))
                return outcome
            while not store.check([key]):
                if self._mesh.closed or folders.is_left_over(self._folder.name):
                    return MeshError(f"the first rank was lost before {self._path} was written")
                time.sleep(STORE_SECONDS)
            return _decoded(json.loads(store.get(key)))
        except dist.DistError as error:
            return outcome if self._first else PeerLost(out_of_reach(self._mesh.session.rank, error), 0)

    def _processes(self) -> list[int]:
        return self._mesh.driver.pids if self._mesh is not None and self._mesh.is_driver else []

    def _part(self, rank: int) -> dict[str, Any]:
        """A rank's report of what it has written; waits for it."""
        file = _report_of(self._folder, rank)
        asked, began = None, time.monotonic()
        while not file.exists():
            if self._mesh is not None and self._mesh.closed:
                raise MeshError(f"the mesh was closed before {self._path} was written")
            if self._mesh is not None and self._mesh.is_driver and time.monotonic() > began + ASK_SECONDS:
                asked = self._ask(rank, asked)
            # A driver's mesh that has replaced lost ranks shows other processes, and is ready for the next call.
            lost = self._processes()[rank : rank + 1] != self._pids[rank : rank + 1]
            if lost or (self._launched and gone(*self._writers[rank])):
                if not (lost and self._survives):
                    raise MeshError(f"a rank was lost before {self._path} was written")
                if not file.exists():  # it may have reported before it was lost
                    self._write_for(rank)
            if not (_unfinished(file).exists() or file.exists()):  # one of the two is there while the rank writes
                remedy = "make room on the disk, and let nothing remove files there while a checkpoint is written"
                raise SpmdError(f"{file.parent} could not be written, or was removed meanwhile", remedy=remedy)
            time.sleep(POLL_SECONDS)
        report = json.loads(file.read_text())
        if "error" in report:
            raise _decoded(report)
        return report

    def _ask(self, rank: int, asked: Task | None) -> Task:
        """Have the driver wait for a rank: otherwise nobody would notice that it was stopped."""
        driver = self._mesh.driver  # type: ignore[union-attr]
        if asked is not None and not asked.settled.is_set():
            return asked
        with aside():
            # The checkpoint's future reports the errors.
            return driver.submit(protocol.PassThrough, ranks=[rank], pure=Pure("a checkpoint"), reported=True)

    def _write_for(self, rank: int) -> None:
        """Write here what a lost rank should have written, from its shards."""
        (self._folder / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)  # half of it, perhaps
        arrays = {key: value for key, value in self._tensors.items() if isinstance(value, Array)}
        try:
            with aside():
                held = {key: value.shards()[rank] for key, value in arrays.items()}
        except SpecError:
            if not any(value.donated_to for value in arrays.values()):
                raise
            problem = f"rank {rank} was lost before {self._path} was written, and a step was given the values' memory"
            remedy = "go on from the checkpoint before, which is whole, or leave what is saved out of donate="
            raise MeshError(problem, remedy=remedy) from None
        _write_here(rank, self._ranks, self._folder, self._tensors, held)


_ERRORS = {kind.__name__: kind for kind in (SpmdError, SpecError, MeshError, PeerLost)}


def _encoded(outcome: Path | BaseException) -> dict[str, Any]:
    """An outcome as JSON, for another process: a store or a file is no place for pickles."""
    if isinstance(outcome, Path):
        return {"path": str(outcome)}
    text = str(outcome.args[-1] if isinstance(outcome, OSError) and outcome.args else outcome)
    number, file = getattr(outcome, "errno", None), getattr(outcome, "filename", None)
    return {"error": text, "kind": type(outcome).__name__, "errno": number, "file": file}


def _decoded(found: dict[str, Any]) -> Any:
    if "path" in found:
        return Path(found["path"])
    if found["errno"]:
        return OSError(found["errno"], found["error"], *([found["file"]] if found["file"] else []))
    return _ERRORS.get(found["kind"], SpmdError)(found["error"])


def _copied(value: Any) -> Any:
    """A copy of a plain tensor."""
    if not isinstance(value, Tensor):
        return value
    copy = strides.copied(value.detach())
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_() if value.requires_grad and value.is_leaf else copy


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call(*args)
    except Exception as error:
        return error


def _result(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _write_part(folder: Path, tensors: dict[str, Any], wait: bool) -> tuple[str, int]:
    """On a rank: write what it holds, in a thread of its own if nobody waits. Returns the process, (namespace, pid)."""
    if not folder.is_dir():
        session = require("save").session
        problem = f"the directory of the checkpoint is not there on rank {session.rank}, host {socket.gethostname()}"
        remedy = "save to a path that all hosts see, such as one of a shared file system"
        raise SpmdError(problem, got=str(folder.parent), remedy=remedy)
    mine = _mine(require("save").session, folder, tensors)
    _unfinished(_report_of(folder, mine[0])).touch()
    if wait:
        _write_here(*mine)
    else:
        in_thread(_write_quietly, *mine)
    return folders.this_process()


def _mine(session: Any, folder: Path, tensors: dict[str, Any]) -> tuple[Any, ...]:
    """What `_write_here` is called with on a rank.

    The shards are taken before this returns, and thereby disowned: a step that the Arrays are donated to will not
    overwrite them.
    """
    held = {key: value.local for key, value in tensors.items() if isinstance(value, Array)}
    return session.rank, session.layout.size, folder, tensors, held


def _write_quietly(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    try:
        _write_here(rank, size, folder, tensors, held)
    except BaseException as error:
        (folder / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)  # makes room for the message
        try:
            _report(folder, rank, _encoded(error))
        except OSError:
            folders.abandon(folder)  # the others notice that it is missing


def _write_here(rank: int, size: int, folder: Path, tensors: dict[str, Any], held: dict[str, Tensor]) -> None:
    mine: dict[str, Tensor] = {}
    written: list[Any] = []
    about: dict[str, Any] = {}
    shares = [0] * size  # bytes of replicated leaves that each rank writes
    for key, value in tensors.items():
        position: int | list[int] = 0
        shape = value.shape
        if isinstance(value, Array):
            layout, spec = value.mesh.layout, value.spec
            nbytes = held[key].numel() * held[key].element_size()
            if spec.entries:
                if layout.owner(spec, rank) != rank:
                    continue
                position = leaves.position_of(layout, spec, rank)
            else:
                writer = min(range(size), key=lambda one: shares[one])
                shares[writer] += nbytes
                if writer != rank:
                    continue
            value = held[key]
        elif rank != 0:
            continue
        if more := leaves.about(value, shape):
            about[key] = more
        written.append([key, position, key])
        mine[key] = torch.view_as_real(value) if (value := resolved(value)).is_complex() else value
    name = f"rank-{rank:05d}.safetensors"
    checked = tensor_file.write(folder / name, mine)
    _report(folder, rank, {"file": name, **checked, "pieces": written, "about": about})


def _report(folder: Path, rank: int, report: dict[str, Any]) -> None:
    """Write a rank's report where the process that commits looks for it."""
    file = _report_of(folder, rank)
    folders.write(_unfinished(file), json.dumps(report).encode(), mode="wb")
    os.rename(_unfinished(file), file)


def _report_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _unfinished(report: Path) -> Path:
    """A report's name until it is complete; the file is there before its rank begins to write."""
    return report.with_name(f".{report.name}")
