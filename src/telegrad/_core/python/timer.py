"""The timer of a data plane: a thread that ticks while there is work, and else sleeps until a deadline."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from telegrad._core.python.poller import Bell

TICK = 3e-3  # Seconds after which a thread that still runs the same request lets others read its link.
_QUIET_TICKS = 50  # after which it sleeps


class Timer:
    """Calls ``tick`` every ``TICK`` seconds while ``is_busy``, and ``wake`` at the time that its last call returned, or
    earlier (``wake_before``).  None of the three may block."""

    def __init__(
        self, name: str, is_busy: Callable[[], bool], tick: Callable[[], None], wake: Callable[[], float]
    ) -> None:
        self.sleeps = False  # so that it must be woken (``ring``) when there is work
        self._is_busy = is_busy
        self._tick = tick
        self._wake = wake
        self._next = 0.0
        self._lock = threading.RLock()  # of ``_next``; a signal handler may set it
        self._closed = False
        self._bell = Bell()
        self.ring = self._bell.ring
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def wake_before(self, when: float) -> None:
        if when < self._next:
            with self._lock:
                self._next = min(self._next, when)
            self.ring()

    def _run(self) -> None:
        quiet = 0
        while not self._closed:
            quiet = 0 if self._is_busy() else quiet + 1
            if quiet > _QUIET_TICKS:
                self._sleep()
                quiet = 0
            else:
                time.sleep(TICK)
            self._tick()
            if time.monotonic() >= self._next:
                self._next = float("inf")  # a deadline that is set during the call is not lost
                wanted = self._wake()
                with self._lock:
                    self._next = min(self._next, wanted)

    def _sleep(self) -> None:
        poll = select.poll()
        poll.register(self._bell.fd, select.POLLIN)
        self.sleeps = True
        if not self._is_busy() and not self._closed and poll.poll(max(self._next - time.monotonic(), 0.0) * 1000):
            os.eventfd_read(self._bell.fd)
        self.sleeps = False

    def stop(self) -> None:
        self._closed = True
        self.ring()

    def close(self) -> None:
        self._bell.close()
