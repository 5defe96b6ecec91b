"""A checkpoint being read: its files are opened once, and what was checked is what is loaded, into memory of its own.

Somebody may write the same step again, remove it, or write into a file, at any moment. Invariant: all that is read of a
checkpoint comes from one folder, whatever takes its name meanwhile, and nothing that was read changes afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import time
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import SpmdError
from ..kernels.interrupts import uninterrupted
from . import folder as folders
from . import schema
from .manifest import MANIFEST, check_files
from .schema import Invalid
from .sums import Sums
from .tensor_file import Stored, header_length, stored

TRIES = 50
PAUSE_SECONDS = 0.01
_PIECE = 1 << 20
_OF_PROCESS = errno.EMFILE, errno.ENFILE, errno.ENOMEM  # errors that say nothing about the file


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
        Damaged: a file is not as it was written; the message names it, and the field.
        Gone: the folder was removed or replaced meanwhile.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._closing = contextlib.ExitStack()
        self._end = weakref.finalize(self, self._closing.close)  # also after Ctrl-C, if nobody has got it
        try:
            with uninterrupted():  # Ctrl-C would leave the number to nobody
                self._at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._closing.callback(os.close, self._at)
        except FileNotFoundError:
            raise Gone(f"there is no checkpoint {folder}", remedy="look at the path given to save") from None
        except OSError as error:
            if error.errno in _OF_PROCESS:
                raise
            raise Damaged(f"{folder} cannot be read", got=str(error)) from None
        except BaseException:
            self.close()
            raise
        try:
            with self._naming(MANIFEST):
                self.manifest, self.digest = folders.read_manifest(self._open(MANIFEST))
            # All files are opened before the first is read, which may take minutes: an open file stays there.
            self._files = {about["file"]: self._open(about["file"]) for about in self.manifest["files"]}
            self._tensors = {about["file"]: self._checked(about) for about in self.manifest["files"]}
            with self._naming(MANIFEST):
                check_files(self.manifest, self._tensors)
        except Damaged:
            replaced = self._is_replaced()
            self.close()
            if replaced:
                raise Gone(f"{folder} was replaced or removed while it was read", remedy="restore again") from None
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def tensor(self, file: str, name: str) -> Tensor:
        """A tensor of one of the files, in memory of its own."""
        about = self._tensors[file][name]
        out = torch.empty(about.shape, dtype=about.dtype, device="cpu")
        if about.begin == about.end:
            return out
        raw: Any = out.reshape(-1).view(torch.uint8).numpy()
        left = memoryview(raw)
        at, checksum = about.begin, 0
        with self._naming(file):
            while left:
                count = os.preadv(self._files[file].fileno(), [left[:_PIECE]], at)
                checksum = zlib.crc32(left[:count], checksum)
                left, at = left[count:], at + count
                if not count:
                    break
            schema.require(not left and checksum == about.checksum, name, "other bytes", "those that were checked")
        return out

    @contextlib.contextmanager
    def _naming(self, name: str) -> Any:
        """Errors name the file, and the field in it."""
        file = self.folder / name
        try:
            yield
        except Invalid as error:
            field, got, expected = error.args
            raise Damaged(f"{file} is damaged: {field}", got=got, expected=expected) from None
        except OSError as error:
            if error.errno in _OF_PROCESS:
                error.filename = str(file)
                raise
            raise Damaged(f"{file} cannot be read", got=f"{type(error).__name__}: {error}") from None

    def _open(self, name: str) -> Any:
        """Open a file of the folder, without waiting for a pipe, say, of that name."""
        with uninterrupted(), self._naming(name):
            return self._closing.enter_context(folders.open_plain(name, self._at))

    def _checked(self, about: Mapping[str, Any]) -> dict[str, Stored]:
        """The tensors of a file that has the length and the checksum that the manifest says."""
        opened, kind = self._files[about["file"]], "sums" if "sums" in about else "sha256"
        state: Any = Sums() if kind == "sums" else hashlib.sha256()
        with self._naming(about["file"]):
            size = os.fstat(opened.fileno()).st_size
            schema.require(size == about["bytes"], "it is truncated", f"{size} bytes", f"{about['bytes']} bytes")
            first = _read(opened, 8)
            header = _read(opened, header_length(first, size))
            state.update(first + header)
            found = {}
            for name, one in stored(header, size).items():
                checksum, left = 0, one.end - one.begin
                while left and (piece := opened.read(min(left, _PIECE))):
                    state.update(piece)
                    checksum, left = zlib.crc32(piece, checksum), left - len(piece)
                found[name] = dataclasses.replace(one, checksum=checksum)
            digest = state.hexdigest()
            schema.require(digest == about[kind], "its checksum differs", digest, about[kind])
        return found

    def _is_replaced(self) -> bool:
        """Whether another folder, or none, has the name by now; a writer renames before it removes."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._at))
        except OSError:
            return True


def _read(opened: Any, count: int) -> bytes:
    """So many bytes, or as many as there are."""
    found = b""
    while len(found) < count and (piece := opened.read(count - len(found))):
        found += piece
    return found


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
    folders.put_back(path)
    if _is_one(path):
        folders.put_back(path.parent)
        return Opened(folders.set_aside(path) or path), []
    problems: list[str] = []
    for folder in _checkpoints(path):
        try:
            return Opened(folder), problems
        except Damaged as error:
            problems.append(str(error))
    if problems:
        raise Damaged(f"{problems[0]}, and no checkpoint in {path} is whole", got="; ".join(problems))
    if path.is_file():
        remedy = "name the directory given to save; torch.load reads what torch.save wrote"
        raise SpmdError(f"there is no checkpoint in {path}, which is a file", remedy=remedy)
    # A writer may have been between its two renames.
    kind = Gone if path.is_dir() and any(path.glob(".step-*")) else SpmdError
    raise kind(f"there is no checkpoint in {path}", remedy="look at the path given to save")


def _is_one(path: Path) -> bool:
    """Whether a path is that of one checkpoint: a directory of many may have such a name too."""
    if (path / MANIFEST).exists():
        return True
    return folders.is_name(path.name) and not _checkpoints(path)


def _checkpoints(path: Path) -> list[Path]:
    """The latest first; folders that only have such a name are left out."""
    found = []
    try:
        named = folders.steps(path)
    except NotADirectoryError:
        return []
    for _, folder in named:
        try:
            if folders.holds_checkpoint(folder):
                found.append(folder)
        except FileNotFoundError:
            if not folder.is_symlink():
                raise Gone(f"{folder} was removed while {path} was read", remedy="restore again") from None
    return found
