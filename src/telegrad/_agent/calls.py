"""The caller's side of a call: sends the request, waits for the answer, and makes a value or an exception of it."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from telegrad._agent.failures import copy_of, rebuild
from telegrad._agent.futures import Future
from telegrad._agent.peers import Peer, PeerState
from telegrad._core.interface import Link, Pending
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Body, Failure, Message, Reply
from telegrad.errors import RpcTimeoutError, TelegradError

if TYPE_CHECKING:
    from telegrad._agent.agent import Agent

_SILENT_SECONDS = 1.0  # after which a timeout says that the peer's host does not respond

MakeMessage = Callable[[int, Body], Message]
Notice = Callable[[Exception | None], None]


class Calls:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._ids = itertools.count(1)
        self.started = 0

    def start(
        self,
        peer: Peer,
        what: str,
        timeout: float,
        make_message: MakeMessage,
        value: Any = None,
        future: Future | None = None,
        notice: Notice | None = None,
    ) -> Pending:
        """Sends a request; a timeout of 0 means none.

        The outcome goes to ``future``, or ``notice`` is called with the error or None; else ``wait`` gives it.
        """
        agent = self._agent
        now = time.monotonic()
        deadline = now + timeout if timeout > 0 else math.inf
        link = peer.link or agent.link_to(peer, deadline)
        packed = agent.marshal.pack(peer, link, value, answered=True)
        then: Any = None
        if future is not None:
            then = _Completion(self, future)
        elif notice is not None:
            then = partial(self._notify, notice)
        self.started += 1
        call_id = next(self._ids)
        message = make_message(call_id, packed.body)
        pending = agent.plane.start_call(link, call_id, what, now, deadline, message, packed.stream, then, packed.lent)
        if future is not None:
            future._help = partial(self._help_future, pending, then)
        # The link may have broken after we took it; then no other thread knows of this call.  While the peer is not
        # known to be lost, the thread that closes the link has yet to fail its calls, and will give the reason.
        if (link.closed and peer.state is not PeerState.KNOWN) or agent.closing:
            agent.fail_calls(peer, link)
        return pending

    def wait(self, pending: Pending) -> Any:
        """The value of the answer, or its error raised, on the thread that called."""
        plane = self._agent.plane
        try:
            if not plane.wait(pending):
                plane.settle(pending, self.timed_out(pending))
        except BaseException:
            self.give_up(pending)
            raise
        return self._result(pending)

    def give_up(self, pending: Pending) -> None:
        """No thread will wait for it: an answer that came, or will come, is discarded.  May be called twice."""
        plane = self._agent.plane
        if not plane.settle(pending, TelegradError(f"{pending.what} was given up")):
            outcome = pending.take_outcome()
            if isinstance(outcome, Frame):
                plane.submit(self.discard, pending.link, outcome)

    def _help_future(self, pending: Pending, complete: _Completion, wait: Callable[[], Any]) -> Any:
        """Waits for a future.  An answer that is read meanwhile completes it on this thread, with no hop to another."""
        plane = self._agent.plane
        pending.waited_for = True
        try:
            if not plane.wait(pending):
                plane.settle(pending, self.timed_out(pending))
        finally:
            pending.waited_for = False
            # The thread that settles it sets the outcome first and looks at ``waited_for`` then: one sees the other.
            if pending.outcome is not None:
                complete(pending.link, pending)
        with plane.blocking():
            return wait()

    def _notify(self, notice: Notice, link: Link, pending: Pending) -> None:
        try:
            self._result(pending)
        except Exception as error:
            notice(error)
        else:
            notice(None)

    def _result(self, pending: Pending) -> Any:
        outcome = pending.take_outcome()
        if isinstance(outcome, Exception):
            raise copy_of(outcome)  # the traceback of the outcome itself would hold the pending call
        assert outcome is not None
        message = outcome.message
        if type(message) is Reply:
            body = message.body
            if body.tree is None and not body.buffers and not body.rrefs and body.extra is None:
                return None
            return self._open(pending.link, body, outcome.buffers)
        assert isinstance(message, Failure)
        try:
            details = self._open(pending.link, message.body, outcome.buffers)
        except TelegradError:
            details = None  # its type and text are enough
        raise rebuild(message, details, self._agent.options.allow_pickle, self._name_of(pending.link))

    def _open(self, link: Link, body: Body, streamed: list[Any]) -> Any:
        agent = self._agent
        value = agent.marshal.open(link, body, streamed)[0]
        if body.extra is not None and agent.answer_opened is not None:
            agent.answer_opened(link.peer_id, body.extra)
        return value

    def discard(self, link: Link, frame: Frame) -> None:
        """An answer that no call waits for."""
        self._agent.marshal.discard(link, frame.message.body)  # type: ignore[union-attr]

    def timed_out(self, pending: Pending) -> RpcTimeoutError:
        seconds = pending.deadline - pending.started
        return RpcTimeoutError(
            f"{pending.what} on worker {self._name_of(pending.link)!r} got no answer within {seconds:g} s. "
            f"{_alive(pending.link)}; give the call a longer timeout, or timeout=0 for none."
        )

    def _name_of(self, link: Link) -> str:
        return self._agent.peer(link.peer_id).name

    def __len__(self) -> int:
        return len(self._agent.plane.pending)

    def __repr__(self) -> str:
        pending = self._agent.plane.pending
        shown = ", ".join(f"{each.what} of {each.link.peer_id}" for each in pending[:5])
        return f"<Calls {len(pending)} waiting{': ' if shown else ''}{shown}>"


class _Completion:
    """Completes the future of a call, once, in the gradient mode of the thread that made the call."""

    __slots__ = ("_calls", "_future", "_grad_enabled", "_once")

    def __init__(self, calls: Calls, future: Future) -> None:
        self._calls = calls
        self._future = future
        self._grad_enabled = torch.is_grad_enabled()
        self._once = threading.Lock()

    def __call__(self, link: Link, pending: Pending) -> None:
        if not self._once.acquire(blocking=False):
            return  # another thread completes it
        future = self._future
        future._help = None
        same = torch.is_grad_enabled() is self._grad_enabled
        try:
            with nullcontext() if same else torch.set_grad_enabled(self._grad_enabled):
                value = self._calls._result(pending)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(value)


def _alive(link: Link) -> str:
    if link.host_is_silent(_SILENT_SECONDS):
        return "Its host does not respond at the moment"
    if link.pid is None:  # the host may have gone a moment ago
        return "Its host seems to be alive, so it is probably busy or stopped, and the call may still run there"
    return "Its process is alive, so it is busy or stopped, and the call may still run there"
