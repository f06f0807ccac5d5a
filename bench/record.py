"""The run as JSON: the machine, the settings, every figure of every round, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.machine import Machine
from bench.results import Results
from bench.row import Row
from bench.stats import Ratio, summary
from bench.verdict import MODE_FLOOR, MODE_GOAL, Growth, Line, Mark, Modes, Nearness, Verdict

__all__ = ["record"]


def record(machine: Machine, results: Results, verdict: Verdict) -> dict[str, Any]:
    """Seconds throughout; a row of many calls per sample says how many."""
    return {
        "machine": asdict(machine),
        "rounds": verdict.rounds,
        "seconds": round(verdict.seconds, 1),
        "rows": {line.row.name: _row(line, results) for line in verdict.lines},
        "limits": {near.row.name: _nearness(near) for near in verdict.nearness},
        "modes": {modes.row.name: _modes(modes) for modes in verdict.modes},
        "growth": {growth.name: _growth(growth) for growth in verdict.growth},
        "idle_cores": verdict.idle,
        "misses": verdict.misses,
        "failures": [asdict(failure) for failure in verdict.failures],
    }


def _row(line: Line, results: Results) -> dict[str, Any]:
    row: Row = line.row
    return {
        "title": row.title,
        "calls_per_sample": row.calls_per_sample,
        "payload_bytes": row.payload,
        "floor": row.floor,
        "goal": row.goal,
        "speedup": _ratio(line.speedup),
        "p99_speedup": line.tail_speedup,
        "mark": _mark(line.mark),
        "overall": {side: asdict(figures) for side, figures in line.sides.items()},
        "rounds": {
            side: [asdict(summary(samples)) for samples in rounds] for side, rounds in results.rows[row.name].items()
        },
    }


def _nearness(near: Nearness) -> dict[str, Any]:
    return {
        "limit": near.limit.name,
        "title": near.limit.title,
        "raw": asdict(near.raw),
        "sides": {side: _ratio(value) for side, value in near.sides.items()},
        "mark": _mark(near.mark),
    }


def _modes(modes: Modes) -> dict[str, Any]:
    return {
        "title": modes.row.title,
        "floor": MODE_FLOOR,
        "goal": MODE_GOAL,
        "smart_over_fast": asdict(modes.ratio),
        "smart": asdict(modes.smart),
        "fast": asdict(modes.fast),
        "mark": modes.mark.value,
    }


def _growth(growth: Growth) -> dict[str, Any]:
    return {
        "title": growth.title,
        "unit": growth.unit,
        "sides": {
            side: {
                "exponent": curve.exponent,
                "last_exponent": curve.last_exponent,
                "points": [{"size": size, "seconds": seconds} for size, seconds in curve.points],
            }
            for side, curve in growth.curves.items()
        },
    }


def _ratio(value: Ratio | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)


def _mark(mark: Mark | None) -> str | None:
    return None if mark is None else mark.value
