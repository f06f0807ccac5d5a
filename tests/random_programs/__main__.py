"""Runs many random programs, and shows the smallest form of each that fails.

``python -m tests.random_programs --count 20000``; ``--seed 123 --count 1`` runs one again, ``--show`` prints it.
"""

from __future__ import annotations

import argparse
import faulthandler
import re
import sys
import time
import traceback
import warnings

import torch

from . import local
from .compare import Mismatch
from .distributed import Mode
from .generate import generate
from .language import Program
from .shrink import shrink
from .stage import Stage, stage

_PATIENCE = 120.0  # for one program; then all stacks are shown
_DETAILS = re.compile(r"0x[0-9a-f]+|[0-9.]+|^[a-e]:|\[.*?\]")
_MODES: tuple[Mode, ...] = ("smart", "fast")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    start, failed, refused, slowest = time.monotonic(), 0, 0, (0.0, 0)
    with stage() as workers:
        for number, seed in enumerate(range(options.seed, options.seed + options.count), 1):
            faulthandler.dump_traceback_later(_PATIENCE)
            began = time.monotonic()
            program = generate(seed)
            if options.show:
                print(program)
            oracle = local.run(program)
            for mode in _MODES:
                try:
                    refused += not workers.check(program, mode, oracle)
                except Exception as error:
                    failed += 1
                    print(f"FAILED: seed {seed}, {mode}: {_story(error)}", flush=True)
                    if not options.no_shrink:
                        _show_smallest(workers, program, mode, error)
            slowest = max(slowest, (time.monotonic() - began, seed))
            if number % 500 == 0 or number == options.count:
                left = workers.leftovers()
                failed += bool(left)
                print(
                    f"{number} programs, {failed} failures, FAST refused {refused}; {time.monotonic() - start:.0f} s, "
                    f"slowest {slowest[0]:.2f} s (seed {slowest[1]})",
                    *left,
                    sep="\n",
                    flush=True,
                )
                slowest = (0.0, 0)
    faulthandler.cancel_dump_traceback_later()
    return 1 if failed else 0


def _story(error: Exception) -> str:
    return str(error) if isinstance(error, Mismatch) else "".join(traceback.format_exception(error))


def _show_smallest(workers: Stage, program: Program, mode: Mode, error: Exception) -> None:
    kind = _kind(error)

    def fails(candidate: Program) -> bool:
        faulthandler.dump_traceback_later(_PATIENCE)
        try:
            oracle = local.run(candidate)
        except Exception:
            return False  # no program at all
        try:
            workers.check(candidate, mode, oracle)
        except Exception as again:
            return _kind(again) == kind
        return False

    if not any(fails(program) for _ in range(5)):
        print(f"seed {program.seed} does not fail again: it depends on the order of events\n", flush=True)
        return
    smallest = shrink(program, lambda candidate: fails(candidate) or fails(candidate))
    print(f"smallest: {smallest}\nwhich is\n{smallest!r}\n", flush=True)


def _kind(error: Exception) -> str:
    """What went wrong, without the names and numbers of this program."""
    text = str(error).split("\n")[0]
    return f"{type(error).__name__} {_DETAILS.sub('#', text)}"


if __name__ == "__main__":
    sys.exit(main())
