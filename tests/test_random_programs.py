"""Random distributed programs do what they do locally: gradients, hooks, and no message more than needed.

``python -m tests.random_programs`` runs more of them; its help says how to look at one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest

from random_programs import distributed, local
from random_programs.compare import Mismatch, compare
from random_programs.generate import generate
from random_programs.language import Action, Call, Do, Hook, How, LeafAction, NoGrad, Program, walk
from random_programs.operations import OPERATIONS
from random_programs.shrink import shrink
from random_programs.stage import Stage, stage
from support import AT_ONCE as SOON
from support import eventually
from telegrad import autograd
from telegrad._agent.peers import PeerState
from telegrad._wire import messages
from telegrad._wire.messages import (
    Discover,
    DropContext,
    Explored,
    Finished,
    Gradients,
    PlanKnown,
    PlanWanted,
)
from telegrad.errors import WorkerLostError
from worker_processes import WorkerProcess, running_workers

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

PROGRAMS = 500
BATCH = 50
AT_ONCE = 25
OVER_PROCESSES = 50
UNDER_FAULTS = 60
CUT = 12

INTERNAL = [Gradients, Finished, Discover, Explored, PlanWanted, PlanKnown, DropContext]


@pytest.fixture(scope="module")
def workers() -> Iterator[Stage]:
    with stage() as workers:
        yield workers


@pytest.mark.parametrize("first", range(0, PROGRAMS, BATCH))
def test_programs_do_what_they_do_locally(workers: Stage, first: int) -> None:
    for seed in range(first, first + BATCH):
        program = generate(seed)
        oracle = local.run(program)
        workers.check(program, "smart", oracle)
        workers.check(program, "fast", oracle)
    assert workers.leftovers() == []


def test_programs_at_once(workers: Stage) -> None:
    """Each in a context of its own, on the same workers."""

    def run(first: int) -> None:
        for seed in range(first, first + AT_ONCE):
            program = generate(seed)
            workers.check(program, "smart", alone=False)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, PROGRAMS + number * AT_ONCE) for number in range(4)]:
            done.result(60)
    assert workers.leftovers() == []


# --- over real processes ------------------------------------------------------------------------------------------


def test_programs_over_processes() -> None:
    names = ["worker0", "worker1", "worker2"]
    with running_workers(3) as cast:
        for seed in range(OVER_PROCESSES):
            program = generate(seed, names)
            oracle = local.run(program)
            driver = cast[names.index(program.driver)]
            outcome = driver.run(distributed.run, program, oracle.expected)
            try:
                compare(oracle, outcome, counted=False)
            except Mismatch as error:
                pytest.fail(f"{error}\n\n{program}")
        for process in cast:
            assert eventually(lambda process=process: _keeps_nothing(process)), process.run(autograd.debug_info)


def _keeps_nothing(process: WorkerProcess) -> bool:
    known = process.run(autograd.debug_info)
    return not known["contexts"] and not known["passes"] and not known["sends"]


# --- under faults -------------------------------------------------------------------------------------------------


@functools.cache
def _planned() -> list[tuple[Program, local.Local]]:
    """Programs that send every kind of message: small ones in which sources meet."""
    programs = (generate(seed) for seed in itertools.count())
    small = (program for program in programs if program.size() < 30)
    runs = ((program, local.run(program)) for program in small)
    return list(itertools.islice(((p, o) for p, o in runs if any(e.meets for e in o.expected)), UNDER_FAULTS))


@pytest.mark.parametrize("message", INTERNAL, ids=lambda message: message.__name__)
def test_programs_with_late_messages(workers: Stage, message: type) -> None:
    hits = 0
    for program, oracle in _planned():
        fault = workers.workers.fault("delay", message, seconds=0.005)
        workers.check(program, "smart", oracle)
        hits += fault.hits
        workers.workers.faults.clear()
    assert hits > UNDER_FAULTS / 10, "the fault hardly ever struck"
    assert workers.leftovers() == []


@pytest.mark.parametrize("message", [messages.Call, messages.Reply, *INTERNAL], ids=lambda message: message.__name__)
def test_programs_with_a_cut(message: type) -> None:
    """A program fails with WorkerLostError, or does not need the two workers any more.  Nothing of it stays behind when
    one of the two is gone."""
    hits = 0
    for number, (program, oracle) in enumerate(_planned()[:CUT]):
        with stage(graceful=False) as cast:
            fault = cast.workers.fault("cut", message, count=1, bytes=(0, 17, 100, 1 << 20)[number % 4])
            start = time.monotonic()
            with contextlib.suppress(WorkerLostError):
                cast.check(program, "smart", oracle, alone=False)
            assert time.monotonic() - start < SOON, program
            hits += fault.hits
            for worker in cast.workers:
                lost = [peer.name for peer in worker.agent.peers if peer.state is PeerState.LOST]
                if lost and not worker.closed and not cast.workers[lost[0]].closed:
                    cast.workers.kill(lost[0])
            assert cast.leftovers(failed=True) == [], program
    assert hits > 0, "the fault never struck"


# --- the tools themselves -----------------------------------------------------------------------------------------


def test_the_programs_have_everything() -> None:
    seen: Counter[object] = Counter()
    for seed in range(PROGRAMS):
        program = generate(seed)
        seen[f"{len(program.workers)} workers"] += 1
        seen[f"{len(program.steps)} steps"] += 1
        seen.update(action for setup in program.setups.values() for _, action in setup.hooks)
        for step in program.steps:
            seen.update({"several roots": len(step.roots) > 1, "on another": step.on != program.driver})
            seen.update({"without retain_graph": not step.retain, "given": any(root.given for root in step.roots)})
            _count(step.ops, program.driver, (), seen)
    wanted: list[object] = [f"{count} workers" for count in (2, 3, 4, 5)]
    wanted += [f"{count} steps" for count in (1, 2, 3)]
    wanted += ["several roots", "on another", "without retain_graph", "given", "unused result", "twice", "to itself"]
    wanted += ["circle", "no_grad", "call in no_grad", "parameter as argument", *OPERATIONS, *get_args(How)]
    wanted += [*get_args(LeafAction), *[("hook", action) for action in get_args(Action)]]
    assert [what for what in wanted if seen[what] < 5] == []


def _count(ops: tuple[object, ...], worker: str, callers: tuple[str, ...], seen: Counter[object]) -> None:
    """Counts what a block has."""
    used = {value for op in ops if isinstance(op, Call) for value, _ in op.args}
    used |= {value for op in ops if isinstance(op, Do) for value in op.ins}
    for op in ops:
        match op:
            case Do():
                seen[op.name] += 1
                seen["parameter as argument"] += op.name.startswith("param") and op.outs[0] in used
            case Hook():
                seen["hook", op.action] += 1
            case NoGrad():
                seen["no_grad"] += 1
                seen["call in no_grad"] += any(isinstance(each, Call) for each in op.body)
            case Call():
                seen[op.how] += 1
                given = [here for here, _ in op.args]
                seen["twice"] += len(set(given)) < len(given)
                seen["unused result"] += any(here not in used for _, here in op.results)
                seen["to itself"] += op.to == worker
                seen["circle"] += op.to in callers and op.to != worker
                _count(op.body, op.to, (*callers, worker), seen)


def test_a_wrong_gradient_is_noticed(workers: Stage) -> None:
    program = generate(1)
    oracle = local.run(program)
    with workers.workers.on(program.driver):
        outcome = distributed.run(program, oracle.expected, counts=workers.counts)
    compare(oracle, outcome)
    seen = next(each for each in outcome.seen.values() if any(g is not None for g in each.gradients))
    index = next(index for index, gradient in enumerate(seen.gradients) if gradient is not None)
    right = seen.gradients[index]
    assert right is not None
    for wrong in (right + 1e-6, None):
        seen.gradients[index] = wrong
        with pytest.raises(Mismatch, match=f"gradient of parameter {index}"):
            compare(oracle, outcome)
    seen.gradients[index] = right
    outcome.notes[0]["of messages"] += 1
    with pytest.raises(Mismatch, match="gradients were sent"):
        compare(oracle, outcome)


def test_a_program_shrinks_to_what_makes_it_fail() -> None:
    def fails(program: Program) -> bool:
        """It runs, and some call gives a matmul back."""
        try:
            local.run(program)
        except RuntimeError:
            return False
        calls = [op for step in program.steps for op in walk(step.ops) if isinstance(op, Call)]
        return any(isinstance(op, Do) and op.name == "matmul" for call in calls for op in walk(call.body))

    program = next(program for program in map(generate, itertools.count()) if fails(program) and program.size() > 60)
    smallest = shrink(program, fails)
    assert fails(smallest)
    assert smallest.size() <= 8, str(smallest)
