"""One worker's traffic: who the peers are, how they are reached, what is sent to them, and what happens when one is
lost.

It knows nothing of references or autograd: these register handlers for their messages, and two interceptors for the
tensors of outgoing and incoming values.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from telegrad._agent.calls import Calls
from telegrad._agent.coroutines import Coroutines
from telegrad._agent.failures import failure_of
from telegrad._agent.liveness import Liveness
from telegrad._agent.marshal import Marshal
from telegrad._agent.peers import Peer, PeerState, WorkerRecord
from telegrad._core.interface import DataPlane, Handler, How, Link
from telegrad._core.python.plane import PythonPlane
from telegrad._transport import shared_memory
from telegrad._transport.refusals import RefusalLog
from telegrad._wire import values
from telegrad._wire.frames import Frame
from telegrad._wire.messages import (
    Failure,
    Goodbye,
    InternalMessage,
    MemoryReadable,
    Reply,
    SegmentReleased,
)
from telegrad.errors import (
    HostUnreachableError,
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

MessageHandler = Callable[[int, Any, Callable[[], Any]], None]  # the sender, the message, what opens its value


@dataclass(frozen=True)
class AgentOptions:
    threads: int = 16
    timeout: float = 60.0
    heartbeat: float = 10.0
    allow_pickle: bool = True


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
        self.marshal = Marshal(self.peer, options.allow_pickle, me.shared_memory_token)
        self._handlers: dict[type, tuple[How, Handler]] = {}
        self.calls = Calls(self)
        self.wait = self.calls.wait
        self.give_up = self.calls.give_up
        self.start_call = self.calls.start
        for kind, act in (
            (SegmentReleased, self._segment_released),
            (MemoryReadable, self._memory_readable),
            (Goodbye, self._peer_left),
        ):
            self.on_request(kind, act, How.QUICK)
        for answer in (Reply, Failure):
            self.on_request(answer, self.calls.discard, How.ANSWER)
        self.plane: DataPlane = PythonPlane(
            me.name, options.threads, self._handlers, self, self.marshal.buffers.lend, on_thread_start
        )
        self.coroutines = Coroutines(me.name, self.plane, on_thread_start)
        self.blocking: Callable[[], AbstractContextManager[None]] = self.plane.blocking
        self.before_waiting = self.plane.before_waiting
        self.serves_here = self.plane.serves_here
        self.lost_handlers: list[Callable[[int], None]] = []
        self.now_and_then: Callable[[], float] = lambda: math.inf  # called at each tick; in how many seconds again?
        self.find_record: Callable[[str | int], WorkerRecord | None] = lambda to: None
        #: Told of what the answering side's interceptor said.
        self.answer_opened: Callable[[int, Any], None] | None = None
        self.closing = False
        self.served_calls = 0
        self._dial = dial
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._next_trim = 0.0
        self._refusals = RefusalLog(log, "refused messages")
        self.liveness = Liveness(options.heartbeat, self.link_broken)

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

    # --- reaching a peer ----------------------------------------------------------------------------------------

    def link_to(self, peer: Peer, deadline: float = math.inf) -> Link:
        """The link for our requests to a peer, dialled when first needed, again and again until the deadline.

        A peer that cannot be reached in time is not lost: the next call tries again.  A peer is lost when its host says
        that nothing listens there any more.
        """
        link = peer.link
        if link is not None:
            return link
        if peer.state is not PeerState.KNOWN:
            raise self._gone(peer)
        with self.blocking():
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
                self._begin(peer, link)
                break
            if peer.link is None:  # it broke at once, or the peer went meanwhile
                raise self._gone(peer)
            return peer.link
        finally:
            peer.dialling.release()

    def reach(self, peer: Peer, deadline: float = math.inf) -> Link | None:
        """As ``link_to``, for as long as it takes: a worker that is only busy will answer.  None: the worker is gone.

        A worker whose host does not answer for ``heartbeat`` seconds is lost, since nothing else watches over it.
        Raises ``RpcTimeoutError`` at the deadline.
        """
        while not self.closing:
            try:
                return self.link_to(peer, min(deadline, time.monotonic() + self.options.heartbeat))
            except RpcTimeoutError as error:
                if isinstance(error, HostUnreachableError):
                    self.peer_gone(peer, PeerState.LOST, str(error))
                elif time.monotonic() >= deadline:
                    raise
            except TelegradError as error:
                self.peer_gone(peer, PeerState.LOST, str(error))  # unless the loss is known
                return None
        return None

    def accepted(self, link: Link) -> None:
        """A peer has dialled us."""
        peer = self.peer(link.peer_id)
        peer.accepted.add(link)
        self._begin(peer, link)

    def _begin(self, peer: Peer, link: Link) -> None:
        """Starts to read a link, and tells the peer whether we can map its shared memory.

        Only on a Unix socket, where the kernel says which process is at the other end: what a peer on another host says
        of a process here would let it read the memory of that process.
        """
        if peer.state is not PeerState.KNOWN:  # lost meanwhile, for good; so the peer learns of it too
            peer.forget(link)
            link.close()
            return
        self.liveness.adopt(link)
        record = peer.record
        if link.pid is not None and shared_memory.can_read(
            link.pid, record.shared_memory_fd, record.shared_memory_token
        ):
            link.send(MemoryReadable())
        self.plane.start_reading(link)

    def loopback(self) -> Link:
        """A link of this worker to itself."""
        here, there = self.plane.loopback(self.me.worker_id)
        self.accepted(there)
        return here

    # --- what arrives -------------------------------------------------------------------------------------------

    def on_request(self, kind: type, handler: Handler, how: How = How.MESSAGE) -> Handler | None:
        """Registers what handles a message; returns what handled it before."""
        before = self._handlers.get(kind)
        self._handlers[kind] = (how, handler)
        return before[1] if before is not None else None

    def on_message(self, kind: type, handler: MessageHandler, quick: bool = False) -> None:
        """Registers what handles an internal message.  ``quick``: it waits for nothing, so it may run on the thread
        that reads the connection."""
        has_body = "body" in kind.__struct_fields__  # type: ignore[attr-defined]

        def handle(link: Link, frame: Frame) -> None:
            opened = not has_body

            def open_value() -> Any:
                nonlocal opened
                opened = True
                return self.marshal.open(link, frame.message.body, frame.buffers)[0]  # type: ignore[union-attr]

            try:
                handler(link.peer_id, frame.message, open_value)
            except TelegradError as error:  # the peer says what it must not, or what makes no sense
                name = self.peer(link.peer_id).name
                self._refusals.add(f"a {kind.__name__} from worker {name!r}", str(error))
            finally:
                if not opened:
                    self.marshal.discard(link, frame.message.body)  # type: ignore[union-attr]

        self.on_request(kind, handle, How.QUICK if quick else How.MESSAGE)

    def _segment_released(self, link: Link, frame: Frame) -> None:
        self.marshal.segment_released(link, frame.message)  # type: ignore[arg-type]

    def _memory_readable(self, link: Link, frame: Frame) -> None:
        link.shares_memory = link.pid is not None

    # --- what goes out ------------------------------------------------------------------------------------------

    def send_message(
        self,
        to: int,
        message: InternalMessage,
        value: Any = None,
        tensors: values.Bundle | None = None,
        dials: bool = True,
    ) -> bool:
        """Sends an internal message.  False: the worker is gone.

        If there is no link yet, the calling thread dials; if it must not (``dials``), another does.
        """
        peer = self.peer(to)
        link = peer.link
        if link is None:
            if peer.state is not PeerState.KNOWN:
                return False
            if not dials:
                self._send_when_reached(peer, (message, value, tensors))
                return True
            link = self.reach(peer)
            if link is None:
                return False
        if value is None and tensors is None:
            link.send(message)
        else:
            marshal = self.marshal
            packed = marshal.close(link, tensors) if tensors is not None else marshal.pack(peer, link, value)
            link.send(msgspec.structs.replace(message, body=packed.body), packed.stream)
        return peer.state is PeerState.KNOWN

    def _send_when_reached(self, peer: Peer, message: tuple[InternalMessage, Any, values.Bundle | None]) -> None:
        """To dial may take long, so one thread does it for all messages."""
        with self._lock:
            peer.unsent.append(message)
            if len(peer.unsent) > 1:
                return
        self.submit(self._send_unsent, peer)

    def _send_unsent(self, peer: Peer) -> None:
        try:
            self.reach(peer)
        finally:
            with self._lock:
                messages, peer.unsent = peer.unsent, []
        for message, value, tensors in messages:
            self.send_message(peer.id, message, value, tensors)

    def tensors_for(self, to: int, recorded: bool) -> values.Bundle:
        """Collects tensors for ``send_message``; ``recorded``: autograd follows them.  Raises WorkerLostError."""
        peer = self.peer(to)
        link = peer.link or self.reach(peer)
        if link is None:
            raise self._gone(peer)
        return self.marshal.bundle(peer, link, recorded)

    def answer(self, link: Link, call_id: int, value: Any) -> None:
        """Sends a result; one that cannot be sent becomes an error of the caller's."""
        if value is None:
            link.send(Reply(call_id))
            return
        try:
            packed = self.marshal.pack(self.peer(link.peer_id), link, value)
        except SerializationError:
            raise
        except BaseException as error:  # even a SystemExit from a value's __reduce__
            self.answer_failure(link, call_id, error)
            return
        link.send(Reply(call_id, packed.body), packed.stream)

    def answer_failure(self, link: Link, call_id: int, error: BaseException) -> None:
        peer = self.peer(link.peer_id)
        failure, packed = failure_of(
            error,
            call_id,
            self.me.name,
            lambda value: self.marshal.pack(peer, link, value),
            tells_where=self.options.allow_pickle,
        )
        link.send(failure, packed.stream)

    # --- threads ------------------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs it on a thread of this worker that may block."""
        self.plane.submit(_apply, function, args)

    def tick_within(self, seconds: float) -> None:
        self.plane.wake_before(time.monotonic() + seconds)

    # --- failure ------------------------------------------------------------------------------------------------

    def link_broken(self, link: Link, reason: str) -> None:
        peer = self._peers.get(link.peer_id)
        if peer is None or self.closing:
            return
        if not link.dialled and not link.heard and peer.state is PeerState.KNOWN:
            # The peer died, or gave up before its first message because this worker was too busy to welcome it: one
            # that refuses a connection, or whose host does not answer, is lost.
            peer.forget(link)
            self.submit(self._find_out, peer)
            return
        if peer.state is PeerState.KNOWN:
            self.peer_gone(peer, PeerState.LOST, reason)
        peer.forget(link)
        self.fail_calls(peer, link)

    def _find_out(self, peer: Peer) -> None:
        with contextlib.suppress(RpcTimeoutError):  # it is busy
            self.reach(peer, time.monotonic() + self.options.heartbeat)

    def _peer_left(self, link: Link, _: Frame) -> None:
        """The last message on this link; answers may still be on their way on another.

        Handled at once: the end of the connection may be seen next, and is no loss then."""
        peer = self.peer(link.peer_id)
        self.peer_gone(peer, PeerState.LEFT, "")
        peer.forget(link)
        link.close()
        self.fail_calls(peer, link)

    def peer_gone(self, peer: Peer, state: PeerState, reason: str) -> None:
        """A peer is lost, or has left: settles everything that waits for it.  Done once."""
        with self._lock:
            if peer.state is not PeerState.KNOWN:
                return
            peer.state, peer.reason = state, reason
        if state is PeerState.LOST:
            log.warning("worker %r: worker %r is lost: %s", self.me.name, peer.name, reason)
            for link in peer.links:
                peer.forget(link)
                link.close()
                self.fail_calls(peer, link)
        for handler in self.lost_handlers if not self.closing else ():
            self.submit(handler, peer.id)

    def fail_calls(self, peer: Peer, link: Link) -> None:
        """Ends the calls that will not be answered, since their link has ended."""
        for pending in list(link.pending.values()):
            self.plane.settle(pending, self._gone(peer, pending.what))

    def _gone(self, peer: Peer, unanswered: str = "") -> WorkerLostError:
        verb = "has shut down" if peer.state is PeerState.LEFT else "is lost"
        reason = f" ({peer.reason})" if peer.reason else ""
        what = f" and will not answer {unanswered}" if unanswered else " and cannot be called"
        return WorkerLostError(f"worker {peer.name!r} {verb}{reason}{what}")

    def tick(self, now: float) -> float:
        """Deadlines and dead peers; returns when it wants to be called again."""
        soonest = now + _TICK_SECONDS
        for pending in self.plane.pending:
            if pending.deadline <= now:
                self.plane.settle(pending, self.calls.timed_out(pending))
            else:
                soonest = min(soonest, pending.deadline)
        self.marshal.give_back()
        soonest = min(soonest, now + self.now_and_then())
        others = [peer for peer in self.peers if peer.id != self.me.worker_id]
        self.liveness.look(others)
        if now > self._next_trim:
            self._next_trim = now + _TRIM_SECONDS
            self.marshal.trim()
        return soonest

    # --- the end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.plane.start()

    def say_goodbye(self) -> None:
        """Tells all peers, but does not wait long for one that reads nothing."""
        self.closing = True
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for peer in self.peers:
            if peer.id != self.me.worker_id:
                for link in peer.links:
                    link.send_last(Goodbye(), deadline)

    def close(self, timeout: float = 5.0) -> None:
        self.closing = True
        for peer in self.peers:
            self.peer_gone(peer, PeerState.LEFT, "this worker has shut down")
            for link in peer.links:
                link.close()
                self.fail_calls(peer, link)
        self.coroutines.close(timeout)
        self.plane.close(timeout)
        self.liveness.close()
        self.marshal.segments.close()

    def __repr__(self) -> str:
        return f"<Agent {self.me.name!r}: {self.calls!r}, {self.plane!r}, {self.peers!r}>"


def _apply(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    function(*args)
