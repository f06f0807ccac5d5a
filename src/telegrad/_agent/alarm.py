"""A descriptor that becomes readable after a time: to be looked at later, without a thread that waits for that."""

from __future__ import annotations

import ctypes
import os
import time

# The standard library has it from Python 3.13 on.  A PyDLL keeps the GIL, which takes longer to hand over than a call.
_libc = ctypes.PyDLL(None, use_errno=True)
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_Setting = ctypes.c_long * 4  # the pause between repetitions, and the time until the first: seconds, nanoseconds
_NEVER = _Setting(0, 0, 0, 0)


class Alarm:
    def __init__(self, seconds: float) -> None:
        self.fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._setting = _Setting(0, 0, int(seconds), int(seconds % 1 * 1e9))

    def set(self) -> None:
        """Becomes readable once the seconds have passed from now."""
        _libc.timerfd_settime(self.fd, 0, self._setting, None)

    def clear(self) -> None:
        """Does not become readable after all."""
        _libc.timerfd_settime(self.fd, 0, _NEVER, None)
