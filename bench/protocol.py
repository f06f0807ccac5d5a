"""The messages between the parent and its workers, pickled over a socket pair that only they hold."""

from __future__ import annotations

from dataclasses import dataclass

from bench.row import Plan

__all__ = ["Done", "Failed", "Measure", "Ready", "Stop"]


@dataclass(frozen=True)
class Ready:
    """From a worker: it has joined its job and is ready."""


@dataclass(frozen=True)
class Measure:
    """Parent to a caller: run this row (or raw limit) once through its plan.  The parent waits ``timeout`` seconds."""

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
    """From a worker: the row failed, with this traceback."""

    traceback: str


@dataclass(frozen=True)
class Stop:
    """From the parent: leave the job together with the other workers, and exit."""

    timeout: float
