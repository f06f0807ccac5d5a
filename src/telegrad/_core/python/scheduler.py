"""Which thread reads a link, which thread runs what was read, and when another thread is needed.

No I/O, no clock and no threads of its own: the data plane reports events and does what the answers say.  All decisions
are made under one lock, so each method is one step.

A thread is *idle*, or it *owns* a link, or it runs work from the queues, or it waits for another worker.  The rules:

1. At least one thread is idle.  A thread that leaves the idle ones as the last is told to start another.
2. The owner of a link runs what it reads there, in order, on its own thread: short calls cost no hop to another thread.
3. The owner loses the link, with what it has read and not begun, when it is about to wait for another worker, or when
   it has been in the same work for a whole tick.  In the second case the link is *slow*: until one of its calls takes
   less than a tick, each is put into the queue, for a thread of its own.
4. At most ``limit`` threads run calls; other calls wait in a queue.  A thread that waits for another worker does not
   count.  Messages are not limited.
5. A function can also wait for another worker where telegrad does not see it, in ``torch.futures.wait_all`` or on a
   lock of its own.  So when calls are queued, none has begun or ended for ``STUCK`` seconds, and the process has hardly
   used a processor meanwhile, one call more than the limit may begin.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

STUCK = 0.05
_IDLE_SHARE = 0.2  # of one processor: less than this is "hardly used"


class Work(NamedTuple):
    """Something to run: ``act(first, second)``."""

    is_call: bool  # counts against the limit
    act: Callable[[Any, Any], None]
    first: Any
    second: Any


class Owner:
    """A thread, while it owns a link, or runs what it began as the owner."""

    def __init__(self) -> None:
        self.runs = False  # one of the works that it read


class LinkSchedule:
    """What the scheduler knows of one link."""

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self.unbegun: deque[Work] = deque()  # read by the owner
        self.begun = 0  # how many the owner has begun
        self.begun_at_tick = -1  # the same, at the last tick
        self.slow = False


class Scheduler:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Reentrant: the garbage collector may run a ``__del__`` inside, which may ``add`` works.
        self._lock = threading.RLock()
        self._calls: deque[Work] = deque()
        self._messages: deque[Work] = deque()
        self._draining = 0  # threads that run queued messages and do not wait for another worker
        self._taken = 0  # from the queues, ever
        self._taken_at_tick = 0
        self._extra = 0  # calls above the limit that may run (rule 5)
        self._changes = 0  # calls that began or ended, ever
        self._unchanged = (-1, 0.0, 0.0)  # the number of changes, and since when, and the processor time then
        self.idle = 1  # the first thread, which is being started
        self.calls_running = 0  # not counting those whose threads wait for another worker
        self._running = 0  # works that have begun and not ended
        self.owned: set[LinkSchedule] = set()

    # --- idle threads -------------------------------------------------------------------------------------------

    def stop_idling(self, threads: int = 1) -> bool:
        """Idle threads found something to do.  Whether to start a thread; one that the system refused is asked for by
        a call with 0."""
        with self._lock:
            self.idle -= threads
            if self.idle:
                return False
            self.idle = 1  # counted before it starts, so that no second one is started
            return True

    def own(self, link: LinkSchedule, me: Owner) -> bool:
        """A thread wants to own a link.  Whether it does."""
        with self._lock:
            if link.owner is not None:
                return False
            link.owner = me
            self.owned.add(link)
            return True

    def not_started(self) -> None:
        """The system refused a thread."""
        with self._lock:
            self.idle -= 1

    def is_surplus(self) -> bool:
        """An idle thread has had nothing to do for long.  Whether it should end."""
        with self._lock:
            if self.idle <= 2:
                return False
            self.idle -= 1
            return True

    # --- the owner of a link ------------------------------------------------------------------------------------

    def next_of_link(
        self, link: LinkSchedule, me: Owner, done: Work | None, arrived: Sequence[Work] = ()
    ) -> Work | None:
        """The owner has run ``done`` and read ``arrived``: what it runs next.  None also if it has lost the link."""
        with self._lock:
            if done is not None:
                me.runs = False
                self._running -= 1
                self.calls_running -= done.is_call
                self._changes += done.is_call
            if link.owner is not me:
                self._enqueue(arrived)
                return None
            unbegun = link.unbegun
            unbegun.extend(arrived)
            if self.calls_running >= self._limit + self._extra:
                while unbegun and unbegun[0].is_call:
                    self._calls.append(unbegun.popleft())
            if not unbegun:
                return None
            self._running += 1
            self.calls_running += unbegun[0].is_call
            self._changes += unbegun[0].is_call
            link.begun += 1
            me.runs = True
            return unbegun.popleft()

    def give_up(self, link: LinkSchedule, me: Owner, arrived: Sequence[Work] = ()) -> bool:
        """The owner lets go of the link, and of what it has read; False if it owned it no more."""
        with self._lock:
            owns = link.owner is me
            if owns:
                self._take_away(link)
            if arrived:
                self._enqueue(arrived)
            return owns

    def _take_away(self, link: LinkSchedule) -> None:
        link.owner = None
        self.owned.discard(link)
        if link.unbegun:
            self._enqueue(link.unbegun)
            link.unbegun.clear()

    def tick(self, now: float, processor_time: float) -> tuple[list[LinkSchedule], bool]:
        """A tick has passed.  Which links their owners lose, and whether to wake a thread for the queues."""
        with self._lock:
            if not self._calls:
                self._extra = 0
            changes, since, used = self._unchanged
            if not self._calls or self._changes != changes:
                self._unchanged = self._changes, now, processor_time
            elif now - since > STUCK:  # rule 5
                self._extra += processor_time - used < _IDLE_SHARE * (now - since)
                self._unchanged = self._changes, now, processor_time
            lost = []
            for link in list(self.owned):
                if link.owner is not None and link.owner.runs and link.begun == link.begun_at_tick:
                    link.slow = True
                    self._take_away(link)
                    lost.append(link)
                link.begun_at_tick = link.begun
            unattended = self._taken == self._taken_at_tick and bool(self._messages)
            self._taken_at_tick = self._taken
            return lost, unattended or self.can_take()

    # --- the queues ---------------------------------------------------------------------------------------------

    def add(self, works: Sequence[Work]) -> bool:
        """Puts works into the queues.  Whether to wake a thread: one that drains the messages takes these too."""
        with self._lock:
            self._enqueue(works)
            return self._draining == 0 or self.can_take()

    def _enqueue(self, works: Iterable[Work]) -> None:
        for work in works:
            (self._calls if work.is_call else self._messages).append(work)

    def can_take(self) -> bool:
        """Whether there is a call that another thread should begin."""
        return bool(self._calls) and self.calls_running < self._limit + self._extra

    def take(self, done: Work | None) -> Work | None:
        """A thread that owns no link has run ``done``: what it runs next from the queues.  None: it is idle."""
        with self._lock:
            if done is not None:
                self._running -= 1
                self.calls_running -= done.is_call
                self._changes += done.is_call
                self._draining -= not done.is_call
            is_call = not self._messages
            if is_call and not self.can_take():
                self.idle += 1
                return None
            self._running += 1
            self.calls_running += is_call
            self._changes += is_call
            self._draining += not is_call
            self._taken += 1
            return (self._calls if is_call else self._messages).popleft()

    @property
    def unfinished(self) -> int:
        """How many works run or wait to be run."""
        with self._lock:
            waiting = len(self._messages) + len(self._calls) + sum(len(link.unbegun) for link in self.owned)
            return self._running + waiting

    @property
    def has_queued(self) -> bool:
        return bool(self._messages or self._calls)

    def take_all(self) -> list[Work]:
        """At the end: what no thread has begun."""
        with self._lock:
            rest = [*self._messages, *self._calls]
            self._messages.clear()
            self._calls.clear()
            return rest

    # --- threads that wait for another worker ---------------------------------------------------------------------

    def begin_waiting(self, is_call: bool, queued: bool) -> tuple[bool, bool]:
        """Of the thread's work: whether it is a call, and whether it came from the queues.

        Whether to start a thread, and whether to wake one.
        """
        with self._lock:
            self.calls_running -= is_call
            self._draining -= queued and not is_call
            return self.stop_idling(0), bool(self._messages) or self.can_take()

    def end_waiting(self, is_call: bool, queued: bool) -> None:
        with self._lock:
            self.calls_running += is_call
            self._draining += queued and not is_call

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self.calls_running} of {self._limit} calls running, {len(self._calls)} calls and "
            f"{len(self._messages)} messages queued, {self.unfinished} unfinished, {self.idle} threads idle>"
        )
