"""What happens between two hosts: the wire is cut, one direction of it is lost, a host's processes are killed.

    python bench/chaos_hosts.py    # needs root and iproute2; or chaos.py --hosts

Two network namespaces (`namespaces.py`) with two ranks each, launched, and driven by a program in the first of them
(`Mesh(hosts=, on_loss="raise")`; for one that goes on see `chaos_copies.py`). They train until the fault; then all that
still run must end with an `SpmdError`, at most a few seconds after the timeout. Prints how long that took, and how many
processes were left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import namespaces

TIMEOUT = 4.0
LIMIT = 30.0  # seconds after which what still runs is left

STEPS = """
import sys, time, torch
from pathlib import Path
from spmd import Mesh, psum, spmd
marks = Path(sys.argv[1])

def train(mesh):
    step = spmd(lambda x: psum(x, "data") / mesh.size, mesh=mesh)
    x = torch.ones(100_000)
    for number in range(10**9):
        x = step(x)
        float(x.full()[0])
        if number == 20:
            (marks / f"{mesh.rank}").touch()
        time.sleep(0.005)
"""

LAUNCHED = (
    STEPS
    + f"""
mesh = Mesh(timeout={TIMEOUT})
(marks / f"pid {{__import__('os').getpid()}}").touch()
train(mesh)
"""
)

DRIVEN = (
    STEPS
    + f"""
import os, subprocess

class Namespaces:
    hosts = [f"{{name}}:2" for name in sys.argv[2:]]
    def start(self, name, command, stdin):
        process = subprocess.Popen(["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE)
        process.stdin.write(stdin)
        process.stdin.close()
        (marks / f"agent {{name}} {{process.pid}}").touch()
        return process
    def stop(self, process):
        process.kill()
        process.wait()

with Mesh({{"data": 4}}, hosts=Namespaces(), threads=1, timeout={TIMEOUT}, on_loss="raise") as mesh:
    for pid in (os.getpid(), *mesh.run(os.getpid), *set(mesh.run(os.getppid))):
        (marks / f"pid {{pid}}").touch()
    train(mesh)
"""
)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started(places: list[namespaces.Node], driven: bool, marks: Path) -> list[subprocess.Popen]:
    if not driven:
        return namespaces.on_nodes(places, 2, ["-c", LAUNCHED, str(marks)])
    environ = {**os.environ, "SPMD_INTERFACE": places[0].address, "RES_OPTIONS": "timeout:1 attempts:1"}
    names = [place.name for place in places]
    command = [sys.executable, "-c", DRIVEN, str(marks), *names]
    pipe = subprocess.PIPE
    return [places[0].start(command, env=environ, stdout=pipe, stderr=pipe, text=True)]


def lost(fault: str, driven: bool) -> tuple[float, int, str]:
    """Seconds until all have ended, how many have not, and the first message."""
    with namespaces.nodes(2) as places, tempfile.TemporaryDirectory() as name:
        marks = Path(name)
        processes = started(places, driven, marks)
        count = 1 if driven else 4
        end = time.monotonic() + 60
        while len([*marks.glob("[0-9N]*")]) < count:
            if time.monotonic() > end or any(process.poll() is not None for process in processes):
                for process in processes:
                    process.kill()
                raise RuntimeError("they did not begin: " + processes[0].communicate()[1][-2000:])
            time.sleep(0.05)
        pids = [int(path.name.split()[1]) for path in marks.glob("pid *")]
        began = time.monotonic()
        if fault == "cut":
            places[1].cut()
        elif fault == "one way lost":
            places[1].deafen(places[0])
        elif driven:
            agents = [path.name.split() for path in marks.glob("agent *")]
            os.kill(next(int(pid) for _, name, pid in agents if name == places[1].name), signal.SIGKILL)
        else:
            for process in processes[2:]:
                process.kill()
        while any(map(runs, pids)) and time.monotonic() < began + LIMIT:
            time.sleep(0.01)
        seconds, left = time.monotonic() - began, [*filter(runs, pids)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        said = [process.communicate()[1].strip().splitlines() for process in processes]
        ours = [line for lines in said for line in lines if line.startswith("spmd.kernels.errors.")]
    return seconds, len(left), ours[-1] if ours else "nothing"


def report() -> int:
    """Print the results; returns how many were left, or ended without a message."""
    if (why := namespaces.unavailable()) is not None:
        print(f"left out, two hosts: {why}")
        return 0
    print(f"\n{'two hosts, two ranks each':<40}{'seconds':>9}{'orphans':>9}  what was said")
    wrong = 0
    for driven in (False, True):
        for fault in ("cut", "one way lost", "killed"):
            seconds, left, said = lost(fault, driven)
            what = f"{'Mesh(hosts=)' if driven else 'launched'}, {fault}"
            print(f"{what:<40}{seconds:>9.1f}{left:>9}  {said[:90]}", flush=True)
            wrong += left + ("spmd.kernels.errors." not in said)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(report()))
