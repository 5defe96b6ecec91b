"""What a differentiated function returns besides its value: floats are averaged like the value, the rest must agree."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.errors import SpecError, kind_text
from ..kernels.torch_private import without_torch_function
from ..mesh import trees
from ..mesh.failure import ranks_text
from ..mesh.put import as_tensor
from ..mesh.region import Region, planned_session
from ..mesh.replication.net import Net, active, differs_over
from ..mesh.replication.values import digest
from ._arguments import Argument, declared_axes, is_inexact
from ._mean_of import MeanOf
from ._plan import current_plan


@dataclasses.dataclass(slots=True)
class Auxiliary:
    """The leaves of aux.

    Attributes:
        leaves: tensors, and whatever else aux holds.
        over: for each leaf the axes to average it over (along the others it is sharded); None if all ranks must agree.
        numbers: which leaves were Python floats.
    """

    leaves: list[Any]
    treedef: Any
    over: list[tuple[str, ...] | None]
    numbers: list[bool]

    @staticmethod
    def of(aux: Any, over: tuple[str, ...]) -> Auxiliary:
        given, treedef = trees.flatten(aux)
        pairs = [number for number, leaf in enumerate(given) if isinstance(leaf, MeanOf)]
        if pairs:
            raise SpecError(
                "aux has a mean_of, which only the value of the function that is differentiated can be",
                got=f"aux{trees.paths(aux)[pairs[0]]}",
                remedy='return the means over samples that it is made of, as {"right": (right & mask).float().mean(), '
                '"counted": mask.float().mean()}, and divide one by the other afterwards',
            )
        numbers = [isinstance(leaf, float | np.floating) for leaf in given]
        leaves = [
            torch.tensor(float(leaf), dtype=torch.float64, device="cpu") if number else as_tensor(leaf)
            for leaf, number in zip(given, numbers, strict=True)
        ]
        axes: list[tuple[str, ...] | None] = []
        for leaf, declared in zip(leaves, declared_axes(aux), strict=True):
            differs = (differs_over(leaf) if declared is None else declared) or frozenset()
            if is_inexact(leaf) and leaf.layout is torch.strided:  # sparse ones (constants of a model) aren't averaged
                axes.append(tuple(name for name in over if name not in differs))
            else:
                axes.append(() if isinstance(leaf, Tensor) and differs & set(over) else None)
        return Auxiliary(leaves, treedef, axes, numbers)

    def tree(self, leaves: list[Any]) -> Any:
        """Aux rebuilt from the averaged leaves. With a net, a mean also notes over which axes its values differed."""
        net = active()
        if net is not None:
            for leaf, mean, axes in zip(self.leaves, leaves, self.over, strict=True):
                if axes and isinstance(mean, Tensor):
                    net.note_averaged(mean, net.of(leaf).axes & set(axes))
        back = [leaf.item() if number else leaf for leaf, number in zip(leaves, self.numbers, strict=True)]
        return trees.unflatten(self.treedef, back)

    def _paths(self) -> list[str]:
        return trees.paths(trees.unflatten(self.treedef, list(range(len(self.leaves)))))

    def check(self, region: Region | None, over: tuple[str, ...]) -> None:
        """Refuse values that must agree but differ between the ranks of the mean, and floats of different shapes."""
        if region is None or not over:
            return
        tokens = [
            token(leaf, axes) if axes is None or axes == over else b""
            for leaf, axes in zip(self.leaves, self.over, strict=True)
        ]
        if not any(tokens):
            return  # without asking for a communicator: a new one would wait until the other ranks open it
        self._check_types(region, over)
        comm = region.session.comm(over)
        if comm.size == 1:
            return
        if planned_session() is not None:  # there is no other rank to compare with
            self._note_agreement(over)
            return
        mine = hashlib.blake2b(repr((_text(self.treedef), tokens)).encode(), digest_size=16).digest()
        gathered = [torch.empty(16, dtype=torch.uint8, device="cpu") for _ in range(comm.size)]
        comm.all_gather(gathered, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        if all(bytes(other.numpy().tobytes()) == mine for other in gathered):
            self._note_agreement(over)
            return
        mine = json.dumps(
            [(token.hex(), shown(leaf)) for token, leaf in zip(tokens, self.leaves, strict=True)]
        ).encode()
        raise self._disagreement([json.loads(text) for text in comm.all_gather_bytes(mine)], comm.ranks, region)

    def check_parts(self, region: Region | None, arguments: Sequence[Argument] = ()) -> None:
        """Refuse to average a leaf over an axis that cuts parameters, if each rank has other elements of it there.

        Running statistics of channels that are cut, for example. Over an axis that cuts samples the mean is what one
        wants, and a single number may well be a mean over elements.

        Args:
            arguments: the differentiated leaves, for a step that is not `data_parallel`.
        """
        net = active()
        if net is None or region is None:
            return
        plan = current_plan()
        with net.pause(), without_torch_function():  # the batch of a step over virtual shards is `Tracked`
            trained = {item for argument in arguments for item in _origins(net, argument.leaf)}
            samples = {item for leaf in plan.batch for item in _origins(net, leaf)}
            for index, (leaf, axes) in enumerate(zip(self.leaves, self.over, strict=True)):
                for name, origin in _origins(net, leaf):
                    # In a train step any argument counts: along axes that don't split the batch, samples are the same.
                    others = plan.samples and name not in plan.samples and (name, origin) not in samples
                    cut = (name, origin) in trained or (others and origin.startswith("argument"))
                    if cut and axes and name in axes and leaf.numel() > 1:
                        raise self._averaged_parts(index, name, origin, region)

    def _averaged_parts(self, index: int, name: str, origin: str, region: Region) -> SpecError:
        return SpecError(
            f"aux{self._paths()[index]} would be averaged over {name!r}, where each rank has a part of its own: it "
            f"comes of {origin}, which is cut over {name!r}",
            got=shown(self.leaves[index]),
            where=region.session.where(),
            remedy=f'return Sharded(value, P("{name}")), or pmean it over {name!r} if you mean that',
        )

    def _check_types(self, region: Region, over: tuple[str, ...]) -> None:
        """With a net, refuse a non-float that was computed from values that differ: it may agree by chance."""
        net = active()
        if net is None:
            return
        with net.pause():
            differs = [
                axes is None and isinstance(leaf, Tensor) and bool(net.of(leaf).axes & set(over))
                for leaf, axes in zip(self.leaves, self.over, strict=True)
            ]
        if any(differs):
            path, leaf = self._paths()[differs.index(True)], self.leaves[differs.index(True)]
            whose, way = ("virtual shards", "") if region.batch.in_shards else ("ranks", "psum it first, ")
            raise SpecError(
                f"aux{path} may differ between {whose}, for what it is computed of, and cannot be averaged",
                got=shown(leaf),
                where=region.session.where(),
                remedy=f"{way}return its mean as a float, or wrap it in Sharded(value, spec)",
            )

    def _note_agreement(self, over: tuple[str, ...]) -> None:
        """Note that leaves which must agree don't vary along the axes of the mean; each call checks that they agree."""
        net = active()
        for leaf, axes in zip(self.leaves, self.over, strict=True):
            if net is not None and axes is None and isinstance(leaf, Tensor):
                net.note(leaf, net.of(leaf).without(over))

    def _disagreement(self, texts_of: list[list[tuple[str, str]]], ranks: tuple[int, ...], region: Region) -> SpecError:
        """The error for the first leaf that differs; `texts_of` has each rank's (token, text) for every leaf."""
        for index, path in enumerate(self._paths()):
            if any(len(leaves) != len(self.leaves) for leaves in texts_of):
                break
            sides: dict[str, list[int]] = {}
            for rank, leaves in zip(ranks, texts_of, strict=True):
                sides.setdefault(leaves[index][0], []).append(rank)
            texts = {leaves[index][0]: leaves[index][1] for leaves in texts_of}
            if len(sides) > 1:
                return SpecError(
                    f"aux{path} differs between ranks and cannot be averaged",
                    got="; ".join(f"{ranks_text(members)}: {texts[token]}" for token, members in sides.items()),
                    where=region.session.where(),
                    remedy="return a float of one shape, psum it first, or wrap it in Sharded(value, spec)",
                )
        return SpecError("aux has another structure on some ranks", where=region.session.where())


def _origins(net: Net, leaf: Any) -> list[tuple[str, str]]:
    """The axes along which a tensor may differ, each with the first cause."""
    return list(net.of(leaf).origins.items()) if isinstance(leaf, Tensor) else []


NO_AUX = Auxiliary([], trees.flatten(())[1], [], [])


@functools.lru_cache(maxsize=64)
def _text(treedef: Any) -> str:
    return str(treedef)


def token(leaf: Any, axes: tuple[str, ...] | None) -> bytes:
    if axes is not None:
        return repr((tuple(leaf.shape), leaf.dtype)).encode()
    if isinstance(leaf, Tensor):
        return digest(leaf)
    plain = leaf is None or isinstance(leaf, bool | int | complex | str | bytes | np.generic | torch.dtype)
    return repr(leaf).encode() if plain else type(leaf).__qualname__.encode()


def shown(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)[:60]
    if leaf.dim() == 0 and not is_inexact(leaf):
        return repr(leaf.item())
    return kind_text(leaf.dtype, leaf.shape)
