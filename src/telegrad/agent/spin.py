"""Looking for an answer a while before sleeping for it.

To put a core to sleep and wake it again costs 25-65 us on a virtual machine, and the *sender* pays for much of it: more
than all of a small call.  So a thread that expects an answer within moments looks for it again and again first.  It
stops where looking has not paid lately, and as soon as a look takes long, for then somebody else wants the core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BUDGET = 500e-6  # seconds: longer than a small call takes when the other side sleeps, so that both find back
_CROWDED = 250e-6  # a look that takes longer means that another process had work for this core
_TRIALS = 8  # vain searches in a row after which the next waits skip theirs
_SKIP_AFTER_VAIN = 16  # a search in vain costs at most the time of the wait itself, so it is soon tried again
_SKIP_WHEN_CROWDED = (32, 128)  # at first, and the next time; another process may keep the core for milliseconds

_clock = time.perf_counter
_single_core = (os.cpu_count() or 1) < 2


class Spin:
    """One place where threads wait, and how looking has paid there."""

    __slots__ = ("_crowded", "_skip", "_trials")

    def __init__(self) -> None:
        self._trials = _TRIALS
        self._skip = 0  # how many of the next waits go to sleep at once
        self._crowded = False  # at the last search

    def look(self, look: Callable[[], T]) -> T:
        """Calls ``look`` until it returns something true, or it is time to sleep."""
        found = look()
        if found or _single_core:
            return found
        if self._skip:
            self._skip -= 1
            return found
        now = start = _clock()
        while now - start < _BUDGET:
            os.sched_yield()
            found = look()
            if found:
                self._trials, self._crowded = _TRIALS, False
                return found
            before, now = now, _clock()
            if now - before > _CROWDED:
                self._skip = _SKIP_WHEN_CROWDED[self._crowded]
                self._crowded = True
                return found
        self._crowded = False
        self._trials -= 1
        if self._trials <= 0:
            self._trials = 1
            self._skip = _SKIP_AFTER_VAIN
        return found
