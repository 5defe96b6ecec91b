"""Changing the size of a mesh while its program goes on: `Mesh.resize` and `Mesh.retire`.

New ranks get ready (`newcomers`) in their own arena. At the switch, between two calls, every value is copied there
from the old arena, where the ranks' ledgers say what they keep (`moved`); batches are read again; and the old ranks
end, with their arena. Invariant: until the new ranks are handed over, the mesh is as it was.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from ...kernels.arguments import checked_flag, checked_rank, is_whole
from ...kernels.callsite import public
from ...kernels.errors import MeshError, PeerLost
from ...kernels.interrupts import uninterrupted
from ...kernels.limits import named_limits
from .. import protocol
from ..arguments import check_count
from ..driver import open_sessions
from ..driver.mesh_view import MeshView
from ..driver.pending import Pure
from ..driver.ranks import Ranks
from ..driver.rerun import send_read
from ..driver.session import DriverSession
from ..hosts.host_list import HostList
from ..spec import Layout
from .moved import Moved, MovedBetweenHosts, bytes_to_move
from .newcomers import TRIES, Died, Newcomers

logger = logging.getLogger("spmd")

_LAUNCHED = "save, and launch the job at another size"
_LEAVING = 10  # the niceness of ranks that end, while others go on


@public
def resize(self: MeshView, axes: dict[str, int], *, wait: bool = True) -> None:
    """Give the mesh another size, between two calls: values are cut again, and `Loader`s go on at their sample.

    >>> with Mesh({"data": 1}) as mesh:
    ...     x = put(torch.arange(4), P("data"), mesh=mesh)
    ...     mesh.resize({"data": 2})
    ...     x.shards()
    [tensor([0, 1]), tensor([2, 3])]

    New ranks start and import while calls under way go on; then the old ones end. With `shards=` the run's bits are
    what they would have been. Values keep their specs where the new sizes divide their dimensions; else they become
    replicated. What ranks keep besides values (module globals, caches) is lost. Over several hosts, each has ranks in
    proportion to what `hosts=` gave it, at least one; if there are more hosts than ranks, the last ones are unused
    until the mesh grows again.

    Args:
        axes: the new sizes of axes of the mesh; axes that are not named keep theirs.
        wait: False returns at once; the switch then happens at the first call of an @spmd function at which the new
            ranks are ready. Another `resize` before that replaces this one.

    Raises:
        MeshError: the ranks were started by a launcher, or use GPUs, or objects of `mesh.remote` live on them; there
            is no such axis or size; a dimension is cut over several axes at once; new ranks can't be started, or old
            ones are busy; too few hosts are left for `copies=`. The mesh is then as it was before.
    """
    self.check_driver("resize", _LAUNCHED)
    wait = checked_flag("mesh.resize", "wait", wait)
    with one_at_a_time(self):
        _resize(self, axes, wait)


def one_at_a_time(mesh: MeshView) -> contextlib.AbstractContextManager:
    """In the block, no other thread resizes the mesh; on launched ranks nobody does."""
    if not mesh.is_driver:
        return contextlib.nullcontext()
    mesh.driver.check_owner()  # first, since in a fork the thread that holds the lock may not exist
    return mesh.driver.resize_lock


def _resize(self: MeshView, axes: dict[str, int], wait: bool, leaving: Collection[int] = ()) -> None:
    """As `resize`; `leaving` are the ranks that have to go, if it matters which."""
    layout = _checked(self, axes)
    driver = self.driver
    host_list = _host_list(self, layout, leaving)
    with uninterrupted():
        before, driver.resizing = driver.resizing, None
        if before is not None:
            before.cancel()
    if layout == self.layout:
        return
    with named_limits():
        resizing = Resizing(self, driver, layout, host_list)
    try:
        resizing.begin()
        if wait:
            resizing.finish()
        else:
            driver.resizing = resizing
    except BaseException:
        resizing.cancel()
        raise


@public
def retire(self: MeshView, rank: int) -> None:
    """Have a rank leave the mesh, which goes on with one less along its batch axis; ranks are renumbered.

    Over several hosts, that rank's host has one less.

    >>> with Mesh({"data": 2}) as mesh:
    ...     mesh.retire(1)
    ...     mesh.axes
    {'data': 1}

    Args:
        rank: the rank to leave, and with it all ranks at the same place on the batch axis.

    Raises:
        MeshError: there is no such rank, or none would be left; or as for `resize`.
    """
    self.check_driver("retire", _LAUNCHED)
    with one_at_a_time(self):
        layout = self.layout
        rank = checked_rank("mesh.retire", rank, layout.size)
        axis = layout.batch_axis
        if layout.axes[axis] == 1:
            problem = f"the mesh has nothing left without rank {rank}: axis {axis!r} has one place"
            raise MeshError(problem, where=self.describe(), remedy="close the mesh")
        leaving = layout.group(rank, tuple(name for name in layout.names if name != axis))
        self.driver.end_stopped(leaving)
        _resize(self, {axis: layout.axes[axis] - 1}, True, leaving)


def _checked(mesh: MeshView, axes: dict[str, int]) -> Layout:
    where = mesh.describe()
    known = mesh.layout.axes
    if not isinstance(axes, dict):
        raise MeshError("resize got bad axes", got=repr(axes), expected='a dict, such as {"data": 4}')
    for name, size in axes.items():
        if name not in known:
            raise MeshError("resize got an unknown axis", got=repr(name), expected=f"one of {[*known]}")
        if not is_whole(size) or size < 1:
            expected = "a whole number, at least 1"
            raise MeshError(f"resize got a bad size for axis {name!r}", got=repr(size), expected=expected)
    check_count(math.prod({**known, **axes}.values()), where)
    driver = mesh.driver
    driver.ready()
    if not driver.lasting:
        problem = "a mesh of GPUs cannot be resized"
        remedy = "save, close the mesh, and restore on one of the other size"
        raise MeshError(problem, where=where, remedy=remedy)
    _check_remote(driver)
    return Layout(tuple((name, int(axes.get(name, size))) for name, size in mesh.layout.sizes))


def _host_list(mesh: MeshView, layout: Layout, leaving: Collection[int]) -> HostList | None:
    """The hosts for ranks of another layout, if there are several."""
    if mesh.hosts is None:
        return None
    host_list = mesh.hosts.without(leaving) if leaving else mesh.hosts.spread(layout.size)
    copies, left = mesh.driver.options["copies"], len(host_list.names)
    if copies >= left < len(mesh.hosts.names):
        problem = f"the mesh cannot be resized: values have copies on {copies} other hosts, and fewer would be left"
        got, remedy = f"{layout.size} ranks on {left} hosts", "leave ranks on more hosts than that"
        raise MeshError(problem, got=got, where=mesh.describe(), remedy=remedy)
    return host_list


def _check_remote(driver: DriverSession) -> None:
    driver.node.caller.raise_unseen(closing=True)
    if driver.node.in_use:
        problem = "a mesh on whose ranks objects of mesh.remote live cannot be resized"
        raise MeshError(problem, where=driver.describe(), remedy="make them on a mesh of their own")


class Resizing:
    """A resize: a thread gets the new ranks ready, then comes the switch to them."""

    def __init__(self, mesh: MeshView, driver: DriverSession, layout: Layout, host_list: HostList | None):
        self._mesh, self._driver, self._layout, self._host_list = mesh, driver, layout, host_list
        self._threads = mesh.threads_for(layout)
        self._newcomers = Newcomers(driver, layout, self._threads, *bytes_to_move(driver, layout), host_list)
        # Instead of `join`: if Ctrl-C interrupts that, Python before 3.13 takes the thread for ended.
        self._prepared: concurrent.futures.Future[None] = concurrent.futures.Future()

    @named_limits()
    def begin(self) -> None:
        threading.Thread(target=self._prepare, name="spmd-newcomers", daemon=True).start()

    def _prepare(self) -> None:
        if not self._prepared.set_running_or_notify_cancel():
            return
        try:
            self._newcomers.prepare()
            self._prepared.set_result(None)
        except BaseException as error:
            self._prepared.set_exception(error)

    def cancel(self) -> None:
        """Give up the new ranks, unless the mesh has them already."""
        if self._prepared.cancel():  # none has started
            return
        self._newcomers.cancel()
        if self._prepared.exception() is None and self._driver.ranks is not self._newcomers.ranks:
            self._newcomers.give_up()

    def switch_if_ready(self) -> None:
        """Between two calls: switch if the new ranks are ready and the old ones are not writing a checkpoint."""
        if not self._prepared.done():
            return
        lock, held = self._driver.resize_lock, False
        try:
            with uninterrupted():
                held = lock.acquire(blocking=False)
            if held and self._driver.resizing is self and all(future.done() for future in self._mesh.at_close):
                self.finish()
        finally:
            if held:
                lock.release()

    def finish(self) -> None:
        """Wait for the new ranks, and switch to them."""
        try:
            self._driver.resizing = None
            self._prepared.result()
            concurrent.futures.wait(self._mesh.at_close)  # checkpoints that the old ranks are writing
            began = self._switched()
        except BaseException:
            self.cancel()
            raise
        logger.info("%s: has gone on after %.0f ms", self._mesh.describe(), 1e3 * (time.monotonic() - began))

    def _switched(self) -> float:
        """Switch; if ranks or hosts die meanwhile, try again with other new ranks. Returns when the switch began."""
        for left in reversed(range(TRIES)):
            try:
                return self._switch()
            except Died as error:
                self._newcomers.give_up()
                if not left:
                    problem = f"the mesh cannot be resized: what moves values dies, {TRIES} times in a row"
                    remedy = "see the error output; the mesh goes on as it was"
                    raise MeshError(problem, got=f"the last: {error}", remedy=remedy) from None
            self._newcomers.prepare()
        raise AssertionError

    def _switch(self) -> float:
        driver, ranks = self._driver, self._newcomers.ranks
        old, arena = driver.ranks, driver.ranks.arena
        with contextlib.ExitStack() as switched, contextlib.ExitStack() as switch:
            with _quiet(driver):
                began = time.monotonic()
                _check_remote(driver)
                switch.enter_context(named_limits())  # not before: errors of the program's calls are raised until here
                moved: Moved | MovedBetweenHosts
                here = self._host_list is None
                moved = Moved(driver, arena, self._layout) if here else MovedBetweenHosts(driver, self._newcomers)
                with uninterrupted():
                    switch.enter_context(_switching(driver))
                    if here:
                        _yield_processor(old)
                    driver.tell(protocol.Exit())  # all values have copies, or lie in memory that outlives them
                    driver.hand_over(ranks, self._layout)
                    self._mesh.set_layout(self._layout, self._threads, self._host_list)
                    open_sessions.follow(driver)
                    for msg, packet in driver.shipped.for_newcomer(self._newcomers.known):
                        driver.tell(msg, packet)
                    puts = moved.put(driver)
                    for values in driver.values.of_calls(read=True):  # the current batches; nobody waits for it
                        values.unread_on.clear()
                        values.not_read(range(driver.layout.size))
                        send_read(driver, values)
                    listening = threading.Event()
                    driver.receiving.soon(functools.partial(self._listen, old.all, listening))
                    # These come in any case: a Ctrl-C that came until here is raised at the end of this block.
                    switched.callback(self._newcomers.take_over, old, listening)
                    switch.callback(driver.shipped.tell_naming_values)
            for task in puts:
                driver.debugging.wait(task)
                if task.failure is not None:
                    driver.wait(task)
            del moved
        driver.check_open()
        return began

    def _listen(self, gone: list[Any], done: threading.Event) -> None:
        """On the receiving thread: listen to the new ranks from now on."""
        driver = self._driver
        try:
            driver.receiving.exchange(gone, driver.ranks, self._layout)
        finally:
            done.set()


@contextlib.contextmanager
def _switching(driver: DriverSession) -> Iterator[None]:
    """In the block, other threads wait, and tasks run again if a rank dies, whatever `on_loss` says."""
    driver.switching, reruns, driver.reruns = threading.get_ident(), driver.reruns, True
    try:
        yield
    finally:
        driver.reruns, driver.switching = reruns, 0


@contextlib.contextmanager
def _quiet(driver: DriverSession) -> Iterator[None]:
    """Hold the lock while no rank has anything to do and all that was sent has been read."""
    end = time.monotonic() + driver.timeout
    while True:
        driver.ready()
        task = driver.submit(protocol.PassThrough, pure=Pure("a pause"), reported=True)
        driver.debugging.wait(task, max(0.0, end - time.monotonic()))
        if not task.settled.is_set():
            busy = sorted(driver.pending.busy())
            raise MeshError(
                "the mesh cannot be resized while its ranks are busy",
                got=f"ranks {busy} after {driver.timeout:g} s",
                where=driver.describe(),
                remedy="wait for what mesh.submit has started",
            )
        try:
            driver.wait(task)
        except PeerLost:
            continue  # the rank is replaced, with its values
        with driver.lock:
            if driver.quiet and all(values.made for values in driver.values.of_calls(read=False)):
                yield
                return
        time.sleep(0.001)


def _yield_processor(ranks: Ranks) -> None:
    """Lower the priority of ranks that end: releasing a process's memory can take as long as a step."""
    for rank in ranks.all:
        with contextlib.suppress(OSError):  # it has ended, or this is not permitted
            os.setpriority(os.PRIO_PROCESS, rank.pid, max(_LEAVING, os.getpriority(os.PRIO_PROCESS, rank.pid)))
