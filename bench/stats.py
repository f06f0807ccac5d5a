"""Medians, percentiles and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median

__all__ = ["Ratio", "Summary", "exponent", "percentile", "ratio", "summary"]

_ENOUGH_FOR_P99 = 1000


@dataclass(frozen=True)
class Summary:
    """Samples in five figures.  Of fewer than 1,000 samples the slowest stands for the p99, and ``tail`` says so."""

    count: int
    p50: float
    p99: float
    tail: str
    """``"p99"`` or ``"max"``: what the figure called p99 is."""
    mean: float


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians of per-round medians, and the lowest and highest ratio within a single round."""

    value: float
    low: float
    high: float


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: a sample that was really measured, not a point between two."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(samples: Sequence[float]) -> Summary:
    """The five figures of these samples."""
    enough = len(samples) >= _ENOUGH_FOR_P99
    return Summary(
        count=len(samples),
        p50=median(samples),
        p99=percentile(samples, 0.99 if enough else 1.0),
        tail="p99" if enough else "max",
        mean=fmean(samples),
    )


def ratio(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> Ratio:
    """``over`` / ``under``, round by round.  The rounds must pair up: a ratio between rounds would mean nothing."""
    if len(over) != len(under) or not over:
        raise ValueError(f"{len(over)} rounds do not pair up with {len(under)}")
    tops, bottoms = [median(samples) for samples in over], [median(samples) for samples in under]
    each = [top / bottom for top, bottom in zip(tops, bottoms, strict=True)]
    return Ratio(median(tops) / median(bottoms), min(each), max(each))


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """How y grows with x: the slope of log y over log x by least squares.  1 is linear, 2 is quadratic."""
    return linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope
