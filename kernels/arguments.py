"""Checks of what a program passes to the library: arguments' names, functions, numbers, what collectives take."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from .callsite import shows_only_users
from .errors import MeshError, SpecError, message
from .flat import repeats

F = TypeVar("F", bound=Callable[..., Any])


def is_number(x: Any) -> bool:
    """Whether it is a real number; True and False don't count."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def is_whole(x: Any) -> bool:
    """Whether it is an integer; True and False don't count."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


_UNFINISHED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE


def check_function(what: str, f: Any, remedy: str) -> None:
    """Refuse what isn't a function, such as the result of one, and async functions and generators."""
    if type(f) is types.FunctionType and not f.__code__.co_flags & _UNFINISHED:  # the common case, at every step
        return
    if not callable(f):
        got = f"a tensor of shape {tuple(f.shape)}" if isinstance(f, torch.Tensor) else type(f).__name__
        raise SpecError(message(f"{what} takes a function", got=got, expected="a callable", remedy=f"write {remedy}"))
    called = (f, type(f).__call__)  # a function (maybe in a partial), or an object that can be called
    generates = any(map(inspect.isgeneratorfunction, called))
    if generates or any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        problem = f"{what} takes a function that has run when it returns"
        name = getattr(f, "__qualname__", type(f).__qualname__)
        got = f"{name}, which is {'a generator' if generates else 'async'}"
        raise SpecError(message(problem, got=got, remedy="write def, without async or yield, and return the results"))


def checked_path(what: str, path: Any, remedy: str) -> Path:
    """A directory's path, whole, with the user's own for `~`; refuses what is none."""
    if not isinstance(path, str | os.PathLike):
        raise SpecError(message(f"{what} got a bad path", got=f"a {type(path).__name__}", remedy=remedy))
    if not os.fspath(path):  # of which `Path` makes the current directory
        raise SpecError(message(f"{what} got an empty path", remedy='name a directory; the current one is "."'))
    return Path(path).expanduser().absolute()


def checked_rank(rank: Any, size: int) -> int:
    """A rank of a mesh of `size` ranks as a Python integer; refuses anything else."""
    if not is_whole(rank) or not 0 <= rank < size:
        raise MeshError(message("there is no such rank", got=repr(rank), expected=f"0 to {size - 1}"))
    return int(rank)


def checked_ranks(ranks: Any, size: int) -> list[int]:
    """A list of ranks, each as by `checked_rank`; refuses what isn't a list, and ranks that are named twice."""
    if not isinstance(ranks, Iterable) or isinstance(ranks, str):
        remedy = f"write ranks=[{ranks!r}]"
        raise MeshError(message("this is no list of ranks", got=f"ranks={ranks!r}", remedy=remedy))
    ranks = list(ranks)
    found = [checked_rank(rank, size) for rank in ranks]
    if len(set(found)) < len(found):
        raise MeshError(message("a rank is named twice", got=ranks, remedy="name each rank once"))
    return found


def check_rank(name: str, argument: str, rank: int, size: int) -> None:
    """Refuse a rank that is not in the group."""
    if (type(rank) is not int and not is_whole(rank)) or not 0 <= rank < size:
        raise SpecError(
            message(f'{name} got a bad "{argument}"', got=repr(rank), expected=f"a rank of the group, 0 to {size - 1}")
        )


def check_message(
    name: str, argument: str, rank: int, size: int, tensor: Any, tag: int = 0, *, written: bool = False
) -> None:
    """Refuse a bad tensor or tag of a message, and a peer that is not in the group."""
    check_tensor(name, "tensor", tensor, written=written)
    if type(tag) is not int and not is_whole(tag):
        raise SpecError(message(f'{name} got a bad "tag"', got=repr(tag), expected="a whole number"))
    check_rank(name, argument, rank, size)


def arrived(x: torch.Tensor) -> torch.Tensor:
    """A tensor itself; of what torch's functional collectives return, which may be under way, the result."""
    return x if type(x) is torch.Tensor or not hasattr(x, "trigger_wait") else x.trigger_wait()


def _wraps_others(x: torch.Tensor) -> bool:
    """Whether the values are those of tensors that it is made of, such as a `DTensor`."""
    return type(x) is not torch.Tensor and hasattr(x, "__tensor_flatten__") and x.layout is torch.strided


_INNER = "pass what is in it: from_dtensor(x) or x.to_local() of a DTensor, x.wait() of an AsyncCollectiveTensor"


def check_tensor(name: str, argument: str, x: Any, *, written: bool = False) -> None:
    """Refuse what has no dense bytes to communicate; to be `written`, a tensor needs memory for each element."""
    expected = "a dense tensor"
    if not isinstance(x, torch.Tensor):
        got, remedy = type(x).__name__, "make a tensor of it"
    elif x.is_meta:
        got, remedy = "a tensor on torch's meta device", "give it values"
    elif x.layout is not torch.strided:
        got, remedy = f"a tensor of layout {x.layout}", "move its indices and values by themselves"
    elif _wraps_others(x):
        got, remedy = type(x).__name__, _INNER
    elif written and repeats(x):
        got, expected = f"an expanded one, with strides {x.stride()}", "a tensor with memory for each element"
        remedy = "clone() it"
    else:
        return
    raise SpecError(message(f'{name} got a bad "{argument}"', got=got, expected=expected, remedy=remedy))


def check_value(x: torch.Tensor, called: Callable[[], str], *, cut: bool) -> None:
    """Refuse a tensor that can't travel to or from ranks: without values, or (`cut`) without rows that can be cut.

    Args:
        called: gives the tensor's name, for the message.
    """
    if x.is_meta:
        problem, got = "has no values", "a tensor on torch's meta device"
        remedy = "give it values, or pass its shape and dtype"
    elif x.is_nested and x.layout is torch.strided:
        problem, got = "can't be sent", "a nested tensor of torch's older kind"
        remedy = "make it with layout=torch.jagged, or pad it"
    elif _wraps_others(x):
        problem, got, remedy = "is no plain tensor", type(x).__name__, _INNER
    elif cut and x.layout is not torch.strided:
        problem, got = "can't be cut", f"a tensor of layout {x.layout}"
        remedy = (
            "leave it whole, P(), or pass what to_dense() gives, or torch.nested.to_padded_tensor() and the lengths"
        )
    else:
        return
    raise SpecError(message(f"{called()} {problem}", got=got, remedy=remedy))


def check_list(
    name: str,
    argument: str,
    tensors: list[torch.Tensor] | None,
    size: int,
    *,
    dtype: torch.dtype | None = None,
    wanted: bool = True,
    written: bool = False,
) -> list[torch.Tensor]:
    """A checked list with one tensor per rank, all of one dtype (None: that of the first); empty if not `wanted`."""
    if not wanted:
        return []
    if tensors is None or len(tensors) != size:
        got = "None" if tensors is None else f"{len(tensors)} tensors"
        raise SpecError(message(f'{name} got a bad "{argument}"', got=got, expected=f"{size} tensors, one per rank"))
    for index, tensor in enumerate(tensors):
        check_tensor(name, f"{argument}[{index}]", tensor, written=written)
        dtype = tensor.dtype if dtype is None else dtype
        if tensor.dtype != dtype:
            raise SpecError(
                message(f'{name} got a bad "{argument}"', got=f"{tensor.dtype} at {index}", expected=f"{dtype}")
            )
    return list(tensors)


# -- arguments under the names that torch and JAX give them ------------------------------------------------------------

_GROUPS = (
    "leave it out: reduce over an axis of the mesh, of which it may have several, or over ranks by mesh.comm(ranks=)"
)
_NO_NEED = "leave it out: "
_OF_COLLECTIVES = {
    "axis_name": "it is axis=",
    "axis_index_groups": _GROUPS,
    "group": _GROUPS,
    "op": "psum, pmean, pmax and pmin are functions of their own",
    "async_op": _NO_NEED + "collectives return their result; mesh.comm() has those that go on beside the program",
}
_DIM = {**_OF_COLLECTIVES, "axis": "a tensor's dimension is dim=, and axis is the mesh's"}
_SPECS = 'specs say how tensors are cut, in_specs=P("data"), out_specs=P("data")'
_OF_GRADIENTS = {
    "argnames": "it is argnums=, positions of arguments",
    "argnum": "it is argnums=",
    "axis_name": "it is axes=",
    "reduce_axes": "it is axes=",
    "holomorphic": _NO_NEED + "parameters may be complex",
    "allow_int": _NO_NEED + "integers get gradients of zeros",
    "create_graph": _NO_NEED + "a gradient within a gradient keeps its graph",
}
_STANDS = {  # by the function, and the name that others give it
    "Mesh": {
        "devices": 'ranks are processes: Mesh({"data": 4}) has four, one for each GPU with device="cuda"',
        **dict.fromkeys(
            ("axis_names", "mesh_dim_names", "mesh_shape", "shape"),
            'axes are a dict of names and sizes, Mesh({"data": 4, "model": 2})',
        ),
        "axis_types": _NO_NEED + "arrays are cut as their specs say",
        "device_type": "it is device=",
        "world_size": 'it is the product of the axes, Mesh({"data": 4})',
        "num_workers": 'the number of ranks is the product of the axes, Mesh({"data": 4})',
        "init_method": "spmd.initialize(rank, size, ...) is called first, where a launcher has not said",
    },
    "spmd": {
        "donate_argnums": 'it is donate=, the names of arguments, as in donate=("params", "opt_state")',
        "donate_argnames": "it is donate=",
        **dict.fromkeys(
            ("static_argnums", "static_argnames"), _NO_NEED + "arguments that are no tensors are passed as they are"
        ),
        **dict.fromkeys(("in_axes", "out_axes", "in_shardings", "out_shardings"), _SPECS),
        **dict.fromkeys(("axis_name", "axis_names"), _NO_NEED + "axes have the names that Mesh gave them"),
        **dict.fromkeys(("check_rep", "check_vma"), 'it is check=, "first", "always" or "never"'),
        "devices": "it is mesh=",
    },
    "data_parallel": {
        "axis_name": "it is axis=",
        "bucket_cap_mb": "it is bucket_mb=",
        "batch_argname": 'it is batch=, as in batch="data"',
        "batch_argnum": "it is batch=, the argument's name",
        "accumulate": "shards= runs the batch in so many parts, one after another",
        "find_unused_parameters": _NO_NEED + "parameters that are not used get gradients of zeros",
        "broadcast_buffers": "functional_with_buffers(model) returns buffers as values",
        "process_group": "it is axis=, an axis of the mesh",
        **dict.fromkeys(("device_ids", "output_device"), _NO_NEED + "each rank has its device from Mesh(device=)"),
        **dict.fromkeys(("gradient_as_bucket_view", "static_graph"), _NO_NEED + "that is so by itself"),
    },
    "grad": _OF_GRADIENTS,
    "value_and_grad": _OF_GRADIENTS,
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin", "ppermute"), _OF_COLLECTIVES),
    **dict.fromkeys(("axis_index", "axis_size", "barrier"), _OF_COLLECTIVES),
    "pbroadcast": {**_OF_COLLECTIVES, "src": "it is source=", "root": "it is source="},
    "all_gather": {**_DIM, "gather_dim": "it is dim="},
    "psum_scatter": {**_DIM, "scatter_dimension": "it is dim=", "scatter_dim": "it is dim="},
    "all_to_all": {**_OF_COLLECTIVES, "split_axis": "it is split_dim=", "concat_axis": "it is concat_dim="},
    "put": {
        **dict.fromkeys(("sharding", "specs", "in_specs", "device"), 'it is spec=, as in put(tree, P("data"))'),
        "placements": 'it is spec=, P("data") for Shard(0) along "data"',
    },
    "Loader": {
        "num_workers": "it is workers=, processes for each rank",
        "prefetch_factor": "it is prefetch=",
        "generator": "it is seed=, a number",
        "collate": "it is collate_fn=",
        "timeout": "it is one of the mesh, Mesh(timeout=)",
        "pin_memory": _NO_NEED + "each rank moves its batches to its device",
        "persistent_workers": _NO_NEED + "workers stay from epoch to epoch",
        "worker_init_fn": _NO_NEED + "the random numbers for a sample depend on seed=, the epoch and the sample alone",
        "multiprocessing_context": _NO_NEED + "workers are forked from a process that has only imported torch",
        **dict.fromkeys(("num_replicas", "rank"), _NO_NEED + "the mesh knows its ranks"),
        **dict.fromkeys(
            ("sampler", "batch_sampler"),
            "the order is a function of seed=, shuffle= and order=; choose samples by the dataset, as in "
            "torch.utils.data.Subset(dataset, ids)",
        ),
    },
    "Sampler": {
        **dict.fromkeys(("dataset", "num_samples"), "it is length=, as in Sampler(len(dataset), batch_size)"),
        **dict.fromkeys(("num_replicas", "rank"), _NO_NEED + "sampler.shard(epoch, step, rank, size) takes them"),
    },
}


class UnknownArgument(SpecError, TypeError):
    """A call with an argument that the function does not have; a TypeError, as Python's own."""


def names_checked(f: F) -> F:
    """Have a function or a class refuse what torch or JAX call its arguments, and say what to write.

    >>> @names_checked
    ... def psum(x, axis): ...
    >>> psum(1, axis_name="data")
    Traceback (most recent call last):
    spmd.kernels.arguments.UnknownArgument: psum has no argument axis_name (got 'data'): it is axis=
    """
    if isinstance(f, type):
        f.__init__ = shows_only_users(_checked(f.__init__, f.__name__))  # type: ignore[misc]
        return f
    return _checked(f, f.__name__)  # type: ignore[return-value]


def _checked(f: Callable, called: str) -> Callable:
    theirs = _STANDS[called]
    # The arguments of ours that they mean otherwise, with the number of positional ones that make them given twice.
    position = {name: at for at, name in enumerate(inspect.signature(f).parameters) if name in theirs}

    @functools.wraps(f)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not is_dynamo_compiling():
            for name in kwargs:
                if name in theirs and position.get(name, -1) < len(args):
                    got = repr(kwargs[name])
                    problem = (
                        f"{called} has no argument {name}" if name not in position else f"{called} got {name} twice"
                    )
                    raise UnknownArgument(message(problem, got=got[:60], remedy=theirs[name]))
        return f(*args, **kwargs)

    return checking
