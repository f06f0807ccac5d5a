"""The door: one thread accepts connections, lets peers prove themselves, and hands over those that did.

What a stranger can cost is bounded: a descriptor and some kilobytes each, ``max_pending`` of them at a time,
``handshake_timeout`` seconds each *in all* (dripping bytes wins no time), and a bounded number of log lines.  When
there are too many, the oldest gives way: a worker of ours needs milliseconds to prove itself, a stranger that says
nothing is always older.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telegrad._transport.admission import Admission
from telegrad._transport.base import Stream
from telegrad._transport.dial import Address, dial
from telegrad._transport.handshake import Handshake, Identity, ServerHandshake
from telegrad._transport.identity import Credentials, credentials_of
from telegrad._transport.refusals import RefusalLog
from telegrad._transport.sockets import check_same_user, peer_credentials
from telegrad._transport.tls import TlsEnd, TlsStream
from telegrad.errors import TelegradError

__all__ = ["Address", "Door", "Listener", "dial"]  # the way to the door, and the door

log = logging.getLogger("telegrad.transport")

_ACCEPTS_PER_TURN = 64  # so that a flood of newcomers does not keep the thread from those already in
_BACK_OFF = 0.2
_STARVED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, eq=False)
class Door:
    """A listening socket: a Unix one, or TCP with TLS."""

    sock: socket.socket
    tls: TlsEnd | None = None

    @property
    def is_unix(self) -> bool:
        return self.tls is None


@dataclass(frozen=True, eq=False)
class _Visitor:
    admission: Admission
    sock: socket.socket
    where: str
    deadline: float


class Listener:
    """Serves listening sockets; owns and closes them.

    ``on_connection(stream, peer, credentials)`` is called on the listener's thread, so it should not take long.  It
    gets who the peer says it is, with proof that it knows the job's key, and who the kernel or TLS says it is.
    """

    def __init__(
        self,
        doors: Sequence[Door],
        key: bytes,
        me: Identity,
        on_connection: Callable[[Stream, Identity, Credentials], None],
        handshake_timeout: float = 5.0,
        max_pending: int = 256,
    ) -> None:
        self._key = key
        self._me = me
        self._on_connection = on_connection
        self._timeout = handshake_timeout
        self._max_pending = max_pending
        self._doors = list(doors)
        self._refusals = RefusalLog(log, "refused connections")
        self._visitors: dict[_Visitor, None] = {}  # oldest first; all have the same time, so next to expire first
        self._starved_until: float | None = None
        self._starved_logged = False
        self._closing = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for door in self._doors:
            door.sock.setblocking(False)
            self._selector.register(door.sock, selectors.EVENT_READ, door)
        self._thread = threading.Thread(target=self._run, name=f"telegrad-listener-{me.name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._doors)} sockets, {len(self._visitors)} connections pending"
        return f"<Listener of {self._me.name!r}: {state}>"

    def close(self) -> None:
        """Closes the doors and whoever still stands in them.  Streams that were handed over live on."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """In a forked child: gives up this process's descriptors; the parent's thread serves the doors."""
        self._closing = True
        for door in self._doors:
            door.sock.close()
        for visitor in list(self._visitors):
            visitor.admission.stream.disown()

    def refused(self, where: str, reason: str) -> None:
        """A connection that was handed over turned out to be refused: a line in the log, within its bounds."""
        self._refusals.add(f"a connection from {where}", reason)

    # --- everything below runs on the listener's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    if isinstance(key.data, Door):
                        self._accept(key.data)
                    elif key.data in self._visitors:  # not evicted earlier in this turn
                        self._advance(key.data)
                self._expire()
        finally:
            for visitor in self._visitors:
                visitor.admission.stream.close()
            self._visitors.clear()
            for door in self._doors:
                door.sock.close()
            self._selector.close()
            with self._lock:
                self._closing = True
                os.close(self._wake)

    def _patience(self) -> float | None:
        oldest = next(iter(self._visitors), None)
        moments = [oldest.deadline] if oldest else []
        if self._starved_until is not None:
            moments.append(self._starved_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _accept(self, door: Door) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = door.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _STARVED:
                    self._back_off(error)
                    return
                continue  # that one was gone before we came to the door
            self._starved_logged = False
            self._welcome(door, sock, address)

    def _welcome(self, door: Door, sock: socket.socket, address: object) -> None:
        where = "an unknown peer"
        try:
            where = _whereabouts(door, sock, address)
            if door.is_unix:
                check_same_user(sock)

            def handshake(tls: TlsStream | None) -> Handshake:
                return ServerHandshake(self._key, self._me, tls.binding() if tls is not None else b"")

            admission = Admission(sock, handshake, door.tls)
            visitor = _Visitor(admission, sock, where, time.monotonic() + self._timeout)
            self._selector.register(sock, selectors.EVENT_READ, visitor)
        except (TelegradError, OSError) as error:
            sock.close()
            self._refusals.add(f"a connection from {where}", str(error))
            return
        self._visitors[visitor] = None
        if len(self._visitors) > self._max_pending:
            oldest = next(iter(self._visitors))
            self._refuse(oldest, f"more than {self._max_pending} connections wait to prove themselves; oldest goes")

    def _advance(self, visitor: _Visitor) -> None:
        try:
            if not visitor.admission.advance():
                return
        except (TelegradError, OSError) as error:
            self._refuse(visitor, str(error))
            return
        except Exception as error:  # a fault of ours must not close the door for everyone
            self._refuse(visitor, f"{type(error).__name__}: {error}")
            return
        self._forget(visitor)
        stream = visitor.admission.stream
        try:
            tls = stream if isinstance(stream, TlsStream) else None
            self._on_connection(stream, visitor.admission.peer, credentials_of(visitor.sock, tls))
        except (TelegradError, OSError) as error:
            self._refusals.add(f"a connection from {visitor.where}", str(error))
            stream.close()
        except Exception:
            log.exception("the connection from %s was lost in on_connection", visitor.where)
            stream.close()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._visitors and (oldest := next(iter(self._visitors))).deadline <= now:
            self._refuse(oldest, f"{oldest.admission.phase} did not come within {self._timeout:g} s")
        if self._starved_until is not None and self._starved_until <= now:
            self._starved_until = None
            for door in self._doors:
                self._selector.register(door.sock, selectors.EVENT_READ, door)

    def _back_off(self, error: OSError) -> None:
        """Out of descriptors or memory: the connection stays in the backlog and would wake us at once, for ever."""
        if self._starved_until is None:
            for door in self._doors:
                self._selector.unregister(door.sock)
        self._starved_until = time.monotonic() + _BACK_OFF
        if not self._starved_logged:
            self._starved_logged = True
            log.warning("cannot accept connections for now: %s; trying again every %g s", error, _BACK_OFF)

    def _forget(self, visitor: _Visitor) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.admission.stream)

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        self._forget(visitor)
        visitor.admission.stream.close()
        self._refusals.add(f"a connection from {visitor.where}", reason)


def _whereabouts(door: Door, sock: socket.socket, address: object) -> str:
    if door.is_unix:
        pid, uid = peer_credentials(sock)
        return f"process {pid} of user {uid}"
    assert isinstance(address, tuple)
    return f"{address[0]} port {address[1]}"
