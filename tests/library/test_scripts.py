"""Programs as users run them: what `__main__` defines travels, errors reach the terminal, nothing stays behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from patience import end_within
from scripts import ENDS_WHOLLY, HERE, run, script

ROOT = Path(__file__).parents[2]

PROGRAM = """
import collections, dataclasses, os
from typing import NamedTuple
import optree, torch
from spmd import Mesh, P, SpecError, axis_index, put, spmd

class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

@optree.dataclasses.dataclass(namespace="spmd")
class Layer:
    w: torch.Tensor
    name: str = optree.dataclasses.field(default="", pytree_node=False)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
    def forward(self, x):
        return helper(self.linear(x))

class Broken(Exception):
    def __init__(self, code, detail):
        super().__init__(f"broken {code}")
        self.code, self.detail = code, detail
    def __reduce__(self):
        return Broken, (self.code, self.detail)

class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

@dataclasses.dataclass
class Options:
    width: int

def helper(x):
    return x * SCALE

SCALE = 2.0
mesh = Mesh({"data": 2})
print("pids", *mesh.driver.pids)
model = Model()

@spmd(mesh=mesh)
def step(point, layer, options):
    return Point(point.x + layer.w, helper(point.y)), Layer(layer.w * options.width, layer.name + "!"), options

@spmd(mesh=mesh)
def forward(x):
    return model(x)

for scale in (2.0, 3.0):
    SCALE = scale
    point, layer, options = step(Point(torch.ones(2), torch.ones(1)), Layer(torch.ones(2), "first"), Options(4))
    print(type(point).__name__, point.x.full().tolist(), point.y.item())
    print(type(layer) is Layer, layer.name, layer.w.full().tolist(), options)
x = torch.randn(3, 2)
print("model", torch.allclose(forward(x).full(), model(x)))
try:
    mesh.run(lambda: (_ for _ in ()).throw(Broken(7, ["more"])))
except Broken as error:
    print("caught", error, error.code, error.detail)
def unpicklable():
    raise Unpicklable("one", "two")
try:
    mesh.run(unpicklable)
except Exception as error:
    print("caught", type(error).__name__, error)
print("main", mesh.run(lambda: __name__))
print("mesh in a class", mesh.run(type("Holder", (), {"__call__": lambda self: mesh.rank})()))
def one_by_one():
    for rank in range(mesh.size):
        if rank == mesh.rank:
            print("printed by", axis_index("data"), flush=True)
        mesh.comm().barrier()
mesh.run(one_by_one)
print("last")

@spmd(mesh=mesh)
def late(x):
    if float(x) == 2.0 and axis_index("data") == 1:
        raise ValueError("noticed at exit")
    return x + 1

late(late(late(torch.tensor(0.0))))
"""

EXPECTED = """Point [2.0, 2.0] 2.0
True first! [4.0, 4.0] Options(width=4)
Point [2.0, 2.0] 3.0
True first! [4.0, 4.0] Options(width=4)
model True
caught broken 7 7 ['more']
caught Unpicklable one and two
main ['__main__', '__main__']
mesh in a class [0, 1]
printed by 0
[rank 1] printed by 1
last
"""


@pytest.mark.parametrize("how", ["file", "-c"])
def test_a_program(how, tmp_path):
    arguments = (script(tmp_path, PROGRAM),) if how == "file" else ("-c", PROGRAM)
    _, out, err = run(*arguments, env=ENDS_WHOLLY)
    pids, out = out.split("\n", 1)
    assert out == EXPECTED, err
    assert "ValueError: noticed at exit" in err and "on rank 1 of Mesh" in err and "end with mesh.close()" in err
    if how == "file":
        assert re.search(r'program.py", line \d+, in late\n\s+raise ValueError', err)
    assert end_within(2, [int(pid) for pid in pids.split()[1:]])


DAEMONS = """
import atexit, threading
from spmd import Mesh

def calls(begun, call):
    while True:
        call()
        begun.set()

def fails():
    raise ValueError("of the thread itself")

def wait_for(threads):
    for thread in threads:
        thread.join()

threads = []
atexit.register(wait_for, threads)  # when the mesh has been closed
mesh = Mesh({"data": 2})
counter = mesh.remote(list, rank=1)
tries = [lambda: mesh.run(abs, 1), lambda: mesh.submit(abs, 1).result(), lambda: counter.append(1).get()]
for call in tries:
    begun = threading.Event()
    threads.append(threading.Thread(target=calls, args=(begun, call), daemon=True))
    threads[-1].start()
    begun.wait()
threads.append(threading.Thread(target=lambda: (wait_for(threads[:3]), fails()), daemon=True))
threads[-1].start()
"""


def test_daemon_threads_that_use_a_mesh_when_the_program_ends():
    """They end with it, and print nothing of that, as threads that use torch; other errors they print."""
    code, out, err = run("-c", DAEMONS, env=ENDS_WHOLLY)
    assert (code, out) == (0, "") and err.count("Traceback") == 1, err
    assert "MeshError" not in err and "ValueError: of the thread itself" in err


AT_THE_END = """
import atexit, sys, threading, time

class Held:
    def __del__(self):
        print("let go of", value, flush=True)

value, held = 1, Held()
held.cycle = held
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.1), print("waited for"))).start()
sys.exit(300)
"""


def test_the_end_of_a_forked_program_is_that_of_python():
    """The forks of these tests leave out what Python does to modules at the end, and nothing else."""
    expected = (300 % 256, "waited for\nregistered\nlet go of 1\n", "")
    assert run("-c", AT_THE_END) == run("-c", AT_THE_END, env=ENDS_WHOLLY) == expected
    (code, *_), (status, *_) = (run("-c", text) for text in ("raise KeyboardInterrupt", "import sys; sys.exit('why')"))
    assert (code, status) == (-signal.SIGINT, 1)


def test_a_session_typed_into_a_repl():
    typed = """
import torch
from spmd import Mesh, P, psum, spmd
mesh = Mesh({"data": 2})
rate = 2

def scaled(x):
    return x * rate

@spmd(mesh=mesh, in_specs=P("data"))
def total(x):
    return psum(scaled(x).sum(), "data")

print("first", float(total(torch.ones(4))))
rate = 3
print("second", float(total(torch.ones(4))))
def scaled(x):
    return x + 100

print("third", float(total(torch.ones(4))))
total(torch.ones(5))
mesh.run(lambda: 1 / 0)
print("still", mesh.run(lambda: rate))
print(mesh.describe())
"""
    code, out, err = run("-i", "-q", text=typed)
    assert code == 0, err
    assert [line for line in out.splitlines() if line] == [
        "first 8.0", "second 12.0", "third 404.0", "still [3, 3]", "Mesh({'data': 2}, backend='shm', device='cpu')",
    ], err  # fmt: skip
    assert "SpecError: dimension 0 of size 5 is not divisible" in err and "ZeroDivisionError: division by zero" in err
    frames = re.findall(r'File ".*/(?:spmd|mesh|transforms|kernels)/.*", line', err)
    assert not frames, err


def test_modules_beside_the_script(tmp_path):
    """A module that makes a mesh when it is imported is imported on the ranks too: there it means the same mesh."""
    (tmp_path / "library.py").write_text("""
import torch
from spmd import Mesh, P, psum, spmd
mesh = Mesh({"data": 2})

def helper(x):
    return x + mesh.size

@spmd(mesh=mesh, in_specs=P("data"))
def step(x):
    return psum(helper(x).sum(), "data")

def where():
    return mesh.rank
""")
    (tmp_path / "wrong.py").write_text("from spmd import Mesh\nmesh = Mesh({'data': 3})\ndef f(): return 1\n")
    program = """
import torch, library
print(float(library.step(torch.ones(4))), library.mesh.run(library.where))
import wrong
try:
    library.mesh.run(wrong.f)
except Exception as error:
    print(type(error).__name__, error)
print(library.mesh.run(library.where))
"""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("json", "torch", "spmd"):  # files in the current folder, which is not on the path of a script
        (elsewhere / f"{name}.py").write_text("raise ImportError('this was not meant')")
    _, out, err = run(script(tmp_path, program), cwd=elsewhere)
    lines = out.splitlines()
    assert lines[0] == "12.0 [0, 1]" and lines[2] == "[0, 1]", err
    assert "MeshError a rank made a Mesh, most likely by importing a module that makes one" in lines[1]
    assert "expected those of Mesh({'data': 2}" in lines[1] and "got axes {'data': 3}" in lines[1]


def test_a_file_named_as_a_library_is_named(tmp_path):
    """`from spmd import` takes an AttributeError for a name that spmd does not have, and would say so."""
    (tmp_path / "numpy.py").write_text("")
    code, _, err = run(script(tmp_path, "from spmd import Mesh"), fresh=True)
    assert code == 1
    assert "ImportError: spmd.Mesh cannot be imported: module 'numpy' has no attribute" in err


def test_installed_in_a_folder_of_its_own(tmp_path):
    """As by `pip install --target`: neither site-packages nor a checkout."""
    package = tmp_path / "packages" / "spmd"
    for source, folder in (("spmd", package), *((name, package / name) for name in ("transforms", "mesh", "kernels"))):
        shutil.copytree(ROOT / source, folder)
    program = """
import sys, torch
import spmd as library
from spmd import Mesh, data_parallel, functional, grad, spmd
print(library.__file__)
apply, params = functional(torch.nn.Linear(2, 1))

@spmd(mesh=Mesh({"data": 2}))
@data_parallel
def step(params, zero, batch):
    return grad(lambda params, x: apply(params, x).mean() / (1 / zero))(params, batch)

step(params, 1, torch.ones(4, 2))["weight"].full()
step(params, 0, torch.ones(4, 2))
"""
    environ = {"PYTHONPATH": f"{package.parent}{os.pathsep}{HERE}"}
    code, out, err = run("-W", "always", script(tmp_path, program), env=environ, fresh=True)
    assert code == 1 and out == f"{package}/__init__.py\n"
    assert "ZeroDivisionError" in err and "Warning" not in err
    assert not re.findall(r'File ".*/packages/spmd/.*", line', err), err


OPTIONS = """
import sys
from spmd import Mesh

look = lambda: (tuple(sys.flags), set(sys.warnoptions), sys._xoptions)
for hosts in (None, *sys.argv[1:]):
    with Mesh({"data": 2}, hosts=hosts) as mesh:
        print(mesh.run(look) == [look(), look()])
"""
LOCAL = "local:1x2"


@pytest.mark.long
def test_ranks_have_the_options_of_python(tmp_path):
    """Those by which a program means something else: no assertions (torch is compiled anew), warnings as errors."""
    flags = "-Ob" if sys.version_info < (3, 11) else "-ObP"
    code, out, err = run(flags, "-X", "dev", "-W", "error::UserWarning", script(tmp_path, OPTIONS), LOCAL, fresh=True)
    assert (code, out) == (0, "True\nTrue\n"), err


@pytest.mark.parametrize("hosts", [[], pytest.param([LOCAL], marks=pytest.mark.long)], ids=["here", LOCAL])
def test_variables_and_folders_that_python_was_told_to_ignore_are_ignored(tmp_path, hosts):
    """With them it could not even start."""
    (tmp_path / "sitecustomize.py").write_text("print('not meant')")
    environ = {"PYTHONHOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    code, out, err = run("-I", script(tmp_path, OPTIONS), *hosts, env=environ, fresh=True)
    assert (code, out) == (0, "True\n" * (1 + len(hosts))), err
