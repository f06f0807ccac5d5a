"""What the rest of telegrad asks of the data plane, and what the data plane tells it.

The data plane moves frames over authenticated connections and owns the threads that do it.  It knows nothing of
values, references or gradients.  ``python/`` is the implementation that is always there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from telegrad._transport.base import Stream
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Message


class How(enum.Enum):
    """How a message is handled when it arrives."""

    ANSWER = enum.auto()  # it settles the pending call of its ``call_id``
    CALL = enum.auto()  # on a thread that may block; at most ``num_worker_threads`` at once
    MESSAGE = enum.auto()  # on a thread that may block, at any time
    QUICK = enum.auto()  # at once on the thread that reads: the handler waits for nothing


Act = Callable[[Any, Any], None]
Handler = Callable[[Any, Frame], None]  # with the link

#: What may arrive on a link, by message type.  The handler of an ANSWER gets the answers that no call waits for.
Handlers = Mapping[type, tuple[How, Handler]]


class Link(Protocol):
    """One authenticated connection to a peer.

    Each pair of workers has up to two, one for the requests of each side.  The side that dialled a link sends requests
    and internal messages on it; the other side answers.
    """

    peer_id: int  # authenticated, see ``rpc.network``
    dialled: bool  # by this side
    pid: int | None  # the peer's process, where the kernel vouches for it: on a Unix socket
    heard: bool  # the peer has sent something
    closed: bool
    pending: dict[int, Any]  # calls that wait for their answer, by id
    shares_memory: bool  # the peer can map this worker's shared memory; kept here for ``_agent.marshal``
    kept: dict[int, Any]  # by call id: what must not be freed before the answer comes
    held: dict[int, Any]  # segments of shared memory that the peer uses; kept here for ``_agent.marshal``

    def send(self, message: Message, buffers: Sequence[memoryview] = (), deadline: float = ...) -> None:
        """Sends a message.  When this returns the caller may change the buffers.

        While the peer reads nothing, a message with buffers blocks until the deadline; the rest, and a message without
        buffers, is then sent by another thread.  A broken connection is reported to ``Events.link_broken``, not raised.
        """

    @property
    def has_unsent(self) -> bool: ...

    def send_last(self, message: Message, deadline: float) -> None:
        """Sends a message without buffers before the link is closed; waits until the deadline while the peer reads
        nothing."""

    def fail(self, reason: str) -> None:
        """Closes the connection and reports its end."""

    def close(self) -> bool:
        """Closes the connection; False if it was closed."""

    def host_is_silent(self, seconds: float) -> bool:
        """Whether the peer's host does not respond (``_transport.base.Stream``)."""

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptor and leaves the connection to the parent."""


class Pending(Protocol):
    """A call that waits for its answer."""

    link: Any
    call_id: int
    what: str  # for error texts
    started: float
    deadline: float  # ``math.inf``: none
    outcome: Frame | Exception | None
    then: Callable[[Any, Any], None] | None  # called with the link and the pending call, on a thread that may block
    waited_for: bool  # a thread waits for it, and calls ``then`` itself

    def take_outcome(self) -> Frame | Exception | None:
        """The outcome, for the first that asks; None afterwards."""


class Events(Protocol):
    """What the data plane tells its owner."""

    def link_broken(self, link: Any, reason: str) -> None:
        """The connection has ended; called once per link, on any thread.  Its pending calls are the owner's to fail."""

    def tick(self, now: float) -> float:
        """Called at the time that the last call returned, or earlier (``wake_before``).  It must not block."""


class DataPlane(Protocol):
    @property
    def pending(self) -> Sequence[Pending]:
        """The calls that wait for an answer."""

    @property
    def unfinished(self) -> int:
        """How many calls and messages are being handled, or wait for a thread."""

    @property
    def calls_running(self) -> int: ...

    def start(self) -> None:
        """From now on ``Events.tick`` is called."""

    def adopt(self, stream: Stream, peer_id: int, dialled: bool, pid: int | None = None) -> Link:
        """Makes a link of an authenticated stream.  It is read from ``start_reading`` on."""

    def start_reading(self, link: Any) -> None: ...

    def loopback(self, peer_id: int) -> tuple[Link, Link]:
        """The two ends of a link of this worker to itself: the caller's and the callee's."""

    def start_call(
        self,
        link: Any,
        call_id: int,
        what: str,
        started: float,
        deadline: float,
        message: Message,
        buffers: Sequence[memoryview] = (),
        then: Callable[[Any, Any], None] | None = None,
        keeps: Any = None,
    ) -> Pending:
        """Sends a request, whose answer will have the same ``call_id``; no other call may have it.

        ``keeps``: what must not be freed before the answer comes, even if it comes after the deadline.
        """

    def wait(self, pending: Any) -> bool:
        """Waits for the outcome, reading the link on the calling thread if no other does; False at the deadline, which
        leaves the call pending."""

    def settle(self, pending: Any, outcome: Exception) -> bool:
        """Ends a call without an answer; False if it has an outcome already."""

    def submit(self, act: Act, first: Any = None, second: Any = None, call: bool = False) -> None:
        """Runs ``act(first, second)`` on a thread that may block; ``call``: as a CALL."""

    def blocking(self) -> AbstractContextManager[None]:
        """Around a wait for another worker: other threads take over what the calling thread would do next."""

    def before_waiting(self, act: Callable[[], None] | None) -> Callable[[], None] | None:
        """Sets what the calling thread does before it waits for another worker; returns what it was."""

    def serves_here(self) -> bool:
        """Whether the calling thread is one of the data plane's."""

    def wake_before(self, when: float) -> None:
        """Calls ``Events.tick`` at that time, if not before."""

    def close(self, timeout: float) -> None:
        """Ends the threads; those that run longer than the timeout are left behind as daemons."""
