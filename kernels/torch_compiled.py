"""What `torch.compile` has made: taken apart into the function and the options that it was given, to be compiled anew.

A compiled function keeps its options to itself and can't be pickled. Nothing here imports torch's compiler, which costs
seconds: where a program has not, there is nothing compiled.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import torch_private


def _compiler() -> Any:
    """torch's compiler, if this program has imported it."""
    return sys.modules.get("torch._dynamo.eval_frame")


def original(function: Any) -> Any:
    """The function that `torch.compile` was given, if it has made this one; else None."""
    if not isinstance(function, types.FunctionType) or _context_of(function) is None:
        return None
    found = torch_private.compiled_from(function)
    wrapper = getattr(found, "__code__", None)
    if wrapper is not None and wrapper.co_filename.endswith("external_utils.py") and "fn" in wrapper.co_freevars:
        return found.__closure__[wrapper.co_freevars.index("fn")].cell_contents  # an object that can be called
    return found


def _context_of(function: Any) -> Any:
    compiler = _compiler()
    if compiler is None or torch_private.compiled_from(function) is None:
        return None
    for cell in function.__closure__ or ():
        if is_context(cell.cell_contents):
            return cell.cell_contents
    return None


def is_context(obj: Any) -> bool:
    """Whether it is what a module made by `torch.compile(module)` keeps its options in."""
    compiler = _compiler()
    return compiler is not None and type(obj) is compiler.OptimizeContext


def taken_apart(obj: Any) -> tuple[Callable, tuple] | None:
    """How to make a compiled function, or such a context, elsewhere, as pickle's `__reduce__`; None for all else.

    Raises:
        TypeError: this version of torch keeps the options elsewhere.
    """
    if is_context(obj):
        return _context, (_options(obj),)
    function = original(obj)
    return None if function is None else (_compiled, (function, _options(_context_of(obj))))


def options_of(function: Any) -> dict[str, Any]:
    """What `torch.compile` was given besides the function.

    Raises:
        TypeError: this version of torch keeps it elsewhere.
    """
    return _options(_context_of(function))


def _options(context: Any) -> dict[str, Any]:
    *wrappers, backend = _chain(context.callback)
    try:
        if hasattr(context, "_dynamic") and not hasattr(context, "fullgraph"):  # torch 2.8
            fullgraph = any(type(one).__name__ == "ConvertFrameAssert" for one in wrappers)
        else:
            fullgraph = bool(context.fullgraph)
        chosen = {"fullgraph": fullgraph, "dynamic": torch_private.dynamic_of(context)}
        if type(backend).__name__ == "_TorchCompileInductorWrapper":
            return {**chosen, "backend": "inductor", "options": dict(backend.config) or None}
        return {**chosen, "backend": backend.compiler_fn, **backend.kwargs}
    except AttributeError as error:
        raise TypeError(
            f"a function compiled by torch.compile can't be taken apart ({error}): compile it inside the step"
        ) from None


def _chain(callback: Any) -> list[Any]:
    """What turns frames into graphs, from the outside in, and the backend that it ends with."""
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
    """What a context is made with."""


def attributes_to_copy(function: Any) -> tuple[str, ...]:
    """What `functools.wraps` is to take over of a function besides its name: of a compiled one nothing.

    By the attributes of such a one the compiler, and pickle, would take what is around it for the function itself.
    """
    return functools.WRAPPER_UPDATES if original(function) is None else ()


def is_running() -> bool:
    """Whether what runs was called by a compiled function, which goes on as plain Python here."""
    compiler = _compiler()
    return compiler is not None and torch_private.compiler_listens()


def uncompiled(function: Callable) -> Callable:
    """The same, kept from a compiler that calls it, with all that it calls."""
    compiler = _compiler()
    return function if compiler is None else torch.compiler.disable(function)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Within, what `torch.compile` has made runs as the function that it was made of.

    For a block under a mode of ours that sees every operation: functions that are first called under one are left alone
    by the compiler, for ever.
    """
    if _compiler() is not None:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        if _compiler() is not None:  # which the block has imported, and met functions with
            torch.compiler.reset()


def graphs() -> int:
    """How many graphs this program has compiled so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


def has_inductor() -> bool:
    """Whether this program has imported the backend that most graphs are compiled by."""
    return "torch._inductor.config" in sys.modules


def rewrite_graphs(rewrite: Callable[[fx.Graph], None], source: Path) -> None:
    """Have Inductor hand each graph of forward and backward to `rewrite`, after what the program has it do with them.

    For a program that `has_inductor`. Public way: a backend of one's own that calls Inductor, which the program would
    have to name.

    Args:
        source: the file that `rewrite` is written in, by which Inductor knows what it has compiled with another one.
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
            """Of all; None, for which Inductor keeps nothing on disk, where one of the program's has none."""
            found = [each.uuid() if hasattr(each, "uuid") else None for each in others]
            return None if None in found else (passes.get_hash_for_files((str(source),)), *found)

    config.joint_custom_post_pass = Pass()
