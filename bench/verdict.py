"""The samples against the floors and goals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from statistics import median

from bench.library import LIBRARIES
from bench.limits import LIMITS, Limit
from bench.results import FAST, RAW, Failure, Results, Rounds
from bench.row import Row
from bench.stats import Ratio, Summary, exponent, ratio, summary

__all__ = ["MODE_FLOOR", "MODE_GOAL", "Curve", "Growth", "Line", "Mark", "Modes", "Nearness", "Verdict", "judge"]

MODE_FLOOR, MODE_GOAL = 1.5, 1.25
"""How many times as long as FAST a pass in SMART mode may take."""


class Mark(Enum):
    """How a figure stands."""

    GOAL = "goal met"
    FLOOR = "floor met"
    BELOW = "below floor"

    @property
    def sign(self) -> str:
        """One character of the mark, for narrow columns."""
        return {Mark.GOAL: "★", Mark.FLOOR: "✓", Mark.BELOW: "✗"}[self]


@dataclass(frozen=True)
class Line:
    """One row: each library's summary and, if both ran, how many times faster telegrad is."""

    row: Row
    sides: Mapping[str, Summary]
    speedup: Ratio | None
    tail_speedup: float | None
    """The same of the p99s (or maxima); below 1 telegrad's tail is the worse one."""

    @property
    def mark(self) -> Mark | None:
        """The median against floor and goal, where the row has them."""
        if self.speedup is None or self.row.floor is None:
            return None
        goal_met = self.row.goal is not None and self.speedup.value >= self.row.goal
        return _mark(self.speedup.value >= self.row.floor, goal_met)


@dataclass(frozen=True)
class Nearness:
    """A row against the raw limit of the same rounds.

    For a latency the ratios are times (2 = twice as long as the limit); for a payload they are shares of bandwidth
    (0.5 = half the limit's).
    """

    row: Row
    limit: Limit
    raw: Summary
    sides: Mapping[str, Ratio]

    @property
    def mark(self) -> Mark | None:
        """telegrad against the limit, where the row asks for a distance."""
        near, ours = self.row.near, self.sides.get("telegrad")
        if near is None or ours is None or near.floor is None:
            return None
        return _mark(ours.value <= near.floor, near.goal is not None and ours.value <= near.goal)


@dataclass(frozen=True)
class Modes:
    """A row of telegrad's in both modes of the backward pass: how many times as long as FAST takes SMART?"""

    row: Row
    smart: Summary
    fast: Summary
    ratio: Ratio

    @property
    def mark(self) -> Mark:
        """SMART against what it may cost."""
        return _mark(self.ratio.value <= MODE_FLOOR, self.ratio.value <= MODE_GOAL)


@dataclass(frozen=True)
class Curve:
    """One library's times, as (size, seconds), sizes rising: the medians of the rounds' medians."""

    points: list[tuple[int, float]]

    @property
    def exponent(self) -> float | None:
        """Of the line through all points; ``None`` if there is but one."""
        return exponent(self.points) if len(self.points) > 1 else None

    @property
    def last_exponent(self) -> float | None:
        """Of the line through the last two points, where what a pass costs anyway weighs least."""
        return exponent(self.points[-2:]) if len(self.points) > 1 else None


@dataclass(frozen=True)
class Growth:
    """How the time of an operation grows with its size."""

    name: str
    title: str
    unit: str
    curves: dict[str, Curve]


@dataclass(frozen=True)
class Verdict:
    """Everything that the tables and the picture show."""

    lines: Sequence[Line]
    nearness: Sequence[Nearness]
    modes: Sequence[Modes]
    growth: Sequence[Growth]
    rounds: int
    idle: Mapping[str, float]
    failures: Sequence[Failure]
    seconds: float

    @property
    def misses(self) -> list[str]:
        """Every floor that was missed, as a sentence."""
        found = []
        for line in self.lines:
            if line.mark is Mark.BELOW and line.speedup is not None:
                found.append(f"{line.row.title}: {line.speedup.value:.2f}×, the floor is {line.row.floor:g}×")
            if line.mark is not None and line.tail_speedup is not None and line.tail_speedup < 1:
                tail = line.sides["telegrad"].tail
                found.append(f"{line.row.title}: the {tail} is {1 / line.tail_speedup:.2f}× TensorPipe's")
        for near in self.nearness:
            if near.mark is Mark.BELOW and near.row.near is not None:
                times = f"{near.sides['telegrad'].value:.2f}× the {near.limit.title}"
                found.append(f"{near.row.title}: {times}, the floor is {near.row.near.floor:g}×")
        for modes in self.modes:
            if modes.mark is Mark.BELOW:
                times = f"SMART takes {modes.ratio.value:.2f}× FAST"
                found.append(f"{modes.row.title}: {times}, the floor is {MODE_FLOOR:g}×")
        return found


def judge(rows: Iterable[Row], results: Results) -> Verdict:
    """Read the results of these rows; a row that never completed a round has no line."""
    measured = [(row, results.rows[row.name]) for row in rows if row.name in results.rows]
    return Verdict(
        lines=[_line(row, sides) for row, sides in measured if row.point is None],
        nearness=[_nearness(row, LIMITS[row.near.limit], sides) for row, sides in measured if row.near is not None],
        modes=[_modes(row, sides) for row, sides in measured if FAST in sides],
        growth=_growth(measured),
        rounds=max((len(rounds) for _, sides in measured for rounds in sides.values()), default=0),
        idle=results.idle,
        failures=results.failures,
        seconds=results.seconds,
    )


def _line(row: Row, sides: Mapping[str, Rounds]) -> Line:
    summaries = {side: summary(list(chain(*rounds))) for side, rounds in sides.items() if side in LIBRARIES}
    if "telegrad" not in sides or "torch" not in sides:
        return Line(row, summaries, None, None)
    return Line(
        row,
        summaries,
        speedup=ratio(sides["torch"], sides["telegrad"]),
        tail_speedup=summaries["torch"].p99 / summaries["telegrad"].p99,
    )


def _nearness(row: Row, limit: Limit, sides: Mapping[str, Rounds]) -> Nearness:
    raw = sides[RAW]
    ratios = {}
    for side, rounds in sides.items():
        if side not in LIBRARIES:
            continue
        if limit.payload:
            share = ratio(raw, rounds)
            scale = row.payload / limit.payload
            ratios[side] = Ratio(share.value * scale, share.low * scale, share.high * scale)
        else:
            ratios[side] = ratio(rounds, raw)
    return Nearness(row, limit, summary(list(chain(*raw))), ratios)


def _modes(row: Row, sides: Mapping[str, Rounds]) -> Modes:
    smart, fast = sides["telegrad"], sides[FAST]
    return Modes(row, summary(list(chain(*smart))), summary(list(chain(*fast))), ratio(smart, fast))


def _growth(measured: Iterable[tuple[Row, Mapping[str, Rounds]]]) -> list[Growth]:
    """The rows that are points, put together to curves; they stand in the order of their sizes."""
    found: dict[str, Growth] = {}
    for row, sides in measured:
        if (point := row.point) is None:
            continue
        growth = found.setdefault(point.curve, Growth(point.curve, point.title, point.unit, {}))
        for side in (side for side in LIBRARIES if side in sides):
            seconds = median(median(samples) for samples in sides[side])
            growth.curves.setdefault(side, Curve([])).points.append((point.size, seconds))
    return list(found.values())


def _mark(floor_met: bool, goal_met: bool) -> Mark:
    if goal_met:
        return Mark.GOAL
    return Mark.FLOOR if floor_met else Mark.BELOW
