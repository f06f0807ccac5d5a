"""Workers that are alive and do not respond for a while: they hold the GIL, or are stopped.  And a dead one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from programs import deeds
from puppets import join, leave, puppets, troupe
from support import AT_ONCE
from telegrad import rpc

MB = 1 << 20
SECRET = "a secret of these tests"
HEARTBEAT = 0.5  # seconds; each wait below is several times as long

transports = pytest.mark.parametrize("transport", ["unix", "tcp"])


@transports
def test_a_callee_that_holds_the_gil_for_long_is_not_lost(transport: str) -> None:
    with troupe(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (caller, callee):
        caller.run(rpc.rpc_sync, "worker1", deeds.nothing)
        callee.run(rpc.rpc_sync, "worker0", deeds.nothing)
        assert caller.run(rpc.rpc_sync, "worker1", deeds.hold_gil, args=(3,)) == 3
        assert callee.run(rpc.rpc_sync, "worker0", deeds.add, args=(1, 2)) == 3
        assert "lost" not in caller.log() + callee.log()


@transports
def test_a_driver_that_holds_the_gil_for_long_is_not_lost(transport: str) -> None:
    with troupe(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (driver, other):
        driver.run(rpc.rpc_sync, "worker1", deeds.nothing)
        other.run(rpc.rpc_sync, "worker0", deeds.nothing)
        driver.run(deeds.hold_gil, 3)
        assert driver.run(rpc.rpc_sync, "worker1", deeds.add, args=(1, 2)) == 3
        assert other.run(rpc.rpc_sync, "worker0", deeds.add, args=(1, 2)) == 3
        assert "lost" not in driver.log() + other.log()


@transports
def test_a_call_to_a_stopped_worker_runs_into_its_deadline_and_says_that_it_is_alive(transport: str) -> None:
    with troupe(2, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET) as (waiting, stopped):
        waiting.run(rpc.rpc_sync, "worker1", deeds.nothing)
        stopped.signal(signal.SIGSTOP)
        kind, text, seconds = waiting.run(deeds.outcome, rpc.rpc_sync, "worker1", deeds.nothing, timeout=2.0)
        assert kind == "RpcTimeoutError"
        assert "Its process and host are alive, so it is busy or stopped" in text
        assert seconds < 2.0 + AT_ONCE
        stopped.signal(signal.SIGCONT)
        assert waiting.run(rpc.rpc_sync, "worker1", deeds.add, args=(1, 2)) == 3
        assert "lost" not in waiting.log()


@transports
def test_a_big_argument_for_a_stopped_worker_runs_into_the_deadline_too(transport: str) -> None:
    """The socket is full, and what is left of the message goes out when the worker reads again."""
    with puppets(2) as cast:
        for puppet in cast:
            puppet.run(deeds.close_lanes)
        join(cast, transports=(transport,), heartbeat=HEARTBEAT, secret=SECRET)
        waiting, stopped = cast
        waiting.run(rpc.rpc_sync, "worker1", deeds.nothing)
        stopped.signal(signal.SIGSTOP)
        kind, _, seconds = waiting.run(deeds.outcome, deeds.send_big, "worker1", 64 * MB, 1.0)
        assert kind == "RpcTimeoutError"
        assert seconds < 1.0 + AT_ONCE
        kind, _, seconds = waiting.run(deeds.outcome, rpc.rpc_sync, "worker1", deeds.nothing, timeout=1.0)
        assert kind == "RpcTimeoutError"
        assert seconds < 1.0 + AT_ONCE
        stopped.signal(signal.SIGCONT)
        assert waiting.run(deeds.send_big, "worker1", 8 * MB, 30.0) == 8 * MB
        assert "lost" not in waiting.log()
        leave(cast)


def test_a_dead_process_whose_child_holds_its_sockets_is_lost() -> None:
    """The child was forked without Python's knowledge, so nothing closed the sockets in it."""
    with puppets(2) as cast:
        join(cast)
        waiting, parent = cast
        waiting.run(rpc.rpc_sync, "worker1", deeds.nothing)
        child = parent.run(deeds.fork_unnoticed)
        try:
            pending = waiting.start(deeds.outcome, rpc.rpc_sync, "worker1", deeds.wait_forever, timeout=0)
            time.sleep(0.2)
            parent.kill()
            kind, text, _ = pending.result(20)
            assert kind == "WorkerLostError"
            assert "its process has ended" in text
            leave([waiting], 10)
        finally:
            os.kill(child, signal.SIGKILL)
