"""Looking for an answer a while before sleeping for it.

To put a core to sleep and wake it again costs 25-65 us on a virtual machine, and the *sender* pays for much of it: more
than all of a small call.  So a thread that expects an answer within moments looks for it again and again first.  It
stops where looking has not paid lately, and as soon as it notices that somebody else wants the core, or, in its own
process, the GIL: a thread that looks gives the GIL away for moments only, in which no other wakes up to take it.

A yield that takes long shows that another ran, but not every one does: a virtual machine's timer alone stops a thread
for 20-50 us, a thousand times a second.  The kernel's count of the thread's switches tells the two apart.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BUDGET = 500e-6  # seconds: longer than a small call takes when the other side sleeps, so that both find back
LONG_BUDGET = 1e-3  # for a small piece of a backward
_SHARED = 15e-6  # a yield that takes longer may mean that another process ran on this core
_CROWDED = 250e-6  # and one that takes that long, that it has much to do
_TRIALS = 8  # vain searches in a row after which the next waits skip theirs
_SKIP_AFTER_VAIN = 16  # a search in vain costs at most the time of the wait itself, so it is soon tried again
_SKIP_WHEN_CROWDED = (32, 128)  # at first, and the next time; another process may keep the core for milliseconds

_clock = time.perf_counter
CORES = len(os.sched_getaffinity(0))


def _switches() -> int:
    """How often the calling thread has given its core to another."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


class Spin:
    """One place where threads wait, and how looking has paid there."""

    __slots__ = ("_crowded", "_running", "_skip", "_trials")

    def __init__(self, running: Callable[[], int] = lambda: 0) -> None:
        self._running = running  # how many threads of this process have something to do
        self._trials = _TRIALS
        self._skip = 0  # how many of the next waits go to sleep at once
        self._crowded = False  # at the last search

    def rests(self) -> bool:
        """Whether the next search would end at its first look; such a one counts as done by that question."""
        if self._skip > 0:
            self._skip -= 1
            return True
        return CORES < 2 or self._running() > 0

    def look(self, look: Callable[[], T], budget: float = _BUDGET, mine: int = 0) -> T:
        """Calls ``look`` until it returns something true, or it is time to sleep.

        ``mine``: how many of those that have something to do are the calling thread.
        """
        found = look()
        if found or CORES < 2 or self._running() > mine:
            return found
        if self._skip > 0:
            self._skip -= 1
            return found
        start = _clock()
        switches = _switches()
        before = start
        while before - start < budget:
            os.sched_yield()
            away = _clock() - before
            shared = away > _SHARED and switches != (switches := _switches())
            found = look()
            if found:
                self._trials, self._crowded = _TRIALS, False
                return found
            if self._running() > mine:
                return found
            if shared:
                if away > _CROWDED:
                    self._skip = _SKIP_WHEN_CROWDED[self._crowded]
                    self._crowded = True
                return found
            before = _clock()
        self._crowded = False
        self._trials -= 1
        if self._trials <= 0:
            self._trials = 1
            self._skip = _SKIP_AFTER_VAIN
        return found
