"""Temporary folders of commands. What a killed command has left is removed by the next one.

A command holds a lock on its folder, and the kernel takes that back however the command ends. A number of a process
would not do: in containers that share a folder it means different processes. Where hosts share a folder, a lock may be
seen on its own host only, so a name tells which start of which kernel made it. Invariant: a folder that is removed
belongs to this user, was made under this kernel, and nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")  # another after each start of the kernel


@contextlib.contextmanager
def temporary_folder(command: str) -> Iterator[Path]:
    """A folder, `spmd-run-...` for the command "run", for as long as the block runs."""
    prefix = f"spmd-{command}-{BOOT.read_text()[:8]}-"  # those of earlier versions, which have no lock, are let be
    _remove_left(prefix)
    try:
        made = Path(tempfile.mkdtemp(prefix="spmd-new-"))
    except OSError as error:
        raise SystemExit(f"spmd {command} can't make a temporary folder: {error}\nset TMPDIR to where it can") from None
    lock = _locked(made)
    folder = made.rename(made.with_name(prefix + made.name.removeprefix("spmd-new-")))  # others look at it from now on
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_left(prefix: str) -> None:
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of this user's folder; None if it is another's, or locked, or has no locks."""
    lock = None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    except OSError:
        pass
    if lock is not None:
        os.close(lock)
    return None
