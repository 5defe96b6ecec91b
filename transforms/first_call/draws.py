"""What a function draws at random, and does besides: recorded, and given to the same samples when it runs again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...kernels.torch_private import DispatchMode, operation_name
from ...mesh.replication.following import is_random
from ...mesh.replication.operators import Operation, operator_of


@dataclasses.dataclass(slots=True)
class Seen:
    """What a function did.

    Attributes:
        drawn: the results of random operations, in order.
        by_sample: for each of these the dimensions with an entry for each sample, known once samples were left out.
        normalises: whether a batch norm used the statistics of the batch.
        draws_elsewhere: whether it also drew from NumPy's or Python's generator, or took a `random_key`.
        is_coarse: whether anything was computed in fewer than 32 bits, or on a GPU, which may multiply in fewer.
    """

    drawn: list[Tensor] = dataclasses.field(default_factory=list)
    by_sample: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    normalises: bool = False
    draws_elsewhere: bool = False
    is_coarse: bool = False

    def may_order(self, count: int) -> bool:
        """Whether what was drawn may be a random order of `count` samples: integers, or one number for each sample."""
        whole_numbers = (not one.is_floating_point() and one.dtype is not torch.bool for one in self.drawn)
        return self.draws_elsewhere or any(whole_numbers) or any(one.numel() == count for one in self.drawn)


class Draws(DispatchMode):
    """Notes the states of generators that the user passes to random operations, to restore them."""

    is_over = True  # whether everything recorded was drawn again

    def __init__(self) -> None:
        super().__init__()
        self._states: list[tuple[torch.Generator, Tensor]] = []

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            self._states.append((generator, generator.get_state()))
        return func(*args, **kwargs)

    def restore_generators(self) -> None:
        for generator, state in reversed(self._states):
            generator.set_state(state)


class Records(Draws):
    """Records what a function does, in `Seen`."""

    def __init__(self, seen: Seen):
        super().__init__()
        self._seen = seen

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().operation(func, args, kwargs)
        seen, drawn = self._seen, is_random(func, args, kwargs)
        seen.normalises = seen.normalises or _normalises(func, args, kwargs)
        for one in _tensors_in(result):
            seen.is_coarse = seen.is_coarse or (one.is_floating_point() and (one.dtype.itemsize < 4 or one.is_cuda))
        if drawn:
            seen.drawn += [one.clone() for one in _drawn_by(func, args, kwargs, result)]
        return result


def _tensors_in(result: Any) -> list[Tensor]:
    return [one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, Tensor)]


def _drawn_by(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The results of a random operation, and what it has written to besides, which its gradient may need."""
    operator = operator_of(func)
    given = Operation(operator, args, kwargs).given()
    written = [given[argument.name] for argument in operator.arguments if argument.is_written]
    results = _tensors_in(result)
    return results + [one for one in written if isinstance(one, Tensor) and all(one is not its for its in results)]


def _normalises(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is a batch norm in training."""
    if "batch_norm" not in operation_name(func):
        return False
    if args[0].shape[0] == 1:  # an instance norm, to which samples are channels
        return False
    given = Operation(operator_of(func), args, kwargs).given()
    return bool(given.get("training", "no_training" not in operation_name(func)))


class Replays(Draws):
    """Gives samples the random numbers that were drawn for them before.

    Args:
        seen: what was drawn when every sample came once.
        samples: the indexes of the present samples.
        count: how many samples there were then.
    """

    def __init__(self, seen: Seen, samples: Tensor, count: int):
        super().__init__()
        self._seen, self._samples, self._count, self._next = seen, samples, count, 0

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        return self._next == len(self._seen.drawn)

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = super().operation(func, args, kwargs)
        if is_random(func, args, kwargs):
            for one in _drawn_by(func, args, kwargs, result):
                one.copy_(self._drawn(list(one.shape)))
        return result

    def _drawn(self, shape: list[int]) -> Tensor:
        seen, index = self._seen, self._next
        self._next += 1
        drawn = seen.drawn[index]
        sizes = list(zip(shape, drawn.shape, strict=True))
        rows = [dim for dim, (now, once) in enumerate(sizes) if now != once]
        if len(self._samples) == self._count:  # all, in another order
            rows = seen.by_sample[index]
        elif len(self._samples) < self._count:
            seen.by_sample[index] = rows
        for dim in rows:
            now, once = sizes[dim]
            if once == self._count:
                drawn = drawn.index_select(dim, self._samples.to(drawn.device))
            else:
                drawn = drawn.repeat([now // once if at == dim else 1 for at in range(drawn.dim())])
        return drawn
