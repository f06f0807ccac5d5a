"""The two tables as plain strings, so that the terminal and the Markdown file cannot drift apart."""

from __future__ import annotations

from bench.stats import Ratio, Summary
from bench.units import limit_figure, row_figure, share
from bench.verdict import Line, Mark, Nearness, Verdict

__all__ = ["LIMIT_HEADINGS", "SPEED_HEADINGS", "limit_cells", "notes", "speed_cells"]

_LIBRARIES = ("telegrad p50", "p99", "TensorPipe p50", "p99")
SPEED_HEADINGS = ("row", *_LIBRARIES, "speed-up", "min..max", "floor", "goal", "p99 speed-up", "mark")
LIMIT_HEADINGS = ("row", "raw limit", "p50", "telegrad", "TensorPipe", "floor", "goal", "mark")

_NOTHING = "–"


def speed_cells(line: Line) -> tuple[str, ...]:
    """One row of the table of speed-ups."""
    spread = _NOTHING if line.speedup is None else f"{line.speedup.low:.2f}..{line.speedup.high:.2f}"
    return (
        line.row.title,
        *_latencies(line, line.sides.get("telegrad")),
        *_latencies(line, line.sides.get("torch")),
        _NOTHING if line.speedup is None else f"{line.speedup.value:.2f}×",
        spread,
        f"{line.row.floor:g}×",
        f"{line.row.goal:g}×",
        _NOTHING if line.tail_speedup is None else f"{line.tail_speedup:.2f}×{'' if line.tail_speedup >= 1 else ' ✗'}",
        _mark(line.mark),
    )


def limit_cells(near: Nearness) -> tuple[str, ...]:
    """One row of the table of raw limits."""
    asked = near.row.near

    def cell(ratio: Ratio | None) -> str:
        return _NOTHING if ratio is None else share(near.limit, ratio.value)

    return (
        near.row.title,
        near.limit.title,
        limit_figure(near.limit, near.raw.p50),
        cell(near.sides.get("telegrad")),
        cell(near.sides.get("torch")),
        _NOTHING if asked is None or asked.floor is None else f"{asked.floor:g}×",
        _NOTHING if asked is None or asked.goal is None else f"{asked.goal:g}×",
        _mark(near.mark),
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
    return [how, tails, bandwidth]


def _latencies(line: Line, summary: Summary | None) -> tuple[str, str]:
    if summary is None:
        return _NOTHING, _NOTHING
    return row_figure(line.row, summary.p50), row_figure(line.row, summary.p99) + ("ᵐ" if summary.tail == "max" else "")


def _mark(mark: Mark | None) -> str:
    return _NOTHING if mark is None else f"{mark.sign} {mark.value}"
