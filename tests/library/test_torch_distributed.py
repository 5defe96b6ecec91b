"""torch's programs on the process group "spmd" (see `torch_programs`), and what such a group holds and gives back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import ENDS_WHOLLY, FORKED_CHILDREN, HERE, launched, run, script
from torch_programs import PROGRAMS, SLOW

RANKS = 2
STACK = "spmd torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint torch.distributed.tensor.parallel"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """What each rank said of each program; one run of all, since most take less than a second."""
    imported = {"FORKED_WITH": f"{STACK} torch.distributed.pipelining torch.distributed.optim"}  # once for all ranks
    code, out, err = launched(RANKS, str(Path(HERE) / "torch_programs.py"), env=ENDS_WHOLLY | imported)
    assert code == 0, err
    found: dict[str, list[str]] = {}
    for name, text in re.findall(r"^(\w+): ((?:.|\n)*?)(?=^\w+: (?:ok|Traceback)|\Z)", out, re.MULTILINE):
        found.setdefault(name, []).append(text.strip())
    return found


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - SLOW))
def test_program(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["ok"]


def test_groups_in_any_order_that_overlap() -> None:
    """With three ranks each is in two pairs, and torch gives a pair another name on each of its ranks."""
    code, out, err = launched(3, str(Path(HERE) / "torch_programs.py"), "groups_in_any_order")
    assert (code, out) == (0, "groups_in_any_order: ok\n"), err


GROUPS = """
import gc, os, sys, torch, torch.distributed as dist
import spmd
from patience import until

rank, size = int(os.environ["SPMD_RANK"]), int(os.environ["SPMD_SIZE"])

def maps():
    with open("/proc/self/maps") as file:
        return sum("spmd-arena" in line for line in file)

def top():
    # up to where in the arena this rank has handed out memory; a group takes a megabyte
    return dist.group.WORLD.world.watch.top

def begin(name):
    dist.init_process_group("cpu:spmd", store=dist.FileStore(f"{sys.argv[1]}/{name}", size), rank=rank, world_size=size)

def use(group):
    x = torch.full((1 << 16,), 1.0)
    dist.all_reduce(x, group=group)
    assert x[-1] == size
    y = torch.ones(3)
    dist.send(y, 1, group=group) if rank == 0 else dist.recv(y, 0, group=group) if rank == 1 else None
    dist.barrier(group=group, async_op=True).get_future().wait()
    # More than are under way at once, which nobody receives.
    return [dist.isend(x, 1, group=group) for _ in range(40)] if rank == 0 else []

begin("first")
for number in range(500):
    group = dist.new_group()
    kept = use(group) if number % 10 == 0 else []
    dist.destroy_process_group(group)
    if number == 100:
        before = top()
del group, kept
grown = top() - before
dist.destroy_process_group()
for number in range(5):  # and again, each with an arena of its own
    begin(f"again {number}")
    kept = use(None)
    dist.destroy_process_group()
    del kept  # works that are dropped after their group

def is_gone():
    gc.collect()
    return not maps()

until(is_gone)  # the thread that has completed the last future holds its work for a moment longer
sys.stdout.write(f"{rank} grown {grown} maps {maps()}\\n")
"""


def test_groups_that_are_gone_hold_nothing(tmp_path: Path) -> None:
    code, out, err = launched(RANKS, script(tmp_path, GROUPS), str(tmp_path))
    assert code == 0, err
    for line in out.splitlines():
        _, _, grown, _, maps = line.split()
        assert int(grown) < 32 << 20 and int(maps) == 0, out
    assert len(out.splitlines()) == RANKS


PEERS = """
import os, sys, time, torch, torch.distributed as dist
import spmd

rank, size = int(os.environ["SPMD_RANK"]), int(os.environ["SPMD_SIZE"])
dist.init_process_group("spmd", store=dist.FileStore(sys.argv[1] + "/store", size), rank=rank, world_size=size)
pair, everyone = dist.new_group([0, 1]), dist.new_group()
if rank == 2:
    os._exit(0)  # its death is nothing to the other two
for _ in range(300):
    dist.all_reduce(torch.ones(1 << 12), group=pair)
sys.stdout.write("the pair went on\\n")
try:
    dist.barrier()
except spmd.PeerLost as error:
    sys.stdout.write(f"lost {error.rank}\\n")
if rank == 0:
    dist.destroy_process_group()
    while not os.path.exists(sys.argv[1] + "/told"):
        time.sleep(0.01)
else:
    try:
        dist.recv(torch.ones(1), group=everyone)  # from any, of whom the other one left because the third had died
    except spmd.PeerLost as error:
        sys.stdout.write(f"lost {error.rank}\\n")
    open(sys.argv[1] + "/told", "w").close()
"""


def test_a_death_is_told_to_those_who_wait(tmp_path: Path) -> None:
    code, out, err = launched(3, script(tmp_path, PEERS), str(tmp_path), env=ENDS_WHOLLY)
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", *3 * ["lost 2"], *2 * ["the pair went on"]]


ENDING = """
import os, sys, threading, time, torch, torch.distributed as dist
import spmd

rank, size = int(os.environ["SPMD_RANK"]), int(os.environ["SPMD_SIZE"])
dist.init_process_group("spmd", store=dist.FileStore(sys.argv[1] + "/store", size), rank=rank, world_size=size)
begun = threading.Event()

def busy(done):
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.ones(1000).sum()
    sys.stdout.write("over\\n")

dist.all_reduce(torch.ones(3), async_op=True).get_future().then(busy)
dist.barrier(async_op=True).get_future()  # one that nobody waits for any more
begun.wait()
"""


def test_a_program_that_ends_amid_a_callback_ends_well(tmp_path: Path) -> None:
    """An interpreter that ends while a thread is in torch's code aborts the process."""
    code, out, err = launched(RANKS, script(tmp_path, ENDING), str(tmp_path), env=ENDS_WHOLLY)
    assert (code, out) == (0, RANKS * "over\n"), err


def test_the_program_of_the_page_under_torchrun() -> None:
    docs = Path(HERE).parent / "docs"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    code, out, err = run(*launcher, str(docs / "torch" / "train.py"), env=FORKED_CHILDREN)
    assert code == 0, err
    assert f"```text\n{out}```" in (docs / "torch_distributed.md").read_text()


@pytest.mark.parametrize(
    "order",
    ["import torch.distributed, spmd", pytest.param("import spmd, torch.distributed", marks=pytest.mark.long)],
)
def test_registered_whatever_is_imported_first(order: str) -> None:
    source = f"import sys; {order}; print(torch.distributed.Backend('spmd'), 'spmd.kernels' in sys.modules)"
    code, out, err = run("-c", source, fresh=True)
    assert (code, out.split()) == (0, ["spmd", "False"]), err
