"""The house: one import package, imports one way and in no circle, small files, public names as documented, doctests.

Lists of exceptions only shrink: a test fails, too, where one of its exceptions is no longer needed.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import HANGS
from torch.utils._device import _device_constructors

import spmd

ROOT = Path(__file__).parents[2]
# Each folder may import itself and what stands below it.
FOLDERS = ("kernels", "mesh", "transforms", "spmd")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = ["spmd", *(part for part in parts if part not in ("spmd", "__init__"))]
    return ".".join(package)


MODULES = [module_of(path) for path in FILES]


def python(source: str, cwd: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", source, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- packages and imports ---------------------------------------------------------------------------------------------


def test_nothing_is_loaded_under_a_bare_name(imported: list[str]) -> None:
    for loaded in (imported[1].split(), list(sys.modules)):
        assert "torch" in loaded
        bare = [name for name in loaded if name.partition(".")[0] in FOLDERS[:-1]]
        assert not bare


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The calls and imports in a file, for all tests that look at them."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call | ast.stmt)]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of everything that a file imports, wherever in it."""
    name = module_of(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:  # `from .. import mesh` names a folder, `from . import __version__` does not
                below = f"{base}.{alias.name}"
                yield node.lineno, below if below in MODULES else base


def test_imports_run_one_way() -> None:
    wrong = []
    for path in FILES:
        level = FOLDERS.index(path.relative_to(ROOT).parts[0])
        for line, name in imports_of(path):
            if name.partition(".")[0] == "spmd":
                parts = name.split(".")
                folder = parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "spmd"
                if FOLDERS.index(folder) > level:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            elif name.partition(".")[0] in FOLDERS[:-1]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} by its bare name")
    assert not wrong


# Files that import each other: each circle that is still there lies within one of these.
CYCLES: list[set[str]] = []


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules in which each leads to every other.

    >>> circles({"a": {"b"}, "b": {"a", "c"}, "c": set()})
    [{'a', 'b'}]
    """

    def reached(start: str) -> set[str]:
        found, todo = set[str](), [start]
        while todo:
            new = imports[todo.pop()] - found
            found |= new
            todo += new
        return found

    all_reached = {name: reached(name) for name in imports}
    found: list[set[str]] = []
    for name in sorted(imports):
        if name in all_reached[name] and not any(name in circle for circle in found):
            found.append({name} | {other for other in all_reached[name] if name in all_reached[other]})
    return found


def test_no_two_files_import_each_other() -> None:
    """Imports for type checking included."""
    imports = {
        module_of(path): {name for _, name in imports_of(path) if name in MODULES} - {module_of(path)} for path in FILES
    }
    found = circles(imports)
    new = [sorted(circle) for circle in found if not any(circle <= known for known in CYCLES)]
    assert not new, f"files that import each other, for types only or not: {new}"
    gone = [sorted(known) for known in CYCLES if not any(circle <= known for circle in found)]
    assert not gone, f"no circle any more, take it from CYCLES: {gone}"


LINES = 350  # of a product file, at most
LONGER: dict[str, int] = {}


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > LONGER.get(name, LINES)}
    assert not long, f"longer than {LINES} lines: look for the second idea in it"
    gone = [name for name in LONGER if lines.get(name, 0) <= LINES]
    assert not gone, f"short enough, or gone: take it from LONGER: {gone}"


FILES_IN_A_FOLDER = 22


def test_folders_are_small() -> None:
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in FILES)
    assert {folder: count for folder, count in counts.items() if count > FILES_IN_A_FOLDER} == {}


QUIET = """
import os, sys, threading
import torch, numpy, optree, cloudpickle

def seen():
    children = [pid for pid in os.listdir("/proc") if pid.isdigit() and parent(pid) == os.getpid()]
    return children, threading.enumerate(), len(os.listdir("/proc/self/task")), sorted(os.listdir("/proc/self/fd"))

def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None

before = seen()
from spmd import *
assert seen() == before, (before, seen())
assert not torch.cuda.is_initialized()
print(*(name for name in ("cupy", "mpi4py", "matplotlib", "sklearn", "torch.distributed.run") if name in sys.modules))

import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a new Python prints once it has imported the public names, and then all files."""
    return python(QUIET, tmp_path_factory.mktemp("imported"), *MODULES).splitlines()


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Else on the program's `torch.set_default_device("cuda")`, and what ranks tell each other would lie on GPUs."""
    makers = {maker.__name__ for maker in _device_constructors()}
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if "bench" not in path.parts
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if not {"device", None}.intersection(keyword.arg for keyword in node.keywords)
    ]
    assert not unnamed


def test_import_is_quiet(imported: list[str]) -> None:
    """No process, no thread, no open file, no CUDA, nothing imported that is an extra."""
    assert imported[0] == ""


# -- tests speak through the public interface --------------------------------------------------------------------------

# A path to a private module, also within the text of a program that a test runs.
_INNER = r"(?:kernels|mesh|transforms|checkpoint|optim|cli|_[a-z]\w*)\b"
PRIVATE = re.compile(rf"\bspmd\.{_INNER}|\bfrom spmd import (?:\w+(?: as \w+)?, )*{_INNER}")


def test_tests_speak_through_the_public_interface() -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    private = [str(path.relative_to(ROOT)) for path in files if PRIVATE.search(path.read_text())]
    assert 3 * len(private) <= len(files), f"more than a third, {len(private)} of {len(files)}, do not: {private}"


# -- public names -----------------------------------------------------------------------------------------------------


def test_public_names_are_imported_when_asked_for(tmp_path: Path) -> None:
    """The command line answers without torch; type checkers are told of the same names."""
    assert python("import sys, spmd, spmd.cli.main; print('torch' in sys.modules)", tmp_path).strip() == "False"
    declared = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse((ROOT / "spmd" / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    assert declared == {(home, name) for name, home in spmd._HOME_OF.items()}
    assert all(hasattr(spmd, name) for name in spmd.__all__) and not hasattr(spmd, "nothing_of_ours")


SIGNATURES = {
    "Mesh": "(axes=None, *, backend='auto', device='auto', threads=None, seed=0, timeout=300.0, on_loss='rerun', "
    "grace=30.0, hosts=None, copies=0)",
    "Mesh.coords": "(self, rank=None)",
    "Mesh.close": "(self)",
    "Mesh.run": "(self, fn, *args, ranks=None)",
    "Mesh.submit": "(self, fn, *args, rank=0)",
    "Mesh.stacks": "(self)",
    "Mesh.status": "(self)",
    "Mesh.resize": "(self, axes, *, wait=True)",
    "Mesh.retire": "(self, rank)",
    "Mesh.reload": "(self, *modules)",
    "Mesh.restart": "(self)",
    "Mesh.comm": "(self, axis=None, *, ranks=None)",
    "Mesh.remote": "(self, cls, *args, rank=0, restore=False, **kwargs)",
    "Ref.get": "(self, timeout=None)",
    "Ref.done": "(self)",
    "Ref.cancel": "(self)",
    "Ref.cancelled": "(self)",
    "Ref.exception": "(self, timeout=None)",
    "Ref.add_done_callback": "(self, fn)",
    "P": "(*entries)",
    "Array.shards": "(self)",
    "Array.full": "(self)",
    "Array.item": "(self)",
    "Array.dim": "(self)",
    "Array.numel": "(self)",
    "Array.size": "(self, dim=None)",
    "Array.tolist": "(self)",
    "Array.numpy": "(self, *, force=False)",
    "Array.to_dtensor": "(self)",
    "from_dtensor": "(dtensor, *, mesh=None)",
    "put": "(tree, spec=P(), *, mesh=None)",
    "fetch": "(tree)",
    "Sharded": "(local, spec)",
    "spmd": "(f=None, *, mesh=None, in_specs=None, out_specs=None, donate=(), check='first')",
    "data_parallel": "(f=None, *, axis='data', batch='batch', shards=None, bucket_mb=25.0, wire_dtype=None)",
    "grad": "(f, argnums=0, *, has_aux=False, axes=None)",
    "mean_of": "(total, count)",
    "value_and_grad": "(f, argnums=0, *, has_aux=False, axes=None)",
    "psum": "(x, axis)",
    "pmean": "(x, axis)",
    "pmax": "(x, axis)",
    "pmin": "(x, axis)",
    "all_gather": "(x, axis, *, dim=0, tiled=False)",
    "psum_scatter": "(x, axis, *, dim=0, tiled=False)",
    "ppermute": "(x, axis, perm)",
    "all_to_all": "(x, axis, split_dim, concat_dim, *, tiled=False)",
    "pbroadcast": "(x, axis, source)",
    "axis_index": "(axis)",
    "axis_size": "(axis)",
    "barrier": "(axis=None)",
    "Sampler": "(length, batch_size, *, seed=0, shuffle=True, drop_last=False, order='feistel')",
    "Sampler.batch": "(self, epoch, step)",
    "Sampler.shard": "(self, epoch, step, rank, size, shards=None)",
    "Loader": "(dataset, batch_size, *, mesh=None, seed=0, shuffle=True, drop_last=False, collate_fn=None, "
    "prefetch=2, shards=None, order='feistel', workers=0, prefetch_mb=512.0)",
    "evaluate": "(step, loader, *args)",
    "Stream": "(shards, open)",
    "Stream.map": "(self, function)",
    "Stream.filter": "(self, predicate)",
    "Stream.shuffle": "(self, window)",
    "Stream.pack": "(self, length, *, pad=None)",
    "Stream.mix": "(streams, weights=None)",
    "Stream.jsonl": "(paths)",
    "Stream.parquet": "(paths, columns=None)",
    "Stream.tar": "(paths)",
    "Stream.records": "(paths, nbytes)",
    "Loader.state_dict": "(self)",
    "Loader.load_state_dict": "(self, state)",
    "random_key": "(*data)",
    "save": "(path, tree, *, step=None, keep=None, background=False)",
    "restore": "(path, *, like=None, mesh=None)",
    "functional": "(module)",
    "functional_with_buffers": "(module, *, sync=False)",
    "optimizer": "(cls, *, shard='auto', groups=None, schedule=None, clip=None, **hyper)",
    "ema": "(opt, decay=0.999)",
    "check": "(step, axes, *args)",
    "count_collectives": "()",
    "initialize": "(rank, size, *, init_method=None, store=None, local_rank=None, local_size=None, interface=None)",
    "register_backend": "(name, factory)",
    "visualize": "(value, *, mesh=None, epoch=0)",
}
# Methods without an underscore that only the library calls: the API page leaves them out.
HIDDEN = re.compile("|".join(re.findall(r'"!(\^\(.*\)\$)"', (ROOT / "mkdocs.yml").read_text())))
ATTRIBUTES = {
    "Mesh": ["axes", "size", "rank", "is_driver", "backend", "device", "device_mesh", "__enter__", "__exit__"],
    "Ref": ["__await__", "__repr__"],
    "Array": ["shape", "dtype", "spec", "mesh", "local", "__float__", "__array__", "__repr__"],
    "Sampler": ["__len__"],
    "Loader": ["__len__", "__iter__"],
}
COMMUNICATOR = (
    *("rank", "size", "send", "recv", "isend", "irecv", "broadcast", "all_reduce", "reduce", "gather", "scatter"),
    *("all_gather", "reduce_scatter", "all_to_all", "barrier", "abort", "empty"),
)
ERRORS = {
    "SpmdError": Exception,
    "SpecError": ValueError,
    "MeshError": RuntimeError,
    "CollectiveMismatch": RuntimeError,
    "PeerLost": ConnectionError,
    "RemoteError": RuntimeError,
}


def find(name: str) -> Any:
    found: Any = spmd
    for part in name.split("."):
        found = getattr(found, part)
    return found


def signature(obj: Any) -> str:
    """A signature as text, without annotations."""
    plain = inspect.signature(obj)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in plain.parameters.values()]
    return str(plain.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_signatures() -> None:
    assert {name: signature(find(name)) for name in SIGNATURES} == SIGNATURES


def test_every_public_name_has_its_signature() -> None:
    """But for exceptions, and what only the library makes or calls."""
    hidden = {name for name in public() if "." in name and HIDDEN.match(name.partition(".")[2])}
    assert {"Mesh.check_driver", "Array.hint"} <= hidden
    assert public().keys() - hidden - {*MADE_BY_THE_LIBRARY} == SIGNATURES.keys() & public().keys()


def test_attributes(shared_mesh: Any) -> None:
    mesh = shared_mesh({"data": 2})
    objects = {"Mesh": mesh, "Array": spmd.put(torch.ones(2), mesh=mesh)}
    for name, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            assert attribute in dir(objects.get(name, find(name))), f"{name}.{attribute}"
    missing = mesh.run(lambda: [name for name in COMMUNICATOR if name not in dir(mesh.comm())])
    assert missing == [[], []]


def test_errors() -> None:
    for name, builtin in ERRORS.items():
        assert issubclass(find(name), spmd.SpmdError)
        assert issubclass(find(name), builtin)


MADE_BY_THE_LIBRARY = ("Array", "Ref", "Remote", *ERRORS)
NOTHING_TO_SAY = {"Sharded": {"Raises"}, "count_collectives": {"Args"}}


# -- docstrings -------------------------------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    """All that `import spmd` offers to call, and the public methods of its classes."""
    found = {}
    for name in spmd.__all__:
        obj = found[name] = getattr(spmd, name)
        if inspect.isclass(obj):
            members = vars(obj).items()
            found |= {
                f"{name}.{key}": member
                for key, member in members
                if not key.startswith("_") and inspect.isfunction(member)
            }
    return found


def test_docstrings() -> None:
    lacking = {name: lack for name, obj in public().items() if (lack := lacks(name, obj))}
    assert not lacking


def lacks(name: str, obj: Any) -> list[str]:
    """What the docstring of a public name lacks."""
    text = inspect.cleandoc(obj.__doc__ or "")
    if not re.search(r"[.:]($|\n)", text.partition("\n\n")[0]):
        return ["a sentence as its first paragraph"]
    if name in MADE_BY_THE_LIBRARY or "." in name:  # a method may say all in its sentence
        return []
    # "Args:", "Args, Returns, Raises: as `psum`."
    headings = {
        word for line in re.findall(r"^([A-Z]\w+(?:, [A-Z]\w+)*):", text, re.MULTILINE) for word in line.split(", ")
    }
    needed = {"Args", "Raises"}
    if not inspect.isclass(obj) and inspect.signature(obj).return_annotation not in (None, "None"):
        needed.add("Returns")
    return sorted(needed - headings - NOTHING_TO_SAY.get(name, set()))


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    names = {key: getattr(spmd, key) for key in spmd.__all__}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, globs={"torch": torch, "np": np, **names, **vars(module)}):
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)
