"""One backward on one worker, with all that it holds: the graph, the gradients that came, the thread that waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parallel import DistributedDataParallel

from telegrad._torch import input_metadata, sequence_number, set_sequence_number
from telegrad._wire.messages import Discover, Explored, Finished, InternalMessage, PassHead, PlanKnown, PlanWanted
from telegrad.autograd.context import Context
from telegrad.autograd.ddp import Reduction, reduced_parameters
from telegrad.autograd.discovery import Plan
from telegrad.autograd.functions import SEND_NODE, Recv
from telegrad.autograd.graph import DEEP, Edge, Explorer, Unit, survey
from telegrad.autograd.local_pass import ROOT, Job, LocalPass
from telegrad.errors import UsageError

Notes = list[tuple[int, InternalMessage]]


class Pass:
    """``lock`` guards all of it.  ``roots`` and ``root_gradients`` are there on the root only."""

    def __init__(
        self,
        worker: int,
        head: PassHead,
        context: Context,
        name_of: Callable[[int], str],
        roots: Sequence[GradientEdge] = (),
        root_gradients: Sequence[Tensor] = (),
    ) -> None:
        self.head = head
        self.id = head.pass_id
        self.is_root = self.id.root == worker
        self.context = context
        self._name_of = name_of
        self.roots = roots
        self.root_edges: list[Edge] = [(root.node, root.output_nr) for root in roots] if roots else []
        self.root_gradients = root_gradients
        self.lock = threading.Lock()
        self._changed: threading.Condition | None = None  # made by the first that waits
        self.local = LocalPass(worker, self.is_root, head.fast)
        self.gradients: dict[int, dict[int, Tensor | None]] = {}
        self.told: set[int] = set()  # whom this worker drew into the pass
        self.told_by: set[int] = set()  # the workers that drew this one in
        self.asked = False  # the root knows, or will, that this worker is curious
        self.over = False  # at the root: it ended well
        self.error: BaseException | None = None
        self.timeout = 0.0
        self.deadline = math.inf  # the root's; the others wait for as long as the root lives
        self.reductions: dict[int, Reduction] = {}  # by module
        self._held_back: dict[int, Reduction] = {}  # by id of a leaf: where its gradient goes before the context
        self.memory_in_use: set[int] = set()  # addresses of gradients that were sent, or that a leaf has taken over
        self._surveyed = False
        self._plan: Plan | None = None
        self._explorer: Explorer | None = None

    @property
    def plan(self) -> Plan:
        """Made when it is first asked for, which may be done under the lock only: most passes need none."""
        if self._plan is None:
            self._plan = Plan(self.is_root)
        return self._plan

    @property
    def explorer(self) -> Explorer:
        """What the wave found; as ``plan``."""
        if self._explorer is None:
            self._explorer = Explorer()
        return self._explorer

    def survey(self) -> None:
        """Looks at the graph, once; under the lock."""
        if self._surveyed:
            return
        self._surveyed = True
        sources: list[tuple[int, Sequence[Edge]]] = [(ROOT, self.root_edges)] if self.is_root else []
        for message_id, send in reversed(list(self.context.sends.items())):
            sources.append((message_id, [(node, 0) for node in send.parts]))
        units, nodes = survey(sources)
        self.local.surveyed(units)
        if reduced := reduced_parameters():
            self._find_reductions(reduced)
        if len(nodes) > DEEP:
            self.context.keep_graph([node for _, edges in sources for node, _ in edges if node is not None], nodes)

    def _find_reductions(self, reduced: dict[int, DistributedDataParallel]) -> None:
        for job in self.local.jobs:
            for leaf in job.unit.leaves:
                parameter = id(leaf.variable)  # type: ignore[attr-defined]
                module = reduced.get(parameter)
                if module is None:
                    continue
                if self.head.create_graph:
                    raise UsageError("create_graph does not go through DistributedDataParallel, here as in torch")
                if id(module) not in self.reductions:
                    self.reductions[id(module)] = Reduction(module)
                self.reductions[id(module)].waits_for.add(job)
                self._held_back[parameter] = self.reductions[id(module)]

    def reductions_after(self, jobs: Sequence[Job]) -> list[Reduction]:
        """These jobs are done; the modules whose leaves can get no more.  Under the lock."""
        ready = []
        for key, reduction in list(self.reductions.items()):
            reduction.waits_for.difference_update(jobs)
            if not reduction.waits_for:
                ready.append(self.reductions.pop(key))
        return ready

    def add_gradient(self, leaf: Tensor, gradient: Tensor) -> bool:
        """Adds to what a leaf got; False if it is held back."""
        reduction = self._held_back.get(id(leaf))
        if reduction is None:
            self.context.add_gradient(leaf, gradient)
            return True
        with self.lock:
            reduction.add(leaf, gradient)
        return False

    def explore(self, edges: Sequence[Edge]) -> dict[int, dict[int, set[int]]]:
        """Follows live edges; what was found, as worker → message → parts."""
        found: dict[int, dict[int, set[int]]] = {}
        for recv, parts in self.explorer.explore(edges).items():
            found.setdefault(recv.sender, {}).setdefault(recv.message_id, set()).update(parts)
        return found

    def send_edges(self, sends: Sequence[tuple[int, int]]) -> list[Edge]:
        known = self.context.sends
        return [
            (known[message_id].parts[part], 0)
            for message_id, part in sends
            if message_id in known and part < len(known[message_id].parts)
        ]

    # --- what to do -----------------------------------------------------------------------------------------------

    def next_steps(self) -> tuple[Notes, list[Job]]:
        """After any event, under the lock: what to say to whom, and what to run."""
        notes: Notes = []
        jobs: list[Job] = []
        local, plan = self.local, self._plan
        flow = local.flow
        if self.error is not None or (flow.active and not local.curious and (plan is None or not plan.started)):
            return notes, jobs
        if local.curious and not self.asked:
            self.asked = True
            if self.is_root:
                notes += self.start_wave()
            else:
                notes.append((self.id.root, PlanWanted(self.id)))
            plan = self._plan
        if plan is not None and plan.started:
            for to, count, owed in plan.wave.settle():
                notes.append((to, Explored(self.id, count, owed, tuple(plan.curious))))
            if self.is_root and plan.ends():
                notes += [(worker, PlanKnown(self.id)) for worker in plan.curious]
                jobs += local.plan_known(plan.live)
        local.reduces = bool(self.reductions) and any(self.reductions.values())
        if not self.is_root:
            for to, count, owed in flow.settle():
                notes.append((to, Finished(self.id, count, owed, local.report())))
        elif flow.over and not self.over:
            local.report()
            self.over = True
            self.tell()
        return notes, jobs

    def start_wave(self) -> Notes:
        self.plan.started = True
        return self.discover(self.explore(self.root_edges))

    def discover(self, found: dict[int, dict[int, set[int]]]) -> Notes:
        notes: Notes = []
        for worker, sends in found.items():
            counted = self.plan.wave.sent(worker)
            self.told.add(worker)
            live = tuple((message_id, tuple(sorted(parts))) for message_id, parts in sends.items())
            notes.append((worker, Discover(self.head, live, counted)))
        return notes

    # --- what a call of torch's engine needs --------------------------------------------------------------------

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

        The survey looked at all that a source may reach; a message of which only some tensors are live reaches less.
        """
        unit = job.unit
        if not unit.recvs or (self.head.fast and len(job.sources) > 1) or self._is_whole(job):
            return unit.recvs
        if len(unit.sources) > 1 and self._plan is not None and self._plan.known:
            found = self._explorer.reached if self._explorer is not None else {}
            return {recv: parts for recv, parts in found.items() if recv in unit.recvs}
        edges: list[Edge] = []
        for source in job.sources:
            if source == ROOT:
                edges += self.root_edges
            else:
                edges += self.send_edges([(source, part) for part in self.live_parts(job, source)])
        return Explorer().explore(edges)

    def _is_whole(self, job: Job) -> bool:
        """Whether all tensors of all sources of a unit have got something."""
        if len(job.sources) < len(job.unit.sources):
            return False
        sends, gradients = self.context.sends, self.gradients
        for source in job.sources:
            if source != ROOT and len(gradients.get(source, ())) != len(sends[source].parts):
                return False
        return True

    def is_complete(self, job: Job) -> bool:
        """Whether all that it needs has come."""
        gradients = self.gradients
        for source in job.sources:  # noqa: SIM110 (a generator costs as much as all of it)
            if source != ROOT and source not in gradients:
                return False
        return True

    def entries(self, jobs: Sequence[Job]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where torch's engine starts, newest first, and with what.

        Where all has come it starts below the sends; else at them, and they find their gradients themselves.
        """
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if len(jobs) > 1:
            _put_in_order([job.unit for job in jobs])
        for job in jobs:
            gates: list[Node] = []
            complete = self.is_complete(job)
            for source in job.sources:
                if source == ROOT:
                    edges += self.roots
                    gradients += self.root_gradients
                    continue
                nodes = self.context.sends[source].parts
                came: dict[int, Tensor | None] = self.gradients[source] if complete else {}
                for part in self.live_parts(job, source):
                    gradient = came.get(part)
                    if gradient is None:
                        gates.append(nodes[part])
                        edges.append(GradientEdge(nodes[part], 0))
                        gradients.append(_NOTHING)
                    else:
                        node, output = nodes[part].next_functions[0]
                        assert node is not None
                        edges.append(GradientEdge(node, output))
                        gradients.append(gradient)
            if not complete:
                _put_gates_last(job.unit, gates)
        return edges, gradients

    def forget_gradients(self, jobs: Sequence[Job]) -> None:
        """They were used, and a leaf may take one over if nobody else holds it."""
        for job in jobs:
            for source in job.sources:
                self.gradients.pop(source, None)

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Waits until that, or until the pass has ended; False if the deadline comes first."""
        seconds = max(min(self.deadline - time.monotonic(), threading.TIMEOUT_MAX), 0.0)
        with self.lock:
            if self._changed is None:
                self._changed = threading.Condition(self.lock)
            return self._changed.wait_for(lambda: ready() or self.error is not None or self.over, seconds)

    def tell(self) -> None:
        """Lets those that wait look again; under the lock."""
        if self._changed is not None:
            self._changed.notify_all()

    def awaited(self) -> int | None:
        """One of the workers that must speak before the pass can end."""
        with self.lock:
            waits = self.local.flow.awaited or (self._plan.wave.awaited if self._plan is not None else ())
            return next(iter(waits), None)

    def zeros(self, message_id: int, part: int) -> Tensor | None:
        """For a tensor of a live message that itself got nothing, where FAST did not know: as PyTorch does."""
        node, output = self.context.sends[message_id].parts[part].next_functions[0]
        if node is None:
            return None
        metadata = input_metadata(node, output)
        return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)

    @property
    def is_at_work(self) -> bool:
        with self.lock:
            return self.local.is_at_work

    def waits_for(self, worker: int) -> bool:
        """Whether this pass cannot end without something from that worker."""
        with self.lock:
            sends = [self.context.sends.get(job.blocked_on or 0) for job in self.local.jobs]
            return (
                self.local.flow.waits_for(worker)
                or (self._plan is not None and self._plan.wave.waits_for(worker))
                or any(send is not None and send.to == worker for send in sends)
            )

    def stop(self, error: BaseException) -> set[int]:
        """Ends it for this worker; whom this worker drew into it."""
        with self.lock:
            if self.error is None:
                self.error = error
            self.tell()
            told, self.told = self.told, set()
            return told

    # --- seeing it ----------------------------------------------------------------------------------------------

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


_NOTHING = torch.zeros(())  # what a gate is started with
_SEND: Any = SEND_NODE


# Numbers that decide in which order torch's engine runs what is ready: the highest first.  Each is a function of what
# the node is, and not of the pass, since another pass of the same context may be running the same nodes.
_GATES_BELOW = 1 << 60
_IN_ORDER_FROM = 1 << 61


def _put_gates_last(unit: Unit, gates: Sequence[Any]) -> None:
    """Lets torch's engine come to a send only when nothing else is left to do, and to the newest first."""
    for gate in gates:
        message_id, part = gate.sent
        set_sequence_number(gate, message_id << 12 | min(part, 0xFFF))
    for node in unit.nodes:
        number = sequence_number(node)
        if number < _GATES_BELOW and type(node) is not _SEND:
            set_sequence_number(node, number + _GATES_BELOW)


def _put_in_order(units: Sequence[Unit]) -> None:
    """Lets torch's engine run one unit after the other, as it would in calls of their own.

    Their nodes may have been made by different threads, each of which counts for itself, and a function that uses the
    memory of its gradient again relies on whoever got it being done with it.
    """
    for unit in units:
        first = _IN_ORDER_FROM + (min(max(unit.sources), 1 << 39) << 20)
        nodes = [node for node in unit.nodes if type(node) is not _SEND]
        for rank, node in enumerate(sorted(nodes, key=sequence_number)):
            set_sequence_number(node, first + rank)
