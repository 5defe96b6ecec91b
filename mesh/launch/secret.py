"""The secret of a job: what its ranks know, and nobody else, so that they can tell each other from anyone else.

In this order: SPMD_SECRET (which `spmd run` makes and hands to its ranks), the file that SPMD_SECRET_FILE names, and a
file in the user's home directory that is made on first use. The last is the ranks' own where they are on one host, or
on hosts that share home directories; whether they do is found out when they meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...kernels.errors import MeshError, message
from .meeting import Environ

_LEAST = 16  # characters of a secret


@dataclasses.dataclass(frozen=True, slots=True)
class Secret:
    """A key, where it is from, and whether the user has chosen it, so that all ranks must have it."""

    key: bytes
    origin: str
    chosen: bool


def secret_of_user(environ: Environ = os.environ) -> Secret:
    """The secret that this process has before it has met any other.

    Raises:
        MeshError: SPMD_SECRET or SPMD_SECRET_FILE is set, and is none.
    """
    if text := environ.get("SPMD_SECRET"):
        return Secret(_checked(os.fsencode(text), "SPMD_SECRET"), "SPMD_SECRET", True)
    if path := environ.get("SPMD_SECRET_FILE"):
        return Secret(_of_file(path), "SPMD_SECRET_FILE", True)
    for folder in own_folders(home_first=True):
        with contextlib.suppress(OSError):
            return Secret(_made_once(folder / "secret"), str(folder / "secret"), False)
    return Secret(b"", "no secret", False)


def required(environ: Environ = os.environ) -> bool:
    """Whether the user wants no job over several hosts that has no secret."""
    return environ.get("SPMD_REQUIRE_SECRET", "") not in ("", "0")


def _checked(secret: bytes, origin: str) -> bytes:
    if len(secret) < _LEAST:
        remedy = "make one, the same for all ranks: python -c 'import secrets; print(secrets.token_hex())'"
        text = message(
            f"{origin} is too short", got=f"{len(secret)} characters", expected=f"at least {_LEAST}", remedy=remedy
        )
        raise MeshError(text)
    return secret


def _of_file(path: str) -> bytes:
    """What a file says that the user, or the cluster for them, has put there; clusters make it a symbolic link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            # As ssh does with keys: what is the user's own nobody else may read; how root hands one over is root's.
            others = 0o077 if found.st_uid == os.getuid() else 0o022
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.getuid()) or found.st_mode & others:
                raise OSError(f"{stat.filemode(found.st_mode)} of user {found.st_uid}, which others can read or write")
            return _checked(file.read(1 << 16).strip(), "SPMD_SECRET_FILE")
    except OSError as error:
        raise MeshError(
            message(
                "SPMD_SECRET_FILE can't be used",
                got=f"SPMD_SECRET_FILE={path!r}: {error}",
                expected="a file of the user's own, 0600, or one of root's that nobody else may write to",
                remedy="chmod 600 it (in a volume of Kubernetes, defaultMode: 0400), or set SPMD_SECRET",
            )
        ) from None


def _made_once(path: Path) -> bytes:
    """The secret in a file of the user's own directory; of several processes that make it at once, one's."""
    if not path.exists():
        own = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(own, path)  # whole, or not there
        finally:
            own.unlink()
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        data = file.read(1 << 16).strip()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077 or len(data) < _LEAST:
        raise OSError(f"{path} is no secret of this user's")
    return data


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
