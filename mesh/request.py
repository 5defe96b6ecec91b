"""The arguments of one call: flattened, each leaf with its spec, and checked, before any rank hears of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.errors import SpecError, message
from . import trees
from .array import Array
from .mesh import Mesh
from .placing import as_tensor, is_array, place, specs_for
from .program import describe_path
from .spec import P


class Request:
    """One call of a program on a mesh.

    Args:
        name: the program's, for messages.
        specs: prefix tree of P for (args, kwargs); None leaves every leaf as it is.
        batch: which argument is the batch to split (position or name), over which axis, and over how many virtual
            shards (None: as many parts as ranks).
        donated: the arguments (positions or names) whose memory the results may take.

    Attributes:
        leaves, treedef: of (args, kwargs); NumPy arrays are tensors by now.
        specs: for each leaf how to cut it; None leaves it as it is.
        batch_total: dimension 0 of the whole batch, None if there is none.
        deal: how a `Loader` dealt the batch, None if it did not.
        dealt: over how many virtual shards it did.
        donated: for each leaf whether the caller gives its memory up.

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
        batch: tuple | None,
        donated: Sequence[int | str] = (),
    ):
        self.mesh, self.name = mesh, name
        self._tree = (args, kwargs)
        leaves, self.treedef = trees.flatten(self._tree)
        self.leaves = [leaf if type(leaf) is Array else as_tensor(leaf) for leaf in leaves]
        self.specs: list[P | None] = (
            [None] * len(leaves) if specs is None else specs_for(specs, self._tree, f"in_specs of {name}")
        )
        self.donated = self._belonging_to(donated) if donated else [False] * len(leaves)
        self.batch_total: int | None = None
        self.deal: Any = None
        self._uneven: frozenset[int] = frozenset()
        for leaf in self.leaves:
            if type(leaf) is Array and leaf._deal is not None:
                self.deal = leaf._deal
        if batch is not None:
            self._split_batch(*batch)
        for index, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if spec is not None or type(leaf) is Array:
                self._check(index)

    def where(self, index: int) -> str:
        """Which argument a leaf is or belongs to, for messages."""
        return f"{describe_path(trees.paths(self._tree, is_leaf=is_array)[index])} of {self.name}"

    @property
    def dealt(self) -> int | None:
        return None if self.deal is None else self.deal.shards

    def _belonging_to(self, arguments: Sequence[int | str]) -> list[bool]:
        """For each leaf whether it is or belongs to one of these arguments."""
        args, kwargs = self._tree
        here = (tuple(index in arguments for index in range(len(args))), {name: name in arguments for name in kwargs})
        return trees.broadcast_to(here, self.treedef)

    def _split_batch(self, which: int | str, axis: str, shards: int | None) -> None:
        """Give the leaves of the argument `batch` the spec P(axis), and find the size of the whole batch."""
        sizes = {}
        for index, (leaf, is_batch) in enumerate(zip(self.leaves, self._belonging_to([which]), strict=True)):
            if not is_batch or not isinstance(leaf, torch.Tensor | Array):
                continue
            shape = leaf._hint()[0] if isinstance(leaf, Array) else leaf.shape
            if not shape:
                raise SpecError(
                    message(
                        f"{self.where(index)} is part of the batch but has no dimension to split",
                        remedy="pass scalars in another argument",
                    )
                )
            sizes[index] = shape[0]
            cut = isinstance(leaf, Array) and axis in leaf._hint()[2].axes
            if shards is not None or cut:
                self._check_dealt(index, shards, cut)
                if shards is not None:
                    continue  # what comes whole is dealt on the ranks
            if self.specs[index] is None and not cut:
                self.specs[index] = P(axis)
        if len(set(sizes.values())) > 1:
            raise SpecError(
                message(
                    f"the leaves of the batch of {self.name} differ in dimension 0",
                    got=", ".join(f"{self.where(index)}: {size}" for index, size in sizes.items()),
                    remedy="make them agree",
                )
            )
        self._uneven = frozenset(sizes)
        self.batch_total = next(iter(sizes.values()), None)

    def _check_dealt(self, index: int, shards: int | None, cut: bool) -> None:
        """Refuse a leaf of the batch that was dealt otherwise than over `shards` virtual shards."""
        leaf, spec = self.leaves[index], self.specs[index]
        by_loader = isinstance(leaf, Array) and leaf._deal is not None
        given = leaf._deal.shards if by_loader else None
        if shards is not None and spec is not None and spec.entries:
            got, remedy = f"in_specs {spec}", "leave the batch out of in_specs"
        elif cut and given != shards:
            got = f"a batch of Loader(shards={given})" if by_loader else f"an Array cut by {leaf._hint()[2]}"
            remedy = "give the same shards= to Loader and data_parallel" if by_loader else "pass the whole batch"
        else:
            return
        raise SpecError(
            message(
                f"{self.where(index)} was not dealt as data_parallel(shards={shards}) runs it", got=got, remedy=remedy
            )
        )

    def _check(self, index: int) -> None:
        leaf, spec = self.leaves[index], self.specs[index]
        if isinstance(leaf, Array):
            leaf._readable()
            if leaf.mesh is not self.mesh:
                raise SpecError(
                    message(
                        f"{self.where(index)} is on another mesh",
                        got=leaf.mesh.describe(),
                        expected=self.mesh.describe(),
                        remedy="give mesh= where it is left out (there it means the enclosing `with mesh:`, else the "
                        "process's default mesh), or move the value with put(array.full(), mesh=...)",
                    )
                )
            if spec is None:
                return
            shape, _, its_spec = leaf._hint()
            if spec != its_spec:
                self._check_shape(index, shape, spec)
                if its_spec.entries:
                    self.leaves[index] = place(self.mesh, leaf, spec)
        elif isinstance(leaf, torch.Tensor) and spec is not None:
            self._check_shape(index, tuple(leaf.shape), spec)

    def _check_shape(self, index: int, shape: tuple[int, ...], spec: P) -> None:
        self.mesh.layout.check_shape(shape, spec, uneven=index in self._uneven, where=self.where(index))

    def signature(self) -> tuple:
        """What must be the same for a later call to be like this one: structure, shapes, dtypes, specs."""
        parts: list[Any] = [self.treedef, self.batch_total, self.dealt]
        for leaf, spec in zip(self.leaves, self.specs, strict=True):
            if type(leaf) is Array:
                parts.append((leaf._hint(), spec))
            elif isinstance(leaf, torch.Tensor):
                parts.append((tuple(leaf.shape), leaf.dtype, spec))
            else:
                parts.append((type(leaf), leaf if isinstance(leaf, int | str | bool | type(None)) else None))
        return tuple(parts)
