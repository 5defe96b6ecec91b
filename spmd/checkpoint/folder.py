"""A directory of checkpoints: folders of safetensors files and a manifest, there in full or not at all.

    runs/step-00000120/checkpoint.json            what is where, with a checksum of every file and of itself
    runs/step-00000120/rank-00000.safetensors     what each rank wrote; any reader of safetensors reads it

Files are written under temporary names, forced to disk and renamed, the folder last. Invariant: under its own name a
folder is complete from the first moment on, and never written to again; what `save` did not write is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

from ..kernels import processes
from ..kernels.errors import SpecError
from ..kernels.interrupts import uninterrupted
from .direct import naming
from .manifest import MANIFEST, RANK_FILE, seal, unsealed
from .schema import LARGEST, Invalid, require

_NAME = re.compile(r"step-(\d+)")
# Being written or removed ("tmp"), or whole and about to be replaced ("aside").
_TEMPORARY = re.compile(r"\.(?P<of>step-\d+)\.(?P<kind>tmp|aside)-(?P<pid>\d+)-[0-9a-f]+-(?P<host>.*)")
_REMEMBERED = 64  # manifests
_LARGEST_MANIFEST = 1 << 28  # bytes: a hundred for each leaf, and more leaves than any model has
_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HERE, _RENAME_EXCHANGE = -100, 2  # Linux's AT_FDCWD and RENAME_EXCHANGE
_TAKEN = errno.ENOTEMPTY, errno.EEXIST
_writing: set[str] = set()  # the names of the folders that this process is writing into; no two folders share one
# File lengths in a manifest, by its file's identity, time and size: checking one at each `save` would take too long.
_lengths: dict[tuple[int, int, int, int], list[tuple[str, int]]] = {}


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint's."""
    found = _NAME.fullmatch(name)
    return found is not None and len(found[1]) <= len(str(LARGEST)) and int(found[1]) < LARGEST


def steps(path: Path) -> list[tuple[int, Path]]:
    """(step, folder) of what has a checkpoint's name in a directory, the latest first.

    One that was set aside counts until another has its name.
    """
    found: dict[str, Path] = {}
    aside: dict[str, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in path.iterdir():
            if is_name(entry.name):
                found[entry.name] = entry
            elif (temporary := _TEMPORARY.fullmatch(entry.name)) and temporary["kind"] == "aside":
                aside[temporary["of"]] = entry
    return sorted(((int(name.partition("-")[2]), folder) for name, folder in {**aside, **found}.items()), reverse=True)


def next_step(path: Path) -> int:
    """The number after the last one there."""
    return next((last + 1 for last, _ in steps(path)), 0)


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is anything of a checkpoint in a folder, whole or not.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    with uninterrupted():
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (NotADirectoryError, PermissionError) as error:
            return isinstance(error, PermissionError)
        try:
            found = any(name == MANIFEST or RANK_FILE.fullmatch(name) for name in os.listdir(opened))
            if not found and not os.path.samestat(os.fstat(opened), os.stat(folder)):  # another is in its place by now
                raise FileNotFoundError(folder)
            return found
        finally:
            os.close(opened)


def is_ours(folder: Path) -> bool:
    """Whether `save` made it, and may remove it."""
    with contextlib.suppress(FileNotFoundError):
        return not folder.is_symlink() and holds_checkpoint(folder)
    return False


def _check_replaceable(final: Path) -> None:
    if os.path.lexists(final) and not is_ours(final):
        raise SpecError(
            f"save cannot write {final}: something that is no checkpoint has this name",
            got="a folder" if final.is_dir() else "a file",
            remedy="move it elsewhere, or save with another step or path",
        )


def set_aside(final: Path) -> Path | None:
    """Where a checkpoint lies that a writer set aside, and then ended; None if the name is in use."""
    if os.path.lexists(final) or not final.parent.is_dir():
        return None
    return next(final.parent.glob(f".{final.name}.aside-*"), None)


def put_back(path: Path) -> None:
    """Rename checkpoints back that a writer set aside in order to replace them, if that writer is gone."""
    for entry in path.glob(".step-*.aside-*"):
        found = _TEMPORARY.fullmatch(entry.name)
        if (
            found
            and entry.name not in _writing
            and is_left_over(entry.name)
            and not os.path.lexists(path / found["of"])
        ):
            with contextlib.suppress(OSError):  # in a read-only directory it is read where it is
                os.rename(entry, path / found["of"])


def begin(path: Path, step: int) -> Path:
    """Make a folder to write a checkpoint into, and remove what writers that are gone have left there.

    Raises:
        SpecError: something else has the checkpoint's name.
    """
    path.mkdir(parents=True, exist_ok=True)
    put_back(path)
    _check_replaceable(path / f"step-{step:08d}")
    for entry in path.glob(".step-*"):
        found = _TEMPORARY.fullmatch(entry.name)
        if found is None or entry.name in _writing or not is_left_over(entry.name):
            continue
        if found["kind"] == "tmp" or os.path.lexists(path / found["of"]):
            remove(entry)
    folder = path / _temporary(step)
    _writing.add(folder.name)  # first, or another thread that begins would take it for left over
    try:
        folder.mkdir()
    except BaseException:
        _writing.discard(folder.name)
        raise
    return folder


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that nobody finds a part of it under its name."""
    gone = folder.parent / _temporary(0)
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def keep_last(path: Path, count: int | None, written: Path) -> None:
    """Remove all checkpoints but the `count` written last (None: none), and nothing that is no checkpoint.

    The one just `written` stays. One that can't be read doesn't count, and is removed.
    """
    if count is None:
        return
    others = [folder for _, folder in steps(path) if folder != written and is_name(folder.name) and is_ours(folder)]
    times = {folder: _written_at(folder) for folder in others}
    others.sort(key=lambda folder: (times[folder] is not None, times[folder] or 0.0, folder.name), reverse=True)
    for folder in others[sum(times[folder] is not None for folder in others[: count - 1]) :]:
        remove(folder)


def _written_at(folder: Path) -> float | None:
    """When a checkpoint was written; None if it can't be read, or its files' lengths are wrong. Checks no checksums."""
    try:
        with open_plain(MANIFEST, folder) as file:
            about = os.fstat(file.fileno())
            lengths = _lengths.get(_identity(about))
            if lengths is None:
                lengths = _remember(about, read_manifest(file)[0])
        whole = all(os.lstat(folder / name).st_size == length for name, length in lengths)
    except (OSError, Invalid):
        return None
    return about.st_mtime if whole else None


def _identity(about: os.stat_result) -> tuple[int, int, int, int]:
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def _remember(about: os.stat_result, manifest: dict[str, Any]) -> list[tuple[str, int]]:
    while len(_lengths) >= _REMEMBERED:
        _lengths.pop(next(iter(_lengths)), None)
    lengths = _lengths[_identity(about)] = [(one["file"], one["bytes"]) for one in manifest["files"]]
    return lengths


def read_manifest(file: Any) -> tuple[dict[str, Any], str]:
    """The manifest in an open file, and its digest.

    Raises:
        Invalid: it is no manifest.
    """
    size = os.fstat(file.fileno()).st_size
    require(size <= _LARGEST_MANIFEST, "the file", f"{size} bytes", f"at most {_LARGEST_MANIFEST} bytes")
    return unsealed(file.read())


def open_plain(name: str, folder: str | Path | int) -> Any:
    """Open a plain file of a folder (a path, or an open one), without waiting for a pipe, say, of that name.

    Raises:
        Invalid: it is something else.
    """
    with uninterrupted(), contextlib.ExitStack() as closing:  # Ctrl-C would leave a number to nobody
        at, path = (folder, name) if isinstance(folder, int) else (None, Path(folder, name))
        number = os.open(path, _PLAIN, dir_fd=at)
        closing.callback(os.close, number)
        if stat.S_ISREG(os.fstat(number).st_mode):
            opened = os.fdopen(number, "rb", buffering=0)
            closing.pop_all()
            return opened
    raise Invalid("the file", "something else", "a plain file")


def _temporary(step: int) -> str:
    return f".step-{step:08d}{_suffix()}"


def _suffix(kind: str = "tmp") -> str:
    return f".{kind}-{os.getpid()}-{secrets.token_hex(4)}-{processes.namespace()}"


def is_left_over(name: str) -> bool:
    """Whether the process that made a temporary folder is known to be gone; one of another host never is."""
    found = _TEMPORARY.fullmatch(name)
    if found is None:
        return False
    mine = (found["host"], int(found["pid"])) == this_process()
    return mine or processes.gone(found["host"], int(found["pid"]))


def this_process() -> tuple[str, int]:
    """(namespace, pid), as `processes.gone` takes them."""
    return processes.namespace(), os.getpid()


def abandon(folder: Path) -> None:
    """Remove a folder in which other ranks may still begin files."""
    aside = folder.with_name(f"{folder.name.partition('.tmp-')[0]}{_suffix()}")
    with contextlib.suppress(OSError):
        folder.rename(aside)  # from now on they find no folder
    for found in (folder, aside):
        shutil.rmtree(found, ignore_errors=True)
    _writing.discard(folder.name)


def write(file: Path, data: bytes, mode: str = "xb") -> None:
    """Write a small file and force it to disk.

    Raises:
        OSError: what the file system says, with the file's name.
    """
    with naming(file), open(file, mode, buffering=0) as out:
        view = memoryview(data)
        while len(view):
            view = view[out.write(view) :]
        os.fsync(out.fileno())


def commit(folder: Path, path: Path, step: int, manifest: dict[str, Any], *, replace: bool) -> Path:
    """Write the manifest of a folder that is otherwise complete, and give it the checkpoint's name.

    Args:
        replace: replace a checkpoint of this step; else take the next number if another writer was faster.
    """
    while True:
        manifest = {**manifest, "step": step}
        (folder / MANIFEST).unlink(missing_ok=True)
        write(folder / MANIFEST, seal(manifest))
        _remember(os.stat(folder / MANIFEST), manifest)
        _sync(folder)
        final = path / f"step-{step:08d}"
        if replace:
            _check_replaceable(final)
        if _take_name(folder, final, replace=replace):
            break
        step = step if replace else max(next_step(path), step + 1)
    _sync(path)
    _writing.discard(folder.name)
    return final


def _take_name(folder: Path, final: Path, *, replace: bool) -> bool:
    """Rename a folder; False if another writer was faster."""
    if not os.path.lexists(final):
        try:
            os.rename(folder, final)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        return True
    if not replace or not _exchange(folder, final):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders, in one step where the system can (Linux's renameat2).

    A folder can't be renamed over another. False if another writer has removed or replaced the other one meanwhile.
    """
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
    # Not every file system can. If this process is killed between the two renames, the old one is found by this name.
    between = other.with_name(f".{other.name}{_suffix('aside')}")
    _writing.add(between.name)
    try:
        try:
            os.rename(other, between)
        except FileNotFoundError:
            return False
        try:
            os.rename(one, other)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TAKEN:
                shutil.rmtree(between, ignore_errors=True)
                return False
            os.rename(between, other)
            raise
        os.rename(between, one)
        return True
    finally:
        _writing.discard(between.name)


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
