"""The house: one import package, imports that run one way, a quiet import, the public names as documented, doctests."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmd

ROOT = Path(__file__).parent.parent
# Each folder may import itself and what stands below it.
FOLDERS = ("kernels", "mesh", "transforms", "spmd")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def module_of(path: Path) -> str:
    package = "spmd" if path.parent.name == "spmd" else f"spmd.{path.parent.name}"
    return package if path.stem == "__init__" else f"{package}.{path.stem}"


MODULES = [module_of(path) for path in FILES]


def python(source: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- packages and imports ---------------------------------------------------------------------------------------------


def test_nothing_is_loaded_under_a_bare_name(tmp_path: Path) -> None:
    source = f"import sys, importlib\nfor name in {MODULES}: importlib.import_module(name)\nprint(*sys.modules)"
    for loaded in (python(source, tmp_path).split(), list(sys.modules)):
        bare = [name for name in loaded if name.partition(".")[0] in FOLDERS[:-1]]
        assert not bare


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of everything that a file imports, wherever in it."""
    name = module_of(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:  # `from .. import mesh` names a folder, `from . import __version__` does not
                below = f"{base}.{alias.name}"
                yield node.lineno, below if below in MODULES else base


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_run_one_way(path: Path) -> None:
    level = FOLDERS.index(path.parent.name)
    upward = []
    for line, name in imports_of(path):
        if name.partition(".")[0] == "spmd":
            parts = name.split(".")
            folder = parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "spmd"
            if FOLDERS.index(folder) > level:
                upward.append(f"{path.name}:{line} imports {name}")
        assert name.partition(".")[0] not in FOLDERS[:-1], f"{path.name}:{line} imports {name} by its bare name"
    assert not upward


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
import spmd
assert seen() == before, (before, seen())
assert not torch.cuda.is_initialized()
print(*(name for name in ("cupy", "mpi4py", "matplotlib", "sklearn", "torch.distributed.run") if name in sys.modules))
"""


def test_import_is_quiet(tmp_path: Path) -> None:
    """No process, no thread, no open file, no CUDA, nothing imported that is an extra."""
    assert python(QUIET, tmp_path).strip() == ""


# -- public names -----------------------------------------------------------------------------------------------------

SIGNATURES = {
    "Mesh": "(axes=None, *, backend='auto', device='auto', threads=None, seed=0, timeout=300.0)",
    "Mesh.coords": "(self, rank=None)",
    "Mesh.close": "(self)",
    "Mesh.run": "(self, fn, *args, ranks=None)",
    "Mesh.submit": "(self, fn, *args, rank=0)",
    "Mesh.comm": "(self, axis=None)",
    "P": "(*entries)",
    "Array.shards": "(self)",
    "Array.full": "(self)",
    "Array.item": "(self)",
    "put": "(tree, spec=P(), *, mesh=None)",
    "Sharded": "(local, spec)",
    "spmd": "(f=None, *, mesh=None, in_specs=None, out_specs=None, donate=(), check='first')",
    "data_parallel": "(f=None, *, axis='data', batch='batch', shards=None, bucket_mb=25.0, wire_dtype=None)",
    "grad": "(f, argnums=0, *, has_aux=False, axes=None)",
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
    "prefetch=2, shards=None)",
    "Loader.state_dict": "(self)",
    "Loader.load_state_dict": "(self, state)",
    "random_key": "(*data)",
    "save": "(path, tree, *, step=None, keep=None, background=False)",
    "restore": "(path, *, like=None, mesh=None)",
    "functional": "(module)",
    "functional_with_buffers": "(module)",
    "optimizer": "(cls, *, shard=None, **hyper)",
}
ATTRIBUTES = {
    "Mesh": ["axes", "size", "rank", "is_driver", "backend", "device", "__enter__", "__exit__"],
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


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert signature(find(name)) == SIGNATURES[name]


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


MADE_BY_THE_LIBRARY = ("Array", *ERRORS)
NOTHING_TO_SAY = {"Sharded": {"Raises"}, "register_backend": {"Raises"}}


# -- docstrings -------------------------------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    """All that `import spmd` offers to call, and the public methods of its classes."""
    found = {}
    for name, obj in vars(spmd).items():
        if name.startswith("_") or inspect.ismodule(obj):
            continue
        found[name] = obj
        if inspect.isclass(obj):
            members = vars(obj).items()
            found |= {
                f"{name}.{key}": member
                for key, member in members
                if not key.startswith("_") and inspect.isfunction(member)
            }
    return found


@pytest.mark.parametrize("name", public())
def test_docstring(name: str) -> None:
    obj = public()[name]
    text = inspect.cleandoc(obj.__doc__ or "")
    assert text, "it has none"
    assert re.search(r"[.:]($|\n)", text.partition("\n\n")[0]), "its first paragraph is no sentence"
    if name in MADE_BY_THE_LIBRARY or "." in name:  # a method may say all in its sentence
        return
    # "Args:", "Args, Returns, Raises: as `psum`."
    headings = {
        word for line in re.findall(r"^([A-Z]\w+(?:, [A-Z]\w+)*):", text, re.MULTILINE) for word in line.split(", ")
    }
    needed = {"Args", "Raises"}
    if not inspect.isclass(obj) and inspect.signature(obj).return_annotation not in (None, "None"):
        needed.add("Returns")
    missing = sorted(needed - headings - NOTHING_TO_SAY.get(name, set()))
    assert not missing, f"the docstring of {name} lacks {missing}"


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    names = {key: value for key, value in vars(spmd).items() if not key.startswith("_") and not inspect.ismodule(value)}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for test in doctest.DocTestFinder().find(module, globs={"torch": torch, "np": np, **names, **vars(module)}):
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)
