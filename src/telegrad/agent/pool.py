"""The threads of a worker: whoever reads a request runs it, and another takes over the reading.

All idle threads wait in one epoll.  The kernel wakes one of them per readable connection, which is disarmed until that
thread has read from it, so the thread can run what it read without a hop to another (10-30 us each).  The rules:

1. Somebody is always waiting: a thread that starts to run something while no other is idle starts a new one first.
2. At most ``limit`` threads run at once; a thread that waits for another worker does not count.
3. A burst read from one connection is run by the thread that read it, one after the other, for under the GIL two
   threads are slower than one on short functions; when it makes no progress for a millisecond, others join in.
4. If all that run are stuck (say, in a wait that we cannot see) while work is queued, the limit gives way.
5. Answers given while more work is queued are corked, so that a burst of calls costs a few sends and not one each;
   they go out when the queue is empty, or after a millisecond in which nothing happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

log = logging.getLogger("telegrad.agent")

Work = tuple[Callable[[Any, Any], object], Any, Any]

_PATIENCE = 0.001  # how long a burst may make no progress before others join in
_STUCK = 0.05  # how long a full pool may make no progress before the limit gives way
_IDLE_SECONDS = 10.0  # how long a surplus thread stays
_SPARE = 2  # idle threads that always stay

ARMED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Source(Protocol):
    """Something with a descriptor that the pool watches."""

    def readable(self) -> Sequence[Work]: ...

    def linger(self) -> Sequence[Work]:
        """As ``readable``, for a moment in which more may come."""

    def flush(self) -> None:
        """Sends what was corked."""


class Pool:
    def __init__(self, name: str, limit: int, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._limit = limit
        self._on_thread_start = on_thread_start
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._sources: dict[int, Source] = {}
        self._queue: deque[Work] = deque()
        self._corked: dict[Source, None] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._born = 0
        self._idle = 0
        self._busy = 0
        self._blocked = 0
        self._taken = 0  # how much work was ever begun: unchanged means no progress
        self._stuck = False
        self._extra = 0  # by how much the limit has given way
        self._closed = False
        self._here = threading.local()
        self._lingering = False  # one thread at most looks out for its last caller's next request
        with self._lock:
            self._grow()

    # --- what others ask of it ----------------------------------------------------------------------------------

    def watch(self, fd: int, source: Source) -> None:
        self._sources[fd] = source
        self._epoll.register(fd, ARMED)

    def arm(self, fd: int, source: Source) -> None:
        self._modify(fd, source, ARMED)

    def disarm(self, fd: int, source: Source) -> None:
        self._modify(fd, source, 0)

    def _modify(self, fd: int, source: Source, events: int) -> None:
        if self._sources.get(fd) is source:  # else it was closed, and the number may be another's now
            with contextlib.suppress(OSError, ValueError):
                self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        self._sources.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def submit(self, work: Work) -> None:
        self._queue.append(work)
        self._ring()

    def submit_all(self, work: Sequence[Work]) -> None:
        self._queue.extend(work)
        self._ring()

    def cork(self, source: Source) -> bool:
        """Whether there is more to do right now, so that the source may wait for ``flush`` (rule 5)."""
        if not self._queue:
            return False
        self._corked[source] = None
        return True

    def _uncork(self) -> None:
        while self._corked:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._corked.popitem()[0].flush()

    def runs_here(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return getattr(self._here, "running", False)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a wait for another worker: this thread of the pool does not count as running meanwhile (rule 2)."""
        with self._lock:
            self._busy -= 1
            self._blocked += 1
            if self._idle == 0:
                self._grow()
            waiting = bool(self._queue)
        if waiting:
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                self._busy += 1
                self._blocked -= 1

    @property
    def busy(self) -> int:
        """How many threads run something, blocked ones included."""
        return self._busy + self._blocked

    def close(self, timeout: float) -> None:
        """Lets every thread end; those that run user code longer than the timeout are left behind as daemons."""
        with self._lock:  # a thread that is being started counts, and can be joined only when it is
            self._closed = True
            threads = list(self._threads)
        os.eventfd_write(self._bell, 1 << 20)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
        if not self._threads:
            self._epoll.close()
            os.close(self._bell)

    def drain(self) -> list[Work]:
        """Takes away what nobody has begun."""
        work: list[Work] = []
        with contextlib.suppress(IndexError):
            while True:
                work.append(self._queue.popleft())
        return work

    def __repr__(self) -> str:
        return (
            f"<Pool {self._name}: {len(self._threads)} threads, {self._busy} running, {self._blocked} blocked, "
            f"{self._idle} idle, {len(self._queue)} queued>"
        )

    # --- the threads --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        if self._idle and not self._closed:
            os.eventfd_write(self._bell, 1)

    def _grow(self) -> None:
        """Starts a thread; the caller holds the lock.  It counts as idle at once, so that nobody starts a second."""
        if self._closed:
            return
        self._born += 1
        self._idle += 1
        thread = threading.Thread(target=self._main, name=f"telegrad-{self._name}-{self._born}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _main(self) -> None:
        try:
            self._on_thread_start()
            self._serve()
        except Exception:
            log.exception("a thread of worker %r ended on an internal error", self._name)
        finally:
            self._threads.discard(threading.current_thread())

    def _serve(self) -> None:
        """An endless loop of: take what is queued, else wait for something to happen.  Enters and stays 'idle'."""
        seen = -1
        while not self._closed:
            if self._queue and self._may_take(seen):
                self._begin()
                with contextlib.suppress(IndexError):
                    work = self._queue.popleft()
                    if self._corked and not self._queue:
                        self._uncork()  # this one may take long
                    self._run(work)
                self._end()
                seen = -1
                continue
            if self._corked and not self._queue:
                self._uncork()
            seen = self._taken
            events = self._epoll.poll(self._patience(), 1)
            if not events:
                self._uncork()
                if not self._queue and self._leave():
                    return
                continue
            seen = -2  # something happened: look at the queue, but do not call it stuck
            fd = events[0][0]
            if fd == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            source = self._sources.get(fd)
            if source is not None:
                self._read(source)

    def _read(self, source: Source) -> None:
        """Reads from a source and runs what came; a caller that just got its answer may ask again at once."""
        work = self._try(source.readable)
        while work:
            self._begin()
            if len(work) == 1 and not self._queue and self._busy <= self._limit + self._extra:
                self._run(work[0])  # the hot path: no queue, no hop
            else:
                self._queue.extend(work)
                if len(work) > 1 and self._busy <= self._limit + self._extra:
                    self._ring()
                    with contextlib.suppress(IndexError):
                        self._run(self._queue.popleft())
            self._end()
            if self._queue or self._lingering:
                return
            self._lingering = True
            work = self._try(source.linger)
            self._lingering = False

    def _try(self, read: Callable[[], Sequence[Work]]) -> Sequence[Work]:
        try:
            return read()
        except Exception:
            log.exception("worker %r could not read from a connection", self._name)
            return ()

    def _may_take(self, seen: int) -> bool:
        """Rules 2 to 4: whether this thread should take from the queue, having last seen ``seen`` items begun."""
        if self._busy >= self._limit + self._extra:
            if seen == self._taken:
                self._extra += 1
                self._stuck = True
                return True
            return False
        if self._busy == 0 or self._stuck:
            return True
        if seen == self._taken:
            self._stuck = True
            return True
        return False

    def _patience(self) -> float:
        if not self._queue:
            self._stuck, self._extra = False, 0
            return _IDLE_SECONDS
        return _PATIENCE if self._busy < self._limit + self._extra else _STUCK

    def _leave(self) -> bool:
        """A surplus thread that had nothing to do for long ends."""
        with self._lock:
            if self._idle <= _SPARE:
                return False
            self._idle -= 1
            return True

    def _begin(self) -> None:
        with self._lock:
            self._busy += 1
            self._idle -= 1
            if self._idle == 0:
                self._grow()  # rule 1
        self._here.running = True

    def _end(self) -> None:
        self._here.running = False
        with self._lock:
            self._busy -= 1
            self._idle += 1

    def _run(self, work: Work) -> None:
        self._taken += 1
        function, first, second = work
        try:
            function(first, second)
        except Exception:
            log.exception("worker %r failed in an internal task", self._name)
