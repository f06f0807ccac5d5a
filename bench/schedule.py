"""The order of a run.

The sides take turns within each row of each round, in reverse order in every second round:

    round 1   empty_call: telegrad torch raw | small_tensor: telegrad torch | context_small: telegrad fast torch | ...
    round 2   empty_call: raw torch telegrad | small_tensor: torch telegrad | context_small: torch fast telegrad | ...

A ratio is taken within one row of one round, between figures that are at most seconds old, and neither side always
profits from coming first.  Between the rounds and the end, each library is watched while nothing is asked of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.limits import LIMITS
from bench.results import FAST, RAW, Failure, Results
from bench.row import Plan, Row
from bench.side import Side, SideFailedError

__all__ = ["Schedule", "run"]

_IDLE_SECONDS = 2.0


@dataclass(frozen=True)
class Turn:
    """What one side does in one row of one round."""

    column: str
    """Under which name the results keep it."""
    name: str
    """The row's, or that of the limit next to it."""
    plan: Plan
    fast: bool = False


@dataclass(frozen=True)
class Schedule:
    """What to run."""

    rows: Sequence[Row]
    libraries: Sequence[str]
    rounds: int
    quick: bool
    timeout: float
    """Seconds that a side has for its start, and for one row of one round."""
    budget: float
    """No further round starts when it would end, at the last one's pace, after this many seconds."""

    @property
    def workers(self) -> int:
        """How many workers each library needs: as many as the most demanding row."""
        return max((row.workers for row in self.rows), default=2)

    def turns(self, row: Row, side: str) -> list[Turn]:
        """What a side does in a row: the row, once or in both modes, or the limit next to it, or nothing."""
        if side == RAW:
            limit = LIMITS[row.near.limit] if row.near is not None else None
            return [Turn(RAW, limit.name, limit.quick if self.quick else limit.plan)] if limit is not None else []
        plan = row.quick if self.quick and row.quick is not None else row.plan
        turns = [Turn(side, row.name, plan)]
        if row.modes and side == "telegrad":
            turns.append(Turn(FAST, row.name, plan, fast=True))
        return turns


def run(schedule: Schedule, tell: Callable[[str], None], sides: Sequence[Side] | None = None) -> Results:
    """Run it all, on the libraries and the raw limits or on these sides.

    ``SideFailedError`` when a side does not even start; later failures are in the results.
    """
    results = Results()
    started = time.monotonic()
    if sides is None:
        sides = [Side(name, schedule.timeout, schedule.workers) for name in schedule.libraries]
        sides.append(Side(RAW, schedule.timeout))
    with ExitStack() as stack:
        for side in sides:
            stack.callback(side.kill)
            side.spawn()
        for side in sides:
            side.wait_ready()
        tell(f"{', '.join(side.name for side in sides)} are up after {time.monotonic() - started:.1f} s")
        _rounds(schedule, sides, results, started, tell)
        for side in sides:
            if side.name != RAW and side.is_running:
                results.idle[side.name] = side.idle_cores(_IDLE_SECONDS)
        for side in sides:
            if problem := side.stop():
                results.failures.append(Failure(side.name, "shutdown", problem))
    results.seconds = time.monotonic() - started
    return results


def _rounds(
    schedule: Schedule, sides: Sequence[Side], results: Results, started: float, tell: Callable[[str], None]
) -> None:
    rows = list(schedule.rows)
    for index in range(schedule.rounds):
        round_started = time.monotonic()
        for row in list(rows):
            turns = [(side, turn) for side in sides for turn in schedule.turns(row, side.name)]
            if not _one_round(row, turns if index % 2 == 0 else turns[::-1], results, tell):
                rows.remove(row)
        now = time.monotonic()
        tell(f"round {index + 1} of {schedule.rounds}: {now - round_started:.1f} s")
        if index + 1 < schedule.rounds and now - started + (now - round_started) > schedule.budget:
            tell(f"the budget of {schedule.budget:g} s is used up: no more rounds")
            return


def _one_round(row: Row, turns: Sequence[tuple[Side, Turn]], results: Results, tell: Callable[[str], None]) -> bool:
    """One row of one round; False if a side failed in it."""
    samples: dict[str, list[float]] = {}
    for side, turn in turns:
        try:
            samples[turn.column] = side.measure(turn.name, turn.plan, turn.fast)
        except SideFailedError as error:
            results.failures.append(Failure(side.name, row.name, str(error)))
            tell(f"{side.name} failed in {row.name}; the row is left out from here on")
            return False
    results.add_round(row.name, samples)
    return True
