"""``python -m bench.compare``: versions of telegrad against each other and TensorPipe, interleaved in one run.

``--without spin,tick`` adds this checkout without a part of its data plane (see ``ablations``), ``--against DIR``
another checkout.  A figure is the ratio to this checkout's time in the same rounds: above 1, the version is slower.
The same code is up to 15 % faster or slower in one process than in another, for as long as these live; so the processes
of all versions are started several times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import machine as machines
from bench.__main__ import named_rows
from bench.ablations import ABLATIONS
from bench.results import RAW, Results
from bench.row import Row
from bench.schedule import Schedule, run
from bench.side import Side, SideFailedError
from bench.stats import ratio

__all__ = ["main"]

_THIS = "telegrad"
_TIMEOUT = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    schedule = Schedule(
        rows=arguments.rows,
        libraries=[],
        rounds=arguments.rounds,
        quick=False,
        timeout=_TIMEOUT,
        budget=arguments.budget,
    )
    sides = [Side(_THIS, _TIMEOUT, schedule.workers)]
    sides += [Side(f"without {part}", _TIMEOUT, schedule.workers, without=part) for part in arguments.without]
    sides += [Side(str(path), _TIMEOUT, schedule.workers, checkout=path) for path in arguments.against]
    if arguments.torch:
        sides.append(Side("torch", _TIMEOUT, schedule.workers))
    results = Results()
    try:
        for _ in range(arguments.restarts):
            _merge(results, run(schedule, lambda text: print(text, file=sys.stderr), sides))
    except SideFailedError as error:
        print(error, file=sys.stderr)
        return 2
    print(_table(schedule.rows, [side.name for side in sides], results))
    machine = machines.this_machine()
    print(f"\n{machine}")
    for failure in results.failures:
        print(f"{failure.side} failed in {failure.row}: {failure.text}", file=sys.stderr)
    return 2 if results.failures else 0


def _merge(results: Results, more: Results) -> None:
    results.failures += more.failures
    for row, sides in more.rows.items():
        for side, rounds in sides.items():
            results.rows.setdefault(row, {}).setdefault(side, []).extend(rounds)


def _table(rows: Sequence[Row], sides: Sequence[str], results: Results) -> str:
    others = [side for side in sides if side not in (_THIS, RAW)]
    lines = [["row", *others], ["---", *("---:" for _ in others)]]
    for row in rows:
        samples = results.rows.get(row.name)
        if samples is not None:
            ratios = [ratio(samples[side], samples[_THIS]) for side in others]
            lines.append([row.title, *(f"{each.value:.2f} ({each.low:.2f}..{each.high:.2f})" for each in ratios)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--without", type=_parts, default=[], metavar="PART,PART", help=f"of {', '.join(ABLATIONS)}")
    parser.add_argument("--against", type=_checkout, action="append", default=[], metavar="DIR", help="a checkout")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out torch.distributed")
    parser.add_argument("--rows", type=named_rows, required=True, metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=2, help="rounds with the same processes (2)")
    parser.add_argument("--restarts", type=int, default=4, help="how often to do that, with new processes (4)")
    parser.add_argument("--budget", type=float, default=1200.0, help="start no round that would end later (1200 s)")
    return parser.parse_args(argv)


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in ABLATIONS]:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}; there are {', '.join(ABLATIONS)}")
    return parts


def _checkout(text: str) -> Path:
    path = Path(text)
    if not (path / "src" / "telegrad").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of telegrad: it has no src/telegrad")
    return path.resolve()


if __name__ == "__main__":
    sys.exit(main())
