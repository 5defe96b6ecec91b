"""Errors of the operating system while a mesh is made, as messages that name the limit that was reached."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from .errors import MeshError, SpmdError

# What a system error most often means here: what there is too little of, its limit, and how to raise that in a shell.
_LIMITS = {
    errno.ENOMEM: [
        ("address space", "RLIMIT_AS", "ulimit -v unlimited"),
        ("data", "RLIMIT_DATA", "ulimit -d unlimited"),
    ],
    errno.EFBIG: [("size of a file", "RLIMIT_FSIZE", "ulimit -f unlimited")],
    errno.EMFILE: [("open files", "RLIMIT_NOFILE", "ulimit -n $(ulimit -Hn)")],
    errno.EAGAIN: [("processes", "RLIMIT_NPROC", "ulimit -u $(ulimit -Hu), or allow the container more (pids.max)")],
}

_MEMORY = "use less of it, or fewer ranks; or raise vm.max_map_count, or what vm.overcommit_memory allows (sysctl)"


@contextlib.contextmanager
def named_limits() -> Iterator[None]:
    """Turn errors of the operating system into `MeshError`; errors of this library pass."""
    try:
        yield
    except SpmdError:
        raise
    except (OSError, RuntimeError, OverflowError) as error:
        number = _number_of(error)
        if number is None:
            raise
        if number not in _LIMITS:
            problem, remedy = (
                "the operating system refuses what a mesh needs",
                "see that the working directory and the temporary directory are there, and have room, and that no"
                " sandbox forbids it",
            )
            raise MeshError(problem, got=str(error), remedy=remedy) from None
        limits = [(*one, resource.getrlimit(getattr(resource, one[1]))[0]) for one in _LIMITS[number]]
        what, name, remedy, most = next((one for one in limits if one[3] != resource.RLIM_INFINITY), limits[0])
        if number == errno.ENOMEM and most == resource.RLIM_INFINITY:  # a limit of the system, not of this process
            problem = "the operating system has no memory left for a mesh"
            raise MeshError(problem, got=str(error), remedy=_MEMORY) from None
        got = f"{os.strerror(number)}, with a limit of {'none' if most == resource.RLIM_INFINITY else most}"
        problem = f"a mesh needs more than the limit on {what} allows, {name}"
        raise MeshError(problem, got=got, remedy=f"{remedy}; or use fewer ranks") from None


def _number_of(error: OSError | RuntimeError | OverflowError) -> int | None:
    """The errno of an error; torch's own errors have only its text."""
    if isinstance(error, OSError):
        return error.errno or 0
    if isinstance(error, OverflowError):  # a size too large for the system call's argument
        return errno.ENOMEM
    if "can't start new thread" in str(error):  # Python's own
        return errno.EAGAIN
    return next((number for number in _LIMITS if os.strerror(number) in str(error)), None)
