"""Every test with its group, and which of them a run wants.

The groups are what a test needs beyond a working library: A nothing but the public API, B private names of torch
(looked up by hand for each test), C TorchScript, D CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .suites import SUITES

GROUPS = {"A": "public API", "B": "private hooks", "C": "TorchScript", "D": "CUDA"}

_HERE = Path(__file__).parent


class Case(NamedTuple):
    """One test."""

    suite: str
    name: str
    group: str

    @property
    def id(self) -> str:
        return f"{self.suite}::{self.name}"


def parse(text: str) -> list[Case]:
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    cases = [Case(suite, name, group) for group, suite, name in lines]
    if unknown := {case.group for case in cases} - GROUPS.keys():
        raise ValueError(f"there is no group {', '.join(sorted(unknown))}")
    return cases


def all_cases() -> list[Case]:
    return parse((_HERE / "tests.txt").read_text())


def fast_ids() -> set[str]:
    """The fixed part that continuous integration runs."""
    return {line for line in (_HERE / "fast.txt").read_text().splitlines() if line and not line.startswith("#")}


def select(
    cases: Iterable[Case],
    *,
    suites: Sequence[str] = (),
    patterns: Sequence[str] = (),
    groups: Sequence[str] = (),
    only: set[str] | None = None,
    cuda: bool = False,
) -> list[Case]:
    """What is left of the cases; an empty condition lets all of them through.

    A pattern is a part of ``suite::test``, or a wildcard for the whole of it.  Without CUDA, its suites are left out
    unless named.
    """

    def wanted(case: Case) -> bool:
        if suites and case.suite not in suites:
            return False
        if not suites and not cuda and case.suite in SUITES and SUITES[case.suite].cuda:
            return False
        if patterns and not any(pattern in case.id or fnmatchcase(case.id, pattern) for pattern in patterns):
            return False
        return (not groups or case.group in groups) and (only is None or case.id in only)

    return [case for case in cases if wanted(case)]
