"""Connects to a worker; returns a stream on which both sides have authenticated."""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from telegrad._transport.admission import Admission
from telegrad._transport.base import Stream
from telegrad._transport.handshake import ClientHandshake, Handshake, Identity
from telegrad._transport.identity import Credentials, credentials_of
from telegrad._transport.sockets import check_same_user, connect_tcp, connect_unix
from telegrad._transport.tls import TlsEnd, TlsStream
from telegrad.errors import AuthenticationError, HostUnreachableError, ProtocolError, RpcTimeoutError

__all__ = ["Address", "dial"]

_NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address on which a worker listens.  ``fingerprint``: that of its TLS certificate, for TCP."""

    kind: Literal["unix", "tcp"]
    host: str  # the name of the socket, for "unix"
    port: int = 0
    fingerprint: bytes = b""

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tls:{host}:{self.port}"


def dial(
    address: Address,
    key: bytes,
    me: Identity,
    expect: Identity,
    timeout: float,
    check: Callable[[Credentials], None],
    tls: TlsEnd | None = None,
) -> Stream:
    """Blocks until the worker at ``address`` has authenticated, for at most ``timeout`` seconds.

    ``check`` raises ``AuthenticationError`` unless the process or the certificate at the other end is the one in the
    worker's record.  ``tls`` is needed for TCP.

    Raises ``AuthenticationError`` or ``ProtocolError`` when the peer is not the worker that was dialled (do not
    retry), ``HostUnreachableError`` when its host does not answer or has no route, ``RpcTimeoutError`` when the worker
    does not complete the handshake in time, and other ``OSError``s when nothing listens or the peer closes.
    """
    deadline = time.monotonic() + timeout
    what = f"worker {expect.name!r} at {address}"

    def handshake(stream: TlsStream | None) -> Handshake:
        check(credentials_of(sock, stream))
        return ClientHandshake(key, me, expect, stream.binding() if stream is not None else b"")

    if address.kind == "tcp" and tls is None:
        raise AuthenticationError(f"{what}: TCP needs TLS, and this worker has no certificate")
    try:
        if address.kind == "unix":
            sock = connect_unix(address.host, timeout)
        else:
            sock = connect_tcp(address.host, address.port, timeout)
    except TimeoutError as error:  # a Unix socket with a full backlog: its process is busy
        kind = RpcTimeoutError if address.kind == "unix" else HostUnreachableError
        raise kind(f"{what}: no connection within {timeout:.1f} s") from error
    except OSError as error:
        if error.errno in _NO_WAY:
            raise HostUnreachableError(f"{what}: {error.strerror}") from error
        raise
    try:
        if address.kind == "unix":
            check_same_user(sock)
        admission = Admission(sock, handshake, tls if address.kind == "tcp" else None)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not admission.advance():
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise RpcTimeoutError(f"{what}: connected, but {admission.phase} did not come within {timeout:.1f} s")
    except (AuthenticationError, ProtocolError) as error:
        sock.close()
        raise type(error)(f"{what}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return admission.stream
