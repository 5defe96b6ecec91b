"""What a function over virtual shards returns: its value and aux, collected shard by shard and combined at the end.

Floating-point leaves are averaged by the tree, like the value. Running statistics (`mesh.region.note_carry`) are
folded in the order of the shards, as if each shard had begun where the one before it ended. Leaves that are sharded
over the batch's axis are laid end to end, and everything else must agree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ...kernels.errors import SpecError
from ...mesh import trees
from ...mesh.region import Region, carry_of
from ...mesh.replication.net import differs_over, mark
from ...mesh.replication.values import same_value
from ...mesh.spec import Sharded, is_sharded
from .._arguments import declared_axes
from .._auxiliary import Auxiliary, shown, token
from .._call import Call, Output, inverse
from .._sums import summed
from .shards import VirtualShards
from .tree_sums import HALVES, TreeSums


@dataclasses.dataclass(slots=True)
class _Leaf:
    """A leaf of aux. Shards are summed (`slot`), folded (`carry`) or laid end to end (`dim`); else they must agree."""

    path: str
    first: Any
    axes: tuple[str, ...] | None
    slot: int | None = None
    carry: tuple[float, Tensor] | None = None
    dim: int | None = None
    pieces: list[Tensor] = dataclasses.field(default_factory=list)


class Results:
    """For one use: `take` every shard's value and aux (or `take_structure`), and `finish` when the sums are known.

    Args:
        sums: leaves are added to these at the first shard, which also opens them.
        share: this rank's share in the mean over all axes but that of the shards.
    """

    def __init__(self, call: Call, region: Region, virtual: VirtualShards, sums: TreeSums, share: float):
        self._call, self._region, self._virtual = call, region, virtual
        self._plan, self._over, self._sums, self._share = call.plan, call.over, sums, share
        self._leaves: list[_Leaf] = []
        self._aux: Auxiliary | None = None
        self._value = 0
        self._count: int | None = None
        self._kind = ""

    def take(self, out: Output, weight: float) -> None:
        """What the running shard returned."""
        made = Auxiliary.of(out.aux, self._over)
        if self._aux is None:
            self._begin(out, made, [carry_of(leaf) for leaf in made.leaves])
        assert self._aux is not None
        if made.treedef != self._aux.treedef:
            raise SpecError(
                "aux has another structure in some virtual shards",
                got=f"{made.treedef} and {self._aux.treedef}",
                where=self._region.session.where(),
            )
        if (kind := _kind(out)) != self._kind:
            raise SpecError(
                "the value is of another kind in some virtual shards",
                got=f"{self._kind} and {kind}",
                where=self._region.session.where(),
                remedy="return the same kind in each branch: mean_of(0 * total, 0) where nothing counts, for instance",
            )
        if self._count is None or out.count is None:
            self._sums.fill(self._value, out.value.detach() * weight)
        else:
            self._sums.fill(self._value, out.value)
            self._sums.fill(self._count, out.count)
        for leaf, its in zip(made.leaves, self._leaves, strict=True):
            if its.slot is not None:
                self._check_like(leaf, its)
                self._sums.fill(its.slot, leaf.detach() * weight)
            elif its.carry is not None or its.dim is not None:
                self._check_like(leaf, its)
                its.pieces.append(leaf.detach().clone())
            elif not _agree(leaf, its.first):
                raise SpecError(
                    f"aux{its.path} differs between virtual shards and cannot be averaged",
                    got=f"{shown(its.first)} and {shown(leaf)}",
                    where=self._region.session.where(),
                    remedy="return a float, or wrap it in Sharded(value, spec)",
                )

    def take_structure(self, out: Output, notes: list[Any]) -> None:
        """On a rank without samples: another rank's results, with zeros for floats."""
        for leaf, (_, differs) in zip(trees.leaves(out.aux), notes, strict=True):
            if differs is not None:
                mark(leaf, differs)
        self._begin(out, Auxiliary.of(out.aux, self._over), [carry for carry, _ in notes])
        for leaf in self._leaves:
            if leaf.dim is not None:
                leaf.first = leaf.first.narrow(leaf.dim, 0, 0)

    def _begin(self, out: Output, made: Auxiliary, carried: list[Any]) -> None:
        self._aux, axis, aux = made, self._virtual.axis, out.aux
        scale = self._scale(self._over) if out.count is None else 1.0
        self._kind = _kind(out)
        self._value = self._sums.add(out.value, self._over, scale, exact=True)
        if out.count is not None:
            self._count = self._sums.add(out.count, self._over, 1.0, exact=True)
        paths, dims = trees.paths(aux), _dims(aux, axis)
        differs = [
            (differs_over(leaf) if declared is None else declared) or frozenset()
            for leaf, declared in zip(made.leaves, declared_axes(aux), strict=True)
        ]
        for index, (leaf, axes) in enumerate(zip(made.leaves, made.over, strict=True)):
            its = _Leaf(paths[index], leaf, axes)
            self._leaves.append(its)
            if carried[index] is not None and axes != ():
                its.carry = carried[index]
            elif axes is None:
                continue
            elif axis in axes:
                its.slot = self._sums.add(leaf.detach().contiguous(), axes, self._scale(axes), exact=True)
            elif axes == () and axis not in differs[index]:  # an integer that differs over other axes only
                its.axes = None
            else:
                its.dim = dims[index]
                if leaf.dim() <= its.dim:
                    raise SpecError(
                        f"aux{its.path} differs between virtual shards and has no dimension to lay them end to end",
                        got=f"shape {tuple(leaf.shape)}",
                        remedy="give it one, or return a float, which is averaged",
                    )
        made.check_parts(self._region)
        # Carried and cut leaves may differ; `check` compares only leaves that are averaged or must agree.
        kept = [() if its.dim is not None or its.carry is not None else its.axes for its in self._leaves]
        Auxiliary(made.leaves, made.treedef, kept, made.numbers).check(self._region, self._over)
        self._sums.open()

    def _check_like(self, leaf: Any, its: _Leaf) -> None:
        """Refuse what can't be added to a leaf of the first shard, or laid beside it."""
        if not isinstance(leaf, Tensor) or _fixed(leaf, its.dim) != _fixed(its.first, its.dim):
            raise SpecError(
                f"aux{its.path} differs in kind between virtual shards and cannot be "
                + ("averaged" if its.dim is None else "laid end to end"),
                got=f"{shown(its.first)} and {shown(leaf)}",
                where=self._region.session.where(),
                remedy="return the same kind in each"
                if its.dim is not None
                else "return floats of one shape, or wrap it in Sharded(value, spec)",
            )

    def _scale(self, axes: tuple[str, ...]) -> float:
        return self._virtual.scale * self._weight(tuple(n for n in axes if n != self._virtual.axis))

    def _weight(self, axes: tuple[str, ...]) -> float:
        return self._plan.weight(axes, self._region.session.layout.axes)[0]

    def finish(self, found: list[Tensor]) -> tuple[Tensor, float | None, Any]:
        """The value of all shards, the factor that is still missing in gradients, and aux; `found` are the sums."""
        assert self._aux is not None
        folded = self._fold([leaf for leaf in self._leaves if leaf.carry is not None])
        leaves = []
        for leaf in self._leaves:
            if leaf.slot is not None:
                leaves.append(found[leaf.slot])
            elif leaf.carry is not None:
                leaves.append(next(folded))
            elif leaf.dim is not None:
                joined = torch.cat(leaf.pieces, leaf.dim) if leaf.pieces else leaf.first.detach()
                leaves.append(self._mean(joined, leaf.axes or ()))
            else:
                leaves.append(leaf.first.detach() if isinstance(leaf.first, Tensor) else leaf.first)
        factor = None if self._count is None else inverse(found[self._count])
        value = found[self._value] if factor is None else found[self._value] * factor
        return value, factor, self._aux.tree(leaves)

    def _mean(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The mean over axes other than that of the shards."""
        if not axes or not x.dtype.is_floating_point:
            return x
        return summed(self._region, self._plan, [(x * self._weight(axes), axes)])[0]

    def _fold(self, leaves: list[_Leaf]):
        """Gather all shards' running statistics on every rank, and fold them in the order of the shards."""
        counts = [len(self._virtual.filled(position)) for position in range(len(self._virtual.owners))]
        comm = self._region.session.comm(self._virtual.axis)
        groups: dict[torch.dtype, list[_Leaf]] = {}
        for leaf in leaves:
            groups.setdefault(leaf.first.dtype, []).append(leaf)
        rows: dict[int, list[Tensor]] = {}
        for dtype, members in groups.items():
            sizes = [leaf.first.numel() for leaf in members]
            mine = torch.empty(counts[self._virtual.position], sum(sizes), dtype=dtype, device="cpu")
            for leaf, part in zip(members, mine.split(sizes, 1), strict=True):
                for row, piece in zip(part, leaf.pieces, strict=True):
                    row.copy_(piece.reshape(-1))
            gathered = [torch.empty(count, sum(sizes), dtype=dtype, device="cpu") for count in counts]
            comm.all_gather(gathered, mine)
            for leaf, part in zip(members, torch.cat(gathered).split(sizes, 1), strict=True):
                rows[id(leaf)] = [row.view(leaf.first.shape) for row in part]
        for leaf in leaves:
            assert leaf.carry is not None
            others = tuple(name for name in leaf.axes or () if name != self._virtual.axis)
            yield self._mean(_folded(rows[id(leaf)], *leaf.carry), others)


def _kind(out: Output) -> str:
    return f"a {out.value.dtype} {'alone' if out.count is None else 'in a mean_of'}"


def _fixed(x: Tensor, dim: int | None) -> tuple[torch.dtype, list[int]]:
    """What parts that are laid end to end along `dim` have in common."""
    return x.dtype, [size for index, size in enumerate(x.shape) if index != dim]


def _agree(a: Any, b: Any) -> bool:
    """Whether leaves of two shards are the same; objects without a comparison of their own are compared as pickles."""
    if a is b or isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b or token(a, None) == token(b, None)
    if same_value(a, b):
        return True
    try:
        return cloudpickle.dumps(a) == cloudpickle.dumps(b)
    except Exception:  # it can't be a result of a step
        return False


def _folded(results: list[Tensor], decay: float, base: Tensor) -> Tensor:
    """Fold results that all began at `base`, as if each had begun where the one before it ended."""
    if not results:
        return base.detach().clone()
    wide = torch.float32 if base.dtype in HALVES else base.dtype
    base, total = base.detach().to(wide), results[0].to(wide)
    for result in results[1:]:
        moved = total - base
        total = result.to(wide) + (moved * decay if decay != 1 else moved)
    return total.to(results[0].dtype).clone()


def _dims(aux: Any, axis: str) -> list[int]:
    """For each leaf the dimension along which shards are laid end to end."""
    found: list[int] = []
    for node in trees.leaves(aux, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            spec = node.spec
            cut = next((dim for dim in range(len(spec.entries)) if axis in spec.dim_axes(dim)), 0)
            found.extend([cut] * len(trees.leaves(node.local)))
        else:
            found.append(0)
    return found
