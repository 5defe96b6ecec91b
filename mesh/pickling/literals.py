"""What the file of a module gives as literals: names of the module, and of its classes, that are assigned once."""

from __future__ import annotations

import ast
import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .references import SINGLE
from .reloading import own_file


def literals_of(module: str) -> dict[str, Any]:
    """The literals of one of the program's own modules, by qualified name; none of another."""
    file = own_file(module)
    return {} if file is None else _literals_in(file, os.stat(file).st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _literals_in(file: str, _: int) -> dict[str, Any]:
    """What a file assigns once, as a literal, in the module or in a class's body; its qualified name -> the value."""
    with open(file, "rb") as source:
        try:
            tree = ast.parse(source.read())
        except SyntaxError:
            return {}
    return dict(_assigned(tree, ""))


def _assigned(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Any]]:
    times = Counter(_stored(scope))
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _assigned(node, f"{prefix}{node.name}.")
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and times[target.id] == 1:
                try:
                    value = ast.literal_eval(node.value)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    continue
                if value or isinstance(value, SINGLE):  # an empty container is there to collect things
                    yield prefix + target.id, value


def _stored(node: ast.AST) -> Iterator[str]:
    """The names that a scope's statements bind, as often as they do, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store | ast.Del):
            yield child.id
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        elif not isinstance(child, ast.Lambda):
            yield from _stored(child)
