"""What the API page needs beside the sources: examples as blocks of code, and methods that lie in other files.

In Markdown the lines of a doctest would run together.
"""

from __future__ import annotations

from typing import Any

from griffe import Extension, Module, Object

# Methods of Mesh that its class only names, as in `stacks, status = stacks.stacks, status.status`.
METHODS = {
    "mesh.running": ("run", "submit", "remote", "reload", "device_mesh"),
    "mesh.display.stacks": ("stacks",),
    "mesh.display.status": ("status",),
    "mesh.resizing.resize": ("resize", "retire"),
}


def fenced(text: str) -> str:
    """Each doctest, up to the empty line behind it, between fences.

    >>> print(fenced("One.\\n\\n>>> 1 + 1\\n2\\n\\nTwo."))
    One.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Two.
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
        for module, names in METHODS.items():
            for name in names:
                pkg["mesh.mesh.Mesh"].set_member(name, pkg[f"{module}.{name}"])

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
