"""Limits of the operating system while a mesh runs: an error that names them, after which the mesh works."""

from __future__ import annotations

import os

import pytest
from fork_server import ForkServer

# Fills a process's table of descriptors, frees it, and tells whether an error names the limit.
FILLED = """
import os, resource, sys
import torch
from spmd import Mesh, P, SpmdError, psum, spmd
LARGE = torch.ones(1 << 20)
def fill():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
    sys.held = []
    try:
        while True:
            sys.held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
def free():
    while sys.held:
        os.close(sys.held.pop())
def told(do):
    try:
        return do()
    except SpmdError as error:
        return "RLIMIT_NOFILE" in str(error)
"""


def test_a_rank_that_can_open_no_more_files(server: ForkServer) -> None:
    """Large arguments and results come by descriptor: who can take none says so, and goes on once it can."""
    code = (
        FILLED
        + """
class Counter:
    def add(self, x):
        return float(x.sum())
with Mesh({"data": 2}) as mesh:
    counter = mesh.remote(Counter, rank=1)
    mesh.run(fill, ranks=[1])
    print(told(lambda: mesh.run(lambda x: float(x.sum()), LARGE)))
    print(told(lambda: counter.add(LARGE).get()))
    mesh.run(fill, ranks=[0])
    print(told(lambda: mesh.remote(Counter, rank=0)))  # nobody has called it so far: it would have to let us in
    print(mesh.run(lambda: mesh.rank))
    mesh.run(free, ranks=[0])
    mesh.run(free, ranks=[1])
    print(mesh.run(lambda x: float(x.sum()), LARGE), counter.add(LARGE).get(), mesh.remote(Counter).add(LARGE).get())
    fill()
    print(told(lambda: mesh.run(lambda: torch.ones(1 << 20))))
    print(told(lambda: mesh.run(lambda x: float(x.sum()), LARGE)))
    print(mesh.run(lambda: mesh.rank))
    free()
    print([float(one.sum()) for one in mesh.run(lambda: torch.ones(1 << 20))])
"""
    )
    out, err = server.start(code, environ=os.environ).communicate()
    sums = ["1048576.0"] * 2
    right = f"[{', '.join(sums)}]"
    assert out == f"True\nTrue\nTrue\n[0, 1]\n{right} 1048576.0 1048576.0\nTrue\nTrue\n[0, 1]\n{right}\n", out + err


def test_a_function_that_a_rank_could_not_take(server: ForkServer) -> None:
    """What it captures comes by descriptor: it is sent again when it is called again, though nothing of it changed."""
    code = (
        FILLED
        + """
with Mesh({"data": 2}) as mesh:
    def total():
        return float(LARGE.sum())
    step = spmd(lambda x: psum(x.sum() * LARGE.sum(), "data"), mesh=mesh, in_specs=P("data"))
    x = torch.ones(2)
    mesh.run(fill, ranks=[1])
    for _ in range(2):
        print(told(lambda: mesh.run(total)), told(lambda: float(step(x))))
    mesh.run(free, ranks=[1])
    for _ in range(2):
        print(mesh.run(total), float(step(x)))
"""
    )
    out, err = server.start(code, environ=os.environ).communicate()
    right = "[1048576.0, 1048576.0] 2097152.0\n"
    assert out == "True True\n" * 2 + right * 2, out + err


def want_of_memory(limits: list[str], most: str) -> str:
    """A program that prints the error for a lack of memory, where these limits are set so."""
    return f"""
import errno, os, resource
import torch, numpy
from spmd import MeshError
from spmd.kernels.limits import named_limits
for name in {limits}:
    resource.setrlimit(getattr(resource, name), ({most}, {most}))
try:
    with named_limits():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
except MeshError as error:
    print(error)
"""


@pytest.mark.parametrize(("name", "bytes_"), [("RLIMIT_AS", 4 << 30), ("RLIMIT_DATA", 64 << 20)])
def test_the_limit_that_is_set_is_the_one_that_is_named(server: ForkServer, name: str, bytes_: int) -> None:
    code = want_of_memory([name], str(bytes_))
    out, err = server.start(code, environ=os.environ).communicate()
    assert f"allows, {name} (" in out, out + err


def test_memory_that_no_limit_of_the_process_withholds(server: ForkServer) -> None:
    """The system has none left, or no more mappings: the advice is not to raise a limit that is not set."""
    code = want_of_memory(["RLIMIT_AS", "RLIMIT_DATA"], "resource.RLIM_INFINITY")
    out, err = server.start(code, environ=os.environ).communicate()
    assert "the operating system has no memory left" in out and "vm.max_map_count" in out, out + err
    assert "ulimit" not in out
