"""Events that meet at an unlucky moment in the Python data plane."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from planes import CALL_IDS
from support import PATIENCE, eventually, in_thread, no_new_threads
from telegrad._core.interface import How
from telegrad._core.python.link import PythonLink
from telegrad._core.python.plane import PythonPlane
from telegrad._core.python.poller import END
from telegrad._transport.sockets import SocketStream
from telegrad._wire.messages import Call, Reply, SegmentReleased
from telegrad.errors import WorkerLostError


class Side:
    """A data plane with one link."""

    def __init__(self, name: str, sock: socket.socket, dialled: bool, reads: bool = True) -> None:
        self.handlers: dict[type, Any] = {Reply: (How.ANSWER, lambda link, frame: None)}
        self.broken: list[str] = []
        self.plane = PythonPlane(name, 2, self.handlers, self, bytearray)
        self.plane.start()
        self.link: PythonLink = self.plane.adopt(SocketStream(sock), 1, dialled)
        if reads:
            self.plane.start_reading(self.link)

    def link_broken(self, link: Any, reason: str) -> None:
        self.broken.append(reason)

    def tick(self, now: float) -> float:
        return now + 1.0

    def call(self, then: Any = None) -> Any:
        now = time.monotonic()
        deadline = now + PATIENCE
        number = next(CALL_IDS)
        return self.plane.start_call(self.link, number, "a call", now, deadline, Call(number, "f"), (), then)

    def close(self) -> None:
        self.link.close()
        self.plane.close(PATIENCE)


def answer(link: Any, frame: Any) -> None:
    link.send(Reply(frame.message.call_id))


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """The caller and the callee, which answers every call."""
    with no_new_threads():
        here, there = socket.socketpair()
        caller, callee = Side("caller", here, True), Side("callee", there, False)
        callee.handlers[Call] = (How.CALL, answer)
        yield caller, callee
        caller.close()
        callee.close()


def test_a_call_whose_link_was_closed_waits_for_the_reason(sides: tuple[Side, Side]) -> None:
    """The thread that closes a link fails its calls a moment later; until then the call has not timed out."""
    caller, callee = sides
    callee.handlers[Call] = (How.CALL, lambda link, frame: None)
    pending = caller.call()
    waiting = in_thread(lambda: caller.plane.wait(pending))
    assert eventually(lambda: caller.link.reader)
    caller.link.close()
    assert eventually(lambda: not caller.link.reader)
    caller.plane.settle(pending, WorkerLostError("lost"))
    assert waiting()
    assert isinstance(pending.outcome, WorkerLostError)


def test_an_answer_is_noticed_if_its_call_begins_while_another_thread_stops_reading(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, callee = sides
    done, stopped = threading.Event(), threading.Event()
    watch, ends = caller.plane._watch, []

    def watch_late(link: PythonLink, events: int) -> None:
        """Between the decision of the thread that stops reading and its deed, another thread makes a call."""
        if events == END and not link.reader and not ends:
            ends.append(events)
            callee.handlers[Call] = (How.CALL, answer_late)
            in_thread(lambda: caller.call(lambda *_: done.set()))()
            watch(link, events)
            stopped.set()
        else:
            watch(link, events)

    def answer_late(link: Any, frame: Any) -> None:
        assert stopped.wait(PATIENCE)
        answer(link, frame)

    monkeypatch.setattr(caller.plane, "_watch", watch_late)
    # A thread of the data plane may read the first answers, and then the waiting thread stops nothing.
    assert eventually(lambda: caller.plane.wait(caller.call()) and ends)
    assert done.wait(PATIENCE / 2)


def test_a_handler_that_fails_at_once_ends_neither_its_thread_nor_its_link(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    caller, callee = sides

    def fail(link: Any, frame: Any) -> None:
        raise ValueError("a handler with a fault")

    callee.handlers[SegmentReleased] = (How.QUICK, fail)
    caller.link.send(SegmentReleased(1))
    assert caller.plane.wait(caller.call())
    assert [record for record in caplog.records if record.levelno == logging.ERROR and record.exc_info]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_a_message_raises_does_not_count_as_unfinished(error: type[BaseException]) -> None:
    here, there = socket.socketpair()
    caller, callee = Side("caller", here, True), Side("callee", there, False)
    failed = threading.Event()

    def fail(link: Any, frame: Any) -> None:
        failed.set()
        raise error

    callee.handlers[SegmentReleased] = (How.MESSAGE, fail)
    callee.handlers[Call] = (How.CALL, answer)
    caller.link.send(SegmentReleased(1))
    assert failed.wait(PATIENCE)
    assert eventually(lambda: not callee.plane.unfinished)
    assert caller.plane.wait(caller.call())
    caller.close()
    callee.close()
