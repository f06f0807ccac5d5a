"""Everything the parent and its workers say to each other, pickled over a socket pair that only they hold."""

from __future__ import annotations

from dataclasses import dataclass

from bench.row import Plan

__all__ = ["Done", "Failed", "Measure", "Ready", "Stop"]


@dataclass(frozen=True)
class Ready:
    """Worker: the job is up, I am waiting for orders."""


@dataclass(frozen=True)
class Measure:
    """Parent to a caller: run this row (or raw limit) once through its plan.  After ``timeout`` nobody waits."""

    name: str
    plan: Plan
    timeout: float
    fast: bool = False
    """Whether telegrad's backward passes run in FAST mode."""


@dataclass(frozen=True)
class Done:
    """Caller: every reply was right; the seconds of each timed call."""

    samples: list[float]


@dataclass(frozen=True)
class Failed:
    """Worker: that went wrong, with this traceback."""

    traceback: str


@dataclass(frozen=True)
class Stop:
    """Parent: leave the job together with your peers, and exit."""

    timeout: float
