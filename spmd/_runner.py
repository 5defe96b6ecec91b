"""A copy of a module that is lent parameters and buffers for the length of a call, and what the call changes put back.

It is `torch.func.functional_call` with every name looked up only once. It also undoes what `forward` assigned, which
later calls would find, and which might keep the graph of one call alive until the next.
Where torch's compiler traces, it is `functional_call` itself, for all that a traced call touches is checked before each
call of the graph; and the compiler forgets there what `forward` has assigned, instead of doing it after the graph.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._copied_modules import duplicate
from ._functional_checks import check_names, no_tensor
from .kernels import torch_private

_Tensors = Mapping[str, Tensor]
_Result = tuple[Any, dict[str, Tensor]]


class Runner:
    """A copy of a skeleton.

    Args:
        compiled: by name, the parts to compile in place, and their options.
    """

    def __init__(self, skeleton: nn.Module, compiled: Mapping[str, dict[str, Any]]):
        self.module = module = torch_private.compile_parts(duplicate(skeleton), compiled)
        self._params = _slots_of(module, torch_private.parameters, dict(module.named_parameters()))
        self._constants = dict(module.named_buffers())
        self._buffers = _slots_of(module, torch_private.buffers, self._constants)
        every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        self._tied = [(name, first[id(one)]) for name, one in every if first.setdefault(id(one), name) != name]
        self._parts = list(module.modules())
        # Each table, and its entries between two calls: no tensors, since compiled calls check what is there.
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for part in self._parts:
            lent = (torch_private.parameters(part), torch_private.buffers(part))
            self._tables += [(table, dict.fromkeys(table)) for table in lent]
            self._tables += [(table, table.copy()) for table in (vars(part), torch_private.children(part))]
        self._children = [(each, tuple(torch_private.children(each))) for each in self._parts]
        self._unset = [(m, key) for m in self._parts for key, b in torch_private.buffers(m).items() if b is None]
        self._forget_assigned = _forgets_assigned(weakref.ref(self))
        self._code = _code_of({type(each) for each in self._parts})
        self._names = {"params": frozenset(self._params), "buffers": frozenset(self._buffers)}
        self.put_back()

    def run(self, params: _Tensors, buffers: _Tensors | None, args: tuple, kwargs: dict) -> _Result:
        """The result, and the new buffers; `put_back` must follow."""
        lent = self._lent(params, buffers)
        for name, slots in self._params.items():
            for table, key in slots:
                table[key] = params[name]
        for name, slots in self._buffers.items():
            buffer = lent[name].clone()
            for table, key in slots:
                table[key] = buffer
        out = self.module(*args, **kwargs)
        return out, {name: slots[0][0][slots[0][1]] for name, slots in self._buffers.items()}

    def put_back(self) -> None:
        """End the call, as if there had been none."""
        for table, entries in self._tables:
            if len(table) != len(entries) or not all(map(operator.is_, table.values(), entries.values())):
                table.clear()
                table.update(entries)

    def traced(self, params: _Tensors, buffers: _Tensors | None, args: tuple, kwargs: dict) -> _Result:
        """`run` and `put_back` where torch's compiler traces."""
        # A look at each has it checked before each call: a class that has come by value may get other methods.
        for function in self._code:
            function is None  # noqa: B015
        lent = self._lent(params, buffers)
        given = {**params, **{name: lent[name].clone() for name in self._buffers}}
        for name, first in self._tied:
            given[name] = given[first]
        try:
            out = torch.func.functional_call(self.module, given, args, kwargs, tie_weights=False)
            return out, {name: given[name] for name in self._buffers}
        finally:
            for module, key in self._unset:
                if torch_private.buffers(module)[key] is not None:
                    torch_private.buffers(module)[key] = None
            if self._forget_assigned():
                for module, names in self._children:
                    children = torch_private.children(module)
                    for name in [each for each in children if each not in names]:
                        del children[name]

    def _lent(self, params: _Tensors, buffers: _Tensors | None) -> _Tensors:
        """The buffers, after a look at the names of all."""
        lent = self._constants if buffers is None else buffers
        for argument, given, expected in (("params", params, self._params), ("buffers", lent, self._buffers)):
            if type(given) is not dict or given.keys() != self._names[argument]:
                check_names(argument, given, expected)
        for value in params.values():
            if value is None:  # some modules would compute as if they had no such parameter
                raise no_tensor(value)
        return lent


def _forgets_assigned(runner: Callable[[], Runner | None]) -> Callable[[], bool]:
    """A function without arguments, for the compiler: forgets what a call has assigned so far, but for children of its
    modules; returns whether there are some to remove.
    """

    def forget() -> bool:
        alive = runner()
        assert alive is not None
        if torch_private.forget_assigned(alive._parts):
            return torch_private.changes_children(alive._parts)
        alive.put_back()
        return False

    torch_private.run_while_tracing(forget)
    return forget


torch_private.run_as_written([Runner.put_back])


def _code_of(classes: set[type]) -> list[types.FunctionType]:
    """The methods of modules' classes, but those of torch."""
    own = {base for cls in classes for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))}
    return [each for cls in own for each in vars(cls).values() if isinstance(each, types.FunctionType)]


def _slots_of(
    module: nn.Module, table: Callable[[nn.Module], dict[str, Any]], tensors: dict[str, Tensor]
) -> dict[str, list[tuple[dict, str]]]:
    """Every (table, key) at which each tensor sits: more than one where tensors are tied."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    slots: dict[str, list[tuple[dict, str]]] = {name: [] for name in tensors}
    for submodule in module.modules():
        entries = table(submodule)
        for key, tensor in entries.items():
            if tensor is not None:
                slots[names[id(tensor)]].append((entries, key))
    return slots
