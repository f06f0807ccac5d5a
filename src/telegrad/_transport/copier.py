"""Copies memory, big pieces with two threads: where the data is in the cache, two cores copy twice as fast as one.

The second thread stays for the next copy: to start one takes longer (0.2-0.4 ms) than what it saves (16 MiB: 0.4 ms).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading

SPLIT_FROM = 8 << 20


class Copier:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while the second thread works, or is born
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[tuple[int, int, int, threading.Event] | None] = queue.SimpleQueue()
        self._closed = False

    def copy(self, target: int, source: int, size: int) -> None:
        if size < SPLIT_FROM or (os.cpu_count() or 1) < 2 or not self._lock.acquire(blocking=False):
            ctypes.memmove(target, source, size)
            return
        try:
            if self._has_thread():
                self._copy_by_two(target, source, size)
            else:
                ctypes.memmove(target, source, size)
        finally:
            self._lock.release()

    def _has_thread(self) -> bool:
        """False if the system has no more threads."""
        if self._thread is None and not self._closed:
            with contextlib.suppress(RuntimeError):
                thread = threading.Thread(target=self._work, name="telegrad-copier", daemon=True)
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            target, source, size, done = job
            ctypes.memmove(target, source, size)
            done.set()

    def _copy_by_two(self, target: int, source: int, size: int) -> None:
        half = size // 2
        done = threading.Event()
        try:
            self._jobs.put((target + half, source + half, size - half, done))
            ctypes.memmove(target, source, half)
        finally:
            _wait_for(done)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()


def _wait_for(done: threading.Event) -> None:
    """A Ctrl-C has to wait too: it would have the memory unmapped into which the other thread still writes."""
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
