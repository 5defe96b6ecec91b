"""Several "hosts" on one machine: network namespaces, each with an address of its own, joined by a bridge.

Needs root and iproute2. A program in a node has its own interfaces (`eth0`, ..., and a `/sys/class/net` that shows only
them), so bytes on the wire can be counted, and the wire can be cut. Memory, files and the host name are shared: only
the network namespace tells the nodes apart. Invariant: at the end nothing is left, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PREFIX = "spmd"


def ip(*arguments: str) -> str:
    """Run iproute2's `ip`; its output, or a RuntimeError with what it said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def unavailable() -> str | None:
    """Why nodes can't be made here, or None."""
    try:
        with nodes(1):
            return None
    except (OSError, RuntimeError) as error:
        return f"network namespaces can't be made here: {error}"


class Node:
    """One of them: `start` runs a program in it."""

    def __init__(self, name: str, address: str, switch: str, ports: list[str]):
        self.name, self.address, self._switch, self._ports = name, address, switch, ports

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen:
        """As subprocess.Popen; the process is the program itself."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)  # type: ignore[call-overload]

    def cut(self) -> None:
        """Take the node's links down at the far end, like a pulled cable; processes go on, but receive nothing."""
        for port in self._ports:
            ip("-n", self._switch, "link", "set", port, "down")

    def deafen(self, other: Node) -> None:
        """Lose what this node sends to another on the way, while it still receives from that one."""
        nobody = "02:00:00:00:00:99"
        ip("-n", self.name, "neighbor", "replace", other.address, "lladdr", nobody, "dev", "eth0", "nud", "permanent")

    def limit(self, rate: str) -> None:
        """Limit the rate at which the node sends, to "1gbit", say."""
        shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        subprocess.run(
            ["tc", "-n", self.name, "qdisc", "add", "dev", "eth0", "root", *shape], check=True, capture_output=True
        )


@contextlib.contextmanager
def nodes(count: int, networks: int = 1) -> Iterator[list[Node]]:
    """So many nodes, 10.77.0.1 and on, and with a second network (`eth1`) 10.78.0.1 and on; gone afterwards."""
    _remove_stale()
    switch, made = f"{_PREFIX}-{os.getpid()}-switch", []
    try:
        ip("netns", "add", switch)
        for network in range(networks):
            ip("-n", switch, "link", "add", f"bridge{network}", "type", "bridge")
            ip("-n", switch, "link", "set", f"bridge{network}", "up")
        for index in range(count):
            name, ports = f"{_PREFIX}-{os.getpid()}-{index}", [f"port{index}-{network}" for network in range(networks)]
            ip("netns", "add", name)
            made.append(Node(name, f"10.77.0.{index + 1}", switch, ports))
            ip("-n", name, "link", "set", "lo", "up")
            for network, port in enumerate(ports):
                card = f"eth{network}"
                ip("-n", name, "link", "add", card, "type", "veth", "peer", "name", port, "netns", switch)
                ip("-n", name, "address", "add", f"10.{77 + network}.0.{index + 1}/24", "dev", card)
                ip("-n", name, "link", "set", card, "up")
                ip("-n", switch, "link", "set", port, "master", f"bridge{network}", "up")
        yield made
    finally:
        for name in (*(node.name for node in made), switch):
            with contextlib.suppress(RuntimeError):
                ip("netns", "delete", name)


def _remove_stale() -> None:
    """Namespaces of runs that were killed before they could tidy up."""
    for line in ip("netns", "list").splitlines():
        prefix, _, rest = line.split()[0].partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(RuntimeError):  # another process may do the same
                ip("netns", "delete", line.split()[0])


def sent_bytes(interface: str = "eth0") -> int:
    """What this node's interface has sent so far; called in a process of the node."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def on_nodes(
    places: Sequence[Node], per_node: int, arguments: Sequence[str], *, environ: dict[str, str] | None = None
) -> list[subprocess.Popen]:
    """Start Python with these arguments as so many ranks on each node, by SPMD_* variables; output is piped."""
    bare = {name: text for name, text in os.environ.items() if not name.startswith("SPMD_")}
    started = []
    for rank in range(per_node * len(places)):
        own = {
            "SPMD_RANK": str(rank),
            "SPMD_SIZE": str(per_node * len(places)),
            "SPMD_LOCAL_RANK": str(rank % per_node),
            "SPMD_LOCAL_SIZE": str(per_node),
            "SPMD_INIT_METHOD": f"tcp://{places[0].address}:29511",
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            places[rank // per_node].start(
                [sys.executable, *arguments],
                env={**bare, **own, **(environ or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started
