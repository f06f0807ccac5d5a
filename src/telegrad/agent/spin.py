"""Looking for an answer a while before sleeping for it.

To put a core to sleep and wake it again costs 25-65 us on a virtual machine, and the *sender* pays for much of it: more
than all of a small call.  So a thread that expects an answer within moments looks for it again and again first.  It
stops where looking has not paid lately, and as soon as it notices that somebody else wants the core, or, in its own
process, the GIL: a thread that looks gives the GIL away for moments only, in which no other wakes up to take it.

That may be the very peer that it waits for: the kernel likes to wake a process on the core of the one that woke it, and
two processes that yield to each other can share a core for long while another is idle, at half the speed.  So the
first thing to do is to step aside, onto another core, which takes a call from 45 us to 25-35 us in the median.

A yield that takes long shows that another ran, but not every one does: a virtual machine's timer alone stops a thread
for 20-50 us, a thousand times a second.  The kernel's count of the thread's switches tells the two apart.
"""

from __future__ import annotations

import contextlib
import ctypes
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

_STAY = 200e-6  # seconds between two moves to another core; doubled each time that a move did not help for long
_LONGEST_STAY = 0.005

_getcpu = ctypes.CDLL(None).sched_getcpu
_clock = time.perf_counter
CORES = len(os.sched_getaffinity(0))


def step_aside() -> None:
    """Moves the calling thread to another core, if it may run on another."""
    allowed = os.sched_getaffinity(0)
    others = allowed - {_getcpu()}
    if others:
        with contextlib.suppress(OSError):  # what it may use has changed at this moment
            try:
                os.sched_setaffinity(0, others)
            finally:  # a Ctrl-C between the two must not leave it bound
                os.sched_setaffinity(0, allowed)


def _switches() -> int:
    """How often the calling thread has given its core to another."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


class Spin:
    """One place where threads wait, and how looking has paid there."""

    __slots__ = ("_crowded", "_moves", "_running", "_skip", "_stay", "_stay_until", "_trials")

    def __init__(self, moves: bool, running: Callable[[], int] = lambda: 0) -> None:
        self._moves = moves  # of two that share a core only one may move, or they would meet again
        self._running = running  # how many threads of this process have something to do
        self._trials = _TRIALS
        self._skip = 0  # how many of the next waits go to sleep at once
        self._crowded = False  # at the last search
        self._stay = _STAY
        self._stay_until = 0.0  # before that, sharing a core means to sleep

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
                if shared:
                    self._move(before)  # the peer answered on this very core
                return found
            if self._running() > mine:
                return found
            if shared:
                if away > _CROWDED:
                    self._skip = _SKIP_WHEN_CROWDED[self._crowded]
                    self._crowded = True
                    return found
                if not self._move(before):
                    return found
            before = _clock()
        self._crowded = False
        self._trials -= 1
        if self._trials <= 0:
            self._trials = 1
            self._skip = _SKIP_AFTER_VAIN
        return found

    def _move(self, now: float) -> bool:
        """Goes to another core, unless that was tried just now."""
        if not self._moves or now < self._stay_until:
            return False
        self._stay = min(self._stay * 2, _LONGEST_STAY) if now < self._stay_until + self._stay else _STAY
        self._stay_until = now + self._stay
        step_aside()
        return True
