"""A checkpoint being read: its files are opened once, and what was checked is what is loaded.

Somebody may write the same step again, or remove it, at any moment. Invariant: all that is read of a checkpoint comes
from one folder, whatever takes its name meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from . import _checkpoint_files as files
from .kernels.errors import SpmdError, message

TRIES = 50
PAUSE_SECONDS = 0.01
_PIECE = 1 << 20


class Damaged(SpmdError):
    """A checkpoint that is not what was written; the message begins with the file's name."""


class Gone(SpmdError):
    """A checkpoint that was there a moment ago: another may have taken its place."""


class Opened:
    """A checkpoint all of whose files are open, and were found to be as they were written.

    Attributes:
        folder: where it was found.
        manifest: what `save` wrote of it.
        digest: the manifest's checksum, which tells one checkpoint from another.

    Raises:
        Damaged: a file is not as it was written.
        Gone: the folder was removed or replaced meanwhile.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        self._closing = contextlib.ExitStack()
        try:
            self._at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise Gone(message(f"there is no checkpoint {folder}", remedy="look at the path given to save")) from None
        except OSError as error:
            raise Damaged(message(f"{folder} cannot be read", got=str(error))) from None
        self._closing.callback(os.close, self._at)
        try:
            self.manifest, self.digest = self._read_manifest()
            # All are opened before the first is read, which may take minutes: what is open stays.
            for about in self.manifest["files"]:
                self._files[about["file"]] = self._open(about["file"])
            for about in self.manifest["files"]:
                self._check(about)
        except Damaged:
            replaced = self._is_replaced()
            self.close()
            if replaced:
                text = message(f"{folder} was replaced or removed while it was read", remedy="restore again")
                raise Gone(text) from None
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._tensors.clear()
        self._closing.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def tensor(self, file: str, name: str) -> Tensor:
        """A tensor of one of the files, mapped from the file that was checked."""
        if file not in self._tensors:
            # Linux opens what the descriptor stands for, even if the name has gone.
            self._tensors[file] = safe_open(f"/proc/self/fd/{self._files[file].fileno()}", framework="pt")
        return self._tensors[file].get_tensor(name)

    def _open(self, name: str) -> Any:
        try:
            number = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._at)
        except OSError as error:
            text = message(f"{self.folder / name} cannot be read", got=f"{type(error).__name__}: {error}")
            raise Damaged(text) from None
        return self._closing.enter_context(open(number, "rb", buffering=0))

    def _read_manifest(self) -> tuple[dict[str, Any], str]:
        file, opened = self.folder / files.MANIFEST, self._open(files.MANIFEST)
        try:
            sealed = json.loads(opened.read())
            manifest, digest = sealed["manifest"], sealed["sha256"]
            whole = hashlib.sha256(json.dumps(manifest).encode()).hexdigest() == digest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(message(f"{file} cannot be read", got=f"{type(error).__name__}: {error}")) from None
        if not whole:
            raise Damaged(message(f"{file} is damaged: its checksum differs"))
        if manifest["format"] not in files.READABLE:
            raise Damaged(message(f"{file} has another format", got=manifest["format"], expected=files.FORMAT))
        return manifest, digest

    def _check(self, about: Mapping[str, Any]) -> None:
        file, opened, state = self.folder / about["file"], self._files[about["file"]], hashlib.sha256()
        try:
            size = os.fstat(opened.fileno()).st_size
            if size != about["bytes"]:
                raise Damaged(message(f"{file} is truncated", got=f"{size} bytes", expected=f"{about['bytes']} bytes"))
            while piece := opened.read(_PIECE):
                state.update(piece)
        except OSError as error:
            raise Damaged(message(f"{file} cannot be read", got=str(error))) from None
        if state.hexdigest() != about["sha256"]:
            raise Damaged(message(f"{file} is damaged: its checksum differs"))

    def _is_replaced(self) -> bool:
        """Whether another folder, or none, has the name by now; a writer renames before it removes."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._at))
        except OSError:
            return True


def open_last(path: Path) -> tuple[Opened, list[str]]:
    """The last whole checkpoint of a directory, or the one whose folder is given; and what is wrong with later ones.

    Raises:
        SpmdError: there is none, or none that is whole.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(Gone):
            return _open_last(path)
        time.sleep(PAUSE_SECONDS)
    return _open_last(path)


def _open_last(path: Path) -> tuple[Opened, list[str]]:
    files.put_back(path)
    if _is_one(path):
        files.put_back(path.parent)
        return Opened(files.set_aside(path) or path), []
    problems: list[str] = []
    for folder in _checkpoints(path):
        try:
            return Opened(folder), problems
        except Damaged as error:
            problems.append(str(error))
    if problems:
        raise Damaged(message(f"{problems[0]}, and no checkpoint in {path} is whole", got="; ".join(problems)))
    text = message(f"there is no checkpoint in {path}", remedy="look at the path given to save")
    # A writer that is at work may have been between two names.
    raise Gone(text) if path.is_dir() and any(path.glob(".step-*")) else SpmdError(text)


def _is_one(path: Path) -> bool:
    """Whether a path is that of one checkpoint: a directory of many may have such a name too."""
    if (path / files.MANIFEST).exists():
        return True
    return files.is_name(path.name) and not _checkpoints(path)


def _checkpoints(path: Path) -> list[Path]:
    """The latest first; folders that only have such a name are left out."""
    found = []
    try:
        named = files.steps(path)
    except NotADirectoryError:
        return []
    for _, folder in named:
        try:
            if files.holds_checkpoint(folder):
                found.append(folder)
        except FileNotFoundError:
            if not folder.is_symlink():
                raise Gone(message(f"{folder} was removed while {path} was read", remedy="restore again")) from None
    return found
