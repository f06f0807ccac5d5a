"""Which thread does what: the scheduler's rules, alone and under random orders of events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import hypothesis
import pytest
from hypothesis import strategies as st

from telegrad._core.python.scheduler import STUCK, LinkSchedule, Owner, Scheduler, Work


def nothing(first: object, second: object) -> None: ...


def call(number: object = 0) -> Work:
    return Work(True, nothing, None, number)


def message(number: object = 0) -> Work:
    return Work(False, nothing, None, number)


def owner_of(scheduler: Scheduler, link: LinkSchedule) -> Owner:
    me = Owner()
    assert scheduler.own(link, me)
    return me


# --- the rules, one by one --------------------------------------------------------------------------------------------


def test_the_last_idle_thread_is_replaced_before_it_does_anything() -> None:
    scheduler = Scheduler(4)
    assert scheduler.stop_idling()  # start another
    assert scheduler.idle == 1
    assert scheduler.stop_idling()
    assert scheduler.idle == 1


def test_a_thread_that_the_system_refuses_is_asked_for_again() -> None:
    scheduler = Scheduler(4)
    assert scheduler.stop_idling()
    scheduler.not_started()
    assert scheduler.begin_waiting(False, False) == (True, False)


def test_a_link_has_one_owner() -> None:
    scheduler, link = Scheduler(4), LinkSchedule()
    me = owner_of(scheduler, link)
    assert not scheduler.own(link, Owner())
    assert scheduler.give_up(link, me)
    assert not scheduler.give_up(link, me)
    assert scheduler.own(link, Owner())


def test_the_owner_runs_what_it_read_in_order() -> None:
    scheduler, link = Scheduler(4), LinkSchedule()
    me = owner_of(scheduler, link)
    first, second, third = call(1), message(2), call(3)
    assert scheduler.next_of_link(link, me, None, [first, second, third]) is first
    assert scheduler.next_of_link(link, me, first) is second
    assert scheduler.next_of_link(link, me, second) is third
    assert scheduler.next_of_link(link, me, third) is None
    assert scheduler.unfinished == scheduler.calls_running == 0


def test_calls_above_the_limit_wait_and_messages_do_not() -> None:
    scheduler, one, other = Scheduler(1), LinkSchedule(), LinkSchedule()
    first, second, third = call(1), call(2), message(3)
    me, you = owner_of(scheduler, one), owner_of(scheduler, other)
    assert scheduler.next_of_link(one, me, None, [first]) is first
    assert scheduler.next_of_link(other, you, None, [second, third]) is third
    assert not scheduler.can_take()
    assert scheduler.next_of_link(one, me, first) is None
    assert scheduler.can_take()
    scheduler.give_up(one, me)
    assert scheduler.take(None) is second


def test_a_thread_that_waits_for_another_worker_does_not_count() -> None:
    scheduler, link = Scheduler(1), LinkSchedule()
    me = owner_of(scheduler, link)
    first, second = call(1), call(2)
    assert scheduler.next_of_link(link, me, None, [first, second]) is first
    assert scheduler.give_up(link, me)
    assert not scheduler.can_take()
    assert scheduler.begin_waiting(first.is_call, queued=False)[1], "wake a thread for the second"
    assert scheduler.take(None) is second
    scheduler.end_waiting(first.is_call, queued=False)
    assert scheduler.calls_running == 2


def test_an_owner_that_runs_the_same_for_a_tick_loses_its_link_and_what_it_has_not_begun() -> None:
    scheduler, link = Scheduler(4), LinkSchedule()
    me = owner_of(scheduler, link)
    first, second = call(1), message(2)
    assert scheduler.next_of_link(link, me, None, [first, second]) is first
    assert scheduler.tick(0.0, 0.0) == ([], False)
    assert scheduler.tick(0.001, 0.0) == ([link], True)
    assert link.slow
    assert link.owner is None
    assert scheduler.take(None) is second
    assert scheduler.next_of_link(link, me, first) is None


def test_an_owner_that_makes_progress_keeps_its_link() -> None:
    scheduler, link = Scheduler(4), LinkSchedule()
    me = owner_of(scheduler, link)
    works = [call(number) for number in range(5)]
    work = scheduler.next_of_link(link, me, None, works)
    while work is not None:
        assert scheduler.tick(0.0, 0.0) == ([], False)
        work = scheduler.next_of_link(link, me, work)
    assert scheduler.tick(0.0, 0.0) == ([], False), "it runs nothing"
    assert link.owner is me


def test_one_thread_drains_the_messages_until_it_is_stuck() -> None:
    scheduler = Scheduler(4)
    assert scheduler.add([message(1)]), "wake a thread"
    scheduler.stop_idling()
    first = scheduler.take(None)
    assert first is not None
    assert not scheduler.add([message(2)]), "that thread takes it too"
    assert scheduler.tick(0.0, 0.0) == ([], False)
    assert scheduler.tick(0.0, 0.0) == ([], True), "it has taken none for a tick"
    assert scheduler.begin_waiting(False, queued=True)[1], "nor while it waits"


@pytest.mark.parametrize(("used", "gives_way"), [(0.0, True), (1.0, False)], ids=["idle", "computing"])
def test_the_limit_gives_way_when_the_calls_wait_for_something_unseen(used: float, gives_way: bool) -> None:
    scheduler, link = Scheduler(1), LinkSchedule()
    me = owner_of(scheduler, link)
    first, second, third = call(1), call(2), call(3)
    scheduler.next_of_link(link, me, None, [first, second, third])
    scheduler.give_up(link, me)
    scheduler.tick(0.0, 0.0)
    assert not scheduler.tick(STUCK / 2, used * STUCK / 2)[1]
    assert scheduler.tick(STUCK * 1.5, used * STUCK * 1.5)[1] is gives_way
    assert scheduler.take(None) is (second if gives_way else None)
    assert not scheduler.can_take(), "one more, and not all"


def test_surplus_threads_end_and_two_idle_ones_stay() -> None:
    scheduler = Scheduler(4)
    scheduler.idle = 4
    assert [scheduler.is_surplus() for _ in range(4)] == [True, True, False, False]


# --- any order of events ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Connection(LinkSchedule):
    unread: deque[Work] = field(default_factory=deque)
    watched: bool = True

    def __post_init__(self) -> None:
        super().__init__()


@dataclass(eq=False)
class Thread(Owner):
    link: Connection | None = None
    work: Work | None = None
    waits: bool = False
    queued: bool = False  # its work came from the queues

    def __post_init__(self) -> None:
        super().__init__()


class Simulation:
    """Threads that do what the data plane's do, one step at a time, in an order that the test chooses."""

    def __init__(self, limit: int, links: int) -> None:
        self.limit = limit
        self.scheduler = Scheduler(limit)
        self.links = [Connection() for _ in range(links)]
        self.idle = 1
        self.busy: list[Thread] = []
        self.rings = 0
        self.now = 0.0
        self.begun: list[object] = []

    def start(self, needed: bool) -> None:
        self.idle += needed

    def wake_for_link(self, link: Connection) -> None:
        """An idle thread sees bytes."""
        if not (link.unread and link.watched and self.idle):
            return
        link.watched = False
        thread = Thread(link)
        assert self.scheduler.own(link, thread), "a watched link has no owner"
        self.idle -= 1
        self.start(self.scheduler.stop_idling())
        self.busy.append(thread)

    def wake_for_bell(self) -> None:
        if self.rings and self.idle:
            self.rings -= 1
            self.idle -= 1
            self.start(self.scheduler.stop_idling())
            self.take(Thread(), None)

    def take(self, thread: Thread, done: Work | None) -> None:
        """A thread that owns no link."""
        thread.link, thread.work, thread.queued = None, self.scheduler.take(done), True
        if thread in self.busy:
            self.busy.remove(thread)
        if thread.work is None:
            self.idle += 1
        else:
            self.begin(thread)
            self.busy.append(thread)
            self.rings += self.scheduler.can_take()

    def begin(self, thread: Thread) -> None:
        assert thread.work is not None
        self.begun.append(thread.work.second)
        if thread.work.is_call:
            running = sum(t.work is not None and t.work.is_call and not t.waits for t in self.busy if t is not thread)
            resumed = sum(t.queued is None for t in self.busy)
            assert running <= self.limit + resumed + self.scheduler._extra

    def step(self, thread: Thread) -> None:
        """A thread ends its work, or reads its link, or lets go of it."""
        if thread.waits:
            return
        link, scheduler = thread.link, self.scheduler
        if thread.queued:
            self.take(thread, thread.work)
            return
        assert link is not None
        if thread.work is None and not link.unread:  # nothing came for a moment
            if scheduler.give_up(link, thread):
                link.watched = True
            self.take(thread, None)
            return
        arrived: list[Work] = []
        if thread.work is None:
            arrived = [link.unread.popleft() for _ in range(len(link.unread))]
            if link.slow or scheduler.can_take():
                if scheduler.give_up(link, thread, arrived):
                    link.watched = True
                self.take(thread, None)
                return
        thread.work = scheduler.next_of_link(link, thread, thread.work, arrived)
        if thread.work is not None:
            self.begin(thread)
        elif link.owner is not thread:
            self.take(thread, None)

    def wait(self, thread: Thread) -> None:
        """Its work waits for another worker."""
        if thread.work is None or thread.waits:
            return
        thread.waits = True
        if thread.link is not None and self.scheduler.give_up(thread.link, thread):
            thread.link.watched = True
        needed, wake = self.scheduler.begin_waiting(thread.work.is_call, thread.queued)
        self.start(needed)
        self.rings += wake

    def resume(self, thread: Thread) -> None:
        if thread.waits:
            assert thread.work is not None
            thread.waits = False
            self.scheduler.end_waiting(thread.work.is_call, thread.queued)

    def tick(self, seconds: float = 0.001) -> None:
        self.now += seconds
        stuck, wake = self.scheduler.tick(self.now, 0.0)
        for link in stuck:
            assert isinstance(link, Connection)
            link.watched = True
        self.rings += wake

    def check(self) -> None:
        assert self.idle >= 1, "a thread is always idle"
        assert self.idle == self.scheduler.idle
        owners = [thread.link for thread in self.busy if thread.link is not None and thread.link.owner is thread]
        assert len(owners) == len(set(map(id, owners)))
        assert len(self.begun) == len(set(self.begun)), "a work was begun twice"
        for link in self.links:
            assert link.watched or link.owner is not None, "nobody reads this link, and nobody will"


@hypothesis.given(
    limit=st.integers(1, 3),
    links=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
    steps=st.integers(1, 150),
    waiting=st.floats(0.0, 0.3),
)
@hypothesis.settings(max_examples=400, deadline=None)
def test_in_any_order_everything_is_run_once_and_nothing_is_left(
    limit: int, links: int, seed: int, steps: int, waiting: float
) -> None:
    order = random.Random(seed)
    simulation = Simulation(limit, links)
    sent = 0
    for _ in range(steps):
        what = order.random()
        link = order.choice(simulation.links)
        thread = order.choice(simulation.busy) if simulation.busy else None
        if what < 0.2:
            for _ in range(order.randrange(1, 4)):
                link.unread.append((call if order.random() < 0.6 else message)(sent))
                sent += 1
        elif what < 0.35:
            simulation.wake_for_link(link)
        elif what < 0.5:
            simulation.wake_for_bell()
        elif what < 0.55:
            simulation.tick(order.choice([0.001, STUCK * 2]))
        elif thread is not None:
            if order.random() < waiting:
                simulation.wait(thread)
            elif order.random() < 0.5:
                simulation.resume(thread)
            else:
                simulation.step(thread)
        simulation.check()
    # From here on nothing more arrives, and each thread goes on.
    for _ in range(20 * (sent + 10)):
        for link in simulation.links:
            simulation.wake_for_link(link)
        simulation.wake_for_bell()
        for thread in list(simulation.busy):
            simulation.resume(thread)
            simulation.step(thread)
        simulation.tick()
        simulation.check()
        if not simulation.busy and len(simulation.begun) == sent:
            break
    assert sorted(simulation.begun) == list(range(sent))
    assert simulation.scheduler.unfinished == simulation.scheduler.calls_running == 0
    assert not simulation.scheduler.has_queued
