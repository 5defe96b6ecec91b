"""The secret of a job, which only its ranks know, so that they can tell each other from anyone else.

It is, in this order: SPMD_SECRET (which `spmd run` makes and passes to its ranks), the file that SPMD_SECRET_FILE
names, or a file in the user's home directory that is made on first use. The latter works for ranks on one host, or on
hosts that share home directories; whether they do is found out when they meet.
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

from ...kernels.errors import MeshError

_LEAST = 16  # characters of a secret


@dataclasses.dataclass(frozen=True, slots=True)
class Secret:
    """A key, its origin, and whether the user has chosen it (then all ranks must have it)."""

    key: bytes = dataclasses.field(repr=False)
    origin: str
    chosen: bool


def secret_of_user() -> Secret:
    """The secret that this process has before it has met any other.

    Raises:
        MeshError: SPMD_SECRET or SPMD_SECRET_FILE is set, and can't be used.
    """
    if text := os.environ.get("SPMD_SECRET"):
        return Secret(_checked(os.fsencode(text), "SPMD_SECRET"), "SPMD_SECRET", True)
    if path := os.environ.get("SPMD_SECRET_FILE"):
        return Secret(_of_file(path), "SPMD_SECRET_FILE", True)
    for folder in own_folders(home_first=True):
        with contextlib.suppress(OSError):
            return Secret(_made_once(folder / "secret"), str(folder / "secret"), False)
    return Secret(b"", "no secret", False)


def required() -> bool:
    """Whether the user forbids jobs without a secret."""
    return os.environ.get("SPMD_REQUIRE_SECRET", "") not in ("", "0")


def _checked(secret: bytes, origin: str) -> bytes:
    if len(secret) < _LEAST:
        remedy = "make one, the same for all ranks: python -c 'import secrets; print(secrets.token_hex())'"
        got, expected = f"{len(secret)} characters", f"at least {_LEAST}"
        raise MeshError(f"{origin} is too short", got=got, expected=expected, remedy=remedy)
    return secret


def _of_file(path: str) -> bytes:
    """The secret in a file that the user or the cluster has made; on clusters it may be a symbolic link."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            # As for ssh's keys: nobody else may read the user's own file; one of root's nobody else may write to.
            others = 0o077 if found.st_uid == os.getuid() else 0o022
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.getuid()) or found.st_mode & others:
                raise OSError(f"{stat.filemode(found.st_mode)} of user {found.st_uid}, which others can read or write")
            return _checked(file.read(1 << 16).strip(), "SPMD_SECRET_FILE")
    except OSError as error:
        raise MeshError(
            "SPMD_SECRET_FILE can't be used",
            got=f"SPMD_SECRET_FILE={path!r}: {error}",
            expected="a file of the user's own, 0600, or one of root's that nobody else may write to",
            remedy="chmod 600 it (in a volume of Kubernetes, defaultMode: 0400), or set SPMD_SECRET",
        ) from None


def _made_once(path: Path) -> bytes:
    """The secret in a file in the user's own directory; if several processes make it at once, one of them wins."""
    if not path.exists():
        own = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(own, path)  # atomic: the file is complete, or not there
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
    """Make a private directory of the user, or check that it is one; whether it is."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def own_folders(*, home_first: bool) -> Iterator[Path]:
    """Directories that only this user may enter, in the temporary and the home directory, if they can be made there."""
    folders = [Path(os.path.expanduser("~")) / ".spmd"]
    with contextlib.suppress(FileNotFoundError):  # nothing that is meant for temporary files can be written to
        folders.insert(home_first, Path(tempfile.gettempdir()) / f"spmd-{os.getuid()}")
    return filter(_claimed, folders)


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a file to meet in, and make it if it is not there; returns a descriptor.

    Raises:
        OSError: it can't be opened, or is a symbolic link.
        MeshError: it belongs to another user, or is no plain file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(fd)
        raise MeshError(
            f"{os.fspath(path)} is not used: it is no plain file of this user's",
            got=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
            expected=f"a plain file of user {os.getuid()}, or none",
            remedy="remove it, or choose a path in a directory of your own",
        )
    os.fchmod(fd, 0o600)
    return fd
