"""The command line: `spmd run`, on torch's elastic launcher, `spmd bench`, `doctor`, `verify` and `top`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .. import __version__

USAGE = "spmd run [-n N] [options of torchrun] script.py [arguments of the script]"
HELP = """\
Run a script on many processes, each of which is one rank of the script's Mesh.

  spmd run train.py                  as many ranks as there are cores to use
  spmd run -n 4 train.py --lr 0.1    four ranks; what follows the script is the script's own
  spmd run -n 4 -m package.train     a module, as with python -m
  spmd run -n 1 - < train.py         from standard input, if one rank of each host reads it
  spmd run -n 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id 1 train.py
                                     sixteen ranks: the same command on each of two hosts

Every option of torchrun is taken. Without one that says where the ranks meet, they meet on this host.
"""
MEETING = (
    *("nnodes", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None is `sys.argv`'s.

    Returns:
        The exit status.
    """
    try:
        status = _run_command(list(sys.argv[1:] if arguments is None else arguments))
        if sys.stdout is not None:  # which was closed before, as in `spmd run train.py >&-`
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads has read enough, as in `spmd doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes what is left at its end
        return 128 + signal.SIGPIPE


def _run_command(own: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="spmd", description="Functional SPMD for PyTorch.")
    parser.add_argument("--version", action="version", version=f"spmd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    commands.add_parser("run", add_help=False, help=f"run a script on many processes: {USAGE}")
    commands.add_parser("bench", add_help=False, help="measure this machine, or this job's ranks, in about a minute")
    found = "say what is found here, what a Mesh would do, and whether the transports work"
    failing = "What is found on this machine or under this launcher; exit status 1 if a transport that is needed fails."
    commands.add_parser("doctor", help=found, description=failing)
    commands.add_parser("verify", add_help=False, help="compare the bits of a script at several numbers of ranks")
    commands.add_parser("top", add_help=False, help="show what the ranks of your meshes on this host do now")
    held = "hold the ranks of this host for a driver: Mesh(hosts=...), docs/hosts.md"
    started = "Hold this host's ranks for a driver. It starts this itself; with --listen the host waits for it."
    host = commands.add_parser("host", help=held, description=started)
    host.add_argument("--listen", metavar="ADDRESS:PORT", help="wait for drivers at this address of this host")
    command = parser.parse_args(own[:1]).command  # anything but a command ends here
    if command == "run":
        return run(own[1:])
    if command == "bench":
        from .bench.command import main as bench

        return bench(own[1:])
    if command == "verify":
        from .verify import verify

        return verify(own[1:])
    if command == "top":
        from .top import top

        return top(own[1:])
    if command == "host":
        from ..mesh.hosts.process import main as dial
        from .host import listen

        where = parser.parse_args(own).listen
        if where is None:
            dial()
        else:
            listen(where)
        return 0
    parser.parse_args(own)  # it takes no arguments
    from .doctor import doctor

    return doctor()


def run(arguments: list[str]) -> int:
    """Launch a script with torch's elastic launcher; returns the exit status, that of the first rank that failed."""
    from torch.distributed.run import run as launch

    from ..mesh.launch.environments import Explicit
    from ..mesh.rank.environment import environment
    from . import one_host
    from .options import problem_of, unknown_plugin
    from .temporary import temporary_folder

    # A Mesh sets its ranks' threads itself; without a number here torchrun prints a long warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(environment(os.environ))
    for name in Explicit.names:  # of a rank that runs this command: the ranks of this job have torch's
        os.environ.pop(name, None)
    options = parse(arguments)
    problem = problem_of(options) or _missing_script(options)
    if problem is not None:
        return _refused(problem)
    with contextlib.ExitStack() as stack:
        if options.standalone:
            options.standalone, options.rdzv_backend, options.rdzv_endpoint = False, one_host.BACKEND, "localhost"
            stack.enter_context(one_host.meeting_place())
        if not options.log_dir and options.redirects == options.tee == "0":  # no logs, but torch would leave a folder
            options.log_dir = str(stack.enter_context(temporary_folder("run")))
        try:
            return _launched(launch, options)
        except ValueError:
            problem = unknown_plugin(options)
            if problem is None:
                raise
            return _refused(problem)


def _missing_script(options: argparse.Namespace) -> str | None:
    script = options.training_script
    run = os.path.join(script, "__main__.py") if os.path.isdir(script) else script  # as Python does
    is_there = options.module or options.no_python or script == "-" or os.path.exists(run)
    return None if is_there else f"there is no script {script!r} here: look at its path"


def _refused(problem: str) -> int:
    print(f"usage: {USAGE}\nspmd run: error: {problem}", file=sys.stderr)
    return 2


def _launched(launch: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch(options)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # as a shell reports a signal
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options for torch's launcher.

    Args:
        arguments: what follows `spmd run`.

    Returns:
        As torchrun's own parser would, but with other defaults for what is set neither on the command line nor in
        torchrun's PET_* variables: as many ranks as there are cores to use, and they meet on this host.
    """
    from torch.distributed.run import get_args_parser

    from ..kernels.processes import cores

    parser = get_args_parser()
    parser.prog, parser.usage, parser.description = "spmd run", USAGE, HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "-n", dest="nproc_per_node", type=_count, metavar="N", help="number of ranks on this host (default: its cores)"
    )
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=str(cores()))
    options = parser.parse_args(arguments)
    # argparse leaves alone what a namespace already has, so that None stays where nothing was given.
    given = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(MEETING)))
    has_meeting = any(getattr(given, name) is not None or f"PET_{name.upper()}" in os.environ for name in MEETING)
    options.standalone = options.standalone or not has_meeting
    # Who starts again finds nothing left to read, and so do ranks of a job that grows.
    once = (options.nproc_per_node, options.max_restarts) == ("1", 0) and len({*options.nnodes.split(":")}) == 1
    if options.training_script == "-" and not options.no_python and not once:
        parser.error(
            "the script can come from standard input if one rank reads it once (-n 1, no --max-restarts, --nnodes of "
            "one number): write it to a file"
        )
    return options


def _count(text: str) -> str:
    """A number of ranks, as the text that torchrun takes."""
    from ..mesh.arguments import MOST_RANKS

    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number, at least 1, got {text!r}")
    if int(text) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected a number, at most {MOST_RANKS}, got {text!r}")
    return text
