"""What is known of torch's operators, whatever they are given: what they overwrite, what results depend on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ...kernels.torch_private import Argument, arguments, has_tag, names_of, operation_name

_SHAPES_ONLY = {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"}
_SHAPES_ONLY |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "sym_size", "sym_numel"}
_OVERWRITES = {"copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_", "set_"}
_OVERWRITES |= {"_foreach_copy_", "_foreach_zero_"}
_ADDS = {"addmm", "addmv", "baddbmm", "addr"}


class Operator(NamedTuple):
    """What is known of one.

    Attributes:
        overwrites: what it writes to keeps nothing of what was there.
        shapes_only: its result takes an input's shape, and nothing of its values.
        by_index: entries of its lists depend on those of the same index only.
        seeded: it draws random numbers.
        adds: it adds a product to its first input.
        sized_by_values: the values of its inputs say how large its result is.
    """

    name: str
    arguments: tuple[Argument, ...]
    overwrites: bool
    shapes_only: bool
    by_index: bool
    seeded: bool
    adds: bool
    sized_by_values: bool

    def is_index(self, argument: Argument) -> bool:
        """Whether an argument says which entries of another one to take, or is cut into parts that may do so."""
        return argument.name in ("index", "indices") or self.name.startswith("split")


class Operation(NamedTuple):
    """An operator with what it is given."""

    operator: Operator
    args: tuple
    kwargs: dict

    @property
    def name(self) -> str:
        return self.operator.name

    def given(self) -> dict[str, Any]:
        """The values of its arguments, by name."""
        args, kwargs = self.args, self.kwargs
        return {
            one.name: args[at] if at < len(args) else kwargs.get(one.name, one.default_value)
            for at, one in enumerate(self.operator.arguments)
        }


@functools.cache
def operator_of(func: Any) -> Operator:
    name, (_, overload) = operation_name(func), names_of(func)
    overwrites = name in _OVERWRITES or str(overload).endswith("out")
    by_index = name.startswith(("_foreach_", "_fused_"))
    seeded = has_tag(func, torch.Tag.nondeterministic_seeded)
    sized = has_tag(func, torch.Tag.dynamic_output_shape)
    return Operator(name, arguments(func), overwrites, name in _SHAPES_ONLY, by_index, seeded, name in _ADDS, sized)
