"""Copying with two threads: all of it, once, whatever happens meanwhile."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from programs.neighbour import pattern
from support import PATIENCE, in_thread
from telegrad._transport.copier import SPLIT_FROM, Copier


@pytest.fixture
def copier() -> Iterator[Copier]:
    copier = Copier()
    yield copier
    copier.close()


def threads(copier: Copier) -> list[threading.Thread]:
    """Its threads: a thread's target is known while it runs."""
    all_threads: list[Any] = threading.enumerate()
    return [thread for thread in all_threads if getattr(thread, "_target", None) == copier._work]


@pytest.mark.parametrize("size", [1, 4096, (8 << 20) - 1, 8 << 20, (8 << 20) + 1])
@pytest.mark.parametrize("cores", [1, 2])
def test_a_copy_is_whole(copier: Copier, monkeypatch: pytest.MonkeyPatch, size: int, cores: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    source, target = pattern(3, size), np.zeros(size + 16, np.uint8)
    copier.copy(target.ctypes.data, source.ctypes.data, size)
    assert np.array_equal(target[:size], source)
    assert not target[size:].any()


def test_a_system_without_threads_copies_on_one(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    source, target = pattern(3, 9 << 20), np.zeros(9 << 20, np.uint8)
    copier.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("when", ["copying", "waiting"])
def test_an_interrupted_copy_ends_only_when_both_threads_are_done(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Else the memory would be unmapped while the other thread writes there."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    memmove, wait = ctypes.memmove, threading.Event.wait
    me = threading.current_thread()
    interrupted = threading.Event()
    done: list[str] = []

    def interrupt() -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def move(*args: Any) -> None:
        if threading.current_thread() is me:
            memmove(*args)
            if when == "copying":
                interrupt()
        else:
            assert wait(interrupted, PATIENCE)
            memmove(*args)
            done.append("the other thread")

    def wait_interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is me and when == "waiting" and event is not interrupted and started(event):
            interrupt()
        return wait(event, timeout)

    def started(event: threading.Event) -> bool:
        """Not the wait of ``Thread.start``."""
        return event not in [getattr(thread, "_started", None) for thread in threading.enumerate()]

    monkeypatch.setattr(ctypes, "memmove", move)
    monkeypatch.setattr(threading.Event, "wait", wait_interrupted)
    source, target = pattern(3, 9 << 20), np.zeros(9 << 20, np.uint8)
    with pytest.raises(KeyboardInterrupt):
        copier.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
    assert done == ["the other thread"]
    assert np.array_equal(target, source)


def test_many_threads_copy_at_once(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def work(seed: int) -> None:
        source, target = pattern(seed, SPLIT_FROM + seed), np.zeros(SPLIT_FROM + seed, np.uint8)
        for _ in range(5):
            target[:] = 0
            copier.copy(target.ctypes.data, source.ctypes.data, source.nbytes)
            assert np.array_equal(target, source)

    for join in [in_thread(lambda seed=seed: work(seed)) for seed in range(1, 5)]:
        join()
    assert len(threads(copier)) == 1


def test_its_thread_is_born_when_first_needed_stays_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    copier = Copier()
    source, target = pattern(1, SPLIT_FROM), np.zeros(SPLIT_FROM, np.uint8)
    copier.copy(target.ctypes.data, source.ctypes.data, SPLIT_FROM - 1)
    assert threads(copier) == []
    copier.copy(target.ctypes.data, source.ctypes.data, SPLIT_FROM)
    (thread,) = threads(copier)
    copier.copy(target.ctypes.data, source.ctypes.data, SPLIT_FROM)
    assert threads(copier) == [thread]
    copier.close()
    assert threads(copier) == []
    target[:] = 0
    copier.copy(target.ctypes.data, source.ctypes.data, SPLIT_FROM)
    assert np.array_equal(target, source), "it still copies, alone"
    assert threads(copier) == []
