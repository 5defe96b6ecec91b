"""Files that are a user's own: in a directory that nobody else may enter, opened without following where others point.

Invariant: what is opened here is a plain file of this user's that nobody else may write to, or it is an error at once.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...kernels.errors import MeshError, message


def _claimed(folder: Path) -> bool:
    """Make a directory of the user's own, or see that it is one."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def own_folders(*, home_first: bool) -> Iterator[Path]:
    """Directories that only this user may enter, on this host and in the home directory, as far as there are any."""
    here = Path(tempfile.gettempdir()) / f"spmd-{os.getuid()}"
    home = Path(os.path.expanduser("~")) / ".spmd"
    return filter(_claimed, (home, here) if home_first else (here, home))


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a file to meet in, made if it is not there: a descriptor.

    Raises:
        OSError: it can't be opened, or it is a symbolic link.
        MeshError: it is another user's, or no plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(fd)
        raise MeshError(
            message(
                f"{os.fspath(path)} is not used: it is no plain file of this user's",
                got=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
                expected=f"a plain file of user {os.getuid()}, or none",
                remedy="remove it, or choose a path in a directory of your own",
            )
        )
    os.fchmod(fd, 0o600)
    return fd
