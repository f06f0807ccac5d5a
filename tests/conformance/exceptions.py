"""The tests that need not pass on telegrad, and why.

``exceptions.toml`` holds entries; each has a reason, and says which tests it means: by ``tests`` (wildcards for
``suite::test``) or by ``group``, in both cases without those in ``but``.  ``outcome`` is what they do instead of
passing: ``failed`` (if nothing is said), ``skipped``, or ``any`` for what depends on timing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .table import GROUPS, Case

FILE = Path(__file__).with_name("exceptions.toml")
OUTCOMES = ("failed", "skipped", "any")


@dataclass(frozen=True)
class Entry:
    reason: str
    tests: tuple[str, ...] = ()
    group: str = ""
    but: tuple[str, ...] = ()
    outcome: str = "failed"

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"an exception needs a reason: {self}")
        if bool(self.tests) == bool(self.group):
            raise ValueError(f"an exception names either tests or a group: {self}")
        if self.group and self.group not in GROUPS:
            raise ValueError(f"there is no group {self.group!r}")
        if self.outcome not in OUTCOMES:
            raise ValueError(f"the outcome of an exception is one of {', '.join(OUTCOMES)}, not {self.outcome!r}")

    def covers(self, case: Case) -> bool:
        if any(fnmatchcase(case.id, pattern) for pattern in self.but):
            return False
        return case.group == self.group or any(fnmatchcase(case.id, pattern) for pattern in self.tests)


@dataclass(frozen=True)
class Exceptions:
    entries: tuple[Entry, ...] = ()
    _found: dict[Case, Entry | None] = field(default_factory=dict, compare=False, repr=False)

    def of(self, case: Case) -> Entry | None:
        """The first entry that covers this test."""
        if case not in self._found:
            self._found[case] = next((entry for entry in self.entries if entry.covers(case)), None)
        return self._found[case]

    def idle_patterns(self, cases: Iterable[Case]) -> list[str]:
        """What is written in the file, and means no test at all."""
        ids = [case.id for case in cases]
        written = [pattern for entry in self.entries for pattern in (*entry.tests, *entry.but)]
        return [pattern for pattern in written if not any(fnmatchcase(each, pattern) for each in ids)]


def parse(text: str) -> Exceptions:
    return Exceptions(tuple(_entry(each) for each in tomllib.loads(text).get("exception", [])))


def load() -> Exceptions:
    return parse(FILE.read_text())


def _entry(table: dict[str, Any]) -> Entry:
    known = {"reason", "tests", "group", "but", "outcome"}
    if unknown := table.keys() - known:
        raise ValueError(f"an exception has no {', '.join(sorted(unknown))}")
    lists = {name: tuple(table[name]) for name in ("tests", "but") if name in table}
    return Entry(table.get("reason", ""), group=table.get("group", ""), outcome=table.get("outcome", "failed"), **lists)
