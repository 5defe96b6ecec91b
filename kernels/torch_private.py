"""Every private part of torch that this library uses, with the reason and what was tried instead, and nothing else.

A version of torch may move or drop any of them without notice. So no other file of the library names one, and if a
new version moves one, `tests/kernels/test_torch_private.py` says in words which one, and what depends on it.
Invariant: each entry says what it is for, and which public way was tried.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils.hooks import RemovableHandle

# -- tensors -----------------------------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place; 0 for inference tensors (no counter).

    It shows that a step changed its input, or that a captured tensor changed since it was sent.
    Public way: none; a checksum of the memory would cost as much as the step.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """`version` of each; fast if none was made in inference mode."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # a tensor has no counter
        return [version(tensor) for tensor in tensors]


def base(tensor: Tensor) -> Tensor | None:
    """The tensor that this is a view of. Public way: none; tensors that share a storage need not be views."""
    return tensor._base if tensor._is_view() else None


def storage(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage among all that exist now; 0 if it has none (sparse tensors).

    Views, detached tensors and what autograd saves share it. Public way: the address of the memory, which tensors on
    the meta device lack.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """A sparse tensor's indices and values as stored. Public way: methods that refuse a tensor that isn't coalesced."""
    return [tensor._indices(), tensor._values()]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same shapes. Public way: `copy_` for each, one call of torch per leaf."""
    torch._foreach_copy_(targets, sources)


def keep_storage_apart(tensor: Tensor) -> Any:
    """Keeps a storage's number (not its memory) from being reused. Public way: none; `weakref` doesn't do that."""
    return StorageWeakRef(tensor.untyped_storage())


# -- subclasses of tensors ---------------------------------------------------------------------------------------------


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside this block, torch functions don't call a subclass's `__torch_function__` again. Public way:
    `super().__torch_function__`, which makes all results instances of the subclass.
    """
    return torch._C.DisableTorchFunctionSubclass()


@contextlib.contextmanager
def below_subclasses() -> Iterator[None]:
    """Inside, operations see subclasses as plain tensors. Public way: none for a subclass that wraps no tensor."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


Argument = namedtuple("Argument", "name kwarg_only is_written default_value")


@functools.cache  # torch makes new objects of a schema at each look
def arguments(operation: Any) -> tuple[Argument, ...]:
    """An operator's arguments, in order. Public way: none; names in "_" or with "out" miss some that it writes to."""
    found = [(one, one.alias_info) for one in operation._schema.arguments]
    return tuple(Argument(x.name, x.kwarg_only, bool(way and way.is_write), x.default_value) for x, way in found)


@functools.cache
def operation_name(operation: Any) -> tuple[str, str]:
    """An operator's name without its namespace, and its overload's. Public way: to parse `str(operation)`."""
    return operation._schema.name.partition("::")[2], operation._overloadname


class DispatchMode(TorchDispatchMode):
    """Gets every operation below autograd, of forward and backward passes, in `operation`.

    Public way: none; `TorchFunctionMode` misses backward passes. Torch's own way to keep its compiler out of such a
    mode imports it at the first operation (half a second on every rank); `run_as_written` imports nothing. Below a mode
    torch overlooks lazy conjugates of its own making (in `linalg.pinv` of complex numbers), and reads tangents of
    constants, which have no memory (in `torch.add(x, y, alpha=2)`): here both are resolved.
    An operator that takes functions (`torch.cond`, `flex_attention`) goes to `with_functions`; what they do is unseen.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return self.with_functions(func, args, kwargs or {})
        excluded = torch._C._dispatch_tls_local_exclude_set() - _RESOLVED
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def with_functions(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def run_as_written(functions: Iterable[Any]) -> None:
    """Have the compiler skip these and what they call. Public way: `torch.compiler.disable`, which imports it."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skip)


run_as_written([DispatchMode.__torch_dispatch__])
_RESOLVED = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
_RESOLVED = _RESOLVED.add(torch._C.DispatchKey.Negative).add(torch._C.DispatchKey.ZeroTensor)
# The operator that `item` and `bool` of a tensor call. Public way: none, it has no other name.
ITEM = torch.ops.aten._local_scalar_dense

# -- tensors without values --------------------------------------------------------------------------------------------


class FakeTensors(FakeTensorMode):
    """Inside this mode, torch makes and computes with tensors that have shapes and devices but no values. Public way:
    the meta device, on which tensors that a function makes for itself don't land.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        with self:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def like(self, tensor: Tensor) -> Tensor:
        with self:
            fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            return nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake


class PretendedNumbers(TorchDispatchMode):
    """Inside this mode, `item()` of a fake tensor is 1. Public way: none; torch raises an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM.default and is_fake(args[0]):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        return func(*args, **(kwargs or {}))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values. Public way: none; `data_ptr()` raises."""
    return isinstance(tensor, FakeTensor)


# -- the tape, and transforms of torch.func ----------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Public way: none; every graph would need a hook."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_tape() -> bool:
    """Whether the running backward pass was called with `retain_graph=True`. Public way: none."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hooks_made() -> int:
    """How many hooks of tensors, nodes and modules were ever made. Public way: none; a node's hooks can't be listed."""
    return RemovableHandle.next_id


def has_step_hooks() -> bool:
    """Whether hooks for all optimizers' steps are registered. Public way: none; they can be registered, not listed."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks for a tensor's gradient are registered. Public way: none; they can be registered, not listed."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def in_torch_func() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...) is running. Public way: none."""
    return torch._C._are_functorch_transforms_active()


def outside_torch_func() -> contextlib.AbstractContextManager[Any]:
    """Inside this block, tensors are made and written as if outside `torch.func`. Public way: none."""
    return temporarily_clear_interpreter_stack()


def being_exported() -> bool:
    """Whether `torch.export` is running.

    Public way: `torch.compiler.is_exporting`, which is true in what `torch.compile` traces, too, until torch 2.12.
    """
    return torch.compiler._is_exporting_flag


def being_recorded() -> bool:
    """Whether `torch.export`, `make_fx` (`torch.func.linearize`) or `torch.jit.trace` records operations. Public way:
    none.
    """
    records = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return records or torch._C._get_tracing_state() is not None or being_exported()


# -- modules -----------------------------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own dict of parameters, to be written to.

    Public way: `setattr`, which refuses a plain tensor in a parameter's place; `torch.func.functional_call`, which
    looks up every name in every call (0.3 ms for 50 parameters).
    """
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Any]:
    """See `parameters`."""
    return module._buffers


def children(module: nn.Module) -> Iterable[nn.Module | None]:
    """The children of a module. Public way: `module.children()`, which takes three times as long, before every call."""
    return module._modules.values()


def inject_parametrizations(module: nn.Module, names: Iterable[str]) -> None:
    """Give a module its generated class again, whose properties compute the parametrized tensors. Public way:
    `register_parametrization`, which makes the original tensors again, under other names.
    """
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)


def clipping_functions() -> list[Any]:
    """The closure cells of torch's gradient clipping functions, to replace what they call. Public way: none; there are
    hooks for optimizers' steps only, and programs import these functions by name.
    """
    functions: list[Any] = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_]
    return [one.__closure__[one.__code__.co_freevars.index("func")] for one in functions]


# -- the compiler ------------------------------------------------------------------------------------------------------


def compiled_from(function: Any) -> Any:
    """The function that `torch.compile` was given to make this one; None if it didn't make it.

    A compiled function can't be pickled, so that function is sent. Public way: none; any decorator sets `__wrapped__`.
    """
    return getattr(function, "_torchdynamo_orig_callable", None)


def dynamic_of(context: Any) -> bool | None:
    """The argument `dynamic` that a compiled function was made with; public way: none."""
    return context._dynamic


def compiled_call(module: nn.Module) -> Any:
    """The compiled call that `module.compile()` made, and that copies lose; None without one. Public way: none."""
    return module._compiled_call_impl


def has_compiler() -> bool:
    """Whether this program has imported torch's compiler: if not, nothing is compiled. Public way: none."""
    return "torch._dynamo.eval_frame" in sys.modules


def is_traced() -> bool:
    """Whether the compiler traces the code that runs now, or a compiled function has called it as plain Python.

    Public way: `is_dynamo_compiling`, which is true while tracing alone.
    """
    return torch.compiler.is_dynamo_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def untraced(function: Callable) -> Callable:
    """The function; while `is_traced`, one that the compiler doesn't see, together with all that it calls."""
    return torch.compiler.disable(function) if is_traced() else function


def tree_nodes() -> dict[type, Any]:
    """The classes that are registered with torch's pytrees, with `flatten_fn` and `unflatten_fn`. Public way: none."""
    return SUPPORTED_NODES


# -- process groups ----------------------------------------------------------------------------------------------------


def gloo_options(timeout: float, hostname: str) -> Any:
    """Options of a Gloo group that listens at an address of our choice. Public way: `init_process_group`, which makes
    the user's default group and takes the address from the environment.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
    return options


def set_timeout(group: Any, timeout: datetime.timedelta) -> None:
    """Set a Gloo group's timeout. Public way: `group.set_timeout`, which torch 2.8 lacks."""
    (getattr(group, "set_timeout", None) or group._set_default_timeout)(timeout)
