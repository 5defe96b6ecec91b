"""What an optimizer works on: parameters with their gradients and state, and how each is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.errors import SpecError
from ..mesh.region import current
from ..mesh.spec import P, Sharded

State = dict[str, Any]  # of one parameter: {"exp_avg": tensor, ...}

FROM_TORCH = (  # of state that one of torch's optimizers has made
    "state of torch's optimizers has the parameters' numbers, and here it has their paths: "
    'opt_state["state"]["[\'0.weight\']"] = torchs["state"][0] (docs/how_to.md)'
)

# Optimizers whose step mixes the elements of a parameter.
REFUSED = {
    "Adafactor": "factors the moments of whole matrices",
    "LBFGS": "uses dot products of all parameters",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "takes sparse gradients, which cannot be cut flat",
}


def is_torchs(cls: type) -> bool:
    """Whether a class is one of torch's own optimizers."""
    return cls.__module__.startswith("torch.optim")


def refusal(cls: type) -> str | None:
    """Why a class, or that of torch's which it is made from, can't step parts of a parameter, if that is known."""
    return next((REFUSED[base.__name__] for base in cls.__mro__ if is_torchs(base) and base.__name__ in REFUSED), None)


def mixing(cls: type) -> str | None:
    """How a class of torch's is known to mix elements of one parameter; None for all others."""
    reason = refusal(cls)
    return None if reason == REFUSED["SparseAdam"] else reason


def is_elementwise(cls: type) -> bool:
    """Whether a class is known to treat every element alike: those of torch that are not in `REFUSED`."""
    return is_torchs(cls) and refusal(cls) is None


class Leaf(NamedTuple):
    """A parameter to be optimised; its path names its state, and `group` the options it is stepped with.

    `axes` and `grad_axes` are those over which it and its gradient are known to differ; None if that isn't known.
    """

    path: str
    param: Tensor
    grad: Tensor | None = None
    group: int = 0
    axes: frozenset[str] | None = None
    grad_axes: frozenset[str] | None = None


def layout_of(param: Tensor) -> P:
    """How a parameter in a region is cut, as it was passed in or marked."""
    spec = getattr(param, "_spmd_spec", None)
    return P(tuple(sorted(getattr(param, "_spmd_axes", ())))) if spec is None else spec


def declared(own: State, shape: Sequence[int], spec: P) -> State:
    """State as `Sharded` where it is laid out as the parameter is; a count of steps stays plain."""
    return {
        name: Sharded(value, spec) if isinstance(value, Tensor) and value.ndim and value.shape == shape else value
        for name, value in own.items()
    }


def declared_as(leaf: Leaf, own: State) -> State:
    """Declare the state of a cut parameter as cut, since a step's results otherwise count as replicated."""
    spec = layout_of(leaf.param)
    return declared(own, leaf.param.shape, spec) if spec.entries else own


def localized(own: State, param: Tensor, spec: P) -> State:
    """This rank's part of a cut parameter's state, whether it was given in parts or whole (made in the driver, say)."""
    local: State = {}
    region = current()
    for name, value in own.items():
        value = value.local if isinstance(value, Sharded) else value
        if region is not None and isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
            value = region.session.layout.cut(value, spec, region.session.rank)
        local[name] = value
    return local


def refuse_cut(cls: type, reason: str, params: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that are cut, with their paths: a step that mixes a parameter's elements needs all of them."""
    region = current()
    if region is None:
        return
    sizes = region.session.layout.axes
    for path, param in params:
        spec = layout_of(param)
        if any(sizes[name] > 1 for name in spec.axes):
            raise SpecError(
                f"{cls.__name__} {reason}, and each rank has only a part of params{path}",
                got=f"{list(param.shape)} of {spec}",
                where=region.session.where(),
                remedy="all_gather the parameter and its gradient first, or take an optimizer that treats every "
                "element alike, such as AdamW",
            )


def refuse_leaf(cls: str, make: Callable[[list[Tensor]], Any], leaves: Sequence[Leaf]) -> None:
    """Name the parameter that a class does not take, if it takes any: Muon, say, has matrices alone.

    Args:
        make: makes an optimizer of the class for some parameters.
    """
    for leaf in leaves:
        try:
            make([leaf.param.detach()])
        except (ValueError, TypeError, RuntimeError) as error:
            problem = f"{cls} does not take params{leaf.path}: {error}"
            remedy = "step the parameters that it takes, in a dict of their own, and the others by another optimizer"
            raise SpecError(problem, got=f"{list(leaf.param.shape)}", remedy=remedy) from error


def refuse_step(cls: type, error: Exception, stepped: Iterable[Any]) -> None:
    """Say what is wrong if an optimizer of torch's fails on another one's state, or one on gradients of another kind.

    Args:
        stepped: what it was lent for each parameter, `blocks.Lent`.
    """
    name = cls.__name__
    is_key = is_torchs(cls) and isinstance(error, KeyError)
    if is_key and all(one.state and error.args[0] not in one.state for one in stepped):
        raise SpecError(
            f"{name} finds no {error.args[0]!r} in opt_state, which another optimizer has made",
            got=f"{[*next(iter(stepped)).state]} for each parameter",
            remedy="restore with the class and options of the run that was saved, or begin with opt.init(params)",
        ) from None
    if str(error).endswith("consider Adam instead"):  # that of `SparseAdam`, or of a class made from it
        raise SpecError(
            f"{name} takes sparse gradients, and value_and_grad gives dense ones, of all layers",
            got=str(error),
            remedy=f"for {name} keep the rows that are not zero, grads[name].to_sparse(1); torch.optim.Adam "
            "steps all rows",
        ) from None


def refuse_torchs(leaves: Sequence[Leaf], state: Mapping[Any, State]) -> None:
    """Refuse state by numbers, as torch's `state_dict` has it, or by names of parameters instead of paths."""
    paths = {leaf.path for leaf in leaves}
    names = {path[2:-2] for path in paths} - paths
    for key in state:
        if not isinstance(key, str) or key in names:
            problem = "opt_state has something else than paths of parameters"
            got, expected = f"opt_state['state'][{key!r}]", f"some of {sorted(paths)[:5]}"
            raise SpecError(problem, got=got, expected=expected, remedy=FROM_TORCH)
