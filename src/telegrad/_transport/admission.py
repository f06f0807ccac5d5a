"""Authenticates one connection, incoming or outgoing: TLS first (on TCP), then the handshake.

Nothing here blocks.  The listener calls ``advance`` when its selector reports bytes; ``dial`` calls it in a loop.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable

from telegrad._transport.handshake import MAX_BUFFERED, Handshake, Identity
from telegrad._transport.sockets import SocketStream
from telegrad._transport.tls import TlsEnd, TlsStream
from telegrad.errors import AuthenticationError, TelegradError

__all__ = ["Admission"]


class Admission:
    """Drives a connected socket until the peer has authenticated; then ``stream`` and ``peer`` may be used.

    (1) TLS, on TCP  (2) ``make_handshake`` checks the peer's certificate or process and returns the handshake, bound
    to both certificates  (3) the handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_handshake: Callable[[TlsStream | None], Handshake],
        tls: TlsEnd | None = None,
    ) -> None:
        self._raw = SocketStream(sock)
        self._tls = TlsStream(self._raw, tls) if tls else None
        self._make_handshake = make_handshake
        self._handshake: Handshake | None = None
        self._buffer = memoryview(bytearray(MAX_BUFFERED))
        self.stream: SocketStream | TlsStream = self._tls or self._raw

    @property
    def phase(self) -> str:
        """What the peer has not sent yet, for the text of a timeout."""
        if self._handshake is not None:
            return self._handshake.waits_for
        return "the TLS handshake" if self._tls else "its first bytes"

    @property
    def peer(self) -> Identity:
        assert self._handshake is not None
        assert self._handshake.peer is not None
        return self._handshake.peer

    def advance(self) -> bool:
        """Processes the bytes that have arrived; True when the peer has authenticated.

        Raises ``TelegradError`` if the peer is refused and ``OSError`` if it closed; the caller then closes the stream.
        """
        try:
            if self._handshake is None:
                if self._tls is not None and not self._tls.handshake_step():
                    return False
                self._handshake = self._make_handshake(self._tls)
                self.stream.send_now(self._handshake.start())
            while not self._handshake.done:
                size = self.stream.recv_into(self._buffer[: self._handshake.wants])
                if not size:
                    raise ConnectionResetError(
                        f"the peer closed before {self._handshake.waits_for} had come; its log says why"
                    )
                self.stream.send_now(self._handshake.feed(bytes(self._buffer[:size])))
        except BlockingIOError:
            return False
        except ssl.SSLError as error:  # TLS 1.3: the server checks our certificate after our own handshake is done
            raise AuthenticationError(
                f"the peer refused the TLS connection ({error.reason or error}): set the same TELEGRAD_SECRET, and the "
                "same tls_ca if any, on every worker"
            ) from error
        except TelegradError:
            with contextlib.suppress(OSError):
                if self._handshake is not None:
                    self.stream.send_now(self._handshake.farewell)
                self._raw.recv_into(self._buffer)  # closing with unread bytes would discard the bytes just sent
            raise
        self.stream.trust()
        return True
