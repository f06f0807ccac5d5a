"""Where the idle threads of a data plane wait: one epoll, over its links and over a bell that wakes one of them."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from telegrad._core.python.link import PythonLink

#: What a link is watched for: its end, or bytes too.  It is reported once, to one thread, and then watched no more.
END = select.EPOLLRDHUP | select.EPOLLONESHOT
BYTES = select.EPOLLIN | END


class Bell:
    """Wakes threads that poll ``fd``.  Any thread may ring at any time, also a ``__del__`` inside of ``ring`` and after
    the close: the descriptor may be another file by then, so it is used under a lock."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()

    def ring(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)


class Poller:
    def __init__(self) -> None:
        self.links: dict[int, PythonLink] = {}  # by descriptor
        self._lock = threading.RLock()  # a signal handler may dial, or wait
        self._closing = False
        self._epoll = select.epoll()
        self._bell = Bell()
        self._epoll.register(self._bell.fd, select.EPOLLIN | select.EPOLLET)  # each ring wakes one; none reads it
        self.wake = self._bell.ring

    def wait(self, seconds: float) -> int | None:
        """The descriptor of a link that was reported, or another number if the thread was woken; None: neither."""
        events = self._epoll.poll(seconds, 1)
        return events[0][0] if events else None

    def add(self, link: PythonLink) -> None:
        with self._lock:
            if not link.closed and not self._closing:
                self.links[link.fd] = link
                link.watched = END if link.dialled else BYTES
                self._epoll.register(link.fd, link.watched)

    def remove(self, link: PythonLink) -> None:
        """Its descriptor is about to be closed."""
        with self._lock:
            if self.links.get(link.fd) is link:
                del self.links[link.fd]
                with contextlib.suppress(OSError, ValueError):  # the epoll is closed
                    self._epoll.unregister(link.fd)

    def watch(self, link: PythonLink, events: int) -> None:
        if link.watched != events and not link.closed:
            with self._lock, contextlib.suppress(OSError, ValueError):  # it is being closed
                link.watched = events
                if self.links.get(link.fd) is link:
                    self._epoll.modify(link.fd, events)

    def wake_all(self) -> None:
        """At the end.  From now on a thread that waits is woken at once."""
        with self._lock:
            self._closing = True
            self._epoll.modify(self._bell.fd, select.EPOLLIN)
        self._bell.ring()

    def close(self) -> None:
        self._epoll.close()
        self._bell.close()
