"""What the site takes from outside of docs/: notebooks become pages, and other files that pages link to are copied.

A link that leads out of docs/ in the repository, `../bench/results/table.txt`, leads to `repository/...` on the site.
"""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")


@event_priority(100)  # before the plugin that reads the package
def on_config(config: Any) -> Any:
    """Compare docs/api.md with the public names, and lay the package out as an installation has it."""
    source = (ROOT / "spmd" / "__init__.py").read_text()
    homes = re.search(r"^_HOMES = (\{.*?^\})", source, re.MULTILINE | re.DOTALL)
    assert homes is not None
    public = {name for names in ast.literal_eval(homes[1]).values() for name in names}
    listed = set(re.findall(r"^::: spmd\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    if listed != public:
        raise PluginError(f"docs/api.md and spmd/__init__.py differ in {sorted(listed ^ public)}")
    package = ROOT / "build" / "api" / "spmd"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "spmd", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("transforms", "mesh", "kernels"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    return config


def place(target: str) -> str | None:
    """Where a file of the repository is on the site, or None if it has none."""
    path = (ROOT / "docs" / target).resolve()
    if not path.is_file() or ROOT not in path.parents:
        return None
    inside = path.relative_to(ROOT).as_posix()
    return inside if path.suffix == ".ipynb" else f"repository/{inside}"


@event_priority(100)  # before the plugin that takes notebooks
def on_files(files: Files, config: Any) -> Files:
    wanted = {ROOT / "CHANGELOG.md", *ROOT.glob("notebooks/*.ipynb")}
    for page in (ROOT / "docs").glob("*.md"):
        for _, target in LINK.findall(page.read_text()):
            if place(target) is not None:
                wanted.add((ROOT / "docs" / target).resolve())
    for path in sorted(wanted):
        uri = place(f"../{path.relative_to(ROOT)}")
        assert uri is not None
        if path.suffix == ".ipynb":
            files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


@event_priority(100)
def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        found = place(match[2]) if not depth else None
        return f"{match[1]}{found}" if found is not None else match[0]

    if page.file.src_uri.startswith("repository/"):  # its links are those of its own folder
        return re.sub(r"\]\((?!https?:)[^)]*\)", "]", markdown)
    # A folder of the repository has no page: its name stays.
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", LINK.sub(moved, markdown))
