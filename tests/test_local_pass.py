"""What one worker does of one backward: which units run, when, from which sources, and what it tells of the rest."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._wire.messages import Report
from telegrad.autograd.functions import Recv
from telegrad.autograd.graph import Unit
from telegrad.autograd.local_pass import ROOT, Job, LocalPass, State

ME = 3


def a_pass(*units: list[int], root: bool = False, fast: bool = False, recvs: bool = True) -> LocalPass:
    local = LocalPass(ME, root, fast)
    local.surveyed([Unit(sources, recvs={Recv(0, 0, 1): {0}} if recvs else {}) for sources in units])
    return local


def states(local: LocalPass) -> list[State]:
    return [job.state for job in local.jobs]


def check(local: LocalPass) -> None:
    busy = [job for job in local.jobs if job.state in (State.RUNNING, State.NEEDS_PLAN)]
    assert local.flow.active == len(busy), "or the pass would seem to be over, or never to be"
    assert set(local.needs_plan) == {job for job in local.jobs if job.state is State.NEEDS_PLAN}
    assert all(job.missing == len(set(job.unit.sources) - local.arrived) for job in local.jobs)
    assert all((job.blocked_on is not None) == (job.state is State.BLOCKED) for job in local.jobs)
    repr(local)


# --- one source -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
def test_a_unit_of_one_source_runs_when_its_gradient_comes(fast: bool) -> None:
    local = a_pass([1], [2], fast=fast)
    assert states(local) == [State.WAITING, State.WAITING]
    (job,) = local.came([2])
    assert job is local.jobs[1]
    assert job.sources == [2]
    assert states(local) == [State.WAITING, State.RUNNING]
    check(local)
    local.done([job])
    assert states(local) == [State.WAITING, State.DONE]
    check(local)
    assert local.arrived == {2}


def test_the_root_starts_from_its_roots() -> None:
    local = a_pass([ROOT], root=True)
    (job,) = local.came([ROOT])
    assert not local.flow.over
    local.done([job])
    assert local.flow.over


def test_a_gradient_for_something_that_was_never_sent_is_an_error() -> None:
    local = a_pass([1])
    with pytest.raises(LookupError, match="message 9, which was never sent in this context"):
        local.came([9])
    assert local.arrived == set()
    check(local)


# --- several sources, SMART -------------------------------------------------------------------------------------


def test_a_unit_of_several_sources_waits_for_the_plan() -> None:
    local = a_pass([1, 2, 3])
    assert local.may_need_plan
    assert not local.needs_plan
    assert local.came([2]) == []
    assert states(local) == [State.NEEDS_PLAN]
    check(local)
    assert local.came([3]) == []
    assert states(local) == [State.NEEDS_PLAN]
    check(local)
    (job,) = local.plan_known([2, 3])
    assert job.sources == [3, 2], "the live ones, the newest first"
    assert states(local) == [State.RUNNING]
    assert not local.may_need_plan
    check(local)


@pytest.mark.parametrize("letters", [[[3, 1, 2]], [[1], [2, 3]], [[2], [1], [3]]])
def test_a_unit_whose_sources_have_all_come_needs_no_plan(letters: list[list[int]]) -> None:
    local = a_pass([1, 2, 3])
    *early, last = letters
    for sources in early:
        assert local.came(sources) == []
        assert states(local) == [State.NEEDS_PLAN]
    assert local.came(last) == local.jobs
    assert local.jobs[0].sources == [3, 2, 1]
    assert not local.needs_plan
    check(local)
    assert local.plan_known([1, 2, 3]) == [], "it runs already"
    check(local)


def test_what_comes_twice_counts_once() -> None:
    local = a_pass([1, 2])
    assert not local.came([1])
    assert not local.came([1])
    assert states(local) == [State.NEEDS_PLAN]
    check(local)
    assert len(local.came([1, 2])) == 1
    check(local)


def test_gradients_that_come_together_start_their_units_in_that_order() -> None:
    local = a_pass([1], [2, 4], [3])
    assert local.came([3, 2, 1, 4]) == [local.jobs[2], local.jobs[1], local.jobs[0]]
    check(local)


def test_a_unit_that_is_first_heard_of_after_the_plan_runs_at_once() -> None:
    local = a_pass([1, 2, 3])
    assert local.plan_known([1, 3]) == []
    (job,) = local.came([1])
    assert job.sources == [3, 1]
    check(local)


def test_what_has_come_is_live_whatever_the_plan_says() -> None:
    local = a_pass([1, 2])
    local.came([1])
    (job,) = local.plan_known([2])
    assert job.sources == [2, 1]


def test_the_roots_are_newer_than_any_message() -> None:
    local = a_pass([1, ROOT, 5], root=True)
    local.came([ROOT])
    (job,) = local.plan_known([1, 5])
    assert job.sources == [ROOT, 5, 1]


def test_only_a_unit_of_several_sources_may_need_the_plan() -> None:
    assert not a_pass([1], [2]).may_need_plan
    assert a_pass([1], [2, 3]).may_need_plan
    assert not a_pass([1], [2, 3], fast=True).may_need_plan


def test_units_of_one_source_do_not_wait_for_the_plan() -> None:
    local = a_pass([1, 2], [3])
    local.came([1])
    assert local.came([3]) == [local.jobs[1]]
    assert states(local) == [State.NEEDS_PLAN, State.RUNNING]
    check(local)


# --- blocking ---------------------------------------------------------------------------------------------------


def test_a_run_blocks_at_a_source_that_has_not_come_and_goes_on_when_it_does() -> None:
    local = a_pass([1, 2, 3])
    local.came([3])
    (job,) = local.plan_known([1, 2, 3])
    local.blocked(job, 2)
    assert (job.state, job.blocked_on) == (State.BLOCKED, 2)
    assert local.flow.active == 0
    assert local.came([1]) == []
    assert job.state is State.BLOCKED, "it is another one that it waits for"
    check(local)
    assert local.came([2]) == [], "the call that waits goes on; no new one"
    assert (job.state, job.blocked_on) == (State.RUNNING, None)
    assert local.flow.active == 1
    check(local)
    local.done([job])
    check(local)


def test_a_blocked_unit_lets_the_worker_answer() -> None:
    local = a_pass([1, 2], fast=True)
    local.flow.received(0)
    (job,) = local.came([2])
    assert local.flow.settle() == []
    local.blocked(job, 1)
    assert [answer.to for answer in local.flow.settle()] == [0]


# --- units without recvs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
def test_a_unit_that_no_other_worker_waits_for_runs_when_all_its_live_sources_have_come(fast: bool) -> None:
    local = a_pass([1, 2, 3], fast=fast, recvs=False)
    assert local.came([3]) == []
    assert states(local) == [State.WAITING if fast else State.NEEDS_PLAN]
    if not fast:
        assert local.plan_known([1, 3]) == []
    assert states(local) == [State.WAITING]
    assert local.flow.active == 0, "only a message can go on with it"
    assert local.missing() == ([1, 2] if fast else [1])
    check(local)
    if fast:
        assert local.came([2]) == []
    assert local.came([1]) == local.jobs
    assert local.jobs[0].sources == ([3, 2, 1] if fast else [3, 1])
    assert local.missing() == []
    check(local)


def test_a_unit_without_recvs_runs_at_once_if_the_plan_has_no_more_for_it() -> None:
    local = a_pass([1, 2], recvs=False)
    local.came([2])
    assert local.plan_known([2]) == local.jobs
    check(local)


# --- FAST -------------------------------------------------------------------------------------------------------


def test_fast_takes_all_sources_for_live() -> None:
    local = a_pass([1, 2], [3], fast=True)
    (job,) = local.came([1])
    assert job is local.jobs[0]
    assert job.sources == [2, 1]
    assert not local.needs_plan
    check(local)


def test_fast_misses_all_that_has_not_come_even_where_nobody_waits() -> None:
    local = a_pass([1, 2], [3], [4], fast=True)
    assert sorted(local.missing()) == [1, 2, 3, 4]
    local.came([2])
    local.came([4])
    assert sorted(local.missing()) == [1, 3]


def test_smart_misses_only_what_somebody_is_blocked_on() -> None:
    local = a_pass([1, 2, 5], [3])
    assert local.missing() == []
    local.came([2])
    assert local.missing() == []
    (job,) = local.plan_known([1, 2])
    assert local.missing() == []
    local.blocked(job, 1)
    assert local.missing() == [1]
    local.came([1])
    assert local.missing() == []


# --- reports ----------------------------------------------------------------------------------------------------


def test_a_worker_that_misses_nothing_does_not_report() -> None:
    local = a_pass([1])
    assert local.report() == ()
    local.came([1])
    assert local.report() == ()


def test_a_report_has_a_new_version_when_it_changes_and_only_then() -> None:
    local = a_pass([1], [2], [3], fast=True)
    assert local.report() == (Report(ME, 1, 3),)
    assert local.report() == (Report(ME, 1, 3),)
    local.came([1])
    assert local.report() == (Report(ME, 2, 2),)
    local.came([2])
    local.came([3])
    assert local.report() == (Report(ME, 3, 0),), "that it misses nothing any more, too"
    assert local.report() == (Report(ME, 3, 0),)


def test_smart_reports_who_is_blocked() -> None:
    local = a_pass([1, 2])
    local.came([2])
    (job,) = local.plan_known([1, 2])
    assert local.report() == ()
    local.blocked(job, 1)
    assert local.report() == (Report(ME, 1, 1),)
    local.came([1])
    assert local.report() == (Report(ME, 2, 0),)


@given(st.permutations([Report(5, version, version % 3) for version in range(1, 6)] + [Report(6, 1, 4)]))
def test_of_what_is_reported_the_newest_counts_in_any_order(reports: list[Report]) -> None:
    local = a_pass([1])
    for report in reports:
        local.add_reports([report])
    assert set(local.report()) == {Report(5, 5, 2), Report(6, 1, 4)}


def test_what_was_reported_is_passed_on_with_the_own_report() -> None:
    local = a_pass([1], fast=True)
    local.add_reports([Report(7, 2, 1)])
    assert set(local.report()) == {Report(7, 2, 1), Report(ME, 1, 1)}


# --- any order of events ----------------------------------------------------------------------------------------


class Worker:
    """Runs jobs as torch's engine would: from the newest source to the oldest, and blocks where one has not come."""

    def __init__(self, units: list[list[int]], live: set[int], fast: bool, recvs: bool) -> None:
        self.local = a_pass(*units, fast=fast, recvs=recvs)
        self.live = live
        self.on_the_way = sorted(live)
        self.running: dict[Job, list[int]] = {}  # and which sources are left to do
        self.ran: list[Job] = []
        self.planned = self.fast = fast
        self.rng = random.Random(0)

    def start(self, jobs: list[Job]) -> None:
        for job in jobs:
            assert job.state is State.RUNNING
            assert job not in self.ran, "a unit runs once"
            assert job.sources == sorted(job.sources, reverse=True)
            self.ran.append(job)
            self.running[job] = list(job.sources)

    def events(self) -> int:
        """How many different things may happen."""
        return len(self.on_the_way) + (not self.planned) + len(self.ready())

    def ready(self) -> list[Job]:
        return [job for job in self.running if job.state is State.RUNNING]

    def happen(self, choice: int) -> None:
        if choice < len(self.on_the_way):
            together = [self.on_the_way.pop(choice)]
            while self.on_the_way and self.rng.random() < 0.3:
                together.append(self.on_the_way.pop(self.rng.randrange(len(self.on_the_way))))
            self.start(self.local.came(together))
            return
        choice -= len(self.on_the_way)
        if choice < len(self.ready()):
            self.advance(self.ready()[choice])
            return
        self.planned = True
        self.start(self.local.plan_known(self.live))

    def advance(self, job: Job) -> None:
        left = self.running[job]
        if not left:
            del self.running[job]
            self.local.done([job])
        elif left[0] in self.local.arrived:
            left.pop(0)
        else:
            self.local.blocked(job, left[0])


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    sources = draw(st.lists(st.integers(1, 12), min_size=1, unique=True))
    units: list[list[int]] = []
    for source in sources:
        if units and draw(st.booleans()):
            units[draw(st.integers(0, len(units) - 1))].append(source)
        else:
            units.append([source])
    return Worker(units, draw(st.sets(st.sampled_from(sources))), draw(st.booleans()), draw(st.booleans()))


@settings(max_examples=300)
@given(worker=workers(), rng=st.randoms(use_true_random=False))
def test_each_unit_that_is_reached_runs_once_with_all_its_live_sources(worker: Worker, rng: random.Random) -> None:
    while count := worker.events():
        worker.happen(rng.randrange(count))
        check(worker.local)
    local = worker.local
    for job in local.jobs:
        wanted = set(job.unit.sources) & worker.live
        if not wanted:
            assert job.state is State.WAITING, "nobody starts what no gradient comes to"
        elif set(job.sources) <= worker.live:
            assert job.state is State.DONE
            assert set(job.sources) == wanted
        else:
            assert worker.fast, "only FAST takes a dead source for live"
            assert job.state is (State.BLOCKED if job.unit.recvs else State.WAITING)
            assert job.blocked_on not in worker.live
    assert not local.flow.active
    assert not local.flow.awaited
    assert not worker.live & set(local.missing())


def test_repr_shows_how_far_each_unit_is() -> None:
    local = a_pass([1], [2, 3])
    local.came([1])
    local.came([2])
    assert repr(local) == "<LocalPass 2 active, [<1 sources, runs>, <2 sources, waits for the plan>]>"
