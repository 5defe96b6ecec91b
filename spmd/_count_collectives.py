"""`count_collectives`: how much a step communicates, so that a program or a test can hold it to a budget."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from .mesh.rank.counted import Counts, asked_in, counted_in, take, taken_meshes, thread
from .mesh.region import current


@contextlib.contextmanager
def count_collectives() -> Iterator[Counts]:
    """Count the collectives of a `with` block: around calls of @spmd functions and `mesh.run`, or within a step.

    >>> step = spmd(lambda x: psum(x.sum(), "data"), in_specs=P("data"))
    >>> with Mesh({"data": 2}), count_collectives() as counts:
    ...     total = step(torch.arange(4.0))
    >>> counts.operations, counts.bytes, counts.axes
    ({'all_reduce': 1}, 4, {'data': 1})

    Returns:
        A context manager that gives the counts of one rank. In a driver that is rank 0, and the counts are there at the
        end of the block, which waits for them. `operations`: how many of each; `bytes`: what the rank passed to them;
        `axes`: how many along each axis of the mesh; `collectives`: each one by itself. `forward` and `backward` have
        the same for each pass; sums of gradients are in the latter. Counted are a communicator's operations: a `psum`
        is an all_reduce, a `ppermute` an all_to_all, and a step's gradients take one all_reduce for each bucket; and
        those of torch's process groups "spmd", DDP's and FSDP's too. What the library exchanges for its own checks
        within the body counts as well; groups of one rank don't.

    Raises:
        the error of a call in the block that was not raised before.
    """
    counts = Counts()
    if current() is not None:
        with counted_in(counts):
            yield counts
        return
    outer = thread.asked
    _collect(outer)
    try:
        with asked_in(*outer, counts):
            yield counts
    except BaseException:
        with contextlib.suppress(Exception):
            _collect([*outer, counts])
        raise
    _collect([*outer, counts])


def _collect(into: Sequence[Counts]) -> None:
    """Ask rank 0 of each of a driver's meshes for this thread's counts; a launched rank counts in this process."""
    with asked_in():
        for mesh in taken_meshes():
            if not mesh.is_driver or mesh.closed:
                continue
            with mesh.run_state.aside():
                found = mesh.run(take, threading.get_ident())[0]
            for counts in into:
                for one in found:
                    counts.note(one)
