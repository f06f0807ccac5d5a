"""The barrier of a graceful shutdown: nobody leaves while another still has work.

The leader is the worker with the lowest id that is alive.  Each worker that has nothing left to do tells the leader,
and whether it began anything since the last round; when all have, the leader answers whether to go round again.  A
round in which nobody began anything is the last: then nothing is under way that could begin something.  If the leader
dies, the workers turn to the next one; workers that are lost, or have left, are not waited for.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from telegrad._agent.agent import Agent
from telegrad._agent.peers import Peer, PeerState
from telegrad._core.interface import Link
from telegrad._wire.frames import Frame
from telegrad._wire.messages import Barrier
from telegrad.errors import WorkerLostError

NOTICE_SECONDS = 10.0  # so often a shutdown says what it waits for


@dataclass(slots=True)
class _Round:
    present: dict[int, Callable[[bool], None]] = field(default_factory=dict)  # how to answer each worker
    active: bool = False


class BarrierLeader:
    """Every worker has one, in case it leads."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rounds: dict[int, _Round] = {}
        agent.on_request(Barrier, self._arrive)
        agent.lost_handlers.append(lambda _: self._look())

    def _arrive(self, link: Link, frame: Frame) -> None:
        message = frame.message
        assert isinstance(message, Barrier)
        with self._lock:
            self._leave_other_rounds(link.peer_id, message.round)
            current = self._rounds.setdefault(message.round, _Round())
            current.present[link.peer_id] = lambda again: self._agent.answer(link, message.call_id, again)
            current.active |= message.active
        self._look()

    def _leave_other_rounds(self, worker: int, number: int) -> None:
        """A worker waits in one round at a time, so there are at most as many rounds as workers."""
        for other, current in list(self._rounds.items()):
            if other != number and current.present.pop(worker, None) is not None and not current.present:
                del self._rounds[other]

    def _look(self) -> None:
        """Answers the rounds in which all are present."""
        alive = {peer.id for peer in self._agent.peers if peer.state is PeerState.KNOWN}
        with self._lock:
            finished = []
            for number, current in list(self._rounds.items()):
                # A worker in the next round heard "again" of this one, from a leader that died before all had heard it.
                ahead = self._rounds[number + 1].present.keys() if number + 1 in self._rounds else set[int]()
                current.active |= bool(ahead)
                if alive <= current.present.keys() | ahead:
                    finished.append(number)
            rounds = [self._rounds.pop(number) for number in finished]
        for current in rounds:
            # Ourselves last: our main thread leaves on the answer, and the others should have theirs by then.
            for _, answer in sorted(current.present.items(), key=lambda item: item[0] == self._agent.me.worker_id):
                answer(current.active)

    def missing(self) -> list[str]:
        """Who has not come to the oldest round, as far as this worker knows."""
        with self._lock:
            if not self._rounds:
                return []
            present = self._rounds[min(self._rounds)].present.keys()
        return [p.name for p in self._agent.peers if p.state is PeerState.KNOWN and p.id not in present]

    def find_the_dead(self) -> None:
        """Connects to every worker: those that cannot be reached are lost, and no longer waited for."""
        for peer in self._agent.peers:
            if peer.state is PeerState.KNOWN and peer.link is None and not peer.accepted:
                self._agent.submit(self._agent.reach, peer)


def leader_of(agent: Agent) -> Peer:
    """The worker with the lowest id that is alive; this one, if no other is."""
    return min(_alive(agent), key=lambda peer: peer.id, default=agent.peer(agent.me.worker_id))


def _alive(agent: Agent) -> list[Peer]:
    return [peer for peer in agent.peers if peer.state is PeerState.KNOWN]


def go_round(agent: Agent, leader: BarrierLeader, number: int, active: bool, timeout: float) -> bool:
    """One round; whether another is needed."""
    while True:
        if len(_alive(agent)) <= 1:
            return active
        head = leader_of(agent)
        if head.id == agent.me.worker_id:
            leader.find_the_dead()
        elif agent.reach(head, time.monotonic() + timeout if timeout > 0 else math.inf) is None:
            continue  # it cannot be reached: the next one leads
        try:
            waiting = agent.start_call(head, "shutdown", timeout, lambda call_id, _: Barrier(call_id, number, active))
            return bool(agent.wait(waiting))
        except WorkerLostError:
            continue  # the leader is gone: the next one leads


@contextlib.contextmanager
def repeated_notice(say: Callable[[], None]) -> Iterator[None]:
    """Inside, another thread calls ``say`` every ``NOTICE_SECONDS``."""
    over = threading.Event()
    seconds = NOTICE_SECONDS

    def repeat() -> None:
        while not over.wait(seconds):
            say()

    thread = threading.Thread(target=repeat, name="telegrad-shutdown-notice", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: a shutdown without notices
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
