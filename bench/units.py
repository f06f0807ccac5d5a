"""Figures as people read them."""

from __future__ import annotations

from bench.limits import Limit
from bench.row import Row

__all__ = ["duration", "limit_figure", "row_figure", "share"]


def duration(seconds: float) -> str:
    """Three significant digits, in the unit that needs no exponent."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def row_figure(row: Row, seconds: float) -> str:
    """A sample of a row: a latency, or for a row of many calls their rate."""
    if row.calls_per_sample > 1:
        return f"{row.calls_per_sample / seconds:,.0f} /s"
    return duration(seconds)


def limit_figure(limit: Limit, seconds: float) -> str:
    """A sample of a raw limit: a latency, or for a limit with a payload its bandwidth."""
    if limit.payload:
        return f"{_three_digits(limit.payload / seconds / 1e9)} GB/s"
    return duration(seconds)


def share(limit: Limit, value: float) -> str:
    """How a row stands to a limit: a share of its bandwidth, or a multiple of its time."""
    return f"{value * 100:.0f} %" if limit.payload else f"{value:.2f}×"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
