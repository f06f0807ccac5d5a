"""TLS 1.3 for what crosses hosts: the certificate, the two contexts, and a stream that two threads may use.

The certificate is made at start and pinned: the dialler learns its SHA-256 fingerprint where it learns the address.
So nobody has to run a certificate authority for a job that lives an hour; who has one gives files instead.  In both
cases the fingerprint goes into the handshake's MACs (see ``handshake``), so a machine in the middle fails even with a
certificate that the authority has signed.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import re
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.transport.sockets import SocketStream

__all__ = ["Certificate", "TlsStream", "client_context", "load_certificate", "make_certificate", "server_context"]

_PLAIN_CHUNK = 256 << 10  # encrypted at a time: bounds the memory of a send, and how long a reader waits for the lock
_RAW_CHUNK = 256 << 10  # read from the socket at a time
_STRANGER_CHUNK = 4 << 10  # the same, before the peer is known: hundreds of strangers may wait at once
_STRANGER_TOTAL = 64 << 10  # what a stranger may say at all; a full exchange takes 2 KiB
_RECORD_HEADER = 5  # type, version (2), length (2)


@dataclass(frozen=True)
class Certificate:
    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    fingerprint: bytes


def make_certificate() -> Certificate:
    """Makes a key pair and signs it with itself.  The key never touches a disk."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UsageError(
            "encrypting TCP needs the package 'cryptography' (pip install cryptography), or certificate files"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "telegrad worker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of a cluster differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.fingerprint(hashes.SHA256()),
    )


def load_certificate(cert_file: str | os.PathLike[str], key_file: str | os.PathLike[str]) -> Certificate:
    """Reads a certificate (or a chain, the worker's own first) and its key, and checks that they belong together."""
    try:
        cert_pem, key_pem = Path(cert_file).read_bytes(), Path(key_file).read_bytes()
        first = re.search(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", cert_pem, re.DOTALL)
        if first is None:
            raise UsageError(f"no PEM certificate in {os.fspath(cert_file)}")
        der = ssl.PEM_cert_to_DER_cert(first.group().decode())
        certificate = Certificate(cert_pem, key_pem, hashlib.sha256(der).digest())
        server_context(certificate)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"cannot use the certificate {os.fspath(cert_file)} with the key {os.fspath(key_file)}: {error}"
        ) from error
    return certificate


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """For the side that listens.  Session tickets are off: each connection proves itself anew."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    # OpenSSL wants a file name; an anonymous file in memory has one, and leaves nothing behind.
    descriptor = os.memfd_create("telegrad-certificate", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(certificate.cert_pem + b"\n" + certificate.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=_no_password)
    return context


def _no_password() -> str:
    raise UsageError("the key file is encrypted: give one without a password")  # OpenSSL would ask the terminal


def client_context(ca_file: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """For the side that dials.  Without ``ca_file`` it accepts any certificate: the caller *must* compare the pin.

    Host names are not checked in either case: that the peer is the worker we dialled is what the handshake proves.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if ca_file is None:
        context.verify_mode = ssl.CERT_NONE
        return context
    try:
        context.load_verify_locations(cafile=ca_file)
    except OSError as error:
        raise UsageError(f"cannot read certificate authorities from {os.fspath(ca_file)}: {error}") from error
    return context


class TlsStream:
    """A ``Stream`` that encrypts.

    OpenSSL's connection must not be used by two threads at once, and ours has a reader and a writer.  So it works on
    memory, under a lock that is held for arithmetic only; the system calls, which may block, happen outside it:

    ::

        recv_into:  (1) socket → raw bytes   (2) lock: raw bytes → OpenSSL → plain bytes
        send:       (1) lock: 256 KiB of plain bytes → OpenSSL → raw bytes   (2) raw bytes → socket

    A reader never writes to the socket.  Should OpenSSL want to say something while it reads (the answer to a key
    update), that waits in ``_outgoing``, in its right place, for the next ``send``; TLS 1.3 allows it.

    Until ``trust`` is called the peer is a stranger: it may send 64 KiB in all, and its bytes are read record by
    record, so that at the end of the handshake nothing is left in here that the descriptor does not announce.
    """

    drain: ClassVar[bool] = True  # decrypted bytes may wait here that the descriptor knows nothing of

    def __init__(self, raw: SocketStream, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._raw = raw
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()
        self._scratch = memoryview(bytearray(_STRANGER_CHUNK))
        self._trusted = False
        self._heard = 0
        self._record_header = bytearray()
        self._record_left = 0

    def __repr__(self) -> str:
        return f"<TlsStream {self._tls.version()} over {self._raw!r}>"

    def fileno(self) -> int:
        return self._raw.fileno()

    # --- before TLS stands ---

    def handshake_step(self) -> bool:
        """Goes on with TLS's own handshake as far as the bytes that have come allow; True when it stands."""
        while True:
            try:
                self._tls.do_handshake()
                self._raw.send_now(self._outgoing.read())
                return True
            except ssl.SSLWantReadError:
                self._raw.send_now(self._outgoing.read())
            except ssl.SSLCertVerificationError as error:
                self._complain()
                raise AuthenticationError(f"the peer's certificate does not hold: {error.verify_message}") from error
            except ssl.SSLError as error:
                self._complain()
                raise ProtocolError(
                    f"no TLS 1.3 with the peer ({error.reason or error}): set TELEGRAD_SECRET on all workers or on none"
                ) from error
            try:
                if not self._fill():
                    raise ConnectionResetError("the peer closed during the TLS handshake: its log says why")
            except BlockingIOError:
                return False

    def _complain(self) -> None:
        """Lets the peer have OpenSSL's alert, if it still listens."""
        with contextlib.suppress(OSError):
            self._raw.send_now(self._outgoing.read())

    def peer_fingerprint(self) -> bytes:
        der = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(der).digest() if der else b""

    def check_pin(self, fingerprint: bytes) -> None:
        found = self.peer_fingerprint()
        if not hmac.compare_digest(found, fingerprint):
            raise AuthenticationError(
                f"the peer shows the certificate {found.hex()[:16]}…, its address promised {fingerprint.hex()[:16]}…: "
                "the worker was restarted, or someone is in between"
            )

    def trust(self) -> None:
        """The peer has proved itself: from here on, big reads and no limit."""
        self._trusted = True
        self._scratch = memoryview(bytearray(_RAW_CHUNK))

    # --- the stream ---

    def _fill(self) -> int:
        """Moves raw bytes from the socket to OpenSSL; called only when it has none left, so they do not pile up."""
        if self._trusted:
            size = self._raw.recv_into(self._scratch)
        else:
            size = self._fill_from_stranger()
        with self._lock:
            if size:
                self._incoming.write(self._scratch[:size])
            else:
                self._incoming.write_eof()
        return size

    def _fill_from_stranger(self) -> int:
        limit = min(self._record_left or _RECORD_HEADER - len(self._record_header), _STRANGER_CHUNK)
        size = self._raw.recv_into(self._scratch[:limit])
        self._heard += size
        if self._heard > _STRANGER_TOTAL:
            raise ProtocolError(f"more than {_STRANGER_TOTAL} bytes before the peer had proved itself")
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

    def _read(self, buffer: memoryview) -> int:
        """Decrypts what is there; OpenSSL gives one record of at most 16 KiB at a time."""
        got = 0
        while got < len(buffer):
            with self._lock:  # taken anew for each record, so that a writer gets its turn
                try:
                    size = cast(int, self._tls.read(len(buffer) - got, buffer[got:]))
                except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    break
            if not size:
                break
            got += size
        return got

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        for chunk in _chunks(buffers):
            self._raw.send([self._encrypt(chunk)])

    def send_now(self, data: bytes) -> None:
        """As ``SocketStream.send_now``."""
        self._raw.send_now(self._encrypt([memoryview(data)]))

    def _encrypt(self, views: Sequence[memoryview]) -> bytes:
        # Joined, because OpenSSL makes a record, with 22 bytes around it, of every write.
        plain = views[0] if len(views) == 1 else memoryview(b"".join(views))
        with self._lock:
            while plain.nbytes:
                plain = plain[self._tls.write(plain) :]
            return self._outgoing.read()

    def close(self) -> None:
        """Without TLS's farewell: it might block, and the frames above know when one was cut short."""
        self._raw.close()

    def disown(self) -> None:
        """As ``SocketStream.disown``."""
        self._raw.disown()


def _chunks(buffers: Sequence[bytes | bytearray | memoryview]) -> list[list[memoryview]]:
    """Cuts and gathers buffers into groups of at most ``_PLAIN_CHUNK`` bytes."""
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
