"""A look at how others get on."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import telegrad._agent.look
from support import PATIENCE, eventually
from telegrad._agent.look import Look, should_join


def test_a_count_is_unchanged_from_the_first_look_on() -> None:
    look = Look(1e9)
    assert look.unchanged(3) == 0.0
    time.sleep(0.002)
    assert look.unchanged(3) >= 0.002
    assert look.unchanged(4) == 0.0
    look.begin()
    assert look.unchanged(4) == 0.0


def test_a_long_pause_between_two_looks_counts_as_a_short_one() -> None:
    look = Look(0.002)
    look.unchanged(3)
    time.sleep(0.01)
    assert look.unchanged(3) == 0.002
    time.sleep(0.01)
    assert look.unchanged(3) == 0.004


@contextmanager
def thread_that(acts: Callable[[], object]) -> Iterator[int]:
    """Again and again."""
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            acts()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        end.set()
        thread.join()


def test_those_that_wait_are_to_be_joined() -> None:
    go = threading.Event()
    with thread_that(lambda: go.wait(PATIENCE)) as waits:
        assert eventually(lambda: should_join([waits]))
        assert all(should_join([waits]) for _ in range(100))
        go.set()


def test_those_that_have_ended_are_to_be_joined() -> None:
    with thread_that(lambda: time.sleep(0.001)) as ends:
        pass
    assert should_join([ends])
    assert should_join([])


def test_those_that_want_the_gil_are_not_to_be_joined() -> None:
    with thread_that(lambda: None) as computes, thread_that(lambda: time.sleep(0.01)) as waits:
        answers = [should_join([waits, computes]) for _ in range(200)]
    assert sum(answers) < 20, "now and then it has the GIL itself for a moment"


def one_that_needs_no_gil() -> object:
    return hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 100_000)


@pytest.mark.parametrize("is_free", [True, False])
def test_those_that_need_no_gil_are_to_be_joined_where_there_is_a_core(
    monkeypatch: pytest.MonkeyPatch, is_free: bool
) -> None:
    monkeypatch.setattr(telegrad._agent.look, "_is_a_core_free", lambda: is_free)
    with thread_that(one_that_needs_no_gil) as computes:
        answers = [should_join([computes]) for _ in range(50)]
    assert (sum(answers) > 25) == is_free


def test_a_core_is_free_when_less_runs_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    for running, is_free in (1, True), (cores, True), (cores + 1, False):
        monkeypatch.setattr(telegrad._agent.look, "_read", lambda _, n=running: b"0.5 0.5 0.5 %d/99 1234" % n)
        assert telegrad._agent.look._is_a_core_free() is is_free
    monkeypatch.setattr(telegrad._agent.look, "_read", lambda _: b"")
    assert telegrad._agent.look._is_a_core_free(), "nobody knows"
