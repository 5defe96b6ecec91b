"""The documents for whoever changes the library: what they name exists, and the code refers to them alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
# A path from the repository's root, in code quotes: with a suffix, or a folder's with its slash.
NAMED = re.compile(r"`((?:spmd|transforms|mesh|kernels|tests|bench|docs|notebooks)/[\w/.*-]*)`")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "docs/glossary.md"])
def test_files_that_are_named_exist(page: str) -> None:
    named = set(NAMED.findall((ROOT / page).read_text()))
    missing = sorted(name for name in named if not list(ROOT.glob(name.rstrip("/"))))
    assert not missing, f"{page} names what is not there"
    assert named, "the pattern finds nothing"


def test_every_package_has_its_row() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("spmd", "transforms", "mesh", "kernels")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(folder for folder in folders if f"| `{folder}` |" not in text and "bench" not in folder) == []


def messages_of(path: Path) -> dict[str, list[str]]:
    """The messages that a file declares, each with its own fields; what all tasks have is said above their table."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]  # type: ignore[union-attr]
        for node in classes
        if {ast.unparse(base) for base in node.bases} & {"Message", "Task"} and node.name != "Task"
    }


def test_every_message_has_its_row() -> None:
    """In the table of its file's section, with its fields in their order; and every row is of a message."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    sections = dict(re.findall(r"^## [^\n]*: `(mesh/\S+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    declaring = [path for path in (ROOT / "mesh").rglob("*.py") if messages_of(path)]
    assert sorted(sections) == sorted(str(path.relative_to(ROOT)) for path in declaring)
    for path in declaring:
        rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|.*\S \|$", sections[str(path.relative_to(ROOT))], re.MULTILINE)
        assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows} == messages_of(path)
        assert len(rows) == len(messages_of(path)), "a message has two rows"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    gone = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert gone == []


def test_the_code_refers_to_documents_of_the_repository() -> None:
    files = [path for top in ("spmd", "transforms", "mesh", "kernels") for path in (ROOT / top).rglob("*.py")]
    assert [str(path) for path in files if re.search(r"\b(DESIGN|STYLE)\b", path.read_text())] == []
    for path in files:
        for page in re.findall(r"\bdocs/\w+\.md\b", path.read_text()):
            assert (ROOT / page).exists(), f"{path} refers to {page}"


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_page(page: str) -> None:
    """What docs/style.css makes room for; of what programs print only pictures and tables have to fit."""
    wide = []
    for fence in re.finditer(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        lines = [line for line in fence[2].splitlines() if len(line) > 100]
        wide += lines if fence[1] not in ("", "text") else [line for line in lines if "  " in line]
    assert wide == []
