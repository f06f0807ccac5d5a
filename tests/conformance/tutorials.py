"""Runs PyTorch's example programs for RPC as they are, on torch and under ``telegrad compat``, and compares what they
print.

``python -m tests.conformance.tutorials FOLDER``, where FOLDER is a checkout of github.com/pytorch/examples.  Nothing is
fetched and nothing of it is copied: where a program wants a library or data that are not there, ``stand_ins`` has
something in their place.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
LIMIT = 600.0  # seconds for one run of a program
STAND_INS = Path(__file__).with_name("stand_ins")


class Program(NamedTuple):
    path: str
    """In the checkout."""

    processes: tuple[str, ...] = ("",)
    """The arguments of each process that a user starts."""

    lines: int | None = None
    """How many lines are compared, of a program that goes on for long; it is ended then."""


PROGRAMS = {
    "rnn": Program("distributed/rpc/rnn/main.py"),
    # After some 90 episodes, torch differs from itself: rounding has made another choice somewhere.
    "rl": Program("distributed/rpc/rl/main.py", lines=5),
    "parameter_server": Program(
        "distributed/rpc/parameter_server/rpc_parameter_server.py",
        ("--world_size=2 --rank=0", "--world_size=2 --rank=1"),
    ),
}


class Ran(NamedTuple):
    outputs: list[list[str]]
    """What each process printed, by lines."""

    codes: list[int | None]
    """Their exit codes; None for one that was ended here."""

    seconds: float


def run(program: Program, folder: Path, prefix: Sequence[str], limit: float = LIMIT) -> Ran:
    """Runs it as a user would, in its own folder, with what comes between Python and the name of the program."""
    path = (folder / program.path).resolve()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    deadline = began + limit
    started = [
        subprocess.Popen(
            [sys.executable, *prefix, path.name, *arguments.split()],
            cwd=path.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            start_new_session=True,
        )
        for arguments in program.processes
    ]
    watch = threading.Timer(limit, _end, started)
    watch.start()
    try:
        readers = [_Reader(process, program.lines) for process in started]
        for reader in readers:
            reader.join()
        codes = [None if reader.cut else process.wait() for process, reader in zip(started, readers, strict=True)]
    finally:
        watch.cancel()
        _reap(*started)
    if time.monotonic() >= deadline:
        raise TimeoutError(f"{program.path} did not end within {limit:.0f} s")
    return Ran([reader.lines for reader in readers], codes, time.monotonic() - began)


class _Reader(threading.Thread):
    """Reads what a process prints, up to so many lines."""

    def __init__(self, process: subprocess.Popen[str], most: int | None) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.cut = False
        self._process, self._most = process, most
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            if len(self.lines) == self._most:
                self.cut = True
                return


def _end(*started: subprocess.Popen[str]) -> None:
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _reap(*started: subprocess.Popen[str]) -> None:
    _end(*started)
    for process in started:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def differences(theirs: Ran, ours: Ran, name: str = "telegrad") -> list[str]:
    """Line by line.  The lines of one process that come from several of its children may come in any order."""
    found = []
    if theirs.codes != ours.codes:
        found.append(f"exit codes {theirs.codes} on torch, {ours.codes} on {name}")
    for number, (one, other) in enumerate(zip(theirs.outputs, ours.outputs, strict=True)):
        if one != other and sorted(one) == sorted(other):
            continue
        if len(one) != len(other):
            found.append(f"process {number}: {len(one)} lines on torch, {len(other)} on {name}")
        pairs = zip(one, other, strict=False)
        found += [f"process {number}: torch {a!r}, {name} {b!r}" for a, b in pairs if a != b]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.tutorials", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"a checkout of github.com/pytorch/examples, commit {COMMIT[:12]}")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="only this one")
    parser.add_argument("--torch-twice", action="store_true", help="torch against itself: what of it repeats at all")
    options = parser.parse_args()
    library, prefix = ("torch again", ()) if options.torch_twice else ("telegrad", ("-m", "telegrad", "compat"))
    failed = 0
    for name in options.program or PROGRAMS:
        theirs = run(PROGRAMS[name], options.folder, ())
        ours = run(PROGRAMS[name], options.folder, prefix)
        found = differences(theirs, ours, library)
        failed += bool(found)
        lines = sum(map(len, theirs.outputs))
        state = f"{len(found)} differences" if found else f"the same {lines} lines"
        print(f"{name}: {state}; {theirs.seconds:.1f} s on torch, {ours.seconds:.1f} s on {library}", flush=True)
        print(*(f"  {each}" for each in (found or theirs.outputs[-1][-1:])), sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
