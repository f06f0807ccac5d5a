"""Runs PyTorch's own tests against telegrad.

``python -m tests.conformance``; ``--lib torch`` runs the same on torch itself, ``--compare`` both, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import exceptions as exceptions_file
from . import report
from .compare import Both, compare, times
from .driver import Result, Settings, run
from .exceptions import Exceptions
from .library import LIBRARIES
from .suites import SUITES
from .table import GROUPS, Case, all_cases, fast_ids, select
from .verdict import judge


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if unknown := [name for name in options.suite if name not in SUITES]:
        print(f"there is no suite {', '.join(unknown)}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    groups = options.group.upper().replace(",", "")
    if unknown := [group for group in groups if group not in GROUPS]:
        print(f"there is no group {', '.join(unknown)}; there are {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    cases = select(
        all_cases(),
        suites=options.suite,
        patterns=options.k,
        groups=groups,
        only=fast_ids() if options.fast else None,
        cuda=options.cuda,
    )
    if not cases:
        print("no test is left", file=sys.stderr)
        return 2
    if options.list:
        print(*(f"{case.group} {case.id}" for case in cases), sep="\n")
        return 0
    settings = Settings(options.lib, options.jobs, options.deadline, start=options.start)
    if options.compare:
        return _compare(cases, settings)
    return _run(cases, settings, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--suite", action="append", default=[], help="only this suite (may be given several times)")
    parser.add_argument("-k", action="append", default=[], metavar="PART", help="only tests with this in suite::test")
    parser.add_argument("--group", default="", metavar="A,B", help="only tests of these groups")
    parser.add_argument("--fast", action="store_true", help="only the part that continuous integration runs")
    parser.add_argument("--cuda", action="store_true", help="also the suites that need CUDA")
    parser.add_argument("--lib", choices=LIBRARIES[:2], default="telegrad", help="what to test (default: telegrad)")
    parser.add_argument("--compare", action="store_true", help="what must pass, on both in turns, with times")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="tests at a time (default: 2)")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="of one test (default: 60)")
    parser.add_argument(
        "--start", choices=("fork", "spawn"), default="fork", help="how the processes of a test start (default: fork)"
    )
    parser.add_argument("--again", type=int, default=0, metavar="N", help="run what failed up to N times more, alone")
    parser.add_argument("--json", metavar="FILE", help="write all results there")
    parser.add_argument("--list", action="store_true", help="print the tests, and run none")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what did not pass")
    return parser


def _run(cases: Sequence[Case], settings: Settings, options: argparse.Namespace) -> int:
    # torch itself has no exceptions: what it does is what it does.
    exceptions = exceptions_file.load() if settings.library == "telegrad" else Exceptions()

    def tell(result: Result) -> None:
        if result.status != "passed" or not options.quiet:
            print(report.line(result, exceptions), flush=True)

    done = run(cases, settings, tell)
    verdict = judge(done.results, exceptions)
    unsteady: list[str] = []
    for _ in range(options.again if verdict.regressions else 0):
        print("\nonce more, one at a time:", flush=True)
        second = run([each.case for each in verdict.regressions], settings._replace(jobs=1), tell)
        unsteady += [each.case.id for each in second.results if each.status == "passed"]
        done = done.amended(second)
        verdict = judge(done.results, exceptions)
    for result in verdict.regressions:
        print(f"\n{report.story(result)}")
    print(f"\n{report.summary(done, verdict, exceptions)}")
    for name in unsteady:
        print(f"passed only when run again: {name}")
    idle = exceptions.idle_patterns(all_cases())
    for pattern in idle:
        print(f"exceptions.toml means no test with {pattern!r}")
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_json(done, verdict, settings.library), indent=1) + "\n")
    return 0 if verdict.good and not done.surprises and not idle else 1


def _compare(cases: Sequence[Case], settings: Settings) -> int:
    exceptions = exceptions_file.load()
    failed = 0

    def tell(both: Both) -> None:
        nonlocal failed
        failed += both.ours.status != "passed"
        for library, result in zip(("torch", "telegrad"), both, strict=True):
            if result.status != "passed":
                print(f"{library}: {report.line(result, exceptions)}", flush=True)

    # A test that fails early is no faster for it.
    must_pass = [case for case in cases if exceptions.of(case) is None]
    results = compare(must_pass, settings, tell)
    for both in results:
        if both.ours.status != "passed":
            print(f"\n{report.story(both.ours)}")
    print(f"\n{times(results)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
