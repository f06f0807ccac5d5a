"""What mutated frames have found (``tests/live_fuzz``).

What a member of the job sends costs little, is refused without an internal error, and leaves nothing behind.  m is the
member that sends what it must not; a is the worker that it attacks, and b an honest one.
"""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support import PATIENCE, assert_no_references, eventually, in_thread
from telegrad import autograd, rpc
from telegrad._agent import failures
from telegrad._core.python.plane import PythonPlane
from telegrad._ids import GlobalId, PassId
from telegrad._rref import owner_counts
from telegrad._rref.ledger import Free
from telegrad._transport.refusals import LINES, RefusalLog
from telegrad._transport.sockets import SocketStream
from telegrad._wire import codec
from telegrad._wire.frames import FrameReader, prefix
from telegrad._wire.messages import (
    Body,
    Fetch,
    Gradients,
    Message,
    PassHead,
    RemoteCall,
    Reply,
    RRefFork,
    TensorMeta,
)
from telegrad._wire.unpack_tensors import unpack
from telegrad.errors import ProtocolError, SerializationError, TelegradError, WorkerLostError
from telegrad.testing import Cluster, cluster

ECHO = "test_found_by_fuzz:echo"


@rpc.export
def echo(value: Any) -> Any:
    return value


@rpc.export
def value_of(rref: Any) -> Any:
    return rref.local_value()


@pytest.fixture
def job(caplog: pytest.LogCaptureFixture) -> Iterator[Cluster]:
    """Nothing that a member sends may end in an internal error."""
    with cluster("a", "b", "m", timeout=PATIENCE, graceful=False) as workers, workers.on("a"):
        yield workers
        if not workers["m"].closed:
            workers["m"].rpc_sync("a", echo, (1,))  # what it sent was taken
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


class Forged:
    """What m passes for a reference."""

    def __init__(self, fork: RRefFork) -> None:
        self._fork = fork

    def __telegrad_share__(self, to: int, answered: bool) -> RRefFork:
        return self._fork

    def __telegrad_unshare__(self, fork: RRefFork) -> None: ...


def ask(workers: Cluster, make: Any, to: str = "a") -> Any:
    """The answer of a worker to a request that m made itself."""
    agent = workers["m"].agent
    return agent.wait(agent.start_call(agent.peer(to), "attack", PATIENCE, lambda call_id, _: make(call_id)))


def send(workers: Cluster, message: Message, to: str = "a") -> None:
    agent = workers["m"].agent
    agent.link_to(agent.peer(to)).send(message)


def test_a_link_that_was_closed_before_it_starts_is_not_watched() -> None:
    """The peer may hang up at once, and the descriptor's number be another's by then."""
    here, there = socket.socketpair()
    plane = PythonPlane("test", 1, {}, None, bytearray)  # type: ignore[arg-type]
    try:
        link = plane.adopt(SocketStream(here), 1, dialled=False)
        link.close()
        plane.start_reading(link)
        assert not plane._poller.links
    finally:
        there.close()
        plane.close(PATIENCE)


def test_many_announced_buffers_cost_nothing_until_their_bytes_come() -> None:
    made: list[int] = []

    def allocate(size: int) -> bytearray:
        made.append(size)
        return bytearray(size)

    sizes = (30_000,) * 1000
    header = codec.encode(Reply(1, Body(buffers=sizes)))
    reader = FrameReader(codec.decode, codec.stream_sizes, allocate)
    data = prefix(len(header), sum(sizes)) + header + bytes(100)
    reader.space()[: len(data)] = data
    assert reader.advance(len(data)) == []
    assert len(made) == 1


def test_failing_calls_write_a_bounded_number_of_entries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_failed_calls", RefusalLog(failures.log, "failed calls"))
    with cluster("a", "m", allow_pickle=False) as workers:
        for _ in range(5 * LINES):
            with pytest.raises(TelegradError):
                workers["m"].rpc_sync("a", "nothing", ())
    told = [record for record in caplog.records if "a call from another worker failed" in record.getMessage()]
    assert len(told) == LINES
    assert "Traceback" not in told[0].getMessage()  # telegrad itself has refused it
    assert "more failed calls are only counted" in caplog.text


def test_an_error_of_torch_shows_others_no_addresses_of_this_process() -> None:
    body = Body(buffers=(bytearray(8),), tensors=(TensorMeta(0, (0, 1 << 63), 0),))
    with pytest.raises(SerializationError, match="cannot rebuild a tensor") as raised:
        unpack(body.tensors, [bytearray()])
    assert "0x" not in str(raised.value)


# --- references -------------------------------------------------------------------------------------------------------


def test_a_value_under_the_id_of_another_worker_is_refused_and_not_kept(job: Cluster) -> None:
    rref_id = GlobalId(job["b"].id, 5)
    with pytest.raises(ProtocolError, match="with an id of worker 1"):
        ask(job, lambda call_id: RemoteCall(call_id, ECHO, rref_id, rref_id))
    assert job["a"].references.empty


def test_a_reference_of_a_worker_that_does_not_exist_is_refused_and_not_kept(job: Cluster) -> None:
    fork = RRefFork(GlobalId(99, 1), GlobalId(2, 1), 99, job["m"].id)
    with pytest.raises(TelegradError, match="no worker 99"):
        job["m"].rpc_sync("a", echo, (Forged(fork),))
    assert job["a"].references.wait_empty(PATIENCE)


def test_a_fork_that_comes_twice_is_refused(job: Cluster) -> None:
    fork = RRefFork(GlobalId(2, 1), GlobalId(2, 2), job["m"].id, job["m"].id)
    with pytest.raises(TelegradError, match="twice"):
        job["m"].rpc_sync("a", echo, ([Forged(fork), Forged(fork)],))


def test_an_answer_that_is_not_wanted_may_hold_references_that_are_refused(job: Cluster) -> None:
    rpc.rpc_sync("m", echo, (1,))
    (link,) = job["m"].agent.peer("a").accepted
    link.send(Reply(1 << 40, Body(rrefs=(RRefFork(GlobalId(1, 1), GlobalId(1, 2), 0, 1),))))
    assert rpc.rpc_sync("m", echo, (2,)) == 2


def test_values_that_only_a_lost_worker_spoke_of_are_not_expected_any_more(job: Cluster) -> None:
    """m asks for values that b is said to make, and waits for another in a call; b never made any."""
    job["b"].rpc_sync("a", echo, (1,))
    for number in range(10):
        send(job, Fetch(1 << 40 | number, GlobalId(job["b"].id, number)))
    fork = RRefFork(GlobalId(job["b"].id, 77), GlobalId(2, 1), job["a"].id, job["m"].id)
    job["m"].rpc_async("a", value_of, (Forged(fork),))
    references = job["a"].references
    assert eventually(lambda: references.counts()["values"] == 11)
    assert eventually(lambda: job["a"].agent.plane.unfinished)
    job.kill("m")
    assert eventually(
        lambda: not job["a"].agent.plane.unfinished, PATIENCE / 2
    )  # the call itself would wait for PATIENCE
    assert_no_references([job["a"]])


@pytest.mark.parametrize("frees", ["before", "after"])
def test_a_value_comes_after_all_when_the_worker_that_spoke_of_it_first_is_lost(
    job: Cluster, frees: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m names a value of b before b makes it.  A call of a waits for it when m is lost, and drops its handle; the value
    is freed before b makes it, or after."""
    references = job["a"].references
    rref_id = GlobalId(job["b"].id, 77)
    fork = RRefFork(rref_id, GlobalId(2, 1), job["a"].id, job["m"].id)
    waiting = in_thread(lambda: _local_value(job, fork))
    assert eventually(lambda: references.counts()["local_handles"] == 1)
    carry_out, may_free = references._carry_out, threading.Event()

    def carry_out_late(instructions: Any) -> None:
        if any(isinstance(each, Free) for each in instructions):
            assert may_free.wait(PATIENCE)
        carry_out(instructions)

    monkeypatch.setattr(references, "_carry_out", carry_out_late)
    if frees == "before":
        may_free.set()
    job.kill("m")
    with pytest.raises(WorkerLostError, match="has not come"):
        waiting()
    del waiting  # its traceback holds the handle
    assert eventually(lambda: gc.collect() >= 0 and references.counts()["local_handles"] == 0)
    agent = job["b"].agent
    agent.wait(
        agent.start_call(
            agent.peer("a"),
            "remote",
            PATIENCE,
            lambda call_id, body: RemoteCall(call_id, ECHO, rref_id, rref_id, body),
            (5, None),
        )
    )
    may_free.set()
    assert eventually(lambda: not job["a"].agent.plane.unfinished)
    fetched = agent.start_call(agent.peer("a"), "fetch", PATIENCE, lambda call_id, _: Fetch(call_id, rref_id))
    assert agent.wait(fetched) == 5


def _local_value(workers: Cluster, fork: RRefFork) -> Any:
    with workers.on("a") as worker:
        return worker.references._receive(fork, workers["m"].id).local_value()


def test_one_worker_makes_another_expect_a_bounded_number_of_values(
    job: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_counts, "MOST_EXPECTED", 10)
    for number in range(30):
        send(job, Fetch(1 << 40 | number, GlobalId(job["b"].id, number)))
    with pytest.raises(ProtocolError, match="values that have not come"):
        ask(job, lambda call_id: Fetch(call_id, GlobalId(job["b"].id, 99)))
    assert job["a"].references.counts()["values"] == 10
    job.kill("m")
    assert job["a"].references.wait_empty(PATIENCE)


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        [99 << 48 | 5, 0, []],  # no such worker can have made it
        [2 << 48 | 5, [], [0]],
        [2 << 48 | 5, 1.5, [0]],
        [2 << 48 | 5, 1, [7]],
        [2 << 48 | 5, 1],
        "text",
    ],
)
@pytest.mark.parametrize("kind", ["call", "fetch"])
def test_a_malformed_context_is_refused(job: Cluster, extra: Any, kind: str) -> None:
    rref = rpc.RRef(1)
    member = job["m"]
    member.agent.peer("a").route.outgoing = lambda to, tensors: extra
    with pytest.raises(TelegradError):  # noqa: PT012
        if kind == "call":
            member.rpc_sync("a", echo, (torch.ones(2),))
        else:
            member.fetch(job["a"].id, rref._rref_id, PATIENCE, "a reference")
    job.kill("m")
    assert eventually(lambda: len(job["a"].autograd.registry) == 0)


@rpc.export
def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def test_a_pass_whose_root_does_not_exist_is_refused(job: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with job.on("m"), autograd.context() as context_id:
        rpc.rpc_sync("a", double, (torch.ones(2, requires_grad=True),))
        context = job["a"].autograd.registry.find(context_id)
        assert context is not None
        (message_id,) = context.sends
        head = PassHead(PassId(99, 1, 1), context_id, False, False, False, 1)
        send(job, Gradients(head, ((message_id, (0,), ()),), True))
        assert eventually(lambda: "refused a Gradients from worker 'm': no worker 99" in caplog.text)
        assert not list(job["a"].autograd.passes)
