"""``python -m bench``: run, show, keep."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import machine as machines
from bench import markdown, picture, terminal
from bench.library import LIBRARIES
from bench.record import record
from bench.row import Row
from bench.rows import ROWS
from bench.schedule import Schedule, run
from bench.side import SideFailedError
from bench.verdict import judge

__all__ = ["main", "named_rows"]

_RESULTS = Path(__file__).resolve().parent / "results"
_README = Path(__file__).resolve().parent.parent / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 with ``--check`` when a floor is missed; 2 when a side failed, whatever the figures."""
    arguments = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    schedule = Schedule(
        rows=arguments.rows,
        libraries=[arguments.only] if arguments.only else list(LIBRARIES),
        rounds=1 if arguments.quick else arguments.rounds,
        quick=arguments.quick,
        timeout=arguments.timeout,
        budget=arguments.budget,
    )
    machine = machines.this_machine()
    try:
        results = run(schedule, tell=lambda text: console.print(f"[dim]{text}[/dim]", highlight=False))
    except SideFailedError as error:
        console.print(str(error), markup=False, highlight=False)
        return 2
    verdict = judge(schedule.rows, results)
    terminal.show(console, machine, verdict)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record(machine, results, verdict), indent=1, ensure_ascii=False)
        (arguments.out / "latest.json").write_text(text + "\n")
        (arguments.out / "latest.md").write_text(markdown.page(machine, verdict))
        picture.draw(arguments.out / "latest.png", machine, verdict)
        picture.draw_autograd(arguments.out / "latest-autograd.png", machine, verdict)
        if arguments.out == _RESULTS and arguments.complete and not verdict.failures:
            _README.write_text(markdown.replace_block(_README.read_text(), markdown.block(machine, verdict)))
    else:
        console.print("[dim]A partial run: nothing was written. Give --out DIR to keep it.[/dim]")
    if verdict.failures:
        return 2
    return 1 if arguments.check and verdict.misses else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=main.__doc__)
    parser.add_argument("--rounds", type=_positive, default=7, help="rounds, at least 5 for a result to keep (7)")
    parser.add_argument("--rows", type=named_rows, metavar="NAME,NAME", help=f"only these of {', '.join(_NAMES)}")
    parser.add_argument(
        "--quick", action="store_true", help="one round, few calls, no big tensors: does it run at all?"
    )
    parser.add_argument("--only", choices=list(LIBRARIES), help="only one library, without ratios")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a floor is missed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write latest.json, .md and the pictures")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a side's start, and for a row (60)")
    parser.add_argument("--budget", type=float, default=450.0, help="start no round that would end after this (450 s)")
    arguments = parser.parse_args(argv)
    arguments.complete = not (arguments.quick or arguments.only or arguments.rows)
    if arguments.rows is None:
        arguments.rows = [row for row in ROWS.values() if row.quick or not arguments.quick]
    if arguments.out is None and arguments.complete:
        arguments.out = _RESULTS  # what is committed is always a whole run
    return arguments


def named_rows(text: str) -> list[Row]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _NAMES]:
        raise argparse.ArgumentTypeError(f"no row is called {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    return [row for row in ROWS.values() if _name(row) in names]


def _name(row: Row) -> str:
    """By which a row is chosen; the points of a curve are chosen together."""
    return row.name if row.point is None else row.point.curve


_NAMES = list(dict.fromkeys(map(_name, ROWS.values())))


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
