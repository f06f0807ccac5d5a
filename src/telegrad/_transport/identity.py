"""The peer of a connection as the kernel or TLS reports it, independent of what the peer itself claims."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from telegrad._transport.sockets import peer_credentials
from telegrad._transport.tls import TlsStream
from telegrad.errors import AuthenticationError

__all__ = ["Credentials", "credentials_of"]


@dataclass(frozen=True)
class Credentials:
    """The peer's process (Unix socket) or its TLS certificate (TCP)."""

    pid: int | None = None
    fingerprint: bytes | None = None
    names: frozenset[str] = frozenset()  # in the certificate

    def check_process(self, pid: int) -> None:
        if self.pid != pid:
            raise AuthenticationError(
                f"process {self.pid} is at the other end of the socket; that worker's record says process {pid}"
            )

    def check_certificate(self, fingerprint: bytes) -> None:
        if not self.fingerprint or self.fingerprint != fingerprint:
            found = self.fingerprint.hex()[:16] if self.fingerprint else "none"
            raise AuthenticationError(
                f"the peer shows the certificate {found}…, that worker's record says {fingerprint.hex()[:16]}…: "
                "the worker was restarted, or another process takes its place"
            )

    def check_name(self, name: str) -> None:
        """For certificates of an authority that vouches for workers' names."""
        if name not in self.names:
            shown = ", ".join(sorted(self.names)) or "no name"
            raise AuthenticationError(
                f"the peer's certificate is for {shown[:200]!r}, not for worker {name!r}: with tls_ca, each worker's "
                "certificate needs its worker's name as a DNS name or as common name"
            )


def credentials_of(sock: socket.socket, tls: TlsStream | None) -> Credentials:
    if tls is not None:
        return Credentials(fingerprint=tls.peer_fingerprint(), names=tls.peer_names())
    return Credentials(pid=peer_credentials(sock)[0])
