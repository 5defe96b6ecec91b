"""torch's compiler and what else records programs; functions made by `torch.compile`, taken apart and made again.

A compiled function hides its options and can't be pickled. Nothing here imports the compiler, which takes seconds: if
the program has not imported it, nothing is compiled.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from ..overlapping import Overlapping


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


def break_graph(reason: str) -> None:
    """Where the compiler traces, end the graph; with `fullgraph=True` this is an error, which has the reason.

    Public way: none, outside of the compiler's own module.
    """
    torch._dynamo.graph_break(msg=reason)


def run_as_written(functions: Iterable[Any]) -> None:
    """Have the compiler skip these and what they call. Public way: `torch.compiler.disable`, which imports it."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in functions:
        set_code_exec_strategy(function.__code__, skip)


def run_while_tracing(function: Callable) -> None:
    """Have the compiler call this function, which has no arguments, while it traces, and put the result into the graph.

    Public way: `torch.compiler.assume_constant_result`, which imports it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_assigned(objects: Iterable[Any]) -> bool:
    """Have the compiler forget what the code that it traces has assigned to attributes of these objects so far.

    Returns whether it traces: `torch.export` records what runs as Python, which has assigned it. Public way: none.
    """
    effects = _effects()
    if effects is None:
        return False
    own, assigned = set(map(id, objects)), effects.store_attr_mutations
    for variable in [each for each in assigned if id(getattr(each, "value", None)) in own]:
        del assigned[variable]
    return True


def changes_children(modules: Iterable[nn.Module]) -> bool:
    """Whether the code that the compiler traces has added or removed children of these modules. Public way: none."""
    known = (_effects().id_to_variable.get(id(module._modules)) for module in modules)
    return any(one is not None and getattr(one.mutation_type, "is_modified", False) for one in known)


def _effects() -> Any:
    """What the code that the compiler traces on this thread does beside its graph; None if it traces none."""
    converter: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    tracer = None if converter is None else getattr(converter.tls, "current_tx", None)
    return None if tracer is None else tracer.output.side_effects


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


def compiled_from(function: Any) -> Any:
    """The function that `torch.compile` was given to make this one; None if it didn't make it.

    A compiled function can't be pickled, so that function is sent. Public way: none; any decorator sets `__wrapped__`.
    """
    return getattr(function, "_torchdynamo_orig_callable", None)


def compiled_call(module: nn.Module) -> Any:
    """The compiled call that `module.compile()` made, and that copies lose; None without one. Public way: none."""
    return module._compiled_call_impl


def uncompiled(function: Any) -> Any:
    """The function from which `torch.compile` made this one; None if it didn't make it."""
    if not isinstance(function, types.FunctionType) or _context_of(function) is None:
        return None
    found = compiled_from(function)
    wrapper = getattr(found, "__code__", None)
    if wrapper is not None and wrapper.co_filename.endswith("external_utils.py") and "fn" in wrapper.co_freevars:
        return found.__closure__[wrapper.co_freevars.index("fn")].cell_contents  # an object that can be called
    return found


def _context_of(function: Any) -> Any:
    if compiled_from(function) is None:
        return None
    for cell in function.__closure__ or ():
        if _is_context(cell.cell_contents):
            return cell.cell_contents
    return None


def _is_context(obj: Any) -> bool:
    """Whether it is the object in which a module made by `torch.compile(module)` keeps its options."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and type(obj) is compiler.OptimizeContext


def reduce_compiled(obj: Any) -> tuple[Callable, tuple] | None:
    """How another process makes this compiled function or context again, as for `__reduce__`; None for all else.

    Raises:
        TypeError: this version of torch keeps the options elsewhere.
    """
    if _is_context(obj):
        return _context, (_options(obj),)
    function = uncompiled(obj)
    return None if function is None else (_compiled, (function, _options(_context_of(obj))))


def compiled_parts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The options that `module.compile()` was given, by the name of each compiled part (empty for the module itself).

    Raises:
        TypeError: this version of torch keeps them elsewhere.
    """
    calls = {name: compiled_call(part) for name, part in module.named_modules()}
    return {name: _options(_context_of(call)) for name, call in calls.items() if call is not None}


def compile_parts(module: nn.Module, parts: Mapping[str, dict[str, Any]]) -> nn.Module:
    """Compile the same parts of a copy in place: a deep copy of a module is not compiled any more."""
    for name, options in parts.items():
        module.get_submodule(name).compile(**options)
    return module


def _options(context: Any) -> dict[str, Any]:
    *wrappers, backend = _chain(context.callback)
    try:
        if hasattr(context, "_dynamic") and not hasattr(context, "fullgraph"):  # torch 2.8
            fullgraph = any(type(one).__name__ == "ConvertFrameAssert" for one in wrappers)
        else:
            fullgraph = bool(context.fullgraph)
        chosen = {"fullgraph": fullgraph, "dynamic": context._dynamic}
        if type(backend).__name__ == "_TorchCompileInductorWrapper":
            return {**chosen, "backend": "inductor", "options": dict(backend.config) or None}
        return {**chosen, "backend": backend.compiler_fn, **backend.kwargs}
    except AttributeError as error:
        raise TypeError(
            f"a function compiled by torch.compile can't be taken apart ({error}): compile it inside the step"
        ) from None


def _chain(callback: Any) -> list[Any]:
    """The callbacks that turn frames into graphs, from the outermost to the innermost, and the backend at the end."""
    found = [callback]
    for one in found:
        inner = getattr(one, "_torchdynamo_orig_backend", None) or getattr(one, "_torchdynamo_orig_callable", None)
        found += [] if inner is None else [inner]
    return found


def _compiled(function: Callable, options: dict[str, Any]) -> Callable:
    compiled: Callable = torch.compile(function, **options)
    return compiled


def _context(options: dict[str, Any]) -> Any:
    compiled: Any = _compiled(_nothing, options)
    return _context_of(compiled)


def _nothing() -> None:
    """A function to compile, for the sake of its context."""


_forced_eager = Overlapping(lambda: torch.compiler.set_stance("force_eager"))


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Inside this block, compiled functions run as the plain functions that they were made from.

    For blocks under a mode of ours that sees every operation: the compiler would never compile a function that is
    first called under such a mode.
    """
    if has_compiler():
        with _forced_eager:
            yield
        draw_as_eager()
        return
    try:
        yield
    finally:
        if has_compiler():  # the block has imported it, and it may have met functions
            torch.compiler.reset()
    draw_as_eager()


def draw_as_eager() -> None:
    """Have Inductor's graphs draw the random numbers that eager mode draws, and not numbers of their own.

    Else what a step draws would depend on whether its process has called it before, so a resumed run drew others.
    """
    if has_inductor():
        sys.modules["torch._inductor.config"].fallback_random = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def _fixed_batches() -> Iterator[None]:
    met: Any = sys.modules["torch._dynamo.pgo"].FrameStateSizeEntry
    varies = met.is_size_dynamic
    met.is_size_dynamic = lambda sizes, dim: dim > 0 and varies(sizes, dim)
    try:
        yield
    finally:
        met.is_size_dynamic = varies


_batches_fixed = Overlapping(_fixed_batches)


def graph_for_each_batch_size() -> contextlib.AbstractContextManager[object]:
    """Inside this block the compiler makes a graph for each size of dimension 0, where it would make one for any size.

    Inductor rounds otherwise in that one, and which sizes it gets depends on those that the process has met before.
    Public way: `torch.compile(dynamic=False)`, which the program would have to name, and which also makes a graph for
    each number among the arguments and for each length of a sequence.
    """
    return _batches_fixed if has_compiler() else contextlib.nullcontext()


def graphs_compiled() -> int:
    """How many graphs this program has compiled so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


def has_inductor() -> bool:
    """Whether this program has imported Inductor, torch's default backend."""
    return "torch._inductor.config" in sys.modules


def rewrite_graphs(rewrite: Callable[[fx.Graph], None], source: Path) -> None:
    """Have Inductor call `rewrite` with each joint graph of forward and backward, after the program's own passes.

    For a program that `has_inductor`. Public way: a backend of our own that calls Inductor, which the program would
    have to name.

    Args:
        source: the file of `rewrite`, part of the key of Inductor's cache: graphs of another version are not reused.
    """
    config: Any = sys.modules["torch._inductor.config"]
    before = config.joint_custom_post_pass
    if getattr(before, "rewrite", None) is rewrite:
        return
    passes: Any = sys.modules["torch._inductor.custom_graph_pass"]
    others: list[Any] = [*before] if isinstance(before, list | tuple) else [] if before is None else [before]

    class Pass(passes.CustomGraphPass):
        def __init__(self) -> None:
            self.rewrite = rewrite

        def __call__(self, graph: fx.Graph) -> None:
            for each in (*others, rewrite):
                each(graph)

        def uuid(self) -> Any:
            """The key of all passes; None if a pass of the program has none: Inductor then caches nothing on disk."""
            found = [each.uuid() if hasattr(each, "uuid") else None for each in others]
            return None if None in found else (passes.get_hash_for_files((str(source),)), *found)

    config.joint_custom_post_pass = Pass()
