"""Values of torchrun's options that its launcher would refuse with a traceback, and without the option's name.

Torch's own functions read the values here, so that what it takes is never refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from ..mesh.arguments import MOST_RANKS
from .one_host import BACKEND

_STREAMS = "0 to 3, or such a number for some local ranks, as in 0:3,1:1"


def problem_of(options: argparse.Namespace) -> str | None:
    """What is wrong with one of the options, by its name; None if nothing is."""
    ranks = f"a number from 1 to {MOST_RANKS}, cpu, auto, or gpu if torch finds one"
    endpoint = "HOST:PORT, with a port of 0 to 65535"
    checks: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("nnodes", "a number of hosts, at least 1, or MIN:MAX", _is_hosts),
        ("nproc_per_node", ranks, lambda text: 0 < determine_local_world_size(text) <= MOST_RANKS),
        ("max_restarts", "a number, at least 0", lambda number: number >= 0),
        ("rdzv_conf", "KEY=VALUE, with commas between several", _is_conf),
        ("tee", _STREAMS, lambda text: Std.from_str(text) is not None),
        ("redirects", _STREAMS, lambda text: Std.from_str(text) is not None),
    ]
    # Torch leaves these alone if nobody meets there, and a backend of others may read them in its own way.
    if not options.standalone and options.rdzv_backend == "static":
        if options.rdzv_endpoint:
            checks.append(("rdzv_endpoint", endpoint, lambda text: parse_rendezvous_endpoint(text, -1)[1] >= 0))
        else:
            checks.append(("master_port", "a port, 0 to 65535", lambda port: port is None or 0 <= port < 1 << 16))
    elif not options.standalone and options.rdzv_backend in ("c10d", "etcd", "etcd-v2"):
        checks.append(("rdzv_endpoint", f"{endpoint}, or HOST", lambda text: parse_rendezvous_endpoint(text, 0)))
    for name, expected, is_good in checks:
        value = getattr(options, name)
        try:
            good = is_good(value)
        except (ValueError, RuntimeError):  # what torch raises
            good = False
        if not good:
            return f"argument --{name.replace('_', '-')}: expected {expected}, got {str(value)!r}"
    return None


def unknown_plugin(options: argparse.Namespace) -> str | None:
    """Which option names what nobody has installed, after torch's launcher has refused that; None if none does."""
    backends = {"c10d", "etcd", "etcd-v2", "static", *_installed("torchrun.handlers")}
    if options.rdzv_backend not in (*backends, BACKEND):
        expected = f"one of {', '.join(sorted(backends))}"
        return f"argument --rdzv-backend: expected {expected}, got {options.rdzv_backend!r}"
    logs = _installed("torchrun.logs_specs")
    if options.logs_specs is not None and options.logs_specs not in logs:
        expected = f"one of {', '.join(sorted(logs))}" if logs else "none, as no package with one is installed"
        return f"argument --logs-specs: expected {expected}, got {options.logs_specs!r}"
    return None


def _installed(group: str) -> set[str]:
    return {found.name for found in importlib.metadata.entry_points(group=group)}


def _is_hosts(text: str) -> bool:
    least, most = parse_min_max_nnodes(text)
    return 0 < least <= most


def _is_conf(text: str) -> bool:
    parts = [part.partition("=") for part in text.split(",")] if text.strip() else []
    return all(key.strip() and value.strip() for key, _, value in parts)
