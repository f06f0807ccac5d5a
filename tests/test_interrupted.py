"""Interruptions and bad luck: what a Ctrl-C, a SystemExit or a system without threads must not break."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from telegrad._agent.outcomes import Outcomes
from telegrad._agent.plane import Pool

from support import PATIENCE, assert_no_references, eventually
from telegrad._wire.messages import Failure
from telegrad._worker import Worker
from telegrad.errors import SerializationError
from telegrad.optim.fanout import ask_all
from telegrad.rpc.options import RpcBackendOptions
from telegrad.testing import Cluster, cluster


@pytest.fixture
def pair() -> Iterator[Cluster]:
    with cluster("a", "b", timeout=PATIENCE) as workers:
        yield workers


def answer(number: int) -> int:
    return number


def make_reference(worker: str) -> Any:
    from telegrad import rpc

    return rpc.RRef(worker)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, after_the_answer: bool) -> None:
    """The next wait is interrupted, before its answer came or after it."""
    help_read = Outcomes._help

    def interrupted(self: Outcomes, waiting: Any) -> None:
        monkeypatch.setattr(Outcomes, "_help", help_read)
        if after_the_answer:
            assert eventually(waiting.ticket.settled)
        raise KeyboardInterrupt

    monkeypatch.setattr(Outcomes, "_help", interrupted)


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_a_future_completes_although_a_wait_for_it_was_interrupted(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, after_the_answer: bool
) -> None:
    future = pair["a"].rpc_async("b", answer, (3,))
    interrupt_once(monkeypatch, after_the_answer)
    if not future.done():
        with pytest.raises(KeyboardInterrupt):
            future.wait()
    assert eventually(future.done)
    assert future.wait() == 3


@pytest.mark.parametrize("after_the_answer", [False, True])
def test_the_answer_of_an_interrupted_call_is_let_go(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, after_the_answer: bool
) -> None:
    interrupt_once(monkeypatch, after_the_answer)
    with pytest.raises(KeyboardInterrupt):
        pair["a"].rpc_sync("b", make_reference, ("b",))
    assert len(pair["a"].agent.calls) == 0
    assert_no_references(pair)


@pytest.mark.parametrize("moment", ["entered", "before it is sent"])
def test_a_call_that_was_interrupted_before_it_was_sent_is_forgotten(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Else a shutdown would wait for its deadline, or for ever where it has none."""
    agent = pair["a"].agent
    reference = pair["a"].remote("b", answer, (1,))
    assert reference.to_here() == 1
    start = agent.calls.start

    def interrupted(*args: Any) -> Any:
        if moment == "entered":
            start(*args)
        raise KeyboardInterrupt

    owner, name = (agent.calls, "start") if moment == "entered" else (agent._clock, "wake_before")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair["a"].rpc_sync("b", answer, (reference,), timeout=0)
    assert len(agent.calls) == 0
    assert not agent._lent
    assert pair["a"].rpc_sync("b", answer, (2,)) == 2


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
    peer.forget(*peer.spare)
    assert peer.links == [peer.link]


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


def test_a_system_without_threads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("poor", 4)
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("telegrad-poor") and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = [threading.Event() for _ in range(8)]
    for event in done:
        pool.submit((lambda event, _: event.set(), event, None))
        assert event.wait(PATIENCE)
    assert len(refused) == 3
    pool.close(PATIENCE)


def test_the_end_of_a_link_leaves_the_next_one_with_its_number_alone() -> None:
    """A descriptor that was closed may be another connection's by now."""

    class Silent:
        def readable(self) -> tuple[()]:
            return ()

        def linger(self) -> None:
            pass

        def flush(self) -> None:
            pass

    pool = Pool("one", 2)
    fd = os.eventfd(0)
    before, after = Silent(), Silent()
    pool.watch(fd, before)
    pool.forget(fd, before)
    pool.watch(fd, after)
    pool.forget(fd, before)  # the second close of the link before
    assert pool._waking._sources[fd] is after
    pool.forget(fd, after)
    os.close(fd)
    pool.close(PATIENCE)


def test_a_close_waits_once_and_not_once_per_thread(pair: Cluster) -> None:
    gate = threading.Event()
    begun = [threading.Event() for _ in range(4)]
    pool = Pool("busy", 8)
    for event in begun:
        pool.submit((lambda event, _: (event.set(), gate.wait(PATIENCE)), event, None))
        assert event.wait(PATIENCE)
    waited: list[float] = []
    join = threading.Thread.join
    monkey = pytest.MonkeyPatch()
    monkey.setattr(threading.Thread, "join", lambda self, timeout=None: waited.append(timeout) or join(self, timeout))
    pool.close(0.2)
    monkey.undo()
    gate.set()
    assert sum(waited) < 4 * 0.2


def test_two_devices_cannot_go_to_one() -> None:
    options = RpcBackendOptions()
    options.set_device_map("b", {"cuda:0": "cuda:1"})
    with pytest.raises(ValueError, match="two devices are mapped to cuda:1"):
        options.set_device_map("b", {"cuda:1": "cuda:1"})


def test_an_exception_keeps_the_segment_of_its_tensor_until_it_is_given_back(pair: Cluster) -> None:
    """On a link with shared memory; in a cluster there is none, so what the caller would see is not looked at."""
    worker: Worker = pair["b"]
    assert pair["a"].rpc_sync("b", answer, (1,)) == 1
    (link,) = [link for link in worker.agent.peer("a").links if not link.dialled]
    error = ValueError("see", torch.full((1 << 17,), 7.0))
    fault = pair.fault("drop", Failure)
    link.shares_memory = True
    try:
        worker.agent.answer_failure(link, 99, error)
        (segment,) = link.held.values()
        assert bytes(segment.memory)[: 1 << 19] == torch.full((1 << 17,), 7.0).numpy().tobytes()
        assert fault.hits == 1
        pair.faults.clear()
        worker.agent.answer_failure(link, 99, error)  # to a caller that waits for it no more
        assert eventually(lambda: list(link.held) == [segment.number])
        assert repr(worker.agent.marshal.segments) == f"<SegmentPool 2 segments, {segment.size:,} bytes idle>"
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
        interrupt_once(monkeypatch, after_the_answer)
        with workers.on("a"), pytest.raises(KeyboardInterrupt):
            ask_all(make_reference, {"b": ("b",), "c": ("c",)})
        assert_no_references(workers)


def test_a_call_is_given_up_while_its_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster("a", "b", timeout=PATIENCE) as workers:
        agent = workers["a"].agent
        call = workers["a"].start_call("b", make_reference, ("b",))
        finish = agent.calls.finish

        def late(call_id: int) -> Any:
            if threading.current_thread() is threading.main_thread():
                assert eventually(call.ticket.settled)
            return finish(call_id)

        monkeypatch.setattr(agent.calls, "finish", late)
        agent.give_up(call)
        agent.give_up(call)
        assert_no_references(workers)
