"""The pool: its five rules, and its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import telegrad._agent.backlog
import telegrad._agent.pool
from support import AT_ONCE, PATIENCE, eventually, no_new_threads
from telegrad._agent.backlog import Backlog, UserCall, Watch, Work
from telegrad._agent.pool import Pool


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_new_threads():
        yield


@pytest.fixture
def make() -> Iterator[Callable[[int], Pool]]:
    pools: list[Pool] = []

    def make(limit: int) -> Pool:
        pools.append(Pool("pool", limit))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(PATIENCE)


def call(action: Callable[[], Any]) -> UserCall:
    """A user's call, as work."""
    return UserCall((lambda _, __: action(), None, None))


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Of pools that are made from now on."""
    monkeypatch.setattr(telegrad._agent.backlog, "PATIENCE", seconds)
    monkeypatch.setattr(telegrad._agent.pool, "PATIENCE", seconds)


class Bell:
    """A source that gives one batch of work per byte."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.batches: list[Sequence[Work]] = []
        self.flushed = threading.Event()
        self._here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self.fd = self._there.fileno()
        pool.watch(self.fd, self)

    def ring(self, *batch: Work) -> None:
        self.batches.append(batch)
        self._here.send(b"!")

    def readable(self) -> Sequence[Work]:
        try:
            self._there.recv(1)
            return self.batches.pop(0)
        except BlockingIOError:
            return ()
        finally:
            self.pool.arm(self.fd, self)

    def linger(self) -> None:
        """It never stays for more."""

    def flush(self, deadline: float = 0.0) -> None:
        self.flushed.set()

    def close(self) -> None:
        self.pool.forget(self.fd, self)
        self._here.close()
        self._there.close()


class Crowd:
    """Work that stays inside until it is let go, for longer than any test waits, and counts how many are in."""

    def __init__(self, around: Callable[[Callable[[], Any]], Any] = lambda wait: wait()) -> None:
        self.inside = self.most = 0
        self.go = threading.Event()
        self._around = around
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._around(lambda: self.go.wait(2 * PATIENCE))
        with self._lock:
            self.inside -= 1


def test_it_runs_what_is_submitted(make: Callable[[int], Pool]) -> None:
    pool, seen = make(4), []
    pool.submit((lambda one, two: seen.append((one, two)), 1, 2))
    pool.submit_all([call(lambda number=number: seen.append(number)) for number in range(100)])
    assert eventually(lambda: len(seen) == 101)
    assert {number for number in seen if isinstance(number, int)} == set(range(100))
    assert (1, 2) in seen
    assert eventually(lambda: pool.busy == 0)


def test_it_runs_what_a_source_reads(make: Callable[[int], Pool]) -> None:
    pool, seen = make(4), []
    bell = Bell(pool)
    for number in range(20):
        bell.ring(call(lambda number=number: seen.append(number)))
    assert eventually(lambda: sorted(seen) == list(range(20)))
    bell.close()


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_rule_1_somebody_always_waits(make: Callable[[int], Pool], limit: int) -> None:
    """Even when all threads are busy, what comes in is read, and what is not a user's call is run."""
    pool, crowd, handled = make(limit), Crowd(), threading.Event()
    bell = Bell(pool)
    for _ in range(limit):
        bell.ring(call(crowd))
    assert eventually(lambda: crowd.inside == limit)
    bell.ring((lambda _, __: handled.set(), None, None))
    assert handled.wait(PATIENCE)
    crowd.go.set()
    bell.close()


def test_rule_2_at_most_the_limit_runs_at_once(make: Callable[[int], Pool]) -> None:
    pool, lock = make(3), threading.Lock()
    running, most, done = 0, 0, 0

    def work() -> None:
        nonlocal running, most, done
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)  # a function that makes progress, so the limit has no reason to give way
        with lock:
            running -= 1
            done += 1

    pool.submit_all([call(work) for _ in range(60)])
    assert eventually(lambda: done == 60)
    assert most <= 3


@pytest.fixture
def _without_rule_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit never gives way by itself."""
    monkeypatch.setattr(telegrad._agent.backlog, "_STUCK", 10 * PATIENCE)


@pytest.mark.usefixtures("_without_rule_4")
def test_rule_2_a_thread_that_waits_for_another_worker_does_not_count(make: Callable[[int], Pool]) -> None:
    pool = make(1)

    def visibly(wait: Callable[[], Any]) -> None:
        assert pool.runs_here()
        with pool.blocked():
            wait()

    crowd = Crowd(visibly)
    for _ in range(30):
        pool.submit(call(crowd))
    assert eventually(lambda: crowd.inside == 30)
    assert pool.busy == 30
    crowd.go.set()
    assert eventually(lambda: pool.busy == 0)


@pytest.mark.usefixtures("_without_rule_4")
def test_rule_3_a_burst_is_not_held_up_by_its_first_item(make: Callable[[int], Pool]) -> None:
    pool, crowd, seen = make(4), Crowd(), []
    bell = Bell(pool)
    bell.ring(call(crowd), *(call(lambda number=number: seen.append(number)) for number in range(10)))
    assert eventually(lambda: len(seen) == 10)
    assert crowd.inside == 1
    crowd.go.set()
    bell.close()


def test_rule_3_a_burst_of_short_functions_stays_on_few_threads(make: Callable[[int], Pool]) -> None:
    pool, threads, done = make(8), set(), []
    bell = Bell(pool)

    def work() -> None:
        threads.add(threading.get_ident())
        done.append(None)

    bell.ring(*(call(work) for _ in range(200)))
    assert eventually(lambda: len(done) == 200)
    assert len(threads) <= 4
    bell.close()


class Patience:
    """Stands before a pool's epoll: whoever waits there for others to make progress waits for them to have had the
    chance, and not for a millisecond, which is to be patched away."""

    def __init__(self, pool: Pool, meanwhile: Callable[[], None]) -> None:
        self._epoll: Any = pool._waking._epoll
        self._alarm = pool._waking._alarm.fd
        self._meanwhile = meanwhile
        pool._waking._epoll = self  # type: ignore[assignment]

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        nothing_queued = timeout > 1
        events: list[tuple[int, int]] = self._epoll.poll(timeout if nothing_queued else 0, most)
        if not nothing_queued or any(fd == self._alarm for fd, _ in events):
            self._meanwhile()
        return events

    def close(self) -> None:
        self._epoll.close()


class Piecework:
    """Work of so many short pieces, one of them each time that another thread gets impatient."""

    def __init__(self, pool: Pool, pieces: int, tell: Callable[[], None]) -> None:
        self.entered, self.ended, self.joined = threading.Event(), threading.Event(), threading.Event()
        self.joined_early = False
        self.done = 0
        self._pieces, self._tell = pieces, tell
        self._asked, self._told = threading.Semaphore(0), threading.Semaphore(0)
        Patience(pool, self._wait_for_a_piece)

    def _wait_for_a_piece(self) -> None:
        """Called by threads that look whether there is progress."""
        if not self.ended.is_set():
            self._asked.release()
            assert self._told.acquire(timeout=PATIENCE), "the work did nothing"

    def __call__(self) -> None:
        self.entered.set()
        while self.done < self._pieces:
            assert self._asked.acquire(timeout=PATIENCE), "nobody waits for it"
            if self.joined.is_set():
                break
            self._tell()
            self.done += 1
            if self.done == self._pieces:
                self.ended.set()
            self._told.release()
        self.ended.set()
        self._told.release(100)  # for whoever has asked meanwhile

    def join(self) -> None:
        """The work that is queued behind it."""
        self.joined_early = not self.ended.is_set()
        self.joined.set()
        self._asked.release()


as_call_or_not = pytest.mark.parametrize("is_call", [True, False], ids=["a user's call", "other work"])


def queue_behind(pool: Pool, long: Piecework, is_call: bool) -> None:
    pool.submit(call(long))
    assert long.entered.wait(PATIENCE)
    pool.submit(call(long.join) if is_call else (lambda _, __: long.join(), None, None))
    assert long.joined.wait(PATIENCE)
    assert eventually(lambda: pool.busy == 0)


@as_call_or_not
def test_rule_3_nobody_joins_work_that_tells_of_its_progress(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, is_call: bool
) -> None:
    set_patience(monkeypatch, 1e-9)
    pool = make(4)
    long = Piecework(pool, 20, pool.progress)
    queue_behind(pool, long, is_call)
    assert not long.joined_early
    assert long.done == 20


@as_call_or_not
def test_rule_3_others_join_work_that_tells_nothing(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, is_call: bool
) -> None:
    set_patience(monkeypatch, 1e-9)
    pool = make(4)
    long = Piecework(pool, 20, lambda: None)
    queue_behind(pool, long, is_call)
    assert long.joined_early
    assert long.done < 20


@as_call_or_not
def test_rule_3_others_join_when_progress_ends(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, is_call: bool
) -> None:
    set_patience(monkeypatch, 1e-9)
    pool = make(4)
    long = Piecework(pool, 20, lambda: pool.progress() if long.done < 7 else None)
    queue_behind(pool, long, is_call)
    assert long.joined_early
    assert 8 <= long.done < 20


@pytest.mark.parametrize("joins", [True, False])
def test_rule_3_others_join_only_where_that_may_help(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    looks: list[list[int]] = []

    def should_join(threads: list[int]) -> bool:
        looks.append(threads)
        return joins

    monkeypatch.setattr(telegrad._agent.backlog, "_SLOW", PATIENCE)
    monkeypatch.setattr(telegrad._agent.backlog, "_STUCK", PATIENCE)
    monkeypatch.setattr(telegrad._agent.backlog, "should_join", should_join)
    pool, threads, looked = make(4), list[int](), threading.Event()

    def work() -> None:
        threads.append(threading.get_native_id())
        eventually(lambda: looks)
        looked.wait(0.05)

    pool.submit_all([call(work), call(lambda: (threads.append(threading.get_native_id()), looked.set()))])
    assert eventually(lambda: len(threads) == 2)
    assert (threads[0] != threads[1]) == joins
    assert looks[0] == threads[:1]


def test_rule_3_others_join_in_the_end(make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telegrad._agent.backlog, "should_join", lambda threads: False)
    pool, crowd = make(4), Crowd()
    pool.submit_all([call(crowd) for _ in range(4)])
    assert eventually(lambda: crowd.inside == 4)
    crowd.go.set()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody joins in because others make no progress."""
    set_patience(monkeypatch, 2 * PATIENCE)
    for name in ("_SLOW", "_STUCK"):
        monkeypatch.setattr(telegrad._agent.backlog, name, 2 * PATIENCE)


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("submitted", [True, False])
def test_rule_3_a_burst_does_not_wait_for_a_long_call_that_came_before(
    make: Callable[[int], Pool], submitted: bool
) -> None:
    """The thread that read it runs all of it; nobody has to grow impatient first."""
    pool, long, threads = make(4), Crowd(), list[int]()
    bell = Bell(pool)
    (pool.submit if submitted else bell.ring)(call(long))
    assert eventually(lambda: long.inside == 1)
    bell.ring(*(call(lambda: threads.append(threading.get_ident())) for _ in range(10)))
    assert eventually(lambda: len(threads) == 10, AT_ONCE)
    assert len(set(threads)) == 1
    assert long.inside == 1
    long.go.set()
    bell.close()


@pytest.mark.usefixtures("_patient")
def test_rule_3_what_a_call_submits_does_not_wait_for_a_long_call_either(
    make: Callable[[int], Pool],
) -> None:
    """The thread that has read and run it takes that next."""
    pool, long, done = make(4), Crowd(), threading.Event()
    bell = Bell(pool)
    bell.ring(call(long))
    assert eventually(lambda: long.inside == 1)
    bell.ring(call(lambda: pool.submit(call(done.set))))
    assert done.wait(AT_ONCE)
    long.go.set()
    bell.close()


@pytest.mark.usefixtures("_patient")
def test_rule_3_who_drains_the_queue_is_replaced_when_it_waits_for_another_worker(
    make: Callable[[int], Pool],
) -> None:
    """By one that comes to an end beside it."""
    pool, ends, stays, waits, begun = make(4), Crowd(), Crowd(), Crowd(), list[int]()
    bell, other = Bell(pool), Bell(pool)
    pool.submit(call(ends))
    assert eventually(lambda: ends.inside == 1)
    other.ring(call(stays))
    assert eventually(lambda: stays.inside == 1)

    def wait_for_another() -> None:
        with pool.blocked():
            waits()

    bell.ring(call(wait_for_another), *(call(lambda: begun.append(threading.get_ident())) for _ in range(10)))
    assert eventually(lambda: waits.inside == 1)
    ends.go.set()
    assert eventually(lambda: len(begun) == 10, AT_ONCE)
    waits.go.set()
    stays.go.set()
    bell.close()
    other.close()


@as_call_or_not
def test_rule_3_progress_does_not_keep_others_from_what_is_queued_for_long(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, is_call: bool
) -> None:
    monkeypatch.setattr(telegrad._agent.backlog, "should_join", lambda threads: False)
    monkeypatch.setattr(telegrad._agent.backlog, "_SLOW", 1.0)
    pool, joined = make(4), threading.Event()

    def work() -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not joined.wait(0.0002):
            pool.progress()

    pool.submit_all(
        [(lambda *_: work(), None, None), call(joined.set) if is_call else (lambda *_: joined.set(), None, None)]
    )
    assert joined.wait(PATIENCE / 2)


def test_rule_3_each_that_joins_wakes_the_next(make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if that one is faster than the one that woke it."""
    pool, crowd, rings = make(40), Crowd(), list[int]()
    ring = pool._waking.ring

    def slow() -> None:
        rings.append(1)
        ring()
        time.sleep(0.002)

    monkeypatch.setattr(pool._waking, "ring", slow)
    pool.submit_all([call(crowd) for _ in range(40)])
    assert eventually(lambda: crowd.inside == 40)
    assert len(rings) > 32  # a few may come by an alarm
    crowd.go.set()


def test_a_thread_that_goes_in_and_out_of_a_wait_is_busy_all_the_time(make: Callable[[int], Pool]) -> None:
    pool, started, ends = make(4), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        while not ends.is_set():
            with pool.blocked():
                pass

    pool.submit(call(work))
    assert started.wait(PATIENCE)
    end = time.monotonic() + 0.5
    seen = set()
    while time.monotonic() < end:
        seen.add(pool.busy)
    ends.set()
    assert 0 not in seen


def test_rule_4_a_stuck_pool_grows(make: Callable[[int], Pool]) -> None:
    pool, crowd = make(2), Crowd()  # whose waits the pool cannot see
    pool.submit_all([call(crowd) for _ in range(6)])
    assert eventually(lambda: crowd.inside == 6)
    crowd.go.set()
    assert eventually(lambda: pool.busy == 0)


def fill(pool: Pool, crowd: Crowd, count: int) -> None:
    for number in range(1, count + 1):
        pool.submit(call(crowd))
        assert eventually(lambda number=number: crowd.inside == number)


def test_rule_4_the_limit_stands_for_a_while(make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the call has come."""
    monkeypatch.setattr(telegrad._agent.backlog, "_STUCK", PATIENCE)
    pool, crowd, began = make(2), Crowd(), threading.Event()
    fill(pool, crowd, 2)
    bell = Bell(pool)
    pool.submit(call(began.set))
    bell.ring(call(began.set))
    assert not began.wait(0.1)
    crowd.go.set()
    assert began.wait(PATIENCE)
    bell.close()


@pytest.mark.parametrize("brings_work", [False, True])
def test_rule_4_the_limit_gives_way_whatever_else_happens(make: Callable[[int], Pool], brings_work: bool) -> None:
    pool, crowd, began, over = make(2), Crowd(), threading.Event(), threading.Event()
    bells = [Bell(pool), Bell(pool)]

    def disturb() -> None:
        while not over.wait(0.01):
            for bell in bells:
                bell.ring(*[(lambda *_: None, None, None)] * brings_work)

    disturbance = threading.Thread(target=disturb)
    disturbance.start()
    fill(pool, crowd, 2)
    pool.submit(call(began.set))
    assert began.wait(5)
    crowd.go.set()
    over.set()
    disturbance.join()
    assert eventually(lambda: pool.busy == 0 and not any(bell.batches for bell in bells))
    for bell in bells:
        bell.close()


def test_a_wait_within_a_wait_counts_once(make: Callable[[int], Pool]) -> None:
    pool, running = make(2), []

    def wait() -> None:
        with pool.blocked():
            with pool.blocked():
                running.append(pool.running())
            running.append(pool.running())
        running.append(pool.running())

    pool.submit(call(wait))
    assert eventually(lambda: len(running) == 3)
    assert running == [0, 0, 1]


def test_an_interrupted_ring_does_not_silence_the_alarm(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, crowd, done = make(4), Crowd(), threading.Event()
    fill(pool, crowd, 1)
    ring = pool._waking._alarm.set

    def interrupted() -> None:
        monkeypatch.setattr(pool._waking._alarm, "set", ring)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._waking._alarm, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(call(lambda: None))
    time.sleep(0.01)
    pool.submit(call(done.set))
    assert done.wait(AT_ONCE)
    crowd.go.set()


def test_what_interrupts_work_on_a_users_thread_is_raised_there(make: Callable[[int], Pool]) -> None:
    pool, done, let_go = make(2), threading.Event(), []

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run_here([(interrupted, None, None), (lambda *_: done.set(), None, None)], lambda: let_go.append(1))
    assert done.wait(PATIENCE), "the pool does the rest"


def test_while_a_thread_sends_corked_answers_another_waits(make: Callable[[int], Pool]) -> None:
    """Else nobody would read, and a worker that is well would seem to be lost."""
    pool, crowd, sending, go = make(1), Crowd(), threading.Event(), threading.Event()

    class Slow(Bell):
        def flush(self, deadline: float = 0.0) -> None:
            sending.set()
            go.wait(2 * PATIENCE)

    slow, other, heard = Slow(pool), Bell(pool), threading.Event()
    slow.ring(call(lambda: pool.cork(slow)), call(crowd), call(lambda: None))
    assert sending.wait(PATIENCE)
    other.ring((lambda *_: heard.set(), None, None))
    assert heard.wait(AT_ONCE)
    go.set()
    crowd.go.set()
    assert eventually(lambda: pool.busy == 0)
    slow.close()
    other.close()


def test_work_does_not_wait_behind_a_slow_send(make: Callable[[int], Pool]) -> None:
    pool, sending, go, done = make(4), threading.Event(), threading.Event(), threading.Event()

    class Slow(Bell):
        def flush(self, deadline: float = 0.0) -> None:
            sending.set()
            go.wait(2 * PATIENCE)

    slow = Slow(pool)
    slow.ring(call(lambda: pool.cork(slow)), call(done.set))
    assert sending.wait(PATIENCE)
    assert done.wait(AT_ONCE)
    go.set()
    assert eventually(lambda: pool.busy == 0)
    slow.close()


def test_rule_5_corked_answers_go_out(make: Callable[[int], Pool]) -> None:
    pool, corked = make(2), []
    bell = Bell(pool)
    bell.ring(*(call(lambda: corked.append(pool.cork(bell))) for _ in range(10)))
    assert eventually(lambda: len(corked) == 10)
    assert any(corked)
    assert bell.flushed.wait(PATIENCE)
    assert not pool.cork(bell)  # nothing is queued: send at once
    bell.close()


def test_rule_5_nothing_is_corked_when_the_pool_runs_dry_meanwhile(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(2)
    bell = Bell(pool)
    looks = iter([True, False])
    with monkeypatch.context() as patch:
        patch.setattr(pool._backlog, "waits", lambda: next(looks))
        assert not pool.cork(bell)
    assert not pool._corked
    bell.close()


def test_rule_5_answers_do_not_wait_for_a_long_call_behind_them(make: Callable[[int], Pool]) -> None:
    pool, crowd, corked = make(1), Crowd(), []
    bell = Bell(pool)
    bell.ring(call(lambda: corked.append(pool.cork(bell))), call(crowd))
    assert bell.flushed.wait(PATIENCE)
    assert corked == [True]
    crowd.go.set()
    bell.close()


def test_rule_5_a_receiver_that_reads_nothing_does_not_keep_the_last_call_from_the_others(
    make: Callable[[int], Pool],
) -> None:
    """A thread that came for the last one sends the corked answers first, and is kept there."""
    pool, last, go = idle_threads(make, 4), threading.Event(), threading.Event()

    class Full:
        def flush(self, deadline: float = 0.0) -> None:
            go.wait(2 * PATIENCE)

    def answer_and_wait() -> None:
        pool.cork(Full())
        last.wait(PATIENCE)

    bell = Bell(pool)
    bell.ring(call(lambda: last.wait(PATIENCE)), call(answer_and_wait), call(last.set))
    assert last.wait(AT_ONCE)
    go.set()
    bell.close()


def idle_threads(make: Callable[[int], Pool], count: int) -> Pool:
    """A pool of which at least so many threads wait."""
    pool, crowd = make(count), Crowd()
    pool.submit_all([(lambda *_: crowd(), None, None) for _ in range(count)])
    assert eventually(lambda: crowd.inside == count)
    crowd.go.set()
    assert eventually(lambda: pool.busy == 0)
    return pool


def test_a_thread_that_looked_in_vain_for_a_moment_stays(make: Callable[[int], Pool]) -> None:
    """Threads that a program keeps needing would otherwise be started anew, again and again."""
    pool, done = idle_threads(make, 8), threading.Event()
    before = set(pool._threads)
    for _ in range(20):
        done.clear()
        pool.submit_all([call(lambda: time.sleep(0.0005)) for _ in range(10)] + [call(done.set)])
        assert done.wait(PATIENCE)
    time.sleep(0.01)
    assert set(pool._threads) == before


def test_a_surplus_thread_leaves_after_long(make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telegrad._agent.pool, "_IDLE_SECONDS", 0.02)
    pool = idle_threads(make, 8)
    assert eventually(lambda: len(pool._threads) <= telegrad._agent.pool._SPARE)


def test_a_surplus_thread_leaves_even_if_each_is_woken_now_and_then(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telegrad._agent.pool, "_IDLE_SECONDS", 0.2)
    pool = idle_threads(make, 8)
    deadline = time.monotonic() + PATIENCE
    while len(pool._threads) > telegrad._agent.pool._SPARE:
        assert time.monotonic() < deadline
        os.eventfd_write(pool._waking._bell, 8)  # one wakes another, until all were awake
        time.sleep(0.005)


def test_as_many_threads_stay_as_were_busy_at_once_and_one(make: Callable[[int], Pool]) -> None:
    pool = idle_threads(make, 8)
    before = len(pool._threads)
    pool._fewest_idle, pool._next_review = 3, 0.0  # of which two were too many
    deadline = time.monotonic() + PATIENCE
    while len(pool._threads) > before - 2:
        assert time.monotonic() < deadline
        os.eventfd_write(pool._waking._bell, 8)
        time.sleep(0.005)
    os.eventfd_write(pool._waking._bell, 8)
    time.sleep(0.05)
    assert len(pool._threads) == before - 2


def test_a_thread_that_ends_leaves_nothing_corked(make: Callable[[int], Pool]) -> None:
    class Reads:
        def readable(self) -> Sequence[Work]:
            os.eventfd_read(fd)
            pool.flush_when_idle(self)
            return ()

        def linger(self) -> None:
            pass

        def flush(self, deadline: float = 0.0) -> None:
            flushed.set()

    pool, source, flushed, fd = idle_threads(make, 8), Reads(), threading.Event(), os.eventfd(0)
    pool._fewest_idle, pool._next_review = 8, 0.0
    pool.watch(fd, source)
    os.eventfd_write(fd, 1)
    assert flushed.wait(AT_ONCE)
    pool.forget(fd, source)
    os.close(fd)


def test_a_ring_wakes_one_thread(make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    pool, answers = idle_threads(make, 8), []
    answer = pool._waking._answer_bell
    monkeypatch.setattr(pool._waking, "_answer_bell", lambda: (answers.append(threading.get_ident()), answer()))
    time.sleep(0.02)  # until all wait
    for number in range(1, 4):
        done = threading.Event()
        pool.submit(call(done.set))
        assert done.wait(PATIENCE)
        time.sleep(0.02)  # for those that should not wake
        assert len(answers) == number


def test_as_many_threads_come_as_there_were_rings(make: Callable[[int], Pool]) -> None:
    pool = idle_threads(make, 8)
    meeting = threading.Barrier(8)
    for _ in range(20):
        for _ in range(8):
            pool.submit((lambda *_: meeting.wait(PATIENCE), None, None))
        assert eventually(lambda: pool.busy == 0 and not pool._backlog.waits())
        assert not meeting.broken


def test_work_that_is_queued_behind_another_wakes_nobody_before_its_time(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, rings, go = idle_threads(make, 4), [], threading.Event()
    ring = pool._waking.ring
    monkeypatch.setattr(pool._waking, "ring", lambda: (rings.append(1), ring()))
    pool.submit(call(lambda: go.wait(2 * PATIENCE)))
    assert eventually(lambda: pool.running() == 1)
    assert len(rings) == 1
    done = threading.Event()
    pool.submit(call(done.set))
    assert len(rings) == 1, "it may be for the one that runs"
    assert done.wait(PATIENCE), "but that takes long, so another comes"
    go.set()


def test_work_that_raises_harms_nobody(make: Callable[[int], Pool], caplog: pytest.LogCaptureFixture) -> None:
    pool, seen = make(1), threading.Event()
    pool.submit(call(lambda: 1 / 0))
    pool.submit(call(seen.set))
    assert seen.wait(PATIENCE)
    assert "failed in an internal task" in caplog.text


def test_other_threads_are_not_the_pools(make: Callable[[int], Pool]) -> None:
    pool, answers = make(1), []
    assert not pool.runs_here()
    pool.submit(call(lambda: answers.append(pool.runs_here())))
    assert eventually(lambda: answers == [True])


def test_close_joins_all_threads_and_frees_the_descriptors() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(20):
        pool = Pool("pool", 4)
        pool.submit_all([call(lambda: None) for _ in range(20)])
        pool.close(PATIENCE)
        assert not pool._threads
        pool.submit(call(lambda: None))  # too late, and harmless
        del pool
    assert eventually(lambda: descriptors() <= before)


def test_close_does_not_wait_for_ever(make: Callable[[int], Pool]) -> None:
    pool, crowd = Pool("pool", 4), Crowd()
    pool.submit(call(crowd))
    assert eventually(lambda: crowd.inside == 1)
    start = time.monotonic()
    pool.close(0.05)
    assert time.monotonic() - start < AT_ONCE
    crowd.go.set()
    assert eventually(lambda: not pool._threads)


def test_close_while_threads_are_born() -> None:
    for _ in range(30):
        pool, crowd = Pool("pool", 8), Crowd()
        crowd.go.set()
        pool.submit_all([call(crowd) for _ in range(8)])
        pool.close(PATIENCE)
        assert not pool._threads


def test_what_nobody_began_can_be_taken_away() -> None:
    pool = Pool("pool", 1)
    pool.close(PATIENCE)
    user, other = call(lambda: None), (print, 1, 2)
    pool.submit_all([user, other])
    assert sorted(map(id, pool.drain())) == sorted([id(user), id(other)])
    assert pool.drain() == []


def test_a_thread_that_ends_leaves_no_work_behind_whose_alarm_it_has_cleared(
    make: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, busy, begun = idle_threads(make, 5), Crowd(), threading.Event()
    pool.submit((lambda *_: busy(), None, None))
    assert eventually(lambda: busy.inside == 1)
    clear, first = pool._waking.clear_alarm, [True]

    def clear_after_a_submit() -> None:
        """It has seen that nothing was queued."""
        if first:
            first.clear()
            pool.submit(call(begun.set))
        clear()

    monkeypatch.setattr(pool._waking, "clear_alarm", clear_after_a_submit)
    pool._fewest_idle, pool._next_review = pool._idle, 0.0
    pool._waking.ring()
    assert begun.wait(AT_ONCE)
    busy.go.set()


def test_what_a_thread_saw_of_an_empty_queue_does_not_count_for_the_next() -> None:
    """Else it would seem to have waited for long at first sight."""
    backlog, watch = Backlog(4), Watch()
    backlog.running.add(1)
    backlog.add([(lambda *_: None, None, None)])
    assert backlog.patience(watch) is not None
    backlog.take_all()
    assert backlog.pick(2, watch, joins=True) is None
    assert watch.progress.unchanged(0) == 0.0
