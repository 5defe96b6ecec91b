"""Results of remote calls as arguments of regions: every rank fetches them from the rank that has them."""

from __future__ import annotations

from typing import Any

from .. import trees
from ..put import as_tensor
from ..rank.session import RankSession
from ..readers.asking import Reader
from ..readers.filled import fill
from ..replication.agreement import Remedies
from ..replication.reports import OutputMeta
from ..spec import P
from .handle import named
from .reference import Ref

_REMEDIES = Remedies(shapes="return tensors of the same shapes")


def on_ranks(mesh: Any, tree: Any) -> Any:
    """The tree with each Ref replaced by values that all ranks have; raises what a Ref's call has raised."""
    return trees.map(lambda leaf: _on_ranks(mesh, leaf) if isinstance(leaf, Ref) else leaf, tree)


def _on_ranks(mesh: Any, ref: Ref) -> Any:
    name = named(ref, mesh.driver.node.caller)
    error = ref.exception()  # waits until it is done, and fetches nothing
    if error is not None:
        return ref.get()
    (value,) = fill(mesh, f"the result of {ref.label}", Reader(_read), [((name,), None)], remedies=_REMEDIES)
    return value()


def _read(session: RankSession, name: tuple) -> tuple[Any, list[Any], list[OutputMeta]]:
    leaves, treedef = trees.flatten(session.node.caller.object_of(name))
    metas = []
    for index, leaf in enumerate(leaves):
        leaf = leaves[index] = as_tensor(leaf)
        if hasattr(leaf, "detach"):
            leaf = leaves[index] = session.on_device(leaf.detach())
            metas.append(OutputMeta(P(), tuple(leaf.shape), leaf.dtype))
        else:
            metas.append(OutputMeta(None, value=leaf))
    return treedef, leaves, metas
