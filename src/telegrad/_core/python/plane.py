"""The threads of one worker's data plane: they read the links, run what arrives, and send the answers.

What decides which thread does what is ``scheduler``; here is what they do:

* Idle threads wait in one epoll.  A thread that is woken for an accepted link owns it: it reads, runs what it has
  read, looks for more during ``SPIN``, and only then lets the epoll watch the link again.
* A thread that waits for the answer to its own call reads the link itself if no other thread does.  So the epoll
  watches a dialled link for answers only while calls are pending that no thread waits for; and an idle one, from the
  next tick of ``Events`` on until a thread reads it, for what may come unasked: a late answer, a segment that is given
  back.
* One more thread, the timer, ticks while links are owned or works are queued (``TICK``), and calls ``Events.tick``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from telegrad._core.interface import Act, Events, Handlers, How
from telegrad._core.python.link import PythonLink
from telegrad._core.python.pending import PendingCall
from telegrad._core.python.poller import BYTES, END, Poller
from telegrad._core.python.scheduler import LinkSchedule, Owner, Scheduler, Work
from telegrad._core.python.timer import TICK, Timer
from telegrad._transport.base import Stream
from telegrad._wire.frames import Frame
from telegrad._wire.messages import FROM_DIALLED, FROM_DIALLER, Message
from telegrad.errors import UsageError

log = logging.getLogger("telegrad.agent")

SPIN = 100e-6  # Seconds for which a thread looks for the next bytes before it sleeps.
_SURPLUS_SECONDS = 10.0  # Idle time after which a surplus thread exits.

_CORES = len(os.sched_getaffinity(0))
_LONGEST_POLL = 1.0  # Seconds after which a thread notices a close that came just before its poll.


class _Here(threading.local):
    """What the calling thread does."""

    serves = False  # it is one of the data plane's
    work: Work | None = None  # what it runs, unless it waits for another worker
    link: PythonLink | None = None  # the link that it owns
    me: Owner | None = None  # as which it owns the link
    before_waiting: Callable[[], None] | None = None


class PythonPlane:
    def __init__(
        self,
        name: str,
        limit: int,
        handlers: Handlers,
        events: Events,
        allocate: Callable[[int], Any],
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._handlers = handlers
        self._events = events
        self._allocate = allocate
        self._on_thread_start = on_thread_start
        self._scheduler = Scheduler(limit)
        self._here = _Here()
        self._lock = threading.RLock()  # of the threads; a signal handler may start one
        self._threads: set[threading.Thread] = set()
        self._born = itertools.count(1)
        self._closed = False
        self._joined = False  # the close has waited for the threads; some may run on
        self._poller = Poller()
        self._watch = self._poller.watch
        self.link_closes = self._poller.remove
        self._timer = Timer(f"telegrad-{name}-timer", self._is_busy, self._tick, self._call_tick)
        self.wake_before = self._timer.wake_before
        self.start = self._timer.thread.start
        self._start_thread()

    # --- links --------------------------------------------------------------------------------------------------

    def adopt(self, stream: Stream, peer_id: int, dialled: bool, pid: int | None = None) -> PythonLink:
        return PythonLink(stream, peer_id, dialled, pid, self._allocate, self)

    def start_reading(self, link: PythonLink) -> None:
        self._poller.add(link)
        if link.pending:
            self._watch(link, BYTES)

    def loopback(self, peer_id: int) -> tuple[PythonLink, PythonLink]:
        """The two ends of a link of this worker to itself: the caller's and the callee's."""
        from telegrad._transport.sockets import SocketStream

        here, there = (SocketStream(sock) for sock in socket.socketpair())
        return self.adopt(here, peer_id, True), self.adopt(there, peer_id, False)

    def link_broken(self, link: PythonLink, reason: str) -> None:
        self._events.link_broken(link, reason)

    def finish_sending(self, link: PythonLink) -> None:
        self.submit(self._flush_blocking, link)

    def _flush_blocking(self, link: PythonLink, _: Any) -> None:
        with self.blocking():
            link.flush(math.inf)

    # --- calls --------------------------------------------------------------------------------------------------

    def start_call(
        self,
        link: PythonLink,
        call_id: int,
        what: str,
        started: float,
        deadline: float,
        message: Message,
        buffers: Sequence[memoryview] = (),
        then: Callable[[Any, Any], None] | None = None,
        keeps: Any = None,
    ) -> PendingCall:
        pending = PendingCall(link, call_id, what, started, deadline, then)
        try:
            link.pending[call_id] = pending
            if keeps:
                link.kept[call_id] = keeps
            link.send(message, buffers, deadline)
            if then is not None:
                self.wake_before(deadline)
                if not link.reader:  # a thread that reads looks at what is pending when it is done
                    self._watch(link, BYTES)
        except BaseException:  # a Ctrl-C before it was sent: no answer will come
            link.pending.pop(call_id, None)
            link.kept.pop(call_id, None)
            raise
        return pending

    def wait(self, pending: PendingCall) -> bool:
        if pending.outcome is None:
            here = self._here
            if here.work is None and here.before_waiting is None:
                self._wait(pending, pending.link)
            else:
                with self.blocking():
                    self._wait(pending, pending.link)
        return pending.outcome is not None

    def _wait(self, pending: PendingCall, link: PythonLink) -> None:
        """Reads the link until the outcome is there, or waits for the thread that reads."""
        me = threading.get_ident()
        nested = link.reader == me
        if (nested and link.in_frame) or link.sender == me:
            raise UsageError(
                f"a signal handler or __del__ waits for worker {link.peer_id}, but has interrupted its own thread in "
                "the middle of a message to or from there: let another thread make the call"
            )
        left = pending.deadline - time.monotonic()
        acquired = False
        try:
            acquired = link.reading.acquire(blocking=False)
            if not acquired:
                _wait_until_settled(pending)
                return
            link.reader = me
            self._watch(link, END)
            poll = link.make_poll() if nested else link.poll
            while pending.outcome is None and not link.closed and left > 0:
                if self._look(link, poll) or poll.poll(min(left, _LONGEST_POLL) * 1000 + 1):
                    works: list[Work] = []
                    try:
                        self._receive(link, works)
                        if works:
                            self._queue(works)
                    except BaseException:
                        self._interrupted(link, works)
                        raise
                left = pending.deadline - time.monotonic()
        finally:
            if link.reader == me and not nested:
                link.reader = 0
            if acquired or not nested:
                try:  # no call before this one, in which a Ctrl-C could come
                    link.reading.release()
                except RuntimeError:  # another thread has it
                    pass
            if not nested and not link.reader:
                if not link.pending:
                    self._watch(link, END)
                if link.pending:  # looked at again: a call that began meanwhile may have watched the link before us
                    self._watch(link, BYTES)
        if pending.outcome is None and link.closed:  # the thread that closed it fails its calls in a moment
            _wait_until_settled(pending)

    def settle(self, pending: PendingCall, outcome: Exception) -> bool:
        works: list[Work] = []
        settled = self._settle(pending, outcome, works)
        if works:
            self._queue(works)
        return settled

    def _settle(self, pending: PendingCall, outcome: Frame | Exception, works: list[Work]) -> bool:
        """False if another thread settles it."""
        try:
            if pending.link.pending.pop(pending.call_id, None) is None:
                return False
            pending.outcome = outcome
            pending.settled.release()
            if pending.then is not None and not pending.waited_for:
                works.append(Work(False, pending.then, pending.link, pending))
        except BaseException:  # a Ctrl-C: the call is pending as before, or it is settled as a whole
            if pending.outcome is None:
                pending.link.pending[pending.call_id] = pending
            elif pending.then is not None and not any(work.second is pending for work in works):
                works.append(Work(False, pending.then, pending.link, pending))
            raise
        return True

    # --- what arrives -------------------------------------------------------------------------------------------

    def _interrupted(self, link: PythonLink, works: Sequence[Work]) -> None:
        """A Ctrl-C came while the calling thread held frames: some are lost, so the link is of no use.

        The callbacks of calls that were settled are not lost.  They may be in the queue already.
        """
        link.fail("the reading thread was interrupted")
        settled = [work.second for work in works if isinstance(work.second, PendingCall)]
        if settled:
            self._queue([Work(False, _call_back_once, link, pending) for pending in settled])

    def _receive(self, link: PythonLink, works: list[Work]) -> None:
        """Reads once.  Settles answers and handles quick messages; adds to ``works`` what may block."""
        allowed = FROM_DIALLED if link.dialled else FROM_DIALLER
        for frame in link.receive():
            kind = type(frame.message)
            if kind not in allowed:
                dialler = "this worker" if link.dialled else "the peer"
                link.fail(f"it sent a {kind.__name__} on a connection that {dialler} made")
                break
            how, handler = self._handlers[kind]
            if how is How.ANSWER:
                call_id: int = frame.message.call_id  # type: ignore[union-attr]
                if link.kept:
                    link.kept.pop(call_id, None)
                pending = link.pending.get(call_id)
                if pending is None or not self._settle(pending, frame, works):
                    works.append(Work(False, handler, link, frame))
            elif how is How.QUICK:
                try:
                    handler(link, frame)
                except BaseException as error:
                    self._failed(error)
            else:
                works.append(Work(how is How.CALL, handler, link, frame))

    def _look(self, link: PythonLink, poll: select.poll) -> bool:
        """Looks for bytes for a moment, while no call of this worker could use the processor."""
        if poll.poll(0):
            return True
        if _CORES < 2:
            return False
        end = time.perf_counter() + SPIN
        while not self._scheduler.calls_running and time.perf_counter() < end:
            os.sched_yield()
            if poll.poll(0):
                return True
        return False

    # --- threads ------------------------------------------------------------------------------------------------

    def submit(self, act: Act, first: Any = None, second: Any = None, call: bool = False) -> None:
        self._queue([Work(call, act, first, second)])

    def _queue(self, works: Sequence[Work]) -> None:
        if self._scheduler.add(works):
            self._poller.wake()
        if self._timer.sleeps:
            self._timer.ring()
        if self._closed:
            self._run_rest()

    def serves_here(self) -> bool:
        return self._here.serves

    def before_waiting(self, act: Callable[[], None] | None) -> Callable[[], None] | None:
        before, self._here.before_waiting = self._here.before_waiting, act
        return before

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        here = self._here
        if here.before_waiting is not None:
            here.before_waiting()
        work = here.work
        if work is None:  # not a thread that runs something for another worker, or it waits already
            yield
            return
        here.work = None
        link, me = here.link, here.me
        queued = link is None
        self._give_up_link()
        grow, wake = self._scheduler.begin_waiting(work.is_call, queued)
        if grow:
            self._start_thread()
        if wake:
            self._poller.wake()
        try:
            yield
        finally:
            self._scheduler.end_waiting(work.is_call, queued)
            here.work, here.link, here.me = work, link, me

    def _give_up_link(self, works: Sequence[Work] = ()) -> None:
        here = self._here
        link, here.link, me = here.link, None, here.me
        if link is not None and me is not None and self._scheduler.give_up(link, me, works):
            self._watch(link, BYTES)

    def _start_thread(self) -> None:
        with self._lock:
            if self._closed:
                return
            thread = threading.Thread(target=self._serve, name=f"telegrad-{self._name}-{next(self._born)}", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                self._threads.discard(thread)
                self._scheduler.not_started()
                log.error("worker %r cannot start a thread: %s", self._name, error)

    def _serve(self) -> None:
        """The main function of a thread, which begins as an idle one."""
        try:
            self._here.serves = True
            self._on_thread_start()
            while not self._closed:
                if not self._serve_next():
                    return
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._joined:
                    self._close_descriptors()

    def _serve_next(self) -> bool:
        """Waits for something to do and does it.  False: this thread is surplus."""
        fd = self._poller.wait(_SURPLUS_SECONDS)
        if fd is None:
            return not self._scheduler.is_surplus()
        link = self._poller.links.get(fd)  # None: this thread was woken, or the link is closed by now
        if link is not None:
            link.watched = 0
        me = Owner()
        if link is not None and not link.dialled and not self._scheduler.own(link, me):
            return True  # its owner watches it again when it is done
        if self._scheduler.stop_idling():
            self._start_thread()
        if link is not None:
            if link.dialled:
                self._read_answers(link)
            else:
                self._serve_link(link, me)
        self._serve_queues()
        return True

    def _read_answers(self, link: PythonLink) -> None:
        """No thread waits for the answers that arrived."""
        if not link.reading.acquire(blocking=False):
            return  # the thread that reads watches it again
        works: list[Work] = []
        try:
            link.reader = threading.get_ident()
            self._receive(link, works)
        finally:
            link.reader = 0
            link.reading.release()
            self._watch(link, BYTES)  # also if no call is pending: this may be the beginning of a large late answer
        if works:
            self._scheduler.add(works)  # this thread comes to the queues next
            if self._timer.sleeps:
                self._timer.ring()

    def _serve_link(self, link: PythonLink, me: Owner) -> None:
        """Reads and runs what arrives, until nothing does for a moment or the link is lost."""
        scheduler, here = self._scheduler, self._here
        here.link, here.me = link, me
        works: list[Work] = []
        while True:
            if self._timer.sleeps:
                self._timer.ring()
            self._receive(link, works)
            if link.slow or scheduler.can_take():
                break
            work, works = scheduler.next_of_link(link, me, None, works), []
            while work is not None:
                self._run(work)
                work = scheduler.next_of_link(link, me, work)
            if link.owner is not me:
                here.link = None
                return
            if link.closed or not self._look(link, link.poll):
                break
        self._give_up_link(works)

    def _serve_queues(self) -> None:
        """Runs what is queued; after that the thread is idle."""
        scheduler = self._scheduler
        work = scheduler.take(None)
        while work is not None:
            if scheduler.can_take():
                self._poller.wake()
            begun = time.monotonic()
            self._run(work)
            if work.is_call and isinstance(work.first, LinkSchedule) and time.monotonic() - begun < TICK:
                work.first.slow = False
            work = scheduler.take(work)

    def _run(self, work: Work) -> None:
        self._here.work = work
        try:
            work.act(work.first, work.second)
        except BaseException as error:
            self._failed(error)
        self._here.work = None

    def _failed(self, error: BaseException) -> None:
        """A handler raised.  On a thread of the data plane, which has more to do, even a SystemExit is only logged."""
        if not self._here.serves and not isinstance(error, Exception):
            raise error  # a Ctrl-C on a thread of the user's
        log.error("worker %r failed in an internal task", self._name, exc_info=error)

    # --- time ---------------------------------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return bool(self._scheduler.owned) or self._scheduler.has_queued

    def _tick(self) -> None:
        """Called by the timer, so it must not block."""
        lost, wake = self._scheduler.tick(time.monotonic(), time.process_time())
        for link in lost:
            assert isinstance(link, PythonLink)
            self._watch(link, BYTES)
        if wake:
            self._poller.wake()

    def _call_tick(self) -> float:
        for link in list(self._poller.links.values()):
            if link.dialled and not link.reader:
                self._watch(link, BYTES)
        if self._scheduler.stop_idling(0):
            self._start_thread()
        try:
            return self._events.tick(time.monotonic())
        except Exception:
            log.exception("worker %r failed in a tick", self._name)
            return time.monotonic() + 1.0

    # --- the end, and seeing it ---------------------------------------------------------------------------------

    @property
    def pending(self) -> list[PendingCall]:
        return [pending for link in list(self._poller.links.values()) for pending in list(link.pending.values())]

    @property
    def unfinished(self) -> int:
        return self._scheduler.unfinished

    @property
    def calls_running(self) -> int:
        return self._scheduler.calls_running

    def close(self, timeout: float) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = [*self._threads, self._timer.thread]
        self._timer.stop()
        self._poller.wake_all()
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))
        self._run_rest()
        with self._lock:
            self._joined = True
            self._close_descriptors()

    def _run_rest(self) -> None:
        """After the end of the threads: completes the calls whose futures a thread may wait for."""
        for work in self._scheduler.take_all():
            if isinstance(work.second, PendingCall):
                self._run(work)

    def _close_descriptors(self) -> None:
        """The last thread does it."""
        if not self._threads:
            self._poller.close()
            self._timer.close()

    def __repr__(self) -> str:
        return f"<PythonPlane {self._name}: {len(self._threads)} threads, {self._scheduler!r}>"


def _wait_until_settled(pending: PendingCall) -> None:
    """Or until its deadline."""
    left = pending.deadline - time.monotonic()
    if pending.settled.acquire(timeout=min(max(left, 0.0), threading.TIMEOUT_MAX)):
        pending.settled.release()


def _call_back_once(link: PythonLink, pending: PendingCall) -> None:
    if not pending.used:
        assert pending.then is not None
        pending.then(link, pending)
