"""Looking before sleeping: when it looks, when it stops, and when it tries again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from support import in_thread
from telegrad._agent import spin
from telegrad._agent.spin import Spin


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
        self.spin = Spin()
        monkeypatch.setattr(spin, "CORES", 2)
        monkeypatch.setattr(spin, "_clock", lambda: self.now)
        monkeypatch.setattr(spin, "_switches", lambda: self.switches)
        monkeypatch.setattr(spin.os, "sched_yield", self._yield)

    def _yield(self) -> None:
        self.yields += 1
        self.now += self.away
        self.switches += self.away > 0 and not self.interrupted

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


@pytest.mark.parametrize("away", [2 * spin._SHARED, 2 * spin._CROWDED])
def test_an_interrupt_is_not_taken_for_another_process(monkeypatch: pytest.MonkeyPatch, away: float) -> None:
    alone = Place(monkeypatch, away=away)
    alone.interrupted = True
    assert alone.look(after=2)
    assert not alone.look(after=NEVER)
    assert alone.looks > 1
    assert all(searches(alone, 5)), "it was not crowded"


def test_a_switch_before_the_search_is_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, away=2 * spin._SHARED)
    place.interrupted = True
    place.switches += 7
    assert place.look(after=10)


def test_an_answer_that_came_while_another_ran_on_this_core_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place(monkeypatch, away=2 * spin._SHARED).look(after=2)


def test_where_another_runs_on_this_core_it_sleeps_but_looks_again_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Place(monkeypatch, away=2 * spin._SHARED)
    assert not shared.look(after=NEVER)
    assert shared.looks == 2
    assert searches(shared, 50) == [True] * 50


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
    place = Spin(lambda: others)
    assert place.rests()
    others = 0
    assert not place.rests()


def test_what_is_found_is_returned() -> None:
    glance: Callable[[], list[int]] = lambda: [7]  # noqa: E731
    assert Spin().look(glance) == [7]
