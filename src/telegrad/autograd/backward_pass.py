"""The state of one backward pass on one worker, and what follows from each event.

An event is a method that runs under the lock of the pass (``step``).  It records what happened, and ``step`` returns
what to do next: messages to send and units to run.  Nothing is sent or run under the lock (see ``run``).

The first event on a worker is ``start``, ``came`` or ``discovered``; before it, the worker's graph is read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._agent.failures import copy_of
from telegrad._ids import PassId
from telegrad._wire.messages import Discover, Explored, Finished, Gradients, PassHead, PlanKnown, PlanWanted
from telegrad.autograd.context import Context
from telegrad.autograd.ddp import Reductions, reduced_parameters
from telegrad.autograd.discovery import Plan
from telegrad.autograd.functions import Recv
from telegrad.autograd.graph import DEEP, Edge, Explorer, survey
from telegrad.autograd.local_pass import ROOT, Job, LocalPass
from telegrad.errors import ProtocolError

Message = Discover | Explored | Finished | PlanKnown | PlanWanted
Steps = tuple[list[tuple[int, Message]], list[Job]]  # messages with their receivers, and units to run


class Pass:
    """``lock`` guards all of it.  ``roots`` and ``root_gradients`` are given on the root only.

    ``report`` is called with the first error of a pass that another worker is the root of.
    """

    def __init__(
        self,
        worker: int,
        head: PassHead,
        context: Context,
        name_of: Callable[[int], str],
        report: Callable[[PassId, BaseException], None],
        roots: Sequence[GradientEdge] = (),
        root_gradients: Sequence[Tensor] = (),
        timeout: float = 0.0,
    ) -> None:
        self.head = head
        self.id = head.pass_id
        self.is_root = self.id.root == worker
        self.context = context
        self._name_of = name_of
        self._report = report
        self.roots = roots
        self.root_gradients = root_gradients
        self._root_edges: list[Edge] = [(root.node, root.output_nr) for root in roots] if roots else []
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else math.inf  # the other workers wait for the root
        self.lock = threading.Lock()
        self._changed: threading.Condition | None = None  # made by the first thread that waits
        self.local = LocalPass(worker, self.is_root, head.fast)
        self.gradients: dict[int, dict[int, Tensor | None]] = {}  # that have come: message id → part → gradient
        self.drawn_in: set[int] = set()  # the workers that this one drew into the pass
        self.drawn_in_by: set[int] = set()  # the workers that drew this one into it
        self.over = False  # at the root: the pass ended well
        self.error: BaseException | None = None
        self.reductions: Reductions | None = None
        self.memory_in_use: set[int] = set()  # addresses of gradients that were sent, or that a leaf has taken over
        self._surveyed = False
        self._plan_requested = False  # the root knows, or will know, that this worker needs the plan
        self._plan: Plan | None = None  # most passes need none
        self._explorer: Explorer | None = None
        self._messages: list[tuple[int, Message]] = []  # to be returned by ``step``
        self._ready: list[Job] = []

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = Plan(self.is_root)
        return self._plan

    def _survey(self) -> None:
        """Reads this worker's graph."""
        self._surveyed = True
        sources: list[tuple[int, list[Edge]]] = [(ROOT, self._root_edges)] if self.is_root else []
        for message_id, send in reversed(list(self.context.sends.items())):
            sources.append((message_id, [(node, 0) for node in send.parts]))
        units, nodes = survey(sources)
        self.local.surveyed(units)
        if modules := reduced_parameters():
            self.reductions = Reductions(self.local.jobs, modules, self.head.create_graph)
        if len(nodes) > DEEP:
            self.context.keep_graph([node for _, edges in sources for node, _ in edges if node is not None], nodes)

    # --- events -------------------------------------------------------------------------------------------------

    def step(self, event: Callable[..., None], *args: Any) -> Steps:
        """Records an event; returns the messages to send and the units to run because of it."""
        with self.lock:
            if self.error is not None:
                return [], []
            if not self._surveyed:
                self._survey()
            event(*args)
            if not self.local.flow.active or self.local.needs_plan or (self._plan is not None and self._plan.started):
                self._decide()
            messages, self._messages = self._messages, []
            ready, self._ready = self._ready, []
        return messages, ready

    def start(self) -> None:
        """On the root, the gradients of the roots are there."""
        self._ready = self.local.came([ROOT])

    def came(self, sender: int, message: Gradients, gradients: dict[int, dict[int, Tensor | None]]) -> None:
        """Gradients have come for sends of this worker."""
        self.gradients.update(gradients)
        self._ready = self.local.came(gradients)
        for to, count, owed in self.local.flow.received(sender, message.counted):
            self._messages.append((to, Finished(self.id, count, owed, ())))
        if message.finished is not None:
            self.finished(sender, message.finished)
        if self._changed is not None:
            self._changed.notify_all()

    def finished(self, sender: int, message: Finished) -> None:
        """All that some of this worker's messages caused on another worker is done."""
        if message.reports:
            self.local.add_reports(message.reports)
        self.local.flow.answered(sender, message.count, message.owed)

    def blocked(self, job: Job, message_id: int) -> None:
        """A unit stands at a gate."""
        if message_id not in self.gradients:
            self.local.blocked(job, message_id)

    def discovered(self, sender: int, message: Discover) -> None:
        """Sends of this worker are live, which the worker says that their tensors went to."""
        for to, count, owed in self.plan.wave.received(sender, message.counted):
            self._messages.append((to, Explored(self.id, count, owed, ())))
        new = self.plan.discovered(message.sends)
        if self.local.may_need_plan and not self._plan_requested and not self.is_root:
            self._plan_requested = True
            self.plan.needs_plan.add(self.local.worker)
        self._explore(self.send_edges(new))

    def explored(self, sender: int, message: Explored) -> None:
        """All that some of this worker's messages of the wave reached is explored."""
        self.plan.explored(sender, message.count, message.owed, message.needs_plan)

    def plan_wanted(self, sender: int, _: PlanWanted) -> None:
        """On the root, another worker needs the plan."""
        if not self.is_root:
            raise ProtocolError("it asked for the plan of a pass whose root is another worker")
        if self.plan.known:
            self._messages.append((sender, PlanKnown(self.id)))
            return
        self.plan.needs_plan.add(sender)
        self._start_wave()

    def plan_known(self, sender: int, _: PlanKnown) -> None:
        """The wave has ended."""
        if sender != self.id.root:
            raise ProtocolError("it ended the discovery of a pass whose root is another worker")
        self.plan.known = True
        self._ready = self.local.plan_known(self.plan.live)

    def _start_wave(self) -> None:
        if not self.plan.started:
            self.plan.started = True
            self._explore(self._root_edges)

    def _explore(self, edges: Sequence[Edge]) -> None:
        """Follows live edges to recvs, and tells the senders of the tensors that were received there."""
        if self._explorer is None:
            self._explorer = Explorer()
        found: dict[int, dict[int, set[int]]] = {}  # worker → message → parts
        for recv, parts in self._explorer.explore(edges).items():
            found.setdefault(recv.sender, {}).setdefault(recv.message_id, set()).update(parts)
        for worker, sends in found.items():
            counted = self.plan.wave.sent(worker)
            self.drawn_in.add(worker)
            live = tuple((message_id, tuple(sorted(parts))) for message_id, parts in sends.items())
            self._messages.append((worker, Discover(self.head, live, counted)))

    def _decide(self) -> None:
        """What follows from any event: a request for the plan, answers, the end of the wave or of the pass."""
        local, plan = self.local, self._plan
        flow, messages = local.flow, self._messages
        if local.needs_plan and not self._plan_requested:
            self._plan_requested = True
            if self.is_root:
                self._start_wave()
            else:
                messages.append((self.id.root, PlanWanted(self.id)))
            plan = self._plan
        if plan is not None and plan.started:
            for to, count, owed in plan.wave.settle():
                messages.append((to, Explored(self.id, count, owed, tuple(plan.needs_plan))))
            if self.is_root and plan.ends():
                messages += [(worker, PlanKnown(self.id)) for worker in plan.needs_plan]
                self._ready += local.plan_known(plan.live)
        local.reduces = self.reductions is not None and bool(self.reductions)
        if not self.is_root:
            for to, count, owed in flow.settle():
                messages.append((to, Finished(self.id, count, owed, local.report())))
        elif flow.over and not self.over:
            local.report()
            self.over = True
            if self._changed is not None:
                self._changed.notify_all()

    # --- what a call of torch's engine needs ----------------------------------------------------------------------

    def send_edges(self, sends: Iterable[tuple[int, int]]) -> list[Edge]:
        """The nodes of these (message, part)."""
        known = self.context.sends
        return [
            (known[message_id].parts[part], 0)
            for message_id, part in sends
            if message_id in known and part < len(known[message_id].parts)
        ]

    def live_parts(self, job: Job, source: int) -> list[int]:
        """Which tensors of a message get a gradient."""
        if self.head.fast and len(job.unit.sources) > 1:
            return list(range(len(self.context.sends[source].parts)))
        came = self.gradients.get(source)
        if came is None:
            return sorted(self._plan.live.get(source, ())) if self._plan is not None else []
        return sorted(came)

    def reached(self, job: Job) -> dict[Recv, set[int]]:
        """Which tensors of which messages get a gradient from this job, be it an undefined one.

        The survey followed everything that a source may reach; a message of which only some tensors are live reaches
        less.
        """
        unit = job.unit
        if not unit.recvs or (self.head.fast and len(job.sources) > 1):
            return unit.recvs
        for source in job.sources:
            if source != ROOT and len(self.gradients.get(source, ())) < len(self.context.sends[source].parts):
                break
        else:  # all tensors have got something
            if len(job.sources) == len(unit.sources):
                return unit.recvs
        if len(unit.sources) > 1 and self._plan is not None and self._plan.known:
            found = self._explorer.reached if self._explorer is not None else {}
            return {recv: parts for recv, parts in found.items() if recv in unit.recvs}
        edges: list[Edge] = []
        for source in job.sources:
            if source == ROOT:
                edges += self._root_edges
            else:
                edges += self.send_edges((source, part) for part in self.live_parts(job, source))
        return Explorer().explore(edges)

    def forget_gradients(self, jobs: Iterable[Job]) -> None:
        """They were used; a leaf may take one over if nothing else refers to it."""
        for job in jobs:
            for source in job.sources:
                self.gradients.pop(source, None)

    def sends_to(self, worker: int) -> bool:
        """A message of the flow is about to go to that worker; returns whether it must be answered."""
        with self.lock:
            if self.error is not None:
                raise copy_of(self.error)
            self.drawn_in.add(worker)
            return self.local.flow.sent(worker)

    # --- waiting, and the end -------------------------------------------------------------------------------------

    def wait(self, message_id: int | None = None) -> bool:
        """Waits for the end of the pass, or for the gradients of a message; False if the deadline comes first."""
        seconds = max(min(self.deadline - time.monotonic(), threading.TIMEOUT_MAX), 0.0)
        with self.lock:
            if self._changed is None:
                self._changed = threading.Condition(self.lock)
            return self._changed.wait_for(lambda: message_id in self.gradients or self.has_ended(), seconds)

    def has_ended(self) -> bool:
        return self.over or self.error is not None

    def waits_for(self, worker: int) -> bool:
        """Whether this pass cannot end without a message from that worker."""
        with self.lock:
            sends = [self.context.sends.get(job.blocked_on or 0) for job in self.local.jobs]
            return (
                worker in self.local.flow.awaited
                or (self._plan is not None and worker in self._plan.wave.awaited)
                or any(send is not None and send.to == worker for send in sends)
            )

    def fail(self, error: BaseException) -> None:
        """The pass cannot end well.  The first error counts; the root is told of it, and ends the pass everywhere."""
        with self.lock:
            if self.error is not None:
                return
            self.error = error
            if self._changed is not None:
                self._changed.notify_all()
        if not self.is_root:
            self._report(self.id, error)

    def stop(self, error: BaseException) -> set[int]:
        """Ends the pass on this worker; returns the workers that this one drew into it."""
        with self.lock:
            if self.error is None:
                self.error = error
            if self._changed is not None:
                self._changed.notify_all()
            drawn_in, self.drawn_in = self.drawn_in, set()
            return drawn_in

    # --- for diagnostics ------------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        with self.lock:
            return [self.describe(source) for source in self.local.missing()]

    def describe(self, source: int) -> str:
        if source == ROOT:
            return "the roots"
        send = self.context.sends[source]
        came = self.gradients.get(source, {})
        what = ", ".join(send.describe(part) for part in range(len(send.parts)) if part not in came)
        return f"message {source} to worker {self._name_of(send.to)} ({what})"

    def __repr__(self) -> str:
        state = f", failed: {self.error}" if self.error is not None else ", over" if self.over else ""
        arrived = [self.describe(source) for source in sorted(self.local.arrived, reverse=True)]
        missing = [self.describe(source) for source in self.local.missing()]
        return (
            f"<Pass {self.id} in context {self.context.id}: {self.local.flow!r}; {len(self.local.jobs)} units "
            f"{[job.state.value for job in self.local.jobs]}; came: {arrived or 'nothing'}; "
            f"missing: {missing or 'nothing'}; {self._plan or 'no plan asked for'}{state}>"
        )
