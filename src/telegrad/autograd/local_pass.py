"""What one worker does of one backward pass: which units run when, and what it has to tell the others.

Events come in as method calls, instructions come out: *run this unit*, *ask for the plan*, *answer that worker*.  There
is no thread, socket, clock or tensor in here; ``backward_pass`` holds the lock and does what it is told.

A unit runs when the gradients of all its sources have come.  Where only some of several have, it must be known which of
the others will come at all.  FAST assumes all of them.  SMART asks for the plan, and such a unit waits until the plan
is known.  If the unit has no recvs, no other worker waits for it, and it simply runs when all its live sources have
come.  Otherwise it runs now, as one call of torch's engine from all its live sources, the newest first: the gradient of
a source can depend only on sources that were sent later, since these used what came back for it.  At a source that has
not come the call blocks; nothing else is left to do in that unit then.

    WAITING ──▶ RUNNING ◀──▶ BLOCKED          all have come, or the plan is known
     │   ▲         ▲  │
     ▼   │         │  ▼
    NEEDS_PLAN ────┘  DONE                    some have come, and the plan is not known
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from telegrad._wire.messages import Report
from telegrad.autograd.graph import Unit
from telegrad.autograd.termination import Termination

ROOT = 1 << 62  # the source that backward starts from, newer than any message


class State(enum.Enum):
    WAITING = "waits for a gradient"
    NEEDS_PLAN = "waits for the plan"
    RUNNING = "runs"
    BLOCKED = "blocked"
    DONE = "done"


@dataclass(eq=False, slots=True)
class Job:
    """A unit and how far it is."""

    unit: Unit
    state: State = State.WAITING
    sources: list[int] = field(default_factory=list)  # the live ones, newest first, once it runs
    blocked_on: int | None = None
    missing: int = 0  # how many of the unit's sources have not come

    def __repr__(self) -> str:
        return f"<{len(self.unit.sources)} sources, {self.state.value}>"


class LocalPass:
    def __init__(self, worker: int, root: bool, fast: bool) -> None:
        self.worker = worker
        self.flow = Termination(root)
        self.arrived: set[int] = set()
        self.live: set[int] | None = None  # None: not known yet
        self.jobs: list[Job] = []
        self.reduces = False  # gradients are held back until the end: see ``reducers``
        self.reports: dict[int, Report] = {}  # the latest of each worker that ever had one
        self.needs_plan: dict[Job, None] = {}  # dicts keep their order, so that a pass runs the same way each time
        self._incomplete: dict[Job, None] = {}  # those of which some live sources have come, and others have not
        self._by_source: dict[int, Job] = {}
        self._fast = fast

    def surveyed(self, units: Iterable[Unit]) -> None:
        """What this worker's graph looks like.  Once, before the first gradient."""
        for unit in units:
            job = Job(unit, missing=len(unit.sources))
            self.jobs.append(job)
            for source in unit.sources:
                self._by_source[source] = job
        if self._fast:
            self.live = set(self._by_source)

    @property
    def is_at_work(self) -> bool:
        """Whether a thread is in it, or waits in it."""
        return any(job.state in (State.NEEDS_PLAN, State.RUNNING, State.BLOCKED) for job in self.jobs)

    @property
    def may_need_plan(self) -> bool:
        """Whether there is a unit that cannot run before the plan is known."""
        return self.live is None and any(len(job.unit.sources) > 1 for job in self.jobs)

    # --- events -------------------------------------------------------------------------------------------------

    def came(self, sources: Collection[int]) -> list[Job]:
        """Gradients have come together; the jobs to run."""
        jobs: dict[int, Job] = {}
        for source in sources:
            job = self._by_source.get(source)
            if job is None:
                raise LookupError(f"a gradient came for message {source}, which was never sent in this context")
            jobs[source] = job
        for source, job in jobs.items():
            if source not in self.arrived:
                self.arrived.add(source)
                job.missing -= 1
        ready = []
        for source, job in jobs.items():
            if job.state is State.BLOCKED:
                if job.blocked_on == source:
                    job.state, job.blocked_on = State.RUNNING, None
                    self._incomplete.pop(job, None)
                    self.flow.active += 1  # on behalf of the call that wakes up now
            elif self._consider(job):
                ready.append(job)
        return ready

    def plan_known(self, live: Iterable[int]) -> list[Job]:
        """Which sources will come; the jobs to run."""
        self.live = {*live, *self.arrived}
        return [job for job in list(self.needs_plan) if self._consider(job)]

    def _consider(self, job: Job) -> bool:
        """Whether it runs from now on."""
        if job.state is not State.WAITING and job.state is not State.NEEDS_PLAN:
            return False
        live, sources = self.live, job.unit.sources
        if job.missing and live is None:
            if job.state is State.WAITING:
                job.state = State.NEEDS_PLAN
                self.needs_plan[job] = None
                self.flow.active += 1  # or the pass would seem to be over
            return False
        if job.state is State.NEEDS_PLAN:
            job.state = State.WAITING
            del self.needs_plan[job]
            self.flow.active -= 1
        if len(sources) == 1:
            job.sources = sources
        else:
            job.sources = sorted([source for source in sources if live is None or source in live], reverse=True)
        if job.missing and not job.unit.recvs and not self.arrived.issuperset(job.sources):
            self._incomplete[job] = None
            return False
        self._incomplete.pop(job, None)
        job.state = State.RUNNING
        self.flow.active += 1
        return True

    def blocked(self, job: Job, source: int) -> None:
        job.state, job.blocked_on = State.BLOCKED, source
        self._incomplete[job] = None
        self.flow.active -= 1

    def done(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.state = State.DONE
            self.flow.active -= 1

    # --- what is missing ----------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The sources that are waited for and have not come; FAST waits for all that a worker has."""
        wanted = self._by_source if self._fast else [source for job in self._incomplete for source in job.sources]
        return [source for source in wanted if source not in self.arrived]

    def report(self) -> tuple[Report, ...]:
        """What goes up with an answer: what is left to do, and where, as far as it is known here."""
        missing = len(self._by_source) - len(self.arrived) if self._fast else len(self._incomplete)
        if not missing and not self.reduces and not self.reports:
            return ()
        mine = self.reports.get(self.worker) or Report(self.worker, 0, 0)
        if (missing, self.reduces) != (mine.missing, mine.reduces):
            self.reports[self.worker] = Report(self.worker, mine.version + 1, missing, self.reduces)
        return tuple(self.reports.values())

    def add_reports(self, reports: Iterable[Report]) -> None:
        for report in reports:
            known = self.reports.get(report.worker)
            if known is None or known.version < report.version:
                self.reports[report.worker] = report

    def __repr__(self) -> str:
        return f"<LocalPass {self.flow!r}, {self.jobs!r}>"
