"""The timing loop, the same for both libraries and for the raw limits."""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

from bench.row import Case, Plan

__all__ = ["measure"]


def measure(case: Case[Any], plan: Plan) -> list[float]:
    """Run a case's warm-up and its timed calls; the seconds of each timed call.

    Replies are checked in batches of ``case.held`` between timed calls, never during one.  The collector stays on, as
    in a user's program, but starts each round from the same clean state.
    """
    _run(case, 0, plan.warmup)
    gc.collect()
    samples = _run(case, plan.warmup, plan.samples)
    case.finish(plan.warmup + plan.samples)
    return samples


def _run(case: Case[Any], first: int, count: int) -> list[float]:
    samples: list[float] = []
    replies: list[tuple[int, Any]] = []
    for index in range(first, first + count):
        case.prepare(index)
        started = perf_counter()
        reply = case.run(index)
        samples.append(perf_counter() - started)
        replies.append((index, reply))
        del reply  # a second reference would keep a big reply alive through the next call
        if len(replies) >= case.held:
            _check(case, replies)
    _check(case, replies)
    return samples


def _check(case: Case[Any], replies: list[tuple[int, Any]]) -> None:
    for index, reply in replies:
        case.check(index, reply)
    replies.clear()
