"""Results as the ranks tell of them, put together: do they agree, and what global values do they form?

Each rank says of every leaf a `Leaving`; `assemble` finds the global shapes, or the error that names the leaf and the
ranks that differ. The same in the driver and on launched ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..kernels.communicator import as_bytes
from ..kernels.errors import SpecError, message
from .failure import ranks_text
from .spec import Layout, P


class Leaving(NamedTuple):
    """A leaf of the results: what the other side must know of it.

    Attributes:
        spec: None for a value that is not a tensor.
        shape: of this rank's part.
        value: of what is no tensor.
        digest: of the bytes, where replicas are to be compared.
        whole: the global shape, where the rank knows it.
    """

    spec: P | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None
    digest: bytes | None = None
    whole: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """A leaf of the results as a whole: a value that is not a tensor (`spec` is None), or what an Array shows."""

    spec: P | None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None
    shapes: tuple[tuple[int, ...], ...] = ()
    hint: Any = dataclasses.field(init=False, compare=False)  # one object for all Arrays that are like it

    def __post_init__(self) -> None:
        object.__setattr__(self, "hint", (self.shape, self.dtype, self.spec))

    def meta(self) -> Any:
        """Shape, dtype and spec of a tensor."""
        return self.hint


Said = tuple[Any, list[Leaving]]  # the results' treedef, and one for each leaf


def assemble(
    layout: Layout, said: Mapping[int, Said], *, name: str, where: str, compare: bool = True
) -> tuple[Any, list[Result]]:
    """The results' treedef, and what each leaf is as a whole.

    Args:
        said: by rank.
        name, where: the program and the mesh, for messages.
        compare: refuse values that should agree and do not.

    Raises:
        SpecError: the ranks disagree.
    """
    treedef, first = said[0]
    for rank, (other, _) in said.items():
        if other != treedef:
            raise SpecError(
                message(
                    f"{name} returned different trees on rank 0 and rank {rank}",
                    got=f"{treedef} and {other}",
                    where=where,
                    remedy="return the same structure on every rank",
                )
            )
    results = []
    for index, leaf in enumerate(first):
        leaves = {rank: its[index] for rank, (_, its) in said.items()}
        what = functools.partial(_what, treedef, index, name)  # finding paths takes longer than all of this
        if any(one.spec != leaf.spec or one.dtype != leaf.dtype for one in leaves.values()):
            kinds = "; ".join(f"{ranks_text([rank])}: {_kind(one)}" for rank, one in leaves.items())
            raise SpecError(
                message(
                    f"{what()} differs in kind between ranks",
                    got=kinds,
                    where=where,
                    remedy="return the same kind of value on every rank",
                )
            )
        if compare:
            _check_replicas(layout, leaves, what, where)
        if leaf.spec is None:
            results.append(Result(None, value=leaf.value))
            continue
        shapes = tuple(leaves[rank].shape for rank in range(layout.size))
        _check_shapes(layout, shapes, leaf.spec, what, where)
        results.append(Result(leaf.spec, layout.global_shape(shapes, leaf.spec), leaf.dtype, shapes=shapes))
    return treedef, results


def _what(treedef: Any, index: int, name: str) -> str:
    return f"result {path_in(treedef, index)} of {name}"


def path_in(treedef: Any, index: int) -> str:
    """Where a leaf is in a tree, as `['w'][0]`."""
    return treedef.accessors()[index].codify("") or "(the whole of it)"


def digest(tensor: torch.Tensor) -> bytes:
    """A short hash of a tensor's bytes, shape and dtype."""
    state = hashlib.blake2b(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=16)
    state.update(as_bytes(tensor).cpu().numpy().data)
    return state.digest()


def _check_replicas(layout: Layout, leaves: dict[int, Leaving], what: Callable[[], str], where: str) -> None:
    """Refuse a result that should be the same on several ranks and is not."""
    variants: dict[int, list[list[int]]] = {}  # owner -> groups of ranks that agree
    for rank, leaf in leaves.items():
        groups = variants.setdefault(0 if leaf.spec is None else layout.owner(leaf.spec, rank), [])
        for group in groups:
            if _same(leaves[group[0]], leaf):
                group.append(rank)
                break
        else:
            groups.append([rank])
    for groups in variants.values():
        if len(groups) > 1:
            spec = leaves[0].spec
            axes = [axis for axis in layout.names if spec is None or axis not in spec.axes]
            remedy = f'psum or pmean it over {axes[0]!r}, or give it a spec such as out_specs=P("{axes[0]}")'
            raise SpecError(
                message(
                    f"{what()} should be the same on all ranks along {', '.join(axes)}, and is not",
                    got="; ".join(f"{ranks_text(ranks)}: {_show(leaves[ranks[0]])}" for ranks in groups),
                    where=where,
                    remedy=remedy if spec is not None else f"return a tensor, and {remedy}",
                )
            )


def alike(mine: list[Leaving], before: list[Leaving]) -> bool:
    """Whether a rank's results are of the same kinds as before, with the same values where they are no tensors."""
    return len(mine) == len(before) and all(
        a is b or ((a.spec, a.shape, a.dtype) == (b.spec, b.shape, b.dtype) and (a.spec is not None or _same(a, b)))
        for a, b in zip(mine, before, strict=True)
    )


def _same(a: Leaving, b: Leaving) -> bool:
    if a.spec is not None:
        return a.digest == b.digest
    if type(a.value) is not type(b.value):
        return False
    try:
        return bool(a.value == b.value or (a.value != a.value and b.value != b.value))
    except Exception:  # no truth value, or no comparison at all
        return pickle.dumps(a.value) == pickle.dumps(b.value)


def _show(leaf: Leaving) -> str:
    if leaf.spec is None:
        return repr(leaf.value)[:60]
    kind = _kind(leaf).partition(" ")[0]
    return f"{kind} with other bytes" if leaf.shape else "another number"


def _kind(leaf: Leaving) -> str:
    if leaf.spec is None:
        return type(leaf.value).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} {leaf.spec}"


def _check_shapes(
    layout: Layout, shapes: tuple[tuple[int, ...], ...], spec: P, what: Callable[[], str], where: str
) -> None:
    """Refuse shards that do not fit together: their sizes may differ only from block to block of a cut dimension."""
    if all(shape == shapes[0] for shape in shapes):
        return
    fits = all(len(shape) == len(shapes[0]) for shape in shapes)
    for dim in range(len(shapes[0]) if fits else 0):
        sizes: dict[int, int] = {}
        for rank, shape in enumerate(shapes):
            fits = fits and sizes.setdefault(layout.part(rank, spec.dim_axes(dim)), shape[dim]) == shape[dim]
    if not fits:
        raise SpecError(
            message(
                f"the shards of {what()} do not fit together",
                got="; ".join(f"rank {rank}: {list(shape)}" for rank, shape in enumerate(shapes)),
                expected=f"shapes that differ only where {spec} cuts",
                where=where,
                remedy="return shards of one global value, or declare another spec",
            )
        )
