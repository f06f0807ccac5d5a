"""Looking before sleeping: when it looks, when it moves to another core, when it stops, and when it tries again."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable

import pytest

from support import in_thread
from telegrad.agent import spin
from telegrad.agent.spin import Spin


class Place:
    """A place to wait at, with a clock that moves by ``step`` at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 10e-6, away: float = 0.0) -> None:
        self.now = 0.0
        self.looks = 0
        self.yields = 0
        self.step = step
        self.away = away  # how long each yield takes
        self.switches = 0
        self.interrupted = False  # what takes the time is the machine, and not another process
        self.moves: list[float] = []  # when it stepped aside
        self.away_after_move = away
        self.spin = Spin(moves=True)
        monkeypatch.setattr(spin, "CORES", 2)
        monkeypatch.setattr(spin, "_clock", lambda: self.now)
        monkeypatch.setattr(spin, "_switches", lambda: self.switches)
        monkeypatch.setattr(spin.os, "sched_yield", self._yield)
        monkeypatch.setattr(spin, "step_aside", self._step_aside)

    def _yield(self) -> None:
        self.yields += 1
        self.now += self.away
        self.switches += self.away > 0 and not self.interrupted

    def _step_aside(self) -> None:
        self.moves.append(self.now)
        self.away = self.away_after_move

    def look(self, after: int) -> bool:
        """One wait, whose answer is there at the look of that number."""
        self.looks = 0

        def glance() -> bool:
            self.looks += 1
            self.now += self.step
            return self.looks >= after

        return self.spin.look(glance)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(monkeypatch)


NEVER = 1 << 60


def test_an_answer_that_is_there_costs_one_look(quiet: Place) -> None:
    assert quiet.look(after=1)
    assert (quiet.looks, quiet.yields) == (1, 0)


def test_an_answer_within_the_budget_is_found(quiet: Place) -> None:
    assert quiet.look(after=20)
    assert quiet.looks == 20
    assert quiet.yields == 19, "each further look lets others have the core first"


def test_the_search_ends_with_the_budget(quiet: Place) -> None:
    assert not quiet.look(after=NEVER)
    assert quiet.looks * quiet.step == pytest.approx(spin._BUDGET, rel=0.1)


def searches(place: Place, waits: int, after: int = NEVER) -> list[bool]:
    """For each of so many waits, whether it searched or went to sleep at once."""
    searched: list[bool] = []
    for _ in range(waits):
        place.look(after)
        searched.append(place.looks > 1)
    return searched


def test_where_it_never_pays_most_waits_sleep_at_once(quiet: Place) -> None:
    assert all(searches(quiet, spin._TRIALS))
    again = searches(quiet, 10 * (spin._SKIP_AFTER_VAIN + 1))
    assert sum(again) == 10


def test_one_success_restores_the_trust(quiet: Place) -> None:
    searches(quiet, spin._TRIALS + spin._SKIP_AFTER_VAIN)
    assert quiet.look(after=5)
    assert all(searches(quiet, spin._TRIALS))


def test_a_crowd_ends_the_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Place(monkeypatch, away=2 * spin._CROWDED)
    assert not crowded.look(after=NEVER)
    assert crowded.looks == 2
    first, then = spin._SKIP_WHEN_CROWDED
    assert searches(crowded, first + 1) == [False] * first + [True]
    assert searches(crowded, then + 1) == [False] * then + [True]


def test_a_crowd_is_not_stepped_aside_for(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Place(monkeypatch, away=2 * spin._CROWDED)
    searches(crowded, 500)
    assert crowded.moves == []


def test_a_core_of_its_own_is_not_left(quiet: Place) -> None:
    quiet.look(after=20)
    searches(quiet, 50)
    assert quiet.moves == []


def test_where_another_runs_on_this_core_it_steps_aside_and_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    shared.away_after_move = 0.0  # the other core is free
    assert shared.look(after=20)
    assert len(shared.moves) == 1
    assert shared.looks == 20
    assert shared.look(after=20)
    assert len(shared.moves) == 1, "it stays where it is alone"


@pytest.mark.parametrize("away", [2 * spin._SHARED, 2 * spin._CROWDED])
def test_an_interrupt_is_not_taken_for_another_process(monkeypatch: pytest.MonkeyPatch, away: float) -> None:
    alone = Place(monkeypatch, away=away)
    alone.interrupted = True
    assert alone.look(after=2)
    assert not alone.look(after=NEVER)
    assert alone.looks > 1
    assert all(searches(alone, 5)), "it was not crowded"
    assert alone.moves == []


def test_a_switch_before_the_search_is_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, away=2 * spin._SHARED)
    place.interrupted = True
    place.switches += 7
    assert place.look(after=10)
    assert place.moves == []


def test_who_gets_its_answer_from_a_peer_on_its_own_core_moves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    assert shared.look(after=2)
    assert len(shared.moves) == 1


def test_of_two_that_share_a_core_the_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    shared.spin = Spin(moves=False)
    assert shared.look(after=2)
    assert not shared.look(after=NEVER)
    assert shared.looks == 2, "it sleeps"
    assert shared.moves == []


def test_where_every_core_is_shared_it_sleeps_but_looks_again_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    assert not shared.look(after=NEVER)
    assert shared.looks == 3, "once here, and once where it went"
    assert len(shared.moves) == 1
    assert not shared.look(after=NEVER)
    assert shared.looks == 2, "it has just moved: to move again would not help"
    assert len(shared.moves) == 1
    assert searches(shared, 5) == [True] * 5


def test_between_two_moves_that_do_not_help_more_and_more_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    searches(shared, 1000)
    pauses = [then - now for now, then in zip(shared.moves, shared.moves[1:], strict=False)]
    assert len(pauses) > 8
    assert pauses[0] >= spin._STAY - 1e-9
    slack = 3 * (shared.away + shared.step)
    for before, after in itertools.pairwise(pauses):
        assert after >= min(2 * before, spin._LONGEST_STAY) - 2 * slack
        assert after <= spin._LONGEST_STAY + slack, "and then it tries again"


def test_a_move_that_helped_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    searches(shared, 100)
    shared.now += 1.0
    shared.moves.clear()
    searches(shared, 20)
    assert shared.moves[1] - shared.moves[0] < 3 * spin._STAY


def test_each_place_has_a_pause_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    shared.look(after=NEVER)
    shared.spin = Spin(moves=True)
    shared.look(after=NEVER)
    assert len(shared.moves) == 2


# --- stepping aside ---------------------------------------------------------------------------------------------------


class Cores:
    """Cores 0 to 3, of which this thread may use some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: set[int], here: int) -> None:
        self.allowed = allowed
        self.set: list[set[int]] = []
        self.error: dict[int, BaseException] = {}  # of the call of that number
        monkeypatch.setattr(spin, "_getcpu", lambda: here)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.allowed))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _set(self, thread: int, cores: set[int]) -> None:
        assert thread == 0, "the calling thread"
        self.set.append(set(cores))
        error = self.error.get(len(self.set))
        if isinstance(error, OSError):
            raise error
        self.allowed = set(cores)
        if error is not None:
            raise error


def test_it_goes_to_another_core_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {0, 1, 3}, here=1)
    spin.step_aside()
    assert cores.set == [{0, 3}, {0, 1, 3}]


def test_it_stays_where_there_is_no_other_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {1}, here=1)
    spin.step_aside()
    assert cores.set == []


@pytest.mark.parametrize("which", [1, 2])
def test_cores_that_are_taken_away_meanwhile_are_no_error(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    cores = Cores(monkeypatch, {0, 1}, here=1)
    cores.error[which] = OSError(errno.EINVAL, "Invalid argument")
    spin.step_aside()
    assert cores.set == [{0}, {0, 1}]


def test_an_interruption_leaves_it_as_free_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores(monkeypatch, {0, 1}, here=1)
    cores.error[1] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        spin.step_aside()
    assert cores.allowed == {0, 1}


def test_on_this_machine_it_restores_what_the_thread_may_use() -> None:
    before = os.sched_getaffinity(0)

    def step() -> set[int]:
        for _ in range(20):
            spin.step_aside()
        return os.sched_getaffinity(0)

    def step_on_one_core() -> set[int]:
        os.sched_setaffinity(0, {min(before)})
        return step()

    assert in_thread(step)() == before
    assert in_thread(step_on_one_core)() == {min(before)}
    assert os.sched_getaffinity(0) == before, "other threads are left alone"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_on_this_machine_it_moves() -> None:
    def step() -> bool:
        here = spin._getcpu()
        spin.step_aside()
        return here != spin._getcpu()

    assert sum(in_thread(step)() for _ in range(20)) > 10, "the kernel may move it back at once, but not each time"


def test_on_this_machine_a_switch_is_counted() -> None:
    def switches_while(act: Callable[[], object]) -> int:
        before = spin._switches()
        act()
        return spin._switches() - before

    assert in_thread(lambda: switches_while(lambda: time.sleep(0.001)))() >= 1
    assert min(in_thread(lambda: switches_while(lambda: None))() for _ in range(20)) == 0


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_on_a_single_core_it_never_searches(quiet: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin, "CORES", 1)
    assert not any(searches(quiet, 5))


def test_a_search_that_is_skipped_needs_no_preparation(quiet: Place) -> None:
    assert not quiet.spin.rests()
    while not quiet.spin._skip:
        quiet.look(after=10**9)
    skipped = quiet.spin._skip
    assert [quiet.spin.rests() for _ in range(skipped + 1)] == [True] * skipped + [False]


def test_it_rests_while_others_of_its_process_have_something_to_do(quiet: Place) -> None:
    others = 1
    place = Spin(moves=True, running=lambda: others)
    assert place.rests()
    others = 0
    assert not place.rests()


def test_what_is_found_is_returned() -> None:
    glance: Callable[[], list[int]] = lambda: [7]  # noqa: E731
    assert Spin(moves=True).look(glance) == [7]
