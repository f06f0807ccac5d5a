"""Notes to and from the other workers: internal messages that take effect exactly once (``notes``)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from telegrad._agent.clock import Clock
from telegrad._agent.link import Link
from telegrad._agent.marshal import Marshal
from telegrad._agent.notes import Inbox, Outbox
from telegrad._agent.peers import Peer, PeerState
from telegrad._agent.pool import Pool
from telegrad._transport.refusals import RefusalLog
from telegrad._wire import values
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Note, NoteAck, NotePayload
from telegrad.errors import TelegradError, WorkerLostError

log = logging.getLogger("telegrad.agent")

_ACK_SECONDS = 0.1  # how long an acknowledgement waits for a note that it can ride on; well below the first pause
_SOON_SECONDS = 0.05  # how long a note waits at most for a message that it can ride on

NoteHandler = Callable[[int, Any, Callable[[], Any]], None]  # the sender, the payload, what opens the body's value


class Mail:
    """``peer`` and ``link_to`` are the agent's; ``first_pause``: before an unacknowledged note is sent again."""

    def __init__(
        self,
        peer: Callable[[int], Peer],
        link_to: Callable[[Peer], Link],
        bodies: Marshal,
        pool: Pool,
        clock: Clock,
        first_pause: float,
    ) -> None:
        self.handlers: dict[type, NoteHandler] = {}
        self.light: set[type] = set()  # handled where they are read: quick, and they wait for nothing
        self._peer = peer
        self._link_to = link_to
        self._marshal = bodies
        self._pool = pool
        self._clock = clock
        self._first_pause = first_pause
        self._lock = threading.Lock()
        self._outbox = Outbox(first_pause)
        self._inbox = Inbox()
        self.acks_due = math.inf  # when what is to be acknowledged has waited long enough
        self._refusals = RefusalLog(log, "refused messages")

    # --- what goes out ------------------------------------------------------------------------------------------

    def bundle(self, to: int, recorded: bool) -> values.Bundle:
        """For tensors that go along with a note; ``recorded``: autograd follows them.  Raises WorkerLostError."""
        peer = self._peer(to)
        return self._marshal.bundle(peer, self._link_to(peer), recorded)

    def post(
        self,
        to: int,
        payload: NotePayload,
        value: Any = None,
        tensors: values.Bundle | None = None,
        soon: bool = False,
        when_idle: bool = False,
    ) -> bool:
        """Sends an internal message that takes effect exactly once.  False: the receiver is gone.

        ``soon``: nobody waits for it, so it may wait for a message that it can ride on.  ``when_idle``: it does so
        until the pool has nothing else to do; for who must not wait for a socket.
        """
        peer = self._peer(to)
        link = peer.link
        packed = values.PACKED_NONE
        try:
            if tensors is not None or value is not None:
                link = link or self._link_to(peer)
                packed = (
                    self._marshal.close(link, tensors) if tensors is not None else self._marshal.pack(peer, link, value)
                )
        except WorkerLostError:
            return False
        now = time.monotonic()
        with self._lock:
            if peer.state is not PeerState.KNOWN:  # else ``lost`` has yet to come
                return False
            note = self._outbox.post(to, payload, now, packed, self._inbox.acks_for(to))
        if (soon or when_idle) and link is not None:
            link.post(note)
            if when_idle:
                self._pool.flush_when_idle(link)
            self._clock.wake_before(now + _SOON_SECONDS)
        elif soon or when_idle:  # to dial may take long
            self._pool.submit((self._send, peer, (note, packed)))
        else:
            if link is not None:
                link.send(note, packed.stream, more=True)
            else:
                self._send(peer, (note, packed))
            self._clock.wake_before(now + self._first_pause)  # to repeat it, if need be
        return True

    def _send(self, peer: Peer, what: tuple[Note, values.PackedValue]) -> None:
        note, packed = what
        try:
            self._link_to(peer).send(note, packed.stream, more=True)
        except TelegradError as error:
            log.debug("note to %r not sent: %s", peer.name, error)  # it is repeated, or the peer is lost

    @property
    def unacknowledged(self) -> int:
        with self._lock:
            return len(self._outbox)

    # --- what comes in ------------------------------------------------------------------------------------------

    def take(self, link: Link, frame: Frame) -> None:
        """A note came, perhaps not for the first time."""
        note: Any = frame.message
        streamed = frame.buffers
        opened = False

        def open_value() -> Any:
            nonlocal opened
            opened = True
            return self._marshal.open(link, note.body, streamed)[0]

        with self._lock:
            first = self._inbox.accept(link.peer_id, note)
            if note.acks:
                self._outbox.acknowledged(link.peer_id, note.acks)
        if streamed:
            self._acknowledge(link, None)  # its sender holds much memory until then
        elif self.acks_due == math.inf:
            self.acks_due = time.monotonic() + _ACK_SECONDS
            self._clock.wake_before(self.acks_due)
        if first:
            try:
                self.handlers[type(note.payload)](link.peer_id, note.payload, open_value)
            except TelegradError as error:  # a peer says what it must not, or nonsense
                kind, name = type(note.payload).__name__, self._peer(link.peer_id).name
                self._refusals.add(f"a {kind} from worker {name!r}", str(error))
            if not opened and note.body.buffers:
                self._marshal.discard(link, note.body)

    def acknowledged(self, link: Link, message: NoteAck) -> None:
        with self._lock:
            self._outbox.acknowledged(link.peer_id, message.seqs)

    def _acknowledge(self, link: Link, _: Any) -> None:
        with self._lock:
            seqs = self._inbox.acks_for(link.peer_id)
        if seqs:
            link.send(NoteAck(seqs))

    # --- time, and loss -----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeats what is due, and acknowledges what could ride on nothing."""
        with self._lock:
            again = self._outbox.due(now)
            owing: list[int] = []
            if now >= self.acks_due:
                self.acks_due = math.inf  # before the look: a note that comes now sets it anew
                owing = self._inbox.owing()
        for to, note, packed in again:
            self._pool.submit((self._send, self._peer(to), (note, packed)))
        for worker in owing:
            for link in self._peer(worker).links[:1]:
                self._pool.submit((self._acknowledge, link, None))

    def lost(self, worker: int) -> None:
        """A worker whose peer is not KNOWN any more: nothing need reach it, and nothing comes from it."""
        with self._lock:
            self._outbox.lost(worker)
            self._inbox.lost(worker)
