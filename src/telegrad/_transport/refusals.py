"""A log with a bounded number of lines: peers, authenticated or not, must not be able to fill a disk with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

LINES = 20  # written in each window
WINDOW = 60.0  # seconds


class RefusalLog:
    """Logs the first refusals of each minute one by one, and the others as one line with their number.

    ``kind``: what is refused, in the plural.
    """

    def __init__(self, log: logging.Logger, kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._kind = kind
        self._clock = clock
        self._window_ends = 0.0
        self._lines = 0
        self._unwritten = 0
        self._lock = threading.Lock()

    def add(self, what: str, reason: str) -> None:
        self.write(f"refused {what}: {reason}")

    def write(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def _write(self, text: str) -> None:
        now = self._clock()
        if now >= self._window_ends:
            if self._unwritten:
                self._log.warning("%d more %s were not logged one by one", self._unwritten, self._kind)
            self._window_ends, self._lines, self._unwritten = now + WINDOW, 0, 0
        self._lines += 1
        if self._lines <= LINES:
            self._log.warning("%s", text)
            return
        self._unwritten += 1
        if self._unwritten == 1:
            self._log.warning("more %s are only counted for the rest of this minute", self._kind)
