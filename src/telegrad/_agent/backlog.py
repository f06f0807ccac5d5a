"""What the threads of a pool have yet to begin, and which of them takes it: rules 2 to 4 of ``pool``."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from telegrad._agent.look import Look, should_join

Work = tuple[Callable[[Any, Any], object], Any, Any]


class UserCall(tuple[Callable[[Any, Any], object], Any, Any]):
    """Work that runs a user's function, and so is subject to the limit."""

    __slots__ = ()


PATIENCE = 0.001  # seconds: how long a burst may make no progress before others join in
_SLOW = 0.005  # the same, where it is not stuck but slow
_STUCK = 0.05  # how long nothing may be begun before the limit of a full pool gives way, or others join in anyway


class Watch:
    """What one thread has seen of how the others get on, while something was queued."""

    __slots__ = ("begun", "calls", "progress")

    def __init__(self) -> None:
        self.progress = Look(_SLOW / 2)
        self.begun = Look(_STUCK / 2)
        self.calls = Look(_STUCK)

    def end(self) -> None:
        """When nothing is queued, nothing is stuck."""
        self.progress.begin()
        self.begun.begin()
        self.calls.begin()


class Backlog:
    """Threads are given as the system numbers them.  ``running`` are those that run something and do not wait for
    another worker; of such there may be ``limit``."""

    def __init__(self, limit: int) -> None:
        self.running: set[int] = set()
        self.stuck = False
        self._limit = limit
        self._extra = 0  # by how much the limit has given way
        self._calls: deque[Work] = deque()  # of users
        self._urgent: deque[Work] = deque()  # everything else
        self._drainer: int | None = None  # the thread that takes what is queued, one after the other (rule 3)
        self._taken = 0  # how much work was ever begun, or pieces of it: unchanged means no progress
        self._begun = 0  # without the pieces
        self._calls_begun = 0  # and of that, how many calls of users
        self._joined_at = 0  # how much was begun when a thread last joined those that are stuck, its own included
        self._looking = threading.Lock()  # held by the thread that looks how those that run get on

    def __len__(self) -> int:
        return len(self._calls) + len(self._urgent)

    def add(self, work: Sequence[Work]) -> None:
        for each in work:
            (self._calls if type(each) is UserCall else self._urgent).append(each)

    def waits(self) -> bool:
        return bool(self._calls or self._urgent)

    def take_all(self) -> list[Work]:
        work: list[Work] = []
        for queue in (self._urgent, self._calls):
            with contextlib.suppress(IndexError):
                while True:
                    work.append(queue.popleft())
        return work

    # --- what is done -------------------------------------------------------------------------------------------

    def begin(self, work: Work) -> None:
        self._taken += 1
        self._begun += 1
        self._calls_begun += type(work) is UserCall

    def progress(self) -> None:
        """A piece of something that was begun is done."""
        self._taken += 1

    # --- who takes it -------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether the limit lets the calling thread, which is among the running, run a user's function."""
        return len(self.running) <= self._limit + self._extra

    def _is_full(self) -> bool:
        return len(self.running) >= self._limit + self._extra

    def pick(self, me: int, watch: Watch, joins: bool) -> deque[Work] | None:
        """The queue that this thread, which is not among the running, should take from.

        ``joins``: it was woken, and did not just come to the end of something.
        """
        if not self._urgent and not self._calls:
            watch.end()
            self.stop_draining(me)
            return None
        full = self._is_full()
        drains = self._drainer == me or (self._drainer is None and not joins)
        if self.running and (full or not drains):
            self.stop_draining(me)
            stalled = self._is_stalled(watch, full)
            if not stalled and (full or not self.stuck):
                return None  # those that run will come for it
            self.stuck = self.stuck or stalled
        self._drainer = me
        if self._urgent:
            return self._urgent
        if full:
            self._extra += 1
        return self._calls

    def is_for(self, queue: deque[Work]) -> bool:
        """Whether a thread that picked this queue, and is among the running now, may take from it: others may have been
        faster."""
        return queue is not self._calls or self.has_room()

    def _is_stalled(self, watch: Watch, full: bool) -> bool:
        if full and not self._urgent:
            return watch.calls.unchanged(self._calls_begun) >= _STUCK
        waited = watch.progress.unchanged(self._taken)
        if waited >= _SLOW or watch.begun.unchanged(self._begun) >= _STUCK:
            return True
        return waited >= PATIENCE and self._should_join()

    def _should_join(self) -> bool:
        """Of several threads that would look at the same moment one does."""
        if not self._looking.acquire(blocking=False):
            return False
        try:
            return should_join(list(self.running))
        finally:
            self._looking.release()

    def take_over(self, me: int) -> deque[Work] | None:
        """The queue for a thread that has read a burst, and is among the running: it drains from now on, for the one
        that did may be at its last for long."""
        if not self._urgent and not self.has_room():
            return None
        self._drainer = me
        return self._urgent or self._calls

    def stop_draining(self, me: int) -> None:
        if self._drainer == me:
            self._drainer = None

    def wants_more(self) -> bool:
        """Before a thread takes from what others are stuck in: whether yet another should, since only such as it have
        begun anything."""
        return self._taken == self._joined_at and len(self) > 1

    def joined(self) -> None:
        """It does so now.  To be said after that other was woken, which may be faster and asks the same."""
        self._joined_at = self._taken + 1

    def patience(self, watch: Watch) -> float | None:
        """After how long a thread that found nothing to take should look again; None if nothing is queued."""
        if not self.waits():
            self.stuck, self._extra = False, 0
            return None
        if self._is_full() and not self._urgent:
            return _STUCK
        return PATIENCE if watch.progress.unchanged(self._taken) < PATIENCE else _SLOW / 2
