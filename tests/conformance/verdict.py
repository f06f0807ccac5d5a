"""What the results mean: a run is good when every test has passed that is no exception, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .driver import Result
from .exceptions import Exceptions


class Verdict(NamedTuple):
    counts: dict[str, Counter[str]]
    """By group: how many passed, failed, were skipped; and how many of the last two are exceptions (``excepted``)."""

    regressions: list[Result]
    """Did not pass, and are no exceptions."""

    stale: list[Result]
    """Are exceptions, and did what they should not: passed."""

    @property
    def good(self) -> bool:
        return not self.regressions and not self.stale


def judge(results: Sequence[Result], exceptions: Exceptions) -> Verdict:
    counts: dict[str, Counter[str]] = {}
    regressions, stale = [], []
    for result in results:
        status = _plain(result.status)
        count = counts.setdefault(result.case.group, Counter())
        count[status] += 1
        entry = exceptions.of(result.case)
        if entry is None:
            if status != "passed":
                regressions.append(result)
        elif status != "passed":
            count["excepted"] += 1
            if entry.outcome not in (status, "any"):
                regressions.append(result)
        elif entry.outcome != "any":
            stale.append(result)
    return Verdict(counts, regressions, stale)


def _plain(status: str) -> str:
    return "failed" if status in ("hung", "crashed") else status
