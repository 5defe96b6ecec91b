"""Checks of what a collective is called with."""

from __future__ import annotations

import torch

from .errors import SpecError, message


def check_rank(name: str, argument: str, rank: int, size: int) -> None:
    """Refuse a rank that is not of the group."""
    if not 0 <= rank < size:
        raise SpecError(
            message(f'{name} got a bad "{argument}"', got=rank, expected=f"a rank of the group, 0 to {size - 1}")
        )


def check_list(
    name: str,
    argument: str,
    tensors: list[torch.Tensor] | None,
    size: int,
    *,
    dtype: torch.dtype | None = None,
    wanted: bool = True,
) -> list[torch.Tensor]:
    """A list of a tensor for each rank, of one dtype; empty where it is not wanted."""
    if not wanted:
        return []
    if tensors is None or len(tensors) != size:
        got = "None" if tensors is None else f"{len(tensors)} tensors"
        raise SpecError(message(f'{name} got a bad "{argument}"', got=got, expected=f"{size} tensors, one per rank"))
    for index, tensor in enumerate(tensors if dtype is not None else ()):
        if tensor.dtype != dtype:
            raise SpecError(
                message(f'{name} got a bad "{argument}"', got=f"{tensor.dtype} at {index}", expected=f"{dtype}")
            )
    return list(tensors)
