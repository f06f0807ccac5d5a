"""The same tests on torch and on telegrad, each right after the other, so that both meet the same load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .driver import Result, Settings, Slot, in_order, spread
from .table import Case


class Both(NamedTuple):
    theirs: Result
    ours: Result


class Pair:
    """A worker of each library; which of them goes first alternates."""

    def __init__(self, cases: Sequence[Case], settings: Settings) -> None:
        self._theirs = Slot(cases, settings._replace(library="torch"), {})
        self._ours = Slot(cases, settings._replace(library="telegrad"), {})
        self._ours_first = False

    def run(self, case: Case) -> Both:
        self._ours_first = not self._ours_first
        if self._ours_first:
            ours = self._ours.run(case)
            return Both(self._theirs.run(case), ours)
        return Both(self._theirs.run(case), self._ours.run(case))

    def end(self) -> None:
        self._theirs.end()
        self._ours.end()


def compare(cases: Sequence[Case], settings: Settings, tell: Callable[[Both], None] = lambda _: None) -> list[Both]:
    return spread(in_order(cases, settings), settings.jobs, lambda: Pair(cases, settings), tell)


def times(results: Sequence[Both]) -> str:
    """The seconds that the tests took, by suite, of those that passed on both."""
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    passed = [both for both in results if both.theirs.status == both.ours.status == "passed"]
    for both in passed:
        theirs[both.ours.case.suite] += both.theirs.seconds  # type: ignore[assignment]
        ours[both.ours.case.suite] += both.ours.seconds  # type: ignore[assignment]
    lines = [f"{'seconds':18} {'torch':>8} {'telegrad':>8} {'ratio':>6}"]
    lines += [_row(suite, theirs[suite], ours[suite]) for suite in theirs]
    lines.append(_row(f"all {len(passed)} tests", sum(theirs.values()), sum(ours.values())))
    return "\n".join(lines)


def _row(name: str, theirs: float, ours: float) -> str:
    return f"{name:18} {theirs:8.1f} {ours:8.1f} {ours / theirs if theirs else 0:6.2f}"
