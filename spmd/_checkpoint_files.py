"""A checkpoint on disk: a folder of safetensors files and a manifest, there in full or not at all.

    runs/step-00000120/checkpoint.json            what is where, with a SHA-256 of every file and of itself
    runs/step-00000120/rank-00000.safetensors     what each rank wrote; any reader of safetensors reads it

Files are written beside their place, forced to disk and renamed, the folder last. Invariant: under its own name a
folder is whole from the first moment on, and is never written to again.
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

from .kernels.errors import SpmdError, message

MANIFEST = "checkpoint.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = re.compile(r"\.step-\d+\.tmp-(?P<pid>\d+)-[0-9a-f]+-(?P<host>.*)")
_PIECE = 1 << 20
_HERE, _RENAME_EXCHANGE = -100, 2  # Linux's AT_FDCWD and RENAME_EXCHANGE
# Folders that this process is writing into.
_writing: set[Path] = set()


class Damaged(SpmdError):
    """A checkpoint that is not what was written; the message begins with the file's name."""


def is_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint's."""
    return _NAME.fullmatch(name) is not None


def steps(path: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in a directory, the latest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in path.iterdir():
            match = _NAME.fullmatch(entry.name)
            if match:
                found.append((int(match[1]), entry))
    return sorted(found, reverse=True)


def begin(path: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; what writers that are gone have left there is removed."""
    path.mkdir(parents=True, exist_ok=True)
    for entry in path.glob(".step-*.tmp-*"):
        if entry not in _writing and is_left_over(entry.name):
            shutil.rmtree(entry, ignore_errors=True)
    folder = path / _temporary(step)
    folder.mkdir()
    _writing.add(folder)
    return folder


def _temporary(step: int) -> str:
    return f".step-{step:08d}{_suffix()}"


def _suffix() -> str:
    return f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{socket.gethostname()}"


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
    between = other.parent / _temporary(0)  # not every file system can
    os.rename(other, between)
    try:
        os.rename(one, other)
    except BaseException:
        os.rename(between, other)
        raise
    os.rename(between, one)


def keep_last(path: Path, count: int, written: Path) -> None:
    """Remove all checkpoints but the `count` written last: renamed first, so that none is there in part.

    The one just `written` stays. One that can't be read doesn't count, and goes.
    """
    others = [folder for _, folder in steps(path) if folder != written]
    others.sort(key=_written_at, reverse=True)
    for folder in others[sum(map(_looks_whole, others[: count - 1])) :]:
        gone = path / _temporary(0)
        with contextlib.suppress(OSError):
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _written_at(folder: Path) -> tuple[bool, float, str]:
    whole = _looks_whole(folder)
    return whole, (folder / MANIFEST).stat().st_mtime if whole else 0.0, folder.name


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


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint all of whose files are as they were written.

    Raises:
        Damaged: one is not.
    """
    file = folder / MANIFEST
    try:
        sealed = json.loads(file.read_bytes())
        manifest = sealed["manifest"]
        whole = hashlib.sha256(json.dumps(manifest).encode()).hexdigest() == sealed["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(message(f"{file} cannot be read", got=f"{type(error).__name__}: {error}")) from None
    if not whole:
        raise Damaged(message(f"{file} is damaged: its checksum differs"))
    if manifest["format"] != FORMAT:
        raise Damaged(message(f"{file} has another format", got=manifest["format"], expected=FORMAT))
    for about in manifest["files"]:
        _check_file(folder / about["file"], about)
    return manifest


def _check_file(file: Path, about: Mapping[str, Any]) -> None:
    state = hashlib.sha256()
    try:
        size = file.stat().st_size
        if size != about["bytes"]:
            raise Damaged(message(f"{file} is truncated", got=f"{size} bytes", expected=f"{about['bytes']} bytes"))
        with open(file, "rb") as data:
            while piece := data.read(_PIECE):
                state.update(piece)
    except OSError as error:
        raise Damaged(message(f"{file} cannot be read", got=str(error))) from None
    if state.hexdigest() != about["sha256"]:
        raise Damaged(message(f"{file} is damaged: its checksum differs"))
