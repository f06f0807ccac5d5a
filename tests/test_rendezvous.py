"""How workers find each other, and what they say when they do not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from programs import remote_functions
from telegrad import rpc
from telegrad.errors import AuthenticationError, RendezvousError, UsageError, WorkerLostError
from telegrad.launch import free_port
from telegrad.rpc import rendezvous
from worker_processes import (
    PATIENCE,
    PROGRAMS,
    Pending,
    WorkerProcess,
    join,
    leave,
    run_python,
    worker_processes,
)


@pytest.fixture
def pair() -> Iterator[list[WorkerProcess]]:
    with worker_processes(2) as cast:
        yield cast


@pytest.fixture
def trio() -> Iterator[list[WorkerProcess]]:
    with worker_processes(3) as cast:
        yield cast


def tcp() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def begin(process: WorkerProcess, rank: int, name: str = "", world_size: int | None = 2, **options: Any) -> Pending:
    process.name = f"rank {rank} (process {process.pid})"
    return process.start(
        remote_functions.start_worker, name or f"worker{rank}", rank, world_size, {"init_timeout": PATIENCE, **options}
    )


def check_and_leave(cast: Sequence[WorkerProcess]) -> None:
    names = [f"worker{rank}" for rank in range(len(cast))]
    for process in cast:
        assert process.run(remote_functions.call_all, names) == len(cast)
    leave(cast)


# --- ways to meet -----------------------------------------------------------------------------------------------------


def test_over_tcp(pair: list[WorkerProcess]) -> None:
    join(pair, tcp())
    check_and_leave(pair)


def test_over_a_file(pair: list[WorkerProcess], tmp_path: Path) -> None:
    join(pair, f"file://{tmp_path}/meet")
    check_and_leave(pair)


def test_over_the_environment() -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with worker_processes(1, {**env, "RANK": "0"}) as first, worker_processes(1, {**env, "RANK": "1"}) as second:
        cast = [*first, *second]
        pending = [process.start(rpc.init_rpc, f"worker{rank}") for rank, process in enumerate(cast)]
        for one in pending:
            one.result()
        check_and_leave(cast)


def test_rank_and_world_size_in_the_url(pair: list[WorkerProcess]) -> None:
    where = tcp()
    pending = [
        process.start(
            remote_functions.start_worker,
            f"worker{rank}",
            -1,
            None,
            {"init_method": f"{where}?rank={rank}&world_size=2"},
        )
        for rank, process in enumerate(pair)
    ]
    for one in pending:
        one.result()
    check_and_leave(pair)


@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}"],
        ["-m", "telegrad", "run", "-n", "2"],
    ],
    ids=["torchrun", "telegrad run"],
)
def test_a_launcher_starts_a_job(launcher: list[str]) -> None:
    command = [part.format(port=free_port()) for part in launcher]
    done = run_python(*command, PROGRAMS / "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker0 of 2: all well" in done.stdout
    assert "worker1 of 2: all well" in done.stdout


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_again_and_again_in_the_same_processes_and_at_the_same_place(
    pair: list[WorkerProcess], tmp_path: Path, kind: str
) -> None:
    where = tcp() if kind == "tcp" else f"file://{tmp_path}/meet"
    for one in [process.start(remote_functions.cycle, rank, 2, where, 5) for rank, process in enumerate(pair)]:
        one.result()


# --- a job of open size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_job_of_open_size_finds_workers_by_name_when_they_are_named(
    trio: list[WorkerProcess], tmp_path: Path, kind: str
) -> None:
    where = tcp() if kind == "tcp" else f"file://{tmp_path}/meet"
    first, second, third = trio
    begin(first, 0, "alice", None, init_method=where).result()
    assert first.run(rpc.rpc_sync, "alice", remote_functions.add, args=(1, 2)) == 3
    with pytest.raises(UsageError, match="no worker 'bob' in this job; it has alice"):
        first.run(rpc.rpc_sync, "bob", remote_functions.nothing)
    begin(second, 5, "bob", None, init_method=where).result()
    assert first.run(rpc.rpc_sync, "bob", remote_functions.whoami) == ("bob", second.pid)
    assert second.run(rpc.rpc_sync, "alice", remote_functions.whoami) == ("alice", first.pid)
    begin(third, 2, "carol", None, init_method=where).result()
    assert third.run(remote_functions.use_references, "bob", "alice") == 16
    assert second.run(rpc.get_worker_info, "carol") == rpc.WorkerInfo("carol", 2)
    third.run(rpc.shutdown, graceful=False)
    kind_of_error, text, _ = first.run(remote_functions.outcome, rpc.rpc_sync, "carol", remote_functions.nothing)
    assert kind_of_error == "WorkerLostError", text
    assert "carol" in text
    leave([first, second])


def test_a_worker_that_left_a_job_of_open_size_frees_its_name_and_rank(trio: list[WorkerProcess]) -> None:
    where = tcp()
    begin(trio[0], 0, "alice", None, init_method=where).result()
    begin(trio[1], 1, "bob", None, init_method=where).result()
    trio[1].run(rpc.shutdown, graceful=False)
    begin(trio[2], 1, "bob", None, init_method=where).result()
    assert trio[0].run(rpc.rpc_sync, "bob", remote_functions.whoami) == ("bob", trio[2].pid)
    leave([trio[0], trio[2]])


def test_without_its_rendezvous_a_job_of_open_size_finds_nobody_new_and_says_why(trio: list[WorkerProcess]) -> None:
    where = tcp()
    begin(trio[0], 0, "alice", None, init_method=where).result()
    begin(trio[1], 1, "bob", None, init_method=where).result()
    begin(trio[2], 2, "carol", None, init_method=where).result()
    assert trio[1].run(rpc.rpc_sync, "carol", remote_functions.add, args=(1, 2)) == 3
    trio[0].kill()
    with pytest.raises(RendezvousError, match="cannot find out about worker 'dave': the rendezvous is gone"):
        trio[1].run(rpc.rpc_sync, "dave", remote_functions.nothing)
    assert trio[1].run(rpc.rpc_sync, "carol", remote_functions.add, args=(1, 2)) == 3
    leave(trio[1:])


# --- rank 0, which serves the store, goes first ---------------------------------------------------------------------


def assert_no_stacks(cast: Sequence[WorkerProcess]) -> None:
    for process in cast:
        assert "Exception raised from" not in process.log()
        assert "frame #" not in process.log()


@pytest.mark.parametrize("killed", [False, True])
def test_workers_of_an_open_job_outlive_rank_0_in_silence(trio: list[WorkerProcess], killed: bool) -> None:
    where = tcp()
    for rank, process in enumerate(trio):
        begin(process, rank, world_size=None, init_method=where).result()
    trio[1].run(rpc.rpc_sync, "worker2", remote_functions.nothing)
    if not killed:
        trio[0].run(rpc.shutdown, graceful=False)
    trio[0].kill()
    trio[0].wait_dead()
    with pytest.raises(RendezvousError, match="cannot find out about worker 'worker9': the rendezvous is gone"):
        trio[1].run(rpc.rpc_sync, "worker9", remote_functions.nothing)
    leave(trio[1:])
    assert_no_stacks(trio[1:])


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_two_workers_of_the_same_rank(trio: list[WorkerProcess]) -> None:
    where = tcp()
    first = begin(trio[0], 0, init_method=where)
    time.sleep(0.2)
    second = begin(trio[1], 1, init_method=where)
    second.result()
    with pytest.raises(RendezvousError, match="rank 1 is already taken by worker 'worker1'"):
        begin(trio[2], 1, "another", init_method=where).result()
    first.result()
    check_and_leave(trio[:2])


def test_two_workers_of_the_same_name(trio: list[WorkerProcess]) -> None:
    where = tcp()
    first = begin(trio[0], 0, "alice", 3, init_method=where, init_timeout=30)
    time.sleep(0.3)
    with pytest.raises(
        RendezvousError, match="the name 'alice' is already taken by rank 0: every worker needs its own"
    ):
        begin(trio[1], 1, "alice", 3, init_method=where).result()
    with pytest.raises(RendezvousError, match="rank 1 could not join: 'alice': the name 'alice' is already taken"):
        first.result()  # at once, and not when its time is over


@pytest.mark.parametrize("name", ["", "two words", "tab\t", "x" * 128, "naïve", "a.b"])
def test_illegal_names(name: str) -> None:
    with pytest.raises(UsageError, match="a worker's name has letters"):
        rpc.init_rpc(name, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "rank must be a number from 0 on, in the argument or the environment variable RANK"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "needs the environment variable MASTER_ADDR: .*telegrad run.*torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "needs the environment variable MASTER_PORT"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "many"},
            "MASTER_PORT is not a number: 'many'",
        ),
        ({"RANK": "first", "WORLD_SIZE": "1"}, "RANK.*'first'"),
        ({"RANK": "0", "WORLD_SIZE": "all"}, "WORLD_SIZE.*'all'"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "rank 3 does not fit a world of 2"),
    ],
)
def test_what_the_environment_lacks_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((UsageError, RendezvousError), match=message):
        rpc.init_rpc("worker")


def test_nobody_else_comes(trio: list[WorkerProcess]) -> None:
    where = tcp()
    pending = [begin(trio[rank], rank, world_size=4, init_method=where, init_timeout=1.5) for rank in (0, 2)]
    for one in pending:
        with pytest.raises(RendezvousError) as caught:
            one.result(10)
        assert "ranks 1, 3 of 4 did not join within 1.5 s" in str(caught.value)
        assert "'worker0' (0), 'worker2' (2)" in str(caught.value)
    for process in (trio[0], trio[2]):
        _, threads, _ = process.run(remote_functions.resources)
        assert threads == 1, "what had been started was left running"


def test_who_waits_for_long_says_for_whom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(rendezvous, "_SILENT_SECONDS", 0.2)
    with pytest.raises(RendezvousError, match="did not join"):
        rpc.init_rpc(
            "a", rank=0, world_size=3, rpc_backend_options=rpc.RpcBackendOptions(init_method=tcp(), init_timeout=0.7)
        )
    lines = [record.getMessage() for record in caplog.records if "waits for" in record.getMessage()]
    assert set(lines) == {"worker 'a' waits for ranks 1, 2 of 3 to join, until 0.7 s are over"}


def test_rank_0_does_not_come(pair: list[WorkerProcess]) -> None:
    where = tcp()
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"cannot reach the rendezvous at 127\.0\.0\.1:\d+ within 1 s.*rank 0"):
        begin(pair[1], 1, init_method=where, init_timeout=1.0).result(15)
    assert time.monotonic() - start < 10


def test_a_failed_start_can_be_tried_again(pair: list[WorkerProcess]) -> None:
    where = tcp()
    for one in [
        begin(process, rank, world_size=3, init_method=where, init_timeout=1) for rank, process in enumerate(pair)
    ]:
        with pytest.raises(RendezvousError, match="rank 2 of 3 did not join"):
            one.result(10)
    join(pair, where)
    check_and_leave(pair)


def test_the_port_belongs_to_another_program(pair: list[WorkerProcess]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"port {port} on 127.0.0.1 is in use, by another job"):
            begin(pair[0], 0, init_method=f"tcp://127.0.0.1:{port}", init_timeout=2).result(10)
        with pytest.raises(RendezvousError, match="takes connections but is no rendezvous"):
            begin(pair[1], 1, init_method=f"tcp://127.0.0.1:{port}", init_timeout=2).result(15)


def test_two_jobs_at_one_port(pair: list[WorkerProcess]) -> None:
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    join(pair, where)
    with worker_processes(2) as others:
        with pytest.raises(RendezvousError, match=f"port {port} on 127.0.0.1 is in use, by another job"):
            begin(others[0], 0, "other0", init_method=where).result()
        with pytest.raises(RendezvousError, match=r"rank 1 is already taken by worker 'worker1'.*two jobs share one"):
            begin(others[1], 1, "other1", init_method=where).result()
    check_and_leave(pair)


def outcomes(pending: Sequence[Pending]) -> list[Exception | None]:
    found: list[Exception | None] = []
    for one in pending:
        try:
            one.result(15)
            found.append(None)
        except Exception as error:
            found.append(error)
    return found


def test_different_secrets(pair: list[WorkerProcess]) -> None:
    where = tcp()
    pending = [
        begin(process, rank, init_method=where, init_timeout=3, secret=f"secret of {rank}")
        for rank, process in enumerate(pair)
    ]
    for error in outcomes(pending):
        assert isinstance(error, (AuthenticationError, RendezvousError))  # whoever notices first tells the other
        assert "signed with another secret: set the same TELEGRAD_SECRET on every worker" in str(error)


@pytest.mark.parametrize("rank_with_secret", [0, 1])
def test_a_secret_on_one_worker_only(pair: list[WorkerProcess], rank_with_secret: int) -> None:
    where = tcp()
    pending = []
    for rank, process in enumerate(pair):
        secret = "ours" if rank == rank_with_secret else None
        pending.append(begin(process, rank, init_method=where, init_timeout=2, secret=secret))
        time.sleep(0.3)
    first, second = outcomes(pending)
    assert isinstance(second, AuthenticationError)
    assert "set the same TELEGRAD_SECRET on every worker" in str(second)
    assert isinstance(first, AuthenticationError | RendezvousError)  # depends on whether it saw the other at all


def test_init_twice_and_shutdown_twice(pair: list[WorkerProcess]) -> None:
    join(pair)
    with pytest.raises(UsageError, match="RPC is already running in this process, as worker 'worker0'"):
        pair[0].run(rpc.init_rpc, "again", rank=0, world_size=1)
    check_and_leave(pair)
    with pytest.raises(UsageError, match="RPC is not running in this process: call init_rpc first"):
        pair[0].run(rpc.shutdown)


def test_a_url_that_is_none() -> None:
    for url, message in {
        "udp://host:1": "none of env://, tcp://host:port and file:///path",
        "tcp://host": "needs a host and a port",
        "tcp://:80": "needs a host and a port",
        "file://": "needs a path",
    }.items():
        with pytest.raises(UsageError, match=message):
            rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method=url))


def test_the_second_worker_dies_before_the_first_call(pair: list[WorkerProcess]) -> None:
    join(pair)
    pair[1].kill()
    with pytest.raises(WorkerLostError, match="worker 'worker1' is lost"):
        pair[0].run(rpc.rpc_sync, "worker1", remote_functions.nothing)
    leave(pair[:1])
