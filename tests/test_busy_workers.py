"""Workers that are alive and do not respond for a while: they hold the GIL, or are stopped.  And a dead one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from programs import remote_functions
from support import AT_ONCE
from telegrad import rpc
from worker_processes import join, leave, running_workers, worker_processes

MB = 1 << 20
SECRET = "a secret of these tests"
HEARTBEAT = 0.5  # seconds; each wait below is several times as long

transports = pytest.mark.parametrize("transport", ["unix", "tcp"])


@transports
def test_a_callee_that_holds_the_gil_for_long_is_not_lost(transport: str) -> None:
    with running_workers(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (caller, callee):
        caller.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        callee.run(rpc.rpc_sync, "worker0", remote_functions.nothing)
        assert caller.run(rpc.rpc_sync, "worker1", remote_functions.hold_gil, args=(3,)) == 3
        assert callee.run(rpc.rpc_sync, "worker0", remote_functions.add, args=(1, 2)) == 3
        assert "lost" not in caller.log() + callee.log()


@transports
def test_a_driver_that_holds_the_gil_for_long_is_not_lost(transport: str) -> None:
    with running_workers(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (driver, other):
        driver.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        other.run(rpc.rpc_sync, "worker0", remote_functions.nothing)
        driver.run(remote_functions.hold_gil, 3)
        assert driver.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
        assert other.run(rpc.rpc_sync, "worker0", remote_functions.add, args=(1, 2)) == 3
        assert "lost" not in driver.log() + other.log()


@transports
def test_a_leader_that_holds_the_gil_is_waited_for_in_a_shutdown(transport: str) -> None:
    """Nothing was called before, so there is no connection to it, and it answers none for several heartbeats."""
    with worker_processes(3) as cast:
        join(cast, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET)
        leader, second, third = cast
        busy = leader.start(remote_functions.hold_gil, 4)
        ends = [process.start(rpc.shutdown) for process in (second, third)]
        busy.result()
        for name in ("worker1", "worker2"):
            assert leader.run(rpc.rpc_sync, name, remote_functions.add, args=(1, 2)) == 3
        leader.run(rpc.shutdown)
        for end in ends:
            end.result()
        assert "lost" not in leader.log() + second.log() + third.log()


@transports
def test_a_worker_that_holds_the_gil_is_waited_for_by_the_leader(transport: str) -> None:
    with worker_processes(2) as cast:
        join(cast, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET)
        leader, other = cast
        busy = other.start(remote_functions.hold_gil, 4)
        end = leader.start(rpc.shutdown)
        busy.result()
        assert other.run(rpc.rpc_sync, "worker0", remote_functions.add, args=(1, 2)) == 3
        other.run(rpc.shutdown)
        end.result()
        assert "lost" not in leader.log() + other.log()


def test_a_shutdown_with_a_timeout_does_not_wait_longer_for_a_stopped_leader() -> None:
    with worker_processes(2) as cast:
        join(cast, heartbeat=HEARTBEAT)
        leader, other = cast
        leader.signal(signal.SIGSTOP)
        kind, text, seconds = other.run(remote_functions.outcome, rpc.shutdown, timeout=2)
        assert kind == "RpcTimeoutError", text
        assert seconds < 2 + AT_ONCE


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_the_first_call_to_a_stopped_worker_ends_at_its_deadline(call: Any) -> None:
    with worker_processes(2) as cast:
        join(cast, heartbeat=HEARTBEAT)
        waiting, stopped = cast
        stopped.signal(signal.SIGSTOP)
        _, _, seconds = waiting.run(remote_functions.outcome, remote_functions.call_in_vain, call, "worker1", 1.0)
        assert seconds < 1.0 + AT_ONCE
        stopped.signal(signal.SIGCONT)
        assert waiting.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
        leave(cast)


@transports
def test_a_call_to_a_stopped_worker_runs_into_its_deadline_and_says_that_it_is_alive(transport: str) -> None:
    with running_workers(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (waiting, stopped):
        waiting.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        stopped.signal(signal.SIGSTOP)
        kind, text, seconds = waiting.run(
            remote_functions.outcome, rpc.rpc_sync, "worker1", remote_functions.nothing, timeout=2.0
        )
        assert kind == "RpcTimeoutError"
        assert "busy or stopped, and the call may still run there" in text
        assert seconds < 2.0 + AT_ONCE
        stopped.signal(signal.SIGCONT)
        assert waiting.run(rpc.rpc_sync, "worker1", remote_functions.add, args=(1, 2)) == 3
        assert "lost" not in waiting.log()


@transports
def test_a_big_argument_for_a_stopped_worker_runs_into_the_deadline_too(transport: str) -> None:
    """The socket is full, and what is left of the message goes out when the worker reads again."""
    with worker_processes(2) as cast:
        for process in cast:
            process.run(remote_functions.forbid_shared_memory)
        join(cast, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET)
        waiting, stopped = cast
        waiting.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        stopped.signal(signal.SIGSTOP)
        kind, _, seconds = waiting.run(remote_functions.outcome, remote_functions.send_big, "worker1", 64 * MB, 1.0)
        assert kind == "RpcTimeoutError"
        assert seconds < 1.0 + AT_ONCE
        kind, _, seconds = waiting.run(
            remote_functions.outcome, rpc.rpc_sync, "worker1", remote_functions.nothing, timeout=1.0
        )
        assert kind == "RpcTimeoutError"
        assert seconds < 1.0 + AT_ONCE
        stopped.signal(signal.SIGCONT)
        assert waiting.run(remote_functions.send_big, "worker1", 8 * MB, 30.0) == 8 * MB
        assert "lost" not in waiting.log()
        leave(cast)


def test_a_dead_process_whose_child_holds_its_sockets_is_lost() -> None:
    """The child was forked without Python's knowledge, so nothing closed the sockets in it."""
    with worker_processes(2) as cast:
        join(cast)
        waiting, parent = cast
        waiting.run(rpc.rpc_sync, "worker1", remote_functions.nothing)
        child = parent.run(remote_functions.fork_unnoticed)
        try:
            pending = waiting.start(
                remote_functions.outcome, rpc.rpc_sync, "worker1", remote_functions.wait_forever, timeout=0
            )
            time.sleep(0.2)
            parent.kill()
            kind, text, _ = pending.result(20)
            assert kind == "WorkerLostError"
            assert "its process has ended" in text
            leave([waiting], 10)
        finally:
            os.kill(child, signal.SIGKILL)
