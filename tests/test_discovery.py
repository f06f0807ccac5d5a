"""Which sends are live: the wave finds all of them, whatever the order of messages, and says so once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.autograd.discovery import Plan

ROOT = 0

Target = tuple[int, int, int]  # a worker, a message that it sent, one of its tensors
Graph = dict[Target | None, list[Target]]  # what lies behind each; None: behind the roots


@dataclass(frozen=True)
class Discover:
    source: int
    to: int
    sends: tuple[tuple[int, tuple[int, ...]], ...]
    counted: bool


@dataclass(frozen=True)
class Explored:
    source: int
    to: int
    count: int
    owed: int
    needs_plan: tuple[int, ...]


@dataclass
class World:
    """Workers that explore their graphs, as the engine has them do it, and a network that delivers in any order."""

    size: int
    graph: Graph
    want: set[int]  # the workers where sources meet
    network: list[Discover | Explored] = field(default_factory=list)
    ended: int = 0

    def __post_init__(self) -> None:
        self.plans = [Plan(root=number == ROOT) for number in range(self.size)]
        self.reached: list[set[Target]] = [set() for _ in range(self.size)]
        self.plans[ROOT].started = True
        self.explore(ROOT, [None])
        self.settle(ROOT)

    def explore(self, worker: int, behind: list[Target | None]) -> None:
        found: dict[int, dict[int, set[int]]] = {}
        for each in behind:
            for target in self.graph.get(each, ()):
                if target not in self.reached[worker]:
                    self.reached[worker].add(target)
                    found.setdefault(target[0], {}).setdefault(target[1], set()).add(target[2])
        for to, sends in found.items():
            counted = self.plans[worker].wave.sent(to)
            live = tuple((message, tuple(sorted(parts))) for message, parts in sends.items())
            self.network.append(Discover(worker, to, live, counted))

    def settle(self, worker: int) -> None:
        plan = self.plans[worker]
        self.network += [Explored(worker, *answer, tuple(plan.needs_plan)) for answer in plan.wave.settle()]
        if worker == ROOT:
            self.ended += plan.ends()

    def deliver(self, index: int) -> None:
        message = self.network.pop(index % len(self.network))
        worker, plan = message.to, self.plans[message.to]
        match message:
            case Discover(source, _, sends, counted):
                self.network += [Explored(worker, *answer, ()) for answer in plan.wave.received(source, counted)]
                new = plan.discovered(sends)
                assert len(new) == len(set(new))
                if worker in self.want and worker != ROOT:
                    plan.needs_plan.add(worker)
                self.explore(worker, [(worker, *send) for send in new])
            case Explored(source, _, count, owed, needs_plan):
                plan.explored(source, count, owed, needs_plan)
        self.settle(worker)

    def live(self) -> set[Target]:
        """By brute force."""
        todo: list[Target | None] = [None]
        seen: set[Target] = set()
        while todo:
            for target in self.graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    def check(self) -> None:
        known = {(w, m, p) for w, plan in enumerate(self.plans) for m, parts in plan.live.items() for p in parts}
        live = self.live()
        assert known <= live
        assert self.ended == (not self.network), f"ended {self.ended} times; under way: {self.network}, {self.plans}"
        assert self.plans[ROOT].known == bool(self.ended)
        if self.ended:
            assert known == live
            assert self.plans[ROOT].needs_plan == {worker for worker, _, _ in live} & self.want - {ROOT}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(1, 5))
    targets = st.tuples(st.integers(0, size - 1), st.integers(1, 4), st.integers(0, 1))
    behind = st.lists(targets, max_size=4)
    graph: Graph = dict(draw(st.dictionaries(targets, behind, max_size=12)))
    graph[None] = draw(behind)
    return World(size, graph, draw(st.sets(st.integers(0, size - 1))))


@settings(max_examples=300)
@given(world=worlds(), order=st.lists(st.integers(0, 1 << 16)), rng=st.randoms(use_true_random=False))
def test_the_wave_finds_exactly_the_live_sends_and_ends_once(
    world: World, order: list[int], rng: random.Random
) -> None:
    world.check()
    while world.network:
        world.deliver(order.pop() if order else rng.randrange(1 << 16))
        world.check()


# --- one rule at a time -----------------------------------------------------------------------------------------


def test_only_what_was_not_known_is_new() -> None:
    plan = Plan(root=False)
    assert plan.discovered([(1, (0, 2)), (2, (0,))]) == [(1, 0), (1, 2), (2, 0)]
    assert plan.discovered([(1, (0, 1, 2))]) == [(1, 1)]
    assert plan.discovered([(2, ())]) == []
    assert plan.live == {1: {0, 1, 2}, 2: {0}}


def test_a_send_of_which_no_tensor_is_known_stays_without() -> None:
    plan = Plan(root=False)
    assert plan.discovered([]) == []
    assert plan.live == {}
    assert plan.started


def test_a_wave_that_nobody_started_does_not_end() -> None:
    plan = Plan(root=True)
    assert not plan.ends()
    assert not plan.known


def test_the_wave_ends_once_when_all_have_answered() -> None:
    plan = Plan(root=True)
    plan.started = True
    plan.wave.sent(1)
    plan.wave.sent(2)
    assert not plan.ends()
    plan.explored(1, 1, 0, (1, 3))
    assert not plan.ends()
    plan.explored(2, 1, 0, (2, 3))
    assert plan.ends()
    assert plan.known
    assert plan.needs_plan == {1, 2, 3}
    assert not plan.ends()


def test_a_wave_that_finds_nothing_ends_at_once() -> None:
    plan = Plan(root=True)
    plan.started = True
    assert plan.ends()


def test_only_the_root_finds_that_the_wave_has_ended() -> None:
    plan = Plan(root=False)
    plan.wave.received(0)
    plan.discovered([(1, (0,))])
    assert [answer.to for answer in plan.wave.settle()] == [0]
    assert not plan.ends()


def test_repr_says_how_far_it_is() -> None:
    plan = Plan(root=True)
    assert repr(plan) == "<Plan 0 live sends, not asked for>"
    plan.discovered([(1, (0,))])
    plan.wave.sent(1)
    assert repr(plan) == "<Plan 1 live sends, wave: waits for [1]>"
    plan.explored(1, 1, 0, ())
    plan.ends()
    assert repr(plan) == "<Plan 1 live sends, known>"
