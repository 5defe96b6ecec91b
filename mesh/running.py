"""`Mesh.run` and `Mesh.submit`: a function called on ranks as it is, whose result comes back whole."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..kernels.arguments import check_function, checked_ranks
from ..kernels.callsite import shows_only_users
from ..kernels.errors import MeshError, message
from . import protocol, wire
from .ambient import Ambient, ambient, under
from .counting.counted import note_mesh
from .driver.mesh_view import MeshView
from .driver.session import DriverSession
from .launch import launched
from .region import Region, current, generators, inside, reseed, restore_generators


def device_mesh(mesh: MeshView) -> Any:
    """torch's `DeviceMesh` of the mesh's ranks, with the same names, over process groups of "spmd"; inside a rank."""
    # By name: torch's process groups stand above this file.
    return importlib.import_module("spmd.torch_distributed.device_mesh").of_mesh(mesh)


@shows_only_users
def reload(self: MeshView, *modules: Any) -> list[str]:
    """Load modules again that were edited on disk, in the driver and on the ranks; values on the mesh stay.

    Meant are the program's own modules, not installed packages: those whose file has changed since a function was
    first sent that could use them, those that import one of these, and the ones that are named. The modules'
    functions get their new code wherever they are used; names that the main program has imported are bound anew;
    objects of a class stay objects of the old one.

    Args:
        modules: to load again in any case, modules or names.

    Returns:
        The names of the modules that were loaded again.

    Raises:
        MeshError: called on a rank. Whatever a module raises while it is loaded.
    """
    self.check_driver("reload", "importlib.reload is for launched programs, whose ranks run the whole script")
    driver, names = self.driver, [one if isinstance(one, str) else one.__name__ for one in modules]
    driver.ready()
    done = driver.shipped.modules.reload(names)
    make = functools.partial(protocol.ReloadModules, names=(*names, *done))
    lists = driver.wait(driver.submit(make, region=True, reported=True)).values()
    with driver.lock:
        driver.shipped.read_anew()
        driver.calls.clear()
    return list(dict.fromkeys([*done, *(name for names in lists for name in names)]))


def run(mesh: MeshView, fn: Callable[..., Any], args: tuple, ranks: Sequence[int] | None) -> list[Any]:
    """Call `fn(*args)` on ranks: the results in rank order."""
    check_function("mesh.run", fn, "mesh.run(function, *args)")
    layout = mesh.layout
    chosen = _checked(mesh, ranks)
    key = (mesh.seed, "run", mesh.run_state.next_run())
    note_mesh(mesh)
    if mesh.is_driver:
        if not chosen:
            return []
        make, content = _message(mesh.driver, fn, args)
        about: dict[str, Any] = {"ranks": chosen, "region": True, "layout": layout, "reported": True}
        return mesh.driver.wait(mesh.driver.submit(functools.partial(make, key=key), content, **about)).values()
    rank, settings = mesh.session.rank, ambient()

    def here() -> tuple[Any, list[bytes]]:
        result = _call_here(mesh, fn, args, key, settings) if rank in chosen else None
        mine = wire.to_bytes(result, lambda obj: ("mesh",) if isinstance(obj, type(mesh)) else None)
        return result, mesh.session.comm().all_gather_bytes(mine)

    result, everyone = launched.call(mesh.session, here)
    return [result if peer == rank else wire.from_bytes(everyone[peer], lambda name: mesh) for peer in chosen]


def submit(mesh: MeshView, fn: Callable[..., Any], args: tuple, rank: int) -> Future:
    """Start `fn(*args)` on one rank."""
    check_function("mesh.submit", fn, "mesh.submit(function, *args, rank=0)")
    layout = mesh.layout
    (chosen,) = _checked(mesh, [rank])
    future: Future = Future()
    future.set_running_or_notify_cancel()
    if mesh.is_driver:
        make, content = _message(mesh.driver, fn, args)
        key = (mesh.seed, "run", mesh.run_state.next_run())
        mesh.driver.submit(functools.partial(make, key=key), content, ranks=[chosen], future=future, layout=layout)
        return future
    try:
        future.set_result(run(mesh, fn, args, [chosen])[0])
    except Exception as error:
        future.set_exception(error)
    return future


def _message(
    driver: DriverSession, fn: Callable[..., Any], args: tuple
) -> tuple[Callable[..., protocol.CallFunction], Callable[[], wire.Packet]]:
    """The message that has ranks call a function, but for its key, and the content."""
    settings, shipped = ambient(), driver.shipped.ship_function(fn)

    def content() -> wire.Packet:
        return driver.content((settings, args), lambda: [(f"argument {at}", arg) for at, arg in enumerate(args)])

    return functools.partial(protocol.CallFunction, function=shipped.key), content


def _call_here(mesh: MeshView, fn: Callable[..., Any], args: tuple, key: tuple, settings: Ambient | None) -> Any:
    state = generators()
    region = Region(mesh.session, key, mesh)
    reseed(region, mesh.session.rank)
    try:
        with inside(region), under(settings):
            return fn(*args)
    finally:
        restore_generators(state)


def _checked(mesh: MeshView, ranks: Sequence[int] | None) -> list[int]:
    if current() is not None:
        raise MeshError(
            message("mesh.run and mesh.submit were called inside a region", remedy="call the function directly there")
        )
    return list(range(mesh.size)) if ranks is None else checked_ranks(ranks, mesh.size)
