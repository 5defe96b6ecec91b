"""The arguments of one call: flattened, each leaf given its spec, and checked before anything is sent to a rank."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from ..kernels.arguments import check_value
from ..kernels.errors import SpecError
from . import trees
from .ambient import Ambient
from .array import Array
from .batch import BatchArgument, BatchSplit, Deal, common_length, refuse_lists
from .mesh import Mesh
from .program import InputLeaf, InputPlan, describe_path
from .put import as_tensor, put_on, specs_for
from .spec import RAGGED, REPLICATED, P, is_sharded


class Request:
    """One call of a program on a mesh.

    Args:
        name: the program's, for messages.
        specs: prefix tree of P for (args, kwargs); None leaves every leaf as it is.
        batch: which argument is the batch to split, if one is.
        donated: the arguments (positions or names) whose memory the results may take.

    Attributes:
        leaves, treedef: of (args, kwargs), with NumPy arrays as tensors.
        specs: for each leaf how to cut it; None leaves it as it is.
        batch: how the batch is split.
        total: dimension 0 of the whole batch, if there is one and it is known.
        donated: for each leaf whether the caller donates it.
        uneven: the leaves of the batch, which need not be cut evenly.

    Raises:
        SpecError: a spec does not fit.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        args: tuple,
        kwargs: dict[str, Any],
        specs: Any,
        batch: BatchArgument | None,
        donated: Sequence[int | str] = (),
    ):
        self.mesh, self.name = mesh, name
        self._tree = (args, kwargs)
        leaves, self.treedef = trees.flatten(self._tree)
        self.leaves = [leaf if type(leaf) is Array else as_tensor(leaf) for leaf in leaves]
        for leaf in self.leaves if mesh.is_driver else ():
            if type(leaf) is Array and leaf.donated_to is None:
                _ = leaf.shape  # waits, since until then its hint is that of the last such call
        uncut: list[P | None] = [None] * len(leaves)
        self.specs = uncut if specs is None else specs_for(specs, self._tree, f"in_specs of {name}")
        self._refuse_uncut(one_for_all=isinstance(specs, P))
        self.donated = self._belonging_to(donated) if donated else [False] * len(leaves)
        self.uneven: frozenset[int] = frozenset()
        deals = [deal for leaf in self.leaves if type(leaf) is Array and (deal := leaf.deal) is not None]
        last = deals[-1] if deals else Deal((0, 0))
        self.batch = BatchSplit(shards=last.shards, sizes=last.sizes)
        self.total: int | None = None
        if batch is not None:
            self._split_batch(batch)
        for index, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if isinstance(leaf, torch.Tensor):
                check_value(leaf, functools.partial(self.where, index), cut=spec is not None and bool(spec.entries))
            if spec is not None or type(leaf) is Array:
                self._check(index)
        self._refuse_parts()

    def where(self, index: int) -> str:
        """Which argument a leaf belongs to, for messages."""
        return f"{describe_path(trees.places(self.treedef)[index])} of {self.name}"

    def _refuse_uncut(self, *, one_for_all: bool) -> None:
        """Refuse a spec that would cut what ranks have whole; it may be a prefix for tensors beside that."""
        args, kwargs = self._tree
        arguments = trees.broadcast_to((tuple(range(len(args))), {name: name for name in kwargs}), self.treedef)
        groups: dict[Any, list[int]] = {}
        for index, spec in enumerate(self.specs):
            if spec is not None and spec.entries:
                groups.setdefault((id(spec), None if one_for_all else arguments[index]), []).append(index)
        for group in groups.values():
            given = [index for index in group if self.leaves[index] is not None]
            if given and not any(isinstance(self.leaves[index], torch.Tensor | Array) for index in given):
                self._refuse_cut(given[0])

    def _refuse_cut(self, index: int) -> NoReturn:
        leaf = self.leaves[index]
        if isinstance(leaf, numbers.Number):
            got, kind, make = repr(leaf), "numbers", "make a tensor of those that each rank is to have a part of"
        else:
            got, kind = f"a {type(leaf).__name__}", "what is no tensor"
            make = "make a tensor of what is to be cut, or a dataclass of tensors of an object that holds them"
        remedy = f"write None for {kind}, which every rank has {'alike' if kind == 'numbers' else 'whole'}; {make}"
        problem = f"{self.where(index)} cannot be cut by {self.specs[index]}"
        raise SpecError(problem, got=got, expected="a tensor or an array", remedy=remedy)

    def _refuse_parts(self) -> None:
        """Refuse a `Sharded` with whole values, which ranks would take for parts: it does not cut them."""
        index = 0
        for node in trees.leaves(self._tree, is_leaf=is_sharded):
            declares = node.spec if is_sharded(node) else None
            for _ in trees.leaves(node.local) if is_sharded(node) else (node,):
                leaf, spec = self.leaves[index], self.specs[index]
                if isinstance(leaf, Array) and spec is None:
                    spec = leaf.spec
                if declares is not None and (spec or REPLICATED) != declares and isinstance(leaf, torch.Tensor | Array):
                    raise SpecError(
                        f"{self.where(index)} is Sharded, which says that a value is a rank's part, and cuts none",
                        got=f"{declares}, and {spec or REPLICATED} for the argument",
                        remedy=f"pass put(x, {declares}), where x is the whole value",
                    )
                index += 1

    def _belonging_to(self, arguments: Sequence[int | str]) -> list[bool]:
        """For each leaf whether it belongs to one of these arguments."""
        args, kwargs = self._tree
        here = (tuple(index in arguments for index in range(len(args))), {name: name in arguments for name in kwargs})
        return trees.broadcast_to(here, self.treedef)

    def _split_batch(self, argument: BatchArgument) -> None:
        """Give the leaves of the batch the spec of its axis, and find the size of the whole batch."""
        axes = self.mesh.layout.names
        if argument.axis not in axes:
            raise SpecError(
                f"data_parallel splits the batch of {self.name} over an axis that the mesh does not have",
                got=repr(argument.axis),
                expected=f"one of {axes}",
                remedy=f"write @data_parallel(axis={axes[0]!r}), or name an axis of the mesh {argument.axis!r}",
            )
        lengths: dict[int, int] = {}
        key = argument.key(*self._tree, self.name)
        for index, (leaf, is_batch) in enumerate(zip(self.leaves, self._belonging_to([key]), strict=True)):
            if not is_batch or not isinstance(leaf, torch.Tensor | Array):
                continue
            if isinstance(leaf, torch.Tensor):
                check_value(leaf, functools.partial(self.where, index), cut=True)
            shape = leaf.hint().shape if isinstance(leaf, Array) else leaf.shape
            if not shape:
                raise SpecError(
                    f"{self.where(index)} is part of the batch but has no dimension to split",
                    remedy="pass scalars in another argument",
                )
            lengths[index] = shape[0]
            cut = isinstance(leaf, Array) and argument.axis in leaf.hint().spec.axes
            if argument.shards is not None or cut:
                self._check_strided(index, argument.shards, cut)  # a whole leaf is dealt on the ranks
            elif self.specs[index] is None:
                others = leaf.hint().spec.entries[1:] if isinstance(leaf, Array) else ()  # of a sequence, say
                self.specs[index] = P(argument.axis, *others)
        batch = self._tree[1][key] if isinstance(key, str) else self._tree[0][key]
        if not lengths:
            raise SpecError(
                f"the batch of {self.name} has no tensor to split",
                got=trees.shown(batch) if trees.leaves(batch) != [batch] else f"a {type(batch).__name__}",
                expected="tensors or arrays in dicts, lists, tuples, dataclasses, mappings, or in classes known to "
                "torch.utils._pytree",
                remedy="pass its tensors in a dict, and of a loader one batch at a time: for batch in loader",
            )
        self.uneven = frozenset(lengths)
        self._check_order(argument.axis, lengths)
        total = common_length(lengths, self.where, self.name)
        if total is not None:
            if len(lengths) < sum(self._belonging_to([key])):
                refuse_lists(batch, total, self.name)
            self.total = None if total == RAGGED else total  # then the ranks add up their rows
            in_shards, sizes = (argument.shards or 1) > 1, self._sizes(lengths)
            self.batch = dataclasses.replace(self.batch, axis=argument.axis, sizes=sizes, in_shards=in_shards)

    def _sizes(self, leaves: Iterable[int]) -> tuple[int, ...] | None:
        """`BatchSplit.sizes`: also of a batch that a step has cut so that some rank has no samples."""
        arrays = (leaf for index in leaves if type(leaf := self.leaves[index]) is Array)
        shards = next((its for leaf in arrays if leaf.deal is None and (its := leaf.hint().shards)), ())
        sizes = tuple(shape[0] for shape in shards)
        return self.batch.sizes if all(sizes) else sizes

    def _check_order(self, axis: str, leaves: Iterable[int]) -> None:
        """Refuse whole leaves beside leaves of a `Loader`, which deals samples one by one: rows would not match."""
        arrays = [(index, leaf) for index in leaves if type(leaf := self.leaves[index]) is Array]
        cut = [index for index, leaf in arrays if axis in leaf.hint().spec.axes]
        strided = [index for index, leaf in arrays if index in cut and leaf.deal is not None]
        whole = [index for index in leaves if index not in cut]
        if not strided or not whole:
            return
        raise SpecError(
            f"{self.where(whole[0])} is whole, and beside it in the batch a Loader has dealt "
            f"{self.where(strided[0])}: their rows would be of different samples on a rank",
            expected="all of a batch dealt in one way",
            remedy="give it to the Loader's dataset, Loader({'x': x, 'w': w}, ...), or make it in the step",
        )

    def _check_strided(self, index: int, shards: int | None, cut: bool) -> None:
        """Refuse a leaf of the batch that was not dealt over `shards` virtual shards."""
        leaf, spec = self.leaves[index], self.specs[index]
        deal = leaf.deal if isinstance(leaf, Array) else None
        by_loader, given = deal is not None, None if deal is None else deal.shards
        if shards is not None and spec is not None and spec.entries:
            got, remedy = f"in_specs {spec}", "leave the batch out of in_specs"
        elif cut and given != shards:
            got = f"a batch of Loader(shards={given})" if by_loader else f"an Array cut by {leaf.hint().spec}"
            remedy = "give the same shards= to Loader and data_parallel" if by_loader else "pass the whole batch"
        else:
            return
        raise SpecError(
            f"{self.where(index)} was not dealt as data_parallel(shards={shards}) runs it", got=got, remedy=remedy
        )

    def _check(self, index: int) -> None:
        leaf, spec = self.leaves[index], self.specs[index]
        if isinstance(leaf, Array):
            leaf.check_readable()
            if leaf.mesh is not self.mesh:
                self._refuse_mesh(index, leaf.mesh)
            if spec is None:
                return
            shape, its_spec = leaf.hint().shape, leaf.hint().spec
            if spec != its_spec:
                if RAGGED not in shape:  # else `put_on` finds out the true shape
                    self._check_shape(index, shape, spec)
                if its_spec.entries:
                    self.leaves[index] = put_on(self.mesh, leaf, spec)
        elif isinstance(leaf, torch.Tensor) and spec is not None:
            self._check_shape(index, tuple(leaf.shape), spec)

    def _refuse_mesh(self, index: int, its: Any) -> NoReturn:
        remedy = (
            "fetch values with .full() before their mesh is closed, as by the end of a `with mesh:` block"
            if its.closed
            else "if the mesh was made again, define the step and make the Loader again, with the new one; give mesh= "
            "where it is left out (there it means the enclosing `with mesh:`, else the process's default mesh); a "
            "value moves with put(array.full(), mesh=...)"
        )
        problem = f"{self.where(index)} is on another mesh{', which is closed' if its.closed else ''}"
        raise SpecError(problem, got=its.describe(), expected=self.mesh.describe(), remedy=remedy)

    def _check_shape(self, index: int, shape: tuple[int, ...], spec: P) -> None:
        self.mesh.layout.check_shape(shape, spec, uneven=index in self.uneven, where=self.where(index))

    def plan(self, settings: Ambient | None) -> InputPlan:
        """What all calls with such arguments, under these settings of torch, have in common."""
        return InputPlan(
            tuple(
                InputLeaf("array", spec, donated)
                if isinstance(leaf, Array)
                else InputLeaf("tensor" if isinstance(leaf, torch.Tensor) else "value", spec)
                for leaf, spec, donated in zip(self.leaves, self.specs, self.donated, strict=True)
            ),
            self.batch,
            settings,
        )


# -- the arguments of a repeated call --------------------------------------------------------------------------------


class Settled(NamedTuple):
    """What the first call of a signature has settled of its arguments.

    Attributes:
        moves: the indices of Arrays that must get another spec before each call, with that spec.
        total: how many rows the batch has, if there is one and that is known.
        sized: the indices of the Arrays on whose shapes the call depends.
    """

    treedef: Any
    plan: InputPlan
    moves: list[tuple[int, P]]
    total: int | None
    sized: list[int]


class Span(NamedTuple):
    """Consecutive leaves of a call's arguments: Arrays that are consecutive in one source, too, or one other leaf.

    Attributes:
        source: of the Arrays; None for a leaf that is no Array.
        at: the first one's index among the leaves.
        start, stop: their indices in the source.
    """

    source: Any
    at: int
    start: int
    stop: int


def spans_of(leaves: Sequence[Any], before: Sequence[int] = ()) -> list[Span]:
    """All leaves, in spans.

    Args:
        before: lengths of the spans of the last such call: spans as long as these are checked all at once.
    """
    found: list[Span] = []
    ids = list(map(id, leaves)) if before else []
    at, count, expected = 0, len(leaves), iter(before)
    while at < count:
        many = next(expected, 1)
        leaf = leaves[at]
        if type(leaf) is not Array:
            found.append(Span(None, at, 0, 1))
            at += 1
            continue
        source: Any = leaf._source
        start = leaf._index
        stop = start + 1
        if many > 1:
            here = ids[at : at + many]
            # `source.ids` is empty unless all its Arrays are alive: so equal ids mean the same Arrays.
            if len(here) == many and here == source.ids[start : start + many]:
                stop = start + many
        after = at + stop - start
        while after < count and type(leaves[after]) is Array:
            one = leaves[after]
            if one._source is not source or one._index != stop:
                break
            stop, after = stop + 1, after + 1
        found.append(Span(source, at, start, stop))
        at = after
    return found


def passable(mesh: Any, leaves: Sequence[Any], spans: Sequence[Span]) -> bool:
    """Whether all Arrays among the arguments are on this mesh, and none was donated."""
    return all(
        leaves[span.at].mesh is mesh
        and not (span.source.donated and span.source.donated.keys() & set(range(span.start, span.stop)))
        for span in spans
        if span.source is not None
    )


def donate(spans: Sequence[Span], plan: InputPlan, name: str) -> None:
    """Note that some arguments were donated to a function."""
    for source, at, start, stop in spans:
        if source is not None:
            source.donated.update(
                {index: name for index, leaf in zip(range(start, stop), plan.leaves[at:], strict=False) if leaf.donated}
            )
