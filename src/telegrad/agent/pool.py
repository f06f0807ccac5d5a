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
from typing import Any, Protocol, TypeVar

from telegrad.agent.look import Look, should_join
from telegrad.agent.waking import Waking

log = logging.getLogger("telegrad.agent")

T = TypeVar("T")
Work = tuple[Callable[[Any, Any], object], Any, Any]


class UserCall(tuple[Callable[[Any, Any], object], Any, Any]):
    """Work that runs a user's function, and so is subject to the limit."""

    __slots__ = ()


_PATIENCE = 0.001  # how long a burst may make no progress before others join in
_SLOW = 0.005  # the same, where it is not stuck but slow
_STUCK = 0.05  # how long nothing may be begun before the limit of a full pool gives way, or others join in anyway
_IDLE_SECONDS = 10.0  # for how long a thread must have been one too many before one ends
_SPARE = 2  # idle threads that always stay


class Outlet(Protocol):
    """Something that can keep what it is to send."""

    def flush(self) -> None:
        """Sends what was corked."""


class Source(Outlet, Protocol):
    """Something with a descriptor that the pool watches."""

    def readable(self) -> Sequence[Work]: ...

    def linger(self) -> Sequence[Work] | None:
        """As ``readable``, for a moment in which more may come; None if nothing did."""


class Pool:
    def __init__(self, name: str, limit: int, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._limit = limit
        self._on_thread_start = on_thread_start
        self._waking: Waking[Source] = Waking(_PATIENCE)
        # For who has a connection:
        self.watch = self._waking.watch
        self.arm = self._waking.arm
        self.disarm = self._waking.disarm
        self.forget = self._waking.forget
        self._queue: deque[Work] = deque()  # calls of users
        self._urgent: deque[Work] = deque()  # everything else
        self._corked: dict[Outlet, None] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._born = 0
        self._idle = 0
        self._fewest_idle = 0  # since the last review
        self._next_review = time.monotonic() + _IDLE_SECONDS
        self._busy = 0
        self._running: set[int] = set()  # the threads that run something, as the system numbers them
        self._drainer: int | None = None  # the one that takes what is queued, one after the other (rule 3)
        self._blocked = 0
        self._taken = 0  # how much work was ever begun, or pieces of it: unchanged means no progress
        self._begun = 0  # without the pieces
        self._calls_taken = 0  # and of that, how many calls of users
        self._looking = threading.Lock()  # held by the thread that looks how those that run get on
        self._stuck = False
        self._joined_at = 0  # how much was begun when a thread last joined those that are stuck, its own included
        self._extra = 0  # by how much the limit has given way
        self._closed = False
        self._here = threading.local()
        self._lingering = False  # one thread at most looks out for its last caller's next request
        with self._lock:
            self._grow()

    # --- what others ask of it ----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._enqueue((work,))
        self._ring()

    def submit_all(self, work: Sequence[Work]) -> None:
        self._enqueue(work)
        self._ring()

    def _enqueue(self, work: Sequence[Work]) -> None:
        for each in work:
            (self._queue if type(each) is UserCall else self._urgent).append(each)

    def _waits(self) -> bool:
        return bool(self._queue or self._urgent)

    def cork(self, source: Outlet) -> bool:
        """Whether there is more to do right now, so that the source may wait for ``flush`` (rule 5)."""
        if not self._waits():
            return False
        self._corked[source] = None
        if self._waits():
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
                self._try(source.flush)

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
        self._stop_draining(threading.get_ident())
        self._running.discard(threading.get_native_id())
        with self._lock:
            self._busy -= 1
            self._blocked += 1
            if self._idle == 0:
                self._grow()
        if self._waits():
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                self._busy += 1
                self._blocked -= 1
            self._running.add(threading.get_native_id())
            self._here.blocked = False

    def running(self) -> int:
        """How many threads run something and do not wait for another worker."""
        return self._busy

    @property
    def busy(self) -> int:
        """How many threads run something, blocked ones included."""
        return self._busy + self._blocked

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
        work: list[Work] = []
        for queue in (self._urgent, self._queue):
            with contextlib.suppress(IndexError):
                while True:
                    work.append(queue.popleft())
        return work

    def __repr__(self) -> str:
        return (
            f"<Pool {self._name}: {len(self._threads)} threads, {self._busy} running, {self._blocked} blocked, "
            f"{self._idle} idle, {len(self._queue) + len(self._urgent)} queued>"
        )

    # --- the threads --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Something is queued: wakes a thread, or one that looks after a while whether those that run have come for it.

        To wake it at once would cost them more than it does: it wants the GIL.
        """
        if not self._idle or self._closed:
            return
        if self._stuck or not self._busy:
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
        looks = Look(_SLOW / 2), Look(_STUCK / 2), Look(_STUCK)
        joins = True
        while not self._closed:
            queue = self._pick(*looks, joins)
            if queue is not None:
                self._begin()
                if queue is self._queue and not self._has_room():
                    self._end()  # another was faster
                    continue
                if joins and self._stuck:
                    self._join()
                joins = False
                self._run_next(queue)
                self._end()
                continue
            if self._corked and not self._waits():
                self._flush_corked()
            if not self._waits():
                self._waking.clear_alarm()
                if time.monotonic() > self._next_review and not self._corked and self._is_one_too_many():
                    if self._waits():
                        self._waking.ring()  # it came just now, and its alarm may have been cleared
                    return
            # A look at the queue, after the last thing that could make another rely on us.
            patience = self._patience(looks[0])
            woken, source = self._waking.wait(patience)
            joins = True
            if not woken:
                self._flush_corked()
            elif source is not None:
                self._read(source)

    def _read(self, source: Source) -> None:
        """Reads from a source and runs what came; a caller that just got its answer may ask again at once."""
        work = self._try(source.readable)
        while work is not None:
            if work:
                self._begin()
                if len(work) == 1 and not self._waits() and (type(work[0]) is not UserCall or self._has_room()):
                    self._run(work[0])  # the hot path: no queue, no hop
                else:
                    self._enqueue(work)
                    if len(work) > 1 and (self._urgent or self._has_room()):
                        self._drainer = threading.get_ident()  # another may be at its last for long
                        self._run_next(self._urgent or self._queue)
                self._end()
            if self._waits() or self._corked or self._lingering:
                return
            self._lingering = True
            work = self._try(source.linger)
            self._lingering = False

    def _flush_corked(self) -> None:
        """Sends what was corked.  That may take long, so the thread does not count as idle; nor as running, for those
        who look out for an answer would stop at that."""
        if not self._corked:
            return
        if self._waits():
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

    def _has_room(self) -> bool:
        """Whether the limit lets this thread, which counts already, run a user's function."""
        return self._busy <= self._limit + self._extra

    def _pick(self, progress: Look, begun: Look, calls: Look, joins: bool) -> deque[Work] | None:
        """Rules 2 to 4: the queue that this thread should take from, which has had these looks at what was done.

        ``joins``: it was woken, and did not just come to the end of something.
        """
        me = threading.get_ident()
        if not self._urgent and not self._queue:
            for look in (progress, begun, calls):
                look.begin()  # when nothing is queued, nothing is stuck
            self._stop_draining(me)
            return None
        full = self._is_full()
        drains = self._drainer == me or (self._drainer is None and not joins)
        if self._busy and (full or not drains):
            self._stop_draining(me)
            if full and not self._urgent:
                stalled = calls.unchanged(self._calls_taken) >= _STUCK
            else:
                waited = progress.unchanged(self._taken)
                stalled = waited >= _SLOW or begun.unchanged(self._begun) >= _STUCK
                stalled = stalled or (waited >= _PATIENCE and self._should_join())
            if not stalled and (full or not self._stuck):
                return None  # those that run will come for it
            self._stuck = self._stuck or stalled
        self._drainer = me
        if self._urgent:
            return self._urgent
        if full:
            self._extra += 1
        return self._queue

    def _should_join(self) -> bool:
        """Of several threads that would look at the same moment one does."""
        if not self._looking.acquire(blocking=False):
            return False
        try:
            return should_join(list(self._running))
        finally:
            self._looking.release()

    def _stop_draining(self, me: int) -> None:
        if self._drainer == me:
            self._drainer = None

    def _is_full(self) -> bool:
        return self._busy >= self._limit + self._extra

    def _patience(self, progress: Look) -> float:
        if not self._waits():
            self._stuck, self._extra = False, 0
            return _IDLE_SECONDS
        if self._is_full() and not self._urgent:
            return _STUCK
        return _PATIENCE if progress.unchanged(self._taken) < _PATIENCE else _SLOW / 2

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

    def _begin(self) -> None:
        with self._lock:
            self._busy += 1
            self._one_idle_less()
        self._here.running = True
        self._running.add(threading.get_native_id())

    def _one_idle_less(self) -> None:
        """The caller holds the lock."""
        self._idle -= 1
        if self._idle < self._fewest_idle:
            self._fewest_idle = self._idle
        if self._idle == 0:
            self._grow()  # rule 1

    def _end(self) -> None:
        self._here.running = False
        self._running.discard(threading.get_native_id())
        with self._lock:
            self._busy -= 1
            self._idle += 1

    def _run_next(self, queue: deque[Work]) -> None:
        if self._corked and len(self._queue) + len(self._urgent) == 1:
            self._waking.put_off_alarm()
            self._uncork()  # before the last is taken: another thread may take it if this one is kept
        try:
            work = queue.popleft()
        except IndexError:
            return  # another thread was faster
        if self._waits():
            self._waking.put_off_alarm()  # this one may take long; and to have taken it is progress
        self._run(work)

    def _join(self) -> None:
        """Before a thread takes from what others are stuck in: if only such as it have begun anything, more come."""
        if self._taken == self._joined_at and len(self._queue) + len(self._urgent) > 1:
            self._ring()
        self._joined_at = self._taken + 1

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
                self._taken += 1
                function, first, second = mine.popleft()
                function(first, second)  # what it raises is meant for this thread: a Ctrl-C
        finally:
            self._here.held = outer
            if mine:
                self.submit_all(mine)

    def progress(self) -> None:
        """Work that consists of many short pieces has done one of them: nobody need join in (rule 3)."""
        self._taken += 1

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

    def _run(self, work: Work) -> None:
        self._taken += 1
        self._begun += 1
        self._calls_taken += type(work) is UserCall
        function, first, second = work
        try:
            function(first, second)
        except BaseException:  # a user's SystemExit too: this thread has more to do
            log.exception("worker %r failed in an internal task", self._name)
