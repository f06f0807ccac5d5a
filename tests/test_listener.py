"""Listening and dialling over real sockets: which peers are let in, and what unauthenticated peers cost."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import pickle
import queue
import random
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from support import AT_ONCE, eventually
from telegrad._transport import listener as listener_module
from telegrad._transport import sockets
from telegrad._transport.base import Stream
from telegrad._transport.dial import Address, dial
from telegrad._transport.handshake import ClientHandshake, Identity, Kind, _message, derive_key
from telegrad._transport.identity import Credentials
from telegrad._transport.listener import Listener, ListeningSocket
from telegrad._transport.refusals import LINES
from telegrad._transport.sockets import (
    SocketStream,
    connect_tcp,
    connect_unix,
    is_loopback,
    listen_tcp,
    listen_unix,
)
from telegrad._transport.tls import Authority, Certificate, TlsEnd, load_authority, make_authority, tls_end
from telegrad.errors import AuthenticationError, ProtocolError, RendezvousError, RpcTimeoutError, UsageError

KEY = derive_key(b"secret", "job")
OTHER_KEY = derive_key(b"another", "job")
ALICE = Identity(0, "alice", b"nonce of alice..")
BOB = Identity(1, "bob", b"nonce of bob....")
PATIENCE = 10.0

Transport = Literal["unix", "tcp"]
Arrival = tuple[Stream, Identity, Credentials]


class Papers:
    """An authority, and a certificate of it for each of two workers; made once, because keys take time."""

    def __init__(self, key: bytes) -> None:
        self.authority: Authority = make_authority(key)
        self.alice: Certificate = self.authority.sign("alice")
        self.bob: Certificate = self.authority.sign("bob")

    def client(self) -> TlsEnd:
        return tls_end(self.alice, self.authority, server_side=False)

    def server(self) -> TlsEnd:
        return tls_end(self.bob, self.authority, server_side=True)


def anyone(credentials: Credentials) -> None:
    """A check that every peer passes."""


class House:
    """A listener for "bob" on both transports, and the streams that it handed over."""

    def __init__(self, papers: Papers, **options: Any) -> None:
        unix, path = listen_unix()
        tcp, (host, port) = listen_tcp("127.0.0.1", 0)
        self.addresses: dict[Transport, Address] = {
            "unix": Address("unix", path),
            "tcp": Address("tcp", host, port, papers.bob.fingerprint),
        }
        self.papers = papers
        self.arrivals: queue.Queue[Arrival] = queue.Queue()
        self._open: list[Stream | socket.socket] = []
        listening = [ListeningSocket(unix), ListeningSocket(tcp, papers.server())]
        self.listener = Listener(listening, KEY, BOB, lambda *arrival: self.arrivals.put(arrival), **options)

    def dial(
        self,
        transport: Transport,
        key: bytes = KEY,
        expect: Identity = BOB,
        check: Callable[[Credentials], None] = anyone,
        tls: TlsEnd | None = None,
    ) -> Stream:
        tls = tls or self.papers.client()
        stream = dial(self.addresses[transport], key, ALICE, expect, PATIENCE, check, tls)
        self._open.append(stream)
        return stream

    def stranger(self, transport: Transport) -> socket.socket:
        address = self.addresses[transport]
        if transport == "unix":
            sock = connect_unix(address.host, PATIENCE)
        else:
            sock = connect_tcp(address.host, address.port, PATIENCE)
        sock.settimeout(PATIENCE)
        self._open.append(sock)
        return sock

    def arrival(self) -> Arrival:
        arrival = self.arrivals.get(timeout=PATIENCE)
        self._open.append(arrival[0])
        return arrival

    def close(self) -> None:
        self.listener.close()
        while not self.arrivals.empty():
            self.arrival()
        for stream in self._open:
            stream.close()


@pytest.fixture(scope="module")
def papers() -> Papers:
    return Papers(KEY)


@pytest.fixture(scope="module")
def other_papers() -> Papers:
    return Papers(OTHER_KEY)


@pytest.fixture
def open_house(papers: Papers) -> Iterator[Callable[..., House]]:
    houses: list[House] = []

    def build(**options: Any) -> House:
        houses.append(House(papers, **options))
        return houses[-1]

    yield build
    for house in houses:
        house.close()


@pytest.fixture
def house(open_house: Callable[..., House]) -> House:
    return open_house()


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param  # type: ignore[no-any-return]


def receive(stream: Stream, size: int) -> bytes:
    data, got = memoryview(bytearray(size)), 0
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    while got < size:
        try:
            count = stream.recv_into(data[got:])
            assert count, f"closed after {got} of {size} bytes"
            got += count
        except BlockingIOError:
            assert poll.poll(PATIENCE * 1000), f"nothing for {PATIENCE} s"
    return bytes(data)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side hangs up, whatever it says before; waits for it."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """The log's lines, once there are ``count`` of them, and that there are no more a moment later."""
    deadline = time.monotonic() + PATIENCE
    while len(caplog.records) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.02)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == count, found
    assert {record.name for record in caplog.records} == {"telegrad.transport"}
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- who gets in ---


def test_a_peer_with_the_secret_gets_in(house: House, transport: Transport) -> None:
    mine = house.dial(transport)
    theirs, peer, _ = house.arrival()
    assert peer == ALICE
    mine.send([b"ping", memoryview(b"!")])
    assert receive(theirs, 5) == b"ping!"
    theirs.send([b"pong"])
    assert receive(mine, 4) == b"pong"


def test_on_a_unix_socket_both_ends_are_told_the_process_of_the_other(house: House) -> None:
    seen: list[Credentials] = []
    house.dial("unix", check=seen.append)
    assert seen == [house.arrival()[2]] == [Credentials(pid=os.getpid())]


def test_on_tcp_both_ends_are_told_the_certificate_of_the_other(house: House, papers: Papers) -> None:
    seen: list[Credentials] = []
    house.dial("tcp", check=seen.append)
    assert seen == [Credentials(fingerprint=papers.bob.fingerprint, names=frozenset({"bob"}))]
    assert house.arrival()[2] == Credentials(fingerprint=papers.alice.fingerprint, names=frozenset({"alice"}))


def test_the_servers_first_words_are_not_swallowed(papers: Papers, transport: Transport) -> None:
    """What the server says right behind its WELCOME is announced by the descriptor, and whole."""
    kept: list[Stream] = []

    class Eager(House):
        def arrived(self, stream: Stream, peer: Identity, credentials: Credentials) -> None:
            stream.send([b"first words"])
            kept.append(stream)

    eager = Eager(papers)
    eager.listener._on_connection = eager.arrived
    try:
        for _ in range(20):
            stream = eager.dial(transport)
            assert select.select([stream.fileno()], [], [], PATIENCE)[0]
            assert receive(stream, 11) == b"first words"
    finally:
        eager.close()
        for stream in kept:
            stream.close()


def test_ipv6(papers: Papers) -> None:
    try:
        sock, (host, port) = listen_tcp("::1", 0)
    except (UsageError, RendezvousError, OSError):
        pytest.skip("no IPv6 on this machine")
    arrivals: queue.Queue[Stream] = queue.Queue()
    listening = ListeningSocket(sock, papers.server())
    listener = Listener([listening], KEY, BOB, lambda stream, peer, credentials: arrivals.put(stream))
    address = Address("tcp", host, port, papers.bob.fingerprint)
    assert str(address) == f"tls:[::1]:{port}"
    dial(address, KEY, ALICE, BOB, PATIENCE, anyone, papers.client()).close()
    arrivals.get(timeout=PATIENCE).close()
    listener.close()


# --- who does not ---


def test_another_secret(house: House, transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError, match=r"worker 'bob' at .*set the same TELEGRAD_SECRET"):
        house.dial(transport, key=OTHER_KEY)
    assert "set the same TELEGRAD_SECRET" in lines(caplog, 1)[0]
    assert house.arrivals.empty()


def test_a_server_with_another_secret_that_lets_everyone_in() -> None:
    """The client notices too: an impostor answers with a WELCOME that it cannot sign."""
    sock, path = listen_unix()

    def impostor() -> None:
        connection, _ = sock.accept()
        with connection:
            connection.recv(500)
            connection.sendall(_message(Kind.CHALLENGE, b"n" * 32))
            connection.recv(500)
            connection.sendall(_message(Kind.WELCOME, b"m" * 32 + BOB.encode()))

    thread = threading.Thread(target=impostor, daemon=True)
    thread.start()
    with sock, pytest.raises(AuthenticationError, match="could not authenticate"):
        dial(Address("unix", path), KEY, ALICE, BOB, PATIENCE, anyone)
    thread.join(PATIENCE)


def test_the_wrong_worker(house: House, transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError, match=r"dialled worker 5 and reached worker 1 \('bob'\)"):
        house.dial(transport, expect=Identity(5, "eve"))
    assert "looked for worker 5" in lines(caplog, 1)[0]
    assert house.arrivals.empty()


def test_random_bytes(house: House, transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(7)
    for _ in range(10):
        with house.stranger(transport) as sock:
            try:
                sock.sendall(b"\xee" + chance.randbytes(10_000))
            except OSError:
                pass  # refused before we had finished
            assert is_closed(sock)
    lines(caplog, 10)
    assert house.arrivals.empty()


@pytest.mark.parametrize("size", [181, 0xFFFF])
def test_a_huge_length(house: House, caplog: pytest.LogCaptureFixture, size: int) -> None:
    with house.stranger("unix") as sock:
        sock.sendall(_message(Kind.HELLO, b"")[:11] + size.to_bytes(2, "big"))
        assert is_closed(sock)
    assert f"HELLO of {size} bytes" in lines(caplog, 1)[0]


def test_a_worker_of_another_job_or_before_a_restart(house: House, transport: Transport) -> None:
    """It has the name, the id and the key, but did not draw the nonce that the record names."""
    with pytest.raises(AuthenticationError, match="or that worker of another job"):
        house.dial(transport, expect=Identity(BOB.worker_id, BOB.name, b"another nonce..."))


def test_without_tls_at_a_tcp_door(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.stranger("tcp") as sock:
        sock.sendall(ClientHandshake(KEY, ALICE, BOB).start())
        assert is_closed(sock)
    assert "no TLS 1.3" in lines(caplog, 1)[0]
    assert house.arrivals.empty()


def test_with_tls_at_a_unix_door(house: House, papers: Papers, caplog: pytest.LogCaptureFixture) -> None:
    with house.stranger("unix") as sock:
        context = papers.client().context
        with pytest.raises(OSError):
            context.wrap_socket(sock)
    assert "looks like TLS" in lines(caplog, 1)[0]


def test_tcp_is_not_dialled_without_tls(house: House) -> None:
    with pytest.raises(AuthenticationError, match=r"worker 'bob' at tls:.*TCP needs TLS"):
        dial(house.addresses["tcp"], KEY, ALICE, BOB, PATIENCE, anyone)


def test_a_peer_whose_credentials_the_dialler_refuses(
    house: House, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it does not say a word of the handshake."""

    def check(credentials: Credentials) -> None:
        raise AuthenticationError("not the one of the record")

    with pytest.raises(AuthenticationError, match=r"worker 'bob' at .*: not the one of the record"):
        house.dial(transport, check=check)
    assert "before its HELLO had come" in lines(caplog, 1)[0]
    assert house.arrivals.empty()


def test_a_certificate_that_the_record_does_not_name(house: House, papers: Papers) -> None:
    with pytest.raises(AuthenticationError, match=f"shows the certificate {papers.bob.fingerprint.hex()[:16]}"):
        house.dial("tcp", check=lambda credentials: credentials.check_certificate(bytes(32)))


def test_a_process_that_the_record_does_not_name(house: House) -> None:
    with pytest.raises(AuthenticationError, match=f"process {os.getpid()} is at the other end"):
        house.dial("unix", check=lambda credentials: credentials.check_process(1))


def test_a_client_certificate_of_another_authority(
    house: House, papers: Papers, other_papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    """The key of the handshake alone is not enough, and the client hears why."""
    strange = tls_end(other_papers.alice, papers.authority, server_side=False)
    for _ in range(10):
        with pytest.raises(AuthenticationError, match=r"'bob' at .*refused the TLS connection .*TELEGRAD_SECRET"):
            house.dial("tcp", tls=strange)
    assert all("not signed for this job" in line for line in lines(caplog, 10))
    assert house.arrivals.empty()


def test_a_server_certificate_of_another_authority(
    house: House, papers: Papers, other_papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    strange = tls_end(papers.alice, other_papers.authority, server_side=False)
    with pytest.raises(AuthenticationError, match=r"worker 'bob' at .*not signed for this job"):
        house.dial("tcp", tls=strange)
    lines(caplog, 1)
    assert house.arrivals.empty()


def test_a_certificate_for_another_worker_of_an_authority_that_names_them(tmp_path: Path, papers: Papers) -> None:
    """The network asks this where the user gave ``tls_ca``; each worker has a certificate of its own then."""
    (tmp_path / "ca.pem").write_bytes(papers.authority.cert_pem)
    authority = load_authority(tmp_path / "ca.pem")
    assert authority.names_workers
    sock, (host, port) = listen_tcp("127.0.0.1", 0)
    mallory = papers.authority.sign("mallory")  # signed as it should be, and it knows the key of the job
    refused: queue.Queue[str] = queue.Queue()

    def accept(stream: Stream, peer: Identity, credentials: Credentials) -> None:
        stream.close()
        try:
            credentials.check_name(peer.name)
        except AuthenticationError as error:
            refused.put(str(error))

    listener = Listener([ListeningSocket(sock, tls_end(mallory, authority, server_side=True))], KEY, BOB, accept)
    address = Address("tcp", host, port, mallory.fingerprint)
    try:
        with pytest.raises(AuthenticationError, match="certificate is for 'mallory', not for worker 'bob'"):
            dial(address, KEY, ALICE, BOB, PATIENCE, lambda shown: shown.check_name("bob"), papers.client())
        as_mallory = tls_end(mallory, authority, server_side=False)
        dial(address, KEY, ALICE, BOB, PATIENCE, anyone, as_mallory).close()
        assert "for 'mallory', not for worker 'alice'" in refused.get(timeout=PATIENCE)
    finally:
        listener.close()


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "exploded", True)


def test_a_pickle_is_never_loaded(house: House, transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    Bomb.exploded = False
    bomb = pickle.dumps(Bomb())
    with house.stranger(transport) as sock:
        sock.sendall(bomb)
        assert is_closed(sock)
    assert transport == "tcp" or "looks like a pickle" in lines(caplog, 1)[0]
    assert not Bomb.exploded
    pickle.loads(bomb)
    assert Bomb.exploded  # it was a live one


def test_another_user(house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sockets, "peer_credentials", lambda sock: (4711, os.geteuid() + 1))
    with house.stranger("unix") as sock:
        assert is_closed(sock)
    assert f"runs as user {os.geteuid() + 1}" in lines(caplog, 1)[0]
    with pytest.raises(AuthenticationError, match="run all workers of a host as the same user"):
        house.dial("unix")  # the dialler asks the same of the listener


def test_two_clients_fed_to_each_other() -> None:
    """An attacker in the middle, without the secret, lets two workers that dial prove themselves to each other."""
    a, b = socket.socketpair()
    one, two = ClientHandshake(KEY, ALICE, BOB), ClientHandshake(KEY, BOB, ALICE)
    with a, b:
        a.sendall(one.start())
        b.sendall(two.start())
        for sock, machine in ((a, one), (b, two)):
            sock.settimeout(PATIENCE)
            with pytest.raises(ProtocolError):
                machine.feed(sock.recv(500))
            assert not machine.done


# --- what strangers cost ---


def test_silence(open_house: Callable[..., House], transport: Transport, caplog: pytest.LogCaptureFixture) -> None:
    house = open_house(handshake_timeout=0.2)
    began = time.monotonic()
    with house.stranger(transport) as sock:
        assert is_closed(sock)
    assert 0.15 < time.monotonic() - began < AT_ONCE
    assert "did not come within 0.2 s" in lines(caplog, 1)[0]


def test_one_byte_at_a_time_wins_no_time(
    open_house: Callable[..., House], transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    house = open_house(handshake_timeout=0.4)
    hello = b"\x16\x03\x01\x01\x00\x01" if transport == "tcp" else ClientHandshake(KEY, ALICE, BOB).start()
    began = time.monotonic()
    with house.stranger(transport) as sock:
        try:
            for byte in hello + bytes(1000):
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            pass
    assert 0.3 < time.monotonic() - began < AT_ONCE
    lines(caplog, 1)


def test_three_hundred_silent_strangers(house: House, caplog: pytest.LogCaptureFixture) -> None:
    before = resident()
    strangers = [house.stranger(("tcp", "unix")[n % 2]) for n in range(300)]
    began = time.monotonic()
    for transport in ("unix", "tcp"):
        house.dial(transport)
        assert house.arrival()[1] == ALICE
    assert time.monotonic() - began < AT_ONCE
    evicted = [record.getMessage() for record in caplog.records]  # the oldest went
    assert len(evicted) == LINES + 1
    assert all("the oldest is closed" in line for line in evicted[:LINES])
    assert evicted[LINES] == "more refused connections are only counted for the rest of this minute"
    assert house.listener._refusals._unwritten in range(300 - 256 - LINES, 300 - 256 - LINES + 3)  # ours came in, too
    assert is_closed(strangers[0])
    assert len(house.listener._pending) <= 256
    assert resident() - before < 64 << 20
    open_before = descriptors()
    house.listener.close()
    assert descriptors() <= open_before - 256 - 2


def test_no_descriptor_leaks(house: House, papers: Papers, other_papers: Papers) -> None:
    strange = tls_end(other_papers.alice, papers.authority, server_side=False)

    def visit() -> None:
        for transport in ("unix", "tcp"):
            with house.stranger(transport) as sock:
                sock.sendall(b"hello")
                assert is_closed(sock)
        with pytest.raises(AuthenticationError):
            house.dial("tcp", key=OTHER_KEY)
        with pytest.raises(AuthenticationError):
            house.dial("tcp", tls=strange)

    visit()
    assert eventually(lambda: not house.listener._pending)
    before = descriptors()
    for _ in range(20):
        visit()
    assert eventually(lambda: descriptors() <= before)  # fewer, when those of an earlier test are closed late


def test_out_of_descriptors(house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The listener waits, without spinning, says so once, and goes on when there are descriptors again."""
    monkeypatch.setattr(listener_module, "_PAUSE_SECONDS", 0.05)
    attempts: list[float] = []

    def starved(self: socket.socket) -> Any:
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", starved)
        sock = house.stranger("unix")
        deadline = time.monotonic() + PATIENCE
        while len(attempts) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(attempts) >= 4
    assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(attempts))
    house.dial("unix")
    assert house.arrival()[1] == ALICE
    sock.sendall(b"?")
    assert is_closed(sock)
    assert "Too many open files" in lines(caplog, 2)[0]


def test_an_exception_in_on_connection_is_logged_and_the_door_stays_open(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    good = house.listener._on_connection

    def bad(stream: Stream, peer: Identity, credentials: Credentials) -> None:
        raise ValueError("no room")

    house.listener._on_connection = bad
    stream = house.dial("unix")
    assert select.select([stream.fileno()], [], [], PATIENCE)[0]
    assert stream.recv_into(memoryview(bytearray(1))) == 0
    assert "lost in on_connection" in caplog.text
    house.listener._on_connection = good
    house.dial("unix")
    assert house.arrival()[1] == ALICE


def test_a_peer_that_on_connection_refuses(
    house: House, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows the key, but is not in this job, or not the one that it says it is."""

    def refuse(stream: Stream, peer: Identity, credentials: Credentials) -> None:
        raise AuthenticationError(f"no worker {peer.name!r} in this job")

    house.listener._on_connection = refuse
    stream = house.dial(transport)
    assert select.select([stream.fileno()], [], [], PATIENCE)[0]
    assert stream.recv_into(memoryview(bytearray(1))) == 0
    (line,) = lines(caplog, 1)
    where = f"process {os.getpid()} of user {os.geteuid()}" if transport == "unix" else r"127\.0\.0\.1 port \d+"
    assert re.fullmatch(rf"refused a connection from {where}: no worker 'alice' in this job", line)


def test_close(house: House) -> None:
    waiting = house.stranger("unix")
    mine = house.dial("tcp")
    theirs, _, _ = house.arrival()
    house.listener.close()
    house.listener.close()
    assert repr(house.listener) == "<Listener of 'bob': closed>"
    assert not house.listener._thread.is_alive()
    assert is_closed(waiting)
    mine.send([b"still here"])
    assert receive(theirs, 10) == b"still here"
    for transport in ("unix", "tcp"):
        with pytest.raises(ConnectionRefusedError):
            house.dial(transport)


# --- dialling ---


def test_a_server_that_says_nothing(papers: Papers, transport: Transport) -> None:
    if transport == "unix":
        sock, path = listen_unix()
        address, missing = Address("unix", path), "its CHALLENGE"
    else:
        sock, (host, port) = listen_tcp("127.0.0.1", 0)
        address, missing = Address("tcp", host, port, papers.bob.fingerprint), "the TLS handshake"
    message = rf"worker 'bob' at {re.escape(str(address))}: connected, but {missing} did not come within 0\.2 s"
    began = time.monotonic()
    with sock, pytest.raises(RpcTimeoutError, match=message):
        dial(address, KEY, ALICE, BOB, 0.2, anyone, papers.client())
    assert time.monotonic() - began < AT_ONCE


def test_a_full_backlog() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"\0telegrad-test-{os.getpid()}")
        sock.listen(0)
        address = Address("unix", f"@telegrad-test-{os.getpid()}")
        with connect_unix(address.host, PATIENCE), pytest.raises(RpcTimeoutError, match=r"no connection within 0\.1 s"):
            dial(address, KEY, ALICE, BOB, 0.1, anyone)


def test_nobody_there(papers: Papers) -> None:
    sock, (host, port) = listen_tcp("127.0.0.1", 0)
    sock.close()
    with pytest.raises(ConnectionRefusedError):
        dial(Address("tcp", host, port), KEY, ALICE, BOB, PATIENCE, anyone, papers.client())
    with pytest.raises(ConnectionRefusedError):
        dial(Address("unix", "@telegrad-nobody"), KEY, ALICE, BOB, PATIENCE, anyone)
    with pytest.raises(UsageError, match="a port is 1 to 65535"):
        dial(Address("tcp", host, port + 65536), KEY, ALICE, BOB, PATIENCE, anyone, papers.client())


# --- sockets ---


def test_a_port_in_use() -> None:
    sock, (host, port) = listen_tcp("127.0.0.1", 0)
    with sock, pytest.raises(RendezvousError, match=rf"127\.0\.0\.1:{port}: the port is in use"):
        listen_tcp(host, port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_listened_on(host: str, port: int) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        listen_tcp(host, port)


def test_is_loopback() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "10.0.0.1", "::", "", "192.0.2.1", "fe80::1%lo", "no such host"):
        assert not is_loopback(host), host


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, SocketStream]]:
    a, b = socket.socketpair()
    one, two = SocketStream(a), SocketStream(b)
    yield one, two
    one.close()
    two.close()


def test_more_buffers_than_one_system_call_takes(ends: tuple[SocketStream, SocketStream]) -> None:
    parts: list[bytes | bytearray | memoryview] = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    parts[17] = memoryview(b"abcd").cast("I")
    whole = b"".join(bytes(part) for part in parts)
    sender = threading.Thread(target=ends[0].send, args=(parts,), daemon=True)
    sender.start()
    assert receive(ends[1], len(whole)) == whole
    sender.join(PATIENCE)
    assert not sender.is_alive()


def test_partial_sends_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take as little as it likes of each call."""
    taken = bytearray()

    class Reluctant(socket.socket):
        def sendmsg(self, buffers: Any, *rest: Any) -> int:
            assert len(buffers) <= 1024
            part = b"".join(buffers)[:777]
            taken.extend(part)
            return len(part)

        def send(self, data: Any, *rest: Any) -> int:
            return self.sendmsg([data])

    stream = SocketStream(Reluctant(socket.AF_UNIX))
    data = os.urandom(10_000)
    stream.send([data])
    stream.send([data[:1], b"", memoryview(data)[1:5000], bytearray(data[5000:])])
    stream.close()
    assert taken == data + data


@pytest.mark.parametrize("deadline", [0.0, 0.05], ids=["passed", "to come"])
def test_what_a_peer_does_not_read_by_the_deadline_comes_back_and_arrives_later(
    ends: tuple[SocketStream, SocketStream], deadline: float
) -> None:
    data = random.Random(1).randbytes(8 << 20)
    parts = [data[:1000], b"", memoryview(data)[1000 : 5 << 20].cast("I"), bytearray(data[5 << 20 :])]
    rest = ends[0].send(parts, time.monotonic() + deadline if deadline else 0.0)
    left = sum(view.nbytes for view in rest)
    assert 0 < left < len(data)
    assert b"".join(rest) == data[-left:]
    assert ends[0].send([b"x"], 0.0) == [b"x"]
    sender = threading.Thread(target=ends[0].send, args=([*rest, b"the end"],), daemon=True)
    sender.start()
    assert receive(ends[1], len(data) + 7) == data + b"the end"
    sender.join(PATIENCE)
    assert not sender.is_alive()


def test_one_buffer_that_is_taken_in_pieces(ends: tuple[SocketStream, SocketStream]) -> None:
    data = random.Random(2).randbytes(8 << 20)
    got = bytearray()
    rest: Any = [data]
    for _ in range(1000):
        rest = ends[0].send(rest, 0.0)
        if not rest:
            break
        got += receive(ends[1], 100_000)
    assert not rest
    assert got + receive(ends[1], len(data) - len(got)) == data


def test_a_deadline_that_has_passed_is_no_reason_not_to_send(ends: tuple[SocketStream, SocketStream]) -> None:
    assert not ends[0].send([b"one"], 0.0)
    assert not ends[0].send([b"t", b"wo"], 0.0)
    assert receive(ends[1], 6) == b"onetwo"


def test_a_peer_that_closes_ends_a_send_before_its_deadline(ends: tuple[SocketStream, SocketStream]) -> None:
    rest = ends[0].send([bytes(8 << 20)], 0.0)
    closer = threading.Timer(0.05, ends[1].close)
    closer.start()
    with pytest.raises(OSError):
        ends[0].send(rest, time.monotonic() + PATIENCE)
    closer.join()


def test_the_host_of_a_unix_socket_is_never_silent(ends: tuple[SocketStream, SocketStream]) -> None:
    """It is this one, also while the peer reads nothing."""
    ends[0].watch_host(1.0)
    assert ends[0].send([bytes(8 << 20)], 0.0)
    assert not ends[0].host_is_silent(0.0)
    ends[0].close()
    assert not ends[0].host_is_silent(0.0)


def test_a_host_that_acknowledges_is_not_silent_though_its_process_reads_nothing() -> None:
    sock, (host, port) = listen_tcp("127.0.0.1", 0)
    with sock:
        one = SocketStream(connect_tcp(host, port, PATIENCE))
        two, _ = sock.accept()
    with two:
        one.watch_host(1.0)
        assert one._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        while not one.send([bytes(1 << 20)], 0.0):
            pass
        assert not one.host_is_silent(0.0)
        one.close()
        assert not one.host_is_silent(0.0)


def test_close_wakes_a_blocked_send_and_the_number_is_not_reused_meanwhile(
    ends: tuple[SocketStream, SocketStream],
) -> None:
    failures: list[OSError] = []

    def blocked() -> None:
        try:
            ends[0].send([bytes(64 << 20)])
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=blocked, daemon=True)
    thread.start()
    while not ends[0]._sending:
        time.sleep(0.001)
    time.sleep(0.05)
    ends[0].close()
    ends[0].close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert failures
    assert ends[0].fileno() == -1
    assert ends[0].recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(BrokenPipeError):
        ends[0].send([b"x"])


def test_close_leaves_the_descriptor_to_the_last_one_out(ends: tuple[SocketStream, SocketStream]) -> None:
    ends[0]._receiving = True  # as if a reader stood between reading the number and the system call
    ends[0].close()
    assert ends[0].fileno() >= 0
    ends[0]._receiving = False
    assert ends[0].recv_into(memoryview(bytearray(1))) == 0
    assert ends[0].fileno() == -1
