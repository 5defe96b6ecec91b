"""`Loader`: batches of a dataset, read on the ranks, each rank its own samples.

The driver sends positions, not data: the dataset goes to the ranks once, and which samples a rank reads follows from
the sampler alone. Invariant: the batches depend on the sampler's arguments, never on how far reading ahead has got.
"""

from __future__ import annotations

import inspect
import json
import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..kernels.arguments import check_function, is_number, is_whole
from ..kernels.callsite import hide_our_frames, public, warn
from ..kernels.errors import MeshError, PeerLost, SpecError, no_attribute
from ..mesh import trees
from ..mesh.array import Array
from ..mesh.display import drawing
from ..mesh.mesh import Mesh, resolve
from ..mesh.put import is_array
from ..mesh.region import current
from .map_batches import MapBatches
from .positions import step_here
from .stream_batches import StreamBatches
from .streams import Stream

_INSTEAD = {  # of what torch's DataLoader has
    "set_epoch": "each loop over it is the next epoch, in another order; another is begun by "
    'load_state_dict({"epoch": epoch, "step": 0})',
    "batch_size": "it is loader.settings['batch_size']",
}
_LEFT, _PEEKS = 3, 10  # of so many loops left early there is a warning; of `next(iter(loader))`, often only a look
_REFILL = 4  # brief batches are asked for in one message, when a quarter of what may be read ahead is left


@public
class Loader:
    """Iterate over one epoch of minibatches, as Arrays that are already on the ranks.

    >>> with Mesh({"data": 2}) as mesh:
    ...     loader = Loader({"x": torch.arange(10)}, batch_size=4, shuffle=False, mesh=mesh)
    ...     [batch["x"].shards() for batch in loader][-1]
    [tensor([8]), tensor([9])]

    Args:
        dataset: one tensor or array, or a dict, tuple or named tuple of them that share dimension 0; any map-style
            dataset (`len(d)`, `d[i]`; a list is one), whose samples are collated; or a `Stream`, read forwards.
        batch_size: samples in a minibatch, over all ranks.
        mesh: None is the enclosing or default mesh.
        seed, shuffle, drop_last, order: as in `Sampler`; of a Stream `shuffle` is the order of its shards, and with
            `drop_last` an epoch ends as soon as one of its virtual streams does.
        collate_fn: makes a batch of a list of samples; None is torch's default. Tensors are sharded along dimension 0;
            anything else, and tensors without dimensions, must be the same on all ranks. It may pad on each rank to the
            longest sample there: then a step gets its rank's part, `shards()` gives all parts, and `full()` raises.
        prefetch: batches to read ahead; with `workers`, for each worker. A driver asks for several in one message if
            reading them takes next to no time.
        workers: processes for each rank that read, collate and augment; with 0 the rank does this itself, between
            steps. They are forked from a process that has imported torch and never computes (each launched rank starts
            one, which takes seconds), and hand over batches through shared memory. The batches are the same for any
            number.
        prefetch_mb: the most megabytes to read ahead on a rank.
        shards: deal the samples to this many virtual shards, for a `data_parallel` step with the same `shards=`: then a
            shard's samples don't depend on the number of ranks. `collate_fn` gets one shard at a time.

    Iterating yields the batches of one epoch, sharded over the axis "data" (or the first axis, if none has that name);
    at its end the loader moves on to the next epoch, while a loop after a `break` starts the same epoch again. Samples
    are dealt to ranks one by one, so `full()` of a batch has the first rank's samples first (docs/data.md: predictions
    in the order of the dataset). If a position is loaded during a loop (by `restore`), the loop continues from there,
    to the end of the epoch that it was in. `len()` is steps per epoch. The random numbers for a sample depend on (seed,
    epoch, the sample's id), not on who reads it.

    Raises:
        SpecError: the dataset's leaves differ in length, or a bad number; when iterating, strings for samples. Whatever
            the dataset raises on a rank, as its own type, with a note that names the sample; an iterator goes on behind
            that batch, as a DataLoader's does.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list], Any] | None = None,
        prefetch: int = 2,
        shards: int | None = None,
        order: str = "feistel",
        workers: int = 0,
        prefetch_mb: float = 512.0,
    ):
        for name, value in (("prefetch", prefetch), ("workers", workers)):
            if not is_whole(value) or value < 0:
                raise SpecError(f"Loader got a bad {name}", got=repr(value), expected="a whole number, at least 0")
        if not is_number(prefetch_mb) or not 0 <= prefetch_mb < math.inf:
            raise SpecError("Loader got a bad prefetch_mb", got=repr(prefetch_mb), expected="at least 0")
        if shards is not None and (not is_whole(shards) or shards < 1):
            raise SpecError("Loader got bad shards", got=repr(shards), expected="at least 1, or None")
        if collate_fn is not None:
            check_function("Loader", collate_fn, "collate_fn=function, which makes a batch of a list of samples")
        self.dataset, self.prefetch, self.shards, self._most_bytes = dataset, prefetch, shards, int(prefetch_mb * 1e6)
        self._mesh = None if mesh is None else resolve(mesh)
        options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "collate": collate_fn}
        options["ahead"] = workers, max(1, prefetch) * workers, self._most_bytes
        self._batches: MapBatches | StreamBatches
        if isinstance(dataset, Stream):
            if order != "feistel":
                remedy = "leave it out: a Stream is read forwards, and shuffled by stream.shuffle(window)"
                raise SpecError("Loader got an order for a Stream", got=repr(order), remedy=remedy)
            self._batches = StreamBatches(dataset, batch_size, shards, **options)
        else:
            self._batches = MapBatches(dataset, batch_size, shards, order=order, **options)
            self.sampler = self._batches.sampler
        self._epoch = 0
        self._yielded = 0
        self._position: Any = None  # what a Stream's position is besides the number of batches
        self._resume: tuple[int, Any] = (0, None)
        self._loops = 0  # iterators that have begun
        self._reading = False  # also after an error, if that was in reading a batch
        self._loads = 0  # how often a position was loaded, after which iterators under way go on from it
        self._begun_at: tuple[int, int] | None = None  # loads and epoch, at the beginning of the last loop
        self._left, self._most_left = 0, _LEFT  # how many loops in a row were left early, and of how many to warn

    if not TYPE_CHECKING:  # for type checkers a name that is not there is an error

        @public
        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _INSTEAD) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS and "_most_left" in vars(self):  # as of a DataLoader
            epoch = "loader.load_state_dict({'epoch': ..., 'step': 0}) goes on with another epoch; "
            remedy = f"{epoch if 'epoch' in name else ''}make another Loader for other settings"
            raise SpecError(f"{name} of a Loader cannot be set", remedy=remedy)
        super().__setattr__(name, value)

    @public
    def __len__(self) -> int:
        return len(self._batches)

    @property
    def mesh(self) -> Mesh | None:
        """As given."""
        return self._mesh

    @property
    def settings(self) -> dict[str, Any]:
        """What its batches depend on, besides the dataset and the position."""
        return {**self._batches.settings, "shards": self.shards}

    @staticmethod
    def _in_steps(loader: Loader) -> list[Any]:
        """What a step that captures it may ask for."""
        own = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
        return [loader.dataset, loader._batches, loader._mesh, own]

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, plain data; it means the same at any number of ranks.

        It counts batches of this Loader's. Add `"settings": loader.settings` for a Loader that may be another one.

        Raises:
            SpecError: the position of a Stream's `tell()` is not plain, or a step asks for it.
        """
        _refuse_in_step("the position of a Loader")
        state: dict[str, Any] = {"epoch": self._epoch, "step": self._yielded}
        if self._position is not None:
            try:
                state["streams"] = json.dumps(self._position, default=operator.index)
            except TypeError as error:
                problem, expected = "a Stream's tell() returned what JSON does not have", "numbers, strings, lists"
                remedy = "or leave out the second argument of open(shard, at): then records are read again, and dropped"
                raise SpecError(problem, got=str(error), expected=expected, remedy=remedy) from None
        return state

    @public
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position that `state_dict` gave.

        With the other Loader's `settings` in it, as `restore` has them, go on with the same sample if that one had
        another batch_size.

        Raises:
            SpecError: there is no such position: the Loader was another, or no batch begins with this sample.
        """
        self._epoch, self._yielded, self._position = self.checked(state)
        self._resume = self._yielded, self._position
        self._loads += 1

    def checked(self, state: dict[str, Any]) -> tuple[int, int, Any]:
        """The position that a state says, for this Loader; raises as `load_state_dict` does, and changes nothing."""
        try:
            epoch, step = operator.index(state["epoch"]), operator.index(state["step"])
            if step > 0 and "settings" in state:
                step = step_here(step, state["settings"], self.settings, epoch)
        except (LookupError, TypeError, AttributeError):
            expected, remedy = '{"epoch": ..., "step": ...}', "pass what a Loader's state_dict() returned"
            raise SpecError("Loader got a bad state", got=repr(state)[:60], expected=expected, remedy=remedy) from None
        return self._batches.checked(epoch, step, state.get("streams"))

    def __iter__(self) -> Iterator[Any]:
        return _Loop(self)

    def _from_here(self) -> Iterator[Any]:
        _refuse_in_step("batches of a Loader")
        mesh = resolve(self._mesh)
        self._note_left()
        self._loops += 1
        last = self._epoch
        while self._epoch <= last:
            loads, epoch = self._loads, self._epoch
            self._yielded, self._position = self._resume
            self._resume = (0, None)
            yield from self._of_epoch(mesh, epoch)
            if self._loads == loads and epoch == last:
                return

    def _after(self, kind: type[BaseException]) -> Iterator[Any]:
        """The batches that follow an error of this kind, for a program that has caught it."""
        if not self._reading:
            return iter(())
        state = self.state_dict()
        if issubclass(kind, Exception) and not issubclass(kind, MeshError | PeerLost):
            if isinstance(self._batches, StreamBatches):
                problem = "a loop over a Stream can't go on after an error, since what follows is not known"
                remedy = "have the Stream yield another sample instead; or iterate again, to read the same batch again"
                raise SpecError(problem, got=f"{kind.__name__} at {state}", where=repr(self), remedy=remedy)
            state["step"] += 1
        self.load_state_dict(state)
        return self._from_here() if self._epoch == state["epoch"] else iter(())

    def _note_left(self) -> None:
        """Warn if loop after loop is left early: all begin with the same samples, and the rest are never read.

        After one batch many are left on purpose, to look at it: that has to happen more often.
        """
        begins_at, most = (self._loads, self._epoch), _LEFT if self._yielded > 1 else _PEEKS
        if begins_at != self._begun_at or not self._yielded:
            self._left = 0
        else:
            self._left = self._left + 1 if most == self._most_left else 1
        self._begun_at, self._most_left = begins_at, most
        if self._left == most and self.settings.get("shuffle", True):
            warn(
                f"a loop over a Loader begins epoch {self._epoch} again, after {most} left early: all "
                "begin with the same batches, and the samples of others never come",
                got=f"the last one left after {self._yielded} batch{'es' * (self._yielded > 1)}",
                remedy='begin another epoch, loader.load_state_dict({"epoch": epoch, "step": 0}); go on in this '
                "one by taking batches of one iterator, batches = iter(loader); or say shuffle=False if they are "
                "to be the same",
            )

    def _of_epoch(self, mesh: Mesh, epoch: int) -> Iterator[Any]:
        """The batches of an epoch from a position on, until another position is loaded."""
        loads, loop, parts = self._loads, self._loops, mesh.layout.axes[mesh.layout.batch_axis]
        feed = self._batches.begin(mesh, epoch, self._yielded, self._position)
        while self._loads == loads:
            self._reading = True
            if not feed.asked:
                feed.ask(1)
            batch, position = feed.take()
            if batch is None and not self._yielded:
                return  # an epoch of no batches, which leads nowhere
            if batch is None:
                self._epoch, self._yielded, self._position = epoch + 1, 0, None
                return
            if mesh.is_driver and feed.more:
                ahead = min(self.prefetch, self._most_bytes // max(1, _nbytes(batch) // parts))
                if not feed.is_brief:
                    for _ in range(feed.asked, ahead):
                        feed.ask(1)
                elif _REFILL * feed.asked < ahead:
                    feed.ask(ahead - feed.asked)
            self._reading = False
            self._yielded, self._position = self._yielded + 1, position
            if self._batches.is_last(self._yielded - 1):
                self._epoch, self._yielded = epoch + 1, 0
            yield batch
            if self._loops != loop:
                problem = "a loop over a Loader can't go on: another has begun since, and a Loader has one position"
                raise SpecError(problem, got=repr(self), remedy="make a Loader for each of the loops")
            if self._epoch != epoch:
                return

    def grids(self, epoch: int) -> tuple[list[drawing.Grid], int]:
        """Pictures of which rank takes which sample, and the number of ranks."""
        if isinstance(self._batches, StreamBatches):
            raise SpecError("which samples a Stream has is known only when it is read", got=repr(self.dataset))
        return self.sampler.grids(resolve(self._mesh).layout, epoch, self.shards)

    def _repr_html_(self) -> str:
        streams = isinstance(self._batches, StreamBatches)
        return f"<pre>{self!r}</pre>" if streams else drawing.html(*self.grids(self._epoch))

    def __repr__(self) -> str:
        what = self.dataset if isinstance(self.dataset, Stream) else self.sampler
        return f"Loader({what!r}, shards={self.shards})"


# Others are the program's own.
_SETTINGS = {*inspect.signature(Loader).parameters, "epoch", "sampler", "settings"}


class _Loop:
    """Batches, one after another, of a program that may catch errors: a generator would say that the epoch is over.

    After an exception of the dataset's the next batch follows, as from a DataLoader; else the same batch is read again.
    """

    def __init__(self, loader: Loader):
        self._loader, self._batches = loader, loader._from_here()
        self._failed: type[BaseException] | None = None  # no error itself, which would keep the program's frames

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            if self._failed is not None:
                self._batches = self._loader._after(self._failed)
                self._failed = None
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            hide_our_frames(error)
            self._failed = self._failed or type(error)
            raise

    def close(self) -> None:
        """End the loop, as of a generator."""
        self._batches, self._failed = iter(()), None


def _refuse_in_step(what: str) -> None:
    region = current()
    if region is not None and region.pure:
        remedy = "ask for it where the step is called, and pass it as an argument"
        raise SpecError(f"{what} cannot be had in an @spmd step, which changes nothing around it", remedy=remedy)


def _nbytes(batch: Any) -> int:
    """Bytes of a batch's tensors; a dimension that each rank pads to its own length counts as 1."""
    found = [leaf for leaf in trees.leaves(batch, is_leaf=is_array) if isinstance(leaf, Array)]
    return sum(abs(math.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in found)
