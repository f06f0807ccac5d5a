"""References: who owns a value, how it travels, and that it is freed when the last handle goes."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support import PATIENCE, Gate, assert_no_references, eventually, in_thread, pass_through
from telegrad import rpc
from telegrad._agent.failures import let_go_of_frames
from telegrad._ids import GlobalId
from telegrad._rref.references import Owned
from telegrad._wire.messages import RemoteCall
from telegrad.errors import NotInitializedError, RpcTimeoutError, SerializationError, UsageError, WorkerLostError
from telegrad.optim import DistributedOptimizer
from telegrad.testing import Cluster, cluster

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture
def trio(trio: Cluster) -> Iterator[Cluster]:
    yield trio
    _kept.clear()


_kept: dict[str, Any] = {}  # what functions of the workers keep between calls
_values: weakref.WeakSet[Thing] = weakref.WeakSet()


class Thing:
    """A value that tells when it is gone."""

    def __init__(self, content: Any = None) -> None:
        self.content = content
        _values.add(self)

    def get(self) -> Any:
        return self.content

    def add(self, number: int, *, twice: bool = False) -> Any:
        return self.content + (2 * number if twice else number)

    def pass_through(self, gate: Gate) -> Any:
        return pass_through(gate, self.content)

    def fail(self) -> None:
        raise ZeroDivisionError("in a method")


def things() -> int:
    gc.collect()
    return len(_values)


@dataclass
class Parcel:
    inside: Any


def fetch(rref: Any) -> Any:
    return rref.to_here()


def keep(key: str, value: Any) -> None:
    _kept[key] = value


def kept(key: str) -> Any:
    return _kept[key]


def release(key: str) -> None:
    del _kept[key]


def is_owner(rref: Any) -> bool:
    return rref.is_owner()


# --- one handle -------------------------------------------------------------------------------------------------


def test_a_reference_to_a_value_of_ones_own(trio: Cluster) -> None:
    value = Thing(5)
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == rpc.get_worker_info()
    assert rref.owner_name() == "a"
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.rpc_sync().add(1) == 6
    assert repr(rref) == "RRef(0:0, owned here)"


def test_a_reference_to_a_value_elsewhere(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing, (5,))
    assert not rref.is_owner()
    assert rref.owner() == rpc.get_worker_info("b")
    assert rref.owner_name() == "b"
    assert rref.to_here().content == 5
    assert eventually(rref.confirmed_by_owner)
    assert repr(rref) == "RRef(0:0, owned by 'b', confirmed)"
    with pytest.raises(UsageError, match=r"lives on worker 'b', not here; call to_here"):
        rref.local_value()


def test_the_value_is_freed_with_the_last_handle(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing)
    assert rref.rpc_sync().get() is None
    assert things() == 1
    del rref
    assert eventually(lambda: things() == 0)


def test_a_call_to_oneself_keeps_the_value_itself(trio: Cluster) -> None:
    rref = rpc.remote("a", threading.Lock)  # which could not be copied
    assert rref.is_owner()
    assert rref.to_here().acquire(blocking=False)
    assert rref.local_value().locked()
    with pytest.raises(ZeroDivisionError):
        rpc.remote("a", operator.truediv, (1, 0)).to_here()
    gate = Gate()
    slow = rpc.remote("a", pass_through, (gate,), timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        slow.to_here()
    gate.open()
    del rref, slow
    dropped_early = rpc.remote("a", Thing)
    del dropped_early
    assert eventually(lambda: things() == 0)


def test_proxies_call_methods_of_the_value(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing, (5,))
    assert rref.rpc_sync().add(1, twice=True) == 7
    assert rref.rpc_async().add(1).wait() == 6
    assert rref.remote().add(2).to_here() == 7
    with pytest.raises(ZeroDivisionError, match=r"(?s)in a method.*worker 'b'"):
        rref.rpc_sync().fail()
    with pytest.raises(ZeroDivisionError):
        rref.rpc_async().fail().wait()
    with pytest.raises(ZeroDivisionError):
        rref.remote().fail().to_here()
    with pytest.raises(AttributeError, match="nothing"):
        rref.rpc_sync().nothing()


def test_proxies_have_timeouts(trio: Cluster) -> None:
    gate, rref = Gate(), rpc.remote("b", Thing, (5,))
    for call in (
        lambda: rref.rpc_sync(timeout=0.05).pass_through(gate),
        lambda: rref.rpc_async(timeout=0.05).pass_through(gate).wait(),
        lambda: rref.remote(timeout=0.05).pass_through(gate).to_here(timeout=0.05),
    ):
        with pytest.raises(RpcTimeoutError, match=r"0\.05 s"):
            call()
    gate.open()


def test_the_error_of_the_creating_call_comes_at_to_here(trio: Cluster) -> None:
    rref = rpc.remote("b", operator.truediv, (1, 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="raised on worker 'b'"):
            rref.to_here()
    with pytest.raises(ZeroDivisionError):
        rref.rpc_sync().anything()
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("c", fetch, (rref,))
    with pytest.raises(ZeroDivisionError):
        rpc.rpc_sync("b", fetch, (rref,))


class Single(Exception):
    """Made once, it cannot be copied."""

    made = False

    def __new__(cls, *args: Any) -> Single:
        if cls.made:
            raise LookupError("there is one already")
        cls.made = True
        return super().__new__(cls, *args)


@pytest.mark.parametrize("kind", [ValueError, Single])
def test_the_error_of_the_creating_call_tells_its_story_once(kind: type[Exception]) -> None:
    error, owned = kind("no value"), Owned()
    let_go_of_frames(error)
    error.add_note("a note of the program")
    owned.set(None, error)
    for _ in range(3):
        with pytest.raises(kind) as caught:
            owned.get()
        note, story = caught.value.__notes__
        assert note == "a note of the program"
        assert "no value" in story


def divide_all(things: list[Any]) -> float:
    return len(things) / 0


def test_a_failed_creation_lets_go_of_its_arguments(trio: Cluster) -> None:
    argument = rpc.remote("b", Thing)
    failed = rpc.remote("b", divide_all, ([argument],))
    with pytest.raises(ZeroDivisionError):
        failed.to_here()
    gc.disable()
    try:
        del argument
        assert eventually(lambda: not len(_values)), "the exception of the call holds its arguments"
    finally:
        gc.enable()


def test_to_here_waits_for_the_creating_call(trio: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("b", pass_through, (gate, "made"))
    gate.wait_entered()
    with pytest.raises(RpcTimeoutError, match=r"to_here of RRef.*worker 'b' got no answer within 0\.05 s"):
        rref.to_here(timeout=0.05)
    assert not rref.confirmed_by_owner()
    join = in_thread(rref.to_here)
    gate.open()
    assert join() == "made"


def test_a_creation_that_times_out(trio: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("b", pass_through, (gate, "late"), timeout=0.05)
    assert eventually(lambda: trio["a"].references.broken)
    with pytest.raises(RpcTimeoutError, match="pass_through on worker 'b'"):
        rref.to_here()
    gate.open()


def test_a_handle_that_is_dropped_while_its_creation_fails_leaves_nothing(trio: Cluster) -> None:
    gate = Gate()
    rpc.remote("b", pass_through, (gate,), timeout=0.1)  # its handle is gone at once
    gate.wait_entered()
    assert eventually(lambda: not len(trio["a"].agent.calls))
    gate.open()


def test_a_fetch_right_behind_a_late_creation(trio: Cluster) -> None:
    delayed = trio.fault("delay", RemoteCall, sender="a", receiver="b", seconds=0.1)
    assert rpc.remote("b", operator.add, (1, 2)).to_here() == 3
    assert delayed.hits == 1


# --- on the way -------------------------------------------------------------------------------------------------


def test_a_reference_goes_to_a_third_worker(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing, (5,))
    assert rpc.rpc_sync("c", fetch, (rref,)).content == 5
    rpc.rpc_sync("c", keep, ("rref", rref))
    del rref
    gc.collect()
    assert eventually(_kept["rref"].confirmed_by_owner)
    assert eventually(lambda: trio["a"].references.ledger.counts()["user_forks"] == 0)
    assert things() == 1
    assert _kept["rref"].rpc_sync().get() == 5
    rpc.rpc_sync("c", release, ("rref",))
    assert eventually(lambda: things() == 0)


def test_a_reference_goes_to_its_owner_and_back_to_its_creator(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing, (5,))
    assert rpc.rpc_sync("b", is_owner, (rref,)) is True
    assert rpc.rpc_sync("c", is_owner, (rref,)) is False
    again = rpc.rpc_sync("c", copy_through, (rref,))
    assert again is not rref
    assert again.owner_name() == "b"
    del rref
    assert again.to_here().content == 5
    home = rpc.rpc_sync("c", copy_through, (rpc.RRef(Thing(7)),))
    assert home.is_owner()
    assert home.local_value().content == 7


def copy_through(value: Any) -> Any:
    return value


def test_references_in_containers_and_dataclasses(trio: Cluster) -> None:
    one, two = rpc.remote("b", Thing, (1,)), rpc.RRef(Thing(2))
    value = {"list": [one, (two,)], "parcel": Parcel([one, torch.ones(2), two])}
    back = rpc.rpc_sync("c", copy_through, (value,))
    found = [back["list"][0], back["list"][1][0], *back["parcel"].inside[::2]]
    assert [rref.rpc_sync().get() for rref in found] == [1, 2, 1, 2]
    assert rpc.rpc_sync("c", lambda: [one.to_here().content, two.to_here().content]) == [1, 2]


def make_here(content: Any) -> Any:
    return rpc.RRef(Thing(content))


def test_a_result_that_is_a_reference(trio: Cluster) -> None:
    rref = rpc.rpc_sync("b", make_here, (5,))
    assert rref.owner_name() == "b"
    assert rref.confirmed_by_owner()  # born so, for the owner gave it away
    assert rref.rpc_sync().get() == 5


def test_the_value_of_a_reference_may_be_a_reference(trio: Cluster) -> None:
    outer = rpc.remote("b", make_here, (5,))
    inner = outer.to_here()
    assert inner.owner_name() == "b"
    assert inner.rpc_sync().get() == 5
    far = rpc.remote("b", rpc.remote, ("c", Thing, (6,)))
    assert far.to_here().to_here().content == 6
    mixed = rpc.remote("c", Thing, ([outer, far],))
    del inner, outer, far
    assert mixed.to_here().content[1].to_here().owner_name() == "c"
    assert things() >= 3


def raise_with(value: Any) -> None:
    raise ValueError("with a reference", value)


def test_references_in_failing_calls(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing)
    for to in ("b", "c"):
        with pytest.raises(ValueError, match="with a reference"):
            rpc.rpc_sync(to, raise_with, ([rref],))
        with pytest.raises(ValueError, match="with a reference"):
            rpc.rpc_async(to, raise_with, (Parcel(rref),)).wait()
        with pytest.raises(ValueError, match="with a reference"):
            rpc.remote(to, raise_with, (rref,)).to_here()


def test_a_drop_and_a_share_while_unconfirmed(trio: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("b", pass_through, (gate, Thing(3)))
    rpc.rpc_sync("c", keep, ("rref", rref))
    gate.wait_entered()
    assert not rref.confirmed_by_owner()
    del rref
    gc.collect()
    gate.open()
    assert _kept["rref"].to_here().content == 3
    rpc.rpc_sync("c", release, ("rref",))
    rpc.remote("b", Thing)  # dropped at once
    assert eventually(lambda: things() == 0)


def test_a_share_that_fails_half_way_shares_nothing(trio: Cluster) -> None:
    good, broken = rpc.remote("b", Thing), rpc.remote("b", pass_through, (Gate(),), timeout=0.02)
    mine = rpc.RRef(1)
    assert eventually(lambda: trio["a"].references.broken)
    for rrefs in ([good, mine, broken], [Parcel(good), mine, broken]):
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("c", copy_through, (rrefs,))
    assert eventually(lambda: trio["a"].references.ledger.counts()["pending_children"] == 0)
    assert trio["a"].references.ledger.counts()["forks_counted"] == 0
    for gate in Gate._all.values():
        gate.open()


def test_a_handle_cannot_be_pickled_outside_of_a_call(trio: Cluster) -> None:
    rref = rpc.RRef(1)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SerializationError, match="is sent inside a call"):
            copied(rref)


def test_many_threads_pass_references_around(trio: Cluster) -> None:
    def work(number: int) -> int:
        with trio.on("abc"[number % 3]):
            total = 0
            for step in range(10):
                rref = rpc.remote("abc"[(number + 1) % 3], Thing, (step,))
                total += rpc.rpc_sync("abc"[(number + 2) % 3], fetch, (rref,)).content
                total += rref.rpc_sync().get()
            return total

    joins = [in_thread(lambda number=number: work(number)) for number in range(6)]
    assert [join() for join in joins] == [2 * 45] * 6
    gc.collect()
    assert eventually(lambda: things() == 0)


# --- losses -----------------------------------------------------------------------------------------------------


def test_to_here_on_a_lost_owner(trio: Cluster) -> None:
    rref, other = rpc.remote("b", Thing), rpc.remote("c", Thing)
    rref.to_here()
    trio.kill("b")
    with pytest.raises(WorkerLostError, match="'b'"):
        rref.to_here()
    assert eventually(lambda: trio["a"].references.broken)
    with pytest.raises(WorkerLostError, match="its owner, worker 'b', is lost"):
        rref.to_here()
    with pytest.raises(WorkerLostError, match="'b'"):
        rref.rpc_sync().get()
    with pytest.raises(WorkerLostError, match="'b'"):
        rpc.rpc_sync("c", fetch, ([other, rref],))
    with pytest.raises(WorkerLostError, match="'b'"):
        rpc.remote("b", Thing)


def test_the_owner_frees_what_a_lost_worker_held(trio: Cluster) -> None:
    rref = rpc.remote("b", Thing)
    rpc.rpc_sync("c", keep, ("rref", rref))
    assert eventually(_kept["rref"].confirmed_by_owner)
    del rref
    gc.collect()
    assert things() == 1
    trio.kill("c")
    assert eventually(lambda: things() == 0)


def test_a_fetch_from_a_worker_that_dies(trio: Cluster) -> None:
    """The owner gives its answer, with a reference in it, to nobody."""
    gate = Gate()
    with trio.on("c"):
        rref = rpc.remote("b", make_slowly, (gate,))
        join = in_thread(rref.to_here)
    gate.wait_entered()
    trio.kill("c")
    with pytest.raises(WorkerLostError):
        join()
    gate.open()


def make_slowly(gate: Gate) -> Any:
    return pass_through(gate, rpc.RRef(Thing()))


def test_the_creator_dies_before_its_call_comes(trio: Cluster) -> None:
    """Another worker knows the reference already, and asks for a value that will never be."""
    trio.fault("stall", RemoteCall, sender="c", receiver="b")
    with trio.on("c"):
        rref = rpc.remote("b", Thing)
        rpc.rpc_sync("a", keep, ("rref", rref))
    mine = _kept.pop("rref")
    join = in_thread(mine.to_here)
    assert eventually(lambda: len(trio["b"].references._owned) == 1)
    trio.kill("c")
    with pytest.raises(WorkerLostError):
        join()
    with pytest.raises(WorkerLostError):
        mine.to_here()


@pytest.mark.parametrize("leaves", [False, True], ids=["dies", "leaves"])
def test_the_creator_goes_while_its_call_runs(trio: Cluster, leaves: bool) -> None:
    """The owner makes the value nevertheless, for another worker has a reference to it."""
    gate = Gate()
    with trio.on("c"):
        rref = rpc.remote("b", pass_through, (gate, "made"))
        rpc.rpc_sync("a", keep, ("rref", rref))
    gate.wait_entered()
    mine = _kept.pop("rref")
    assert eventually(mine.confirmed_by_owner)
    trio["c"].shutdown(graceful=False) if leaves else trio.kill("c")
    assert eventually(lambda: 2 in trio["b"].references._lost)
    with pytest.raises(RpcTimeoutError):
        mine.to_here(timeout=0.1)
    gate.open()
    assert mine.to_here() == "made"


def test_the_creator_dies_while_its_call_waits_for_a_thread() -> None:
    gate = Gate()
    with cluster("a", "b", "c", timeout=PATIENCE, threads=1) as workers, workers.on("a"):
        first = rpc.rpc_async("b", pass_through, (gate,))
        gate.wait_entered()
        with workers.on("c"):
            rref = rpc.remote("b", Thing, (5,))
            rpc.rpc_sync("a", keep, ("rref", rref))
        mine = _kept.pop("rref")
        assert eventually(mine.confirmed_by_owner)
        join = in_thread(mine.to_here)
        assert eventually(lambda: len(workers["b"].references._owned) == 1)
        workers.kill("c")
        assert eventually(lambda: 2 in workers["b"].references._lost)
        gate.open()
        first.wait()
        assert join().content == 5
        del mine


# --- after the end ----------------------------------------------------------------------------------------------------


def test_a_handle_of_a_job_that_has_ended() -> None:
    """The next job has other values with the same numbers."""
    with cluster("a", "b", timeout=PATIENCE) as before, before.on("a"):
        old, mine = rpc.remote("b", torch.ones, (2,)), rpc.RRef("my own")
        optimizer = DistributedOptimizer(torch.optim.SGD, [old], lr=0.1)
    with cluster("a", "b", timeout=PATIENCE) as workers, workers.on("a"):
        new = [rpc.remote("b", Thing, ("new",)), rpc.RRef("new"), rpc.rpc_sync("b", make_here, ("new",))]
        assert old._rref_id.number in [each._rref_id.number for each in new]
        for use in (
            old.to_here,
            lambda: rpc.rpc_sync("b", fetch, (old,)),
            lambda: rpc.rpc_sync("b", fetch, (mine,)),
            lambda: rpc.rpc_async("b", copy_through, (Parcel([new, old]),)),
            lambda: rpc.remote("a", copy_through, ([old],)),
            lambda: old.rpc_sync().get(),
            lambda: old.rpc_async().get(),
            lambda: old.remote().get(),
            lambda: mine.rpc_sync().upper(),
            old.backward,
            lambda: DistributedOptimizer(torch.optim.SGD, [old], lr=0.1),
            lambda: optimizer.state_dict(),
        ):
            with pytest.raises(NotInitializedError, match="belongs to a job that has ended: worker 'a' has shut down"):
                use()
        assert mine.local_value() == "my own"
        new.clear()
        assert_no_references(workers)


@rpc.export
class SegmentPool:
    """What a worker without pickle offers to others."""

    def __init__(self) -> None:
        self._books = ["one"]

    def count(self) -> int:
        return len(self._books)

    def _empty(self) -> None:
        self._books.clear()


def test_without_pickle_only_exported_classes_offer_their_methods(tmp_path: Path) -> None:
    with cluster("a", "b", allow_pickle=False) as workers:
        shelf = workers["a"].remote("b", SegmentPool)
        assert shelf.rpc_sync().count() == 1
        with pytest.raises(SerializationError, match=r"SegmentPool\._empty is not exported here"):
            shelf.rpc_sync()._empty()
        ones = workers["a"].remote("b", torch.ones, (3,))
        assert ones.rpc_sync().sum() == 3
        target = tmp_path / "written"
        with pytest.raises(SerializationError, match="no 'numpy'"):
            ones.remote().numpy().rpc_sync().tofile(str(target))
        with pytest.raises(SerializationError, match="no 'apply_'"):
            ones.rpc_sync().apply_(1)
        assert not target.exists()
        del shelf, ones


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_a_reference_cannot_be_guessed(allow_pickle: bool) -> None:
    with cluster("a", "b", allow_pickle=allow_pickle) as workers, workers.on("b"):
        secrets = [rpc.RRef(torch.ones(2)) for _ in range(3)]
        assert [repr(secret._rref_id) for secret in secrets] == ["1:0", "1:1", "1:2"]
        chance = [secret._rref_id.local_id % (1 << 48) for secret in secrets]
        assert max(chance) > 1 << 40
        for guess in (0, 1, 1 << 48, secrets[0]._rref_id.local_id + 1):
            with pytest.raises(WorkerLostError, match="is gone"):
                workers["a"].fetch(1, GlobalId(1, guess), 1.0, "a guess")
        assert workers["a"].fetch(1, secrets[0]._rref_id, 1.0, "known").tolist() == [1, 1]
        del secrets


@rpc.export
def refuse_with_a_secret_line() -> None:
    raise ValueError("no")


def test_without_pickle_an_error_shows_no_line_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    with cluster("a", "b", allow_pickle=False) as workers:
        with pytest.raises(ValueError, match="no") as caught:
            workers["a"].rpc_sync("b", refuse_with_a_secret_line)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "worker 'b'" in text
    assert "test_rref" not in text
    assert "raise ValueError" not in text
    assert 'raise ValueError("no")' in caplog.text  # where it was raised


@rpc.export
def value_of(reference: rpc.RRef[Any]) -> Any:
    return reference.local_value()


def test_without_pickle_a_value_that_was_not_made_shows_no_line_of_the_program() -> None:
    with cluster("a", "b", allow_pickle=False) as workers, workers.on("a"):
        broken = rpc.remote("b", refuse_with_a_secret_line)
        for ask in (rpc.RRef.to_here, lambda reference: rpc.rpc_sync("b", value_of, (reference,))):
            with pytest.raises(ValueError, match="no") as caught:
                ask(broken)
            assert "test_rref" not in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
        del broken


# --- lent to the owner ------------------------------------------------------------------------------------------------


def lent(trio: Cluster) -> list[Any]:
    """What worker a keeps until calls are answered."""
    return [kept for peer in trio["a"].agent.peers for link in peer.links for kept in link.kept.values()]


def content_of(gate: Gate, rref: rpc.RRef[Thing]) -> Any:
    gate.pass_through()
    return rref.local_value().content


def test_a_call_that_takes_a_reference_to_its_owner_sends_nothing_else(
    trio: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rref = rpc.remote("b", Thing, (5,))
    assert eventually(rref.confirmed_by_owner)
    sent: list[Any] = []
    for worker in trio:
        monkeypatch.setattr(worker.agent, "send_message", lambda to, message, **_: sent.append(message))
    assert rref.rpc_sync().get() == 5
    assert rpc.rpc_async("b", operator.call, (rpc.RRef.is_owner, rref)).wait() is True
    monkeypatch.undo()
    assert sent == []
    assert things() == 1


@pytest.mark.parametrize("timeout", [PATIENCE, 0.05], ids=["answered", "answered too late"])
def test_a_handle_that_a_call_took_to_the_owner_lives_until_the_answer(trio: Cluster, timeout: float) -> None:
    gate, rref = Gate(), rpc.remote("b", Thing, (5,))
    assert eventually(rref.confirmed_by_owner)
    # The arguments are looked at when the function runs: keep it from running.
    blocked = [rpc.rpc_async("b", pass_through, (other,)) for other in (Gate(), gate)]
    future = rpc.rpc_async("b", content_of, (gate, rref), timeout=timeout)
    del rref
    if timeout < 1:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    assert things() == 1
    assert len(lent(trio)) == 1
    for other in Gate._all.values():
        other.open()
    torch.futures.wait_all(blocked)
    if timeout > 1:
        assert future.wait() == 5
    assert eventually(lambda: not lent(trio))
    del future, blocked
    assert eventually(lambda: things() == 0)


def test_what_was_lent_to_a_worker_that_is_lost_is_let_go(trio: Cluster) -> None:
    gate, rref = Gate(), rpc.remote("b", Thing, (5,))
    assert eventually(rref.confirmed_by_owner)
    future = rpc.rpc_async("b", content_of, (gate, rref))
    gate.wait_entered()
    trio.kill("b")
    with pytest.raises(WorkerLostError):
        future.wait()
    assert not lent(trio)
    gate.open()
