"""`Mesh.remote`: an object is made on a rank, by the driver or by another rank."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

from ...kernels.arguments import checked_rank
from ...kernels.errors import MeshError, PeerLost, message
from ..display.notebook import shorten
from ..driver.mesh_view import MeshView
from ..driver.snapshot import typed_sources
from . import answers
from .handle import Remote
from .node import Node

REPLACED_SECONDS = 10.0  # in which a rank that has died is to be replaced


def make_remote(mesh: MeshView, cls: Callable, args: tuple, kwargs: dict[str, Any], rank: int, restore: bool) -> Remote:
    """See `Mesh.remote`."""
    if not callable(cls):
        raise MeshError(message("mesh.remote makes objects of a class", got=repr(cls), remedy="pass a class"))
    rank = checked_rank(rank, mesh.size)
    label = getattr(cls, "__name__", type(cls).__name__)
    functions = [each for each in vars(cls).values() if inspect.isfunction(each)] if inspect.isclass(cls) else [cls]
    sources: dict[str, list[str]] = {}
    for function in functions:
        sources.update(typed_sources(function))
    if restore and not mesh.is_driver:
        raise MeshError(
            message("restore=True is for objects that the driver makes", remedy="make it there, and pass its handle")
        )
    try:
        return _made(mesh, rank, (tuple(sys.path), sources, cls, *args), kwargs, label, restore)
    except BaseException as error:
        raise shorten(error) from error.__cause__


def _made(mesh: MeshView, rank: int, args: tuple, kwargs: dict[str, Any], label: str, restore: bool) -> Remote:
    end = time.monotonic() + REPLACED_SECONDS
    while True:
        node = _node(mesh)
        try:
            return node.caller.make(rank, args, kwargs, label, restore=restore)
        except PeerLost:
            raise
        except OSError:  # the rank has died, and is about to be replaced
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
            message(
                "mesh.remote needs a driver, and these ranks were started by a launcher",
                where=mesh.describe(),
                remedy="start the program without a launcher; its process then drives the ranks, and objects on them",
            )
        )
    return node
