"""`save` and `restore`: state that outlives its processes, written by the ranks that hold it, for any number of them.

Values never change, so that a checkpoint in the background only has to hold on to them. Invariant: whatever happens to
the writer, the checkpoints that are there stay as they are, and what is read is what was written.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from . import _checkpoint_files as files
from . import _checkpoint_tree as described
from ._checkpoint_files import Damaged
from ._fingerprint import fingerprint, warn_if_other
from .kernels.errors import MeshError, SpecError, SpmdError, message
from .mesh import trees
from .mesh.array import Array
from .mesh.mesh import Mesh
from .mesh.placing import is_array, put
from .mesh.region import current
from .mesh.spec import P

POLL_SECONDS = 0.01


class _Saved(Future):
    """A future that knows whether anybody has asked for its result."""

    told = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self.told = self.done()


_in_background: dict[Path, _Saved] = {}


def save(
    path: str | os.PathLike,
    tree: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Future:
    """Write a checkpoint, `path/step-00000120` for step 120: there in full, or not at all.

    Every rank writes the shards that it holds (of what all hold, its share) to a safetensors file of its own. On
    launched ranks all call it, with a path that all of them see.

    Args:
        path: a directory, made if need be.
        tree: of tensors, Arrays, numbers, strings, None, `Loader`s (their positions) and `Sampler`s.
        step: the number that the checkpoint is named by; None is the one after the last there.
        keep: remove all but the last so many checkpoints afterwards.
        background: return at once, and write while the program goes on; the next `save` to this path, or
            `result()` of what is returned, waits for it and raises what went wrong.

    Returns:
        A future of the checkpoint's folder; without `background` it is there.

    Raises:
        SpecError: a leaf cannot be saved. OSError: what the file system says, of a full disk for one; the checkpoints
            that were there before are as they were.
    """
    if current() is not None:
        raise MeshError(message("save was called inside a region", remedy="save what the step returns"))
    if keep is not None and keep < 1:
        raise SpecError(message("save got a bad keep", got=keep, expected="at least 1, or None"))
    path = Path(path).absolute()
    before = _in_background.pop(path, None)
    if before is not None:
        wait([before])
        if not before.told:
            before.result()
    leaves, _ = trees.flatten(tree, is_leaf=is_array)
    mesh = next((leaf.mesh for leaf in leaves if isinstance(leaf, Array)), None)
    structure, entries, tensors = described.describe(tree)
    number = step if step is not None else next((last + 1 for last, _ in files.steps(path)), 0)
    writing = _Writing(path, number, keep, mesh, {"tree": structure, "leaves": entries}, tensors)
    future = _Saved()
    if background:
        # Arrays never change; what the caller has of plain tensors may.
        writing.hold()
        try:
            writing.start()
        except BaseException as error:
            future.set_exception(error)
            _in_background[path] = future
            return future
        if mesh is not None:
            mesh.at_close = [*(one for one in mesh.at_close if not one.done()), future]
        threading.Thread(target=_settle, args=(future, writing.finish), name="spmd-checkpoint").start()
        _in_background[path] = future
        return future
    writing.start(wait=True)
    _settle(future, writing.finish)
    future.result()
    if mesh is not None and not mesh.is_driver:
        mesh.run(_nothing)  # no rank goes on before the checkpoint is there
    return future


def _settle(future: Future, call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _nothing() -> None:
    pass


class _Writing:
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
                _write_here(0, 1, folder, self._tensors)
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
            files.keep_last(self._path, self._keep)
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
    if wait:
        _write_here(rank, size, folder, tensors)
    else:
        threading.Thread(target=_write_quietly, args=(rank, size, folder, tensors), name="spmd-checkpoint").start()


def _session_of(tensors: dict[str, Any]) -> Any:
    return next(value.mesh.session for value in tensors.values() if isinstance(value, Array))


def _write_quietly(rank: int, size: int, folder: Path, tensors: dict[str, Any]) -> None:
    try:
        _write_here(rank, size, folder, tensors)
    except BaseException as error:
        told = {"error": str(error.args[-1] if error.args else error), "errno": getattr(error, "errno", None)}
        (folder / f"rank-{rank:05d}.safetensors").unlink(missing_ok=True)  # makes room for the message
        try:
            _tell(folder, rank, told)
        except OSError:
            files.give_up(folder)  # its absence tells


def _write_here(rank: int, size: int, folder: Path, tensors: dict[str, Any]) -> None:
    mine: dict[str, Tensor] = {}
    pieces = []
    shares = [0] * size  # bytes of replicated leaves that each rank writes
    for key, value in tensors.items():
        offset = 0
        if isinstance(value, Array):
            layout, spec = value.mesh.layout, value.spec
            nbytes = value.local.numel() * value.local.element_size()
            if spec.entries:
                if layout.owner(spec, rank) != rank:
                    continue
                offset = layout.part(rank, spec.dim_axes(0))
            else:
                writer = min(range(size), key=lambda one: shares[one])
                shares[writer] += nbytes
                if writer != rank:
                    continue
            value = value.local
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


# -- reading ----------------------------------------------------------------------------------------------------------


def restore(path: str | os.PathLike, *, like: Any = None, mesh: Mesh | None = None) -> Any:
    """Read the last checkpoint that `save` wrote to a directory, or the one whose folder is given.

    A damaged one is named in a warning, and the one before it is read.

    Args:
        path: as given to `save`, or the folder of one checkpoint.
        like: a tree such as was saved, needed where that had named tuples or other classes. `Loader`s in it are set to
            the position that was saved, and dicts in it may have fewer entries.
        mesh: place tensors on this mesh, of whatever size: sharded as they were if it cuts them in as many parts,
            else replicated. None gives plain tensors, or places them where `like` has Arrays.

    Returns:
        The tree; without `like` of dicts, lists and tuples, with a state dictionary for a `Loader`.

    Raises:
        SpecError: `like` is of another structure. SpmdError: there is no checkpoint, or none that is whole; the message
            names the files.
    """
    path = Path(path).absolute()
    if (path / files.MANIFEST).exists() or path.name.startswith("step-"):
        return _read(path, files.read_manifest(path), like, mesh)
    problems = []
    for _, folder in files.steps(path):
        try:
            manifest = files.read_manifest(folder)
        except Damaged as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; going on from {folder}", stacklevel=2)
        return _read(folder, manifest, like, mesh)
    if problems:
        raise Damaged(message(f"{problems[0]}, and no checkpoint in {path} is whole", got="; ".join(problems)))
    raise SpmdError(message(f"there is no checkpoint in {path}", remedy="look at the path given to save"))


def _read(folder: Path, manifest: dict[str, Any], like: Any, mesh: Mesh | None) -> Any:
    leaves_like = [] if like is None else trees.leaves(like, is_leaf=is_array)
    placed = mesh or next((leaf.mesh for leaf in leaves_like if isinstance(leaf, Array)), None)
    warn_if_other(manifest["fingerprint"], fingerprint(placed), str(folder))
    if placed is not None:
        placed.resumed = (str(folder), manifest["fingerprint"])
    opened: dict[str, Any] = {}

    def value(key: str, entry: dict[str, Any], wanted: Any) -> Any:
        parts = []
        for _, file, name in sorted(manifest["pieces"][key]):
            if file not in opened:
                opened[file] = safe_open(folder / file, framework="pt")
            parts.append(opened[file].get_tensor(name))
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = torch.view_as_complex(tensor) if entry["dtype"].startswith("complex") else tensor
        where = mesh or (wanted.mesh if isinstance(wanted, Array) else None)
        if where is None:
            return torch.nn.Parameter(tensor, requires_grad=False) if entry.get("frozen") else tensor
        spec = P(*[tuple(one) if isinstance(one, list) else one for one in entry["spec"]])
        return put(tensor, spec if _fits(where, tensor, spec, entry) else P(), mesh=where)

    return described.rebuild(manifest["tree"], manifest["leaves"], like, value)


def _fits(mesh: Mesh, tensor: Tensor, spec: P, entry: dict[str, Any]) -> bool:
    """Whether to cut a value as it was: slices of a sharded optimizer are of no use to another number of ranks."""
    try:
        mesh.layout.check_shape(tuple(tensor.shape), spec)
    except SpecError:
        return False
    return not spec.entries or mesh.layout.parts(spec.dim_axes(0)) == entry["parts"]
