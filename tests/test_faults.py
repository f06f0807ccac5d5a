"""Whatever happens to the connections between workers, references are freed once, and nothing hangs or leaks."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from support import AT_ONCE, Gate, assert_no_references, eventually, in_thread, pass_through
from telegrad import rpc
from telegrad._agent.peers import PeerState
from telegrad._wire.messages import (
    Call,
    ChildConfirmed,
    Fetch,
    ForkAccepted,
    ForkRequest,
    RemoteCall,
    Reply,
    UserDelete,
)
from telegrad.errors import RpcTimeoutError, UsageError, WorkerLostError
from telegrad.testing import Cluster

INTERNAL = [ForkRequest, ForkAccepted, ChildConfirmed, UserDelete]
REQUESTS = [Call, RemoteCall, Fetch, Reply]

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture(autouse=True)
def _none_alive() -> None:
    _alive.clear()  # a worker that an earlier test killed keeps what it had


_alive: weakref.WeakSet[Value] = weakref.WeakSet()
_kept: list[Any] = []


class Value:
    born = 0

    def __init__(self) -> None:
        Value.born += 1
        _alive.add(self)

    def touch(self) -> str:
        return "touched"


def touch(rref: Any) -> Any:
    return rref.rpc_sync().touch()


def keep(rref: Any) -> None:
    _kept.append(rref)


def forward(rref: Any, to: str) -> Any:
    rpc.rpc_sync(to, keep, (rref,))
    return rref


def pass_references_around() -> None:
    """Every kind of message: forks of users, of the owner, back to the creator, and drops in any order."""
    born = Value.born
    rref = rpc.remote("b", Value)
    assert rpc.rpc_sync("c", touch, (rref,)) == "touched"
    again = rpc.rpc_sync("c", forward, (rref, "b"))
    rpc.rpc_sync("c", keep, (rref,))
    del rref
    assert touch(again) == "touched"
    del again
    assert _alive
    while _kept:
        assert touch(_kept[0]) == "touched"
        del _kept[0]
    assert Value.born == born + 1


@pytest.mark.parametrize("message", [*INTERNAL, *REQUESTS], ids=lambda message: message.__name__)
def test_late_messages_are_only_late(trio: Cluster, message: type) -> None:
    fault = trio.fault("delay", message, seconds=0.02)
    for _ in range(2):
        pass_references_around()
    assert rpc.remote("b", operator.add, (1, 2)).to_here() == 3
    assert_no_references(trio)
    assert fault.hits > 0
    assert not _alive


def test_all_messages_are_late_at_once(trio: Cluster) -> None:
    late = [
        trio.fault("delay", message, seconds=0.005 + 0.01 * number, count=5) for number, message in enumerate(INTERNAL)
    ]
    for _ in range(3):
        pass_references_around()
    assert_no_references(trio)
    assert all(fault.hits for fault in late)
    assert not _alive


def test_a_stalled_reply_is_a_timeout_and_the_next_call_goes_through(trio: Cluster) -> None:
    fault = trio.fault("stall", Reply, sender="b", receiver="a")
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", operator.add, (1, 2), timeout=0.05)
    assert fault.hits == 1
    trio.faults.clear()
    assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3


def test_a_stalled_reply_to_a_creation(trio: Cluster) -> None:
    fault = trio.fault("stall", Reply, sender="b", receiver="a")
    rref = rpc.remote("b", Value, timeout=0.05)
    assert eventually(lambda: trio["a"].references.broken)
    assert fault.hits == 1
    assert _alive
    del rref
    trio.faults.clear()
    assert_no_references(trio)
    assert not _alive


# --- a connection is cut at a message ---------------------------------------------------------------------------


@pytest.mark.parametrize("bytes", [0, 20, 1 << 20], ids=["before", "within", "after"])
@pytest.mark.parametrize("message", [*INTERNAL, *REQUESTS], ids=lambda message: message.__name__)
def test_a_cut_fails_what_needs_the_worker_at_once(trio: Cluster, message: type, bytes: int) -> None:
    """Two workers lose each other and live on; nothing stays behind, neither then nor when one of them dies."""
    fault = trio.fault("cut", message, count=1, bytes=bytes)
    start = time.monotonic()
    with contextlib.suppress(WorkerLostError, UsageError):  # or nothing needs the two any more
        pass_references_around()
        rpc.remote("b", Value).to_here()
    assert time.monotonic() - start < AT_ONCE
    assert eventually(lambda: fault.hits == 1)
    assert eventually(lambda: len(losses(trio)) == 2, AT_ONCE), losses(trio)
    for worker in trio:
        assert eventually(lambda worker=worker: not worker.agent.plane.pending, AT_ONCE)
        assert eventually(lambda worker=worker: not worker.agent.plane.unfinished)
    _kept.clear()
    assert_no_references(trio)
    victim = losses(trio)[1][0]
    assert victim != "a"
    trio.kill(victim)
    assert_no_references(trio)
    (other,) = {"b", "c"} - {victim}
    if not losses_of(trio, "a", other):
        assert rpc.remote(other, operator.add, (1, 2)).to_here() == 3


def losses(workers: Cluster) -> list[tuple[str, str]]:
    """Which worker has lost which."""
    return [
        (worker.name, peer.name) for worker in workers for peer in worker.agent.peers if peer.state is PeerState.LOST
    ]


def losses_of(workers: Cluster, *names: str) -> list[tuple[str, str]]:
    return [(one, other) for one, other in losses(workers) if one in names and other in names]


def test_a_lost_worker_cannot_come_back(trio: Cluster) -> None:
    """One that is lost and does not know it learns of it when it connects."""
    agent = trio["a"].agent
    agent.peer_gone(agent.peer("b"), PeerState.LOST, "the test says so")
    born = Value.born
    with trio.on("b"), pytest.raises(WorkerLostError, match="worker 'a' is lost"):
        rpc.rpc_sync("a", Value)
    assert Value.born == born
    assert not agent.peer("b").links
    assert losses(trio) == [("a", "b"), ("b", "a")]


# --- losses -----------------------------------------------------------------------------------------------------


def test_a_cut_link_is_a_loss_on_both_sides(trio: Cluster) -> None:
    gate = Gate()
    mine = rpc.rpc_async("b", pass_through, (gate,))
    with trio.on("b"):
        theirs = rpc.rpc_async("a", pass_through, (gate,))
    gate.wait_entered()
    trio.cut("a", "b")
    with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
        mine.wait()
    with pytest.raises(WorkerLostError, match="worker 'a' is lost"):
        theirs.wait()
    gate.open()
    for name, other in (("a", "b"), ("b", "a")):
        with trio.on(name), pytest.raises(WorkerLostError, match=f"worker '{other}' is lost"):
            rpc.rpc_sync(other, operator.add, (1, 2))
        with trio.on(name):
            assert rpc.rpc_sync("c", operator.add, (1, 2)) == 3


@pytest.mark.parametrize("message", [ForkRequest, ForkAccepted], ids=lambda message: message.__name__)
def test_a_third_worker_does_not_wait_for_two_that_are_cut_from_each_other(trio: Cluster, message: type) -> None:
    """``a`` waits for ``c`` to hear of the owner, ``b``: the confirmation never comes."""
    stalled = trio.fault("stall", message)
    rref = rpc.remote("b", Value)
    rpc.rpc_sync("c", keep, (rref,))
    assert eventually(lambda: stalled.hits == 1)
    del rref
    references = trio["a"].references
    assert eventually(lambda: references.counts()["leaving_forks"] == 1)
    assert references.counts()["pending_children"] == 1
    trio.cut("b", "c")
    assert eventually(lambda: references.empty), references
    assert eventually(lambda: not _alive)
    _kept.clear()
    assert_no_references(trio)


def test_a_caller_that_sees_the_end_of_a_connection_first_gets_its_reason(trio: Cluster) -> None:
    """The thread that closes a connection fails its calls a little later."""
    agent, gate = trio["a"].agent, Gate()
    fail_calls = agent.fail_calls

    def fail_late(*args: Any) -> None:
        time.sleep(0.5)
        fail_calls(*args)

    call = in_thread(lambda: trio["a"].rpc_sync("b", pass_through, (gate,)))
    gate.wait_entered()
    agent.fail_calls = fail_late  # type: ignore[method-assign]
    trio.cut("a", "b")
    with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
        call()
    gate.open()


def test_a_call_that_begins_as_its_connection_breaks_gets_the_reason(trio: Cluster) -> None:
    rpc.rpc_sync("b", operator.add, (1, 2))
    agent = trio["a"].agent
    link, peer_gone = agent.peer("b").link, agent.peer_gone
    assert link is not None

    def lose_late(*args: Any) -> None:
        time.sleep(0.3)
        peer_gone(*args)

    agent.peer_gone = lose_late  # type: ignore[method-assign]
    breaks = in_thread(lambda: link.fail("the test broke it"))
    assert eventually(lambda: link.closed)
    with pytest.raises(WorkerLostError, match=r"worker 'b' is lost \(the test broke it\)"):
        rpc.rpc_sync("b", operator.add, (1, 2))
    breaks()


def test_a_killed_worker_fails_what_waits_for_it_at_once(trio: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("b", Value)
    rref.to_here()
    calls = [
        in_thread(lambda: trio["a"].rpc_sync("b", pass_through, (gate,))),
        rpc.rpc_async("b", pass_through, (gate,)).wait,
        in_thread(lambda: trio["c"].rpc_sync("b", pass_through, (gate,))),
        rpc.remote("b", pass_through, (gate,)).to_here,
    ]
    assert eventually(lambda: trio["b"].agent.plane.unfinished >= 4)
    kill = in_thread(lambda: trio.kill("b"))
    for call in calls:
        with pytest.raises(WorkerLostError, match="worker 'b' is lost"):
            call()
    gate.open()
    kill()
    for use in (
        lambda: rpc.rpc_sync("b", operator.add, (1, 2)),
        lambda: rpc.rpc_async("b", operator.add, (1, 2)).wait(),
        lambda: rpc.remote("b", Value),
        rref.to_here,
        lambda rref=rref: rpc.rpc_sync("c", touch, (rref,)),
    ):
        with pytest.raises(WorkerLostError, match="'b'"):
            use()
    assert rpc.rpc_sync("c", operator.add, (1, 2)) == 3
    del rref, use, calls, call
    assert_no_references(trio)


def test_a_nested_call_to_a_lost_worker_comes_back_as_the_same_error(trio: Cluster) -> None:
    trio.kill("b")
    with pytest.raises(WorkerLostError, match="'b'"):
        rpc.rpc_sync("c", rpc.rpc_sync, ("b", operator.add, (1, 2)))
    with pytest.raises(RpcTimeoutError, match=r"0\.05 s"):
        rpc.rpc_sync("c", nested_timeout)


def nested_timeout() -> None:
    gate = Gate()
    try:
        rpc.rpc_sync("a", pass_through, (gate,), timeout=0.05)
    finally:
        gate.open()


@pytest.mark.parametrize("message", INTERNAL, ids=lambda message: message.__name__)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_dies_in_the_middle_of_the_protocol(trio: Cluster, message: type, victim: str) -> None:
    """Its messages never leave, or never come, and it dies; the others are left with nothing."""
    trio.fault("stall", message)
    rref = rpc.remote("b", Value)
    keeping = rpc.rpc_async("c", keep, (rref,))
    with contextlib.suppress(RpcTimeoutError):
        rref.to_here(timeout=0.1)  # some stalls hold up answers too
    del rref
    if message is not ForkRequest and victim == "c":
        _kept.clear()
    trio.kill(victim)
    trio.faults.clear()
    with contextlib.suppress(WorkerLostError):
        keeping.wait()
    _kept.clear()
    assert_no_references(trio)
    if victim == "c":
        assert not _alive


def test_the_creator_dies_and_a_third_worker_keeps_the_value(trio: Cluster) -> None:
    with trio.on("c"):
        rref = rpc.remote("b", Value)
        rref.to_here()
        rpc.rpc_sync("a", keep, (rref,))
    assert eventually(_kept[0].confirmed_by_owner)
    trio.kill("c")
    del rref
    assert touch(_kept[0]) == "touched"
    _kept.clear()
    assert_no_references(trio)
    assert not _alive


# --- threads ----------------------------------------------------------------------------------------------------


class LateLook(dict[int, Any]):
    """The pending calls of a link.  Between the look at them and what follows from it, another thread makes a call."""

    def __init__(self, calls: dict[int, Any], make_call: Callable[[], None]) -> None:
        super().__init__(calls)
        self.make_call: Callable[[], None] | None = make_call

    def __len__(self) -> int:
        count = super().__len__()
        if not count and self.make_call is not None:
            make_call, self.make_call = self.make_call, None
            make_call()
        return count


def test_a_call_that_is_made_while_a_thread_stops_reading_is_answered(trio: Cluster) -> None:
    rpc.rpc_sync("b", operator.add, (1, 2))
    link = trio["a"].agent.peer("b").link
    assert link is not None
    made: list[Any] = []

    def make_call() -> None:
        thread = threading.Thread(target=lambda: made.append(trio["a"].rpc_async("b", operator.add, (3, 4), timeout=0)))
        thread.start()
        thread.join(0.2)  # or it waits for this thread

    link.pending = LateLook(link.pending, make_call)
    rpc.rpc_sync("b", operator.add, (1, 2))
    assert eventually(lambda: made and made[0].done(), AT_ONCE), "nobody reads the answer"
    assert made[0].value() == 7
