"""What a row of the benchmark is.

A row has two halves.  ``Row`` is the half that the parent reads: names, counts, floor and goal.  ``Case`` is the half
that runs in the caller process, once per round, against either library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from bench.library import Library

__all__ = ["CALLEES", "CALLER", "Case", "Near", "Plan", "Point", "Row", "WrongReplyError"]

CALLER = "caller"
CALLEES = ("callee", "callee2", "callee3", "callee4")
"""The workers of a side, in the order of their ranks.  Only as many callees run as the selected rows need."""

ReplyT = TypeVar("ReplyT")


class WrongReplyError(Exception):
    """The library under test answered with something else than was asked for: its figures are worth nothing."""


@dataclass(frozen=True)
class Plan:
    """How often one round runs an operation.  The warm-up is the same for both libraries and is not timed."""

    warmup: int
    samples: int


class Case(ABC, Generic[ReplyT]):
    """One timed operation and what belongs to it.  Only ``run`` is timed; ``index`` counts warm-up calls too."""

    held = 1000
    """How many replies are kept before they are checked and dropped.  Small replies wait, so that calls follow each
    other without a pause; a row of big replies says 1, since users would not keep them either."""

    def prepare(self, index: int) -> None:
        """Make this call's arguments differ from the last one's, so that a stale reply cannot pass the check."""

    @abstractmethod
    def run(self, index: int) -> ReplyT:
        """The operation itself."""

    @abstractmethod
    def check(self, index: int, reply: ReplyT) -> None:
        """Raise ``WrongReplyError`` unless the reply is exactly right."""

    def finish(self, calls: int) -> None:
        """Check what can only be known after all ``calls`` of the round, warm-up included."""


@dataclass(frozen=True)
class Near:
    """The raw limit that is measured next to a row in every round, and how near telegrad must come to it."""

    limit: str
    floor: float | None = None
    """At most this many times the limit's own time; ``None`` where the table only shows the figure."""
    goal: float | None = None


@dataclass(frozen=True)
class Point:
    """What makes a row one point of a curve: how the time of an operation grows with the size of its task."""

    curve: str
    title: str
    unit: str
    """What the size counts."""
    size: int


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    title: str
    case: Callable[[Library, str], Case[Any]]
    """Makes the case for a library and the first callee's name."""
    plan: Plan
    quick: Plan | None
    """The counts of ``--quick``; ``None`` leaves the row out of it."""
    floor: float | None = None
    """How many times as fast as torch telegrad must be; ``None`` where the table only shows the figure."""
    goal: float | None = None
    calls_per_sample: int = 1
    """More than one makes the row a rate: calls per second instead of a latency."""
    payload: int = 0
    """Bytes of tensor that one call carries, there and back together."""
    near: Near | None = None
    workers: int = 2
    """How many of a side's workers take part, the caller included."""
    modes: bool = False
    """Whether telegrad runs the row a second time in each round, with the backward pass in its FAST mode."""
    point: Point | None = None
