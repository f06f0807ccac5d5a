"""Attacks of one worker process on others, within a host and between hosts (network namespaces of this machine)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates import OwnAuthority
from namespaces import ADDRESSES, Hosts, needs_namespaces, two_hosts
from programs import hostile, remote_functions
from support import eventually
from telegrad import rpc
from worker_processes import WorkerProcess, join, worker_processes

MB = 1 << 20
SECRET = "a secret of these tests"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture
def three(hosts: Hosts) -> Iterator[list[WorkerProcess]]:
    """Two honest workers on one host, and a third on another."""
    first, second = hosts.namespaces
    with worker_processes(3, netns=(first, first, second)) as cast:
        yield cast


def join_between_hosts(cast: list[WorkerProcess], **options: object) -> None:
    join(cast, init_method=f"tcp://{ADDRESSES[0]}:29500", secret=SECRET, **options)


# --- passing for another worker ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_cannot_pass_for_another_on_the_same_host(transport: str) -> None:
    with worker_processes(3) as cast:
        join(cast, transports=(transport,), secret=SECRET)
        victim, _, impostor = cast
        assert impostor.run(hostile.call, "worker0") == ("answered", "honest")
        outcome = impostor.run(hostile.pass_for, "worker1", "worker0")
        assert outcome == "closed" or outcome.startswith("refused")
        reason = "process" if transport == "unix" else "certificate"
        assert victim.wait_for_log("refused a connection").count(reason) >= 1
        assert victim.run(hostile.touched_by) == ["honest"]
        assert cast[1].run(hostile.call, "worker0") == ("answered", "honest")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_that_is_dialled_as_itself_does_not_lose_itself(transport: str) -> None:
    with worker_processes(2) as cast:
        join(cast, transports=(transport,), secret=SECRET)
        victim, impostor = cast
        outcome = impostor.run(hostile.pass_for, "worker0", "worker0")
        assert outcome == "closed" or outcome.startswith("refused")
        assert "the id of this worker" in victim.wait_for_log("refused a connection")
        assert victim.run(hostile.call, "worker0") == ("answered", "honest")
        assert victim.run(hostile.call, "worker1") == ("answered", "honest")


def test_a_worker_that_the_job_does_not_have_is_refused_and_keeps_no_other_out(tmp_path: Path) -> None:
    """In a job of open size, where the worker that it calls looks for its record in the store."""
    options = {"init_method": f"file://{tmp_path}/meet", "init_timeout": 20}
    with worker_processes(3) as cast:
        victim, hostile_one, newcomer = cast
        for rank, process in enumerate(cast[:2]):
            process.run(remote_functions.start_worker, f"worker{rank}", rank, None, options)
        assert hostile_one.run(hostile.call, "worker0") == ("answered", "honest")
        for _ in range(5):
            assert hostile_one.run(hostile.come_as_a_ghost, "worker0") == "closed"
        assert "a worker that calls itself 'ghost'" in victim.wait_for_log("refused")
        newcomer.run(remote_functions.start_worker, "worker2", 2, None, options)
        assert newcomer.run(hostile.call, "worker0") == ("answered", "honest")


@needs_namespaces
def test_a_worker_cannot_pass_for_another_from_another_host(three: list[WorkerProcess]) -> None:
    join_between_hosts(three)
    victim, honest, impostor = three
    outcome = impostor.run(hostile.pass_for, "worker1", "worker0")
    assert outcome == "closed" or outcome.startswith("refused")
    assert "certificate" in victim.wait_for_log("refused a connection")
    assert victim.run(hostile.touched_by) == []
    assert honest.run(hostile.call, "worker0") == ("answered", "honest")


@needs_namespaces
def test_with_an_authority_a_worker_needs_a_certificate_of_its_own_name(
    three: list[WorkerProcess], tmp_path: Path
) -> None:
    """The third party has the job's secret, and a certificate of the authority, but for another name."""
    authority = OwnAuthority(tmp_path)
    names = {"worker0": "worker0", "worker1": "worker1", "worker2": "mallory"}
    join_between_hosts(three, options_of=lambda name: authority.files_for(names[name]))
    victim, honest, impostor = three
    kind, text = victim.run(hostile.call, "worker2")
    assert kind == "AuthenticationError"
    assert "the peer's certificate is for 'mallory', not for worker 'worker2'" in text
    kind, text = impostor.run(hostile.call, "worker0")
    assert kind != "answered", text
    assert "is for 'mallory'" in victim.wait_for_log("refused a connection")
    assert honest.run(hostile.call, "worker0") == ("answered", "honest")


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_gets_no_more_than_two_connections(transport: str) -> None:
    with worker_processes(3) as cast:
        join(cast, transports=(transport,), secret=SECRET)
        victim, _, greedy = cast
        assert greedy.run(hostile.keep_connecting, "worker0", 20) <= 2
        assert "has 2 connections to this worker already" in victim.wait_for_log("refused")
        assert cast[1].run(hostile.call, "worker0") == ("answered", "honest")


# --- shared memory ----------------------------------------------------------------------------------------------------


@needs_namespaces
def test_a_worker_on_another_host_reaches_no_shared_memory(hosts: Hosts) -> None:
    """Its record names the process and the word of a worker that shares memory with the victim."""
    first, second = hosts.namespaces
    with worker_processes(3, netns=(first, first, second)) as cast:
        victim, sharing, thief = cast
        pending = [
            process.start(remote_functions.start_worker, f"worker{rank}", rank, None, {**OPEN, "secret": SECRET})
            for rank, process in enumerate(cast[:2])
        ]
        for one in pending:
            one.result()
        assert eventually(lambda: sharing.run(hostile.shares_memory_with, "worker0"))
        sharing.run(rpc.rpc_sync, "worker0", hostile.keep, args=(remote_functions.filled(4 * MB, 7),))
        memory = sharing.run(hostile.shared_memory_of_this_process)
        (segment,) = [segment for segment in memory["segments"] if segment[2] >= MB]
        thief.run(hostile.claim_the_memory_of, memory)
        thief.run(remote_functions.start_worker, "worker2", 2, None, {**OPEN, "secret": SECRET})
        kind, text = thief.run(hostile.name_foreign_memory, "worker0", segment)
        assert kind != "answered", f"the thief read {text} from another worker's memory"
        assert "names shared memory, but is not on this host" in text
        before = 7.0 * 4 * MB
        assert victim.run(hostile.kept_values) == [before]


OPEN = {"init_method": f"tcp://{ADDRESSES[0]}:29500", "init_timeout": 20}


# --- a job without a secret -------------------------------------------------------------------------------------------


@needs_namespaces
def test_a_job_without_a_secret_listens_on_no_address_of_the_network(hosts: Hosts) -> None:
    with worker_processes(2, netns=(hosts.namespaces[0],) * 2) as cast:
        join(cast)
        assert cast[0].run(remote_functions.call_all, ["worker0", "worker1"]) == 2
        addresses = [address for process in cast for address in process.run(hostile.listening_addresses)]
        assert addresses, "the store listens somewhere"
        assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in addresses), addresses
        assert eventually(lambda: set(cast[0].run(remote_functions.links)) == {"SocketStream"})
