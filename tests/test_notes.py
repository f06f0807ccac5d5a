"""Notes take effect exactly once under loss, repetition and reordering."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from telegrad._agent.notes import Inbox, Outbox
from telegrad._ids import GlobalId
from telegrad._wire.messages import ForkAccepted, Note

SENDER, RECEIVER = 1, 2
PAUSE = 1.0


class Network:
    """A sender, a receiver, and what is under way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.outbox, self.inbox = Outbox(PAUSE), Inbox()
        self.posted = 0
        self.notes: list[Note] = []
        self.acks: list[int] = []
        self.accepted: Counter[int] = Counter()

    def post(self) -> None:
        payload = ForkAccepted(GlobalId(SENDER, self.posted))
        self.posted += 1
        self.notes.append(self.outbox.post(RECEIVER, payload, self.now))

    def deliver(self, note: Note) -> None:
        if self.inbox.accept(SENDER, note):
            self.accepted[note.payload.fork_id[1]] += 1
        self.acks += self.inbox.acks_for(SENDER)

    def acknowledge(self, seq: int) -> None:
        self.outbox.acknowledged(RECEIVER, (seq,))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for to, note, _ in self.outbox.due(self.now):
            assert to == RECEIVER
            self.notes.append(note)

    def heal(self) -> None:
        """From now on nothing is lost."""
        for _ in range(100):
            for note in self.notes:
                self.deliver(note)
            for seq in self.acks:
                self.acknowledge(seq)
            self.notes, self.acks = [], []
            if not len(self.outbox):
                return
            self.wait(10.0)
        raise AssertionError("the notes never came through")


what = st.sampled_from(["post", "deliver", "drop note", "repeat note", "acknowledge", "drop ack", "repeat ack", "wait"])


def step(network: Network, event: str, index: int) -> None:
    notes, acks = network.notes, network.acks
    if event == "post":
        network.post()
    elif event == "wait":
        network.wait(index)
    elif "ack" in event and acks:
        seq = acks[index % len(acks)]
        if event != "repeat ack":
            acks.remove(seq)
        if event != "drop ack":
            network.acknowledge(seq)
    elif "ack" not in event and notes:
        note = notes[index % len(notes)]  # any of them: that is the reordering
        if event != "repeat note":
            notes.remove(note)
        if event != "drop note":
            network.deliver(note)


@given(st.lists(st.tuples(what, st.integers(0, 7)), max_size=80))
def test_each_note_is_accepted_exactly_once(story: list[tuple[str, int]]) -> None:
    network = Network()
    for event, index in story:
        step(network, event, index)
        assert max(network.accepted.values(), default=0) <= 1
        for incoming in network.inbox._from.values():
            assert all(incoming.floor <= seq < network.posted for seq in incoming.seen)
    network.heal()
    assert network.accepted == Counter(range(network.posted))


def test_the_receiver_forgets_what_was_acknowledged() -> None:
    network = Network()
    for _ in range(1000):
        network.post()
        network.heal()
        assert len(network.inbox._from[SENDER].seen) <= 2


def test_a_copy_that_comes_when_it_is_forgotten_is_not_let_through() -> None:
    network = Network()
    network.post()
    late = network.notes[0]
    network.heal()
    network.post()
    network.heal()  # this one said that the first is acknowledged
    assert late.seq not in network.inbox._from[SENDER].seen
    network.deliver(late)
    assert network.accepted == Counter([0, 1])


def test_a_note_that_waits_holds_the_floor_and_nothing_below_it() -> None:
    network = Network()
    network.post()
    stuck = network.notes.pop()
    for _ in range(100):
        network.post()
        network.deliver(network.notes.pop())
        network.acknowledge(network.acks.pop())
    assert len(network.inbox._from[SENDER].seen) == 100  # all may still be repeated, for all that the receiver knows
    network.deliver(stuck)
    network.acknowledge(network.acks.pop())
    network.post()
    network.deliver(network.notes.pop())
    assert len(network.inbox._from[SENDER].seen) == 1


def test_the_pause_between_repeats_grows_to_a_limit() -> None:
    outbox = Outbox(0.5)
    outbox.post(RECEIVER, ForkAccepted(GlobalId(1, 1)), 0.0)
    times, now = [], 0.0
    while now < 40.0:
        now += 0.25
        if outbox.due(now):
            times.append(now)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.5
    assert pauses[:4] == [1.0, 2.0, 4.0, 5.0]
    assert set(pauses[4:]) == {5.0}


def test_senders_and_receivers_are_counted_apart() -> None:
    outbox, inbox = Outbox(PAUSE), Inbox()
    first = outbox.post(1, ForkAccepted(GlobalId(0, 0)), 0.0)
    second = outbox.post(2, ForkAccepted(GlobalId(0, 1)), 0.0)
    assert first.seq == second.seq == 0
    assert inbox.accept(1, first)
    assert inbox.accept(2, first)
    assert not inbox.accept(1, first)
    outbox.acknowledged(1, (0,))
    assert len(outbox) == 1


def test_a_lost_worker_is_forgotten() -> None:
    outbox, inbox = Outbox(PAUSE), Inbox()
    note = outbox.post(RECEIVER, ForkAccepted(GlobalId(0, 0)), 0.0)
    inbox.accept(SENDER, note)
    outbox.lost(RECEIVER)
    inbox.lost(SENDER)
    assert len(outbox) == 0
    assert outbox.due(1e9) == []
    assert not inbox._from
    outbox.acknowledged(RECEIVER, (0,))  # late, and harmless
