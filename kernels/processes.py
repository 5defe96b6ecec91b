"""Processes: what objects do in a fork of the process that made them, and whether a process has ended.

Programs fork (multiprocessing does, by default), and a child has all objects of its parent. Objects that free, signal,
answer or close remember who made them, and do nothing in any other process (`Owned`). Objects that communicate are
turned into ones that refuse when the process forks (`refuse_in_forks`), so they need no checks. A process number has a
meaning only within one pid namespace of one boot of one kernel. Invariant: what is not known to be dead is alive. The
rest is what this library asks the system about processes, and has it do with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import resource
import select
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from .errors import MeshError

_PR_SET_PDEATHSIG = 1
# It gives -1 where the C library lacks the function.
_current_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
_CORES = os.cpu_count() or 1
# The file that says which control groups this process is in, and where the groups' own files are: in a container these
# may be those of its group alone.
_GROUPS, _MOUNTED = "/proc/self/cgroup", "/sys/fs/cgroup"
_VMSTAT = Path("/proc/vmstat")

_current = os.getpid()


_communicates: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_in_forks(*things: Any) -> None:
    """Make all methods of these objects raise `MeshError` in forks of this process, which are not ranks."""
    _communicates.update(things)


def _refuse(thing: Any, name: str) -> Any:
    """Attribute access of a communicating object in a fork: only its identity can be read, and `close` called."""
    if name in ("backend", "rank", "ranks", "size") or name.startswith("__"):
        return object.__getattribute__(thing, name)
    if name == "close":
        return lambda: None
    raise forked_cannot("communicate")


def _fill(namespace: dict[str, Any]) -> None:
    namespace["__getattribute__"] = _refuse


def forked_cannot(do: str) -> MeshError:
    remedy = "do it in the rank, and give the child what it needs"
    return MeshError(f"a process that a rank has forked cannot {do}: it is none of the ranks", remedy=remedy)


def _in_child() -> None:
    global _current
    _current = os.getpid()
    for thing in list(_communicates):
        # Keep it for ever: the destructor of Gloo's part waits for threads that a fork does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        thing.__class__ = types.new_class("OfParent", (type(thing),), exec_body=_fill)
    _communicates.clear()


os.register_at_fork(after_in_child=_in_child)


class Owned:
    """Something that belongs to the process that made it."""

    __slots__ = ("_owner",)

    def __init__(self) -> None:
        self._owner = _current

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return self._owner != _current


@functools.lru_cache(maxsize=1)
def namespace() -> str:
    """The same for processes whose pids have the same meaning: one boot of one kernel, one pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def gone(its_namespace: str, pid: int) -> bool:
    """Whether a process is known to have ended.

    Asks the kernel instead of /proc, which may belong to another namespace, or hide other users' processes.
    """
    if its_namespace != namespace():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def status_of(pid: int | str) -> dict[str, str] | None:
    """The fields of /proc/PID/status (`State`, `TracerPid`) of a process, or of a thread ("pid/task/tid"); None if it
    has ended."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            return {name: text.strip() for name, _, text in (line.partition(":") for line in file)}
    except OSError:
        return None


def stat_of(pid: int | str) -> list[str]:
    """The fields behind the name in /proc/PID/stat (state, parent, group and so on) of a process or thread."""
    # The kernel cuts names after 15 bytes, which may be within a character.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def ancestors() -> Iterator[int]:
    """The process that started this one, that which started it, and so on."""
    pid = os.getpid()
    while (status := status_of(pid)) is not None:
        yield (pid := int(status["PPid"]))


def environ_of(pid: int) -> dict[str, str]:
    """The variables with which a process of this user began; none of others'."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (os.fsdecode(entry).partition("=") for entry in entries)}


def listens(pid: int, port: int) -> bool:
    """Whether a process of this user listens at a TCP port."""
    listening = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, at, _, state, *_, inode = line.split()[:10]
                if state == "0A" and int(at.rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{inode}]")
    with contextlib.suppress(OSError):
        return any(os.readlink(entry.path) in listening for entry in os.scandir(f"/proc/{pid}/fd"))
    return False


def nanoseconds_of(pid: int) -> int:
    """How long a process's main thread has run on a processor; if the kernel doesn't say, as if it always had."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[0])
    except OSError:
        return time.monotonic_ns()


def ended(pidfd: int, seconds: float = 0.0) -> bool:
    """Wait for a process to end; returns whether it has."""
    waiting = select.poll()  # select() takes only descriptors below 1024
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however that happens.

    Args:
        parent: that process, as the forking code knew it: by now it may have ended, and `getppid` name another one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)


def cores() -> int:
    """How many cores this process can use: those that it may run on, or fewer by what its container gets of them."""
    return math.ceil(min(len(os.sched_getaffinity(0)), processor_limit()))


def processor_limit() -> float:
    """Seconds of processor time in a second that control groups leave this process (Docker's --cpus); inf for any."""
    limits = [math.inf]
    for version, folder in _control_groups("cpu", _GROUPS, _MOUNTED):
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or no limit: "max"
            if version == 1:
                quota, period = (_number_in(folder / f"cpu.cfs_{of}_us") for of in ("quota", "period"))
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            limits.append(quota / period if quota > 0 else math.inf)  # version 1 has -1 for no limit
    return min(limits)


@functools.lru_cache
def _control_groups(controller: str, proc: str, mounted: str) -> list[tuple[int, Path]]:
    """The control groups that this process is in, and those around them, whose limits count, too.

    Args:
        controller: "cpu" or "memory".
        proc, mounted: `_GROUPS` and `_MOUNTED`.

    Returns:
        The version (1 or 2), and the folder that has the group's files, if it is mounted, from the innermost group on.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or none that can be read
        for line in Path(proc).read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = Path(mounted, controller if controllers else "")
            for folder in (PurePosixPath(group), *PurePosixPath(group).parents):
                found.append((1 if controllers else 2, Path(f"{root}{folder}")))
    return found


def spread(index: int, ranks: int) -> None:
    """Move this process to a core of its own, the `index`-th of `ranks` on this host, if it isn't on one.

    A kernel that wakes several ranks at once tends to put them on the core that woke them, and takes its time to spread
    them: two ranks on one of two cores make a step twice as long. A rank isn't bound to its core: if that is busy, the
    kernel may move it.
    """
    threads = torch.get_num_threads()
    if ranks < 2 or ranks * threads > _CORES:  # known without asking which cores are allowed
        return
    allowed = sorted(os.sched_getaffinity(0))
    if ranks * threads > len(allowed):
        return
    own = allowed[index * threads : (index + 1) * threads]
    if _current_core() in (*own, -1):
        return
    for cores in (own[:1], allowed):
        with contextlib.suppress(OSError):  # a sandbox forbids it, or the cores are no longer allowed
            os.sched_setaffinity(0, cores)


def memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in this process's control groups, or on the host."""
    files, groups = {1: "memory.oom_control", 2: "memory.events"}, _control_groups("memory", _GROUPS, _MOUNTED)
    for path in (*(folder / files[version] for version, folder in groups), _VMSTAT):
        with contextlib.suppress(OSError, StopIteration):
            return _field_of(path, "oom_kill")
    return 0


def available_bytes() -> int:
    """Memory that this process can still use, according to the host and its control groups."""
    found = of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        found = min(found, _field_of(Path("/proc/meminfo"), "MemAvailable:") << 10)
    for version, folder in _control_groups("memory", _GROUPS, _MOUNTED):
        limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        with contextlib.suppress(OSError, ValueError, StopIteration):  # there is no such file, or no limit: "max"
            most = _number_in(folder / f"memory.{limit}")
            if most < of_host:  # version 1 has a large number for no limit
                # Pages of files that were read count as used, but make room for others.
                cached = _field_of(folder / "memory.stat", "total_inactive_file" if version == 1 else "inactive_file")
                # They are counted at another time than all, and so may be more.
                found = min(found, max(0, most - max(0, _number_in(folder / f"memory.{used}") - cached)))
    return found


def _number_in(path: Path) -> int:
    return int(path.read_text())


def _field_of(path: Path, name: str) -> int:
    """The number behind this name in a file of the kernel's that has one on each line."""
    with open(path) as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name} "))


def check_not_imported_by_worker() -> None:
    """Refuse a mesh in a worker that multiprocessing has spawned, while it imports the script that spawned it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise MeshError(
            "a worker process of multiprocessing imports this program's main script, which makes a Mesh",
            got="a second set of ranks, which nobody wants",
            remedy="make the Mesh under `if __name__ == '__main__':`, or use the start method 'fork'",
        )


# Those that tell Python to ignore variables and folders are for environments in which it can't start otherwise.
_FLAGS = {
    "optimize": "O",
    "bytes_warning": "b",
    "ignore_environment": "E",
    "isolated": "I",
    "no_site": "S",
    "no_user_site": "s",
    "safe_path": "P",  # since Python 3.11
}


def python_command() -> list[str]:
    """This Python, with the options of this process: assertions, warnings, modes, and what it reads as it starts."""
    flags = "".join(letter * getattr(sys.flags, name, 0) for name, letter in _FLAGS.items())
    given = getattr(sys, "_xoptions", {})  # documented, but of CPython alone
    modes = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in given.items()]
    return [sys.executable, *[f"-{flags}"] * bool(flags), *(f"-W{each}" for each in sys.warnoptions), *modes]


def check_can_start_python() -> None:
    """Refuse to start ranks where there is no Python to run them: a frozen program would start itself again."""
    frozen = getattr(sys, "frozen", False)  # as PyInstaller and cx_Freeze have it
    if frozen or not sys.executable:
        raise MeshError(
            "the ranks of this program cannot be started, since it is no program that Python runs",
            got="a frozen program" if frozen else "an empty sys.executable",
            expected="sys.executable to be a Python that can import spmd",
            remedy="run it with python, or have a launcher start its ranks (docs/launching.md)"
            + ("" if frozen else ", or set sys.executable"),
        )


def open_more_files() -> None:
    """Raise the soft limit on open files to the hard limit: each large value takes a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class ThreadBuffer(threading.local):
    """A read buffer for each thread, allocated once: allocating it for every read costs more than the read."""

    def __init__(self, nbytes: int):
        self.data = bytearray(nbytes)
