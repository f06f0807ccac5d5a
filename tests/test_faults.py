"""Declared faults: whatever happens to the messages between workers, references are freed once, and nothing hangs."""

from __future__ import annotations

import math
import operator
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from support import PATIENCE, Gate, assert_no_references, eventually, in_thread, no_new_threads, pass_through
from telegrad import rpc
from telegrad._agent import mail
from telegrad._wire.messages import (
    Call,
    ChildConfirmed,
    DropContext,
    Fetch,
    ForkAccepted,
    ForkRequest,
    NoteAck,
    RemoteCall,
    Reply,
    UserDelete,
)
from telegrad.errors import RpcTimeoutError, WorkerLostError
from telegrad.testing import Cluster, cluster

NOTES = [ForkRequest, ForkAccepted, ChildConfirmed, UserDelete, NoteAck]


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    with no_new_threads():
        yield


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with cluster("a", "b", "c", timeout=PATIENCE) as workers, workers.on("a"):
        _alive.clear()  # a worker that an earlier test killed keeps what it had
        yield workers


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
    """Every kind of note: forks of users, of the owner, back to the creator, and drops in any order."""
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


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.__name__)
@pytest.mark.parametrize("kind", ["drop", "repeat", "reorder", "delay"])
def test_references_survive_what_happens_to_a_note(trio: Cluster, kind: Any, note: type) -> None:
    fault = trio.fault(kind, note, count=4, seconds=0.03)
    for _ in range(2):
        pass_references_around()
    assert eventually(lambda: fault.hits > 0)
    if kind == "reorder":  # it may hold one back for which no second ever comes; its sender repeats it
        assert eventually(lambda: fault.hits >= 2)
    assert_no_references(trio)
    assert not _alive


def test_a_repeated_note_is_handled_once(trio: Cluster) -> None:
    handled: list[tuple[int, int, Any]] = []
    for worker in trio:
        for kind, handle in list(worker.agent.mail.handlers.items()):

            def count(sender: int, payload: Any, value: Any, me: int = worker.id, handle: Any = handle) -> None:
                handled.append((sender, me, payload))
                handle(sender, payload, value)

            worker.agent.mail.handlers[kind] = count
    fault = trio.fault("repeat", *NOTES)
    pass_references_around()
    assert_no_references(trio)
    assert fault.hits >= 6
    assert len(handled) >= 6
    assert len(handled) == len(set(handled))


def test_all_notes_suffer_at_once(trio: Cluster) -> None:
    dropped = [trio.fault("drop", note, count=1) for note in NOTES]
    for note in NOTES:
        trio.fault("repeat", note, count=1)
        trio.fault("delay", note, count=2, seconds=0.02)
        trio.fault("reorder", note, count=2)
    for _ in range(3):
        pass_references_around()
    assert_no_references(trio)
    assert [fault.hits for fault in dropped] == [1] * len(NOTES)
    assert not _alive


def test_a_lost_reply_is_a_timeout_and_the_next_call_goes_through(trio: Cluster) -> None:
    fault = trio.fault("drop", Reply, sender="b", receiver="a", count=1)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("b", operator.add, (1, 2), timeout=0.05)
    assert fault.hits == 1
    assert rpc.rpc_sync("b", operator.add, (1, 2)) == 3


def test_a_reply_of_a_creation_that_is_lost(trio: Cluster) -> None:
    fault = trio.fault("drop", Reply, sender="b", receiver="a", count=1)
    rref = rpc.remote("b", Value, timeout=0.05)
    assert eventually(lambda: trio["a"].references.broken)
    assert fault.hits == 1
    assert _alive
    del rref
    assert_no_references(trio)
    assert not _alive


@pytest.mark.parametrize("message", [Call, RemoteCall, Fetch, Reply], ids=lambda message: message.__name__)
def test_late_messages_are_only_late(trio: Cluster, message: type) -> None:
    fault = trio.fault("delay", message, seconds=0.02, count=10)
    pass_references_around()
    assert rpc.remote("b", operator.add, (1, 2)).to_here() == 3
    assert_no_references(trio)
    assert fault.hits > 0


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


@pytest.mark.parametrize(
    "note", [ForkRequest, ForkAccepted, ChildConfirmed, UserDelete], ids=lambda note: note.__name__
)
@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_worker_dies_in_the_middle_of_the_protocol(trio: Cluster, note: type, victim: str) -> None:
    """Its notes never leave, or never come, and it dies; the others are left with nothing."""
    trio.fault("drop", note)
    rref = rpc.remote("b", Value)
    rpc.rpc_sync("c", keep, (rref,))
    del rref
    if note is not ForkRequest and victim == "c":
        _kept.clear()
    trio.kill(victim)
    trio.faults.clear()
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


def test_an_acknowledgement_waits_for_a_note_that_it_can_ride_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_ACK_SECONDS", PATIENCE)
    with cluster("a", "b") as workers:
        acknowledged = workers.fault("repeat", NoteAck)  # to count them
        here, there = workers["a"].agent, workers["b"].agent
        for _ in range(3):
            here.mail.post(there.me.worker_id, DropContext(1))
            assert eventually(lambda: there.mail._inbox.owing())
            there.mail.tick(time.monotonic())  # whatever else the clock ticks for
            there.mail.post(here.me.worker_id, DropContext(1))
            assert eventually(lambda: not here.mail.unacknowledged)
        assert acknowledged.hits == 0


def test_an_acknowledgement_that_nothing_takes_along_goes_alone() -> None:
    with cluster("a", "b") as workers:
        here, there = workers["a"].agent, workers["b"].agent
        for _ in range(3):
            here.mail.post(there.me.worker_id, DropContext(1))
            assert eventually(lambda: not here.mail.unacknowledged)


def test_a_tick_before_its_time_does_not_put_an_acknowledgement_off() -> None:
    with cluster("a", "b") as workers:
        here, there = workers["a"].agent, workers["b"].agent
        here.mail.post(there.me.worker_id, DropContext(1))
        assert eventually(lambda: there.mail.acks_due < math.inf or not here.mail.unacknowledged)
        wanted = there._tick(time.monotonic())
        assert wanted <= there.mail.acks_due
