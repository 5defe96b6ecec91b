"""A program on several hosts, which are network namespaces of this machine: their number, and the ranks of each.

    python several_hosts.py 2 2 program.py argument ...

Each host's ranks are forks of one process there. Needs root and iproute2. Ends with the status of a rank that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "bench"))
import namespaces  # noqa: E402

PORT = 29517


def started(places: list[namespaces.Node], ranks: int, program: str, *arguments: str, **environ: str) -> list:
    """The processes, one a host; each is the leader of a process group that its ranks are in.

    Args:
        environ: variables for the ranks of all hosts.
    """
    bare = {name: text for name, text in os.environ.items() if not name.startswith("SPMD_")}
    job = {"SPMD_SIZE": str(ranks * len(places)), "SPMD_INIT_METHOD": f"tcp://{places[0].address}:{PORT}"}
    return [
        node.start(
            [sys.executable, str(HERE / "forked.py"), str(ranks), program, *arguments],
            env={**bare, **job, "OMP_NUM_THREADS": "1", "SPMD_RANK": str(number * ranks), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number, node in enumerate(places)
    ]


def end(processes: list) -> None:
    """Kill what is left of them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def main() -> None:
    hosts, ranks, program, *arguments = sys.argv[1:]
    with namespaces.nodes(int(hosts)) as places:
        processes = started(places, int(ranks), program, *arguments)
        try:
            told = [process.communicate() for process in processes]
        finally:
            end(processes)
    for out, err in told:
        sys.stdout.write(out)
        sys.stderr.write(err)
    sys.exit(max(process.returncode for process in processes))


if __name__ == "__main__":
    main()
