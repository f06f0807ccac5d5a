"""Several hosts: network namespaces of this machine with a cable between them.  Needs root and the ``ip`` tool."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from programs import deeds
from programs.puppet_tools import enter_namespace
from puppets import Pending, Puppet, leave, puppets
from support import AT_ONCE
from telegrad import rpc
from telegrad.errors import AuthenticationError, RendezvousError, UsageError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
ALL_PACKETS = 0x0300  # ETH_P_ALL, in network order


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs the ip tool (iproute2), to make network namespaces"
    probe = f"tg{secrets.token_hex(3)}p"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        return f"this system lets nobody make network namespaces: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=10, check=False)
    return ""


_reason = _why_not()
pytestmark = pytest.mark.skipif(bool(_reason), reason=_reason or "-")


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, each with one end of a virtual cable; names are unique to this run."""

    namespaces: tuple[str, str]
    interfaces: tuple[str, str]

    def cut(self) -> None:
        ip("-n", self.namespaces[1], "link", "set", self.interfaces[1], "down")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    tag = f"tg{secrets.token_hex(3)}"
    made = Hosts((f"{tag}a", f"{tag}b"), (f"{tag}x", f"{tag}y"))
    try:
        for namespace in made.namespaces:
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        first, second = made.interfaces
        ip("-n", made.namespaces[0], "link", "add", first, "type", "veth", "peer", second, "netns", made.namespaces[1])
        for namespace, interface, address in zip(made.namespaces, made.interfaces, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
        yield made
    finally:
        for namespace in made.namespaces:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=10, check=False)


@pytest.fixture
def pair(hosts: Hosts) -> Iterator[list[Puppet]]:
    """One process on each host."""
    with puppets(2, netns=hosts.namespaces) as cast:
        yield cast


def begin(cast: list[Puppet], secrets_of: tuple[str | None, str | None], **options: Any) -> list[Pending]:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20, **options}
    return [
        puppet.start(deeds.start_worker, f"worker{rank}", rank, len(cast), {**options, "secret": secrets_of[rank]})
        for rank, puppet in enumerate(cast)
    ]


def join(cast: list[Puppet], **options: Any) -> None:
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


def test_workers_of_two_hosts_meet_and_nobody_can_listen_in(hosts: Hosts, pair: list[Puppet]) -> None:
    join(pair)
    text = "a sentence that nobody on the way should read"
    with wiretap(hosts) as heard:
        assert pair[0].run(rpc.rpc_sync, "worker1", deeds.echo, args=(text,)) == text
        assert pair[1].run(rpc.rpc_sync, "worker0", deeds.echo, args=(text,)) == text
        assert pair[0].run(rpc.rpc_sync, "worker1", deeds.whoami) == ("worker1", pair[1].pid)
    assert len(heard) > 1000, "the wiretap hears"
    assert text.encode() not in heard
    for puppet in pair:
        assert set(puppet.run(deeds.links)) == {"TlsStream"}
    same, lanes = pair[0].run(deeds.send_around, "worker1", 9 << 20)
    assert same
    assert lanes == 0
    assert pair[0].run(deeds.use_references, "worker1", "worker0") == 16
    leave(pair)


def test_the_wiretap_would_hear_plain_text(hosts: Hosts, pair: list[Puppet]) -> None:
    """That the test above finds nothing is only worth something if there would be something to find."""
    with wiretap(hosts) as heard:
        serving = pair[0].start(deeds.serve_once, ADDRESSES[0], PORT)
        pair[1].run(deeds.send_plain, ADDRESSES[0], PORT, b"a sentence in plain text")
        serving.result()
    assert b"a sentence in plain text" in heard


def test_workers_of_one_host_use_its_short_way_among_workers_of_two(hosts: Hosts) -> None:
    first, second = hosts.namespaces
    with puppets(3, netns=(first, second, second)) as cast:
        options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20, "secret": "ours"}
        pending = [
            puppet.start(deeds.start_worker, f"worker{rank}", rank, 3, options) for rank, puppet in enumerate(cast)
        ]
        for one in pending:
            one.result()
        cast[1].run(deeds.call_all, ["worker0", "worker2"])
        assert sorted(cast[1].run(deeds.links)) == ["SocketStream", "TlsStream"]
        leave(cast)


def test_a_worker_may_listen_on_all_its_addresses(pair: list[Puppet]) -> None:
    join(pair, host="0.0.0.0")
    assert pair[0].run(rpc.rpc_sync, "worker1", deeds.whoami) == ("worker1", pair[1].pid)
    assert pair[1].run(rpc.rpc_sync, "worker0", deeds.whoami) == ("worker0", pair[0].pid)
    leave(pair)


def test_another_secret_is_refused(pair: list[Puppet]) -> None:
    for one in begin(pair, ("ours", "theirs"), init_timeout=5):
        # Whoever notices first tells the other.
        with pytest.raises(
            (AuthenticationError, RendezvousError), match="set the same TELEGRAD_SECRET on every worker"
        ):
            one.result()


def test_without_a_secret_hosts_do_not_talk_and_say_why(pair: list[Puppet]) -> None:
    first, second = begin(pair, (None, None), init_timeout=5)
    with pytest.raises(RendezvousError, match=r"is on another host.* set the same TELEGRAD_SECRET on every worker"):
        second.result()
    with pytest.raises(RendezvousError, match=r"rank 1 of 2 did not come.*Without a secret.*set TELEGRAD_SECRET"):
        first.result()


def test_without_a_secret_the_store_cannot_be_reached_from_another_host(hosts: Hosts, pair: list[Puppet]) -> None:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "init_timeout": 20}
    with puppets(1, netns=hosts.namespaces[:1]) as (neighbour,):
        serving = pair[0].start(deeds.start_worker, "worker0", 0, 2, options)
        neighbour.start(deeds.start_worker, "worker1", 1, 2, options).result()  # by the host's own address
        serving.result()
        assert neighbour.run(deeds.connects, "127.0.0.1", PORT)
        assert not pair[1].run(deeds.connects, ADDRESSES[0], PORT)
        leave([pair[0], neighbour])


def test_without_a_secret_a_forged_record_of_another_host_is_refused(hosts: Hosts, pair: list[Puppet]) -> None:
    """The store is torchrun's, which anyone can read and write: it listens on all addresses."""
    port = pair[0].run(deeds.serve_store, ADDRESSES[0])
    env = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    with puppets(1, env, netns=hosts.namespaces[:1]) as (victim,):
        pending = victim.start(deeds.outcome, rpc.init_rpc, "worker0")
        pair[1].run(deeds.forge_record, ADDRESSES[0], port, ADDRESSES[1])
        kind, text, _ = pending.result()
    assert kind == "RendezvousError"
    assert "worker 'worker1' is on another host and this job has no secret" in text


def test_a_worker_listens_on_the_port_that_it_was_given(pair: list[Puppet]) -> None:
    join(pair, port=4711)
    for puppet in pair:
        assert {address.port for address in puppet.run(deeds.addresses) if address.kind == "tcp"} == {4711}
    assert pair[0].run(rpc.rpc_sync, "worker1", deeds.whoami) == ("worker1", pair[1].pid)
    leave(pair)


def test_an_open_address_without_a_secret_is_refused(pair: list[Puppet]) -> None:
    options = {"init_method": f"tcp://{ADDRESSES[0]}:{PORT}", "host": ADDRESSES[0]}
    with pytest.raises(UsageError, match=r"refusing to listen on 10\.77\.0\.1 without a secret.*TELEGRAD_SECRET"):
        pair[0].run(deeds.start_worker, "worker0", 0, 1, options)


def test_a_cut_cable_is_noticed_by_silence(hosts: Hosts, pair: list[Puppet]) -> None:
    join(pair, heartbeat=1.0)
    pair[0].run(rpc.rpc_sync, "worker1", deeds.nothing)
    pair[1].run(rpc.rpc_sync, "worker0", deeds.nothing)
    pending = [
        puppet.start(deeds.outcome, rpc.rpc_sync, f"worker{1 - rank}", deeds.wait_forever, args=(3.0,), timeout=0)
        for rank, puppet in enumerate(pair)
    ]
    time.sleep(0.3)
    start = time.monotonic()
    hosts.cut()
    for rank, one in enumerate(pending):
        kind, text, _ = one.result(10)
        assert kind == "WorkerLostError"
        assert f"worker 'worker{1 - rank}' is lost (it was silent for" in text
    assert time.monotonic() - start < 1.0 + AT_ONCE
    leave(pair, 10)


def test_a_cable_cut_before_the_first_call_is_a_lost_worker_too(hosts: Hosts, pair: list[Puppet]) -> None:
    join(pair, heartbeat=1.0)
    hosts.cut()
    kind, text, seconds = pair[1].run(deeds.outcome, rpc.rpc_sync, "worker0", deeds.nothing)  # it has no route
    assert kind == "WorkerLostError", text
    kind, text, seconds = pair[0].run(deeds.outcome, rpc.rpc_sync, "worker1", deeds.nothing)  # nobody answers it
    assert kind == "WorkerLostError", text
    assert seconds < 1.0 + AT_ONCE
    leave(pair, 20)
