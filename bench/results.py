"""The raw samples of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FAST", "RAW", "Failure", "Results", "Rounds"]

RAW = "raw"
"""The side that measures the limits."""

FAST = "fast"
"""The name of telegrad's samples in FAST mode, next to those of its default, SMART."""

Rounds = list[list[float]]
"""Seconds of each timed call, round by round."""


@dataclass(frozen=True)
class Failure:
    """A side that hung, died or answered wrongly in a row; the row is left out from then on."""

    side: str
    row: str
    text: str


@dataclass
class Results:
    """Row name → side → rounds.  All sides of a row have the same number of rounds, so that they can be paired."""

    rows: dict[str, dict[str, Rounds]] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    """Library → how many cores its processes use while nothing is asked of them."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add_round(self, row: str, samples: dict[str, list[float]]) -> None:
        """One round of one row, complete."""
        sides = self.rows.setdefault(row, {})
        for side, seconds in samples.items():
            sides.setdefault(side, []).append(seconds)
