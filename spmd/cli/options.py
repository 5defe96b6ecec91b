"""Values of torchrun's options that its launcher would refuse with a traceback, and without the option's name."""

from __future__ import annotations

import argparse
import re

import torch

from ..mesh.launch.arguments import MOST_RANKS

_STREAMS = r"[0-3]|(\d:[0-3],)*\d:[0-3]"
_STREAMS_WORDS = "0 to 3, or such a number for some local ranks, as in 0:3,1:1"


def problem_of(options: argparse.Namespace) -> str | None:
    """What is wrong with one of the options, by its name; None if nothing is."""
    ranks = f"a number from 1 to {MOST_RANKS}, cpu, auto, or gpu if torch finds one"
    for name, expected, is_good in (
        ("nnodes", "a number of hosts, at least 1, or MIN:MAX", _is_hosts(options.nnodes)),
        ("nproc_per_node", ranks, _is_ranks(options.nproc_per_node)),
        ("max_restarts", "a number, at least 0", options.max_restarts >= 0),
        ("master_port", "a port, 0 to 65535", _is_port(str(options.master_port or 0))),
        ("rdzv_endpoint", "HOST:PORT, with a port of 0 to 65535", _is_endpoint(options.rdzv_endpoint)),
        ("rdzv_conf", "KEY=VALUE, with commas between several", _is_conf(options.rdzv_conf)),
        ("tee", _STREAMS_WORDS, re.fullmatch(_STREAMS, options.tee)),
        ("redirects", _STREAMS_WORDS, re.fullmatch(_STREAMS, options.redirects)),
    ):
        if not is_good:
            return f"argument --{name.replace('_', '-')}: expected {expected}, got {str(getattr(options, name))!r}"
    return None


def _is_hosts(text: str) -> bool:
    numbers = [int(part) for part in text.split(":") if part.isdecimal()]
    return len(numbers) == text.count(":") + 1 <= 2 and 0 < numbers[0] <= numbers[-1]


def _is_ranks(text: str) -> bool:
    if text.isdecimal():
        return 0 < int(text) <= MOST_RANKS
    if text in ("cpu", "auto"):
        return True
    try:
        return bool(torch.get_device_module("cuda" if text == "gpu" else text).is_available())
    except RuntimeError:
        return False


def _is_port(text: str) -> bool:
    return text.isdecimal() and int(text) < 1 << 16


def _is_endpoint(text: str) -> bool:
    _, colon, port = text.rpartition(":")
    return not colon or text.endswith("]") or _is_port(port)  # an address of version 6 ends so, without a port


def _is_conf(text: str) -> bool:
    return not text or all(re.fullmatch(r"\s*[^=\s][^=]*=\s*\S.*", part) for part in text.split(","))
