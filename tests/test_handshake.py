"""The handshake's two machines, without sockets: what they accept, and that nothing else gets through."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad._transport.handshake import (
    JOIN_NONCE,
    MAGIC,
    MAX_BUFFERED,
    MAX_NAME,
    VERSION,
    ClientHandshake,
    Handshake,
    Identity,
    Kind,
    Refusal,
    ServerHandshake,
    _message,
    derive_key,
)
from telegrad.errors import AuthenticationError, ProtocolError, UsageError

FUZZ = settings(
    max_examples=int(os.environ.get("TELEGRAD_FUZZ_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
KEY = derive_key(b"secret", "job")
OTHER_KEY = derive_key(b"another", "job")
ALICE = Identity(0, "alice", b"a" * JOIN_NONCE)
BOB = Identity(1, "bob", b"b" * JOIN_NONCE)
OTHER_BOB = Identity(1, "bob", b"c" * JOIN_NONCE)  # of another job, or before a restart


def converse(client: Handshake, server: Handshake, piece: int = 1000) -> None:
    """Carries bytes to and fro, ``piece`` at a time, until both have nothing more to say."""
    to_server, to_client = client.start(), b""
    while to_server or to_client:
        answer = b""
        for at in range(0, len(to_server), piece):
            answer += server.feed(to_server[at : at + piece])
        to_server, to_client = b"", answer
        for at in range(0, len(to_client), piece):
            to_server += client.feed(to_client[at : at + piece])
        to_client = b""


def pair(
    client_key: bytes = KEY, server_key: bytes = KEY, expect: Identity = BOB
) -> tuple[ClientHandshake, ServerHandshake]:
    return ClientHandshake(client_key, ALICE, expect), ServerHandshake(server_key, BOB)


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_both_learn_who_the_other_is(piece: int) -> None:
    client, server = pair()
    converse(client, server, piece)
    assert client.done
    assert server.done
    assert client.peer == BOB
    assert server.peer == ALICE


def test_the_longest_name_fits() -> None:
    me = Identity(65535, "é" * (MAX_NAME // 2))
    client, server = ClientHandshake(KEY, me, me), ServerHandshake(KEY, me)
    converse(client, server, 1)
    assert server.peer == me == client.peer


@pytest.mark.parametrize(("worker_id", "name"), [(-1, "a"), (65536, "a"), (0, ""), (0, "x" * 129), (0, "\ud800")])
def test_an_identity_that_cannot_be(worker_id: int, name: str) -> None:
    with pytest.raises(UsageError):
        Identity(worker_id, name)


@pytest.mark.parametrize("nonce", [b"", bytes(JOIN_NONCE - 1), bytes(JOIN_NONCE + 1)])
def test_a_nonce_of_another_size(nonce: bytes) -> None:
    with pytest.raises(UsageError, match=f"has {JOIN_NONCE} bytes, not {len(nonce)}"):
        Identity(0, "a", nonce)


def test_an_identity_comes_back() -> None:
    assert Identity.decode(ALICE.encode()) == ALICE
    assert Identity.decode(OTHER_BOB.encode()) != BOB


def test_the_longest_messages_are_shorter_than_the_buffer() -> None:
    longest = Identity(65535, "x" * MAX_NAME)
    client, server = ClientHandshake(KEY, longest, longest), ServerHandshake(KEY, longest)
    hello = client.start()
    assert len(hello) < MAX_BUFFERED
    assert len(server.feed(client.feed(server.feed(hello)))) < MAX_BUFFERED


def test_the_key_depends_on_secret_and_job() -> None:
    assert len({derive_key(b"a", "x"), derive_key(b"b", "x"), derive_key(b"a", "y"), derive_key(b"", "x")}) == 4


def test_repr_shows_the_state() -> None:
    client, server = pair()
    assert repr(client) == "<client handshake of 'alice': waits for CHALLENGE>"
    converse(client, server)
    assert repr(server) == "<server handshake of 'bob': done>"


# --- who does not get in ---


def test_a_client_with_another_secret_is_refused_and_told_so() -> None:
    client, server = pair(client_key=OTHER_KEY)
    proof = client.feed(server.feed(client.start()))
    with pytest.raises(AuthenticationError, match="TELEGRAD_SECRET"):
        server.feed(proof)
    assert not server.done
    assert server.peer is None
    with pytest.raises(AuthenticationError, match="TELEGRAD_SECRET"):
        client.feed(server.farewell)


def test_a_server_without_the_secret_cannot_pretend() -> None:
    client, server = pair()
    proof = client.feed(server.feed(client.start()))
    assert proof
    with pytest.raises(AuthenticationError, match="could not authenticate"):
        client.feed(_message(Kind.WELCOME, b"\0" * 32 + BOB.encode()))
    assert not client.done
    assert client.peer is None


def test_the_server_tells_a_stranger_nothing_that_depends_on_the_secret() -> None:
    server = ServerHandshake(KEY, BOB)
    challenge = server.feed(ClientHandshake(OTHER_KEY, ALICE, BOB).start())
    assert len(challenge) == 13 + 32
    assert b"bob" not in challenge


def test_the_wrong_worker_is_noticed_on_both_sides() -> None:
    client, server = pair(expect=Identity(7, "carol"))
    proof = client.feed(server.feed(client.start()))
    with pytest.raises(AuthenticationError, match="looked for worker 7, this is worker 1"):
        server.feed(proof)
    with pytest.raises(AuthenticationError, match=r"dialled worker 7 and reached worker 1 \('bob'\)"):
        client.feed(server.farewell)
    assert not server.done
    assert not client.done


@pytest.mark.parametrize("expect", [OTHER_BOB, Identity(1, "robert", BOB.nonce)])
def test_a_worker_with_another_nonce_or_name_is_noticed_by_the_dialler(expect: Identity) -> None:
    """It has the key and the id, but is not the one whose record the dialler has read."""
    client, server = pair(expect=expect)
    with pytest.raises(AuthenticationError, match=r"reached worker 1 \('bob'\), or that worker of another job"):
        converse(client, server)
    assert server.peer == ALICE  # it is for its caller to compare that with the record
    assert not client.done
    assert client.peer is None


def test_another_binding_means_a_machine_in_the_middle() -> None:
    client, server = ClientHandshake(KEY, ALICE, BOB, b"a" * 32), ServerHandshake(KEY, BOB, b"b" * 32)
    with pytest.raises(AuthenticationError):
        converse(client, server)


def test_two_clients_fed_to_each_other() -> None:
    one, two = ClientHandshake(KEY, ALICE, BOB), ClientHandshake(KEY, BOB, ALICE)
    one.start()
    with pytest.raises(ProtocolError, match="HELLO where CHALLENGE belongs"):
        one.feed(two.start())


def test_a_proof_sent_back_is_no_welcome() -> None:
    """An attacker without the secret has the client sign, and returns the client's own MAC as the server's."""
    client = ClientHandshake(KEY, ALICE, ALICE)
    client.start()
    proof = client.feed(_message(Kind.CHALLENGE, b"n" * 32))
    with pytest.raises(AuthenticationError):
        client.feed(_message(Kind.WELCOME, proof[13:] + ALICE.encode()))


def test_a_recorded_conversation_is_worth_nothing() -> None:
    client, server = pair()
    hello = client.start()
    proof = client.feed(server.feed(hello))
    server.feed(proof)
    replayed = ServerHandshake(KEY, BOB)
    replayed.feed(hello)
    with pytest.raises(AuthenticationError):
        replayed.feed(proof)


@pytest.mark.parametrize(("said", "forged"), [(b"alice", b"malic"), (ALICE.nonce, OTHER_BOB.nonce)])
def test_a_forged_name_or_nonce_breaks_the_proof(said: bytes, forged: bytes) -> None:
    client, server = pair()
    hello = client.start()
    assert hello.count(said) == 1
    with pytest.raises(AuthenticationError):
        server.feed(client.feed(server.feed(hello.replace(said, forged))))


# --- what is not the protocol ---


def test_another_version_is_told_so_both_ways() -> None:
    hello = bytearray(ClientHandshake(KEY, ALICE, BOB).start())
    hello[9] = 99
    server = ServerHandshake(KEY, BOB)
    with pytest.raises(ProtocolError, match=f"version 99 of the protocol, this worker version {VERSION}"):
        server.feed(bytes(hello))
    answer = bytearray(server.farewell)
    answer[9] = 98
    client = ClientHandshake(KEY, ALICE, BOB)
    client.start()
    with pytest.raises(ProtocolError, match=f"version 98 of the protocol, this worker version {VERSION}"):
        client.feed(bytes(answer))


@pytest.mark.parametrize(
    ("reason", "error"), [(Refusal.VERSION, ProtocolError), (Refusal.SECRET, AuthenticationError), (99, ProtocolError)]
)
def test_a_refusal_says_why(reason: int, error: type[Exception]) -> None:
    client = ClientHandshake(KEY, ALICE, BOB)
    client.start()
    with pytest.raises(error, match="refused") as refusal:
        client.feed(_message(Kind.REFUSAL, bytes([reason])))
    assert refusal.type is error


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (b"GET / HTTP/1.1\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01", "TLS"),
        (b"SSH-2.0-OpenSSH", "SSH"),
        (b"\x80\x04\x95", "a pickle"),
        (b"\x25" + bytes(7) + b"\xb5", "TensorPipe"),
        (b"\xff\xfe", "begins with ff fe"),
    ],
)
def test_a_known_stranger_is_named(first: bytes, name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        ServerHandshake(KEY, BOB).feed(first)


def test_one_wrong_byte_is_enough() -> None:
    server = ServerHandshake(KEY, BOB)
    assert server.feed(MAGIC[:3]) == b""
    with pytest.raises(ProtocolError):
        server.feed(b"!")


@pytest.mark.parametrize("size", [0, 52, 181, 0xFFFF])
def test_a_length_that_cannot_be_is_refused_at_the_header(size: int) -> None:
    header = _message(Kind.HELLO, b"")[:11] + size.to_bytes(2, "big")
    with pytest.raises(ProtocolError, match=f"HELLO of {size} bytes"):
        ServerHandshake(KEY, BOB).feed(header)


def test_more_than_was_asked_for_is_refused() -> None:
    client, server = pair()
    with pytest.raises(ProtocolError, match="more bytes"):
        server.feed(client.start() + b"x")


def test_bytes_after_the_end_are_refused() -> None:
    client, server = pair()
    proof = client.feed(server.feed(client.start()))
    with pytest.raises(ProtocolError):
        server.feed(proof + b"early frame")
    assert not server.done
    client, server = pair()
    converse(client, server)
    with pytest.raises(ProtocolError, match="after the end"):
        server.feed(b"x")


def test_the_client_never_asks_for_a_byte_behind_the_welcome() -> None:
    client, server = pair()
    to_client = server.feed(client.start())
    reply = b""
    while not reply:
        piece, to_client = to_client[: client.wants], to_client[client.wants :]
        reply = client.feed(piece)
    assert to_client == b""
    to_client = server.feed(reply) + b"first frame"
    while not client.done:
        piece, to_client = to_client[: client.wants], to_client[client.wants :]
        client.feed(piece)
    assert to_client == b"first frame"
    assert client.wants == 0


def test_a_name_that_is_not_text() -> None:
    client, server = pair()
    with pytest.raises(ProtocolError, match="UTF-8"):
        server.feed(client.start().replace(b"alice", b"\xff" * 5))


def test_a_machine_that_has_failed_stays_failed() -> None:
    server = ServerHandshake(KEY, BOB)
    with pytest.raises(ProtocolError):
        server.feed(b"?")
    with pytest.raises(ProtocolError):
        server.feed(ClientHandshake(KEY, ALICE, BOB).start())
    assert not server.done


# --- fuzz: whatever comes, only two errors come out, nothing is let in, and memory stays bounded ---


def abuse(machine: Handshake, pieces: list[bytes]) -> None:
    for piece in pieces:
        try:
            machine.feed(piece)
        except (AuthenticationError, ProtocolError):
            pass
        assert len(machine._buffer) <= MAX_BUFFERED
        assert not machine.done
        assert machine.peer is None


def machines() -> list[Handshake]:
    """Every state that a machine can wait in."""
    fresh, waiting = ServerHandshake(KEY, BOB), ServerHandshake(KEY, BOB)
    waiting.feed(ClientHandshake(KEY, ALICE, BOB).start())
    started, proved = ClientHandshake(KEY, ALICE, BOB), ClientHandshake(KEY, ALICE, BOB)
    started.start()
    proved.start()
    proved.feed(_message(Kind.CHALLENGE, b"n" * 32))
    return [fresh, waiting, started, proved]


HEADERS = st.builds(
    lambda version, kind, size, body: (
        MAGIC + version.to_bytes(2, "big") + bytes([kind]) + size.to_bytes(2, "big") + body
    ),
    st.sampled_from([VERSION, VERSION, VERSION, 0, VERSION + 1, 65535]),
    st.integers(0, 7),
    st.one_of(st.sampled_from([1, 32, 53, 56, 180, 181]), st.integers(0, 65535)),
    st.binary(max_size=400),
)


@FUZZ
@given(which=st.integers(0, 3), pieces=st.lists(st.one_of(st.binary(max_size=600), HEADERS), max_size=6))
def test_fuzz_random_bytes(which: int, pieces: list[bytes]) -> None:
    abuse(machines()[which], pieces)


@FUZZ
@given(which=st.integers(0, 3), kind=st.sampled_from(list(Kind)), body=st.binary(max_size=190))
def test_fuzz_messages_that_are_well_formed(which: int, kind: Kind, body: bytes) -> None:
    abuse(machines()[which], [_message(kind, body)])


@FUZZ
@given(data=st.data())
def test_fuzz_a_conversation_with_one_change(data: st.DataObject) -> None:
    """A real conversation in which one message, either way, is cut short, lengthened, or has one bit turned."""
    client, server = pair()
    target = data.draw(st.sampled_from(["hello", "challenge", "proof", "welcome"]))
    how = data.draw(st.sampled_from(["flip", "cut", "append"]))

    def tamper(name: str, message: bytes) -> bytes:
        if name != target:
            return message
        if how == "cut":
            return message[: data.draw(st.integers(0, len(message) - 1))]
        if how == "append":
            return message + data.draw(st.binary(min_size=1, max_size=300))
        at = data.draw(st.integers(0, len(message) * 8 - 1))
        changed = bytearray(message)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    try:
        challenge = server.feed(tamper("hello", client.start()))
        proof = client.feed(tamper("challenge", challenge))
        welcome = server.feed(tamper("proof", proof))
        client.feed(tamper("welcome", welcome))
    except (AuthenticationError, ProtocolError):
        pass
    assert not client.done  # whatever was changed, on the client's side it shows
    assert server.done == (target == "welcome")  # the server finished before that one was changed
