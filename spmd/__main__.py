"""The command line: `spmd run`, on torch's elastic launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="spmd", description="Functional SPMD for PyTorch.")
    parser.add_argument("--version", action="version", version=f"spmd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser(
        "run",
        add_help=False,
        help="run a script on many processes: spmd run [-n N] [options of torchrun] script.py [arguments]",
    )
    parsed, rest = parser.parse_known_args(arguments[:1])
    if parsed.command == "run":
        run(arguments[1:])
    return 0


def run(arguments: list[str]) -> None:
    """`torchrun`, with `-n` for the ranks per host, and alone on this host unless told of others."""
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as launch

    # Our own ranks pin their threads; without this torchrun prints a page about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = get_args_parser()
    parser.prog = "spmd run"
    parser.add_argument("-n", type=int, default=None, metavar="N", help="ranks on this host (default: its cores)")
    options = parser.parse_args(arguments)
    options.nproc_per_node = (
        str(options.n or len(os.sched_getaffinity(0)))
        if options.n or not _given(arguments, options, "--nproc")
        else options.nproc_per_node
    )
    if not any(_given(arguments, options, name) for name in ("--nnodes", "--rdzv", "--master", "--standalone")):
        options.standalone = True
    launch(options)


def _given(arguments: list[str], options: argparse.Namespace, prefix: str) -> bool:
    """Whether an option was given to us, rather than to the script."""
    own = arguments[: len(arguments) - len(options.training_script_args)]
    return any(argument.replace("_", "-").startswith(prefix) for argument in own)


if __name__ == "__main__":
    sys.exit(main())
