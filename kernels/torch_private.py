"""Every private part of torch that this library uses: why, what was tried instead, and nothing else.

A version of torch may move or drop any of them without notice. So no other file of the library names one, and
`tests/kernels/test_torch_private.py` says in words which of them a new version has moved and what depends on it.
Invariant: each entry says what it is for, and which public way was tried.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator
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

Node = Any  # of torch's tape: `torch.autograd.graph.Node` types none of what a node has saved

# -- tensors -----------------------------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place; 0 in inference mode, which has no count.

    A step that changes its input, and a captured tensor that changed since it was sent, are found by it.
    Public way: none; a checksum of the memory would cost as much as the step.
    """
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """`version` of each, at the price of one look where none was made in inference mode."""
    tensors = list(tensors)
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # of a tensor without a count
        return [version(tensor) for tensor in tensors]


def base(tensor: Tensor) -> Tensor | None:
    """What this is a view of, which is known alike. Public way: none; two tensors of one storage need not be views."""
    return tensor._base if tensor._is_view() else None


def storage(tensor: Tensor) -> int:
    """What tells a tensor's storage from all others that there are; 0 for one without (sparse tensors).

    Views, detached tensors and what the tape saves have it in common. Public way: the address of the memory, which
    tensors on the meta device lack.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor as they lie there: the public methods refuse one that is not coalesced."""
    return [tensor._indices(), tensor._values()]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors to others of the same shapes. Public way: a copy of each, one call of torch for every leaf."""
    torch._foreach_copy_(targets, sources)


def keep_storage_apart(tensor: Tensor) -> Any:
    """Keeps a storage's number from others, not its memory. Public way: none; `weakref` doesn't keep the address."""
    return StorageWeakRef(tensor.untyped_storage())


# -- subclasses of tensors ---------------------------------------------------------------------------------------------


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Torch functions called within do not come to `__torch_function__` of a subclass again. Public way:
    `super().__torch_function__`, which makes all results instances of the subclass.
    """
    return torch._C.DisableTorchFunctionSubclass()


@contextlib.contextmanager
def below_subclasses() -> Iterator[None]:
    """Operations within see subclasses as plain tensors. Public way: none for one that is no wrapper of a tensor."""
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
        yield


def arguments(operation: Any) -> list[Any]:
    """The arguments of an operator's schema, in order, each with `name`, `kwarg_only` and `alias_info`.

    Which of them it writes to is nowhere else. Public way: none; names that end in "_" or have "out" miss some.
    """
    return operation._schema.arguments


def operation_name(operation: Any) -> tuple[str, str]:
    """An operator's name without its library's, and its overload's. Public way: `str(operation)`, to be taken apart."""
    return operation._schema.name.partition("::")[2], operation._overloadname


class DispatchMode(TorchDispatchMode):
    """Sees every operation below autograd, in both directions, in `operation`.

    Public way: none; `TorchFunctionMode` misses backward passes. Torch's own way to keep its compiler from such a mode
    imports it at the first operation, half a second on every rank; marking the code imports nothing. Below a mode torch
    overlooks conjugates of its own making, which `linalg.pinv` of complex numbers has: they are seen again. An operator
    that takes functions (`torch.cond`, `flex_attention`) comes in `with_functions`, and what these do is not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return self.with_functions(func, args, kwargs or {})
        excluded = torch._C._dispatch_tls_local_exclude_set()
        excluded = excluded.remove(torch._C.DispatchKey.Conjugate).remove(torch._C.DispatchKey.Negative)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return self.operation(func, args, kwargs or {})

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def with_functions(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


def run_as_written(functions: Iterable[Any]) -> None:
    """Keep the compiler from these and what they call. Public way: `torch.compiler.disable`, which imports it."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skip)


run_as_written([DispatchMode.__torch_dispatch__])
# What `item` and `bool` of a tensor become below `__torch_function__`. Public way: none, it has no other name there.
ITEM = torch.ops.aten._local_scalar_dense

# -- tensors without values --------------------------------------------------------------------------------------------


class FakeTensors(FakeTensorMode):
    """Within, torch makes tensors that have shapes and devices and no values, and computes with them. Public way: the
    meta device, on which tensors that a function makes for itself are not.
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
    """Within, the number in a fake tensor is 1. Public way: none; torch raises there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM.default and is_fake(args[0]):
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1j if dtype.is_complex else 1
        return func(*args, **(kwargs or {}))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values. Public way: none; `data_ptr()` raises."""
    return isinstance(tensor, FakeTensor)


# -- the tape ----------------------------------------------------------------------------------------------------------


def saved(node: Node, name: str) -> Any:
    """What a node keeps for its backward, by the formula's name for it. Public way: none says which node keeps it."""
    return getattr(node, f"_saved_{name}")


def saves_itself(node: Node, name: str) -> Tensor | None:
    """The tensor that a node keeps, if it keeps it as it is and not packed by a hook; else None.

    What is packed (`torch.utils.checkpoint`, `save_on_cpu`) may be asked for only once; None in torch 2.8, which does
    not say so. Public way: none.
    """
    kept = getattr(node, f"_raw_saved_{name}")
    return None if getattr(kept, "unpack_hook", kept) is not None else getattr(kept, "data", None)


def scales(node: Node) -> bool:
    """Whether a node's product is multiplied by something other than 1. Public way: none."""
    return getattr(node, "_saved_alpha", 1) != 1


def sums_up(node: Node) -> bool:
    """Whether a node is that of a loss with `reduction="sum"`. Public way: none."""
    return getattr(node, "_saved_reduction", 1) == 2


def order(node: Node) -> int:
    """Grows with every node that this thread has put on its tape. Public way: none."""
    return node._sequence_nr()


def in_backward() -> bool:
    """Whether a backward pass runs on this thread. Public way: none; a hook would have to be on every tape."""
    return torch._C._current_graph_task_id() != -1


def backward_keeps_tape() -> bool:
    """Whether the backward pass that runs was told to keep its tape (`retain_graph`). Public way: none."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hooks_made() -> int:
    """Counts the hooks of tensors, nodes and modules. Public way: none; those of a node can't be listed."""
    return RemovableHandle.next_id


def has_step_hooks() -> bool:
    """Whether there are hooks of every optimizer's step. Public way: none; what registers them doesn't tell of them."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


# -- transforms of torch.func ------------------------------------------------------------------------------------------


def in_torch_func() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp, ...) is at work. Public way: none."""
    return torch._C._are_functorch_transforms_active()


def outside_torch_func() -> contextlib.AbstractContextManager[Any]:
    """Within, a communicator's own memory is made and written as outside `torch.func`. Public way: none."""
    return temporarily_clear_interpreter_stack()


def being_recorded() -> bool:
    """Whether `make_fx` (`torch.func.linearize`, export) or `torch.jit.trace` records operations. Public way: none."""
    records = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return records or torch._C._get_tracing_state() is not None


# -- modules -----------------------------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> dict[str, Any]:
    """A module's own table of parameters, to be written to.

    Public way: `setattr`, which takes no plain tensor for a parameter; `torch.func.functional_call`, which looks every
    name up again in every call (0.3 ms for 50 parameters).
    """
    return module._parameters


def buffers(module: nn.Module) -> dict[str, Any]:
    """See `parameters`."""
    return module._buffers


def children(module: nn.Module) -> Iterable[nn.Module | None]:
    """As `module.children()`, a generator of a generator, which takes thrice as long before every call."""
    return module._modules.values()


def inject_parametrizations(module: nn.Module, names: Iterable[str]) -> None:
    """Give a module its made-up class again, whose properties compute the parametrized tensors. Public way:
    `register_parametrization`, which computes the original tensors anew, under other names.
    """
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)


def clipping_functions() -> list[Any]:
    """The cells that hold what torch's functions that clip gradients call, to put something else in. Public way: none.
    There are hooks for optimizers' steps alone, and a program has imported these functions by name.
    """
    functions: list[Any] = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_]
    return [one.__closure__[one.__code__.co_freevars.index("func")] for one in functions]


# -- the compiler ------------------------------------------------------------------------------------------------------


def compiled_from(function: Any) -> Any:
    """What `torch.compile` was given to make a function; None if this is none.

    A compiled function can't be pickled, and is sent as this. Public way: none; any decorator sets `__wrapped__`.
    """
    return getattr(function, "_torchdynamo_orig_callable", None)


def dynamic_of(context: Any) -> bool | None:
    """The argument `dynamic` that a compiled function was made with; public way: none."""
    return context._dynamic


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` has made of its call, which copies forget; None if there is none. Public way: none."""
    return module._compiled_call_impl


def compiler_listens() -> bool:
    """Whether a compiled function is under way, which has come to what it runs as plain Python. Public way:
    `torch.compiler.is_compiling`, which is true only while it traces.
    """
    return callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def tree_node_of(cls: type) -> tuple[Any, Any] | None:
    """How torch's trees take objects of a registered class apart and make them anew. Public way: none reads them."""
    node = SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


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
    """Of a Gloo group. Public way: `group.set_timeout`, which torch 2.8 lacks."""
    (getattr(group, "set_timeout", None) or group._set_default_timeout)(timeout)
