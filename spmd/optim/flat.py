"""Leaves laid end to end: where each one lies, and how many of them are viewed as one tensor.

Each leaf begins at a multiple of 64 elements. Invariant: each leaf gets the bits that torch would give it by itself,
wherever it lies. Torch may round the elements behind the last whole vector differently, so what is stepped as one
tensor ends with a leaf that is no whole number of vectors; behind other leaves it continues, over the padding.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ..kernels import torch_private
from ..kernels.reduction import ALIGNED
from ..mesh.strides import standard

# Elements. Smaller leaves that don't lie end to end are copied together: torch steps one tensor faster than many.
SMALL = 1 << 14
SMALL_ON_GPU = 1 << 22  # copies there take less than the launches that they save
VECTORS = 128  # bytes: torch's loops take two vectors at a time, and what remains one by one


@functools.lru_cache(maxsize=256)
def offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where leaves of these sizes begin, and where the last one ends with its padding.

    >>> offsets((3, 64, 65))
    (0, 64, 128, 256)
    """
    found = [0]
    for size in sizes:
        found.append(found[-1] - -size // ALIGNED * ALIGNED)
    return tuple(found)


def joined(sizes: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    """Copies of tensors of these sizes, laid end to end in one new flat tensor."""
    starts = offsets(tuple(sizes))
    flat = values[0].new_zeros(starts[-1])
    views = [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    torch_private.copy_each(views, [value.reshape(-1) for value in values])
    return flat


def divided(shapes: tuple[Sequence[int], ...], flat: Tensor) -> list[Tensor]:
    """Views of a flat tensor, of these shapes."""
    first = flat.storage_offset()
    return [flat.as_strided(shape, strides, first + start) for shape, strides, start in _layouts(shapes)]


@functools.lru_cache(maxsize=256)
def _layouts(shapes: tuple[Sequence[int], ...]) -> list[tuple[Sequence[int], tuple[int, ...], int]]:
    """Shape, strides and beginning of each.

    >>> _layouts(((2, 3), (4,)))
    [((2, 3), (3, 1), 0), ((4,), (1,), 64)]
    """
    found, start = [], 0
    for shape in shapes:
        found.append((shape, standard(shape), start))
        start += -(-math.prod(shape) // ALIGNED) * ALIGNED
    return found


class Run(NamedTuple):
    """Leaves laid end to end: where the first one begins, and one flat tensor of them for each column."""

    start: int
    columns: list[Tensor]


def runs(sizes: tuple[int, ...], columns: Sequence[Sequence[Tensor]], start: int, stop: int) -> Iterator[Run]:
    """All leaves from `start` to `stop`, multiples of 64, as flat tensors: views, or small leaves copied end to end.

    Args:
        columns: each has one tensor per leaf, all of one dtype: gradients, say, and parameters.
    """
    for begin, tensors in _together(sizes, columns, start, stop):
        end = begin + tensors[0].numel()
        first, last = max(start, begin), min(stop, end)
        if (first, last) == (begin, end):
            yield Run(begin, tensors)
        elif first < last:
            yield Run(first, [tensor[first - begin : last - begin] for tensor in tensors])


Spans = tuple[tuple[int, int], ...]
"""Parts of a flat tensor: where each begins and ends."""


@functools.lru_cache(maxsize=256)
def stretches(sizes: tuple[int, ...], width: int, start: int, stop: int) -> Spans:
    """The parts of a run that are stepped as one each: they end with the leaves that are no whole number of vectors.

    >>> stretches((32, 64, 65, 3), 4, 0, 259), stretches((32, 64, 65, 3), 4, 64, 128)
    (((0, 193), (256, 259)), ((0, 64),))

    Args:
        width: bytes of an element.
        start, stop: of the run; the parts are counted from its start.
    """
    found = [(max(begin, start) - start, min(end, stop) - start) for begin, end in _stretches(sizes, width)]
    return tuple((low, high) for low, high in found if low < high)


@functools.lru_cache(maxsize=256)
def _stretches(sizes: tuple[int, ...], width: int) -> list[tuple[int, int]]:
    found, begin = [], 0
    starts = offsets(sizes)
    for size, start, behind in zip(sizes, starts, starts[1:], strict=False):
        if size * width % VECTORS or behind == starts[-1]:
            found.append((begin, start + size))
            begin = behind
    return [(begin, end) for begin, end in found if begin < end]


def parts(flat: Tensor, spans: Spans) -> Sequence[Tensor]:
    """Views of parts of a flat tensor."""
    if len(spans) == 1:
        return [flat[slice(*spans[0])]]
    return flat.split_with_sizes(_and_between(spans, len(flat)))[::2]


@functools.lru_cache(maxsize=256)
def _and_between(spans: Spans, stop: int) -> list[int]:
    """The lengths of the parts, the first of which begins at 0, and of the gap behind each.

    >>> _and_between(((0, 3), (64, 69)), 70)
    [3, 61, 5, 1]
    """
    edges = [edge for span in spans for edge in span] + [stop]
    return [high - low for low, high in itertools.pairwise(edges)]


def _together(sizes: tuple[int, ...], columns: Sequence[Sequence[Tensor]], start: int, stop: int) -> Iterator[Run]:
    """Runs of leaves that lie end to end or are copied so. They may reach beyond `start` and `stop`."""
    starts = offsets(sizes)
    whole = [flat for column in columns if (flat := _whole(sizes, column)) is not None]
    if len(whole) == len(columns):
        yield Run(0, whole)
        return
    for first, last, shared in _grouped(sizes, starts, columns):
        begin, end, some = starts[first], starts[last] + sizes[last], slice(first, last + 1)
        if end <= start or stop <= begin:
            continue
        if first == last:
            yield Run(begin, [column[first].reshape(-1) for column in columns])
            continue
        shown = [
            _shown(column[first], end - begin) if lies_so else None
            for column, lies_so in zip(columns, shared, strict=True)
        ]
        if all(flat is not None for flat in shown) or all(size <= _small(columns) for size in sizes[some]):
            pairs = zip(shown, columns, strict=True)
            laid = [joined(sizes[some], column[some]) if flat is None else flat for flat, column in pairs]
            yield Run(begin, [flat[: end - begin] for flat in laid])  # without the last leaf's padding
            continue
        for index in range(first, last + 1):  # side by side by chance, in separate allocations
            yield Run(starts[index], [column[index].reshape(-1) for column in columns])


def _whole(sizes: tuple[int, ...], column: Sequence[Tensor]) -> Tensor | None:
    """All leaves as one, if they lie end to end, as they do once a step has made them."""
    first = column[0]
    if len(sizes) < 2 or 0 in sizes or type(first) is not Tensor or first.is_complex():
        return None
    starts, width, begin = offsets(sizes), first.element_size(), first.data_ptr()
    if list(map(Tensor.data_ptr, column)) != [begin + width * start for start in starts[:-1]]:
        return None
    return _shown(first, starts[-2] + sizes[-1]) if all(map(Tensor.is_contiguous, column)) else None


def _small(columns: Sequence[Sequence[Tensor]]) -> int:
    """Up to how many elements leaves that don't lie end to end are copied together."""
    return SMALL if columns[0][0].is_cpu else SMALL_ON_GPU


def _grouped(
    sizes: tuple[int, ...], starts: tuple[int, ...], columns: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[int, int, list[bool]]]:
    """For each run, its first and last leaf, and in which columns its leaves lie end to end."""
    views = [_origins(starts, column) for column in columns]
    keys = list(zip(*views, strict=True))
    groups: list[list[int]] = []
    few = _small(columns)
    lie_so = small = True  # all leaves of the last group
    for index, size in enumerate(sizes):
        if not size:
            continue
        is_next = bool(groups) and keys[index] == keys[groups[-1][-1]]
        if groups and ((lie_so and is_next) or (small and size <= few)):
            groups[-1].append(index)
            lie_so, small = lie_so and is_next, small and size <= few
        else:
            groups.append([index])
            lie_so, small = True, size <= few
    for group in groups:
        yield group[0], group[-1], [len({own[index] for index in group}) == 1 for own in views]


def _origins(starts: tuple[int, ...], column: Sequence[Tensor]) -> list[int]:
    """For each leaf, the address of the first one if all lie end to end; a number of its own if that is unknown."""
    width, complex_ones = column[0].element_size(), column[0].is_complex()
    anywhere = torch_private.is_fake(column[0]) or (complex_ones and any(leaf.is_conj() for leaf in column))
    return [
        -1 - index if anywhere or not leaf.is_contiguous() else leaf.data_ptr() - width * start
        for index, (leaf, start) in enumerate(zip(column, starts, strict=False))
    ]


def _shown(first: Tensor, count: int) -> Tensor | None:
    """A flat view of `count` elements from a tensor's first one on; None if its storage has fewer."""
    there = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    return first.as_strided((count,), (1,)) if count <= there else None
