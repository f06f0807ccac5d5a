"""TLS: authorities, certificates, and a stream that one thread reads while another writes."""

from __future__ import annotations

import datetime
import hashlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from telegrad._transport.sockets import SocketStream
from telegrad._transport.tls import (
    Authority,
    Certificate,
    TlsEnd,
    TlsStream,
    load_authority,
    load_certificate,
    make_authority,
    tls_end,
)
from telegrad.errors import AuthenticationError, ProtocolError, UsageError

Pair = tuple[TlsStream, TlsStream]
KEY = b"the key of a job"
NOW = 0.0  # a deadline that has passed: send what the kernel takes at once


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority(KEY)


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.sign("bob")


@pytest.fixture(scope="module")
def server(certificate: Certificate, authority: Authority) -> TlsEnd:
    return tls_end(certificate, authority, server_side=True)


@pytest.fixture(scope="module")
def client(authority: Authority) -> TlsEnd:
    return tls_end(authority.sign("alice"), authority, server_side=False)


def tls_pair(server: TlsEnd, client: TlsEnd) -> Pair:
    """Both ends of a connection, TLS's handshake done, in one thread: neither end ever blocks."""
    a, b = socket.socketpair()
    one, two = TlsStream(SocketStream(a), client), TlsStream(SocketStream(b), server)
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
def ends(server: TlsEnd, client: TlsEnd) -> Iterator[Pair]:
    one, two = tls_pair(server, client)
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


# --- certificates ---


def test_a_certificate_is_fresh_and_no_key_is_printed(certificate: Certificate, authority: Authority) -> None:
    assert authority.sign("bob").fingerprint != certificate.fingerprint
    assert len(certificate.fingerprint) == 32
    assert "PRIVATE" not in repr(certificate)
    assert "_key" not in repr(authority)


def test_each_end_knows_the_certificate_of_the_other(ends: Pair, server: TlsEnd, client: TlsEnd) -> None:
    assert ends[0].peer_fingerprint() == server.fingerprint
    assert ends[1].peer_fingerprint() == client.fingerprint
    assert ends[0].binding() == ends[1].binding() == server.fingerprint + client.fingerprint
    assert "TLSv1.3" in repr(ends[0])


def test_the_fingerprint_is_of_the_certificate_shown(ends: Pair, certificate: Certificate) -> None:
    der = ssl.PEM_cert_to_DER_cert(certificate.cert_pem.decode())
    assert ends[0].peer_fingerprint() == hashlib.sha256(der).digest() == certificate.fingerprint


def test_files(tmp_path: Path, certificate: Certificate, authority: Authority) -> None:
    cert, key, other = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "other.pem"
    cert.write_bytes(b"a comment\n" + certificate.cert_pem + authority.cert_pem)
    key.write_bytes(certificate.key_pem)
    other.write_bytes(authority.sign("other").key_pem)
    assert load_certificate(cert, key).fingerprint == certificate.fingerprint
    for bad_cert, bad_key in [(cert, other), (key, key), (tmp_path / "none", key), (cert, cert)]:
        with pytest.raises(UsageError):
            load_certificate(bad_cert, bad_key)


def test_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path, certificate: Certificate) -> None:
    key = serialization.load_pem_private_key(certificate.key_pem, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"pw")
    )
    (tmp_path / "cert.pem").write_bytes(certificate.cert_pem)
    (tmp_path / "key.pem").write_bytes(locked)
    with pytest.raises(UsageError, match="encrypted"):
        load_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")


# --- who is let in ---


def test_workers_with_the_same_key_have_the_same_authority(server: TlsEnd) -> None:
    """Each worker makes it for itself."""
    mine = make_authority(KEY)
    one, two = tls_pair(server, tls_end(mine.sign("carol"), mine, server_side=False))
    assert two.peer_names() == {"carol"}
    one.close()
    two.close()


def test_a_client_of_another_authority_is_refused_and_told_so(server: TlsEnd, authority: Authority) -> None:
    """In TLS 1.3 the client is done before the server has seen its certificate, and hears of it at its next read."""
    stranger = make_authority(b"another key").sign("alice")
    a, b = socket.socketpair()
    one = TlsStream(SocketStream(a), tls_end(stranger, authority, server_side=False))
    two = TlsStream(SocketStream(b), server)
    assert not one.handshake_step()
    assert not two.handshake_step()
    assert one.handshake_step()
    with pytest.raises(AuthenticationError, match=r"not signed for this job .*set the same TELEGRAD_SECRET"):
        two.handshake_step()
    with pytest.raises(ssl.SSLError):
        one.recv_into(memoryview(bytearray(1)))
    one.close()
    two.close()


def test_a_server_of_another_authority_is_refused(client: TlsEnd, authority: Authority) -> None:
    stranger = make_authority(b"another key").sign("bob")
    with pytest.raises(AuthenticationError, match=r"not signed for this job .*set the same TELEGRAD_SECRET"):
        tls_pair(tls_end(stranger, authority, server_side=True), client)


def test_a_certificate_that_was_signed_by_another_worker_is_refused(server: TlsEnd, authority: Authority) -> None:
    """A worker's certificate is none of an authority."""
    worker, key = new_certificate(authority, "alice")
    forged, forged_key = new_certificate(Authority(worker, False, key), "mallory", issuer="alice")
    chain = Certificate(forged + worker, pem_of(forged_key), fingerprint_of(forged))
    with pytest.raises(AuthenticationError, match="not signed for this job"):
        tls_pair(server, tls_end(chain, authority, server_side=False))


def test_a_client_without_a_certificate_is_refused(server: TlsEnd) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    with pytest.raises((AuthenticationError, ProtocolError), match="TELEGRAD_SECRET"):
        tls_pair(server, TlsEnd(bare, b"", server_side=False))


def test_an_old_version_is_refused(server: TlsEnd, client: TlsEnd) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ProtocolError, match=r"no TLS 1\.3"):
        tls_pair(server, TlsEnd(old, client.fingerprint, server_side=False))


# --- an authority of the user's own ---


def new_certificate(authority: Authority, common_name: str, *dns_names: str, issuer: str = "telegrad job") -> Any:
    """A certificate in PEM as an authority outside of telegrad makes it, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    if dns_names:
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names])
        builder = builder.add_extension(names, critical=False)
    signed = builder.sign(authority._key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM), key


def pem_of(key: Any) -> bytes:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, serialization.NoEncryption())  # type: ignore[no-any-return]


def fingerprint_of(pem: bytes) -> bytes:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).digest()


@pytest.mark.parametrize(
    ("common_name", "dns_names", "found"),
    [("alice", (), {"alice"}), ("alice", ("trainer0", "ps0"), {"trainer0", "ps0"})],
)
def test_the_names_in_a_certificate(
    tmp_path: Path, common_name: str, dns_names: tuple[str, ...], found: set[str]
) -> None:
    root = make_authority(b"the key of the user's authority")
    (tmp_path / "ca.pem").write_bytes(root.cert_pem)
    certificate, key = new_certificate(root, common_name, *dns_names)
    (tmp_path / "cert.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(pem_of(key))
    authority = load_authority(tmp_path / "ca.pem")
    assert authority.names_workers
    mine = load_certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    one, two = tls_pair(
        tls_end(mine, authority, server_side=True), tls_end(root.sign("alice"), authority, server_side=False)
    )
    assert one.peer_names() == found
    one.close()
    two.close()


def test_the_authority_of_a_job_names_no_workers(authority: Authority) -> None:
    """Every worker has its key, and could sign any name."""
    assert not authority.names_workers


@pytest.mark.parametrize("content", [None, b"", b"no certificate", b"\xff\xfe"], ids=["none", "empty", "text", "bytes"])
def test_a_file_without_an_authority(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot read certificate authorities from .*ca\.pem"):
        load_authority(tmp_path / "ca.pem")


# --- strangers ---


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(400), b"\x93tlgrd\r\n" + bytes(100)])
def test_a_peer_without_tls(server: TlsEnd, first: bytes) -> None:
    a, b = socket.socketpair()
    stream = TlsStream(SocketStream(b), server)
    with a:
        a.sendall(first)
        with pytest.raises(ProtocolError, match=r"no TLS 1\.3"):
            stream.handshake_step()
    stream.close()


def test_a_stranger_may_not_go_on_for_ever(server: TlsEnd) -> None:
    """Well-formed records of a ClientHello that never ends."""
    a, b = socket.socketpair()
    stream = TlsStream(SocketStream(b), server)
    body = b"\x01\x01\xf0\x00" + bytes(12_000)  # says 126,976 bytes, of which the stranger sends piece by piece
    with a:
        a.sendall(b"\x16\x03\x01" + len(body).to_bytes(2, "big") + body)
        for _ in range(8):
            a.sendall(b"\x16\x03\x01" + (12_000).to_bytes(2, "big") + bytes(12_000))
        with pytest.raises(ProtocolError):
            stream.handshake_step()
    assert stream._heard <= 80_000
    stream.close()


# --- the stream ---


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


def test_a_record_that_was_changed_on_the_way(server: TlsEnd, client: TlsEnd) -> None:
    one, two = tls_pair(server, client)
    sealed = bytearray(one._encrypt([memoryview(b"hello")]))
    sealed[-1] ^= 1
    one._raw.send([sealed])
    with pytest.raises(OSError):
        two.recv_into(memoryview(bytearray(10)))
    one.close()
    two.close()


# --- a peer that does not read ---


def test_what_a_peer_does_not_read_by_the_deadline_comes_back_and_arrives_later(ends: Pair) -> None:
    ends[1].trust()
    data = os.urandom(6 << 20)
    rest = ends[0].send([data[:100], memoryview(data)[100:]], NOW)
    left = sum(view.nbytes for view in rest)
    assert 0 < left < len(data)
    assert bytes(b"".join(rest)) == data[-left:]
    sending = threading.Thread(target=lambda: ends[0].send([*rest, b"the end"]), daemon=True)
    sending.start()
    assert receive(ends[1], len(data) + 7) == data + b"the end"
    sending.join(10)
    assert not sending.is_alive()


def test_what_is_encrypted_already_goes_before_the_rest(ends: Pair) -> None:
    """A peer that reads a little at a time: each send ends within an encrypted chunk, and the next begins there."""
    ends[1].trust()
    data = os.urandom(6 << 20)
    got = bytearray()
    rest: Any = [data]
    for _ in range(1000):
        rest = ends[0].send(rest, NOW)
        if not rest:
            break
        got += receive(ends[1], 60_000)
    assert not rest
    assert got + receive(ends[1], len(data) - len(got)) == data


def test_a_message_that_is_all_encrypted_but_not_all_sent(ends: Pair) -> None:
    """Nothing of it is left to encrypt, but there is something left to send."""
    ends[1].trust()
    message, count = os.urandom(100_000), 0
    rest: Any = ()
    while not rest and count < 1000:
        rest = ends[0].send([message], NOW)
        count += 1
    assert rest
    assert sum(view.nbytes for view in rest) == 0
    assert ends[0].send(rest, NOW), "the peer has still not read"
    sending = threading.Thread(target=lambda: ends[0].send(rest), daemon=True)
    sending.start()
    assert receive(ends[1], count * len(message)) == message * count
    sending.join(10)
    assert not sending.is_alive()
    assert not ends[0].send([b"x"], NOW)
    assert receive(ends[1], 1) == b"x"
