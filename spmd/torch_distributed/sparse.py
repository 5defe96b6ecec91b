"""Sums of sparse tensors: every rank gathers the entries of all, and each may have another number of them."""

from __future__ import annotations

import torch

from ..kernels.call import labelled
from ..kernels.communicator import Communicator
from ..kernels.errors import SpecError


def all_reduce(comm: Communicator, tensor: torch.Tensor, op: str) -> list[object]:
    """Overwrite a sparse tensor with the sum of all ranks', in rank order; nothing is left to wait for."""
    if op != "sum" or tensor.layout is not torch.sparse_coo:
        raise SpecError(
            "only sums of sparse COO tensors are reduced",
            got=f"{op} of {tensor.layout}",
            remedy="use to_dense() or to_sparse_coo()",
        )
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(comm.size)]
    with labelled(f"of entries of a sparse {list(mine.shape)}, {mine.sparse_dim()} dims of it sparse"):
        comm.all_gather(counts, torch.tensor([values.shape[0]], device="cpu"))
    numbers = [int(count) for count in counts]
    all_indices = [indices.new_empty((indices.shape[0], number)) for number in numbers]
    all_values = [values.new_empty((number, *values.shape[1:])) for number in numbers]
    comm.all_gather(all_indices, indices)
    comm.all_gather(all_values, values)
    joined = torch.cat(all_indices, dim=1), torch.cat(all_values)
    whole = torch.sparse_coo_tensor(*joined, mine.shape, device=mine.device, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(whole.coalesce())
    return []
