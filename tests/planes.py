"""Data planes without agents, for the tests of ``telegrad._core``: two ends of a link, over any stream.

The tests use ``_core.interface`` only.  A second implementation is one more entry of ``IMPLEMENTATIONS``.
"""

from __future__ import annotations

import itertools
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support import PATIENCE, eventually, in_thread, no_new_threads
from telegrad._core.interface import DataPlane, Handlers, How
from telegrad._core.python.plane import PythonPlane
from telegrad._ids import GlobalId
from telegrad._transport.sockets import SocketStream, connect_tcp, listen_tcp
from telegrad._transport.tls import TlsStream, make_authority, tls_end
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Body, Call, Failure, Goodbye, RemoteCall, Reply, SegmentReleased, UserDelete
from telegrad.errors import RpcTimeoutError, WorkerLostError

CALL_IDS = itertools.count(1)

IMPLEMENTATIONS: dict[str, Callable[..., DataPlane]] = {"python": PythonPlane}

# --- streams ----------------------------------------------------------------------------------------------------------


def unix_streams() -> tuple[Any, Any]:
    one, two = socket.socketpair()
    return SocketStream(one), SocketStream(two)


def tcp_streams() -> tuple[Any, Any]:
    listener, (host, port) = listen_tcp("127.0.0.1", 0)
    with listener:
        one = connect_tcp(host, port, PATIENCE)
        two, _ = listener.accept()
    return SocketStream(one), SocketStream(two)


def tls_streams() -> tuple[Any, Any]:
    raw_one, raw_two = tcp_streams()
    authority = make_authority(b"the key of a job")
    one = TlsStream(raw_one, tls_end(authority.sign("caller"), authority, server_side=False))
    two = TlsStream(raw_two, tls_end(authority.sign("callee"), authority, server_side=True))
    done = [False, False]

    def step() -> bool:
        done[:] = [was or stream.handshake_step() for was, stream in zip(done, (one, two), strict=True)]
        return all(done)

    assert eventually(step)
    one.trust()
    two.trust()
    return one, two


STREAMS: dict[str, Callable[[], tuple[Any, Any]]] = {"unix": unix_streams, "tcp": tcp_streams, "tls": tls_streams}

# --- workers ----------------------------------------------------------------------------------------------------------

Function = Callable[[Any, Frame], None]


def echo(link: Any, frame: Frame) -> None:
    message = frame.message
    assert isinstance(message, Call)
    link.send(Reply(message.call_id, message.body), [memoryview(buffer) for buffer in frame.buffers])


class Worker:
    """A data plane and its owner: it notes what arrives, runs calls by the name of their function, and settles calls
    as an agent does, at their deadline and when their link breaks.

    A RemoteCall is handled at once and only noted, in order; a UserDelete is handled as a message (``on_message``).
    """

    def __init__(self, make_plane: Callable[..., DataPlane], name: str, limit: int = 4) -> None:
        self.arrived: list[tuple[Any, Frame]] = []
        self.unasked: list[tuple[Any, Frame]] = []  # answers that no call waits for
        self.broken: list[tuple[Any, str]] = []
        self.functions: dict[str, Function] = {"echo": echo, "nothing": lambda link, frame: None}
        self.on_message: Function = lambda link, frame: self.arrived.append((link, frame))
        handlers: Handlers = {
            Call: (How.CALL, self._call),
            RemoteCall: (How.QUICK, lambda link, frame: self.arrived.append((link, frame))),
            Goodbye: (How.QUICK, lambda link, frame: self.arrived.append((link, frame))),
            SegmentReleased: (How.QUICK, lambda link, frame: self.arrived.append((link, frame))),
            UserDelete: (How.MESSAGE, lambda link, frame: self.on_message(link, frame)),
            Reply: (How.ANSWER, lambda link, frame: self.unasked.append((link, frame))),
            Failure: (How.ANSWER, lambda link, frame: self.unasked.append((link, frame))),
        }
        self.plane = make_plane(name, limit, handlers, self, bytearray)
        self.plane.start()

    def _call(self, link: Any, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Call)
        self.functions[message.function](link, frame)

    def link_broken(self, link: Any, reason: str) -> None:
        self.broken.append((link, reason))
        self.fail_calls(link, reason)

    def fail_calls(self, link: Any, reason: str) -> None:
        for pending in list(link.pending.values()):
            self.plane.settle(pending, WorkerLostError(reason))

    def tick(self, now: float) -> float:
        soonest = now + 1.0
        for pending in self.plane.pending:
            if pending.deadline <= now:
                self.plane.settle(pending, RpcTimeoutError(pending.what))
            else:
                soonest = min(soonest, pending.deadline)
        return soonest


@dataclass(eq=False)
class End:
    """One end of a link."""

    worker: Worker
    link: Any

    @property
    def plane(self) -> DataPlane:
        return self.worker.plane

    @property
    def frames(self) -> list[Frame]:
        """What was handled at once, or as a message, in this order."""
        return [frame for link, frame in list(self.worker.arrived) if link is self.link]

    @property
    def answers(self) -> list[Frame]:
        """Those that no call waited for."""
        return [frame for link, frame in list(self.worker.unasked) if link is self.link]

    @property
    def broken(self) -> list[str]:
        return [reason for link, reason in list(self.worker.broken) if link is self.link]

    def got(self, count: int) -> list[Frame]:
        assert eventually(lambda: len(self.frames) >= count), f"{len(self.frames)} of {count} frames; {self.broken}"
        return self.frames

    def start_reading(self) -> None:
        self.plane.start_reading(self.link)

    def note(self, number: int, text: str = "f", *buffers: Any, deadline: float = math.inf) -> None:
        """Sends what the other end only notes."""
        body = Body(buffers=tuple(map(len, buffers)))
        message = RemoteCall(number, text, GlobalId(1, 1), GlobalId(1, 2), body)
        self.link.send(message, [memoryview(buffer) for buffer in buffers], deadline)

    def message(self, number: int) -> None:
        """Sends what the other end handles as a message."""
        self.link.send(UserDelete(GlobalId(1, number), GlobalId(1, number)))

    def call(
        self,
        function: str = "echo",
        *buffers: Any,
        timeout: float = PATIENCE,
        then: Callable[[Any, Any], None] | None = None,
        text: str | None = None,
    ) -> Any:
        now = time.monotonic()
        body = Body(tree=text, buffers=tuple(map(len, buffers)))
        views = [memoryview(buffer) for buffer in buffers]
        number = next(CALL_IDS)
        pending = self.plane.start_call(
            self.link, number, function, now, now + timeout, Call(number, function, body), views, then
        )
        if self.link.closed:
            self.worker.fail_calls(self.link, "closed before")
        return pending

    def result(self, pending: Any) -> Frame:
        """Waits for the answer, as an agent does."""
        try:
            if not self.plane.wait(pending):
                self.plane.settle(pending, RpcTimeoutError(pending.what))
        except BaseException:
            self.plane.settle(pending, RpcTimeoutError("given up"))
            raise
        outcome = pending.take_outcome()
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Frame)
        return outcome

    def ask(self, function: str = "echo", *buffers: Any, **options: Any) -> Frame:
        return self.result(self.call(function, *buffers, **options))


Pair = tuple[End, End]


@contextmanager
def linked(
    make_plane: Callable[..., DataPlane], transport: str, limit: int = 4, reading: bool = True
) -> Iterator[Pair]:
    """The caller's end and the callee's; ``reading`` False: the callee's end is not read yet."""
    with no_new_threads():
        caller = Worker(make_plane, "caller", limit)
        if transport == "loopback":
            callee = caller
            here, there = caller.plane.loopback(1)
        else:
            callee = Worker(make_plane, "callee", limit)
            one, two = STREAMS[transport]()
            here, there = caller.plane.adopt(one, 2, True), callee.plane.adopt(two, 1, False)
        ends = End(caller, here), End(callee, there)
        ends[0].start_reading()
        if reading:
            ends[1].start_reading()
        try:
            yield ends
        finally:
            close(*ends)


@contextmanager
def connected_back(pair: Pair) -> Iterator[tuple[End, End]]:
    """A second link of the pair, for the callee's calls: its end of the callee, and that of the caller."""
    caller, callee = pair
    here, there = socket.socketpair()
    back = End(callee.worker, callee.plane.adopt(SocketStream(here), 1, True))
    front = End(caller.worker, caller.plane.adopt(SocketStream(there), 2, False))
    back.start_reading()
    front.start_reading()
    try:
        yield back, front
    finally:
        back.link.close()
        front.link.close()


def close(*ends: End) -> None:
    for end in ends:
        end.link.close()
        end.worker.fail_calls(end.link, "closed")
    for worker in {id(end.worker): end.worker for end in ends}.values():
        worker.plane.close(PATIENCE)


def big(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def run_together(actions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs each on a thread of its own; returns their results, or raises the first error."""
    return [join() for join in [in_thread(action) for action in actions]]


class Countdown:
    """Is over after so many calls of ``step``."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._over = threading.Event()

    def step(self, *_: Any) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._over.set()

    def wait(self) -> None:
        assert self._over.wait(PATIENCE), f"{self._left} are missing"
