"""Looking for an answer a while before sleeping for it.

To put a core to sleep and wake it again costs 25-65 us on a virtual machine, and the *sender* pays for much of it: more
than all of a small call.  So a thread that expects an answer within moments looks for it again and again first.  It stops
where looking has not paid lately, and as soon as a look takes long, for then somebody else wants the core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BUDGET = 150e-6
_CROWDED = 50e-6  # a yield that takes longer means that another process had work for this core
_CREDIT = 8  # failures in a row after which looking pauses
_RETRY = 64  # waits after which it is tried again

_clock = time.perf_counter
_single_core = (os.cpu_count() or 1) < 2


class Spin:
    """One place where threads wait, and how looking has paid there."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def look(self, look: Callable[[], T]) -> T:
        """Calls ``look`` until it returns something true, or it is time to sleep."""
        found = look()
        if found or _single_core:
            return found
        if self._failures >= _CREDIT:
            self._failures += 1
            if self._failures < _RETRY:
                return found
            self._failures = _CREDIT - 1
        now = start = _clock()
        while now - start < _BUDGET:
            os.sched_yield()
            found = look()
            if found:
                self._failures = 0
                return found
            before, now = now, _clock()
            if now - before > _CROWDED:
                break
        self._failures += 1
        return found
