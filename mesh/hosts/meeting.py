"""The driver waits for the processes that were started on its hosts: each proves who it is, and versions are compared.

Invariant: nothing of the program is sent before all hosts have come, with the same versions as this process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ...kernels.errors import MeshError
from ...kernels.network.interface import address_of, chosen, loopback, towards
from .coded import NotOfThisMesh
from .host_list import HostList
from .launchers import dialled_address
from .link import GREETING_SECONDS, Link, greet_host
from .protocol import Hello, versions
from .serving import STRANGERS, Serving

DIAL_SECONDS = 30.0  # for a dialled host to begin listening
_LOOK_SECONDS = 0.1


class Meeting:
    """Hosts that were started, and for which the driver waits.

    Args:
        host_list: the hosts.
        secret: of the mesh.
        seconds: for all of them to come.
        check_wanted: raises an error once they are no longer wanted.
    """

    def __init__(self, host_list: HostList, secret: bytes, seconds: float, check_wanted: Callable[[], None]):
        self._host_list, self._secret, self._seconds = host_list, secret, seconds
        self._check_wanted = check_wanted
        self.address = _address(host_list)
        self._serving: Serving | None = None
        self._came = threading.Condition()
        self._links: dict[int, Link] = {}
        self._closed = False
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Start the processes, and listen for them."""
        most = max(STRANGERS, 2 * len(self._host_list.names))  # all hosts may come at once
        self._serving = Serving(self.address, self._secret, "spmd-meeting", welcome=self._keep, most_strangers=most)
        for index, name in enumerate(self._host_list.names):
            config = {"address": self.address, "port": self._serving.port, "index": index}
            stdin = json.dumps(config | {"secret": self._secret.hex()}).encode() + b"\n"
            try:
                self._handles.append(self._host_list.launcher.start(name, self._host_list.command(), stdin))
            except OSError as error:
                remedy = "see that its launcher can be run"
                raise MeshError(f"host {name} can't be reached", got=str(error), remedy=remedy) from None

    def hosts(self) -> list[tuple[str, Link, Any]]:
        """Wait for all hosts; returns each one's name, link and launcher's handle (see `hand_over`).

        Raises:
            MeshError: a host does not come, or runs other versions.
        """
        end, names = time.monotonic() + self._seconds, self._host_list.names
        with self._came:
            while len(self._links) < len(names):
                if self._came.wait(_LOOK_SECONDS):
                    continue  # one has come; check for missing ones only when none comes
                self._check_wanted()
                missing = [index for index in range(len(names)) if index not in self._links]
                ended = {index: why for index in missing if (why := self._why_ended(index)) is not None}
                if ended or time.monotonic() > end:
                    why = next(iter(ended.values()), f"nothing from there in {self._seconds:g} s")
                    raise self._did_not_come([names[index] for index in ended or missing], why)
        mine = versions()
        for index, name in enumerate(names):
            self._compare(name, self._links[index], mine)
        kinds = {self._links[index].connection.family: name for index, name in enumerate(names)}
        if len(kinds) > 1:  # Gloo can't connect their ranks
            raise MeshError(
                "some hosts are reached by IPv4 and others by IPv6",
                got=" and ".join(kinds.values()),
                where="Mesh(hosts=)",
                remedy="name them all by addresses of one kind",
            )
        return [(name, self._links[index], self._handles[index]) for index, name in enumerate(names)]

    def hand_over(self) -> None:
        """Leave the links, and what was started, to the caller."""
        self._links.clear()
        self._handles.clear()

    def _why_ended(self, index: int) -> str | None:
        poll = getattr(self._handles[index], "poll", None)  # of a `subprocess.Popen`, or of what is like one
        return "what was started there has ended" if callable(poll) and poll() is not None else None

    def _did_not_come(self, names: list[str], why: str) -> MeshError:
        remedy = (
            f"its error output says why; spmd and torch must be there, at this Python's path, and reach {self.address}"
        )
        return MeshError(f"{', '.join(names)} did not come", got=why, where="Mesh(hosts=)", remedy=remedy)

    def _compare(self, name: str, link: Link, mine: dict[str, str]) -> None:
        found: Any = []
        link.connection.settimeout(GREETING_SECONDS)
        with contextlib.suppress(NotOfThisMesh):
            while found == []:
                found = link.receive()
        link.connection.settimeout(None)
        if not found or not isinstance(found[0][0], Hello):
            problem = f"host {name} has ended as it began, or has stopped"
            raise MeshError(problem, remedy="its error output says why")
        theirs = found[0][0].versions
        for what in mine:
            if theirs.get(what) != mine[what]:
                raise MeshError(
                    f"host {name} runs another {what} than this program",
                    got=f"{what} {theirs.get(what)} there, {mine[what]} here",
                    remedy="install the same on all hosts",
                )

    def _keep(self, index: int, link: Link) -> None:
        with self._came:
            if self._closed or index in self._links or index >= len(self._host_list.names):
                link.close()
                return
            self._links[index] = link
            self._came.notify_all()

    def close(self) -> None:
        """Accept no more hosts."""
        self._closed = True
        if self._serving is not None:
            self._serving.close()

    def stop(self) -> None:
        """End the links, and make sure that what was started has ended."""
        with self._came:
            for link in self._links.values():
                link.close()
        for handle in self._handles:
            self._host_list.launcher.stop(handle)
        self._handles.clear()


class Dialling(Meeting):
    """Hosts that listen, and that the driver dials."""

    def begin(self) -> None:
        self._failed: dict[int, str] = {}
        for index, name in enumerate(self._host_list.names):
            self._handles.append(self._host_list.launcher.start(name, (), b""))
            threading.Thread(target=self._dial, args=(index, name), name="spmd-dialling", daemon=True).start()

    def _dial(self, index: int, name: str) -> None:
        end, address = time.monotonic() + min(self._seconds, DIAL_SECONDS), dialled_address(name.removeprefix("tcp://"))
        assert address is not None
        while not self._closed:
            try:
                connection = socket.create_connection(address, timeout=GREETING_SECONDS)
            except OSError as error:
                if time.monotonic() > end:
                    self._fail(index, str(error))
                    return
                time.sleep(_LOOK_SECONDS)
                continue
            try:
                _, link = greet_host(connection, self._secret)
            except (OSError, NotOfThisMesh) as error:
                connection.close()
                self._fail(index, f"{error}: it may have another secret")
                return
            self._keep(index, link)
            return

    def _fail(self, index: int, why: str) -> None:
        with self._came:
            self._failed[index] = why
            self._came.notify_all()

    def _why_ended(self, index: int) -> str | None:
        return self._failed.get(index)

    def _did_not_come(self, names: list[str], why: str) -> MeshError:
        remedy = "start `spmd host --listen ADDRESS:PORT` there, with the SPMD_SECRET of this program"
        problem = f"{', '.join(names)} can't be dialled"
        return MeshError(problem, got=why, where="Mesh(hosts=)", remedy=remedy)


def _address(host_list: HostList) -> str:
    """The address where the hosts reach this process: the user's choice, or the one that leads to a host."""
    if host_list.local or host_list.dialled:
        return loopback()
    if (given := chosen()) is not None:
        return address_of(given)
    names = (name.rpartition("@")[2] for name in host_list.names)
    found = next((address for name in names if (address := towards(name)) is not None), None)
    if found is None:
        raise MeshError(
            "it is not known where the hosts reach this process",
            got=f"hosts {list(host_list.names)}, none of which leads to an address of this machine",
            remedy="set SPMD_INTERFACE to the network interface, or the address, that they reach",
        )
    return found
