"""The one thread of a worker that watches the time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger("telegrad.agent")


class Clock:
    """Calls ``tick(now)`` at the time that the last call returned, or earlier when asked to."""

    def __init__(self, name: str, tick: Callable[[float], float]) -> None:
        self._next_tick = 0.0
        self._tick = tick
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=f"telegrad-{name}-clock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake_before(self, when: float) -> None:
        """Ticks at that time, if not before."""
        if when < self._next_tick:
            with self._lock:
                self._next_tick = min(self._next_tick, when)
            self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _main(self) -> None:
        while not self._closed:
            now = time.monotonic()
            if now < self._next_tick:
                self._changed.wait(self._next_tick - now)
                self._changed.clear()
                continue
            with self._lock:
                self._next_tick = math.inf  # whoever sets a deadline while we look at them is heard
            try:
                wanted = self._tick(now)
            except Exception:
                log.exception("the clock failed in a tick")
                wanted = now + 1.0
            with self._lock:
                self._next_tick = min(self._next_tick, wanted)
