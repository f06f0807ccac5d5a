"""``telegrad.testing``: each declared fault does to a connection what its documentation says."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import telegrad
from support import AT_ONCE, PATIENCE, eventually, in_thread, no_new_threads
from telegrad import rpc
from telegrad._agent.peers import PeerState
from telegrad._wire import codec
from telegrad._wire.frames import PREFIX
from telegrad._wire.messages import Call, Reply
from telegrad.errors import RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from telegrad.testing import Cluster, Fault, cluster

ran: list[Any] = []


def note_down(value: Any) -> Any:
    ran.append(value)
    return value


@pytest.fixture
def pair(pair: Cluster) -> Cluster:
    """Two workers that have called each other."""
    rpc.rpc_sync("b", rpc.rpc_sync, ("a", abs, (1,)))
    ran.clear()
    return pair


def is_lost(workers: Cluster, on: str, peer: str) -> bool:
    return workers[on].agent.peer(peer).state is PeerState.LOST


# --- stall, delay ---------------------------------------------------------------------------------------------------


def test_a_stall_holds_a_message_and_all_behind_it_until_it_is_cleared(pair: Cluster) -> None:
    fault = pair.fault("stall", "Call", sender="a", count=1)
    futures = [rpc.rpc_async("b", note_down, (number,)) for number in range(5)]
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", abs, (1,), timeout=0.05)
    assert ran == []
    assert fault.hits == 1
    with pair.on("b"):
        assert rpc.rpc_sync("a", abs, (-2,)) == 2  # on the other connection
    pair.faults.clear()
    assert [future.wait() for future in futures] == list(range(5))
    assert sorted(ran) == list(range(5))
    assert rpc.rpc_sync("b", abs, (-3,)) == 3


def test_a_stalled_answer_of_a_call_that_timed_out_changes_nothing(pair: Cluster) -> None:
    pair.fault("stall", Reply, sender="b")
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", note_down, (1,), timeout=0.05)
    assert eventually(lambda: ran == [1])
    pair.faults.clear()
    assert rpc.rpc_sync("b", note_down, (2,)) == 2
    assert ran == [1, 2]


def test_a_delay_holds_a_message_for_its_seconds(pair: Cluster) -> None:
    fault = pair.fault("delay", Call, receiver="b", count=1, seconds=0.2)
    start = time.monotonic()
    futures = [rpc.rpc_async("b", abs, (number,)) for number in range(5)]
    assert time.monotonic() - start < 0.15, "the caller was delayed too"
    assert [future.wait() for future in futures] == list(range(5))
    assert time.monotonic() - start >= 0.2
    assert fault.hits == 1


def test_each_delayed_message_has_its_own_delay(pair: Cluster) -> None:
    """A slow connection: what is sent later arrives later, and 20 messages take as long as one."""
    fault = pair.fault("delay", seconds=0.1)
    start = time.monotonic()
    for future in [rpc.rpc_async("b", abs, (number,)) for number in range(20)]:
        future.wait()
    assert 0.2 <= time.monotonic() - start < 0.2 + AT_ONCE
    assert fault.hits >= 40
    start = time.monotonic()
    rpc.rpc_sync("b", abs, (1,))
    assert time.monotonic() - start >= 0.2


def test_a_delay_that_is_cleared_ends_at_once(pair: Cluster) -> None:
    pair.fault("delay", Call, seconds=PATIENCE)
    future = rpc.rpc_async("b", abs, (-1,))
    assert not future.done()
    pair.faults.clear()
    start = time.monotonic()
    assert future.wait() == 1
    assert time.monotonic() - start < AT_ONCE


def test_a_fault_behind_a_held_message_waits_its_turn(pair: Cluster) -> None:
    held = pair.fault("delay", Call, count=1, seconds=0.1)
    cut = pair.fault("cut", Call)
    start = time.monotonic()
    rpc.rpc_async("b", note_down, (1,))
    second = rpc.rpc_async("b", note_down, (2,))
    assert held.hits == cut.hits == 1
    with pytest.raises(WorkerLostError):
        second.wait()
    assert time.monotonic() - start >= 0.1


# --- cut, half-close ------------------------------------------------------------------------------------------------


class FrameSize:
    """Measures the next message of a type."""

    def __init__(self, workers: Cluster, kind: type) -> None:
        self.size = 0
        at = workers.faults.at

        def measure(sender: int, receiver: int, message: Any) -> Fault | None:
            if type(message) is kind:
                self.size = PREFIX.size + len(codec.encode(message)) + sum(codec.stream_sizes(message))
            return at(sender, receiver, message)

        workers.faults.at = measure  # type: ignore[method-assign]


def test_a_cut_at_any_byte_of_a_request() -> None:
    with cluster("a", "b") as workers, workers.on("a"):
        measured = FrameSize(workers, Call)
        rpc.rpc_sync("b", note_down, (1,))
    size = measured.size
    assert 20 < size < 200

    @given(st.integers(0, size - 1), st.booleans())
    @settings(max_examples=40)
    def check(count: int, known: bool) -> None:
        ran.clear()
        with cluster("a", "b", timeout=PATIENCE, graceful=False) as workers, workers.on("a"):
            if known:
                rpc.rpc_sync("b", abs, (1,))
            fault = workers.fault("cut", Call, bytes=count)
            start = time.monotonic()
            with pytest.raises(WorkerLostError, match=r"worker 'b' is lost \(.*(closed|sending failed).*\)"):
                rpc.rpc_sync("b", note_down, (1,))
            assert time.monotonic() - start < AT_ONCE
            assert fault.hits == 1
            assert is_lost(workers, "a", "b")
            with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
                rpc.rpc_sync("b", note_down, (1,))
            with workers.on("b"), pytest.raises(WorkerLostError):
                rpc.rpc_sync("a", note_down, (2,))
            assert eventually(lambda: is_lost(workers, "b", "a"), AT_ONCE)
        assert ran == []

    with no_new_threads():
        check()


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("kind", [Call, Reply])
def test_a_cut_in_a_big_message(pair: Cluster, kind: type, part: float) -> None:
    data = b"x" * (4 << 20)
    fault = pair.fault("cut", kind, bytes=int(len(data) * part) if part < 1 else 1 << 40)
    call = in_thread(lambda: pair["a"].rpc_sync("b", note_down, (data,)))
    if kind is Reply and part == 1:  # it has arrived, but may be lost with the connection
        with contextlib.suppress(WorkerLostError):
            assert call() == data
    else:
        with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
            call()
    assert fault.hits == 1
    assert eventually(lambda: is_lost(pair, "a", "b") and is_lost(pair, "b", "a"), AT_ONCE)
    for worker in pair:
        assert not worker.agent.plane.pending
        assert eventually(lambda worker=worker: not worker.agent.plane.unfinished)
    assert len(ran) <= (kind is Reply or part == 1)


def test_both_sides_see_a_cut_though_neither_waits(pair: Cluster) -> None:
    pair.fault("cut", "UserDelete", bytes=1 << 20)
    rpc.remote("b", note_down, (1,))  # nothing holds the reference
    assert eventually(lambda: is_lost(pair, "a", "b") and is_lost(pair, "b", "a"), AT_ONCE)


def test_a_half_closed_connection(pair: Cluster) -> None:
    """The receiver sees its end and takes the sender for lost; then the sender learns of it too."""
    gate = threading.Event()
    waits["gate"] = gate
    earlier = rpc.rpc_async("b", wait_for, ("gate",))
    fault = pair.fault("half-close", Call)
    futures = [rpc.rpc_async("b", note_down, (number,)) for number in range(3)]
    for future in [*futures, earlier]:
        with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
            future.wait()
    gate.set()
    assert fault.hits == 1
    assert ran == []
    assert eventually(lambda: is_lost(pair, "a", "b") and is_lost(pair, "b", "a"), AT_ONCE)


waits: dict[str, threading.Event] = {}


def wait_for(name: str) -> None:
    waits[name].wait(PATIENCE)


def test_cleared_faults_leave_an_ended_connection_ended(pair: Cluster) -> None:
    pair.fault("cut", Call)
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("b", abs, (1,))
    pair.faults.clear()
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("b", abs, (1,))


# --- which messages -------------------------------------------------------------------------------------------------


def test_a_fault_names_messages_workers_and_a_count(pair: Cluster) -> None:
    other = pair.fault("cut", "Call", sender="b")
    of_nothing = pair.fault("cut", "Gradients", "Fetch")
    fault = pair.fault("delay", "Reply", Call, receiver="b", seconds=0.001, count=2)
    for _ in range(3):
        assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3
    assert (other.hits, of_nothing.hits, fault.hits) == (0, 0, 2)
    assert pair.faults.carried >= 6


@pytest.mark.parametrize("kind", ["drop", "repeat", "reorder", ""])
def test_there_is_no_such_fault(pair: Cluster, kind: Any) -> None:
    with pytest.raises(UsageError, match=f"no fault {kind!r}: a connection can have 'stall', 'delay', 'cut', 'half-"):
        pair.fault(kind)


def test_a_fault_of_what_there_is_not(pair: Cluster) -> None:
    with pytest.raises(UsageError, match="no message 'Nothing'; there are Barrier, Call"):
        pair.fault("cut", "Nothing")
    with pytest.raises(UsageError, match="no message <class 'int'>"):
        pair.fault("cut", int)
    with pytest.raises(UnknownWorkerError, match="no worker 'c' in this cluster"):
        pair.fault("cut", receiver="c")
    with pytest.raises(UsageError, match="negative"):
        pair.fault("delay", seconds=-1.0)
    with pytest.raises(UsageError, match="negative"):
        pair.fault("cut", bytes=-1)
    assert pair.faults.declared == []


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_what_a_fault_holds_back_does_not_hold_up_the_end() -> None:
    with no_new_threads():
        start = time.monotonic()
        with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
            workers.fault("stall", Reply)
            workers.fault("delay", Call, seconds=PATIENCE)
            future = rpc.rpc_async("b", abs, (-1,))
        assert future.wait() == 1
        assert time.monotonic() - start < AT_ONCE


def test_the_delay_of_a_killed_worker_ends_with_it() -> None:
    with no_new_threads(), cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        rpc.rpc_sync("b", abs, (1,))
        workers.fault("delay", Call, seconds=PATIENCE)
        future = rpc.rpc_async("b", abs, (-1,))
        workers.kill("b")
        with pytest.raises(WorkerLostError):
            future.wait()
        assert eventually(lambda: not any(each.name == "telegrad-fault" for each in threading.enumerate()), AT_ONCE)


def test_the_example_of_the_documentation_runs() -> None:
    _, _, example = (Cluster.fault.__doc__ or "").partition("Example::")
    lines = example.splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    names = {"cluster": cluster, "rpc": rpc, "pytest": pytest, **vars(telegrad.errors)}
    with no_new_threads():
        exec("\n".join(line[indent:] for line in lines), names)
