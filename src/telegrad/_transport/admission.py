"""One connection on its way in or out: first TLS, if there is any, then the handshake.

Nothing here blocks.  The listener calls ``advance`` when its selector says so, and ``dial`` in a loop of its own.
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
    """Drives a connected socket until the peer has proved itself; then ``stream`` and ``peer`` are good to use.

    (1) TLS, on TCP  (2) ``make_handshake`` looks at the peer's certificate or process and makes the machine of (3), now
    that it is known what it is to be bound to  (3) the handshake.
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
        """What a timeout should say was missing."""
        if self._handshake is not None:
            return self._handshake.waits_for
        return "the TLS handshake" if self._tls else "its first bytes"

    @property
    def peer(self) -> Identity:
        assert self._handshake is not None
        assert self._handshake.peer is not None
        return self._handshake.peer

    def advance(self) -> bool:
        """Goes as far as the bytes that have come allow; True when the peer is known.

        A ``TelegradError`` says why the peer is refused, an ``OSError`` that it went away; then close the stream.
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
        except ssl.SSLError as error:  # TLS 1.3: the server looks at our certificate after our own handshake is done
            raise AuthenticationError(
                f"the peer refused the TLS connection ({error.reason or error}): set the same TELEGRAD_SECRET, and the "
                "same tls_ca if any, on every worker"
            ) from error
        except TelegradError:
            with contextlib.suppress(OSError):
                if self._handshake is not None:
                    self.stream.send_now(self._handshake.farewell)
                self._raw.recv_into(self._buffer)  # with bytes unread, closing would destroy what we have just said
            raise
        self.stream.trust()
        return True
