"""What a worker believes of what it finds in the store: whoever reaches the store can write to it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import psutil
import pytest
from torch.distributed import HashStore, TCPStore

from support import PATIENCE
from telegrad._agent.peers import WorkerRecord
from telegrad._text import printable
from telegrad._transport.dial import Address
from telegrad.errors import AuthenticationError, RendezvousError
from telegrad.launch import free_port
from telegrad.rpc.records import check_on_this_host, link_key
from telegrad.rpc.rendezvous import Meeting, NewRoundError
from telegrad.rpc.stores import JobStore, StoreGoneError, open_store

HOST = "this host"
UNIX = Address("unix", "@telegrad-1-00")
SECRET = b"a secret of this test"


def record(rank: int, name: str = "", **fields: Any) -> WorkerRecord:
    fields = {"host": HOST, "addresses": (UNIX,), "world_size": 2, "nonce": secrets.token_bytes(16), **fields}
    return WorkerRecord(rank, name or f"worker{rank}", **fields)


def meeting(store: HashStore, rank: int, secret: bytes | None = SECRET, **fields: Any) -> tuple[Meeting, bytes]:
    """One that has claimed its rank, and its key."""
    fields = {"world_size": 2, "timeout": 0.1, **fields}
    made = Meeting(JobStore(store), rank, f"worker{rank}", **fields)
    made.claim()
    return made, made.key(secret)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def signed(key: bytes, place: str, data: bytes) -> str:
    return (hmac.digest(key, b"telegrad record\0" + place.encode() + b"\0" + data, "sha256") + data).hex()


# --- records ----------------------------------------------------------------------------------------------------------


def test_the_records_of_all_ranks(store: HashStore) -> None:
    (first, key), (second, other_key) = meeting(store, 0), meeting(store, 1)
    assert key == other_key
    records = [record(0), record(1)]
    first.publish(records[0], key)
    second.publish(records[1], key)
    assert first.wait_for_all(key) == second.wait_for_all(key) == records


def test_a_signed_record_under_another_rank(store: HashStore) -> None:
    """It was copied from one key of the store to another."""
    (first, key), (second, _) = meeting(store, 0), meeting(store, 1)
    first.publish(record(0), key)
    second.publish(record(1), key)
    store.set("record/0", store.get("record/1"))
    with pytest.raises(AuthenticationError, match="the record of rank 0 is signed with another secret"):
        first.wait_for_all(key)


def test_a_worker_that_publishes_the_record_of_another(store: HashStore) -> None:
    (first, key), (second, _) = meeting(store, 0), meeting(store, 1)
    first.publish(record(0), key)
    second.publish(record(0), key)
    with pytest.raises(AuthenticationError, match="the record of rank 1 is that of worker 0"):
        first.wait_for_all(key)


def test_two_records_of_one_name(store: HashStore) -> None:
    (first, key), (second, _) = meeting(store, 0), meeting(store, 1)
    first.publish(record(0, "ps"), key)
    second.publish(record(1, "ps"), key)
    with pytest.raises(RendezvousError, match="the name 'ps' is already taken by rank 0"):
        first.wait_for_all(key)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "\x1b[2Jps"}, r"letters, digits.*\\x1b\[2Jps"),
        ({"addresses": (Address("tcp", "10.0.0.1", 0),)}, "bad addresses"),
        ({"addresses": (Address("tcp", "10.0.0.1", 70000),)}, "bad addresses"),
        ({"addresses": (Address("tcp", "", 80),)}, "bad addresses"),
        ({"addresses": (Address("tcp", "10.0.0.1\n", 80),)}, "bad addresses"),
        ({"addresses": (Address("tcp", "10.0.0.1", 80, b"short"),)}, "bad addresses"),
        ({"addresses": (Address("unix", "x" * 108),)}, "bad addresses"),
        ({"addresses": (Address("unix", "@a\0b"),)}, "bad addresses"),
        ({"addresses": (UNIX,) * 17}, "bad addresses"),
        ({"nonce": b""}, "bad nonce"),
        ({"pid": -1}, "bad pid"),
        ({"host": "\x1b[31m"}, "bad host"),
        ({"world_size": 1}, "bad world_size"),
        ({"shared_memory_token": bytes(65)}, "bad shared_memory_token"),
    ],
)
def test_a_record_with_a_bad_field(store: HashStore, fields: dict[str, Any], message: str) -> None:
    (first, key), (second, _) = meeting(store, 0), meeting(store, 1)
    first.publish(record(0), key)
    second.publish(record(1, **fields), key)
    with pytest.raises(RendezvousError, match=f"malformed record of rank 1.*{message}"):
        first.wait_for_all(key)


GOOD = msgspec.msgpack.encode(record(1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:-1],
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode(["1", "worker1"]),
        msgspec.msgpack.encode([1, "worker1", 0, "", [["udp", "host"]]]),
        b"\x92\x01\xa2\xff\xfe",  # a name that is not UTF-8
        b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_a_signed_record_that_cannot_be_decoded(store: HashStore, data: bytes) -> None:
    first, key = meeting(store, 0)
    first.publish(record(0), key)
    store.set("record/1", signed(key, "record/1", data))
    with pytest.raises(RendezvousError, match="malformed"):
        first.wait_for_all(key)


@pytest.mark.parametrize("key", ["rank/0", "name/worker0", "size", "job", "secret", "token", "record/1", "refused/1"])
@pytest.mark.parametrize("value", [b"\xff\xfe", b"\x1b[2J\nyes", b"x" * 100_000, b" ", b"00"])
def test_a_malformed_value_is_an_error_of_telegrad(store: HashStore, key: str, value: bytes) -> None:
    store.set(key, value)

    def join() -> None:
        one, its_key = meeting(store, 0, secret=None)
        one.publish(record(0), its_key)
        one.wait_for_all(its_key)

    with pytest.raises((RendezvousError, AuthenticationError)) as caught:
        join()
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize("found", ["-1", "one", "99999999", "1" * 5000, "٣", ""])
def test_a_name_that_leads_to_no_rank(store: HashStore, found: str) -> None:
    one, key = meeting(store, 0, world_size=None)
    store.set("name/bob", found)
    with pytest.raises(RendezvousError, match="malformed value at the rendezvous under 'name/bob'"):
        one.find("bob", key)


def test_a_name_that_leads_to_another_worker(store: HashStore) -> None:
    (first, key), (second, _) = meeting(store, 0, world_size=None), meeting(store, 1, world_size=None)
    second.publish(record(1, world_size=0), key)
    found = first.find("worker1", key)
    assert found is not None
    assert found.worker_id == 1
    store.set("name/bob", "1")
    with pytest.raises(AuthenticationError, match="names rank 1 as worker 'bob', but that worker is called 'worker1'"):
        first.find("bob", key)


def test_without_a_secret_a_record_of_another_host_is_refused(store: HashStore) -> None:
    """Whoever can read the store has the token, and can sign a record with his own address."""
    (victim, key), (stranger, _) = meeting(store, 0, None, host=HOST), meeting(store, 1, None)
    victim.publish(record(0), key)
    stranger.publish(record(1, host="another", addresses=(Address("tcp", "10.0.0.66", 666, bytes(32)),)), key)
    with pytest.raises(RendezvousError, match=r"'worker1' is on another host .* TELEGRAD_SECRET"):
        victim.wait_for_all(key)
    stranger.publish(record(1, addresses=(UNIX, Address("tcp", "10.0.0.66", 666, bytes(32)))), key)
    with pytest.raises(RendezvousError, match=r"'worker1' listens on tls:10.0.0.66:666, and this job has no secret"):
        victim.wait_for_all(key)


def test_records_of_this_host_may_have_unix_addresses_only() -> None:
    check_on_this_host(record(1), HOST)
    for wrong in (record(1, host=""), record(1, addresses=(Address("tcp", "127.0.0.1", 80),))):
        with pytest.raises(RendezvousError, match="TELEGRAD_SECRET"):
            check_on_this_host(wrong, HOST)


# --- the key of links -------------------------------------------------------------------------------------------------


def test_two_jobs_with_one_secret_have_different_link_keys() -> None:
    """Even where an attacker at the store gives both the same job id, and copies signed records from one to another."""
    ours, theirs = HashStore(), HashStore()
    for store in (ours, theirs):
        store.set("job", "0" * 32)
    key, same_key = meeting(ours, 0)[1], meeting(theirs, 0)[1]
    assert key == same_key
    records = [[record(0), record(1)] for _ in range(2)]
    crossed = [records[0][0], records[1][1]]
    keys = {link_key(key, members) for members in (*records, crossed, None)}
    assert len(keys) == 4
    assert key not in keys


def test_the_link_key_depends_on_names_and_ranks_and_not_on_the_order() -> None:
    first, second = record(0), record(1)
    renamed = msgspec.structs.replace(second, name="other")
    assert link_key(b"k", [first, second]) == link_key(b"k", [second, first])
    assert link_key(b"k", [first, second]) != link_key(b"k", [first, renamed])
    assert link_key(b"k", [first, second]) != link_key(b"l", [first, second])
    assert link_key(b"k", None) != link_key(b"k", [])


# --- rounds -----------------------------------------------------------------------------------------------------------


def in_round(store: HashStore, rank: int, world_size: int = 2) -> tuple[Meeting, bytes]:
    made = Meeting(JobStore(store), rank, f"worker{rank}", world_size, 0.1)
    made.enter_round(JobStore(store))
    made.claim()
    key = made.key(SECRET)
    made.publish(record(rank, world_size=world_size), key)
    return made, key


def test_a_round_is_over_when_rank_0_has_confirmed_it(store: HashStore) -> None:
    first, key = in_round(store, 0)
    second, _ = in_round(store, 1)
    with pytest.raises(RendezvousError, match="rank 0 did not confirm this process as rank 1"):
        second.wait_for_all(key)
    met = first.wait_for_all(key)
    assert second.wait_for_all(key) == met


def test_a_worker_that_was_restarted_takes_the_place_of_the_one_before(store: HashStore) -> None:
    first, key = in_round(store, 0)
    dead, _ = in_round(store, 1)
    alive, _ = in_round(store, 1)
    met = first.wait_for_all(key)
    assert alive.wait_for_all(key) == met
    assert len({record.nonce for record in met}) == 2
    del dead


def test_a_worker_waits_in_a_round_of_a_dead_rank_0_and_then_moves_on(store: HashStore) -> None:
    _, key = in_round(store, 0)
    in_round(store, 1)  # both died before they had met
    late, _ = in_round(store, 1)
    again, new_key = in_round(store, 0)
    assert key != new_key
    with pytest.raises(NewRoundError):
        late.wait_for_all(key)
    moved, _ = in_round(store, 1)
    assert again.wait_for_all(new_key) == moved.wait_for_all(new_key)


def test_a_round_that_was_confirmed_is_not_entered(store: HashStore) -> None:
    first, key = in_round(store, 0, world_size=1)
    first.wait_for_all(key)
    with pytest.raises(RendezvousError, match="rank 0 of 2 did not join"):
        in_round(store, 1)


def test_a_refusal_counts_for_those_who_were_there(store: HashStore) -> None:
    first, key = in_round(store, 0)
    second, _ = in_round(store, 1)
    second.give_up("for a reason\x1b[2J")
    with pytest.raises(RendezvousError, match=r"rank 1 could not join: 'worker1': for a reason\\x1b\[2J"):
        first.wait_for_all(key)
    first.give_up("rank 1 could not join")
    again, _ = in_round(store, 1)
    with pytest.raises(RendezvousError, match="rank 0 of 2 did not join"):
        again.wait_for_all(key)


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    return free_port()


def refusal(host: str, port: int) -> str:
    """Why no connection can be made there; empty if one can."""
    try:
        socket.create_connection((host, port), PATIENCE).close()
    except OSError as error:
        return str(error)
    return ""


def assert_on_loopback_only(port: int) -> None:
    """Every address of 127.0.0.0/8 is this host's, and a server that listens on all addresses answers there too."""
    listening = [each for each in psutil.net_connections("tcp") if each.laddr[1:] == (port,)]
    assert refusal("127.0.0.1", port) == "", listening
    assert "refused" in refusal("127.0.0.2", port), listening


def test_without_a_secret_the_store_is_served_on_loopback_only(port: int) -> None:
    store = open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=True)
    assert_on_loopback_only(port)
    client = open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE, local=True)
    store.set("key", "value")
    assert client.get("key") == "value"
    client.close()


def test_with_a_secret_the_store_is_served_on_all_addresses(port: int) -> None:
    store = open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=False)
    assert refusal("127.0.0.2", port) == ""
    del store


def test_the_name_of_this_host_means_loopback(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = open_store("env://", 0, 2, PATIENCE, local=True)
    assert_on_loopback_only(port)
    del store


def test_without_a_secret_another_host_is_refused() -> None:
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=r"192\.0\.2\.1:80 is on another host.*set the same TELEGRAD_SECRET"):
            open_store("tcp://192.0.2.1:80", rank, 2, PATIENCE, local=True)


@pytest.mark.parametrize("first", ["telegrad", "process group"])
def test_the_process_group_of_the_job_shares_the_port(port: int, first: str) -> None:
    def of_group() -> TCPStore:
        return TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=PATIENCE), False, multi_tenant=True)

    def of_telegrad() -> JobStore:
        return open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=True)

    group: TCPStore
    if first == "telegrad":
        ours, group = of_telegrad(), of_group()
    else:
        group, ours = of_group(), of_telegrad()
    ours.set("key", "value")
    assert group.get("key") == b"value"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_store_leaves_no_descriptor_behind(port: int) -> None:
    def cycle() -> None:
        store = open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=True)
        client = open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE, local=True)
        client.close()
        del store, client
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            with pytest.raises(RendezvousError, match="is in use, by another job"):
                open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=True)

    cycle()
    before = descriptors()
    for _ in range(5):
        cycle()
    assert descriptors() <= before


def test_a_store_whose_server_is_gone_says_so_and_torch_prints_nothing(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    server = open_store(f"tcp://127.0.0.1:{port}", 0, 2, PATIENCE, local=True)
    client = open_store(f"tcp://127.0.0.1:{port}", 1, 2, PATIENCE, local=True)
    client.set("key", "value")
    del server  # its destructor ends the server's thread, which closes all connections
    asks: list[Callable[[], object]] = [
        lambda: client.get("key"),
        lambda: client.set("key", "value"),
        lambda: client.set_once("key", "value"),
        lambda: client.delete("key"),
    ]
    for ask in asks:
        with pytest.raises(StoreGoneError, match="the rendezvous is gone"):
            ask()
    client.close()
    assert capfd.readouterr().err == ""


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("worker0, naïve", "worker0, naïve"),
        ("\x1b[31mred\n", r"\x1b[31mred\n"),
        ("a\u202eb\x9b\ud800", r"a\u202eb\x9b\ud800"),
        ("x" * 300, "x" * 200 + "... (300 characters)"),
        ("\0" * 200, r"\x00" * 200),
    ],
)
def test_text_is_made_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_at_most_so_many_characters() -> None:
    assert printable("12345", 3) == "123... (5 characters)"
