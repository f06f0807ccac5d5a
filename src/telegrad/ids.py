"""The ids of workers, calls and references, and the generators that make them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)

MAX_WORKERS = 1 << 16  # a context id gives the worker's id 16 bits


class GlobalId(NamedTuple):
    """An id that is unique in a job without asking anyone: who made it, and that worker's count."""

    created_on: int
    local_id: int

    def __repr__(self) -> str:
        return f"{self.created_on}:{self.local_id}"


class IdSource:
    """Hands out the global ids of one worker: a count, or, where nobody may guess them, chance."""

    def __init__(self, worker: WorkerId, guessable: bool = True) -> None:
        self._worker = worker
        # Both are safe from any thread: ``next`` on a counter is atomic under the GIL.
        self._number: Callable[[], int] = itertools.count().__next__ if guessable else _random

    def next(self) -> GlobalId:
        return GlobalId(self._worker, self._number())


def _random() -> int:
    return secrets.randbits(63)
