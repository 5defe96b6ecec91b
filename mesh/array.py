"""`Array`: a value on a mesh. The data stays on the ranks; an `Array` knows its shape, its spec and how to fetch it.

The driver and launched ranks use the same type. Where the data lies is the business of its *source*, one object for
all results of a call: `rank.local_values` holds this rank's shards, `driver.values` holds names for them.
Invariant: a value is freed with its last `Array`, whether or not other results of the same call are still in use.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from ..kernels.argument_names import OF_ARRAYS
from ..kernels.callsite import public
from ..kernels.errors import MeshError, SpecError, dtype_name, no_attribute
from .batch import Deal
from .display import drawing
from .spec import RAGGED, P

_OF_MEMORY = ("data_ptr", "storage", "untyped_storage")  # would be those of a tensor that is gone at once
MOST_SHOWN = 16  # elements; a larger value is printed without its numbers

WAY = "differentiate in an @spmd function: value_and_grad(loss_fn)(params, batch)"
FREEZE = "model.requires_grad_(False) before functional(model); for a while, None in its place among grads"


def refuse_gradients(problem: str, remedy: str = WAY) -> NoReturn:
    """Refuse what needs a value's autograd history: no Array has one."""
    raise SpecError(f"{problem}, whose gradients are not recorded", remedy=remedy)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Meta:
    """What an Array shows: its global shape, dtype and spec. Made by `meta`, so that equal ones are one object.

    Attributes:
        shards: the shapes of all ranks' shards; None if they are cut as by `Layout.slices`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    shards: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, repr=False)


def meta(shape: tuple[int, ...], dtype: torch.dtype, spec: P, shards: Any = None) -> Meta:
    return _made(shape, dtype, spec, shards)  # always with all four, or there would be two for the same values


_made = functools.lru_cache(maxsize=1 << 16)(Meta)


class Source(Protocol):
    """Where the results of a call are found, each by its index.

    Attributes:
        hints: shape, dtype and spec of each, without waiting: until the call is over, those of the last such call.
        sure: whether the hints are right, and not only likely.
        deal: how a `Loader` dealt them.
        donated: the index of each value that was donated -> the name of the function that got its memory.

    `full` gives the whole values of these indexes, which are cut alike.
    """

    hints: Sequence[Meta]
    sure: bool
    deal: Deal | None
    donated: dict[int, str]

    def meta(self, index: int) -> Meta: ...
    def shards(self, index: int) -> list[torch.Tensor]: ...
    def full(self, indexes: Sequence[int]) -> list[torch.Tensor]: ...
    def local(self, index: int) -> torch.Tensor: ...


def _operators(*names: str) -> Any:
    """Python's operators of these names, as methods that run torch's on the ranks."""

    def method(name: str) -> Any:
        def operator(self: Array, *others: Any) -> Any:
            return _operating().operate(getattr(torch.Tensor, name), (self, *others), {})

        operator.__name__ = name
        return public(operator)

    return [method(f"__{name}__") for name in names]


class Array:
    """A global value whose shards live on the ranks of a mesh.

    Attributes:
        mesh: the mesh that holds it.
        shape: the global shape. In a padded batch of a `Loader`, -1 stands for a size that differs between ranks, or,
            on a launched rank, for rows more or fewer than samples (from dimension 1 on it gives its own sizes).
        dtype: as in torch.
        spec: how it is cut.
        local: this rank's shard (only on a rank); clone it before you write to it, it is the value's own memory.

    Reading the values (`float`, `item`, `np.asarray`, `full`, `shards`) waits for the call that makes them, and raises
    its error if it failed.
    """

    # Without a `__del__`: Python ignores what that raises, and so a Ctrl-C that came then would be lost.
    __slots__ = ("__weakref__", "_index", "_shard", "_source", "mesh")
    __array_priority__ = 1000  # as in torch.Tensor: NumPy's `array + x` leaves the sum to `x`

    def __init__(self, mesh: Any, source: Source, index: int, shard: torch.Tensor | None = None):
        self.mesh, self._source, self._index = mesh, source, index
        self._shard = shard  # this rank's shard, on a rank: freed with this Array

    def check_readable(self) -> None:
        """Refuse a value that was donated."""
        if self.donated_to is not None:
            raise SpecError(
                f"this Array was donated to {self.donated_to} and its memory reused",
                remedy="use the value that the call returned, or leave the argument out of donate=; if that call "
                "has failed, restore a checkpoint",
            )

    @property
    def donated_to(self) -> str | None:
        """The name of the function that it was donated to, or None."""
        return self._source.donated.get(self._index)

    def hint(self) -> Meta:
        """Shape, dtype and spec, without waiting: until the call is over, those of the last such call."""
        return self._source.hints[self._index]

    @property
    def deal(self) -> Deal | None:
        """How a `Loader` dealt it, if it is part of a batch."""
        return self._source.deal

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._source.meta(self._index).shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        return self._source.meta(self._index).dtype

    @property
    def spec(self) -> P:
        return self._source.meta(self._index).spec

    @property
    @public
    def local(self) -> torch.Tensor:
        self.check_readable()
        return self._source.local(self._index)

    def shards(self) -> list[torch.Tensor]:
        """Each rank's local tensor, in rank order (on launched ranks a collective call)."""
        self.check_readable()
        return self._source.shards(self._index)

    def full(self) -> torch.Tensor:
        """The global value as one torch tensor (on launched ranks a collective call, if it is sharded)."""
        self.check_readable()
        return self._source.full([self._index])[0]

    def to_dtensor(self) -> Any:
        """The value as a torch `DTensor` on `mesh.device_mesh`, on a rank; it shares memory with `local`.

        Raises:
            MeshError: in the driver, which is no rank.
            SpecError: it is cut in a way that torch has no placements for.
        """
        return importlib.import_module("spmd.torch_distributed.dtensor").to_dtensor(self)  # by name: it stands above

    def item(self) -> float | int | bool | complex:
        """The only element, as a Python number."""
        return self.full().item()

    def __float__(self) -> float:
        return float(self.full())

    def __int__(self) -> int:
        return int(self.full())

    def __index__(self) -> int:
        return operator.index(self.full())

    def __bool__(self) -> bool:
        return bool(self.full())

    def __complex__(self) -> complex:
        return complex(self.full())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d Array: its number is .item(), and torch.stack joins several") from None
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = self.full()
        value = value.float() if value.dtype is torch.bfloat16 else value  # numpy has no bfloat16
        return np.asarray(value.numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """What `torch.tensor` and `torch.as_tensor` ask for: the whole value, as `full()` gives it."""
        return self.full().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device="cpu").__dlpack_device__()  # where `full()` is

    def tolist(self) -> Any:
        """The values as numbers, in nested lists."""
        return self.full().tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """The global value as a NumPy array, a copy; `force`, which torch's has, changes nothing."""
        return np.asarray(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.shape or (spec and self.numel() == 1) else str(self)

    # -- torch's functions, which run on the ranks ---------------------------------------------------------------------

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """NumPy's functions, which run here on copies of the whole values, and can't write to them."""
        return func(*map(_as_numpy, args), **{name: _as_numpy(value) for name, value in kwargs.items()})

    @classmethod
    @public
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _operated(func, *args, **(kwargs or {}))

    @property
    def requires_grad(self) -> bool:
        """False: gradients are taken in @spmd functions."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        _operated(torch.Tensor.requires_grad_, self, wanted)

    @public
    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in (attributes := _operating().ATTRIBUTES):
            return attributes[name](self)
        method = None if name.startswith("_") or name in _OF_MEMORY else getattr(torch.Tensor, name, None)
        if method is None or not callable(method):
            way = WAY if name in ("grad", "grad_fn") else OF_ARRAYS.get(name, ".full() is the whole value as a tensor")
            raise no_attribute(self, name, {name: way}) from None
        return functools.partial(_operated, method, self)

    __add__, __radd__, __sub__, __rsub__, __mul__, __rmul__ = _operators("add", "radd", "sub", "rsub", "mul", "rmul")
    __truediv__, __rtruediv__, __floordiv__, __rfloordiv__ = _operators("truediv", "rtruediv", "floordiv", "rfloordiv")
    __mod__, __rmod__, __pow__, __rpow__, __reversed__ = _operators("mod", "rmod", "pow", "rpow", "reversed")
    __matmul__, __rmatmul__, __and__, __or__, __xor__ = _operators("matmul", "rmatmul", "and", "or", "xor")
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__  # which take their operands in any order
    __neg__, __pos__, __abs__, __invert__, __contains__ = _operators("neg", "pos", "abs", "invert", "contains")
    __lshift__, __rlshift__, __rshift__, __rrshift__ = _operators("lshift", "rlshift", "rshift", "rrshift")
    __eq__, __ne__, __lt__, __le__, __gt__, __ge__ = _operators("eq", "ne", "lt", "le", "gt", "ge")

    def __getitem__(self, index: Any) -> Any:
        return _operated(torch.Tensor.__getitem__, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _operated(torch.Tensor.__setitem__, self, index, value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    __hash__ = object.__hash__

    def __copy__(self, memo: Any = None) -> Array:
        return self  # its value never changes

    __deepcopy__ = __copy__

    def __reduce__(self) -> Any:
        raise MeshError("an Array cannot be pickled: its data is on a mesh", remedy="pickle fetch(tree)")

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>" if self.donated_to else drawing.html([self.grid()], self.mesh.size)

    def __str__(self) -> str:
        # On launched ranks, fetching a sharded value is a collective call, which printing on one rank must not make.
        whole = all(isinstance(size, int) for size in self.shape)  # that of a jagged tensor has another size
        small = self.donated_to is None and whole and 0 <= self.shape.numel() <= MOST_SHOWN
        value = self.full() if small and (self.mesh.is_driver or not self.spec.entries) else None
        listed = None if value is None or value.layout is not torch.strided else value.tolist()  # torch lists no others
        title = repr(self) if listed is None else f"Array({listed!r}, {self._kind()}, {self.spec})"
        if self.donated_to is not None or not self.shape or self.mesh.size > drawing.MOST_DRAWN:
            return title
        return "\n".join([title, *drawing.text(self.grid()).splitlines()[1:]])

    def _kind(self) -> str:
        sizes = ", ".join("?" if size == RAGGED else str(size) for size in self.shape)
        return f"{dtype_name(self.dtype)}[{sizes}]"

    def grid(self, name: str = "") -> drawing.Grid:
        """A picture of which rank holds what."""
        return drawing.array_grid(self.mesh.layout, self.spec, tuple(self.shape), f"{name}{self!r}")

    def __repr__(self) -> str:
        if self.donated_to is not None:
            return f"Array(donated to {self.donated_to})"
        return f"Array({self._kind()}, {self.spec}, {self.mesh.describe()})"


def _as_numpy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_as_numpy, value))
    return np.broadcast_to(np.asarray(value), value.shape) if isinstance(value, Array) else value


def _operating() -> Any:
    return importlib.import_module(f"{__package__}.driver.operators")  # by name: it stands above this file


@public
def _operated(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _operating().operate(func, args, kwargs)


for _name in (
    *("shards", "full", "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__complex__", "__array__"),
    *("__dlpack__", "__format__", "__str__", "__getitem__", "__setitem__", "__reduce__", "__len__"),
):
    setattr(Array, _name, public(getattr(Array, _name)))

numbers.Number.register(Array)  # so TensorBoard and tqdm's `set_postfix`, which ask for one, accept a loss
