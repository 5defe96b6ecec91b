"""The process group "spmd" over several hosts, network namespaces of this machine, as torchrun starts it on each.

Skipped, with the reason, where namespaces can't be made (they need root and iproute2).
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest
import several_hosts
from patience import HANGS
from scripts import HERE, script
from several_hosts import namespaces

REASON = namespaces.unavailable()
pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PROGRAMS = [
    "ddp",
    "ddp_that_a_rank_leaves",
    "fsdp2",
    "messages",
    "monitored_barrier",
    "objects",
    "objects_of_strangers",
]


def on_two_hosts(program: str, *arguments: str, **environ: str) -> list[tuple[int, str, str]]:
    """Of each host: exit code, output and error output of its two ranks."""
    with namespaces.nodes(2) as places:
        processes = several_hosts.started(places, 2, program, *arguments, **environ)
        try:
            told = [process.communicate(timeout=HANGS) for process in processes]
        finally:
            several_hosts.end(processes)
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def test_programs() -> None:
    first, second = on_two_hosts(str(Path(HERE) / "torch_programs.py"), *PROGRAMS, SPMD_SECRET=secrets.token_hex())
    assert first[0] == second[0] == 0, (first, second)
    assert sorted(first[1].splitlines()) == [f"{name}: ok" for name in sorted(PROGRAMS)], first
    assert second[1] == "", second


# As torchrun starts them: where they meet, and who they are, is in the environment.
JOB = """
import datetime, os, pathlib, sys, time, torch
import torch.distributed as dist
import spmd

rank, folder = int(os.environ["SPMD_RANK"]), pathlib.Path(__file__).parent

def await_all(what):  # that they have come so far, by files, which all see
    (folder / f"{what}-{rank}").touch()
    while len([*folder.glob(f"{what}-*")]) < 4:
        time.sleep(0.01)

host, _, port = os.environ["SPMD_INIT_METHOD"].removeprefix("tcp://").partition(":")
os.environ.update(RANK=str(rank), WORLD_SIZE=os.environ["SPMD_SIZE"], MASTER_ADDR=host, MASTER_PORT=port)
if rank >= 2:  # the other host
    os.environ.update(item.split("=") for item in sys.argv[2:])
await_all("started")
try:
    dist.init_process_group("spmd", timeout=datetime.timedelta(seconds=int(sys.argv[1])))
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    if rank == 3:
        sys.stdout.write(f"{total.item()} {dist.group.WORLD.world.backend}\\n")
        sys.stdout.flush()
        os._exit(0)
    dist.all_reduce(total)
except spmd.SpmdError as error:
    sys.stdout.write(f"{rank} {type(error).__name__} {error}\\n")
    sys.stdout.flush()
    if isinstance(error, spmd.MeshError):
        await_all("refused")  # rank 0 keeps the store in which the others read what is wrong
os._exit(0)
"""


def told(text: str) -> list[str]:
    """What the ranks of a host said, by rank."""
    return sorted(re.split(r"(?<=\n)(?=\d)", text))


def test_a_death_ends_all_that_wait_for_it(tmp_path: Path) -> None:
    """At once on its host, and on the other one as soon as its leader's connections end."""
    first, second = on_two_hosts(script(tmp_path, JOB), "60", SPMD_SECRET=secrets.token_hex())
    zero, one = told(first[1])
    two, three = told(second[1])
    assert zero.startswith("0 PeerLost") and one.startswith("1 PeerLost"), first
    assert two.startswith("2 PeerLost rank 3 died or exited while rank 2 waited for it"), second
    assert three == "4.0 hierarchical\n", second


def test_who_does_not_know_the_secret(tmp_path: Path) -> None:
    other = "SPMD_SECRET=the secret of another"
    for _, out, err in on_two_hosts(script(tmp_path, JOB), "6", other, SPMD_SECRET="the secret of one host"):
        for rank in told(out):
            assert re.match(r"\d MeshError ", rank) and "have the same secret" in rank, (out, err)
        assert len(told(out)) == 2, (out, err)
