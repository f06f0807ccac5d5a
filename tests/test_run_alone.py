"""One run with an agent that only notes what it is asked: what it sends and submits, and before what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import eventually, in_thread
from telegrad._ids import PassId
from telegrad._wire.messages import Finished, Gradients, PassHead, PlanWanted, Report
from telegrad._wire.values import Bundle, Route
from telegrad.autograd.accumulate import Leaves
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.context import Context
from telegrad.autograd.functions import Recv
from telegrad.autograd.graph import Unit
from telegrad.autograd.local_pass import ROOT, Job, State
from telegrad.autograd.run import GradientBatch, Run

ME, LEFT, RIGHT, OTHER = 1, 2, 3, 4
HEAD = PassHead(PassId(0, 1, 12345), 5, False, False, False, 1)
WANTED = PlanWanted(HEAD.pass_id)


class NotingAgent:
    """Sends nothing and starts no thread; ``happened`` has what it was asked."""

    def __init__(self) -> None:
        self.happened: list[Any] = []
        self.submitted: list[Any] = []
        self._act: Any = None

    def send_message(self, to: int, message: Any, value: Any = None, tensors: Any = None) -> bool:
        self.happened.append((to, message))
        return True

    def submit(self, function: Any, *args: Any) -> None:
        self.submitted.append(args)

    def before_waiting(self, act: Any) -> Any:
        self._act, previous = act, self._act
        return previous

    @contextmanager
    def blocking(self) -> Iterator[None]:
        if self._act is not None:
            self._act()
        self.happened.append("waits")
        yield


def a_pass(came: Iterable[int] = ()) -> Pass:
    """A pass in which these messages have got their gradients."""
    this = Pass(ME, HEAD, Context(HEAD.context_id), str, lambda this, error: None)
    this.gradients = {message_id: {0: torch.ones(2)} for message_id in came}
    this.local.arrived = {*came}
    return this


def a_run(this: Pass, batches_to: Iterable[int] = ()) -> tuple[Run, NotingAgent]:
    agent: Any = NotingAgent()
    run = Run(agent, Leaves(), this)
    for to in batches_to:
        run._batches[to] = GradientBatch(True, Bundle(Route(to)))
    return run, agent


def finished(count: int) -> Finished:
    return Finished(HEAD.pass_id, count, 0, (Report(ME, 1, count),))


def a_batch(answer: Finished | None = None) -> Gradients:
    return Gradients(HEAD, (), True, answer)


def a_job(*sources: int, recvs_last: bool = True) -> Job:
    return Job(Unit(list(sources), recvs_last=recvs_last), State.RUNNING, list(sources))


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ([], [(LEFT, a_batch()), (RIGHT, a_batch())]),
        ([(LEFT, finished(1))], [(LEFT, a_batch(finished(1))), (RIGHT, a_batch())]),
        ([(RIGHT, finished(1)), (LEFT, finished(2))], [(LEFT, a_batch(finished(2))), (RIGHT, a_batch(finished(1)))]),
        (
            [(LEFT, finished(1)), (LEFT, finished(1))],
            [(LEFT, finished(1)), (LEFT, a_batch(finished(1))), (RIGHT, a_batch())],
        ),
        (
            [(LEFT, WANTED), (OTHER, finished(1)), (LEFT, finished(2)), (OTHER, WANTED)],
            [(LEFT, WANTED), (OTHER, finished(1)), (OTHER, WANTED), (LEFT, a_batch(finished(2))), (RIGHT, a_batch())],
        ),
    ],
    ids=["no answer", "one answer", "one for each", "a second one is sent alone", "other messages and workers"],
)
def test_an_answer_goes_along_with_gradients_for_the_same_worker(messages: list[Any], sent: list[Any]) -> None:
    run, agent = a_run(a_pass(), [LEFT, RIGHT])
    run._messages = messages
    run.send()
    assert agent.happened == sent
    run.send()
    assert agent.happened == sent, "each is sent once"


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_units_share_a_call_if_each_has_all_it_needs_and_comes_to_its_recvs_last(
    kinds: list[tuple[bool, bool, bool]],
) -> None:
    jobs, shares, came = [], [], []
    for number, (recvs_last, complete, two) in enumerate(kinds):
        sources = [2 * number + 1, 2 * number + 2] if two else [2 * number + 1]
        jobs.append(a_job(*sources, recvs_last=recvs_last))
        shares += [jobs[-1]] if recvs_last and complete else []
        came += sources if complete else sources[1:]
    run, agent = a_run(a_pass(came))
    mine = run._choose(jobs)
    assert mine == (shares or jobs[:1])
    assert agent.submitted == [(([], [job]),) for job in jobs if job not in mine]


def test_the_roots_need_nothing_to_come() -> None:
    jobs = [a_job(ROOT), a_job(2)]
    assert a_run(a_pass([ROOT, 2]))[0]._choose(jobs) == jobs


def test_before_a_unit_waits_at_a_gate_what_was_collected_is_sent() -> None:
    """For that may be what the gradient waits for."""
    this, gradient = a_pass(), torch.ones(2)
    this._surveyed = True
    this.local.surveyed([Unit([1, 2], recvs={Recv(0, LEFT, 1): {0}})])
    (job,) = this.local.jobs
    this.local.plan_known([1, 2])
    this.local.came([1])
    assert job.state is State.RUNNING
    run, agent = a_run(this, [LEFT])
    run._job = job
    agent.before_waiting(run.send)
    join = in_thread(lambda: run.gradient_for(2, 0))
    assert eventually(lambda: agent.happened == [(LEFT, a_batch()), "waits"]), agent.happened
    assert job.state is State.BLOCKED
    this.step(this.came, LEFT, a_batch(), {2: {0: gradient}})
    assert join() is gradient
    assert job.state is State.RUNNING


def test_before_a_reduction_waits_for_its_group_what_was_collected_is_sent() -> None:
    """For another of the group may wait for that before it comes."""
    this = a_pass()
    run, agent = a_run(this, [LEFT])
    held: Any = SimpleNamespace(run=lambda context, swapping: agent.happened.append("reduced"))
    this.local.flow.active = 1
    this.reductions = SimpleNamespace(after=lambda jobs: [held])  # type: ignore[assignment]
    run._run([Job(Unit([3]), State.RUNNING, [])])  # a unit that computes nothing
    assert agent.happened[:3] == [(LEFT, a_batch()), "waits", "reduced"]
    assert not this.error
