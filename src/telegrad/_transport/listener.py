"""Listens: one thread accepts connections, runs their handshakes, and hands over the authenticated ones.

The cost of unauthenticated peers is bounded: one descriptor and a few kilobytes each, at most ``max_pending`` of them
at a time, ``handshake_timeout`` seconds each in total (sending slowly does not extend it), and a bounded number of log
lines.  When there are too many, the oldest is closed: a worker authenticates in milliseconds, so a connection that
sends nothing becomes the oldest.
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

__all__ = ["Address", "Listener", "ListeningSocket", "dial"]

log = logging.getLogger("telegrad.transport")

_ACCEPTS_AT_ONCE = 64  # so that many new connections do not delay the handshakes under way
_PAUSE_SECONDS = 0.2
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, eq=False)
class ListeningSocket:
    """A listening socket: a Unix one, or TCP with TLS."""

    sock: socket.socket
    tls: TlsEnd | None = None

    @property
    def is_unix(self) -> bool:
        return self.tls is None


@dataclass(frozen=True, eq=False)
class _Pending:
    admission: Admission
    sock: socket.socket
    where: str
    deadline: float


class Listener:
    """Serves listening sockets; owns and closes them.

    ``on_connection(stream, peer, credentials)`` is called on the listener's thread, so it must be quick.  ``peer`` is
    the identity that the peer claims, after it has proved that it knows the job's key; ``credentials`` is what the
    kernel or TLS reports.
    """

    def __init__(
        self,
        sockets: Sequence[ListeningSocket],
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
        self._sockets = list(sockets)
        self._refusals = RefusalLog(log, "refused connections")
        self._pending: dict[_Pending, None] = {}  # the oldest, which expires next, first
        self._paused_until: float | None = None
        self._pause_logged = False
        self._closing = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        for listening in self._sockets:
            listening.sock.setblocking(False)
            self._selector.register(listening.sock, selectors.EVENT_READ, listening)
        self._thread = threading.Thread(target=self._run, name=f"telegrad-listener-{me.name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closing else f"{len(self._sockets)} sockets, {len(self._pending)} connections pending"
        return f"<Listener of {self._me.name!r}: {state}>"

    def close(self) -> None:
        """Closes the listening sockets and the connections that have not authenticated; others stay open."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """In a forked child: closes this process's descriptors; the parent keeps listening."""
        self._closing = True
        for listening in self._sockets:
            listening.sock.close()
        for pending in list(self._pending):
            pending.admission.stream.disown()

    def refused(self, where: str, reason: str) -> None:
        """Logs that a connection was refused after it had been handed over."""
        self._refusals.add(f"a connection from {where}", reason)

    # --- everything below runs on the listener's thread ---

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    if isinstance(key.data, ListeningSocket):
                        self._accept(key.data)
                    elif key.data in self._pending:  # not closed earlier in this loop
                        self._advance(key.data)
                self._expire()
        finally:
            for pending in self._pending:
                pending.admission.stream.close()
            self._pending.clear()
            for listening in self._sockets:
                listening.sock.close()
            self._selector.close()
            with self._lock:
                self._closing = True
                os.close(self._wake)

    def _seconds_to_wait(self) -> float | None:
        oldest = next(iter(self._pending), None)
        moments = [oldest.deadline] if oldest else []
        if self._paused_until is not None:
            moments.append(self._paused_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _accept(self, listening: ListeningSocket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = listening.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(error)
                    return
                continue  # the peer closed before the accept
            self._pause_logged = False
            self._begin(listening, sock, address)

    def _begin(self, listening: ListeningSocket, sock: socket.socket, address: object) -> None:
        where = "an unknown peer"
        try:
            where = _describe_peer(listening, sock, address)
            if listening.is_unix:
                check_same_user(sock)

            def handshake(tls: TlsStream | None) -> Handshake:
                return ServerHandshake(self._key, self._me, tls.binding() if tls is not None else b"")

            admission = Admission(sock, handshake, listening.tls)
            pending = _Pending(admission, sock, where, time.monotonic() + self._timeout)
            self._selector.register(sock, selectors.EVENT_READ, pending)
        except (TelegradError, OSError) as error:
            sock.close()
            self._refusals.add(f"a connection from {where}", str(error))
            return
        self._pending[pending] = None
        if len(self._pending) > self._max_pending:
            oldest = next(iter(self._pending))
            self._refuse(oldest, f"more than {self._max_pending} connections pending: the oldest is closed")

    def _advance(self, pending: _Pending) -> None:
        try:
            if not pending.admission.advance():
                return
        except (TelegradError, OSError) as error:
            self._refuse(pending, str(error))
            return
        except Exception as error:  # a bug here must not end the listener
            self._refuse(pending, f"{type(error).__name__}: {error}")
            return
        self._forget(pending)
        stream = pending.admission.stream
        try:
            tls = stream if isinstance(stream, TlsStream) else None
            self._on_connection(stream, pending.admission.peer, credentials_of(pending.sock, tls))
        except (TelegradError, OSError) as error:
            self._refusals.add(f"a connection from {pending.where}", str(error))
            stream.close()
        except Exception:
            log.exception("the connection from %s was lost in on_connection", pending.where)
            stream.close()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending))).deadline <= now:
            self._refuse(oldest, f"{oldest.admission.phase} did not come within {self._timeout:g} s")
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            for listening in self._sockets:
                self._selector.register(listening.sock, selectors.EVENT_READ, listening)

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: stops accepting for a moment, or the waiting connection would wake it again."""
        if self._paused_until is None:
            for listening in self._sockets:
                self._selector.unregister(listening.sock)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        if not self._pause_logged:
            self._pause_logged = True
            log.warning("cannot accept connections for now: %s; trying again every %g s", error, _PAUSE_SECONDS)

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending]
        self._selector.unregister(pending.admission.stream)

    def _refuse(self, pending: _Pending, reason: str) -> None:
        self._forget(pending)
        pending.admission.stream.close()
        self._refusals.add(f"a connection from {pending.where}", reason)


def _describe_peer(listening: ListeningSocket, sock: socket.socket, address: object) -> str:
    if listening.is_unix:
        pid, uid = peer_credentials(sock)
        return f"process {pid} of user {uid}"
    assert isinstance(address, tuple)
    return f"{address[0]} port {address[1]}"
