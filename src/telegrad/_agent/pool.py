"""The threads of a worker: whoever reads a request runs it, and another takes over the reading.

All idle threads wait in one place (``waking``).  One of them is woken per readable connection, and no other until it
has read from it, so it can run what it read without a hop to another (10-30 us each).  The rules:

1. Somebody is always waiting: a thread that starts to run something while no other is idle starts a new one first.
2. Calls of users wait while ``limit`` threads run; a thread that waits for another worker does not count.  All other
   work is begun even then, after a millisecond without progress, since what runs may be waiting for it.
3. A burst read from one connection is run by the thread that read it, one after the other, for under the GIL two
   threads are slower than one on short functions: it *drains* the queue, and others that come to an end meanwhile leave
   that to it.  When it makes no progress for a millisecond, others join in.  Where it merely lacks the GIL, or a core,
   they wait longer, 20-30 ms where another has the GIL all the time: every further thread would make that worse (the
   backward of 1,000 sends took 180 ms in place of 75).
4. If all that run are stuck (say, in a wait that we cannot see) while calls are queued, the limit gives way: when none
   was begun for 50 ms, whatever else has happened.
5. Answers given while more work is queued are corked, so that a burst of calls costs a few sends and not one each;
   they go out when the queue is empty, or when nothing has happened for as long as the next one would take to join in.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from telegrad._agent.backlog import PATIENCE, Backlog, UserCall, Watch, Work
from telegrad._agent.waking import Waking

log = logging.getLogger("telegrad.agent")

T = TypeVar("T")

_IDLE_SECONDS = 10.0  # for how long a thread must have been one too many before one ends
_SPARE = 2  # idle threads that always stay


class Outlet(Protocol):
    """Something that can keep what it is to send."""

    def flush(self, deadline: float) -> None:
        """Sends what was corked, as far as that takes until the deadline; see ``link``."""


class Source(Outlet, Protocol):
    """Something with a descriptor that the pool watches."""

    def readable(self) -> Sequence[Work]: ...

    def linger(self) -> Sequence[Work] | None:
        """As ``readable``, for a moment in which more may come; None if nothing did."""


class Pool:
    def __init__(self, name: str, limit: int, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._on_thread_start = on_thread_start
        self._waking: Waking[Source] = Waking(PATIENCE)
        # For who has a connection:
        self.watch = self._waking.watch
        self.arm = self._waking.arm
        self.disarm: Callable[[int, Source], None] = partial(self._waking.arm, events=0)
        self.forget = self._waking.forget
        self._backlog = Backlog(limit)
        self.progress = self._backlog.progress  # a piece of long work is done: nobody need join in (rule 3)
        self._corked: dict[Outlet, None] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._born = 0
        self._idle = 0
        self._fewest_idle = 0  # since the last review
        self._next_review = time.monotonic() + _IDLE_SECONDS
        self._blocked = 0
        self._closed = False
        self._here = threading.local()
        self._lingering = False  # one thread at most looks out for its last caller's next request
        with self._lock:
            self._grow()

    # --- what others ask of it ----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._backlog.add((work,))
        self._ring()

    def submit_all(self, work: Sequence[Work]) -> None:
        self._backlog.add(work)
        self._ring()

    def cork(self, source: Outlet) -> bool:
        """Whether there is more to do right now, so that the source may wait for ``flush`` (rule 5)."""
        if not self._backlog.waits():
            return False
        self._corked[source] = None
        if self._backlog.waits():
            return True  # whoever takes the last of it finds the source
        self._corked.pop(source, None)  # the pool has run dry between the two looks, and may sleep now
        return False

    def flush_when_idle(self, source: Outlet) -> None:
        """For a thread of the pool that reads, and must not send."""
        self._corked[source] = None

    def _uncork(self) -> None:
        while self._corked:
            with contextlib.suppress(KeyError):  # another thread was faster
                source = self._corked.popitem()[0]
                self._try(partial(source.flush, 0.0))

    def runs_here(self) -> bool:
        """Whether the calling thread is one of the pool's."""
        return getattr(self._here, "running", False)

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a wait for another worker: this thread of the pool does not count as running meanwhile (rule 2)."""
        if getattr(self._here, "blocked", False):  # a wait within a wait
            yield
            return
        self._here.blocked = True
        me = threading.get_native_id()
        self._backlog.stop_draining(me)
        with self._lock:
            self._blocked += 1  # first: who looks meanwhile sees one too many, and not that nobody is busy
            self._backlog.running.discard(me)
            if self._idle == 0:
                self._grow()
        if self._backlog.waits():
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                self._backlog.running.add(me)
                self._blocked -= 1
            self._here.blocked = False

    def running(self) -> int:
        """How many threads run something and do not wait for another worker."""
        return len(self._backlog.running)

    @property
    def busy(self) -> int:
        """How many threads run something, blocked ones included."""
        return self._blocked + len(self._backlog.running)  # no other thread gets the GIL in between

    def close(self, timeout: float) -> None:
        """Lets every thread end; those that run user code longer than the timeout are left behind as daemons."""
        with self._lock:  # a thread that is being started counts, and can be joined only when it is
            self._closed = True
            threads = list(self._threads)
        self._waking.ring_for_all()
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if not self._threads:
            self._waking.close()

    def drain(self) -> list[Work]:
        """Takes away what nobody has begun."""
        return self._backlog.take_all()

    def __repr__(self) -> str:
        return (
            f"<Pool {self._name}: {len(self._threads)} threads, {self.running()} running, {self._blocked} blocked, "
            f"{self._idle} idle, {len(self._backlog)} queued>"
        )

    # --- the threads --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Something is queued: wakes a thread, or one that looks after a while whether those that run have come for it.

        To wake it at once would cost them more than it does: it wants the GIL.
        """
        if not self._idle or self._closed:
            return
        if self._backlog.stuck or not self._backlog.running:
            self._waking.ring()
        else:
            self._waking.set_alarm()

    def _grow(self) -> None:
        """Starts a thread; the caller holds the lock.  It counts as idle at once, so that nobody starts a second."""
        if self._closed:
            return
        self._born += 1
        self._idle += 1
        thread = threading.Thread(target=self._main, name=f"telegrad-{self._name}-{self._born}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads: the next who begins something tries again
            self._idle -= 1
            self._threads.discard(thread)
            log.error("worker %r cannot start a thread: %s", self._name, error)

    def _main(self) -> None:
        try:
            self._on_thread_start()
            self._serve()
        except Exception:
            log.exception("a thread of worker %r ended on an internal error", self._name)
            with self._lock:
                self._idle -= 1  # whoever begins something next makes up for it
        finally:
            self._threads.discard(threading.current_thread())

    def _serve(self) -> None:
        """An endless loop of: take what is queued, else wait for something to happen.  Enters and stays 'idle'."""
        me = threading.get_native_id()
        backlog = self._backlog
        watch = Watch()
        joins = True
        while not self._closed:
            queue = backlog.pick(me, watch, joins)
            if queue is not None:
                self._begin(me)
                if backlog.is_for(queue):
                    if joins and backlog.stuck:
                        if backlog.wants_more():
                            self._ring()
                        backlog.joined()
                    joins = False
                    self._run_next(queue)
                self._end(me)
                continue
            if self._corked and not backlog.waits():
                self._flush_corked()
            if not backlog.waits():
                self._waking.clear_alarm()
                if time.monotonic() > self._next_review and not self._corked and self._is_one_too_many():
                    if backlog.waits():
                        self._waking.ring()  # it came just now, and its alarm may have been cleared
                    return
            # A look at the queue, after the last thing that could make another rely on us.
            patience = backlog.patience(watch)
            woken, source = self._waking.wait(_IDLE_SECONDS if patience is None else patience)
            joins = True
            if not woken:
                self._flush_corked()
            elif source is not None:
                joins = not self._read(source, me)

    def _read(self, source: Source, me: int) -> bool:
        """Reads from a source and runs what came; a caller that just got its answer may ask again at once.

        Returns whether the thread has come to the end of something.
        """
        backlog, ran = self._backlog, False
        work = self._try(source.readable)
        while work is not None:
            if work:
                self._begin(me)
                if len(work) == 1 and not backlog.waits() and (type(work[0]) is not UserCall or backlog.has_room()):
                    ran = True
                    self._run(work[0])  # the hot path: no queue, no hop
                else:
                    backlog.add(work)
                    queue = backlog.take_over(me) if len(work) > 1 else None
                    if queue is not None:
                        ran = True
                        self._run_next(queue)
                self._end(me)
            if backlog.waits() or self._corked or self._lingering:
                break
            self._lingering = True
            work = self._try(source.linger)
            self._lingering = False
        return ran

    def _flush_corked(self) -> None:
        """Sends what was corked.  That may take long, so the thread does not count as idle; nor as running, for those
        who look out for an answer would stop at that."""
        if not self._corked:
            return
        if self._backlog.waits():
            self._waking.set_alarm()  # another may have to watch
        with self._lock:
            self._one_idle_less()
        self._uncork()
        with self._lock:
            self._idle += 1

    def _try(self, use: Callable[[], T]) -> T | None:
        try:
            return use()
        except Exception:
            log.exception("worker %r failed to use a connection", self._name)
            return None

    def _is_one_too_many(self) -> bool:
        """Whether this idle thread should end: since the last review there was always another that had nothing to do.

        Not for how long this one had nothing to do: the kernel wakes whichever it likes.
        """
        with self._lock:
            if self._fewest_idle >= _SPARE and self._idle > _SPARE:
                self._idle -= 1
                self._fewest_idle -= 1
                return True
            self._fewest_idle = self._idle
            self._next_review = time.monotonic() + _IDLE_SECONDS
            return False

    def _begin(self, me: int) -> None:
        with self._lock:
            self._backlog.running.add(me)
            self._one_idle_less()
        self._here.running = True

    def _one_idle_less(self) -> None:
        """The caller holds the lock."""
        self._idle -= 1
        if self._idle < self._fewest_idle:
            self._fewest_idle = self._idle
        if self._idle == 0:
            self._grow()  # rule 1

    def _end(self, me: int) -> None:
        self._here.running = False
        with self._lock:
            self._backlog.running.discard(me)
            self._idle += 1

    def _run_next(self, queue: deque[Work]) -> None:
        if self._corked and len(self._backlog) == 1:
            self._waking.put_off_alarm()
            self._uncork()  # before the last is taken: another thread may take it if this one is kept
        try:
            work = queue.popleft()
        except IndexError:
            return  # another thread was faster
        if self._backlog.waits():
            self._waking.put_off_alarm()  # this one may take long; and to have taken it is progress
        self._run(work)

    def _run(self, work: Work) -> None:
        self._backlog.begin(work)
        function, first, second = work
        try:
            function(first, second)
        except BaseException:  # a user's SystemExit too: this thread has more to do
            log.exception("worker %r failed in an internal task", self._name)

    # --- threads that have something of their own to do -----------------------------------------------------------

    def run_here(self, work: Sequence[Work], let_go: Callable[[], None]) -> None:
        """Runs it on the calling thread, which has nothing better to do; but users' functions as ever.

        ``let_go`` lets others read what this thread alone reads, in case that it must wait for something.
        """
        mine = deque(each for each in work if type(each) is not UserCall)
        if len(mine) < len(work):
            self.submit_all([each for each in work if type(each) is UserCall])
        outer = getattr(self._here, "held", None)
        self._here.held = (mine, let_go)
        try:
            while mine:
                self.progress()
                function, first, second = mine.popleft()
                function(first, second)  # what it raises is meant for this thread: a Ctrl-C
        finally:
            self._here.held = outer
            if mine:
                self.submit_all(mine)

    def before_waiting(self, act: Callable[[], None] | None) -> Callable[[], None] | None:
        """What the calling thread should do before it waits for another worker; returns what it was before."""
        outer: Callable[[], None] | None = getattr(self._here, "before_waiting", None)
        self._here.before_waiting = act
        return outer

    def hand_over(self) -> None:
        """Before the calling thread waits: what it has yet to run, or to read, may be what it waits for."""
        act = getattr(self._here, "before_waiting", None)
        if act is not None:
            act()
        held = getattr(self._here, "held", None)
        if held is not None:
            mine, let_go = held
            if mine:
                self.submit_all(list(mine))
                mine.clear()
            let_go()
