"""Interruptions and bad luck: what a Ctrl-C, a SystemExit or a system without threads must not break."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from support import PATIENCE, assert_no_references, eventually
from telegrad._wire.messages import Failure
from telegrad._worker import Worker
from telegrad.errors import SerializationError
from telegrad.optim.fanout import ask_all
from telegrad.rpc.options import RpcBackendOptions
from telegrad.testing import Cluster, cluster


def answer(number: int) -> int:
    return number


def make_reference(worker: str) -> Any:
    from telegrad import rpc

    return rpc.RRef(worker)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, worker: Worker, after_the_answer: bool) -> None:
    """The next wait for an answer is interrupted, before the answer came or after it."""
    plane = worker.agent.plane
    wait = plane.wait

    def interrupted(pending: Any) -> bool:
        monkeypatch.setattr(plane, "wait", wait)
        if after_the_answer:
            assert wait(pending)
        raise KeyboardInterrupt

    monkeypatch.setattr(plane, "wait", interrupted)


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_a_future_completes_although_a_wait_for_it_was_interrupted(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, after_the_answer: bool
) -> None:
    future = pair["a"].rpc_async("b", answer, (3,))
    interrupt_once(monkeypatch, pair["a"], after_the_answer)
    if not future.done():
        with pytest.raises(KeyboardInterrupt):
            future.wait()
    assert eventually(future.done)
    assert future.wait() == 3


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_the_answer_of_an_interrupted_call_is_let_go(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, after_the_answer: bool
) -> None:
    interrupt_once(monkeypatch, pair["a"], after_the_answer)
    with pytest.raises(KeyboardInterrupt):
        pair["a"].rpc_sync("b", make_reference, ("b",))
    assert len(pair["a"].agent.calls) == 0
    assert_no_references(pair)


@pytest.mark.parametrize("moment", ["before it is sent", "after it was sent"])
def test_a_call_that_was_interrupted_while_it_was_sent_is_forgotten(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Else a shutdown would wait for its deadline, or for ever where it has none."""
    agent = pair["a"].agent
    reference = pair["a"].remote("b", answer, (1,))
    assert reference.to_here() == 1
    link = agent.peer("b").link
    assert link is not None
    send = link.send

    def interrupted(*args: Any) -> None:
        if moment == "after it was sent":
            send(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(link, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair["a"].rpc_sync("b", answer, (reference,), timeout=0)
    assert len(agent.calls) == 0
    assert not link.kept
    assert pair["a"].rpc_sync("b", answer, (2,)) == 2
    del reference
    assert_no_references(pair)


def test_a_signal_handler_may_call_the_worker_that_its_thread_dials(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a ``__del__`` that the garbage collector runs then."""
    agent = pair["a"].agent
    dial = agent._dial
    within: list[int] = []

    def interrupted(*args: Any) -> Any:
        if not within:
            within.append(0)
            within.append(pair["a"].rpc_sync("b", answer, (4,)))
        return dial(*args)

    monkeypatch.setattr(agent, "_dial", interrupted)
    assert pair["a"].rpc_sync("b", answer, (5,)) == 5
    assert within == [0, 4]
    peer = agent.peer("b")
    assert len(peer.links) == len(pair["b"].agent.peer("a").links) == 2  # to close one would look like our end
    (spare,) = peer.spare
    peer.forget(spare)
    assert peer.links == [peer.link]
    peer.spare.add(spare)  # so that the shutdown closes it


class Leaver:
    """A value whose own code ends the program."""

    def __reduce__(self) -> Any:
        sys.exit(3)


class Bomb:
    """A value that ends the program of whoever rebuilds it."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def give(kind: type) -> Any:
    return kind()


@pytest.mark.parametrize("kind", [Leaver, Bomb])
def test_a_value_that_exits_is_an_error_and_costs_no_thread(pair: Cluster, kind: type) -> None:
    for _ in range(3):
        with pytest.raises(SerializationError):
            pair["a"].rpc_sync("b", give, (kind,))
        with pytest.raises(SerializationError):
            pair["a"].rpc_async("b", give, (kind,)).wait()
    assert pair["a"].rpc_sync("b", answer, (5,)) == 5
    assert eventually(lambda: all(worker.agent.plane.unfinished == 0 for worker in pair))


def test_two_devices_cannot_go_to_one() -> None:
    options = RpcBackendOptions()
    options.set_device_map("b", {"cuda:0": "cuda:1"})
    with pytest.raises(ValueError, match="two devices are mapped to cuda:1"):
        options.set_device_map("b", {"cuda:1": "cuda:1"})


def test_an_exception_keeps_the_segment_of_its_tensor_until_it_is_given_back(pair: Cluster) -> None:
    """On a link with shared memory; in a cluster there is none, so what the caller would see is not looked at.

    The answer waits on its way, so that the segment is not given back before the test looks at it.
    """
    worker: Worker = pair["b"]
    assert pair["a"].rpc_sync("b", answer, (1,)) == 1
    (link,) = [link for link in worker.agent.peer("a").links if not link.dialled]
    error = ValueError("see", torch.full((1 << 17,), 7.0))
    fault = pair.fault("stall", Failure)
    link.shares_memory = True
    try:
        worker.agent.answer_failure(link, 99, error)
        (segment,) = link.held.values()
        assert bytes(segment.memory)[: 1 << 19] == torch.full((1 << 17,), 7.0).numpy().tobytes()
        assert fault.hits == 1
        pair.faults.clear()  # it reaches a caller that does not wait for it any more
        assert eventually(lambda: not link.held)
        assert repr(worker.agent.marshal.segments) == f"<SegmentPool 1 segments, {segment.size:,} bytes idle>"
    finally:
        link.shares_memory = False
        link.held.clear()


# --- asking several workers at once --------------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent_leaves_no_answer_behind() -> None:
    """The calls that went out before it are answered with references."""
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        with workers.on("a"), pytest.raises(SerializationError):
            ask_all(make_reference, {"b": ("b",), "c": (threading.Lock(),)})
        assert_no_references(workers)


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_asking_all_may_be_interrupted(monkeypatch: pytest.MonkeyPatch, after_the_answer: bool) -> None:
    with cluster("a", "b", "c", timeout=PATIENCE) as workers:
        interrupt_once(monkeypatch, workers["a"], after_the_answer)
        with workers.on("a"), pytest.raises(KeyboardInterrupt):
            ask_all(make_reference, {"b": ("b",), "c": ("c",)})
        assert_no_references(workers)


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_a_call_may_be_given_up_twice(pair: Cluster, after_the_answer: bool) -> None:
    agent = pair["a"].agent
    call = pair["a"].start_call("b", make_reference, ("b",))
    if after_the_answer:
        assert agent.plane.wait(call)
    agent.give_up(call)
    agent.give_up(call)
    assert len(agent.calls) == 0
    assert_no_references(pair)
