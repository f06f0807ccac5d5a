"""Copies memory, big pieces with two threads: for data in the cache, two cores copy twice as fast as one.

The second thread is kept for the next copy: starting one takes 0.2-0.4 ms, and a copy of 16 MiB gains 0.4 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading

SPLIT_FROM = 8 << 20  # bytes from which two threads copy


class Copier:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while the second thread copies or is started
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
        """Starts the second thread if there is none; False if that fails."""
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
    """Waits even after a Ctrl-C, which could unmap the memory into which the other thread still writes."""
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            done.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
