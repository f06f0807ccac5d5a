"""How a worker gets its connection to a peer: which failures of a dial are tried again, and which mean the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from support import PATIENCE, eventually, in_thread
from telegrad import rpc
from telegrad._agent import agent as agent_module
from telegrad._agent.agent import Agent
from telegrad._agent.peers import Peer, PeerState
from telegrad._core.interface import Link
from telegrad._wire.messages import DropContext
from telegrad.errors import AuthenticationError, ProtocolError, RpcTimeoutError, WorkerLostError
from telegrad.testing import Cluster, cluster


def answer(value: int) -> int:
    return value


class Dialler:
    """Dials as the worker would, but fails as long as ``failures`` has any; ``gate`` may hold it up."""

    def __init__(self, agent: Agent) -> None:
        self._real = agent._dial
        self.failures: list[Exception] = []
        self.always: Exception | None = None
        self.dials: list[float] = []  # how much time each was given
        self.gate = threading.Event()
        self.gate.set()
        agent._dial = self

    def __call__(self, agent: Agent, peer: Peer, timeout: float) -> Link:
        self.dials.append(timeout)
        assert self.gate.wait(PATIENCE)
        if self.always is not None:
            raise self.always
        if self.failures:
            raise self.failures.pop(0)
        return self._real(agent, peer, timeout)


@pytest.fixture
def job() -> Iterator[Cluster]:
    """The test acts for a, which calls b."""
    with cluster("a", "b", timeout=PATIENCE, graceful=False) as workers, workers.on("a"):
        yield workers


@pytest.fixture
def dialler(job: Cluster) -> Dialler:
    return Dialler(job["a"].agent)


def test_a_dial_that_fails_is_tried_again(dialler: Dialler) -> None:
    dialler.failures = [ConnectionResetError("busy"), RpcTimeoutError("slow"), ConnectionAbortedError("no way")]
    assert rpc.rpc_sync("b", answer, (1,)) == 1
    assert len(dialler.dials) == 4
    assert dialler.dials == sorted(dialler.dials, reverse=True), "each gets the time that is left"
    assert rpc.rpc_sync("b", answer, (2,)) == 2
    assert len(dialler.dials) == 4


@pytest.fixture
def no_shortest_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_SHORTEST_DIAL", 0.0)


@pytest.mark.usefixtures("no_shortest_dial")
@pytest.mark.parametrize("error", [ConnectionResetError("busy"), RpcTimeoutError("slow")])
def test_a_peer_that_is_not_reached_in_time_is_not_lost(job: Cluster, dialler: Dialler, error: Exception) -> None:
    dialler.always = error
    with pytest.raises(RpcTimeoutError, match=rf"worker 'b': no connection within 0\.3 s: {error}"):
        rpc.rpc_sync("b", answer, (1,), timeout=0.3)
    assert 0 < max(dialler.dials) <= 0.3
    assert job["a"].agent.peer("b").state is PeerState.KNOWN
    dialler.always = None
    assert rpc.rpc_sync("b", answer, (2,)) == 2


@pytest.mark.parametrize("error", [ConnectionRefusedError("nothing listens"), FileNotFoundError("no such socket")])
def test_a_host_that_says_that_nothing_listens_there_means_a_loss(
    job: Cluster, dialler: Dialler, error: Exception
) -> None:
    dialler.failures = [error]
    with pytest.raises(WorkerLostError, match=f"'b'.*cannot connect to it: {error}"):
        rpc.rpc_sync("b", answer, (1,))
    assert job["a"].agent.peer("b").state is PeerState.LOST
    with pytest.raises(WorkerLostError):
        rpc.rpc_sync("b", answer, (1,))
    assert len(dialler.dials) == 1


@pytest.mark.parametrize("error", [AuthenticationError("another certificate"), ProtocolError("another version")])
def test_a_peer_that_is_another_is_not_tried_again(job: Cluster, dialler: Dialler, error: Exception) -> None:
    dialler.failures = [error]
    with pytest.raises(type(error), match=str(error)):
        rpc.rpc_sync("b", answer, (1,))
    assert len(dialler.dials) == 1
    assert job["a"].agent.peer("b").state is PeerState.KNOWN


def test_a_peer_that_is_lost_meanwhile_ends_the_dialling(job: Cluster, dialler: Dialler) -> None:
    dialler.always = ConnectionResetError("busy")
    agent = job["a"].agent
    calling = in_thread(lambda: agent.link_to(agent.peer("b")))
    assert eventually(lambda: dialler.dials)
    agent.peer_gone(agent.peer("b"), PeerState.LOST, "its process has ended")
    with pytest.raises(WorkerLostError, match="its process has ended"):
        calling()


@pytest.mark.usefixtures("no_shortest_dial")
def test_a_thread_does_not_wait_for_the_dial_of_another_beyond_its_own_deadline(job: Cluster, dialler: Dialler) -> None:
    agent = job["a"].agent
    dialler.gate.clear()
    patient = in_thread(lambda: agent.link_to(agent.peer("b"), time.monotonic() + PATIENCE))
    assert eventually(lambda: dialler.dials)
    with pytest.raises(RpcTimeoutError, match=r"worker 'b': no connection within 0\.\d s"):
        agent.link_to(agent.peer("b"), time.monotonic() + 0.1)
    dialler.gate.set()
    assert patient() is agent.peer("b").link
    assert len(dialler.dials) == 1


def test_threads_that_call_at_once_share_one_dial(job: Cluster, dialler: Dialler) -> None:
    agent = job["a"].agent
    dialler.gate.clear()
    waiting = [in_thread(lambda: agent.link_to(agent.peer("b"))) for _ in range(8)]
    assert eventually(lambda: dialler.dials)
    dialler.gate.set()
    assert len({join() for join in waiting}) == 1
    assert len(dialler.dials) == 1


def test_one_thread_dials_for_all_messages_that_no_worker_waits_for(job: Cluster, dialler: Dialler) -> None:
    agent = job["a"].agent
    seen: list[int] = []
    job["b"].agent.on_message(DropContext, lambda sender, message, _: seen.append(message.context_id))
    dialler.gate.clear()
    threads = threading.active_count()
    for number in range(50):
        assert agent.send_message(job["b"].id, DropContext(number), dials=False)
    assert eventually(lambda: dialler.dials)
    assert agent.plane.unfinished == 1
    assert threading.active_count() <= threads + 2
    dialler.gate.set()
    assert eventually(lambda: sorted(seen) == list(range(50)))


def test_calls_with_a_timeout_shorter_than_a_dial_reach_their_worker_in_the_end(
    job: Cluster, dialler: Dialler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_SHORTEST_DIAL", PATIENCE)
    dialler.gate.clear()
    agent = job["a"].agent
    link = in_thread(lambda: agent.link_to(agent.peer("b"), time.monotonic() + 0.001))
    assert eventually(lambda: dialler.dials)
    time.sleep(0.01)  # the deadline has passed
    dialler.gate.set()
    assert link() is agent.peer("b").link


@pytest.mark.parametrize("dead", [False, True])
def test_a_connection_that_ends_before_its_first_message_is_a_loss_only_if_the_peer_is_not_there(
    job: Cluster, dead: bool
) -> None:
    """A worker that gives up a call in the handshake, because the other is too busy to answer, closes such a one."""
    agent, other = job["a"].agent, job["b"].agent
    link = other.link_to(other.peer("a"))
    assert eventually(lambda: agent.peer("b").accepted)
    if dead:
        job["b"].closed = True  # nothing listens there
    link.close()
    if dead:
        assert eventually(lambda: agent.peer("b").state is PeerState.LOST)
        job["b"].closed = False
    else:
        assert eventually(lambda: agent.peer("b").link is not None)
        assert agent.peer("b").state is PeerState.KNOWN
        assert rpc.rpc_sync("b", answer, (1,)) == 1
