"""Eight threads, each with contexts of its own around one small call: the rate of passes that share two workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.library import Library
from bench.row import Case, Near, Plan, Row
from bench.rows.context_small import OneCall
from bench.rows.passes import Gradients, WholePass

__all__ = ["CONTEXT_THREADS", "EACH", "THREADS"]

THREADS = 8
EACH = 8
"""Contexts that a thread goes through in one sample, so that handing out the work weighs little."""


class _Threads(Case[list[Gradients]]):
    held = 1

    def __init__(self, library: Library, peer: str) -> None:
        self._passes = WholePass(library, OneCall(library, peer))
        self._pool = ThreadPoolExecutor(THREADS)

    def run(self, index: int) -> list[Gradients]:
        return [reply for replies in self._pool.map(self._several, self._starts(index)) for reply in replies]

    def check(self, index: int, reply: list[Gradients]) -> None:
        for place, gradients in enumerate(reply):
            self._passes.check(self._starts(index)[0] + place, gradients)

    def finish(self, calls: int) -> None:
        self._pool.shutdown()
        self._passes.finish(calls)

    @staticmethod
    def _starts(index: int) -> range:
        """The first pass of each thread."""
        return range(index * THREADS * EACH, (index + 1) * THREADS * EACH, EACH)

    def _several(self, start: int) -> list[Gradients]:
        return [self._passes.run(start + turn) for turn in range(EACH)]


CONTEXT_THREADS = Row(
    name="context_threads",
    title="contexts in 8 threads",
    case=_Threads,
    plan=Plan(warmup=2, samples=8),
    quick=Plan(warmup=1, samples=1),
    floor=2.0,
    goal=4.0,
    calls_per_sample=THREADS * EACH,
    near=Near("hand_made_threads"),
    modes=True,
)
