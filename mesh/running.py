"""What ranks can do beside steps: call any function (`Mesh.run`, `Mesh.submit`), and hold an object (`Mesh.remote`)."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

from ..kernels.argument_names import OF_MESHES
from ..kernels.arguments import check_function, checked_flag, checked_rank, checked_ranks, plain_text
from ..kernels.callsite import public
from ..kernels.errors import MeshError, PeerLost, no_attribute
from ..kernels.torch_private import untraced
from . import protocol, wire
from .ambient import ambient
from .display.notebook import shorten
from .driver.mesh_view import MeshView
from .driver.pending import Task, made_for_its_size
from .driver.sending import content as content_of
from .driver.session import DriverSession
from .launch import launched
from .pickling.beside import typed_sources
from .pickling.objects import class_of_script, name_in_script
from .pickling.settings import checked
from .pickling.unpicklable import sending_result
from .rank import counted
from .region import Region, current, run_body
from .remote import answers
from .remote.caller import Unreached
from .remote.handle import Remote
from .remote.node import Node
from .remote.restoring import ATTEMPTS

REPLACED_SECONDS = 10.0  # how long `remote` waits for a dead rank to be replaced


@public
def refuse_attribute(mesh: MeshView, name: str) -> NoReturn:
    """Raise an error for an attribute that a mesh does not have, with what to write instead of torch's or JAX's."""
    raise no_attribute(mesh, name, OF_MESHES) from None


@public
def device_mesh(mesh: MeshView) -> Any:
    """On a rank, torch's `DeviceMesh` of the mesh's ranks, with the same axis names, over "spmd" process groups."""
    return untraced(_device_mesh)(mesh)


def _device_mesh(mesh: MeshView) -> Any:
    # By name, since torch's process groups are in a higher layer than this file.
    return importlib.import_module("spmd.torch_distributed.device_mesh").of_mesh(mesh)


@public
def reload(self: MeshView, *modules: Any) -> list[str]:
    """Reload modules that were edited on disk, in the driver and on the ranks; values on the mesh stay.

    Reloaded are the program's own modules (not installed packages) whose file has changed since a function that could
    use them was first sent, modules that import one of these, and the ones that are named. The modules' functions get
    their new code wherever they are used; names that the main program has imported are bound again; existing objects
    keep their old class.

    Args:
        modules: modules, or their names, to reload in any case.

    Returns:
        The names of the modules that were reloaded.

    Raises:
        MeshError: called on a rank. Whatever a module raises while it is loaded.
    """
    self.check_driver("reload", "importlib.reload is for launched programs, whose ranks run the whole script")
    for one in modules:
        if not isinstance(one, str | types.ModuleType):
            problem, expected = "mesh.reload reloads modules", "modules, or their names"
            raise MeshError(problem, got=repr(one), expected=expected, remedy="pass the module that has it")
    driver, names = self.driver, [plain_text(one if isinstance(one, str) else one.__name__) for one in modules]
    driver.ready()
    driver.shipped.pickle_again()
    done = driver.shipped.modules.reload(names)
    return list(dict.fromkeys([*done, *driver.shipped.reload_there((*names, *done))]))


@public
def run(self: MeshView, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
    """Call `fn(*args)` on every rank, or on some; `fn` may use collectives.

    Returns:
        The results, of any type, in rank order (or in the order of `ranks`).

    Raises:
        what `fn` raises on a rank, as its own type, with that rank's traceback.
    """
    check_function("mesh.run", fn, "mesh.run(function, *args)")
    chosen = _checked(self, "mesh.run", ranks)
    key = (self.seed, "run", self.run_state.next_run())
    if counted.thread.asked:
        counted.note_mesh(self)
    if self.is_driver:
        if not chosen:
            return []
        return self.driver.wait(_send(self, "mesh.run", fn, args, ranks, key, region=True, reported=True)).values()
    rank, settings = self.session.rank, ambient()

    def name_of(obj: Any) -> Any:
        if isinstance(obj, type(self)):
            return ("mesh",)
        return None if (name := name_in_script(obj)) is None else ("class", name)

    def object_of(name: Any) -> Any:
        return self if name == ("mesh",) else class_of_script(name[1])

    def here() -> tuple[Any, list[bytes]]:
        by_some = len({*chosen}) < self.layout.size
        region = Region(self.session, key, self, by_some=by_some)
        result = run_body(region, settings, fn, args) if rank in chosen else None
        with sending_result(lambda: [("what the function returned", result)], self.session.where, (type(self),)):
            mine = wire.to_bytes(result, name_of)
        return result, self.session.comm().all_gather_bytes(mine)

    result, everyone = launched.call(self.session, here, "mesh.run")
    return [result if peer == rank else wire.from_bytes(everyone[peer], object_of) for peer in chosen]


@public
def submit(self: MeshView, fn: Callable[..., Any], *args: Any, rank: int = 0) -> Future:
    """Start `fn(*args)` on one rank and return a future of its result; `fn` can't use collectives.

    The future's callbacks run on a thread of their own, where they may use the mesh.

    Raises:
        MeshError: there is no such rank, or `fn` can't be sent. What `fn` raises is raised by the future's `result()`.
    """
    check_function("mesh.submit", fn, "mesh.submit(function, *args, rank=0)")
    (chosen,) = _checked(self, "mesh.submit", [rank])
    future: Future = _Running()
    future.set_running_or_notify_cancel()
    if self.is_driver:
        key = (self.seed, "run", self.run_state.next_run())
        _send(self, "mesh.submit", fn, args, [chosen], key, region=False, future=future)
        return future
    try:
        future.set_result(run(self, fn, *args, ranks=[chosen])[0])
    except Exception as error:
        future.set_exception(error)
    return future


@functools.cache
def _callbacks() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "spmd-callbacks")


os.register_at_fork(after_in_child=_callbacks.cache_clear)  # its thread does not exist there


class _Running(Future):
    """A future whose callbacks are called by a thread for all callbacks.

    It gets its result by a thread that holds a lock of the mesh's: a callback that waits there, for a lock of the
    program's for instance, would stop the mesh for good.
    """

    def add_done_callback(self, fn: Callable[[Future], object]) -> None:
        if self.done():  # then it is called at once, by this thread
            super().add_done_callback(fn)
            return

        def start(future: Future) -> None:
            try:
                _callbacks().submit(_call_back, fn, future)
            except RuntimeError:  # the program ends, and starts no thread any more
                _call_back(fn, future)

        super().add_done_callback(start)

    def __reduce__(self) -> NoReturn:
        raise MeshError("a future of mesh.submit cannot be pickled", remedy="pass what it gives, future.result()")


def _call_back(fn: Callable[[Future], object], future: Future) -> None:
    try:
        fn(future)
    except Exception:  # as `concurrent.futures` does
        logging.getLogger("concurrent.futures").exception("exception calling callback for %r", future)


@made_for_its_size
def _send(
    mesh: MeshView, what: str, fn: Callable, args: tuple, ranks: Sequence[int] | None, key: tuple, **handling: Any
) -> Task:
    """Have ranks call a function; for the last arguments see `DriverSession.submit`."""
    layout, chosen = mesh.layout, _checked(mesh, what, ranks)
    make, content = _message(mesh.driver, fn, args)
    make = functools.partial(make, key=key, by_some=handling["region"] and len({*chosen}) < layout.size)
    return mesh.driver.submit(make, content, ranks=chosen, layout=layout, **handling)


def _message(
    driver: DriverSession, fn: Callable[..., Any], args: tuple
) -> tuple[Callable[..., protocol.CallFunction], Callable[[], wire.Packet]]:
    """The message that makes ranks call a function, without its key, and the content."""
    settings, shipped = ambient(), driver.shipped.ship_function(fn)

    def content() -> wire.Packet:
        return content_of(driver, (settings, args), lambda: [(f"argument {at}", arg) for at, arg in enumerate(args)])

    def make(
        number: int, region: int, freed: protocol.Spans, forgotten: tuple[str, ...], **how: Any
    ) -> protocol.CallFunction:  # it keeps `shipped` alive until the message is sent
        return protocol.CallFunction(number, region, freed, forgotten, function=shipped.key, **how)

    return make, content


def _checked(mesh: MeshView, what: str, ranks: Sequence[int] | None) -> list[int]:
    region = current()
    if region is not None and region.session.is_apart:
        problem = "mesh.run and mesh.submit were called by a method of a remote object"
        raise MeshError(problem, remedy="call objects on the other ranks, or the function directly")
    if region is not None:
        raise MeshError(
            "mesh.run and mesh.submit were called inside a region", remedy="call the function directly there"
        )
    return list(range(mesh.size)) if ranks is None else checked_ranks(what, ranks, mesh.size)


@public
def remote(self: MeshView, cls: Callable, *args: Any, rank: int = 0, restore: bool = False, **kwargs: Any) -> Remote:
    """Make an object, `cls(*args, **kwargs)`, on a rank, and wait until it is made (docs/remote.md).

    Args:
        cls: a class, or a function that returns an object.
        rank: on which it lives.
        restore: make it again if its rank dies, with what it has saved: the class has `save()` and `load(state)`.

    Returns:
        its handle, a `Remote`. The object lives as long as this is kept.

    Raises:
        what `cls` raises; MeshError: it can't be sent, or there is no such rank, or no driver; PeerLost: the rank died.
    """
    if not callable(cls):
        raise MeshError("mesh.remote makes objects of a class", got=repr(cls), remedy="pass a class")
    remedy = "write restore=True, or leave it out; an argument of the class: functools.partial(cls, restore=...)"
    rank = checked_rank("mesh.remote", rank, self.size)
    restore = checked_flag("mesh.remote", "restore", restore, remedy)
    label = getattr(cls, "__name__", type(cls).__name__)
    functions = [each for each in vars(cls).values() if inspect.isfunction(each)] if inspect.isclass(cls) else [cls]
    sources: dict[str, list[str]] = {}
    for function in functions:
        sources.update(typed_sources(function))
    if restore and not self.is_driver:
        raise MeshError(
            "restore=True is for objects that the driver makes", remedy="make it there, and pass its handle"
        )
    try:
        return _made(self, rank, (tuple(sys.path), sources, checked(cls), *args), kwargs, label, restore)
    except BaseException as error:
        raise shorten(error) from error.__cause__


def _made(mesh: MeshView, rank: int, args: tuple, kwargs: dict[str, Any], label: str, restore: bool) -> Remote:
    end, deaths = time.monotonic() + REPLACED_SECONDS, 0
    while True:
        node = _node(mesh)
        try:
            return node.caller.make(rank, args, kwargs, label, restore=restore)
        except PeerLost as error:
            deaths += error.rank == rank
            if not restore or error.rank != rank or deaths == ATTEMPTS:
                raise
        except Unreached:  # the rank has died, and will be replaced soon
            if time.monotonic() > end or not mesh.is_driver:
                raise answers.unreachable(rank, label, mesh.describe()) from None
            time.sleep(0.01)


def _node(mesh: MeshView) -> Node:
    """This process's node, once its mesh is ready for calls."""
    if mesh.is_driver:
        mesh.driver.ready()
        return mesh.driver.node
    node = mesh.session.node
    if node is None:
        raise MeshError(
            "mesh.remote needs a driver, and these ranks were started by a launcher",
            where=mesh.describe(),
            remedy="start the program without a launcher; its process then drives the ranks, and objects on them",
        )
    return node
