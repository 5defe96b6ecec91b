"""The driver waits for the processes that were started on its hosts: each proves who it is, and versions are compared.

Invariant: nothing of the program is sent before all hosts have come with what this process runs.
"""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import subprocess
import threading
import time
from typing import Any

from ...kernels.errors import MeshError, message
from ...kernels.network.interface import address_of, chosen, towards
from .coded import NotOfThisMesh
from .link import Link, greet_host, listener
from .places import Places
from .protocol import Hello
from .versions import versions

START_SECONDS = 120.0  # for all hosts to come: importing torch from a slow disk takes its time
_STRANGERS = 32  # connections at once that have not proved anything
_LOOK_SECONDS = 0.1


class Meeting:
    """Hosts that were started, and are waited for.

    Args:
        places: the hosts.
        secret: of the mesh.
        seconds: for all of them to come.
    """

    def __init__(self, places: Places, secret: bytes, seconds: float = START_SECONDS):
        self._places, self._secret, self._seconds = places, secret, seconds
        self.address = _address(places)
        self._listener = listener(self.address)
        self._came = threading.Condition()
        self._links: dict[int, Link] = {}
        self._strangers: collections.deque[socket.socket] = collections.deque()
        self._closed = False
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Have the processes started, and listen for them."""
        threading.Thread(target=self._accept, name="spmd-meeting", daemon=True).start()
        for place, name in enumerate(self._places.names):
            told = {"address": self.address, "port": self._listener.getsockname()[1], "place": place}
            stdin = json.dumps(told | {"secret": self._secret.hex()}).encode() + b"\n"
            try:
                self._handles.append(self._places.launcher.start(name, self._places.command(), stdin))
            except OSError as error:
                remedy = "see that its launcher can be run"
                raise MeshError(message(f"host {name} can't be reached", got=str(error), remedy=remedy)) from None

    def for_store(self) -> socket.socket:
        """A socket that listens where the hosts reach this process, for the store in which the ranks meet."""
        return listener(self.address)

    def hosts(self) -> list[tuple[str, Link, Any]]:
        """Each host's name, the link to it, and the launcher's handle, once all have come: the caller's from then on.

        Raises:
            MeshError: a host does not come, or runs other versions.
        """
        end, names = time.monotonic() + self._seconds, self._places.names
        with self._came:
            while len(self._links) < len(names):
                missing = [place for place in range(len(names)) if place not in self._links]
                ended = [place for place in missing if self._has_ended(place)]
                if ended or time.monotonic() > end:
                    why = "what was started there has ended" if ended else f"nothing from there in {self._seconds:g} s"
                    raise _did_not_come([names[place] for place in ended or missing], why, self.address)
                self._came.wait(_LOOK_SECONDS)
        for place, name in enumerate(names):
            self._compare(name, self._links[place])
        found = [(name, self._links[place], self._handles[place]) for place, name in enumerate(names)]
        self._links.clear()
        self._handles.clear()
        return found

    def _has_ended(self, place: int) -> bool:
        handle = self._handles[place]
        return isinstance(handle, subprocess.Popen) and handle.poll() is not None

    def _compare(self, name: str, link: Link) -> None:
        found: Any = []
        with contextlib.suppress(NotOfThisMesh):
            while found == []:
                found = link.receive()
        if not found or not isinstance(found[0][0], Hello):
            raise MeshError(message(f"host {name} has ended as it began", remedy="its error output says why"))
        theirs, mine = found[0][0].versions, versions()
        for what in mine:
            if theirs.get(what) != mine[what]:
                raise MeshError(
                    message(
                        f"host {name} runs another {what} than this program",
                        got=f"{what} {theirs.get(what)} there, {mine[what]} here",
                        remedy="install the same on all hosts",
                    )
                )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._came:
                if self._closed:
                    connection.close()
                    continue
                self._strangers.append(connection)
                if len(self._strangers) > _STRANGERS:  # the oldest makes room; its thread closes it
                    with contextlib.suppress(OSError):
                        self._strangers.popleft().shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._greet, args=(connection,), name="spmd-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            place, link = greet_host(connection, self._secret)
        except (OSError, NotOfThisMesh):
            connection.close()
            return
        finally:
            with self._came, contextlib.suppress(ValueError):
                self._strangers.remove(connection)
        with self._came:
            if self._closed or place in self._links or place >= len(self._places.names):
                link.close()
                return
            self._links[place] = link
            self._came.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def stop(self) -> None:
        """End the links that there are, and see to it that what was started has ended."""
        with self._came:
            for link in self._links.values():
                link.close()
        for handle in self._handles:
            self._places.launcher.stop(handle)
        self._handles.clear()


def _address(places: Places) -> str:
    """Where the hosts reach this process: as the user says, or as it reaches them."""
    if places.local:
        return "127.0.0.1"
    if (given := chosen()) is not None:
        return address_of(given)
    names = (name.rpartition("@")[2] for name in places.names)
    found = next((address for name in names if (address := towards(name)) is not None), None)
    if found is None:
        raise MeshError(
            message(
                "it is not known where the hosts reach this process",
                got=f"hosts {list(places.names)}, none of which leads to an address of this machine",
                remedy="set SPMD_INTERFACE to the network interface, or the address, that they reach",
            )
        )
    return found


def _did_not_come(names: list[str], why: str, address: str) -> MeshError:
    remedy = f"its error output says why; spmd and torch must be there, at this Python's path, and reach {address}"
    return MeshError(message(f"{', '.join(names)} did not come", got=why, where="Mesh(hosts=)", remedy=remedy))
