"""Requests and their replies: which calls wait for which worker, and until when.

No thread, socket or clock: the agent tells it what happened and obeys what it answers.  Whatever changes the table of
calls is one atomic step on a dictionary under the GIL, so the hot path takes no lock.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """One request that has not been answered."""

    call_id: int
    to: int
    what: str
    started: float
    deadline: float  # math.inf: none
    ticket: T = field(repr=False)  # the agent's own


class Calls(Generic[T]):
    """``newest``: of so many it is known at once whom they are for."""

    def __init__(self, newest: int = 16) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, Waiting[T]] = {}
        # Their ids, for whom and when; not the calls, which hold their outcomes.  Beside the dictionary: Python 3.11
        # crashes if one reads that from its end while others change it.
        self._newest: deque[tuple[int, int, float]] = deque(maxlen=newest)

    def start(self, to: int, what: str, now: float, timeout: float, ticket: T) -> Waiting[T]:
        """A request is about to go out; a timeout of 0 means none."""
        deadline = now + timeout if timeout > 0 else math.inf
        call_id = next(self._ids)
        self._newest.append((call_id, to, now))
        waiting = self._waiting[call_id] = Waiting(call_id, to, what, now, deadline, ticket)
        return waiting

    def find(self, call_id: int) -> Waiting[T] | None:
        return self._waiting.get(call_id)

    def finish(self, call_id: int) -> Waiting[T] | None:
        """An answer came; None when nobody waits for it any more."""
        return self._waiting.pop(call_id, None)

    def lost(self, worker: int, which: Callable[[T], bool] = lambda _: True) -> list[Waiting[T]]:
        """A worker is gone; the calls that it will never answer, of those whose ticket ``which`` picks."""
        waiting = list(self._waiting.values())
        return self._take([call for call in waiting if call.to == worker and which(call.ticket)])

    def expire(self, now: float) -> list[Waiting[T]]:
        """The calls whose time is over."""
        return self._take([call for call in list(self._waiting.values()) if call.deadline <= now])

    def _take(self, calls: list[Waiting[T]]) -> list[Waiting[T]]:
        return [call for call in calls if self._waiting.pop(call.call_id, None) is not None]

    def are_for_many(self, many: int, since: float) -> bool:
        """Whether at least so many workers have yet to answer one of the newest calls, made after ``since``."""
        waiting = self._waiting
        if len(waiting) < many:
            return False
        return (
            len({to for call_id, to, started in list(self._newest) if started > since and call_id in waiting}) >= many
        )

    def next_deadline(self) -> float:
        return min((call.deadline for call in list(self._waiting.values())), default=math.inf)

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        shown = ", ".join(f"{call.what} of {call.to}" for call in list(self._waiting.values())[:5])
        return f"<Calls {len(self)} waiting{': ' if shown else ''}{shown}>"
