"""A worker of the job that sends what it must not.

Every message here is well formed and comes over an authenticated link, but speaks of something that is not the
sender's.  It must have no effect on the others, and leave one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support import PATIENCE, Gate, assert_no_references, eventually, in_thread, pass_through
from telegrad import autograd, rpc
from telegrad._agent.futures import Future
from telegrad._ids import GlobalId, PassId
from telegrad._wire.messages import (
    Barrier,
    Body,
    Call,
    ChildConfirmed,
    DropContext,
    EndPass,
    Explored,
    Finished,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    Gradients,
    InSegment,
    InternalMessage,
    Message,
    Node,
    PassFailed,
    PassHead,
    PlanKnown,
    PlanWanted,
    RemoteCall,
    Reply,
    RRefFork,
    TensorMeta,
    UserDelete,
)
from telegrad._wire.tree import TreeWriter
from telegrad.autograd.context import Send
from telegrad.errors import TelegradError, WorkerLostError
from telegrad.testing import Cluster, cluster

ran: list[str] = []


def run_me(who: str) -> str:
    ran.append(who)
    return who


def scale(tensor: Tensor) -> Tensor:
    return WEIGHT * tensor


WEIGHT = torch.tensor([2.0, 5.0], requires_grad=True)


@pytest.fixture
def job() -> Iterator[Cluster]:
    """Two honest workers, a and b, and m, which is not; the test acts for a."""
    ran.clear()
    with cluster("a", "b", "m", timeout=PATIENCE, graceful=False) as workers, workers.on("a"):
        yield workers


def as_member(workers: Cluster, message: Message, to: str = "a") -> None:
    """m sends a message on the link that it dialled, where requests belong."""
    member = workers["m"].agent
    member.link_to(member.peer(to)).send(message)


def is_refused(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return eventually(lambda: sum(text in record.getMessage() for record in caplog.records) == 1)


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_dialled_cannot_make_the_dialler_run_anything(
    job: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    assert rpc.rpc_sync("m", run_me, ("m",)) == "m"
    (link,) = job["m"].agent.peer("a").accepted
    link.send(Call(1, "test_hostile_member:run_me", Body(tree=None)))
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("m", abs, (1,))
    assert eventually(lambda: "lost" in repr(job["a"].agent.peer("m")))
    assert is_refused(caplog, "it sent a Call on a connection that this worker made")
    assert ran == ["m"]
    assert rpc.rpc_sync("b", run_me, ("b",)) == "b"


@pytest.mark.parametrize(
    "message", [DropContext(1), Barrier(1, 0, False), RemoteCall(1, "f", GlobalId(2, 1), GlobalId(2, 1))]
)
def test_nor_may_it_send_any_other_request(job: Cluster, message: Message) -> None:
    rpc.rpc_sync("m", run_me, ("m",))
    (link,) = job["m"].agent.peer("a").accepted
    link.send(message)
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("m", abs, (1,))
    assert eventually(lambda: "lost" in repr(job["a"].agent.peer("m")))


def test_a_worker_cannot_answer_the_call_of_another(job: Cluster) -> None:
    gate = Gate()
    future = rpc.rpc_async("b", pass_through, (gate, "from b"))
    gate.wait_entered()
    other = Gate()
    own = rpc.rpc_async("m", pass_through, (other,))  # so that m has a link on which answers go
    other.wait_entered()
    (link,) = job["m"].agent.peer("a").accepted
    (call_id,) = [call.call_id for call in job["a"].agent.plane.pending if call.link.peer_id == job["b"].id]
    link.send(Reply(call_id, Body(tree="from m")))
    other.open()
    own.wait()  # its answer was sent after the forged one
    assert not future.done()
    gate.open()
    assert future.wait() == "from b"


def test_a_worker_cannot_name_shared_memory_unless_the_kernel_vouches_for_its_process(job: Cluster) -> None:
    """The links of this cluster are such as TCP: the kernel does not say which process is at the other end."""
    body = Body(
        tree=TreeWriter().write((torch.zeros(1), None)),
        buffers=(InSegment(1, 0, 1 << 20),),
        tensors=(TensorMeta(0, (1 << 18,), 0),),
    )
    failures: list[Any] = []
    agent = job["m"].agent
    call = agent.start_call(agent.peer("a"), "attack", 10.0, lambda i, _: Call(i, "test_hostile_member:run_me", body))
    try:
        agent.wait(call)
    except TelegradError as error:
        failures.append(error)
    assert "names shared memory, but is not on this host" in str(failures[0])
    assert ran == []


# --- references -------------------------------------------------------------------------------------------------------


class Thing:
    def __init__(self) -> None:
        self.value = 7

    def get(self) -> int:
        return self.value


def ids_of(rref: Any) -> tuple[GlobalId, GlobalId]:
    return rref._rref_id, rref._fork_id


def test_only_the_user_of_a_reference_frees_it(job: Cluster) -> None:
    rref = rpc.remote("b", Thing)
    assert rref.rpc_sync().get() == 7
    rref_id, fork_id = ids_of(rref)
    as_member(job, UserDelete(rref_id, fork_id), to="b")
    as_member(job, ForkRequest(rref_id, fork_id), to="b")  # nor does it become the user by asking for the same fork
    as_member(job, UserDelete(rref_id, fork_id), to="b")
    job["m"].rpc_sync("b", run_me, ("m",))  # they were sent before
    assert eventually(lambda: ran == ["m"])
    assert rref.rpc_sync().get() == 7
    assert job["b"].references.counts()["values"] == 1


def test_only_the_owner_confirms_or_refuses_a_fork(job: Cluster) -> None:
    rref = rpc.remote("b", Thing)
    rref.to_here()
    as_member(job, ForkRefused(rref._fork_id))
    as_member(job, ForkAccepted(rref._fork_id))
    as_member(job, ChildConfirmed(rref._fork_id))
    job["m"].rpc_sync("a", run_me, ("m",))
    assert rref.rpc_sync().get() == 7
    assert not job["a"].references.broken


def test_a_reference_cannot_be_sent_in_the_name_of_another_worker(job: Cluster) -> None:
    mine = rpc.RRef(Thing())
    forged = RRefFork(mine._rref_id, GlobalId(1, 99), job["a"].id, job["b"].id)
    agent = job["m"].agent
    body = Body(tree=TreeWriter().write(("a", None)), rrefs=(forged,))
    call = agent.start_call(agent.peer("a"), "attack", 10.0, lambda i, _: Call(i, "test_hostile_member:run_me", body))
    with pytest.raises(TelegradError, match="in the name of worker 1"):
        agent.wait(call)
    assert job["a"].references.counts()["local_handles"] == 1
    assert ran == []


def test_a_value_cannot_be_made_under_the_id_of_another_worker(job: Cluster) -> None:
    rref_id = GlobalId(job["b"].id, 5)
    as_member(job, RemoteCall(1 << 40, "test_hostile_member:run_me", rref_id, rref_id))
    job["m"].rpc_sync("a", run_me, ("m",))
    assert job["a"].references.counts()["values"] == 0


def test_ids_of_references_cannot_be_guessed(job: Cluster) -> None:
    ids = [rpc.RRef(number)._rref_id for number in range(100)]
    low_bits = {each.local_id & ((1 << 48) - 1) for each in ids}
    assert len(low_bits) == 100
    assert len({bits >> 40 for bits in low_bits}) > 50  # spread over the whole range
    assert "0:0" in repr(ids[0])
    assert str(ids[0].local_id) not in repr(ids[0])


# --- contexts and passes ----------------------------------------------------------------------------------------------


def forged_pass(workers: Cluster, context_id: int, root: str = "m") -> PassHead:
    return PassHead(PassId(workers[root].id, 1, 12345), context_id, False, False, False, 1)


def sends_of(workers: Cluster, name: str, context_id: int) -> dict[int, Send]:
    context = workers[name].autograd.registry.find(context_id)
    assert context is not None
    return context.sends


def test_gradients_count_only_from_the_worker_that_the_tensor_went_to(
    job: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", scale, (x,)).sum()
        (message_id,) = sends_of(job, "a", context_id)
        as_member(job, Gradients(forged_pass(job, context_id), ((message_id, (0,), ()),), True))
        assert is_refused(caplog, "which did not go to it")
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 5.0]


def test_a_member_of_no_context_ends_none(job: Cluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", scale, (x,)).sum()
        as_member(job, DropContext(context_id), to="a")
        as_member(job, DropContext(context_id), to="b")
        job["m"].rpc_sync("a", run_me, ("m",))
        job["m"].rpc_sync("b", run_me, ("m",))
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 5.0]


def test_what_one_worker_says_of_unknown_contexts_does_not_keep_others_from_using_them(job: Cluster) -> None:
    """m says of contexts that they have ended before they have begun."""
    with autograd.context() as first:
        pass
    for number in range(1, 20):
        as_member(job, DropContext(first + number), to="b")
    job["m"].rpc_sync("b", run_me, ("m",))
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        assert context_id in range(first, first + 20)
        autograd.backward(context_id, [rpc.rpc_sync("b", scale, (x,)).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 5.0]


class Held(torch.autograd.Function):
    """Its backward waits at a gate."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gate.pass_through()
        return gradient, None


def held_scale(tensor: Tensor, gate: Gate) -> Tensor:
    return Held.apply(WEIGHT * tensor, gate)  # type: ignore[no-any-return]


FORGERIES: dict[str, Callable[[PassId, int], InternalMessage]] = {
    "a failure": lambda this, context: PassFailed(this, "m", "builtins:ValueError", "forged", ""),
    "an end": lambda this, context: EndPass(this, context, "forged"),
    "an answer": lambda this, context: Finished(this, 1, 0, ()),
    "an exploration": lambda this, context: Explored(this, 1, 0, ()),
    "a wish for the plan": lambda this, context: PlanWanted(this),
    "a plan": lambda this, context: PlanKnown(this),
}


#: What a worker that takes part in a pass, and so knows its token, may say to the root.
OF_PARTICIPANTS = ("a failure", "a wish for the plan")


@pytest.mark.parametrize(
    ("what", "knows_token"),
    [(what, knows) for what in FORGERIES for knows in (False, True) if not (knows and what in OF_PARTICIPANTS)],
)
def test_a_running_pass_is_not_for_others(job: Cluster, what: str, knows_token: bool) -> None:
    """With the token of the pass, which m cannot guess, it still may not end it or answer for others."""
    x = torch.ones(2, requires_grad=True)
    gate = Gate()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", held_scale, (x, gate)).sum()
        run = in_thread(lambda: _backward(job, context_id, loss))
        gate.wait_entered()
        (this,) = job["a"].autograd.passes
        pass_id = this.id if knows_token else PassId(this.id.root, this.id.number, 1)
        for victim in ("a", "b"):
            as_member(job, FORGERIES[what](pass_id, context_id), to=victim)
            job["m"].rpc_sync(victim, run_me, (victim,))
        gate.open()
        run()
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0, 5.0]
    assert eventually(lambda: len(ran) == 2)


def _backward(workers: Cluster, context_id: int, loss: Tensor) -> None:
    with workers.on("a"):
        autograd.backward(context_id, [loss])


def test_context_ids_cannot_be_guessed_without_pickle() -> None:
    with cluster("a", "b", allow_pickle=False) as workers, workers.on("a"):
        ids = []
        for _ in range(20):
            with autograd.context() as context_id:
                ids.append(context_id & ((1 << 48) - 1))
        assert len({number >> 40 for number in ids}) > 5
        assert max(ids) > 1 << 40


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_worker_waits_in_one_round_of_a_barrier(job: Cluster) -> None:
    for number in range(500):
        as_member(job, Barrier(10_000 + number, number, False))
    job["m"].rpc_sync("a", run_me, ("m",))
    assert eventually(lambda: len(job["a"]._leader._rounds) == 1)


def test_a_refused_member_writes_a_bounded_number_of_lines(job: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), autograd.context() as context_id:
        for _ in range(200):
            as_member(job, Gradients(forged_pass(job, context_id), ((77, (0,), ()),), True))
        job["m"].rpc_sync("a", run_me, ("m",))
        assert eventually(lambda: any("only counted" in record.getMessage() for record in caplog.records))
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) < 30


class Slow:
    """Made only when the gate opens."""

    def __init__(self, gate: Gate) -> None:
        gate.pass_through()

    def get(self) -> int:
        return 7


def lend(workers: Cluster, rref_id: GlobalId) -> Future:
    """m calls a method of a reference of a's that it says to have."""
    agent = workers["m"].agent
    fork = RRefFork(rref_id, rref_id, workers["a"].id, workers["m"].id, lent=True)
    tree = Node(1, [Node(6, [0]), "get", Node(1, []), Node(2, []), None])
    body, future = Body(tree=tree, rrefs=(fork,)), Future()
    name = "telegrad._rref.rref:call_method"
    agent.start_call(agent.peer("a"), "attack", 60.0, lambda i, _: Call(i, name, body), None, future)
    return future


def test_calls_on_references_that_never_come_take_no_threads(job: Cluster) -> None:
    job["m"].rpc_sync("a", run_me, ("m",))
    for number in range(500):
        lend(job, GlobalId(job["b"].id, 1000 + number))
    job["m"].rpc_sync("a", run_me, ("m",))
    assert eventually(lambda: job["a"].references.counts()["values"] == 500)
    assert eventually(lambda: job["a"].agent.plane.unfinished == 0)
    assert len(job["a"].agent.plane._threads) < 50
    job.kill("m")
    assert_no_references([job["a"]])  # the calls have failed, since only m told of these references


def test_a_method_of_a_value_that_is_being_made_waits_without_a_thread(job: Cluster) -> None:
    gate = Gate()
    rref = rpc.remote("b", Slow, (gate,))
    gate.wait_entered()
    futures = [rref.rpc_async().get() for _ in range(50)]
    assert eventually(lambda: len(job["b"].references._owned[rref._rref_id]) == 50)
    assert eventually(lambda: job["b"].agent.plane.unfinished == 1)
    gate.open()
    assert [future.wait() for future in futures] == [7] * 50
