"""The tables as plain strings, so that the terminal and the Markdown file cannot drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.stats import Ratio, Summary
from bench.units import duration, limit_figure, row_figure, share
from bench.verdict import MODE_FLOOR, MODE_GOAL, Curve, Growth, Line, Mark, Modes, Nearness, Verdict

__all__ = ["NAMES", "TEXT_HEADINGS", "Table", "notes", "tables"]

NAMES = {"telegrad": "telegrad", "torch": "TensorPipe"}
TEXT_HEADINGS = ("row", "raw limit", "library", "mark")
"""The columns that hold words; all others hold figures, and are set to the right."""

_LIBRARIES = ("telegrad p50", "p99", "TensorPipe p50", "p99")
_SPEED = ("row", *_LIBRARIES, "speed-up", "min..max", "floor", "goal", "p99 speed-up", "mark")
_LIMITS = ("row", "raw limit", "p50", "telegrad", "TensorPipe", "floor", "goal", "mark")
_MODES = ("row", "SMART p50", "FAST p50", "SMART / FAST", "min..max", "floor", "goal", "mark")
_GROWTH = ("row", "library", "smallest", "largest", "each of the largest", "exponent", "of the last step")

_NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table; ``marks`` has one for each of its rows."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marks: Sequence[Mark | None]
    brief: int
    """How many of its columns the README shows: floors, goals and marks are for developers."""


def tables(verdict: Verdict) -> list[Table]:
    """All tables that have a row."""
    lines, nearness, modes = verdict.lines, verdict.nearness, verdict.modes
    curves = [(growth, library, curve) for growth in verdict.growth for library, curve in growth.curves.items()]
    return [
        table
        for table in (
            Table(
                "telegrad against torch.distributed (TensorPipe)",
                _SPEED, [_speed_cells(line) for line in lines], [line.mark for line in lines], brief=7,
            ),
            Table(
                "Against the raw limits of the same rounds",
                _LIMITS, [_limit_cells(near) for near in nearness], [near.mark for near in nearness], brief=5,
            ),
            Table(
                "telegrad's backward in its two modes, SMART / FAST",
                _MODES, [_mode_cells(each) for each in modes], [each.mark for each in modes], brief=5,
            ),
            Table(
                "How backward grows, as time ~ size ^ exponent",
                _GROWTH, [_growth_cells(*curve) for curve in curves], [None for _ in curves], brief=len(_GROWTH),
            ),
        )
        if table.rows
    ]  # fmt: skip


def _speed_cells(line: Line) -> tuple[str, ...]:
    return (
        line.row.title,
        *_latencies(line, line.sides.get("telegrad")),
        *_latencies(line, line.sides.get("torch")),
        _NOTHING if line.speedup is None else f"{line.speedup.value:.2f}×",
        _spread(line.speedup),
        _times(line.row.floor),
        _times(line.row.goal),
        _NOTHING if line.tail_speedup is None else f"{line.tail_speedup:.2f}×{'' if line.tail_speedup >= 1 else ' ✗'}",
        _mark(line.mark),
    )


def _limit_cells(near: Nearness) -> tuple[str, ...]:
    asked = near.row.near

    def cell(ratio: Ratio | None) -> str:
        return _NOTHING if ratio is None else share(near.limit, ratio.value)

    return (
        near.row.title,
        near.limit.title,
        limit_figure(near.limit, near.raw.p50),
        cell(near.sides.get("telegrad")),
        cell(near.sides.get("torch")),
        _times(None if asked is None else asked.floor),
        _times(None if asked is None else asked.goal),
        _mark(near.mark),
    )


def _mode_cells(modes: Modes) -> tuple[str, ...]:
    return (
        modes.row.title,
        row_figure(modes.row, modes.smart.p50),
        row_figure(modes.row, modes.fast.p50),
        f"{modes.ratio.value:.2f}×",
        _spread(modes.ratio),
        _times(MODE_FLOOR),
        _times(MODE_GOAL),
        _mark(modes.mark),
    )


def _growth_cells(growth: Growth, library: str, curve: Curve) -> tuple[str, ...]:
    (least, first), (most, last) = curve.points[0], curve.points[-1]
    return (
        growth.title,
        NAMES[library],
        f"{least:,}: {duration(first)}",
        f"{most:,}: {duration(last)}",
        duration(last / most),
        _NOTHING if curve.exponent is None else f"{curve.exponent:.2f}",
        _NOTHING if curve.last_exponent is None else f"{curve.last_exponent:.2f}",
    )


def notes(verdict: Verdict) -> list[str]:
    """What a reader must know to read the tables right."""
    rounds = "1 round" if verdict.rounds == 1 else f"{verdict.rounds} rounds"
    how = (
        f"Medians of {rounds}, in which the libraries take turns, in alternating order. The speed-up is the ratio "
        "of the medians of the rounds' medians; min..max is the range of the ratio within one round."
    )
    tails = (
        "p50 and p99 are over all samples. ᵐ: fewer than 1,000 samples, so the slowest one stands for the p99. "
        "Of a rate, the p99 is the slowest batch's."
    )
    bandwidth = (
        "Bandwidth counts the payload of both directions: 100 % of memcpy means that each crossing costs one copy."
    )
    growth = (
        "The exponent is that of a least-squares line through the logarithms of all points (1: linear); "
        "what a pass costs at any size flattens it, and weighs least in the last step, from the last size but one."
    )
    idle = [f"{NAMES[library]}'s workers use {cores:.0%} of a core" for library, cores in verdict.idle.items()]
    rest = f"While nothing is asked of them, {' and '.join(idle)}; TensorPipe's are stopped while others are measured."
    return [how, tails, bandwidth, *([growth] if verdict.growth else []), *([rest] if idle else [])]


def _latencies(line: Line, summary: Summary | None) -> tuple[str, str]:
    if summary is None:
        return _NOTHING, _NOTHING
    return row_figure(line.row, summary.p50), row_figure(line.row, summary.p99) + ("ᵐ" if summary.tail == "max" else "")


def _spread(ratio: Ratio | None) -> str:
    return _NOTHING if ratio is None else f"{ratio.low:.2f}..{ratio.high:.2f}"


def _times(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:g}×"


def _mark(mark: Mark | None) -> str:
    return _NOTHING if mark is None else f"{mark.sign} {mark.value}"
