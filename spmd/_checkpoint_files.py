"""A checkpoint on disk: a folder of safetensors files and a manifest, there in full or not at all.

    runs/step-00000120/checkpoint.json            what is where, with a SHA-256 of every file and of itself
    runs/step-00000120/rank-00000.safetensors     what each rank wrote; any reader of safetensors reads it

Files are written beside their place, forced to disk and renamed, the folder last. Invariant: under its own name a
folder is whole from the first moment on, and is never written to again; what `save` did not write is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from .kernels.errors import SpecError, message

MANIFEST = "checkpoint.json"
FORMAT = 2
READABLE = (1, 2)  # in the first, no values were cut in other dimensions than the first
_NAME = re.compile(r"step-(\d+)")
_RANK = re.compile(r"rank-\d+\.safetensors")
# Being written or removed ("tmp"), or whole and about to be replaced ("aside").
_TEMPORARY = re.compile(r"\.(?P<of>step-\d+)\.(?P<kind>tmp|aside)-(?P<pid>\d+)-[0-9a-f]+-(?P<host>.*)")
_PIECE = 1 << 20
_HERE, _RENAME_EXCHANGE = -100, 2  # Linux's AT_FDCWD and RENAME_EXCHANGE
# Folders that this process is writing into.
_writing: set[Path] = set()


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


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


def holds_checkpoint(folder: Path) -> bool:
    """Whether there is anything of a checkpoint in a folder, whole or not.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return False
    except PermissionError:
        return True
    return MANIFEST in names or any(map(_RANK.fullmatch, names))


def _is_ours(folder: Path) -> bool:
    """Whether `save` made it, and may remove it."""
    with contextlib.suppress(FileNotFoundError):
        return not folder.is_symlink() and holds_checkpoint(folder)
    return False


def _check_replaceable(final: Path) -> None:
    if os.path.lexists(final) and not _is_ours(final):
        raise SpecError(
            message(
                f"save cannot write {final}: something that is no checkpoint has this name",
                got="a folder" if final.is_dir() else "a file",
                remedy="move it elsewhere, or save with another step or path",
            )
        )


def set_aside(final: Path) -> Path | None:
    """Where a checkpoint is that was about to be replaced when its writer ended; None if it has its name."""
    if os.path.lexists(final) or not final.parent.is_dir():
        return None
    return next(final.parent.glob(f".{final.name}.aside-*"), None)


def put_back(path: Path) -> None:
    """Give checkpoints back the names that writers, which are gone, took from them to replace them."""
    for entry in path.glob(".step-*.aside-*"):
        found = _TEMPORARY.fullmatch(entry.name)
        if found and entry not in _writing and is_left_over(entry.name) and not os.path.lexists(path / found["of"]):
            with contextlib.suppress(OSError):  # where nothing may be written, it is read where it is
                os.rename(entry, path / found["of"])


def begin(path: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what writers that are gone have left there is removed.

    Raises:
        SpecError: something else has the checkpoint's name.
    """
    path.mkdir(parents=True, exist_ok=True)
    put_back(path)
    _check_replaceable(path / f"step-{step:08d}")
    for entry in path.glob(".step-*"):
        found = _TEMPORARY.fullmatch(entry.name)
        if found is None or entry in _writing or not is_left_over(entry.name):
            continue
        if found["kind"] == "tmp" or os.path.lexists(path / found["of"]):
            _remove(entry)
    folder = path / _temporary(step)
    folder.mkdir()
    _writing.add(folder)
    return folder


def _remove(folder: Path) -> None:
    """Remove a folder, renamed first, so that none is there in part."""
    gone = folder.parent / _temporary(0)
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _temporary(step: int) -> str:
    return f".step-{step:08d}{_suffix()}"


def _suffix(kind: str = "tmp") -> str:
    return f".{kind}-{os.getpid()}-{secrets.token_hex(4)}-{socket.gethostname()}"


def is_left_over(name: str) -> bool:
    """Whether the process that made a temporary folder is known to be gone; of another host's nothing is."""
    found = _TEMPORARY.fullmatch(name)
    if found is None:
        return False
    mine = (found["host"], int(found["pid"])) == this_process()
    return mine or is_gone(found["host"], int(found["pid"]))


def this_process() -> tuple[str, int]:
    """(host, pid)."""
    return socket.gethostname(), os.getpid()


def is_gone(host: str, pid: int) -> bool:
    """Whether a process is known to have ended."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def give_up(folder: Path) -> None:
    """Remove a folder in which other ranks may still begin files."""
    aside = folder.with_name(f"{folder.name.partition('.tmp-')[0]}{_suffix()}")
    with contextlib.suppress(OSError):
        folder.rename(aside)  # from now on they find no folder
    for found in (folder, aside):
        shutil.rmtree(found, ignore_errors=True)
    _writing.discard(folder)


def write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write one file of tensors; what the manifest is to say of it."""
    return {"file": name, **write(folder / name, save(dict(tensors)))}


def write(file: Path, data: bytes) -> dict[str, Any]:
    """Write a file in pieces and force it to disk."""
    with open(file, "xb", buffering=0) as out:
        view = memoryview(data)
        while len(view):
            view = view[out.write(view[:_PIECE]) :]
        os.fsync(out.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def commit(folder: Path, path: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Give a folder that is complete but for its manifest the checkpoint's name."""
    text = json.dumps(manifest)
    sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
    write(folder / MANIFEST, json.dumps(sealed).encode())
    _sync(folder)
    final = path / f"step-{step:08d}"
    _check_replaceable(final)
    if final.exists():  # a folder can't be renamed over another: they change names, and the old one is removed
        _exchange(folder, final)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        os.rename(folder, final)
    _sync(path)
    _writing.discard(folder)
    return final


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders, in one step where the system can (Linux's renameat2)."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return
    # Not every file system can. Whoever looks for the old one, after a kill between the two, knows this name.
    between = other.with_name(f".{other.name}{_suffix('aside')}")
    _writing.add(between)
    try:
        os.rename(other, between)
        try:
            os.rename(one, other)
        except BaseException:
            os.rename(between, other)
            raise
        os.rename(between, one)
    finally:
        _writing.discard(between)


def keep_last(path: Path, count: int, written: Path) -> None:
    """Remove all checkpoints but the `count` written last, and nothing that is no checkpoint.

    The one just `written` stays. One that can't be read doesn't count, and goes.
    """
    others = [folder for _, folder in steps(path) if folder != written and is_name(folder.name) and _is_ours(folder)]
    others.sort(key=_written_at, reverse=True)
    for folder in others[sum(map(_looks_whole, others[: count - 1])) :]:
        _remove(folder)


def _written_at(folder: Path) -> tuple[bool, float, str]:
    with contextlib.suppress(OSError):
        if _looks_whole(folder):
            return True, (folder / MANIFEST).stat().st_mtime, folder.name
    return False, 0.0, folder.name


def _looks_whole(folder: Path) -> bool:
    """Whether the manifest is whole and the files are as long as it says; their checksums are not computed."""
    try:
        sealed = json.loads((folder / MANIFEST).read_bytes())
        whole = hashlib.sha256(json.dumps(sealed["manifest"]).encode()).hexdigest() == sealed["sha256"]
        return whole and all((folder / f["file"]).stat().st_size == f["bytes"] for f in sealed["manifest"]["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
