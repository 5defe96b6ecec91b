"""Ports for processes that are told beforehand where to meet."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_PORTS = range(20_000, 29_000)
_given: set[int] = set()


def free_port() -> int:
    """A free loopback port, which nobody else gets by chance before it is used.

    A process that asks the system for any port, as every outgoing connection does, gets one of another range by
    default.
    """
    by_chance = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().choice(_PORTS) if _PORTS.stop <= by_chance else 0))
            port: int = probe.getsockname()[1]
            if port not in _given:
                _given.add(port)
                return port
