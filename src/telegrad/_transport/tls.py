"""Mutual TLS 1.3 for TCP: certificates, contexts, and a stream that two threads may use.

Both ends present a certificate.  By default each worker makes its own at start, signed by an authority that every
worker derives from the job's secret, so TLS fails with a peer without the secret.  Users with their own authority give
files instead.  In both cases each end compares the other's certificate with the fingerprint in the other worker's
signed record, and both fingerprints go into the MACs of the handshake (see ``handshake``).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import math
import os
import re
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from telegrad._transport.sockets import SocketStream
from telegrad.errors import AuthenticationError, ProtocolError, UsageError

__all__ = [
    "Authority",
    "Certificate",
    "TlsEnd",
    "TlsStream",
    "load_authority",
    "load_certificate",
    "make_authority",
    "tls_end",
]

_PLAIN_CHUNK = 256 << 10  # bytes encrypted at a time: limits a send's memory and how long a reader waits for the lock
_RAW_CHUNK = 256 << 10  # bytes read from the socket at a time
_UNTRUSTED_CHUNK = 4 << 10  # the same before the peer has authenticated: hundreds of peers may wait at once
_UNTRUSTED_TOTAL = 64 << 10  # bytes that a peer may send before it has authenticated; 2 KiB are needed
_RECORD_HEADER = 5  # type, version (2), length (2)
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class Certificate:
    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    fingerprint: bytes


@dataclass(frozen=True)
class Authority:
    """The certificate authority that must have signed a peer's certificate.

    ``names_workers``: the authority vouches for names, so a certificate must contain its worker's name.  The authority
    derived from the job's secret does not: every worker can sign with it.
    """

    cert_pem: bytes
    names_workers: bool
    _key: Any = field(default=None, repr=False)

    def sign(self, name: str) -> Certificate:
        """Makes a key pair and a certificate for a worker of that name.  The key is never written to a disk."""
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key.public_key(), self._key, is_authority=False)
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return Certificate(
            certificate.public_bytes(pem),
            key.private_bytes(pem, pkcs8, serialization.NoEncryption()),
            certificate.fingerprint(hashes.SHA256()),
        )


_AUTHORITY_NAME = "telegrad job"


def make_authority(key: bytes) -> Authority:
    """The authority of a job, derived from the job's key: the same on all workers of the job."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UsageError(
            "encrypting TCP needs the package 'cryptography' (pip install cryptography), or certificate files"
        ) from error
    number = int.from_bytes(hmac.digest(key, b"telegrad certificate authority", "sha256"), "big")
    private = ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())
    certificate = _certificate(_AUTHORITY_NAME, private.public_key(), private, is_authority=True)
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), names_workers=False, _key=private)


_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def _certificate(name: str, public: Any, authority: Any, is_authority: bool) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    def name_of(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name_of(name))
        .issuer_name(name_of(_AUTHORITY_NAME))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # the clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )


def load_authority(ca_file: str | os.PathLike[str]) -> Authority:
    """Reads the user's own authority, or several in one file."""
    try:
        pem = Path(ca_file).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"cannot read certificate authorities from {os.fspath(ca_file)}: {error}") from error
    return Authority(pem, names_workers=True)


def load_certificate(cert_file: str | os.PathLike[str], key_file: str | os.PathLike[str]) -> Certificate:
    """Reads a certificate (or a chain, the worker's own first) and its key, and checks that they belong together."""
    try:
        cert_pem, key_pem = Path(cert_file).read_bytes(), Path(key_file).read_bytes()
        first = re.search(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", cert_pem, re.DOTALL)
        if first is None:
            raise UsageError(f"no PEM certificate in {os.fspath(cert_file)}")
        der = ssl.PEM_cert_to_DER_cert(first.group().decode())
        certificate = Certificate(cert_pem, key_pem, hashlib.sha256(der).digest())
        _show(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"cannot use the certificate {os.fspath(cert_file)} with the key {os.fspath(key_file)}: {error}"
        ) from error
    return certificate


@dataclass(frozen=True)
class TlsEnd:
    """The TLS settings of one end of a connection, and the fingerprint of its certificate."""

    context: ssl.SSLContext
    fingerprint: bytes
    server_side: bool


def tls_end(certificate: Certificate, authority: Authority, *, server_side: bool) -> TlsEnd:
    """Presents this certificate, and requires one of the peer that the authority has signed.

    Host names are not checked: a worker is identified by the fingerprint in its record, and by its name where the
    authority names workers.  Session tickets are off: each connection authenticates anew.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.cert_pem.decode())
    if server_side:
        context.num_tickets = 0
    _show(context, certificate)
    return TlsEnd(context, certificate.fingerprint, server_side)


def _show(context: ssl.SSLContext, certificate: Certificate) -> None:
    # OpenSSL takes a file name; a memfd has one, and nothing is written to a disk.
    descriptor = os.memfd_create("telegrad-certificate", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(certificate.cert_pem + b"\n" + certificate.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)


def _no_password() -> str:
    raise UsageError("the key file is encrypted: give one without a password")  # OpenSSL would ask the terminal


class TlsStream:
    """A ``Stream`` that encrypts.

    An OpenSSL connection must not be used by two threads at once, and a link has a reader and a writer.  So OpenSSL
    works on memory, under a lock; the system calls, which may block, are made without the lock:

    ::

        recv_into:  (1) socket → raw bytes   (2) lock: raw bytes → OpenSSL → plain bytes
        send:       (1) lock: 256 KiB of plain bytes → OpenSSL → raw bytes   (2) raw bytes → socket

    A reader never writes to the socket.  If OpenSSL has something to send while it reads (the answer to a key update),
    it waits in ``_outgoing``, in order, for the next ``send``; TLS 1.3 allows that.

    Until ``trust`` is called the peer may send 64 KiB in all, and its bytes are read record by record, so that at the
    end of the handshake no decrypted bytes are left here: a poll of the descriptor would not report them.
    """

    drain: ClassVar[bool] = True  # decrypted bytes may wait here, which a poll of the descriptor does not report

    def __init__(self, raw: SocketStream, end: TlsEnd) -> None:
        self._raw = raw
        self._end = end
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = end.context.wrap_bio(self._incoming, self._outgoing, server_side=end.server_side)
        self._lock = threading.Lock()
        self._scratch = memoryview(bytearray(_UNTRUSTED_CHUNK))
        self._unsent: Sequence[memoryview] = ()  # encrypted, but not taken by the kernel before a deadline
        self._trusted = False
        self._heard = 0
        self._record_header = bytearray()
        self._record_left = 0

    def __repr__(self) -> str:
        return f"<TlsStream {self._tls.version()} over {self._raw!r}>"

    def fileno(self) -> int:
        return self._raw.fileno()

    # --- TLS's own handshake ---

    def handshake_step(self) -> bool:
        """Processes the bytes that have arrived; True when TLS is established."""
        while True:
            try:
                self._tls.do_handshake()
                self._raw.send_now(self._outgoing.read())
                return True
            except ssl.SSLWantReadError:
                self._raw.send_now(self._outgoing.read())
            except ssl.SSLCertVerificationError as error:
                self._complain()
                raise AuthenticationError(
                    f"the peer's certificate is not signed for this job ({error.verify_message}): set the same "
                    "TELEGRAD_SECRET, and the same tls_ca if any, on every worker"
                ) from error
            except ssl.SSLError as error:
                self._complain()
                raise ProtocolError(
                    f"no TLS 1.3 with the peer ({error.reason or error}): set the same TELEGRAD_SECRET on every worker"
                ) from error
            try:
                if not self._fill():
                    raise ConnectionResetError("the peer closed during the TLS handshake: its log says why")
            except BlockingIOError:
                return False

    def _complain(self) -> None:
        """Sends OpenSSL's alert to the peer, if the connection still works."""
        with contextlib.suppress(OSError):
            self._raw.send_now(self._outgoing.read())

    def peer_fingerprint(self) -> bytes:
        der = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(der).digest() if der else b""

    def binding(self) -> bytes:
        """The fingerprints of both ends, the server's first, which go into the handshake's MACs."""
        mine, theirs = self._end.fingerprint, self.peer_fingerprint()
        return mine + theirs if self._end.server_side else theirs + mine

    def peer_names(self) -> frozenset[str]:
        """The DNS names in the peer's certificate, or else its common name."""
        certificate: Any = self._tls.getpeercert() or {}
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
        common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return frozenset(names or common)

    def trust(self) -> None:
        """Called when the peer has authenticated: removes the limits on what it may send."""
        self._trusted = True
        self._scratch = memoryview(bytearray(_RAW_CHUNK))

    # --- the stream ---

    def _fill(self) -> int:
        """Moves raw bytes from the socket to OpenSSL; called only when OpenSSL has none left, to limit its memory."""
        if self._trusted:
            size = self._raw.recv_into(self._scratch)
        else:
            size = self._fill_untrusted()
        with self._lock:
            if size:
                self._incoming.write(self._scratch[:size])
            else:
                self._incoming.write_eof()
        return size

    def _fill_untrusted(self) -> int:
        limit = min(self._record_left or _RECORD_HEADER - len(self._record_header), _UNTRUSTED_CHUNK)
        size = self._raw.recv_into(self._scratch[:limit])
        self._heard += size
        if self._heard > _UNTRUSTED_TOTAL:
            raise ProtocolError(f"more than {_UNTRUSTED_TOTAL} bytes before the peer had authenticated")
        if self._record_left:
            self._record_left -= size
        else:
            self._record_header += self._scratch[:size]
            if len(self._record_header) == _RECORD_HEADER:
                self._record_left = int.from_bytes(self._record_header[3:], "big")
                self._record_header.clear()
        return size

    def recv_into(self, buffer: memoryview) -> int:
        while True:
            got = self._read(buffer)
            if got or not buffer.nbytes:
                return got
            if not self._fill():
                return 0

    def recv_held(self, buffer: memoryview) -> int:
        """As ``recv_into``, but does not read from the socket."""
        got = self._read(buffer)
        if not got:
            raise BlockingIOError
        return got

    def _read(self, buffer: memoryview) -> int:
        """Decrypts what OpenSSL has; it returns one record of at most 16 KiB at a time."""
        got = 0
        while got < len(buffer):
            with self._lock:  # for each record, so that a writer can take it in between
                try:
                    size = cast(int, self._tls.read(len(buffer) - got, buffer[got:]))
                except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    break
            if not size:
                break
            got += size
        return got

    def send(
        self, buffers: Sequence[bytes | bytearray | memoryview], deadline: float = math.inf
    ) -> Sequence[memoryview]:
        self._unsent = self._raw.send(self._unsent, deadline) if self._unsent else ()
        chunks = _chunks(buffers)
        while chunks and not self._unsent:
            self._unsent = self._raw.send([self._encrypt(chunks.pop(0))], deadline)
        rest = [view for chunk in chunks for view in chunk]
        return rest or ([_NOTHING] if self._unsent else ())  # an empty rest makes the caller send again

    def watch_host(self, seconds: float) -> None:
        self._raw.watch_host(seconds)

    def host_is_silent(self, seconds: float) -> bool:
        return self._raw.host_is_silent(seconds)

    def send_now(self, data: bytes) -> None:
        """As ``SocketStream.send_now``."""
        self._raw.send_now(self._encrypt([memoryview(data)]))

    def _encrypt(self, views: Sequence[memoryview]) -> bytes:
        # Joined, because OpenSSL makes each write a record, with 22 bytes of overhead.
        plain = views[0] if len(views) == 1 else memoryview(b"".join(views))
        with self._lock:
            while plain.nbytes:
                plain = plain[self._tls.write(plain) :]
            return self._outgoing.read()

    def close(self) -> None:
        """Sends no TLS close_notify: it could block, and the frame reader detects a frame that was cut short."""
        self._raw.close()

    def disown(self) -> None:
        """As ``SocketStream.disown``."""
        self._raw.disown()


def _chunks(buffers: Sequence[bytes | bytearray | memoryview]) -> list[list[memoryview]]:
    """Splits and groups buffers into lists of at most ``_PLAIN_CHUNK`` bytes."""
    groups: list[list[memoryview]] = [[]]
    room = _PLAIN_CHUNK
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.nbytes:
            continue
        view = view.cast("B")
        while view.nbytes:
            part, view = view[:room], view[room:]
            groups[-1].append(part)
            room -= part.nbytes
            if not room:
                groups.append([])
                room = _PLAIN_CHUNK
    return groups if groups[-1] else groups[:-1]
