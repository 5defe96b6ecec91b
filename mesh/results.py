"""What a program returned on one rank: checked, detached from the region, and described to the driver or the peers.

`Results` remembers the results of the last call. When the next ones have the same structure, shapes, dtypes and
strides, everything derived from these is looked up instead of checked leaf by leaf. Invariant: what is kept has no
autograd graph, and none of the attributes that were set on the body's tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..kernels.arguments import arrived, check_value
from ..kernels.errors import SpecError
from . import trees
from .array import Array
from .pickling.unpicklable import sending_result
from .put import as_tensor
from .rank.lasting_values import KnownLayout
from .rank.session import RankSession
from .replication.agreement import called, path_in
from .replication.net import Net, plain_number
from .replication.reports import TELLABLE, OutputMeta, Told, encode, specs_of, telling, tensors_among, told_among
from .replication.values import Check, prints_of_all, prints_of_scalars, same_value, scalars_among, tensor_print
from .spec import REPLICATED, P, is_sharded, is_spec
from .strides import is_frozen


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returned on this rank.

    Attributes:
        treedef, leaves: the results, as they are kept.
        metas: the description of each leaf.
        tensors, specs: the leaves that are tensors, and their specs.
        unchanged: the structure, the leaves' kinds and the non-tensor values are those of the call before.
        prints: what ranks compare of their tensors (see `replication.values`).
        known: the memory layout of the tensors, if it is that of an earlier call.
    """

    treedef: Any
    leaves: list[Any]
    metas: list[OutputMeta]
    tensors: list[Any]
    specs: list[P]
    unchanged: bool
    prints: bytes
    known: KnownLayout | None = None

    def encoded(self, where: str) -> bytes:
        """What other processes must know of the results.

        Raises:
            MeshError: one that is no tensor can't be sent.
        """

        def values() -> list[tuple[str, Any]]:
            return [(f"result {path_in(self.treedef, i)}", about.value) for i, about in enumerate(self.metas)]

        with sending_result(values, lambda: where):
            return encode(self.treedef, self.metas)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """What is known of results that are all plain tensors and numbers.

    Attributes:
        layout: of the tensors.
        places, numbers: of the tensors among the leaves, and of the others.
        undeclared: the places of those tensors whose spec is not declared.
    """

    structure: trees.Structure
    treedef: Any
    metas: list[OutputMeta]
    layout: KnownLayout
    places: tuple[int, ...]
    numbers: tuple[int, ...]
    undeclared: tuple[int, ...]

    def passes_on(self, leaves: list[Any], cut: Sequence[Any]) -> bool:
        """Whether the body returned, without declaring a spec, an argument that has one of its own (and keeps it)."""
        return bool(cut) and not {*map(id, cut)}.isdisjoint([id(leaves[index]) for index in self.undeclared])

    def tensors(self, leaves: list[Any]) -> list[Any] | None:
        """The tensors among results of this structure; None if they must be described anew."""
        if not self.numbers:
            found = leaves
        elif all(map(self._is_known, self.numbers, [leaves[index] for index in self.numbers])):
            found = [leaves[index] for index in self.places]
        else:
            return None
        return found if self.layout.fits(found) else None

    def _is_known(self, index: int, value: Any) -> bool:
        before = self.metas[index].value
        return type(value) in TELLABLE if before is Told else same_value(value, before)

    def joined(self, leaves: list[Any], tensors: list[Any]) -> list[Any]:
        """All leaves, with these tensors for those among them."""
        if not self.numbers:
            return tensors
        rest = iter(tensors)
        return [leaf if about.spec is None else next(rest) for leaf, about in zip(leaves, self.metas, strict=True)]


class Results:
    """The results of one compiled call."""

    def __init__(self, session: RankSession, name: str, out_specs: Any):
        self._session, self._name, self._out_specs = session, name, out_specs
        self._raw: Any = None  # the last results' structure, with its Sharded nodes
        # The structure without those nodes, and the spec that each leaf declares, if any.
        self._outputs: tuple[Any, list[P | None]] = (None, [])
        self._before: tuple[Any, list[OutputMeta]] | None = None  # of the last call
        self._kind: _Kind | None = None  # made when two calls in a row gave alike results
        self._may_repeat = False  # the last results were new: if the next are alike, `_kind` is made
        self._scalars: list[int] = []  # indices of the numbers that should be equal on all ranks
        self._tells, self._told = False, list[int]()  # whether values are told with each call, and which

    def forget(self) -> None:
        """Describe the next results in full, even if they are like the last."""
        self._before = self._kind = None

    @property
    def known(self) -> bool:
        """Whether any call has given results."""
        return self._raw is not None

    def kept(self, result: Any, net: Net | None, check: Check, cut: Sequence[Any] = ()) -> Outcome:
        """A call's results as they are kept, with what other processes must know of them.

        Args:
            cut: arguments that came with a spec of their own; returned as they are, they keep it.
        """
        session, kind = self._session, self._kind
        if kind is not None and net is None:
            found = kind.structure.leaves(result)
            tensors = None if found is None or kind.passes_on(found, cut) else kind.tensors(found)
            if found is not None and tensors is not None:
                tensors = [leaf.detach() for leaf in tensors]
                session.lay_out(tensors, kind.layout)
                leaves = kind.joined(found, tensors)
                prints = self._prints(leaves, kind.metas, check)
                specs = list(kind.layout.specs)
                return Outcome(kind.treedef, leaves, kind.metas, tensors, specs, True, prints, kind.layout)
        leaves, raw = trees.flatten(result)
        types = set(map(type, leaves))
        if self._raw is None or raw != self._raw:
            self._outputs, self._raw = self._outputs_of(result, raw, leaves), raw
        treedef, declared = self._outputs
        own = {id(leaf): leaf._spmd_spec for leaf in cut}
        undeclared = (own.get(id(leaf), REPLICATED) for leaf in leaves)
        specs = [other if spec is None else spec for spec, other in zip(declared, undeclared, strict=True)]
        is_own = any(id(leaf) in own for leaf in leaves)
        if any(type(leaf) is Array for leaf in leaves):
            specs = [leaf.spec if type(leaf) is Array else spec for leaf, spec in zip(leaves, specs, strict=True)]
            leaves = [leaf.local if type(leaf) is Array else leaf for leaf in leaves]
        leaves, metas, unchanged = self._described(treedef, leaves, specs, net)
        session.lay_out(leaves)
        tensors, specs = tensors_among(leaves, metas), specs_of(metas)
        if not unchanged:
            self._before, self._kind = (treedef, metas), None
            self._scalars, self._told, self._may_repeat = scalars_among(metas), told_among(metas), True
        elif self._may_repeat:
            self._may_repeat = False
            plain = torch.Tensor in types and types <= {torch.Tensor, *TELLABLE} and not is_own
            self._kind = self._kind_of(result, treedef, metas, KnownLayout.of(tensors, specs)) if plain else None
        return Outcome(treedef, leaves, metas, tensors, specs, unchanged, self._prints(leaves, metas, check))

    def _kind_of(self, result: Any, treedef: Any, metas: list[OutputMeta], layout: KnownLayout | None) -> _Kind | None:
        structure = trees.Structure.of(result)
        if structure is None or layout is None:
            return None
        places = tuple(index for index, about in enumerate(metas) if about.spec is not None)
        numbers = tuple(index for index, about in enumerate(metas) if about.spec is None)
        undeclared = tuple(index for index, spec in enumerate(self._outputs[1]) if spec is None)
        return _Kind(structure, treedef, metas, layout, places, numbers, undeclared)

    def _prints(self, leaves: list[Any], metas: list[OutputMeta], check: Check) -> bytes:
        if not check:
            return b""
        if check >= Check.VALUES:
            prints = prints_of_all(leaves, metas, len(self._session.layout.names))
        else:
            prints = prints_of_scalars(leaves, self._scalars)
        return telling(prints, tuple(leaves[index] for index in self._told)) if self._told else prints

    def _described(
        self, treedef: Any, leaves: list[Any], specs: Sequence[P], net: Net | None
    ) -> tuple[list[Any], list[OutputMeta], bool]:
        """The leaves detached, the description of each, and whether all of these are as in the last call."""
        before = self._before
        unchanged = net is None and before is not None and before[0] == treedef
        known: Sequence[Any] = before[1] if unchanged and before is not None else [None] * len(leaves)
        metas: list[OutputMeta] = []
        tells = self._tells
        for index, (leaf, spec, last) in enumerate(zip(leaves, specs, known, strict=True)):
            leaf = as_tensor(leaf)
            if not isinstance(leaf, torch.Tensor):
                self._refuse_unfit(treedef, index, leaf)
                leaves[index] = leaf = plain_number(leaf)
                value = Told if self._tells and type(leaf) in TELLABLE else leaf
                about = OutputMeta(None, value=value)
                if last is not None and last.spec is None:
                    if same_value(value, last.value):
                        about = last
                    else:
                        tells = True
            else:
                leaf = arrived(leaf)
                varying = None if net is None else net.uncovered(leaf, spec.axes)
                if net is not None and net.averaged(leaf) & spec.axes:
                    self._refuse_averaged(treedef, index, spec)
                leaves[index] = leaf = leaf if is_frozen(leaf) else leaf.detach()
                if last is not None and last.dtype is leaf.dtype and last.shape == leaf.shape and last.spec == spec:
                    metas.append(last)
                    continue
                check_value(leaf, functools.partial(called, treedef, index, self._name), cut=bool(spec.entries))
                if spec.entries:
                    self._check_result(treedef, index, leaf, spec)
                other_spec = last is not None and last.spec is not None and last.spec != spec
                value = tensor_print(leaf) if other_spec else None  # compared in this call, whichever it is
                about = OutputMeta(spec, tuple(leaf.shape), leaf.dtype, value, varying=varying)
            unchanged = unchanged and about is last
            metas.append(about)
        self._tells = tells  # from the next call on, of all of them or none
        return leaves, metas, unchanged

    def _outputs_of(self, result: Any, raw: Any, leaves: list[Any]) -> tuple[Any, list[P | None]]:
        """The results' structure without its `Sharded` nodes, and the spec that each leaf declares."""
        # Rebuilt from the leaves themselves, not from placeholders, since a class may check what it is made of.
        nodes, outer = trees.flatten(trees.unflatten(raw, leaves), is_leaf=is_sharded)
        declared: list[P | None] = []
        for node in nodes:
            declared.extend([node.spec] * len(trees.leaves(node.local)) if is_sharded(node) else [None])
        local = [node.local if is_sharded(node) else node for node in nodes]
        treedef = trees.flatten(trees.unflatten(outer, local))[1]
        try:
            specs = trees.broadcast_to(self._out_specs, treedef, is_leaf=is_spec)
        except ValueError:
            raise SpecError(
                f"out_specs of {self._name} do not fit what it returned",
                got=f"{self._out_specs!r} for {trees.shown(result)}",
                expected="a prefix of the result's tree",
                remedy="give one P for all results, or one per result",
            ) from None
        return treedef, [spec if own is None else own for own, spec in zip(declared, specs, strict=True)]

    def _refuse_averaged(self, treedef: Any, index: int, spec: P) -> None:
        axes = ", ".join(map(repr, sorted(spec.axes)))
        raise SpecError(
            f"{called(treedef, index, self._name)} is aux of a gradient, which is averaged over the ranks, and "
            f"cannot be cut over {axes}",
            got=str(spec),
            where=self._session.where(),
            remedy=f"return Sharded(value, {spec}) as aux for what each rank has of its own",
        )

    def _refuse_unfit(self, treedef: Any, index: int, leaf: Any) -> None:
        """Refuse what is no value: functions, iterators and coroutines, and modules, which would arrive as copies."""
        if isinstance(leaf, types.FunctionType | types.MethodType | Iterator | types.CoroutineType | torch.nn.Module):
            raise SpecError(
                f"{called(treedef, index, self._name)} is no value",
                got=type(leaf).__name__,
                expected="tensors, numbers, strings or None, in dicts, lists, tuples or dataclasses",
                where=self._session.where(),
                remedy="return list(...) of what yields, a module's parameters instead of it, and call functions",
            )

    def _check_result(self, treedef: Any, index: int, leaf: torch.Tensor, spec: P) -> None:
        self._session.layout.check(spec, where=f"out_specs of {self._name}")
        if len(spec.entries) > leaf.dim():
            raise SpecError(
                f"{called(treedef, index, self._name)} has fewer dimensions than its spec",
                got=f"shape {tuple(leaf.shape)} with {spec}",
                where=self._session.where(),
                remedy="reshape it, or give it a shorter spec",
            )
