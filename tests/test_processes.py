"""Workers in processes of their own, over real sockets: calls, big tensors, main programs, and sudden death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from certificates import OwnAuthority
from programs import remote_functions, segments
from support import AT_ONCE
from telegrad import rpc
from telegrad.errors import RpcTimeoutError
from telegrad.launch import free_port
from worker_processes import PROGRAMS, WorkerProcess, clean_environment, join, leave, running_workers, worker_processes

MB = 1 << 20
NAMES = ["worker0", "worker1", "worker2"]
SECRET = "a secret of these tests"
WAYS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"transports": ("tcp",), "secret": SECRET},
    "own certificates": {"transports": ("tcp",), "secret": SECRET},  # and files, see below
    "no shared memory": {},
}


@pytest.fixture(scope="module", params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def workers(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WorkerProcess]]:
    """Three workers that live as long as this way is tested; each test leaves them as it found them."""
    authority = OwnAuthority(tmp_path_factory.mktemp("tls")) if way == "own certificates" else None
    with worker_processes(3) as cast:
        if way == "no shared memory":
            for process in cast:
                process.run(remote_functions.forbid_shared_memory)
        join(cast, options_of=authority.files_for if authority else None, **WAYS[way])
        yield cast
        for process in cast:
            assert process.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS
        leave(cast)


# --- calls, in every way ----------------------------------------------------------------------------------------------


def test_everyone_calls_everyone(workers: list[WorkerProcess]) -> None:
    for process in workers:
        assert process.run(remote_functions.call_all, NAMES, 5) == 15
    pids = [workers[0].run(rpc.rpc_sync, name, remote_functions.whoami)[1] for name in NAMES]
    assert pids == [process.pid for process in workers]


def test_the_links_are_of_the_kind_that_was_asked_for(workers: list[WorkerProcess], way: str) -> None:
    workers[0].run(remote_functions.call_all, NAMES)
    kinds = set(workers[0].run(remote_functions.links))
    by_tcp = "transports" in WAYS[way]
    assert kinds == {"TlsStream" if by_tcp else "SocketStream"}
    assert {address.kind for address in workers[0].run(remote_functions.addresses)} == {"tcp" if by_tcp else "unix"}


def test_references_between_three(workers: list[WorkerProcess]) -> None:
    assert workers[0].run(remote_functions.use_references, "worker1", "worker2") == 16
    assert workers[2].run(remote_functions.use_references, "worker2", "worker0") == 16  # its own, lent to another


def test_calls_of_calls_and_async_functions(workers: list[WorkerProcess]) -> None:
    assert (
        workers[0].run(
            rpc.rpc_sync, "worker1", remote_functions.forward, args=("worker2", remote_functions.add, (1, 2))
        )
        == 3
    )
    assert (
        workers[0].run(
            rpc.rpc_sync, "worker1", remote_functions.forward, args=("worker0", remote_functions.add, (1, 2))
        )
        == 3
    )
    assert workers[0].run(rpc.rpc_sync, "worker1", remote_functions.add_via, args=("worker2", 1, 2)) == 4


def test_exceptions_keep_type_and_attributes_and_show_the_remote_traceback(workers: list[WorkerProcess]) -> None:
    kind, number, text = workers[0].run(remote_functions.unlucky, "worker1")
    assert (kind, number) == ("Unlucky", 7)
    assert "7: as asked" in text
    assert "worker1" in text
    assert "in fail" in text


def test_a_function_that_cannot_be_imported_there_is_named(workers: list[WorkerProcess]) -> None:
    kind, text = workers[0].run(remote_functions.error_of_call, "worker1", "nowhere.at_all:function")
    assert kind == "SerializationError"
    assert "nowhere.at_all" in text
    kind, text = workers[0].run(remote_functions.error_of_call, "worker1", "programs.remote_functions:no_such_function")
    assert kind == "SerializationError"
    assert "programs.remote_functions" in text
    assert "no_such_function" in text


@pytest.mark.parametrize("megabytes", [1, 16, 64])
def test_big_tensors_come_back_the_same(workers: list[WorkerProcess], way: str, megabytes: int) -> None:
    same, links_with_memory = workers[0].run(remote_functions.send_around, "worker1", megabytes * MB + 13)
    assert same
    assert (links_with_memory > 0) == (way == "unix")
    assert (workers[0].run(segments.segment_counts)["segments"] > 0) == (way == "unix")


def test_replies_that_are_held_never_change(workers: list[WorkerProcess]) -> None:
    assert workers[0].run(remote_functions.keep_replies, "worker1", MB, 30)


def test_four_threads_send_big_tensors_at_once(workers: list[WorkerProcess]) -> None:
    assert workers[0].start(remote_functions.send_from_threads, "worker1", 9 * MB, 4, 3).result(90) == 12


def test_numpy_arrays_go_by_pickle(workers: list[WorkerProcess]) -> None:
    assert workers[0].run(remote_functions.double_arrays, "worker2")


def test_a_timeout_leaves_the_worker_in_order(workers: list[WorkerProcess]) -> None:
    with pytest.raises(RpcTimeoutError, match=r"wait_forever on worker 'worker1' got no answer within 0\.2 s"):
        workers[0].run(rpc.rpc_sync, "worker1", remote_functions.wait_forever, args=(0.5,), timeout=0.2)
    assert workers[0].run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
    for worker in workers[:2]:  # also when the late answer has come
        assert worker.run(remote_functions.leftovers) == remote_functions.NO_LEFTOVERS


# --- main programs ----------------------------------------------------------------------------------------------------


def run_programs(*commands: list[str], env: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Runs programs at the same time, each with its rank; exit code and output of each."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(commands)), **(env or {})}
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *command],
            env=clean_environment(**job, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        for rank, command in enumerate(commands)
    ]
    deadline = time.monotonic() + 60
    try:
        results = []
        for process in processes:
            out, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            results.append((process.returncode, out))
        return results
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def test_functions_of_another_main_program_go_by_value() -> None:
    caller, callee = run_programs([str(PROGRAMS / "caller.py")], [str(PROGRAMS / "callee.py")])
    assert caller == (0, "all well\n"), caller[1]
    assert callee == (0, ""), callee[1]


def test_functions_of_the_same_main_program_go_by_name() -> None:
    results = run_programs([str(PROGRAMS / "same_main.py")], [str(PROGRAMS / "same_main.py")])
    assert results == [(0, "worker 0: all well\n"), (0, "worker 1: all well\n")]


def test_children_of_multiprocessing_know_their_main_program_too() -> None:
    ((code, out),) = run_programs([str(PROGRAMS / "same_main.py"), "spawn"], env={"WORLD_SIZE": "2"})
    assert code == 0, out
    assert sorted(out.splitlines()) == ["worker 0: all well", "worker 1: all well"]


@pytest.mark.parametrize("enabled", [True, False])
def test_whether_a_result_needs_a_gradient_is_decided_by_the_call(enabled: bool) -> None:
    with running_workers(2) as (caller, _):
        assert caller.run(remote_functions.results_waited_for_in_another_mode, "worker1", enabled) == [enabled, enabled]


# --- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [2, 0], ids=["worker2", "worker0, which leads and serves the store"])
def test_when_a_worker_is_killed_its_calls_fail_at_once_and_the_rest_go_on(victim: int) -> None:
    with worker_processes(3) as cast:
        join(cast)
        killed, name = cast[victim], f"worker{victim}"
        first, second = others = [process for process in cast if process is not killed]
        first.run(remote_functions.start_pending, name, 100)
        blocked = second.start(remote_functions.outcome, rpc.rpc_sync, name, remote_functions.wait_forever, timeout=0)
        time.sleep(0.3)
        moment = time.time()
        killed.kill()
        errors, last = first.start(remote_functions.reap_pending).result(5)
        assert {kind for kind, _ in errors} == {"WorkerLostError"}
        assert all(f"worker {name!r} is lost" in text for _, text in errors)
        print(f"the last of 100 calls failed {1000 * (last - moment):.0f} ms after the kill")
        assert last - moment < AT_ONCE, f"the last of 100 calls failed {last - moment:.2f} s after the kill"
        kind, text, _ = blocked.result(5)
        assert kind == "WorkerLostError"
        assert name in text
        kind, text, seconds = first.run(remote_functions.outcome, rpc.rpc_sync, name, remote_functions.nothing)
        assert kind == "WorkerLostError"
        assert seconds < AT_ONCE
        there = next(other for other in NAMES if other != name and other != f"worker{cast.index(first)}")
        assert first.run(rpc.rpc_sync, there, remote_functions.add, args=(1, 2)) == 3
        start = time.monotonic()
        leave(others)
        assert time.monotonic() - start < AT_ONCE


def test_a_worker_that_nobody_called_is_missed_at_shutdown_and_not_waited_for() -> None:
    with worker_processes(3) as cast:
        join(cast)
        cast[2].kill()
        cast[2].wait_dead()
        leave(cast[:2], 10)


def test_a_job_that_was_stopped_as_a_whole_goes_on() -> None:
    """As after a Ctrl-Z, or on a laptop that slept."""
    with running_workers(2, heartbeat=1.0) as cast:
        first = cast[0]
        first.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        for process in cast:
            process.signal(signal.SIGSTOP)
        time.sleep(3)
        for process in cast:
            process.signal(signal.SIGCONT)
        assert first.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
        assert "lost" not in first.log()


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_an_idle_worker_costs_little_memory() -> None:
    """Measured in a fresh process, before and after: forked ones share their memory with the nursery."""
    program = (
        "import json, gc, psutil, torch, torch.distributed\n"
        "rss = lambda: (gc.collect(), psutil.Process().memory_info().rss)[1]\n"
        "torch.ones(3).sum()\n"
        "before = rss()\n"
        "from telegrad import rpc\n"
        "import os\n"
        "rpc.init_rpc('worker' + os.environ['RANK'], rank=int(os.environ['RANK']), world_size=2)\n"
        "print(json.dumps([before, rss()]))\n"
        "rpc.shutdown()\n"
    )
    for code, out in run_programs(["-c", program], ["-c", program]):
        assert code == 0, out
        before, after = json.loads(out)
        print(f"an idle worker costs {(after - before) / MB:.1f} MB")
        assert after - before < 30 * MB


def test_twenty_jobs_in_one_process_leave_no_thread_and_no_descriptor() -> None:
    with worker_processes(2) as cast:
        where = f"tcp://127.0.0.1:{free_port()}"
        pending = [process.start(remote_functions.cycle, rank, 2, where, 20) for rank, process in enumerate(cast)]
        for one in pending:
            threads, files, names = one.result(60)
            assert threads[-1] <= threads[1], threads
            assert files[-1] <= files[1], (files, names)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_child_does_not_disturb_its_parent(rank: int) -> None:
    with running_workers(2) as cast:
        parent, other = cast[rank], cast[1 - rank]
        name, other_name = f"worker{rank}", f"worker{1 - rank}"
        parent.run(rpc.rpc_sync, other_name, remote_functions.nothing)
        other.run(rpc.rpc_sync, name, remote_functions.nothing)
        for how in ("exit at once", "multiprocessing", "use it", "exit properly"):
            assert parent.run(remote_functions.fork_and_exit, how) == 0, how
            if how != "exit properly":  # in a child forked by a thread, the end of that thread is not the program's
                assert other.run(rpc.rpc_sync, name, remote_functions.fork_and_exit, args=(how,)) == 0, how
            assert parent.run(rpc.rpc_sync, other_name, remote_functions.add, args=(1, 2)) == 3
            assert other.run(rpc.rpc_sync, name, remote_functions.add, args=(1, 2)) == 3
        assert torch.equal(
            parent.run(rpc.rpc_sync, other_name, remote_functions.filled, args=(MB, 3)), remote_functions.filled(MB, 3)
        )


def test_the_death_of_a_worker_is_noticed_though_its_forked_children_live() -> None:
    """They inherit its sockets, and as long as anybody holds a socket open its peer sees no end."""
    with worker_processes(2) as cast:
        join(cast)
        dying, waiting = cast
        waiting.run(rpc.rpc_sync, "worker0", remote_functions.nothing)
        dying.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        child = dying.run(remote_functions.fork_and_stay)
        try:
            pending = waiting.start(
                remote_functions.outcome, rpc.rpc_sync, "worker0", remote_functions.wait_forever, timeout=0
            )
            time.sleep(0.2)
            start = time.monotonic()
            dying.kill()
            kind, _, _ = pending.result(20)
            assert kind == "WorkerLostError"
            assert time.monotonic() - start < AT_ONCE
            leave([waiting], 10)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_message_that_takes_longer_than_the_heartbeat_is_no_silence(transport: str) -> None:
    """Liveness looks about once a second, so the message must take longer; its size depends on the machine."""
    with worker_processes(2) as cast:
        for process in cast:
            process.run(remote_functions.forbid_shared_memory)
        join(cast, transports=(transport,), heartbeat=0.5, secret=SECRET)
        size = 75 * MB
        while max(cast[0].run(remote_functions.big_message, "worker1", size)) < 1.5 and size < 600 * MB:
            size *= 2
        assert "lost" not in cast[0].log() + cast[1].log()
        leave(cast)


def test_thirty_two_processes_call_each_other() -> None:
    names = [f"worker{rank}" for rank in range(32)]
    with worker_processes(32) as cast:
        start = time.monotonic()
        join(cast, timeout=60)
        for one in [process.start(remote_functions.call_all, names) for process in cast]:
            assert one.result(60) == 32
        leave(cast, 60)
        print(f"32 processes: {time.monotonic() - start:.1f} s")
