"""Arguments and attributes under the names that torch and JAX give them: asked for, each says what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .errors import SpecError

_GROUPS = (
    "leave it out: make a mesh with one more axis, as Mesh({'data': 2, 'group': 2}), and reduce over that one; "
    "mesh.comm(ranks=) has any ranks, but its messages bring no gradients"
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
_STANDS: dict[str, dict[str, str]] = {  # by the function, and the name that others give it
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
    "initialize": {
        **dict.fromkeys(("world_size", "num_processes"), "it is size="),
        "process_id": "it is rank=",
        "coordinator_address": 'it is init_method="tcp://host:port"',
        "backend": "it is one of the mesh, Mesh(backend=)",
    },
    "save": {
        **dict.fromkeys(
            ("overwrite", "exist_ok"), _NO_NEED + "each checkpoint is a folder of its own; keep= says how many stay"
        ),
        "async_save": "it is background=",
    },
    "restore": {
        **dict.fromkeys(
            ("map_location", "device"), "it is mesh=, whose ranks get the tensors; without it they are on the CPU"
        ),
        "strict": "dicts in like= may have fewer entries than were saved",
        "weights_only": _NO_NEED + "checkpoints never run code",
        **dict.fromkeys(("step", "index"), "pass the folder of that checkpoint, as path/step-00000003"),
    },
    "Sampler": {
        **dict.fromkeys(("dataset", "num_samples"), "it is length=, as in Sampler(len(dataset), batch_size)"),
        **dict.fromkeys(("num_replicas", "rank"), _NO_NEED + "sampler.shard(epoch, step, rank, size) takes them"),
    },
}


_LOCAL = ".local is this rank's part, on a rank, and .shards() are those of all ranks"
OF_ARRAYS = {
    **dict.fromkeys(("sharding", "placements"), ".spec says how it is cut, and .mesh over which ranks"),
    **dict.fromkeys(("addressable_shards", "global_shards", "addressable_data", "to_local"), _LOCAL),
    "device_mesh": "mesh.device_mesh, on a rank, is torch's",
    "block_until_ready": ".full() waits for the value, and gives it",
    "redistribute": "put(x, P(...), mesh=mesh) cuts it in another way",
}
OF_MESHES = {
    **dict.fromkeys(
        ("shape", "axis_names", "mesh_dim_names", "axis_sizes", "ndim"),
        'mesh.axes is a dict of names and sizes, {"data": 4, "model": 2}',
    ),
    **dict.fromkeys(
        ("devices", "device_ids", "local_devices", "ranks"),
        "ranks are numbers from 0 to mesh.size - 1, and mesh.coords(rank) says where each is",
    ),
    **dict.fromkeys(("world_size", "num_devices", "get_world_size"), "it is mesh.size"),
    **dict.fromkeys(("get_rank", "get_local_rank", "process_index"), "it is mesh.rank; in a step axis_index('data')"),
    "device_type": "it is mesh.device",
    "get_coordinate": "it is mesh.coords(), on a rank",
    "get_group": "mesh.comm('data') is the communicator along an axis; mesh.device_mesh, on a rank, has torch's groups",
    **dict.fromkeys(("barrier", "all_reduce", "broadcast"), "psum and others, in a step; mesh.comm(), in mesh.run"),
    "shutdown": "it is mesh.close()",
    "map": "it is mesh.run(f, *args), on every rank",
}


class UnknownArgument(SpecError, TypeError):
    """A call with an argument that the function does not have; a TypeError, as Python's own."""


def refuse_names(f: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise an error for the first argument of a call that has a name of torch's or JAX's, if there is one.

    Args:
        f: a function, or the `__init__` of a class, that could not be called in this way.
    """
    called = f.__qualname__.removesuffix(".__init__")
    theirs = _STANDS.get(called, {})
    # Some name an argument of ours that they mean otherwise; it is theirs if it was given twice.
    position = {name: at for at, name in enumerate(inspect.signature(f).parameters) if name in theirs}
    for name, got in kwargs.items():
        if name in theirs and position.get(name, -1) < len(args):
            problem = f"{called} has no argument {name}" if name not in position else f"{called} got {name} twice"
            raise UnknownArgument(problem, got=repr(got)[:60], remedy=theirs[name])
