"""What wakes the idle threads of a pool: a connection that can be read, a bell, or an alarm, all in one epoll.

The kernel wakes one thread for each of these and not all that wait.  A connection is disarmed by that until somebody
arms it again.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import weakref
from typing import Generic, TypeVar

from telegrad._agent.alarm import Alarm

S = TypeVar("S")

ARMED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
_ONE_THREAD = select.EPOLLIN | select.EPOLLET
_EVERYBODY = 1 << 20


class Waking(Generic[S]):
    """``S``: what stands for a connection; ``pause``: in how many seconds the alarm goes off."""

    def __init__(self, pause: float) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, _ONE_THREAD)
        self._pause = pause
        self._alarm = Alarm(pause)
        self._epoll.register(self._alarm.fd, _ONE_THREAD)
        self._alarm_ends = 0.0  # until then it is set; a time, and not a flag: a Ctrl-C may come before it is
        # Not closed before nobody can ring it: its number may be another file's by then.
        for fd in (self._bell, self._alarm.fd):
            weakref.finalize(self, os.close, fd).atexit = False  # what goes even later may still ring
        self._sources: dict[int, S] = {}

    def wait(self, seconds: float) -> tuple[bool, S | None]:
        """Whether something has woken the calling thread, and the connection if that was one."""
        events = self._epoll.poll(seconds, 1)
        if not events:
            return False, None
        fd = events[0][0]
        if fd == self._bell:
            self._answer_bell()
        return True, self._sources.get(fd)

    def close(self) -> None:
        """Nobody waits any more."""
        self._epoll.close()

    # --- connections --------------------------------------------------------------------------------------------

    def watch(self, fd: int, source: S) -> None:
        self._sources[fd] = source
        self._epoll.register(fd, ARMED)

    def arm(self, fd: int, source: S, events: int = ARMED) -> None:
        if self._sources.get(fd) is source:  # else it was closed, and the number may be another's now
            try:
                self._epoll.modify(fd, events)
            except (OSError, ValueError):  # it is being closed
                pass

    def forget(self, fd: int, source: S) -> None:
        """Before the descriptor is closed; nothing happens when it is another's by now."""
        if self._sources.get(fd) is source:
            del self._sources[fd]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    # --- the bell: at once --------------------------------------------------------------------------------------

    def ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def ring_for_all(self) -> None:
        os.eventfd_write(self._bell, _EVERYBODY)

    def _answer_bell(self) -> None:
        """Rings that came together have woken one thread, which passes on all but its own."""
        with contextlib.suppress(BlockingIOError):
            rings = os.eventfd_read(self._bell)
            if rings > 1:
                os.eventfd_write(self._bell, rings - 1)

    # --- the alarm: after a while -------------------------------------------------------------------------------

    def set_alarm(self) -> None:
        """If it is not set."""
        if time.monotonic() >= self._alarm_ends:
            self._set()

    def put_off_alarm(self) -> None:
        """Sets it anew, if half of its time has passed."""
        if time.monotonic() > self._alarm_ends - self._pause / 2:
            self._set()

    def clear_alarm(self) -> None:
        if self._alarm_ends:
            self._alarm.clear()
            self._alarm_ends = 0.0  # last: who sets it at this moment may set it in vain, but it is not taken for set

    def _set(self) -> None:
        self._alarm_ends = time.monotonic() + self._pause
        self._alarm.set()
