"""What JAX and torch call things that have other names here, or none: whoever asks for one is told what to write."""

from __future__ import annotations

_SPMD = "it is spmd(f, mesh=mesh, in_specs=P(...), out_specs=P(...))"
_DDP = (
    "write @spmd(mesh=mesh) above @data_parallel above a step with value_and_grad: docs/from_ddp.md has both, "
    "side by side"
)
_FSDP = "optimizer state is sharded by itself; parameters are replicated, or cut by P as the step says: docs/limits.md"
_MESH = "Mesh({'data': -1}) finds the ranks that a launcher has started, or starts them"
_RANKS = "mesh.rank and mesh.size; in a step axis_index('data') and axis_size('data')"
_MESSAGES = "mesh.comm() has messages and collectives that write to a tensor, within mesh.run"
_LOADER = "Loader(dataset, batch_size, mesh=mesh) deals samples to ranks"
_COMPILE = "torch.compile, around the loss: docs/compile.md"

INSTEAD = {
    **dict.fromkeys(("shard_map", "pmap", "pjit", "xmap"), _SPMD),
    "jit": f"{_COMPILE}; a function that runs on all ranks is spmd(f, mesh=mesh)",
    "compile": _COMPILE,
    "vmap": "torch.vmap, within a step",
    "lax": "psum, all_gather and the others are names of spmd itself",
    "jacrev": "torch.func.jacrev, within a step",
    "PartitionSpec": "it is P",
    "NamedSharding": "a mesh and a P: put(x, P('data'), mesh=mesh)",
    **dict.fromkeys(("device_put", "distribute_tensor"), "it is put(x, P('data'), mesh=mesh)"),
    "device_get": "it is fetch(tree)",
    "with_sharding_constraint": "out_specs=, or Sharded(x, P('data')) for a result of a step",
    **dict.fromkeys(("make_mesh", "init_device_mesh", "DeviceMesh"), "it is Mesh({'data': 2, 'model': 2})"),
    **dict.fromkeys(("devices", "device_count", "local_device_count"), _MESH),
    **dict.fromkeys(("process_index", "process_count", "rank", "get_rank", "world_size", "get_world_size"), _RANKS),
    **dict.fromkeys(("init_process_group", "destroy_process_group"), f"{_MESH}, and it closes by itself"),
    **dict.fromkeys(("DDP", "DistributedDataParallel"), _DDP),
    **dict.fromkeys(("FSDP", "FullyShardedDataParallel", "fully_shard"), _FSDP),
    **dict.fromkeys(("DataLoader", "DistributedSampler"), _LOADER),
    "all_reduce": f"psum, pmean, pmax and pmin return the result; {_MESSAGES}",
    "reduce_scatter": f"it is psum_scatter; {_MESSAGES}",
    "broadcast": f"it is pbroadcast(x, 'data', source); {_MESSAGES}",
    **dict.fromkeys(("send", "recv", "isend", "irecv", "gather", "scatter", "reduce"), _MESSAGES),
    "no_sync": "data_parallel(shards=V) with V larger than the number of ranks accumulates gradients",
    "clip_grad_norm_": "it is optimizer(..., clip=1.0)",
    "load": "it is restore(path)",
}
