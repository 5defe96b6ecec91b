"""Notebook kernels as a front end drives them: cells run one by one, and tests look at what each shows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import queue
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fork_server import Program, shared_server
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner
from patience import HANGS


@dataclasses.dataclass
class Cell:
    """The outcome of a cell: the texts of its streams, when each piece came, results and widgets, its error's text.

    `updates` came while it ran, to anything shown here or before.
    """

    status: str = ""
    seconds: float = 0.0
    pieces: list[tuple[float, str, str]] = dataclasses.field(default_factory=list)  # (second, stream, text)
    data: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    updates: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    comms: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str = ""

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for _, name, text in self.pieces if name == stream)

    @property
    def result(self) -> str:
        """The text of the last thing that it showed."""
        return self.data[-1]["text/plain"]


# As in tests/scripts.py; and no debugger in the kernel, which takes a second to start.
ENVIRON = {"OMP_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def kernels_are_forks() -> contextlib.AbstractContextManager:
    """Kernels that are started within the block have imported spmd already."""

    def launch(command: list[str], *, independent: bool = False, **options: Any) -> Program:
        command = [command[0], *itertools.dropwhile(lambda option: option.startswith("-X"), command[1:])]
        return shared_server().run(command, start_new_session=True, stdin=subprocess.DEVNULL, **options)

    return mock.patch.object(local_provisioner, "launch_kernel", launch)


class Kernel:
    """A kernel process and its client."""

    def __init__(self, folder: Any):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, **ENVIRON})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(HANGS)

    def __call__(
        self,
        code: str,
        *,
        interrupt_after: float | None = None,
        on_update: Callable[[dict[str, Any]], None] = lambda update: None,
    ) -> Cell:
        """Run a cell to its end.

        Args:
            interrupt_after: press the stop button when the cell has run for so many seconds.
            on_update: called with each update, as it comes.
        """
        cell, began = Cell(), time.monotonic()
        request, stop = self.client.execute(code), math.inf
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, min(HANGS, stop - time.monotonic())))
            except queue.Empty:
                assert stop < math.inf, f"the kernel has been silent for {HANGS} s"
                self.manager.interrupt_kernel()
                stop = math.inf
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "update_display_data":  # of whichever cell
                cell.updates.append(content)
                on_update(content)
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                break
            if kind == "execute_input" and interrupt_after is not None:  # the kernel begins with it
                stop = time.monotonic() + interrupt_after
            if kind == "stream":
                cell.pieces.append((time.monotonic() - began, content["name"], content["text"]))
            elif kind in ("execute_result", "display_data"):
                cell.data.append(content["data"])
            elif kind in ("comm_open", "comm_msg"):
                cell.comms.append(content["data"])
            elif kind == "error":
                cell.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
        cell.status = self.reply(request)["status"]
        cell.seconds = time.monotonic() - began
        return cell

    def reply(self, request: str) -> dict[str, Any]:
        """The answer to a request; a kernel that starts slowly has been asked several times whether it is ready."""
        while True:
            message = self.client.get_shell_msg(timeout=HANGS)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def ok(self, code: str, **options: Any) -> Cell:
        """Run a cell that must not fail."""
        cell = self(code, **options)
        assert cell.status == "ok", cell.error
        return cell

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextlib.contextmanager
def kernel(folder: Any, *, fresh: bool = False) -> Iterator[Kernel]:
    with contextlib.nullcontext() if fresh else kernels_are_forks():
        started = Kernel(folder)
        try:
            yield started
        finally:
            started.close()
