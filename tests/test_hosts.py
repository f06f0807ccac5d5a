"""Several hosts: network namespaces of this machine with a cable between them.  Needs root and the ``ip`` tool."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from namespaces import ADDRESSES, Hosts, needs_namespaces, two_hosts
from programs import remote_functions
from programs.process_tools import enter_namespace
from support import AT_ONCE
from telegrad import rpc
from telegrad.errors import AuthenticationError, RendezvousError, UsageError
from worker_processes import Pending, WorkerProcess, leave, worker_processes

PORT = 29500
ALL_PACKETS = 0x0300  # ETH_P_ALL, in network order

pytestmark = needs_namespaces


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def pair(hosts: Hosts) -> Iterator[list[WorkerProcess]]:
    """One process on each host."""
    with worker_processes(2, netns=hosts.namespaces) as cast:
        yield cast


def begin(cast: list[WorkerProcess], secrets_of: tuple[str | None, str | None], **options: Any) -> list[Pending]:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20, **options}
    return [
        process.start(
            remote_functions.start_worker, f"worker{rank}", rank, len(cast), {**options, "secret": secrets_of[rank]}
        )
        for rank, process in enumerate(cast)
    ]


def join(cast: list[WorkerProcess], **options: Any) -> None:
    for one in begin(cast, ("ours", "ours"), **options):
        one.result()


@contextmanager
def wiretap(hosts: Hosts) -> Iterator[bytearray]:
    """All bytes that cross the cable meanwhile."""
    heard = bytearray()
    ready, stop = threading.Event(), threading.Event()

    def listen() -> None:
        enter_namespace(hosts.namespaces[0])  # this thread only
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as tap:
            tap.bind((hosts.interfaces[0], 0))
            tap.settimeout(0.1)
            ready.set()
            while not stop.is_set():
                try:
                    heard.extend(tap.recv(1 << 16))
                except TimeoutError:
                    pass

    thread = threading.Thread(target=listen, name="test-wiretap", daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield heard
    finally:
        time.sleep(0.15)
        stop.set()
        thread.join(10)


def test_workers_of_two_hosts_meet_and_nobody_can_listen_in(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    join(pair)
    text = "a sentence that nobody on the way should read"
    with wiretap(hosts) as heard:
        assert pair[0].run(rpc.rpc_sync, "worker1", remote_functions.echo, args=(text,)) == text
        assert pair[1].run(rpc.rpc_sync, "worker0", remote_functions.echo, args=(text,)) == text
        assert pair[0].run(rpc.rpc_sync, "worker1", remote_functions.whoami) == ("worker1", pair[1].pid)
    assert len(heard) > 1000, "the wiretap hears"
    assert text.encode() not in heard
    for process in pair:
        assert set(process.run(remote_functions.links)) == {"TlsStream"}
    same, links_with_memory = pair[0].run(remote_functions.send_around, "worker1", 9 << 20)
    assert same
    assert links_with_memory == 0
    assert pair[0].run(remote_functions.use_references, "worker1", "worker0") == 16
    leave(pair)


def test_the_wiretap_would_hear_plain_text(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    """That the test above finds nothing is only worth something if there would be something to find."""
    with wiretap(hosts) as heard:
        serving = pair[0].start(remote_functions.serve_once, ADDRESSES[0], PORT)
        pair[1].run(remote_functions.send_plain, ADDRESSES[0], PORT, b"a sentence in plain text")
        serving.result()
    assert b"a sentence in plain text" in heard


def test_workers_of_one_host_use_its_short_way_among_workers_of_two(hosts: Hosts) -> None:
    first, second = hosts.namespaces
    with worker_processes(3, netns=(first, second, second)) as cast:
        options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20, "secret": "ours"}
        pending = [
            process.start(remote_functions.start_worker, f"worker{rank}", rank, 3, options)
            for rank, process in enumerate(cast)
        ]
        for one in pending:
            one.result()
        cast[1].run(remote_functions.call_all, ["worker0", "worker2"])
        assert sorted(cast[1].run(remote_functions.links)) == ["SocketStream", "TlsStream"]
        leave(cast)


def test_a_worker_may_listen_on_all_its_addresses(pair: list[WorkerProcess]) -> None:
    join(pair, host="0.0.0.0")
    assert pair[0].run(rpc.rpc_sync, "worker1", remote_functions.whoami) == ("worker1", pair[1].pid)
    assert pair[1].run(rpc.rpc_sync, "worker0", remote_functions.whoami) == ("worker0", pair[0].pid)
    leave(pair)


def test_another_secret_is_refused(pair: list[WorkerProcess]) -> None:
    for one in begin(pair, ("ours", "theirs"), init_timeout=5):
        # Whoever notices first tells the other.
        with pytest.raises(
            (AuthenticationError, RendezvousError), match="set the same TELEGRAD_SECRET on every worker"
        ):
            one.result()


def test_without_a_secret_hosts_do_not_talk_and_say_why(pair: list[WorkerProcess]) -> None:
    first, second = begin(pair, (None, None), init_timeout=5)
    with pytest.raises(RendezvousError, match=r"is on another host.* set the same TELEGRAD_SECRET on every worker"):
        second.result()
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 did not join.*Without a secret.*set TELEGRAD_SECRET"):
        first.result()


def test_without_a_secret_the_store_cannot_be_reached_from_another_host(
    hosts: Hosts, pair: list[WorkerProcess]
) -> None:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20}
    with worker_processes(1, netns=hosts.namespaces[:1]) as (neighbour,):
        serving = pair[0].start(remote_functions.start_worker, "worker0", 0, 2, options)
        neighbour.start(remote_functions.start_worker, "worker1", 1, 2, options).result()  # by the host's own address
        serving.result()
        assert neighbour.run(remote_functions.connects, "127.0.0.1", PORT)
        assert not pair[1].run(remote_functions.connects, ADDRESSES[0], PORT)
        leave([pair[0], neighbour])


def test_without_a_secret_a_forged_record_of_another_host_is_refused(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    """The store is torchrun's, which anyone can read and write: it listens on all addresses."""
    port = pair[0].run(remote_functions.serve_store, ADDRESSES[0])
    env = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    with worker_processes(1, env, netns=hosts.namespaces[:1]) as (victim,):
        pending = victim.start(remote_functions.outcome, rpc.init_rpc, "worker0")
        pair[1].run(remote_functions.forge_record, ADDRESSES[0], port, ADDRESSES[1])
        kind, text, _ = pending.result()
    assert kind == "RendezvousError"
    assert "worker 'worker1' is on another host and this job has no secret" in text


def test_a_worker_listens_on_the_port_that_it_was_given(pair: list[WorkerProcess]) -> None:
    join(pair, port=4711)
    for process in pair:
        assert {address.port for address in process.run(remote_functions.addresses) if address.kind == "tcp"} == {4711}
    assert pair[0].run(rpc.rpc_sync, "worker1", remote_functions.whoami) == ("worker1", pair[1].pid)
    leave(pair)


def test_an_open_address_without_a_secret_is_refused(pair: list[WorkerProcess]) -> None:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "host": ADDRESSES[0]}
    with pytest.raises(UsageError, match=r"refusing to listen on 10\.77\.0\.1 without a secret.*TELEGRAD_SECRET"):
        pair[0].run(remote_functions.start_worker, "worker0", 0, 1, options)


def test_a_cut_cable_is_noticed_in_the_middle_of_a_call(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    join(pair, heartbeat=1.0)
    pair[0].run(rpc.rpc_sync, "worker1", remote_functions.nothing)
    pair[1].run(rpc.rpc_sync, "worker0", remote_functions.nothing)
    pending = [
        process.start(
            remote_functions.outcome,
            rpc.rpc_sync,
            f"worker{1 - rank}",
            remote_functions.wait_forever,
            args=(3.0,),
            timeout=0,
        )
        for rank, process in enumerate(pair)
    ]
    time.sleep(0.3)
    start = time.monotonic()
    hosts.cut()
    for rank, one in enumerate(pending):
        kind, text, _ = one.result(10)
        assert kind == "WorkerLostError"
        assert f"worker 'worker{1 - rank}' is lost (its host" in text
        assert "respond" in text
    assert time.monotonic() - start < 3.0 + AT_ONCE
    leave(pair, 10)


def test_a_cut_cable_is_noticed_while_data_is_under_way(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    """On such a connection the kernel sends no keepalives, and retransmits for a quarter of an hour."""
    join(pair, heartbeat=1.0)
    pair[0].run(rpc.rpc_sync, "worker1", remote_functions.nothing)
    hosts.cut()
    pending = pair[0].start(remote_functions.outcome, remote_functions.big_message, "worker1", 64 << 20)
    kind, text, _ = pending.result(20)
    assert kind == "WorkerLostError"
    assert "worker 'worker1' is lost (its host has not responded for 1 s)" in text
    leave(pair[:1], 10)


def test_a_stopped_process_on_another_host_is_not_lost(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    """Its kernel acknowledges, but takes no more than its buffers hold: ``TCP_USER_TIMEOUT`` would end that."""
    join(pair, heartbeat=1.0)
    pair[0].run(rpc.rpc_sync, "worker1", remote_functions.nothing)
    pair[1].signal(signal.SIGSTOP)
    pending = pair[0].start(remote_functions.big_message, "worker1", 64 << 20)
    time.sleep(4)
    pair[1].signal(signal.SIGCONT)
    pending.result()
    assert "lost" not in pair[0].log() + pair[1].log()
    leave(pair, 10)


def test_a_cable_cut_before_the_first_call_costs_that_call_and_not_the_worker(
    hosts: Hosts, pair: list[WorkerProcess]
) -> None:
    join(pair, heartbeat=1.0)
    hosts.cut()
    for rank, process in enumerate(pair):  # one has no route, the other gets no answer
        call = remote_functions.outcome, rpc.rpc_sync, f"worker{1 - rank}", remote_functions.nothing
        kind, text, seconds = process.run(*call, timeout=2.5)
        assert kind == "HostUnreachableError", text
        assert f"worker 'worker{1 - rank}': no connection within 2.5 s" in text
        assert seconds < 2.5 + AT_ONCE
    hosts.mend()
    for rank, process in enumerate(pair):
        assert process.run(rpc.rpc_sync, f"worker{1 - rank}", remote_functions.add, args=(1, 2)) == 3
    leave(pair, 20)


def test_a_dial_that_fails_is_repeated_until_the_calls_deadline(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    join(pair, heartbeat=1.0)
    hosts.cut()
    pending = pair[0].start(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2))
    time.sleep(1.5)
    hosts.mend()
    assert pending.result() == 3
    leave(pair, 20)


def test_a_host_that_was_never_reached_does_not_hold_up_shutdown(hosts: Hosts, pair: list[WorkerProcess]) -> None:
    join(pair, heartbeat=1.0)
    hosts.cut()
    leave(pair, 20)
