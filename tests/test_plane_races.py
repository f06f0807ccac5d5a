"""Events that meet at an unlucky moment in the Python data plane."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support import PATIENCE, eventually, in_thread, no_new_threads
from telegrad._core.interface import How
from telegrad._core.python.link import PythonLink
from telegrad._core.python.plane import PythonPlane
from telegrad._transport.sockets import SocketStream
from telegrad._wire.messages import Call, Reply
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
        return self.plane.start_call(self.link, "a call", now, deadline, lambda number: Call(number, "f"), (), then)

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
