"""The end of a job: graceful, hurried, and with some of the workers dead."""

from __future__ import annotations

import operator
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from support import AT_ONCE, PATIENCE, Gate, eventually, in_thread, our_threads, pass_through
from telegrad import rpc
from telegrad._agent import barrier
from telegrad._agent.barrier import BarrierLeader
from telegrad._wire.messages import Barrier, Reply
from telegrad._worker import missing_at_barrier
from telegrad.errors import NotInitializedError, RpcTimeoutError, UsageError, WorkerLostError
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("no_threads_left")


_done: list[str] = []


def chain(names: list[str], gate: Gate) -> None:
    """Each worker starts a call on the next, and does not wait for it."""
    if not names:
        gate.pass_through()
        _done.append(rpc.get_worker_info().name)
    else:
        rpc.rpc_async(names[0], chain, (names[1:], gate))


def test_a_graceful_shutdown_waits_for_chains_of_calls() -> None:
    _done.clear()
    gate = Gate()
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        with workers.on("a"):
            rpc.rpc_async("b", chain, (["c", "a", "b", "c"], gate))
        ends = [in_thread(worker.shutdown) for worker in workers]
        gate.wait_entered()
        assert not any(worker.closed for worker in workers)
        assert rpc_still_works(workers)
        gate.open()
        for end in ends:
            end()
    assert _done == ["c"]


def rpc_still_works(workers: Cluster) -> bool:
    with workers.on("a"):
        return rpc.rpc_sync("b", operator.add, (1, 2)) == 3


def test_a_graceful_shutdown_waits_for_the_others() -> None:
    with cluster("a", "b") as workers:
        end = in_thread(workers["b"].shutdown)
        with workers.on("a"):
            assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3
            assert not workers["b"].closed
            rpc.shutdown()
        end()
        assert all(worker.closed for worker in workers)


@pytest.mark.parametrize("dead", ["a", "b", "c"], ids=["leader", "second", "last"])
@pytest.mark.parametrize("when", ["before", "during", "unnoticed"])
def test_the_living_shut_down_without_the_dead(dead: str, when: str) -> None:
    with cluster("a", "b", "c", "d", timeout=PATIENCE) as workers:
        if when != "unnoticed":  # there are links, so that the death is seen at once
            for worker in workers:
                for other in workers:
                    worker.rpc_sync(other.name, operator.add, (1, 2))
        if when != "during":
            workers.kill(dead)
        living = [worker for worker in workers if worker.name != dead]
        held_back = living[-1]
        ends = [in_thread(worker.shutdown) for worker in living if worker is not held_back]
        if when == "during":
            assert eventually(lambda: all(len(worker.agent.calls) for worker in living if worker is not held_back))
            workers.kill(dead)
        held_back.shutdown()
        for end in ends:
            end()


def test_a_leader_that_dies_between_its_answers() -> None:
    """One worker heard that there is another round, the others did not, and turn to the next leader."""
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        stalled = workers.fault("stall", Reply, sender="a", receiver="c")
        ends = [in_thread(workers[name].shutdown) for name in ("a", "b", "c")]
        assert eventually(lambda: stalled.hits == 1)
        assert eventually(lambda: 1 in workers["a"]._leader._rounds)  # a and b are in the second round
        kill = in_thread(lambda: workers.kill("a"))
        for end in ends[1:]:
            end()
        kill()
        ends[0]()


def test_a_timeout_says_who_is_missing() -> None:
    with cluster("a", "b", "c") as workers:
        end = in_thread(lambda: workers["b"].shutdown(timeout=0.3))
        with pytest.raises(RpcTimeoutError, match=r"waited 0\.2 s for the other workers: c did not call shutdown"):
            workers["a"].shutdown(timeout=0.2)
        with pytest.raises(RpcTimeoutError, match=r"shutdown waited 0\.3 s"):
            end()
        assert workers["a"].closed
        assert workers["b"].closed


def test_a_timeout_says_what_still_runs() -> None:
    gate = Gate()
    with cluster("a", "b", timeout=PATIENCE) as workers:
        future = workers["a"].rpc_async("b", pass_through, (gate,))
        gate.wait_entered()
        end = in_thread(lambda: workers["a"].shutdown(timeout=0.1))
        with pytest.raises(RpcTimeoutError, match=r"shutdown waited 0\.1 s for .*support:pass_through of 1"):
            end()
        with pytest.raises(WorkerLostError):
            future.wait()
        gate.open()


@pytest.fixture
def frequent_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "NOTICE_SECONDS", 0.05)


@pytest.mark.usefixtures("frequent_notices")
def test_a_shutdown_says_again_and_again_which_workers_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        ends = [in_thread(workers[name].shutdown) for name in ("a", "b")]
        for name in ("a", "b"):
            text = f"worker '{name}': shutdown has waited"
            assert eventually(lambda text=text: sum(text in said for said in caplog.messages) >= 2)
        assert any(said.endswith(" s for c to call shutdown and end their calls") for said in caplog.messages)
        workers["c"].shutdown()
        for end in ends:
            end()
    assert all(record.levelname == "WARNING" for record in caplog.records)


@pytest.mark.usefixtures("frequent_notices")
def test_a_shutdown_says_which_calls_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with cluster("a", "b", timeout=PATIENCE) as workers:
        workers["a"].rpc_async("b", pass_through, (gate,))
        gate.wait_entered()
        ends = [in_thread(worker.shutdown) for worker in workers]
        assert eventually(
            lambda: any(
                "its own calls (<Calls 1 waiting: support:pass_through of 1>)" in said for said in caplog.messages
            )
        )
        assert eventually(lambda: any("functions that run here for others (1)" in said for said in caplog.messages))
        gate.open()
        for end in ends:
            end()


def test_a_shutdown_needs_no_thread_for_its_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with barrier.repeated_notice(lambda: None):
        entered = True
    assert entered


def test_without_grace_nobody_is_waited_for_and_nothing_hangs() -> None:
    gate = Gate()
    with cluster("a", "b", timeout=0.0) as workers:
        mine = workers["a"].rpc_async("b", pass_through, (gate,))
        called = threading.Event()
        mine.add_done_callback(lambda _: called.set())
        blocked = in_thread(lambda: workers["a"].rpc_sync("b", pass_through, (gate,)))
        own = workers["a"].remote("a", pass_through, (Gate(),))
        theirs = workers["b"].rpc_async("a", pass_through, (gate,))
        assert eventually(lambda: workers["b"].agent.plane.unfinished >= 2)
        start = time.monotonic()
        end = in_thread(lambda: workers["a"].shutdown(graceful=False))
        with pytest.raises(WorkerLostError, match="worker 'b' has shut down"):
            bounded(mine)
        assert time.monotonic() - start < AT_ONCE  # not only when the threads that run user code are given up
        assert called.wait(PATIENCE)
        with pytest.raises(WorkerLostError):
            blocked()
        with pytest.raises(WorkerLostError, match="worker 'a' has shut down"):
            bounded(theirs)
        for each in Gate._all.values():
            each.open()
        end()
        with pytest.raises(WorkerLostError, match="'a' has shut down"):
            workers["b"].rpc_sync("a", operator.add, (1, 2))
        del own


def bounded(future: Any) -> Any:
    return in_thread(future.wait)()


def test_a_second_shutdown_does_nothing() -> None:
    with cluster("a", "b") as workers:
        ends = [in_thread(worker.shutdown) for worker in workers]
        for end in ends:
            end()
        workers["a"].shutdown()
        workers["a"].shutdown(graceful=False)
        with pytest.raises(NotInitializedError):
            workers["a"].rpc_sync("b", operator.add, (1, 2))


def test_a_worker_alone_shuts_down() -> None:
    with cluster("a") as workers:
        assert workers["a"].rpc_sync("a", operator.add, (1, 2)) == 3
        start = time.monotonic()
        workers["a"].shutdown()
        assert time.monotonic() - start < AT_ONCE


def test_late_barriers_find_a_leader_that_has_left() -> None:
    """Answers of the last round may be overtaken by the goodbye."""
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        fault = workers.fault("delay", Barrier, sender="c", seconds=0.05, count=2)
        workers.shutdown(timeout=PATIENCE)
        assert fault.hits == 2
        assert all(worker.closed for worker in workers)


def test_missing_is_empty_while_nobody_waits() -> None:
    with cluster("a", "b") as workers:
        assert isinstance(workers["a"]._leader, BarrierLeader)
        assert workers["a"]._leader.missing() == []


def test_a_hundred_and_twenty_eight_workers() -> None:
    names = [f"w{number}" for number in range(128)]
    with cluster(*names, timeout=60.0, threads=2) as workers:
        for worker in workers:  # each calls some: a pair of workers needs up to four descriptors
            others = [(worker.id + step) % len(names) for step in range(0, len(names), 8)]
            futures = [worker.rpc_async(other, operator.add, (worker.id, other)) for other in others]
            assert torch.futures.wait_all(futures) == [worker.id + other for other in others]
    assert not {thread for thread in our_threads() if "-w" in thread.name}


def test_a_server_that_is_called_says_nothing_of_its_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    """A parameter server calls shutdown at once, and serves until the trainers have ended."""
    with cluster("server", "trainer", timeout=PATIENCE) as workers:
        server = workers["server"]
        for _ in range(3):
            workers["trainer"].rpc_sync("server", abs, (1,))
            server._say_what_shutdown_awaits(10.0)
        assert not caplog.messages
        server._say_what_shutdown_awaits(20.0)
        assert "worker 'server': shutdown has waited 20 s" in caplog.messages[0]
        workers["trainer"].rpc_sync("server", missing_at_barrier)  # another that waits asks for whom
        server._say_what_shutdown_awaits(30.0)
        assert len(caplog.messages) == 2


def test_a_process_whose_function_called_shutdown_still_has_its_worker(tmp_path: Path) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(UsageError, match="it would wait for itself"):
            rpc.rpc_sync("alone", rpc.shutdown)
        assert rpc.get_worker_info().name == "alone"
    finally:
        rpc.shutdown()
