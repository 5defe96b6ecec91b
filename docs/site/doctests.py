"""What the API page needs beside the sources: examples as blocks of code, and methods that lie in other files.

In Markdown the lines of a doctest would run together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from griffe import Extension, Module, Object

import spmd


def methods_elsewhere(cls: type) -> Iterator[tuple[str, str]]:
    """Methods and properties that a class only names, as in `stacks = stacks.stacks`, and where they are.

    >>> dict(methods_elsewhere(spmd.Mesh))["status"]
    'mesh.display.status.status'
    """
    for name, member in vars(cls).items():
        home = getattr(getattr(member, "fget", member), "__module__", cls.__module__)
        if not name.startswith("_") and home != cls.__module__:
            yield name, f"{home.removeprefix('spmd.')}.{name}"


def fenced(text: str) -> str:
    """Each doctest, up to the empty line behind it, between fences.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo.")
    'One.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nTwo.'
    """
    lines, inside = [], False
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1])


class Doctests(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for name, place in methods_elsewhere(spmd.Mesh):
            pkg["mesh.mesh.Mesh"].set_member(name, pkg[place])

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
