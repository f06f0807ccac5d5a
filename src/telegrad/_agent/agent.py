"""The agent of one worker: drives links, pool, calls and mail.

It knows nothing of references or autograd.  Whoever composes the worker hands it a table of handlers, one per message
type, and two interceptors, one for the tensors of a body going out and one for those of a body coming in.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from telegrad._agent.backlog import UserCall, Work
from telegrad._agent.calls import Calls, Waiting
from telegrad._agent.clock import Clock
from telegrad._agent.coroutines import Coroutines
from telegrad._agent.failures import failure_of
from telegrad._agent.futures import Future
from telegrad._agent.link import Link
from telegrad._agent.liveness import Liveness
from telegrad._agent.mail import Mail
from telegrad._agent.marshal import Marshal
from telegrad._agent.outcomes import Outcomes, Ticket
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._agent.pool import Pool
from telegrad._agent.spin import CORES
from telegrad._transport import shared_memory
from telegrad._wire import values
from telegrad._wire.frames import Frame
from telegrad._wire.messages import (
    FROM_DIALLED,
    FROM_DIALLER,
    Body,
    Call,
    Failure,
    Goodbye,
    LaneOpen,
    Message,
    Note,
    NoteAck,
    NotePayload,
    RemoteCall,
    Reply,
    Taken,
)
from telegrad.errors import (
    HostUnreachableError,
    ProtocolError,
    RpcTimeoutError,
    SerializationError,
    TelegradError,
    UnknownWorkerError,
    WorkerLostError,
)

log = logging.getLogger("telegrad.agent")

_TRIM_SECONDS = 30.0
_GOODBYE_SECONDS = 2.0
_CONNECT_SECONDS = 60.0  # for a call without a deadline
_SHORTEST_DIAL = 2.0  # a call with a shorter timeout connects too, or such calls would never reach their worker
_TICK_SECONDS = 1.0

Handler = Callable[[Link, Frame], None]
MessageHandler = Callable[[int, Any, Callable[[], Any]], None]  # the sender, the message, what opens its value


@dataclass(frozen=True)
class AgentOptions:
    threads: int = 16
    timeout: float = 60.0
    heartbeat: float = 10.0
    allow_pickle: bool = True
    note_pause: float = 0.5  # before an unacknowledged note is sent again the first time


class Agent:
    def __init__(
        self,
        me: WorkerRecord,
        options: AgentOptions,
        dial: Callable[[Agent, Peer, float], Link],
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = me
        self.options = options
        self.pool = Pool(me.name, options.threads, on_thread_start)
        self.coroutines = Coroutines(me.name, self.pool, on_thread_start)
        self.calls: Calls[Ticket] = Calls(newest=4 * CORES)
        self.marshal = Marshal(self.peer, options.allow_pickle, me.lane_word)
        self.outcomes = Outcomes(
            self.pool, self.calls, self._open, self.marshal.discard, lambda to: self.peer(to).name, options.allow_pickle
        )
        self.wait = self.outcomes.wait
        self._help_future = self.outcomes.help_future
        self.handlers: dict[type, Handler] = {}
        self.lost_handlers: list[Callable[[int], None]] = []
        self.now_and_then: Callable[[], float] = lambda: math.inf  # called at each tick; in how many seconds again?
        self.find_record: Callable[[str | int], WorkerRecord | None] = lambda to: None
        self.answer_opened: Callable[[int, Any], None] | None = (
            None  # told of what the answering side's interceptor said
        )
        self.closing = False
        self.started_calls = 0
        self.served_calls = 0
        self._lent: dict[int, tuple[Link, Any]] = {}  # references that a call took along, until its answer comes
        self._dial = dial
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._next_trim = 0.0
        self.liveness = Liveness(options.heartbeat, self.link_broken)
        self._clock = Clock(me.name, self._tick)
        self.mail = Mail(self.peer, self.link_to, self.marshal, self.pool, self._clock, options.note_pause)

    # --- peers --------------------------------------------------------------------------------------------------

    def add_peer(self, record: WorkerRecord, route: values.Route) -> Peer:
        with self._lock:
            peer = self._peers.get(record.worker_id)
            if peer is None:
                peer = self._peers[record.worker_id] = Peer(record, route)
                self._names[record.name] = peer
            return peer

    def peer(self, to: int | str) -> Peer:
        """The peer of that name or id."""
        peer = self._names.get(to) if isinstance(to, str) else self._peers.get(to)
        if peer is None:
            record = self.find_record(to)
            if record is not None:
                return self._peers[record.worker_id]
            known = ", ".join(sorted(self._names))
            raise UnknownWorkerError(f"no worker {to!r} in this job; it has {known}")
        return peer

    def knows(self, worker_id: int) -> bool:
        return worker_id in self._peers

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers.values())

    def link_to(self, peer: Peer, deadline: float = math.inf) -> Link:
        """The link for our calls to a peer, dialled when first needed, again and again until the deadline.

        A peer that cannot be reached in time is not lost: the next call tries again.  A peer is lost when its host says
        that nothing listens there any more.
        """
        link = peer.link
        if link is not None:
            return link
        if peer.state is not PeerState.KNOWN:
            raise self._gone(peer)
        with self.pool.blocked() if self.pool.runs_here() else nullcontext():
            now = time.monotonic()
            return self._dial_until(peer, min(max(deadline, now + _SHORTEST_DIAL), now + _CONNECT_SECONDS))

    def _dial_until(self, peer: Peer, deadline: float) -> Link:
        started, pause = time.monotonic(), 0.05
        if not peer.dialling.acquire(timeout=max(deadline - started, 0.0)):
            raise RpcTimeoutError(f"worker {peer.name!r}: no connection within {deadline - started:.1f} s")
        try:
            while peer.state is PeerState.KNOWN and peer.link is None:
                try:
                    link = self._dial(self, peer, max(deadline - time.monotonic(), 0.001))
                except (ConnectionRefusedError, FileNotFoundError) as error:
                    self.peer_gone(peer, PeerState.LOST, f"cannot connect to it: {error}")
                    raise self._gone(peer) from error
                except (ConnectionError, RpcTimeoutError) as error:
                    if time.monotonic() + pause >= deadline:
                        kind = HostUnreachableError if isinstance(error, HostUnreachableError) else RpcTimeoutError
                        raise kind(
                            f"worker {peer.name!r}: no connection within {deadline - started:.1f} s: {error}"
                        ) from error
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
                    continue
                peer.dialled(link)
                self._adopt(peer, link)
                break
            if peer.link is None:  # it broke at once, or the peer went meanwhile
                raise self._gone(peer)
            return peer.link
        finally:
            peer.dialling.release()

    def accepted(self, link: Link) -> None:
        """A peer has dialled us."""
        peer = self.peer(link.peer_id)
        peer.accepted.add(link)
        self._adopt(peer, link)

    def _adopt(self, peer: Peer, link: Link) -> None:
        """Tells the peer when we can read its segments, so that it may lay big buffers there for us.

        Only on a Unix socket, where the kernel says which process is at the other end: what a peer on another host says
        of a process here would let it read the memory of that process.
        """
        self.liveness.adopt(link)
        record = peer.record
        if link.pid is not None and shared_memory.can_read(link.pid, record.lane_fd, record.lane_word):
            link.send(LaneOpen())

    def _gone(self, peer: Peer, unanswered: str = "") -> WorkerLostError:
        verb = "has shut down" if peer.state is PeerState.LEFT else "is lost"
        reason = f" ({peer.reason})" if peer.reason else ""
        what = f" and will not answer {unanswered}" if unanswered else " and cannot be called"
        return WorkerLostError(f"worker {peer.name!r} {verb}{reason}{what}")

    # --- calls --------------------------------------------------------------------------------------------------

    def start_call(
        self,
        peer: Peer,
        what: str,
        timeout: float,
        message: Callable[[int, Body], Message],
        value: Any = None,
        future: Future | None = None,
        notice: Callable[[Exception | None], None] | None = None,
    ) -> Waiting[Ticket]:
        """Sends a request.  ``message`` makes it from its id and body; ``notice`` is told of the outcome."""
        now = time.monotonic()
        link = peer.link or self.link_to(peer, now + timeout if timeout > 0 else math.inf)
        parcel = self.marshal.pack(peer, link, value, answered=True)
        ticket = Ticket(link, future, notice)
        try:
            waiting = self.calls.start(link.peer_id, what, now, timeout, ticket)
            self.started_calls += 1
            if parcel.lent:
                self._lent[waiting.call_id] = link, parcel.lent
            self._clock.wake_before(waiting.deadline)
            if future is not None:
                future._help = partial(self._help_future, waiting)
            link.send(message(waiting.call_id, parcel.body), parcel.stream, deadline=waiting.deadline)
        except BaseException:
            self._forget_call(peer, ticket)
            raise
        if peer.link is not link or self.closing:  # it went between our look and our send
            self._fail_calls(peer, link)
        return waiting

    def _forget_call(self, peer: Peer, ticket: Ticket) -> None:
        """A Ctrl-C, say, came before it was sent: no answer will come, and a shutdown must not wait for one.

        Found by its ticket, for its id may not have reached the caller.
        """
        for waiting in self.calls.lost(peer.id, lambda other: other is ticket):
            self._lent.pop(waiting.call_id, None)

    def give_up(self, waiting: Waiting[Ticket]) -> None:
        """Nobody will wait for it."""
        self.outcomes.give_up(waiting)

    def _open(self, link: Link, body: Body, streamed: list[Any]) -> Any:
        value = self.marshal.open(link, body, streamed)[0]
        if body.extra is not None and self.answer_opened is not None:
            self.answer_opened(link.peer_id, body.extra)
        return value

    # --- what comes in ------------------------------------------------------------------------------------------

    def arrived(self, link: Link, frames: Iterable[Frame]) -> Sequence[Work]:
        """Settles the calls that wait, at once; what may block or run user code is left to the caller."""
        work: list[Work] = []
        allowed = FROM_DIALLED if link.dialled else FROM_DIALLER
        for frame in frames:
            message = frame.message
            kind = type(message)
            if kind not in allowed:
                dialler = "this worker" if link.dialled else "the peer"
                raise ProtocolError(f"it sent a {kind.__name__} on a connection that {dialler} made")
            if kind is Reply or kind is Failure:
                asked = self.calls.find(message.call_id)  # type: ignore[union-attr]
                if asked is not None and asked.ticket.link is not link:
                    raise ProtocolError("it answered a call that was made to another worker")
                waiting = self.calls.finish(message.call_id)  # type: ignore[union-attr]
                if self._lent:
                    self._lent.pop(message.call_id, None)  # type: ignore[union-attr]
                if waiting is None:
                    work.append((self.outcomes.discard, link, frame))
                elif (rest := self.outcomes.settle(waiting.ticket, frame)) is not None:
                    work.append(rest)
            elif kind is Taken:
                self.marshal.taken(link, message)  # type: ignore[arg-type]
            elif kind is NoteAck:
                self.mail.acknowledged(link, message)  # type: ignore[arg-type]
            elif kind is LaneOpen:
                link.lane_open = link.pid is not None
            elif kind is Goodbye:
                self._peer_left(link)  # at once: the end of the connection may be seen next, and is no loss then
            elif kind is Call or kind is RemoteCall:
                link.brings_calls = True
                self.served_calls += 1
                work.append(UserCall((self.handlers[kind], link, frame)))
            elif kind is Note:
                if type(message.payload) in self.mail.light:  # type: ignore[union-attr]
                    self.mail.take(link, frame)
                else:
                    work.append((self.mail.take, link, frame))
            else:
                work.append((self.handlers[kind], link, frame))
        return work

    # --- answers ------------------------------------------------------------------------------------------------

    def answer(self, link: Link, call_id: int, value: Any) -> None:
        """Sends a result; one that cannot be sent becomes a clear error over there."""
        if value is None:
            link.send(Reply(call_id), more=True)
            return
        try:
            parcel = self.marshal.pack(self.peer(link.peer_id), link, value)
        except SerializationError as error:
            where = f"the result{''.join(error.path)}"
            self.answer_failure(link, call_id, SerializationError(f"{where} cannot be sent back: {error}"))
            return
        except BaseException as error:  # even a SystemExit from a value's __reduce__
            self.answer_failure(link, call_id, error)
            return
        link.send(Reply(call_id, parcel.body), parcel.stream, more=True)

    def answer_failure(self, link: Link, call_id: int, error: BaseException) -> None:
        peer = self.peer(link.peer_id)
        failure, parcel = failure_of(
            error,
            call_id,
            self.me.name,
            lambda value: self.marshal.pack(peer, link, value),
            tells_where=self.options.allow_pickle,
        )
        link.send(failure, parcel.stream)

    # --- internal messages, and threads -------------------------------------------------------------------------

    def on_message(self, kind: type, handler: MessageHandler, quick: bool = False) -> None:
        """Registers what handles an internal message.  ``quick``: it waits for nothing, so it may run on the thread
        that reads the connection."""
        self.mail.handlers[kind] = handler
        if quick:
            self.mail.light.add(kind)

    def send_message(
        self, to: int, message: NotePayload, value: Any = None, tensors: values.Bundle | None = None
    ) -> bool:
        """Sends an internal message, in order with all others to that worker.  False: the worker is gone."""
        return self.mail.post(to, message, value, tensors)

    def tensors_for(self, to: int, recorded: bool) -> values.Bundle:
        """Collects tensors for ``send_message``; ``recorded``: autograd follows them.  Raises WorkerLostError."""
        return self.mail.bundle(to, recorded)

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Runs it on a thread of this worker that may block."""
        self.pool.submit((lambda function, args: function(*args), function, args))

    def serves_here(self) -> bool:
        """Whether the calling thread is one of this worker's own, which runs something for another worker."""
        return self.pool.runs_here()

    def before_waiting(self, act: Callable[[], None] | None) -> Callable[[], None] | None:
        """Sets what the calling thread does before it waits for another worker; returns what was set before."""
        return self.pool.before_waiting(act)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a wait for another worker: other threads take over what the calling thread would have done next."""
        self.pool.hand_over()
        if not self.pool.runs_here():
            yield
            return
        with self.pool.blocked():
            yield

    # --- waiting for more than an answer ------------------------------------------------------------------------

    def attend(self, worker: int, done: Callable[[], bool]) -> None:
        """Handles, on the calling thread, what that worker sends, for as long as one thing comes soon after the other
        and it is not ``done``.  What runs users' functions is still left to the pool."""
        for link in list(self.peer(worker).accepted):
            try:
                if link.begin_attending():
                    while not done() and (work := link.take(done)) is not None:
                        self.pool.run_here(work, link.end_attending)
                    link.end_attending()
            except BaseException:
                link.end_attending()  # a Ctrl-C may have come right after the beginning, or in the end
                raise

    def tick_within(self, seconds: float) -> None:
        self._clock.wake_before(time.monotonic() + seconds)

    # --- failure ------------------------------------------------------------------------------------------------

    def link_broken(self, link: Link, reason: str) -> None:
        peer = self._peers.get(link.peer_id)
        if peer is None or self.closing:
            return
        if not link.dialled and not link.heard and peer.state is PeerState.KNOWN:
            # The peer died, or gave up before its first message, because this worker was too busy to welcome it.
            peer.forget(link)
            self.pool.submit((lambda peer, _: self._find_out(peer), peer, None))
            return
        if peer.state is PeerState.KNOWN:
            self.peer_gone(peer, PeerState.LOST, reason)
        peer.forget(link)
        self._fail_calls(peer, link)

    def _find_out(self, peer: Peer) -> None:
        """Whether a peer is there: one that refuses a connection, or whose host does not answer, is lost."""
        try:
            self.link_to(peer, time.monotonic() + self.options.heartbeat)
        except HostUnreachableError as error:
            self.peer_gone(peer, PeerState.LOST, str(error))
        except TelegradError:
            pass  # it is busy, or the loss was noted

    def _peer_left(self, link: Link) -> None:
        """The last message on this link; answers may still be on their way on another."""
        peer = self.peer(link.peer_id)
        self.peer_gone(peer, PeerState.LEFT, "")
        peer.forget(link)
        link.close()
        self._fail_calls(peer, link)

    def peer_gone(self, peer: Peer, state: PeerState, reason: str) -> None:
        """A peer is lost, or has left: settle everything that waits for it.  Done once."""
        with self._lock:
            if peer.state is not PeerState.KNOWN:
                return
            peer.state, peer.reason = state, reason
        self.mail.lost(peer.id)
        if state is PeerState.LOST:
            log.warning("worker %r: worker %r is lost: %s", self.me.name, peer.name, reason)
            for link in peer.links:
                peer.forget(link)
                link.close()
            self._fail_calls(peer)
        for handler in self.lost_handlers if not self.closing else ():
            self.pool.submit((lambda act, worker: act(worker), handler, peer.id))

    def _fail_calls(self, peer: Peer, link: Link | None = None) -> None:
        """Ends the calls that this peer will never answer: all, or those on one link."""
        for call_id, (way, _) in list(self._lent.items()):
            if way is link or (link is None and way.peer_id == peer.id):
                self._lent.pop(call_id, None)
        for waiting in self.calls.lost(peer.id, lambda ticket: link is None or ticket.link is link):
            work = self.outcomes.settle(waiting.ticket, self._gone(peer, waiting.what))
            if work is not None and self.closing:
                self.outcomes.complete(waiting.ticket, None)  # the pool runs nothing any more
            elif work is not None:
                self.pool.submit(work)

    def _tick(self, now: float) -> float:
        """Deadlines, repeats and dead peers; returns when it wants to be called again."""
        for waiting in self.calls.expire(now):
            work = self.outcomes.settle(waiting.ticket, self.outcomes.timed_out(waiting))
            if work is not None:
                self.pool.submit(work)
        self.mail.tick(now)
        self.marshal.give_back()
        again_in = self.now_and_then()
        others = [peer for peer in self.peers if peer.id != self.me.worker_id]
        self.liveness.look(others)
        for link in [link for peer in others for link in peer.links if link.has_posted()]:
            self.pool.submit((lambda link, _: link.flush(0.0), link, None))
        if now > self._next_trim:
            self._next_trim = now + _TRIM_SECONDS
            self.marshal.trim()
        pause = _TICK_SECONDS
        if self.mail.unacknowledged:
            pause = min(pause, self.options.note_pause)
        pause = min(pause, again_in)
        return min(now + pause, self.mail.acks_due, self.calls.next_deadline())

    # --- the end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._clock.start()

    def say_goodbye(self) -> None:
        """Tells all peers, but does not wait long for one that reads nothing."""
        self.closing = True
        links = [link for peer in self.peers if peer.id != self.me.worker_id for link in peer.links]
        _say_goodbye(links, time.monotonic() + _GOODBYE_SECONDS)

    def close(self, timeout: float = 5.0) -> None:
        self.closing = True
        self._clock.close()
        for peer in self.peers:
            for link in peer.links:
                link.close()
            self.peer_gone(peer, PeerState.LEFT, "this worker has shut down")
            self._fail_calls(peer)
        self.coroutines.close(timeout)
        self.pool.close(timeout)
        self.liveness.close()
        self.marshal.shelf.close()
        for act, ticket, _ in self.pool.drain():
            if act == self.outcomes.complete:  # it came in the last moment, and somebody may wait for the future
                self.outcomes.complete(ticket, None)

    def __repr__(self) -> str:
        return f"<Agent {self.me.name!r}: {self.calls!r}, {self.pool!r}, {self.peers!r}>"


def _say_goodbye(links: list[Link], deadline: float) -> None:
    for link in links:
        link.post(Goodbye())
        link.flush(deadline)
