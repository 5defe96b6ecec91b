"""Checks of the arguments of `Mesh(...)`, and filling in a size of -1."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from ..kernels.arguments import is_number, is_whole, plain_text
from ..kernels.errors import MeshError
from ..kernels.processes import cores
from ..kernels.registry import backends
from ..kernels.shm import arena
from .hosts.host_list import HostList, host_list_of
from .launch.environments import Launch
from .spec import Layout

MOST_RANKS = 1 << 16  # a typing error would take a machine's memory and processes before it ends


def check_arguments(
    backend: str, device: str, threads: int | None, seed: int, timeout: float, on_loss: str, grace: float
) -> tuple[int, float, float]:
    """Refuse arguments that no mesh can have; returns seed, timeout and grace as Python's own numbers."""
    if not isinstance(backend, str) or (backend != "auto" and backend not in backends()):
        raise MeshError(
            "Mesh got an unknown backend", got=repr(backend), expected=f'"auto" or one of {sorted(backends())}'
        )
    if backend == "shm" and arena.supported():
        raise MeshError("backend 'shm' can't be used here", got=arena.supported(), remedy="use 'gloo'")
    if not isinstance(device, str) or device not in ("auto", "cpu", "cuda"):
        raise MeshError(
            "Mesh got an unknown device", got=repr(device), expected='"auto", "cpu" or "cuda"; ranks get one each'
        )
    if (device == "cpu" and backend == "nccl") or (device == "cuda" and backend in ("shm", "gloo", "mpi")):
        side, remedy = (
            ("GPUs", "device='cuda'") if backend == "nccl" else ("CPUs", "backend='auto', which is 'nccl' there")
        )
        raise MeshError(
            f"backend {backend!r} moves tensors of {side} only", got=f"device={device!r}", remedy=f"use {remedy}"
        )
    if threads is not None and (not is_whole(threads) or threads < 1):
        raise MeshError("Mesh got a bad threads", got=repr(threads), expected="at least 1, or None")
    if not is_whole(seed):
        raise MeshError("Mesh got a bad seed", got=repr(seed), expected="a whole number")
    if not is_number(timeout) or not timeout > 0:
        raise MeshError("Mesh got a bad timeout", got=repr(timeout), expected="seconds, more than 0")
    if not isinstance(on_loss, str) or on_loss not in ("rerun", "raise"):
        raise MeshError("Mesh got an unknown on_loss", got=repr(on_loss), expected='"rerun" or "raise"')
    if not is_number(grace) or not grace > 0:
        raise MeshError("Mesh got a bad grace", got=repr(grace), expected="seconds, more than 0, or math.inf")
    return int(seed), float(timeout), float(grace)


def no_mesh(mesh: Any) -> MeshError:
    """The error for a `mesh=` that is no mesh."""
    remedy = 'write mesh=Mesh({"data": 2}), or leave it out'
    return MeshError("this is no mesh", got=f"mesh={mesh!r}", expected="a Mesh", remedy=remedy)


def hosts_of(hosts: Any, copies: Any, launch: Launch | None, backend: str, device: str) -> HostList | None:
    """The hosts that `Mesh(hosts=)` means; refuses what does not work over several hosts, and impossible copies."""
    if not is_whole(copies) or copies < 0:
        raise MeshError("Mesh got a bad copies", got=repr(copies), expected="a whole number, at least 0")
    if copies and launch is not None:
        problem = "Mesh got copies, and this process is a rank that a launcher started: its values end with it"
        remedy = "leave copies out, and save from time to time; or start the program without a launcher, with hosts="
        raise MeshError(problem, got=f"copies={copies}, {launch.source}", remedy=remedy)
    if copies and device == "cuda":
        remedy = "leave copies out, and save from time to time"
        raise MeshError("values on GPUs have no copies", got=f"copies={copies}", remedy=remedy)
    if hosts is None:
        return None
    if launch is not None:
        problem = "Mesh got hosts, and this process is a rank that a launcher started"
        raise MeshError(problem, got=launch.source, remedy="leave hosts out, or start the program without it")
    if device == "cuda":
        raise MeshError("Mesh(hosts=) has ranks on CPUs only", got="device='cuda'", remedy="use a launcher")
    if backend not in ("auto", "hierarchical", "gloo"):
        raise MeshError(f"backend {backend!r} can't be used with hosts", expected="'auto', 'hierarchical' or 'gloo'")
    if arena.supported():
        raise MeshError("Mesh(hosts=) can't be used here", got=arena.supported(), remedy="use a launcher")
    host_list = host_list_of(hosts)
    if copies >= len(host_list.names) > 1:
        expected = f"less than the hosts, which are {len(host_list.names)}"
        raise MeshError("Mesh got too many copies", got=copies, expected=expected)
    return host_list


def threads_of(threads: int | None, size: int, host_list: HostList | None) -> int:
    """The threads of each rank; 0 if each host shares its cores among its own ranks."""
    if host_list is not None and not host_list.local:
        return int(threads or 0)
    return int(threads) if threads else max(1, cores() // size)


def check_same(layout: Layout, mine: Layout, described: str) -> None:
    """Check a mesh that is made on a rank, by importing a module, say: it must be the one this rank belongs to."""
    if layout != mine:
        raise MeshError(
            "a rank made a Mesh, most likely by importing a module that makes one",
            got=f"axes {layout.axes}",
            expected=f"those of {described}, of which this process is a rank",
            remedy="make meshes in the program's main script, or in a function that only it calls",
        )


def layout_of(
    axes: dict[str, int],
    launch: Launch | None,
    gpus: Callable[[int], int | None] = lambda known: None,
    host_list: HostList | None = None,
) -> Layout:
    """The axes with -1 filled in; refuses axes that do not fit the launched job.

    Args:
        host_list: how many ranks each host has, if `Mesh(hosts=)` says so.
        gpus: takes the product of the known sizes, and gives how many GPUs a driver's ranks can have; None for CPUs.
    """
    _check_axes(axes)
    axes = {plain_text(name): int(size) for name, size in axes.items()}  # Python's own, also of NumPy's and of enums
    free = [name for name, size in axes.items() if size == -1]
    known = math.prod(size for size in axes.values() if size != -1)
    if launch is not None:
        total, origin = launch.size, f"this job has {launch.size} ranks (from {launch.source}'s variables)"
    elif host_list is not None:
        total, origin = host_list.size, f"the hosts have {host_list.size} ranks"
    elif asked := os.environ.get("SPMD_RANKS"):
        if not asked.isdecimal() or not int(asked):
            raise MeshError("SPMD_RANKS is not a number of ranks", got=repr(asked), expected="1 or more")
        total, origin = int(asked), f"SPMD_RANKS is {asked}"
    else:
        usable = cores()
        found = gpus(known) if free else None
        total = max(known, usable) if found is None else found
        total -= total % known
        origin = f"this process can use {usable} cores" if found is None else f"there are {found} GPUs"
    if free:
        if total % known:
            raise MeshError(
                f"axis {free[0]!r} cannot be filled in",
                got=f"{axes}, and {origin}",
                remedy="make the sizes divide it",
            )
        axes = {**axes, free[0]: total // known}
    elif (launch is not None or host_list is not None) and known != total:
        raise MeshError(
            "the mesh does not fit the job" if host_list is None else "the mesh does not fit its hosts",
            got=f"{axes}, {known} ranks, but {origin}",
            remedy="start as many ranks as the mesh has, or give one axis the size -1",
        )
    check_count(math.prod(axes.values()))
    return Layout(tuple(axes.items()))


def check_count(ranks: int, where: str = "") -> None:
    """Refuse more ranks than any mesh has."""
    if ranks > MOST_RANKS:
        raise MeshError(
            "a mesh can't have so many ranks", got=str(ranks), expected=f"at most {MOST_RANKS}", where=where
        )


def _check_axes(axes: dict[str, int]) -> None:
    if not isinstance(axes, dict):
        raise MeshError("Mesh got bad axes", got=repr(axes), expected='a dict, such as {"data": 4}')
    if not axes:
        raise MeshError("Mesh got no axes", remedy='name at least one, such as {"data": -1}')
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise MeshError("Mesh got a bad axis name", got=repr(name), expected="a non-empty string")
        if not is_whole(size) or (size < 1 and size != -1):
            raise MeshError(f"axis {name!r} got a bad size", got=repr(size), expected="a positive integer or -1")
    if list(axes.values()).count(-1) > 1:
        raise MeshError("only one axis may have size -1", got=repr(axes), remedy="give the others a size")
