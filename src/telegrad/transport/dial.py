"""Connects to a worker, and comes back with a stream on which both sides know each other."""

from __future__ import annotations

import errno
import select
import time
from typing import Literal

import msgspec

from telegrad.errors import AuthenticationError, ProtocolError, RpcTimeoutError
from telegrad.transport.admission import Admission
from telegrad.transport.base import Stream
from telegrad.transport.handshake import ClientHandshake, Handshake, Identity
from telegrad.transport.sockets import check_same_user, connect_tcp, connect_unix
from telegrad.transport.tls import TlsStream, client_context

__all__ = ["Address", "dial"]

_NO_WAY = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a worker listens.  ``fingerprint``: of its TLS certificate; None: it speaks without TLS."""

    kind: Literal["unix", "tcp"]
    host: str  # the name of the socket, for "unix"
    port: int = 0
    fingerprint: bytes | None = None

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.fingerprint else 'tcp'}:{host}:{self.port}"


def dial(
    address: Address,
    key: bytes,
    me: Identity,
    expect_worker_id: int,
    timeout: float,
    ca_file: str | None = None,
) -> Stream:
    """Blocks until the worker at ``address`` has proved itself, for ``timeout`` seconds at most.

    The certificate must have the address's fingerprint; with ``ca_file`` it must also be signed by an authority in
    that file, and an address without a fingerprint will do.

    Raises ``AuthenticationError`` or ``ProtocolError`` when the peer is not the worker that was dialled (do not try
    again), ``RpcTimeoutError`` when it says too little in time, and any other ``OSError`` when it is not there or
    goes away (a worker that starts or dies looks like this), a ``ConnectionError`` when there is no way to its host.
    """
    deadline = time.monotonic() + timeout
    with_tls = address.kind == "tcp" and (address.fingerprint is not None or ca_file is not None)

    def handshake(tls: TlsStream | None) -> Handshake:
        binding = b""
        if tls is not None:
            if address.fingerprint is not None:
                tls.check_pin(address.fingerprint)
            binding = tls.peer_fingerprint()
        return ClientHandshake(key, me, expect_worker_id, binding)

    context = client_context(ca_file) if with_tls else None
    try:
        if address.kind == "unix":
            sock = connect_unix(address.host, timeout)
        else:
            sock = connect_tcp(address.host, address.port, timeout)
    except TimeoutError as error:
        raise RpcTimeoutError(f"worker {expect_worker_id} at {address}: no connection within {timeout:g} s") from error
    except OSError as error:
        if error.errno in _NO_WAY:
            raise ConnectionAbortedError(error.errno, f"{address}: {error.strerror}") from error
        raise
    try:
        if address.kind == "unix":
            check_same_user(sock)
        admission = Admission(sock, handshake, context, server_side=False)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not admission.advance():
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise RpcTimeoutError(
                    f"worker {expect_worker_id} at {address}: connected, but {admission.phase} did not come "
                    f"within {timeout:g} s"
                )
    except (AuthenticationError, ProtocolError) as error:
        sock.close()
        raise type(error)(f"worker {expect_worker_id} at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return admission.stream
