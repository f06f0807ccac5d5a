"""The ``telegrad`` command.

Nothing here imports torch, so that ``telegrad --help`` is fast and the launcher takes little memory.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from telegrad.errors import UsageError

__all__ = ["main"]

DESCRIPTION = "Distributed autograd for PyTorch: call functions on other machines, one backward through all of them."
EXAMPLES = """\
examples:
  telegrad run --workers 4 train.py --epochs 3    start train.py four times as one job
  telegrad run -n 2 -m project.train              the same for a module
  telegrad run --help                             all options of run
  telegrad compat train.py --epochs 3             run a program for torch.distributed.rpc, unedited, on telegrad
"""
RUN_DESCRIPTION = """\
Start a script as several workers of one job on this host.

Every worker gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun, so
the same script runs under both; and TELEGRAD_SECRET, which keeps other programs out of the job.  Each line of output
begins with its worker's name.  If a worker fails, the others are ended and its exit code is returned.  Ctrl-C
interrupts all workers, a second one kills them.

A single worker (--workers 1) has the terminal to itself: its output is not changed, and breakpoint() opens a debugger.
"""
COMPAT_DESCRIPTION = """\
Run a program that was written for torch.distributed.rpc, unedited, on telegrad, in all its processes.

Its torch.distributed.rpc, .autograd, .optim.DistributedOptimizer and .nn.RemoteModule are telegrad's.  Children that it
forks or spawns, and Python programs that it starts, run on telegrad too; so under a launcher:

  telegrad compat -m torch.distributed.run --nproc-per-node 4 train.py
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (2 if the command line is wrong)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _compat(options) if options.command == "compat" else _run(options)
    except UsageError as error:
        print(f"telegrad {options.command}: {error}", file=sys.stderr)
        return 2
    finally:
        _forget_readers_that_left()


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="telegrad", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"telegrad {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    run = commands.add_parser(
        "run",
        help="start a script as several workers on this host",
        description=RUN_DESCRIPTION,
        formatter_class=raw,
        allow_abbrev=False,
        usage="telegrad run --workers N [options] [-m] script [args ...]",
    )
    run.add_argument("-n", "--workers", type=int, required=True, metavar="N", help="how many workers to start")
    run.add_argument(
        "--name-prefix", default="worker", metavar="NAME", help="workers are called NAME0, NAME1, … (default: worker)"
    )
    run.add_argument(
        "--master-port",
        "--port",
        type=int,
        metavar="PORT",
        help="where the workers meet on 127.0.0.1 (default: a free port)",
    )
    run.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long workers may take to end after a failure or a signal before they are killed (default: 10)",
    )
    run.add_argument("-m", "--module", action="store_true", help="script is the name of a module, as in python -m")
    run.add_argument("script", help="the Python program that every worker runs")
    rest = run.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    rest.required = False  # argparse's own error message would list them
    _add_compat(commands)
    return parser


def _add_compat(commands: Any) -> None:
    compat = commands.add_parser(
        "compat",
        help="run a program written for torch.distributed.rpc on telegrad",
        description=COMPAT_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="telegrad compat [-m] script [args ...]",
    )
    compat.add_argument("-m", "--module", action="store_true", help="script is the name of a module, as in python -m")
    compat.add_argument("script", help="the Python program to run")
    compat.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False


def _run(options: argparse.Namespace) -> int:
    from telegrad.launch import job_environment, run_workers, worker_environment

    if options.grace < 0:
        raise UsageError(f"--grace must not be negative: {options.grace:g}")
    if options.master_port is not None and options.master_port < 1:
        raise UsageError(f"{options.master_port} is not a port; choose one from 1 to 65535")
    _check(options)
    program = ["-m", options.script] if options.module else [options.script]
    # -u: show lines when they are printed, not when a buffer is full
    command = [sys.executable, "-u", *program, *options.args]
    if options.workers == 1:
        # Becomes the worker, which then has the terminal, its signals and its exit code for itself.
        job = job_environment(os.environ, 1, options.master_port)
        os.execve(command[0], command, worker_environment(job, 0))
    return run_workers(
        command,
        options.workers,
        name_prefix=options.name_prefix,
        master_port=options.master_port,
        grace=options.grace,
    )


def _compat(options: argparse.Namespace) -> NoReturn:
    """Replaces this process by the program, so that exit code and signals are the program's."""
    from telegrad.compat.children import adopt_children

    _check(options)
    environment = dict(os.environ)
    adopt_children(environment)
    program = ["-m", options.script] if options.module else [options.script]
    os.execve(sys.executable, [sys.executable, *program, *options.args], environment)


def _check(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` if the script or module does not exist."""
    if options.module:
        _check_module(options.script)
    else:
        _check_script(options.script, options.command)


def _check_script(path: str, command: str) -> None:
    if not os.path.exists(path):
        hint = f"; for a module, say: telegrad {command} … -m {path}" if not path.endswith(".py") else ""
        raise UsageError(f"there is no script {path!r} (looked from {os.getcwd()}){hint}")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise UsageError(f"{path!r} is a directory without a __main__.py")


def _check_module(name: str) -> None:
    # Only the first part of the name: looking further would import the package in the launcher.
    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and importlib.machinery.PathFinder.find_spec(top, ["", *sys.path]) is None:
        raise UsageError(f"there is no module {name!r} (looked in {os.getcwd()} and on sys.path)")


def _forget_readers_that_left() -> None:
    """Discards buffered output if its reader is gone (``| head``): Python would print an error and change the code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _version() -> str:
    try:
        return importlib.metadata.version("telegrad")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from a source tree)"
