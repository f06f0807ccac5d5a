"""Requests and replies: each call is settled once, whatever happens in whatever order."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from telegrad._agent.calls import Calls

workers = st.integers(0, 2)
moments = st.integers(0, 20)
events = st.one_of(
    st.tuples(st.just("start"), workers, st.integers(0, 10)),  # a timeout of 0: none
    st.tuples(st.just("finish"), st.integers(0, 30), st.none()),
    st.tuples(st.just("lost"), workers, st.none()),
    st.tuples(st.just("expire"), moments, st.none()),
)


@given(st.lists(events, max_size=40))
def test_each_call_is_settled_exactly_once(story: list[tuple[str, int, int]]) -> None:
    calls: Calls[None] = Calls()
    started = []
    settled: Counter[int] = Counter()
    for event, number, timeout in story:
        if event == "start":
            started.append(calls.start(number, "f", 10.0, timeout, None))
        elif event == "finish" and number < len(started):
            answered = calls.finish(started[number].call_id)
            settled.update([answered.call_id] if answered else [])
        elif event == "lost":
            lost = calls.lost(number)
            assert all(call.to == number for call in lost)
            settled.update(call.call_id for call in lost)
        elif event == "expire":
            over = calls.expire(number)
            assert all(call.deadline <= number for call in over)
            settled.update(call.call_id for call in over)
        assert len(calls) + settled.total() == len(started)
    for worker in range(3):
        settled.update(call.call_id for call in calls.lost(worker))
    assert settled == Counter(call.call_id for call in started)
    assert len(calls) == 0


@given(st.lists(st.integers(0, 100)))
def test_the_next_deadline_is_the_earliest(timeouts: list[int]) -> None:
    calls: Calls[None] = Calls()
    for timeout in timeouts:
        calls.start(0, "f", 5.0, timeout, None)
    assert calls.next_deadline() == min((5.0 + timeout for timeout in timeouts if timeout), default=math.inf)


def test_a_call_is_found_until_it_is_settled() -> None:
    calls: Calls[str] = Calls()
    one, other = calls.start(0, "f", 0.0, 0.0, "one"), calls.start(1, "f", 0.0, 5.0, "other")
    assert calls.find(one.call_id) is calls.find(one.call_id) is one, "to look changes nothing"
    assert calls.finish(one.call_id) is one
    calls.expire(10.0)
    assert calls.find(one.call_id) is calls.find(other.call_id) is calls.find(10**6) is None


def test_a_timeout_of_zero_never_expires() -> None:
    calls: Calls[None] = Calls()
    calls.start(0, "f", 0.0, 0.0, None)
    assert calls.expire(1e12) == []


def test_threads_that_settle_the_same_calls_share_them_out() -> None:
    calls: Calls[None] = Calls()
    started = [calls.start(number % 3, "f", 0.0, 1.0, None) for number in range(3000)]
    settled: list[int] = []

    def answer() -> None:
        for call in started:
            if calls.finish(call.call_id) is not None:
                settled.append(call.call_id)

    def lose() -> None:
        for worker in range(3):
            settled.extend(call.call_id for call in calls.lost(worker))

    threads = [threading.Thread(target=target) for target in (answer, lose, answer, lambda: None)]
    threads.append(threading.Thread(target=lambda: settled.extend(call.call_id for call in calls.expire(2.0))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sorted(settled) == sorted(call.call_id for call in started)


def test_the_repr_says_what_is_waited_for() -> None:
    calls: Calls[None] = Calls()
    assert repr(calls) == "<Calls 0 waiting>"
    calls.start(3, "module:f", 0.0, 1.0, None)
    assert repr(calls) == "<Calls 1 waiting: module:f of 3>"


def test_whether_many_workers_have_yet_to_answer() -> None:
    calls: Calls[None] = Calls()
    started = [calls.start(worker, "f", 5.0, 1.0, None) for worker in (3, 3, 4, 5)]
    assert calls.are_for_many(3, since=4.9)
    assert not calls.are_for_many(4, since=4.9)
    calls.finish(started[-1].call_id)
    assert calls.are_for_many(2, since=4.9)
    assert not calls.are_for_many(3, since=4.9), "two of the three that are left are for one worker"


def test_a_call_that_was_made_long_ago_does_not_count() -> None:
    calls: Calls[None] = Calls()
    calls.start(3, "for_hours", 0.0, 0.0, None)
    calls.start(4, "f", 5.0, 1.0, None)
    assert not calls.are_for_many(2, since=4.9)
    calls.start(5, "f", 5.0, 1.0, None)
    assert calls.are_for_many(2, since=4.9)


def test_of_thousands_of_calls_the_newest_tell_whom_they_are_for() -> None:
    calls: Calls[None] = Calls()
    calls.start(4, "f", 5.0, 1.0, None)
    for _ in range(1000):
        calls.start(3, "f", 5.0, 1.0, None)
    assert not calls.are_for_many(2, since=4.9)


def test_on_many_cores_many_are_looked_at() -> None:
    calls: Calls[None] = Calls(newest=4 * 32)
    for worker in range(31):
        calls.start(worker, "f", 5.0, 1.0, None)
    assert not calls.are_for_many(32, since=4.9)
    calls.start(31, "f", 5.0, 1.0, None)
    assert calls.are_for_many(32, since=4.9)


def test_threads_that_begin_and_end_calls_do_not_disturb_the_question() -> None:
    calls: Calls[None] = Calls()
    for number in range(20):
        calls.start(number % 7, "f", 1.0, 1.0, None)  # which stay, so that each question is looked into
    end = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not end.is_set():
                calls.are_for_many(2, since=0.0)
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for number in range(60_000):
            one, other = calls.start(3, "f", 1.0, 1.0, None), calls.start(number % 7, "f", 1.0, 1.0, None)
            calls.finish(one.call_id)
            calls.finish(other.call_id)
    finally:
        end.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(10.0)
    assert not errors
