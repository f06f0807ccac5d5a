"""What a run prints, and what it leaves as JSON."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .driver import Result, Run
from .exceptions import Exceptions
from .table import GROUPS
from .verdict import Verdict

WIDTH = 160
TAIL = 30  # lines of what a failed test has printed
_ERROR = re.compile(r"[\w.]*(Error|Exception|Warning|Interrupt|StopIteration)(:|$)")
_FRAME = re.compile(r"Process \d+ (exited|terminated)")


def line(result: Result, exceptions: Exceptions) -> str:
    text = f"{result.status:7} {result.seconds:6.1f} s  {result.case.group} {result.case.id}"
    if result.status == "passed":
        return text
    mark = " (exception)" if exceptions.of(result.case) else ""
    return f"{text}{mark}\n{'':19}{reason(result)}"


def reason(result: Result) -> str:
    """The one line that says most: the exception in the child, not that of the parent that tells of it."""
    lines = [each.strip() for each in result.text.splitlines() if each.strip()]
    errors = [each for each in lines if _ERROR.match(each) and not _FRAME.search(each)]
    return (errors or lines or ["no reason given"])[-1][:WIDTH]


def story(result: Result) -> str:
    """All that is known of a test that should have passed: its error, or what it printed if it has not even failed."""
    printed = result.output.strip().splitlines()
    if result.status == "failed" and "timed out" not in result.text:
        # torch's test class logs the error again, in each process.
        printed = [each for each in printed if "common_distributed.py:" not in each][-TAIL:]
    return "\n".join([f"==== {result.case.id}: {result.status}", result.text.strip(), *printed])


def summary(run: Run, verdict: Verdict, exceptions: Exceptions) -> str:
    width = max(map(len, GROUPS.values()))
    lines = []
    for group, meaning in GROUPS.items():
        count = verdict.counts.get(group, Counter())
        lines.append(f"{group} {meaning:{width}} {_counted(count)}" if count else f"{group} {meaning:{width}} none run")
    total = sum(verdict.counts.values(), Counter())
    lines.append(f"  {'all':{width}} {_counted(total)}; {run.seconds:.0f} s")
    lines += [f"should have passed: {each.case.id} ({each.status}): {reason(each)}" for each in verdict.regressions]
    lines += [
        f"passes, though exceptions.toml says otherwise: {each.case.id} ({_because(each, exceptions)})"
        for each in verdict.stale
    ]
    lines += [f"tests.txt is out of date: {each}" for each in run.surprises]
    return "\n".join(lines)


def _because(result: Result, exceptions: Exceptions) -> str:
    entry = exceptions.of(result.case)
    return entry.reason.split("\n")[0] if entry else ""


def _counted(count: Counter[str]) -> str:
    text = f"{count['passed']:4} passed, {count['failed']:3} failed, {count['skipped']:3} skipped"
    return f"{text}; {count['excepted']} of these are exceptions" if count["excepted"] else text


def as_json(run: Run, verdict: Verdict, library: str) -> dict[str, Any]:
    return {
        "library": library,
        "seconds": round(run.seconds, 1),
        "groups": {group: dict(count) for group, count in sorted(verdict.counts.items())},
        "regressions": [each.case.id for each in verdict.regressions],
        "stale": [each.case.id for each in verdict.stale],
        "tests": [
            {
                "test": each.case.id,
                "group": each.case.group,
                "status": each.status,
                "seconds": each.seconds,
                "text": each.text,
            }
            for each in sorted(run.results, key=lambda each: each.case)
        ],
    }
