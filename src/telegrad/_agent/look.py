"""A thread's look at how others get on, and whether it could do better than wait for them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable

# Their calls keep the GIL; those of ``os`` let go of it.
_keeping = ctypes.PyDLL(None)
_MOMENT = 150  # microseconds: longer than a thread takes to wake up and find that another has the GIL
_SOON = 0.002  # seconds


class Look:
    """For how long it has seen the same count.  A pause between two looks counts for so much at most: if it was longer,
    the thread could not look, for another had the GIL (a garbage collection, say, of 80 ms)."""

    __slots__ = ("_count", "_last", "_longest", "_unchanged")

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self.begin()

    def begin(self) -> None:
        self._count = -1
        self._last = self._unchanged = 0.0

    def unchanged(self, count: int) -> float:
        now = time.monotonic()
        self._unchanged = self._unchanged + min(now - self._last, self._longest) if count == self._count else 0.0
        self._count, self._last = count, now
        return self._unchanged


def should_join(threads: Iterable[int]) -> bool:
    """Whether the calling thread may get more done than these, given as the system's numbers, do without it.

    If they wait, it may: perhaps for what it would run.  If one computes without the GIL, it may if there is a core for
    it.  If they want the GIL, or a core, another that wants it too would only make it slower.
    """
    files = list(map(_state_of, threads))
    if any(map(_runs_beside, files)):
        _keeping.usleep(_MOMENT)
        if any(map(_runs_beside, files)):
            return _is_a_core_free()
    # From here on others can have the GIL.  That it does not come back soon says as much as that one of these has it.
    end = time.monotonic() + _SOON
    return not any(_is_running(_read(file)) or time.monotonic() > end for file in files)


def _state_of(thread: int) -> str:
    """The file that says it."""
    return f"/proc/self/task/{thread}/stat"


def _is_running(stat: bytes) -> bool:
    """Or could, if it had a core."""
    return b") R " in stat


def _read(file: str) -> bytes:
    """The beginning of a file; nothing if it is not there: the thread has ended."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 128)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _runs_beside(file: str) -> bool:
    """Whether a thread runs while the calling one keeps the GIL; perhaps only until it finds that out."""
    descriptor = _keeping.open(file.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        return False
    buffer = ctypes.create_string_buffer(128)
    _keeping.read(descriptor, buffer, 127)
    _keeping.close(descriptor)
    return _is_running(buffer.value)


def _is_a_core_free() -> bool:
    """Whether fewer threads run, on this machine, than this process may use cores; the calling one does not count."""
    try:
        running = int(_read("/proc/loadavg").split()[3].split(b"/")[0])
    except (IndexError, ValueError):
        return True
    return running <= len(os.sched_getaffinity(0))
