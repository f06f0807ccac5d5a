"""TLS: certificates, pins, and a stream that one thread reads while another writes."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.transport.sockets import SocketStream
from telegrad.transport.tls import (
    Certificate,
    TlsStream,
    client_context,
    load_certificate,
    make_certificate,
    server_context,
)

Pair = tuple[TlsStream, TlsStream]


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return make_certificate()


def tls_pair(server: ssl.SSLContext, client: ssl.SSLContext) -> Pair:
    """Both ends of a connection, TLS's handshake done, in one thread: neither end ever blocks."""
    a, b = socket.socketpair()
    one = TlsStream(SocketStream(a), client, server_side=False)
    two = TlsStream(SocketStream(b), server, server_side=True)
    try:
        done = [False, False]
        for _ in range(10):
            done = [done[0] or one.handshake_step(), done[1] or two.handshake_step()]
        assert all(done)
    except BaseException:
        one.close()
        two.close()
        raise
    return one, two


@pytest.fixture
def ends(certificate: Certificate) -> Iterator[Pair]:
    one, two = tls_pair(server_context(certificate), client_context())
    yield one, two
    one.close()
    two.close()


def receive(stream: TlsStream, size: int, chunk: int = 1 << 20) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while got < size:
        try:
            count = stream.recv_into(view[got : got + chunk])
            assert count, f"closed after {got} of {size} bytes"
            got += count
        except BlockingIOError:
            assert poll.poll(10_000), f"nothing for 10 s, after {got} of {size} bytes"
    return data


def test_a_certificate_is_fresh_and_its_key_is_not_printed(certificate: Certificate) -> None:
    assert make_certificate().fingerprint != certificate.fingerprint
    assert len(certificate.fingerprint) == 32
    assert "PRIVATE" not in repr(certificate)


def test_the_fingerprint_is_of_the_certificate_shown(ends: Pair, certificate: Certificate) -> None:
    der = ssl.PEM_cert_to_DER_cert(certificate.cert_pem.decode())
    assert ends[0].peer_fingerprint() == hashlib.sha256(der).digest() == certificate.fingerprint
    ends[0].check_pin(certificate.fingerprint)
    assert "TLSv1.3" in repr(ends[0])


def test_a_wrong_pin(ends: Pair) -> None:
    with pytest.raises(AuthenticationError, match="promised 0000"):
        ends[0].check_pin(bytes(32))
    with pytest.raises(AuthenticationError):  # a peer without a certificate has no fingerprint at all
        ends[1].check_pin(bytes(32))


def test_files(tmp_path: Path, certificate: Certificate) -> None:
    cert, key, other = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "other.pem"
    cert.write_bytes(b"a comment\n" + certificate.cert_pem + make_certificate().cert_pem)
    key.write_bytes(certificate.key_pem)
    other.write_bytes(make_certificate().key_pem)
    assert load_certificate(cert, key).fingerprint == certificate.fingerprint
    for bad_cert, bad_key in [(cert, other), (key, key), (tmp_path / "none", key), (cert, cert)]:
        with pytest.raises(UsageError):
            load_certificate(bad_cert, bad_key)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path, certificate: Certificate) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(certificate.key_pem, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"pw")
    )
    (tmp_path / "cert.pem").write_bytes(certificate.cert_pem)
    (tmp_path / "key.pem").write_bytes(locked)
    with pytest.raises(UsageError, match="encrypted"):
        load_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_an_authority(tmp_path: Path, certificate: Certificate) -> None:
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(certificate.cert_pem)
    one, two = tls_pair(server_context(certificate), client_context(trusted))
    one.close()
    two.close()
    with pytest.raises(AuthenticationError, match="certificate does not hold"):
        tls_pair(server_context(make_certificate()), client_context(trusted))
    with pytest.raises(UsageError):
        client_context(tmp_path / "none")


def test_an_old_version_is_refused(certificate: Certificate) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ProtocolError, match=r"no TLS 1\.3"):
        tls_pair(server_context(certificate), old)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(400), b"\x93tlgrd\r\n" + bytes(100)])
def test_a_peer_without_tls(certificate: Certificate, first: bytes) -> None:
    a, b = socket.socketpair()
    stream = TlsStream(SocketStream(b), server_context(certificate), server_side=True)
    with a:
        a.sendall(first)
        with pytest.raises(ProtocolError, match=r"no TLS 1\.3"):
            stream.handshake_step()
    stream.close()


def test_a_stranger_may_not_go_on_for_ever(certificate: Certificate) -> None:
    """Well-formed records of a ClientHello that never ends."""
    a, b = socket.socketpair()
    stream = TlsStream(SocketStream(b), server_context(certificate), server_side=True)
    body = b"\x01\x01\xf0\x00" + bytes(12_000)  # says 126,976 bytes, of which the stranger sends piece by piece
    with a:
        a.sendall(b"\x16\x03\x01" + len(body).to_bytes(2, "big") + body)
        for _ in range(8):
            a.sendall(b"\x16\x03\x01" + (12_000).to_bytes(2, "big") + bytes(12_000))
        with pytest.raises(ProtocolError):
            stream.handshake_step()
    assert stream._heard <= 80_000
    stream.close()


def test_many_buffers_of_all_shapes(ends: Pair) -> None:
    ends[0].send([b"", b"abc", bytearray(b"de"), memoryview(b""), memoryview(b"fghi").cast("H")])
    assert receive(ends[1], 9) == b"abcdefghi"
    ends[1].trust()
    ends[0].send([bytes([n % 256]) for n in range(3000)])
    assert receive(ends[1], 3000, chunk=7) == bytes(n % 256 for n in range(3000))
    with pytest.raises(BlockingIOError):
        ends[1].recv_into(memoryview(bytearray(10)))


def test_what_is_decrypted_is_delivered_without_a_new_byte_on_the_socket(ends: Pair) -> None:
    ends[1].trust()
    ends[0].send([b"x" * 10_000])
    small = memoryview(bytearray(100))
    assert ends[1].recv_into(small) == 100  # the socket is now empty, and 9,900 bytes wait in the stream
    assert not select.select([ends[1].fileno()], [], [], 0)[0]
    assert receive(ends[1], 9_900, chunk=1000) == b"x" * 9_900


def test_before_trust_nothing_is_read_ahead(ends: Pair) -> None:
    ends[0].send([b"one"])
    ends[0].send([b"two"])
    small = memoryview(bytearray(100))
    assert ends[1].recv_into(small[:3]) == 3
    assert ends[1]._incoming.pending == 0
    assert select.select([ends[1].fileno()], [], [], 0)[0]  # the second record is announced by the descriptor


def test_read_and_write_at_once_both_ways(ends: Pair) -> None:
    size = 32 << 20
    data = [os.urandom(1 << 20) * 32, os.urandom(1 << 20) * 32]
    got = [bytearray(), bytearray()]

    def read(index: int) -> None:
        got[index] = receive(ends[index], size)

    def write(index: int) -> None:
        ends[index].send([data[index][:5], memoryview(data[index])[5:]])

    threads = [threading.Thread(target=target, args=(n,), daemon=True) for target in (read, write) for n in (0, 1)]
    for end in ends:
        end.trust()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert got[0] == data[1]
    assert got[1] == data[0]


def test_close_is_seen_and_may_be_repeated(ends: Pair) -> None:
    ends[0].close()
    ends[0].close()
    buffer = memoryview(bytearray(10))
    assert ends[1].recv_into(buffer) == 0
    assert ends[1].recv_into(buffer) == 0
    assert ends[0].recv_into(buffer) == 0
    with pytest.raises(OSError):
        ends[0].send([b"x"])


def test_a_record_that_was_changed_on_the_way(certificate: Certificate) -> None:
    one, two = tls_pair(server_context(certificate), client_context())
    sealed = bytearray(one._encrypt([memoryview(b"hello")]))
    sealed[-1] ^= 1
    one._raw.send([sealed])
    with pytest.raises(OSError):
        two.recv_into(memoryview(bytearray(10)))
    one.close()
    two.close()
