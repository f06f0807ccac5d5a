"""Whether a computation that spreads has ended: never said early, always said in the end, in any order of delivery."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.autograd.termination import Answer, Termination
from telegrad.errors import ProtocolError

ROOT = 0


@dataclass(frozen=True)
class Work:
    """A message of the computation itself."""

    source: int
    to: int
    counted: bool


@dataclass(frozen=True)
class Told:
    """An answer on its way."""

    source: int
    to: int
    count: int
    owed: int


class World:
    """Workers that draw each other into a computation, and a network that delivers in any order."""

    def __init__(self, size: int) -> None:
        self.workers = [Termination(root=number == ROOT) for number in range(size)]
        self.network: list[Work | Told] = []
        self.counted, self.answers = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.saved, self.owed = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.begin(ROOT)

    # what may happen

    def begin(self, worker: int) -> None:
        self.workers[worker].active += 1

    def end(self, worker: int) -> None:
        self.workers[worker].active -= 1
        self.settle(worker)

    def send(self, worker: int, to: int) -> None:
        counted = self.workers[worker].sent(to)
        self.network.append(Work(worker, to, counted))
        (self.counted if counted else self.saved)[worker, to] += 1

    def deliver(self, index: int, works: bool) -> None:
        """``works``: the message gives its receiver something to do, that takes time."""
        match self.network.pop(index % len(self.network)):
            case Work(source, to, counted):
                answers = self.workers[to].received(source, counted)
                self.answer(to, answers)
                if works:
                    self.begin(to)
                self.settle(to)
            case Told(source, to, count, owed):
                self.workers[to].answered(source, count, owed)
                self.settle(to)

    def settle(self, worker: int) -> None:
        self.answer(worker, self.workers[worker].settle())

    def answer(self, worker: int, answers: list[Answer]) -> None:
        for to, count, owed in answers:
            self.network.append(Told(worker, to, count, owed))
            self.answers[to, worker] += count
            self.owed[worker, to] += owed

    # what must hold

    @property
    def active(self) -> list[int]:
        return [number for number, worker in enumerate(self.workers) if worker.active]

    def check(self) -> None:
        ended = not self.active and not self.network
        root = self.workers[ROOT]
        assert root.over == ended, f"over: {root.over}; active: {self.active}, under way: {self.network}"
        for number, worker in enumerate(self.workers):
            assert not worker.over or number == ROOT
            assert worker.settle() == [], f"worker {number} had an answer to give, and was not asked"
            if ended:
                assert not worker.active
                assert not worker.awaited, f"all has ended, but worker {number}: {worker!r}"

    def step(self, event: int, one: int, other: int) -> None:
        """One of the things that may happen now; nothing, if it cannot."""
        match event:
            case 0 | 1 if self.active:
                self.send(self.active[one % len(self.active)], other % len(self.workers))
            case 2 if self.active:
                self.end(self.active[one % len(self.active)])
            case 3 | 4 | 5 if self.network:
                self.deliver(one, works=event > 3)

    def drain(self, rng: random.Random) -> None:
        """Nobody begins anything new."""
        limit = 10_000
        while self.active or self.network:
            limit -= 1
            assert limit, f"it does not end: {self.network}"
            choice = rng.randrange(len(self.active) + len(self.network))
            if choice < len(self.active):
                self.end(self.active[choice])
            else:
                self.deliver(choice - len(self.active), works=False)
            self.check()
        assert self.workers[ROOT].over
        assert self.answers == self.counted, "each of these is answered once"
        assert self.owed == self.saved, "and of each of these its receiver was told"


NUMBERS = st.integers(0, 1 << 16)  # an index, modulo what there is


@settings(max_examples=400)
@given(
    size=st.integers(2, 6),
    steps=st.lists(st.tuples(st.integers(0, 5), NUMBERS, NUMBERS), max_size=60),
    rng=st.randoms(use_true_random=False),
)
def test_over_exactly_when_nothing_is_left_anywhere(
    size: int, steps: list[tuple[int, int, int]], rng: random.Random
) -> None:
    world = World(size)
    world.check()
    for step in steps:
        world.step(*step)
        world.check()
    world.drain(rng)


def test_over_exactly_when_nothing_is_left_anywhere_in_long_runs() -> None:
    saved = 0
    for seed in range(150):
        rng = random.Random(seed)
        world = World(rng.randint(2, 6))
        try:
            for _ in range(200):
                world.step(rng.choice([0, 1, 2, 3, 4, 4, 5]), rng.randrange(1 << 16), rng.randrange(1 << 16))
                world.check()
            world.drain(rng)
        except AssertionError as error:
            error.add_note(f"{seed=}")
            raise
        saved += world.saved.total()
    assert saved > 100  # the shortcut was taken, or this test says nothing of it


# --- one rule at a time -----------------------------------------------------------------------------------------


def test_a_root_that_did_nothing_is_over() -> None:
    assert Termination(root=True).over
    assert not Termination(root=False).over


def test_the_root_is_not_over_while_it_works_or_waits() -> None:
    root = Termination(root=True)
    root.active += 1
    assert not root.over
    assert root.sent(1)
    root.active -= 1
    assert not root.over
    assert root.settle() == []
    assert root.awaited == {1}
    root.answered(1, 1, 0)
    assert root.over
    assert root.settle() == []  # it has nobody to answer


def test_the_first_message_makes_a_parent_and_those_of_others_are_answered_at_once() -> None:
    worker = Termination(root=False)
    worker.active += 1
    assert worker.received(1) == []
    assert worker.received(2) == [Answer(2, 1, 0)]
    assert worker.received(1) == []
    assert worker.received(2) == [Answer(2, 1, 0)]
    assert worker.settle() == []
    worker.active -= 1
    assert worker.settle() == [Answer(1, 2, 0)], "those of the parent are answered together"
    assert worker.settle() == []


def test_a_worker_that_has_answered_gets_a_new_parent() -> None:
    worker = Termination(root=False)
    assert worker.received(1) == []
    assert worker.settle() == [Answer(1, 1, 0)]
    assert worker.received(2) == []
    assert worker.sent(1), "worker 1 is its parent no more"
    assert worker.settle() == []
    worker.answered(1, 1, 0)
    assert worker.settle() == [Answer(2, 1, 0)]


def test_messages_to_the_parent_are_owed_and_not_answered() -> None:
    worker = Termination(root=False)
    worker.received(1)
    assert not worker.sent(1)
    assert worker.sent(2)
    assert not worker.sent(1)
    worker.answered(2, 1, 0)
    assert worker.settle() == [Answer(1, 1, 2)]
    worker.received(1)
    assert worker.settle() == [Answer(1, 1, 0)], "what was owed is told once"


@pytest.mark.parametrize("order", ["message first", "answer first", "between"])
def test_what_is_owed_may_come_before_or_after_the_answer(order: str) -> None:
    root = Termination(root=True)
    root.sent(1)
    for event in {"message first": "mma", "answer first": "amm", "between": "mam"}[order]:
        assert not root.over
        assert root.awaited == {1}
        if event == "a":
            root.answered(1, 1, 2)
        else:
            assert root.received(1, counted=False) == []
    assert root.over


def test_a_worker_may_send_to_itself() -> None:
    root = Termination(root=True)
    assert root.sent(0)
    assert not root.over
    assert root.received(0) == [Answer(0, 1, 0)]
    root.answered(0, 1, 0)
    assert root.over


def test_repr_says_what_is_waited_for() -> None:
    worker = Termination(root=True)
    assert repr(worker) == "quiet"
    worker.active = 2
    worker.sent(3)
    worker.sent(1)
    assert repr(worker) == "2 active, waits for [1, 3]"


# --- answers that are not due ---


@pytest.mark.parametrize(
    ("by", "messages", "owed"),
    [(2, 1, 0), (1, 3, 0), (1, 0, 0), (1, -1, 0), (1, 1, -1)],
    ids=["of another", "too many", "none", "fewer than none", "owes fewer than none"],
)
def test_an_answer_that_is_not_due_changes_nothing(by: int, messages: int, owed: int) -> None:
    root = Termination(root=True)
    root.active += 1
    assert root.sent(1)
    assert root.sent(1)
    root.active -= 1
    with pytest.raises(ProtocolError, match=f"it answered {messages} messages, of {2 if by == 1 else 0} that wait"):
        root.answered(by, messages, owed)
    assert root.awaited == {1}
    root.answered(1, 1, 0)
    assert not root.over
    root.answered(1, 1, 0)
    assert root.over
    with pytest.raises(ProtocolError):
        root.answered(1, 1, 0)
    assert root.over
