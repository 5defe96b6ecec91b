"""The thread that reads the links to all hosts of a mesh. Invariant: it waits for none of them, nor for others."""

from __future__ import annotations

import os
import selectors
import threading

from .rank_host import RankHost


class Reading(threading.Thread):
    """Reads from the first host that is added on, until it is closed."""

    def __init__(self) -> None:
        super().__init__(name="spmd-hosts", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._read_end, self._bell = os.pipe()
        self._selector.register(self._read_end, selectors.EVENT_READ)
        self._closed = False
        self.start()

    def add(self, host: RankHost) -> None:
        """Read a host's link; from now on that is closed by this thread."""
        self._selector.register(host.link.connection, selectors.EVENT_READ, host)

    def run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is not None and not key.data.read():
                    self._selector.unregister(key.fileobj)
                    key.data.end()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.end()
        self._selector.close()
        os.close(self._read_end)
        os.close(self._bell)

    def close(self) -> None:
        """End the links, and the thread."""
        if self._closed:
            return
        self._closed = True
        os.write(self._bell, b"!")
        self.join(1.0)
