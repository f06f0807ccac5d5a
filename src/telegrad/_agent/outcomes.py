"""What becomes of a call: its outcome, and the thread or the future that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from telegrad._agent.backlog import Work
from telegrad._agent.calls import Calls, Waiting
from telegrad._agent.failures import copy_of, rebuild
from telegrad._agent.futures import Future
from telegrad._agent.link import Link
from telegrad._agent.pool import Pool
from telegrad._agent.spin import CORES
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Body, Failure, Reply
from telegrad.errors import RpcTimeoutError, TelegradError

_AS_IT_IS = nullcontext()
_TOGETHER = 0.001  # seconds between calls that were made together
_MOMENT = 1.0  # seconds: much longer than what it waits for takes


class Ticket:
    """Where the outcome of one call arrives.  Plain slots and a lock: a ``threading.Event`` costs 3 us more a call."""

    __slots__ = ("future", "gate", "grad_enabled", "helped", "link", "notice", "outcome", "used")

    def __init__(
        self, link: Link, future: Future | None, notice: Callable[[Exception | None], None] | None = None
    ) -> None:
        self.link = link
        self.future = future
        self.notice = notice  # told of the outcome, in place of a future: something quick, of ours
        self.grad_enabled = future is None or torch.is_grad_enabled()  # a future is completed by another thread
        self.outcome: Frame | TelegradError | None = None
        self.used = False  # the outcome was looked at, or is not wanted
        self.helped = False  # the thread that waits for the future will complete it
        self.gate = threading.Lock()
        self.gate.acquire()

    def settled(self) -> bool:
        return self.outcome is not None


class Outcomes:
    """Hands outcomes to those who wait.  ``open_body`` and ``discard_body`` are the agent's way to read an answer, or
    to do without it."""

    def __init__(
        self,
        pool: Pool,
        calls: Calls[Ticket],
        open_body: Callable[[Link, Body, list[Any]], Any],
        discard_body: Callable[[Link, Body], None],
        name_of: Callable[[int], str],
        allow_pickle: bool,
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._open = open_body
        self._discard_body = discard_body
        self._name_of = name_of
        self._allow_pickle = allow_pickle

    def wait(self, waiting: Waiting[Ticket]) -> Any:
        """The value of a call's answer, or its error, on the thread that called."""
        try:
            self._wait(waiting)
        except BaseException:
            self.give_up(waiting)
            raise
        return self._result(waiting.ticket)

    def give_up(self, waiting: Waiting[Ticket]) -> None:
        """The waiting thread was interrupted, or cannot wait: an answer that came, or will come, is discarded."""
        ticket = waiting.ticket
        if self._calls.finish(waiting.call_id) is not None or ticket.used:
            return
        ticket.used = True
        if ticket.outcome is None:
            ticket.gate.acquire(timeout=_MOMENT)  # somebody is settling it
        if isinstance(ticket.outcome, Frame):
            self._pool.submit((self.discard, ticket.link, ticket.outcome))

    def _wait(self, waiting: Waiting[Ticket]) -> None:
        ticket = waiting.ticket
        self._help(waiting)
        if ticket.outcome is None:
            self._block(ticket, waiting.deadline)
            if ticket.outcome is None and self._calls.finish(waiting.call_id) is not None:
                ticket.used = True
                raise self.timed_out(waiting)
        if ticket.outcome is None:
            ticket.gate.acquire()  # somebody is settling it at this moment

    def _help(self, waiting: Waiting[Ticket]) -> None:
        ticket, pool = waiting.ticket, self._pool
        pool.hand_over()
        # Where others work for us on every core, one of them may wait for this one.  Those that were asked long ago may
        # well be asleep.
        look = not self._calls.are_for_many(CORES, waiting.started - _TOGETHER)
        if pool.runs_here():
            with pool.blocked():
                ticket.link.help_read(ticket.settled, waiting.deadline, look)
        else:
            ticket.link.help_read(ticket.settled, waiting.deadline, look)

    def help_future(self, waiting: Waiting[Ticket], wait: Callable[[], Any]) -> Any:
        """As ``_help``, then waits for the future in a way that the pool can see.

        An answer that is read meanwhile completes the future here, with no hop to another thread.
        """
        ticket = waiting.ticket
        ticket.helped = True
        try:
            self._help(waiting)
        finally:
            ticket.helped = False
            # Whoever settles it sets the outcome first and looks at ``helped`` then: one of the two sees the other.
            if ticket.outcome is not None:
                self.complete(ticket, None)
        if self._pool.runs_here():
            with self._pool.blocked():
                return wait()
        return wait()

    def _block(self, ticket: Ticket, deadline: float) -> None:
        timeout = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if self._pool.runs_here():
            with self._pool.blocked():
                ticket.gate.acquire(timeout=timeout)
        else:
            ticket.gate.acquire(timeout=timeout)

    def _result(self, ticket: Ticket) -> Any:
        ticket.used = True
        outcome = ticket.outcome
        if isinstance(outcome, TelegradError):
            raise copy_of(outcome)  # the ticket holds the outcome, and a traceback would hold the ticket
        assert outcome is not None
        message = outcome.message
        if type(message) is Reply:
            body = message.body
            if body.tree is None and not body.buffers and not body.rrefs:
                return None
            return self._open(ticket.link, body, outcome.buffers)
        assert isinstance(message, Failure)
        try:
            details = self._open(ticket.link, message.body, outcome.buffers)
        except TelegradError:
            details = None  # its type and text are enough
        raise rebuild(message, details, self._allow_pickle, self._name_of(ticket.link.peer_id))

    def timed_out(self, waiting: Waiting[Ticket]) -> RpcTimeoutError:
        seconds = waiting.deadline - waiting.started
        return RpcTimeoutError(
            f"{waiting.what} on worker {self._name_of(waiting.to)!r} got no answer within {seconds:g} s. "
            f"{_alive(waiting.ticket.link)}; give the call a longer timeout, or timeout=0 for none."
        )

    def complete(self, ticket: Ticket, _: Any) -> None:
        """Settles a future, on a thread that may run its callbacks."""
        if ticket.notice is not None:
            self._tell(ticket, ticket.notice)
            return
        future = ticket.future
        if future is None or not ticket.gate.acquire(blocking=False):
            return  # another thread completes it
        future._help = None
        try:
            as_is = torch.is_grad_enabled() is ticket.grad_enabled
            with _AS_IT_IS if as_is else torch.set_grad_enabled(ticket.grad_enabled):
                value = self._result(ticket)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    def settle(self, ticket: Ticket, outcome: Frame | TelegradError) -> Work | None:
        """Hands an outcome over; what is left to do when a future with callbacks waits for it."""
        ticket.outcome = outcome
        ticket.gate.release()
        if ticket.notice is not None:
            if type(outcome) is Frame and type(outcome.message) is Reply:
                ticket.notice(None)
                return None
            return (self.complete, ticket, None)
        return (self.complete, ticket, None) if ticket.future is not None and not ticket.helped else None

    def _tell(self, ticket: Ticket, notice: Callable[[Exception | None], None]) -> None:
        try:
            self._result(ticket)
        except Exception as error:
            notice(error)
        else:
            notice(None)

    def discard(self, link: Link, frame: Frame) -> None:
        """An answer that nobody waits for any more."""
        message = frame.message
        assert isinstance(message, Reply | Failure)
        self._discard_body(link, message.body)


def _alive(link: Link) -> str:
    if link.host_is_silent(_MOMENT):
        return "Its host does not respond at the moment"
    if link.pid is None:  # the host may have gone a moment ago
        return "Its host seems to be alive, so it is probably busy or stopped, and the call may still run there"
    return "Its process is alive, so it is busy or stopped, and the call may still run there"
