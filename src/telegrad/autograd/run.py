"""Runs units of a pass with torch's engine, and sends the gradients that come of it.

    Run ──▶ torch's engine ──▶ RecvRpc ──▶ Run.emit ──▶ GradientBatch ──▶ agent.send_message
                   │
                   └─────────▶ SendRpc ──▶ Run.gradient_for     waits at a gate (see ``gates``)

A message costs more than a small unit.  So the gradients that one engine call computes for one worker leave together,
and the answer to that worker with them.  They leave at once where the other worker could use the time: if they are
big, or if this worker has more to compute after them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from telegrad._agent.agent import Agent
from telegrad._torch import carried_by_engine, carry_in_engine, in_engine_call, run_engine
from telegrad._wire.messages import Finished, Gradients
from telegrad._wire.values import Bundle
from telegrad.autograd.accumulate import Leaves, address_of
from telegrad.autograd.backward_pass import Message, Pass, Steps
from telegrad.autograd.context import Scope, context_variable
from telegrad.autograd.ddp import Reduction
from telegrad.autograd.diagnostics import lost_in_backward
from telegrad.autograd.functions import ANCHOR, Recv, here
from telegrad.autograd.gates import entries, gradient_or_zeros, wait_for_gradient
from telegrad.autograd.graph import ACCUMULATE, takes_as_it_is
from telegrad.autograd.local_pass import Job
from telegrad.errors import ProtocolError, UsageError, WorkerLostError

_ANCHOR_EDGE = get_gradient_edge(ANCHOR)
_FULL = 32  # messages whose gradients one batch holds: the receiver should not be idle for long

MessageParts = tuple[int, tuple[int, ...], tuple[int, ...]]  # as in Gradients


class GradientBatch:
    """Gradients for one worker, which leave in one ``Gradients`` message."""

    __slots__ = ("counted", "finished", "messages", "tensors")

    def __init__(self, counted: bool, tensors: Bundle) -> None:
        self.counted = counted
        self.tensors = tensors
        self.finished: Finished | None = None  # an answer that goes along
        self.messages: list[MessageParts] = []

    def add(self, message_id: int, gradients: dict[int, Tensor | None]) -> None:
        """Adds the gradients of one message.  They are packed now: the node may use their memory again."""
        tensors: list[Tensor] = []
        defined: list[int] = []
        undefined: list[int] = []
        for part, gradient in gradients.items():
            if gradient is None:
                undefined.append(part)
                continue
            if isinstance(gradient, Parameter):  # a user may give one as a gradient, but it must not arrive as one
                gradient = gradient.view_as(gradient)
            defined.append(part)
            tensors.append(gradient)
        if tensors:
            self.tensors.add(tensors)
        self.messages.append((message_id, tuple(defined), tuple(undefined)))

    @property
    def may_grow(self) -> bool:
        """Whether it may wait for more gradients."""
        return len(self.messages) < _FULL and self.tensors.is_small


def unpack(messages: Iterable[MessageParts], tensors: Sequence[Tensor]) -> dict[int, dict[int, Tensor | None]]:
    """The gradients of a ``Gradients`` message: message id → part → gradient."""
    came: dict[int, dict[int, Tensor | None]] = {}
    following, named = iter(tensors), 0
    for message_id, parts, undefined in messages:
        came[message_id] = dict.fromkeys(undefined) if undefined else {}
        came[message_id].update(zip(parts, following, strict=False))
        named += len(parts)
    if named != len(tensors):
        raise ProtocolError(f"a Gradients message names {named} gradients, but {len(tensors)} came with it")
    return came


class Run:
    """What one thread does for a pass after an event.  The nodes that torch's engine runs see it as ``EngineCall``."""

    def __init__(self, agent: Agent, leaves: Leaves, this: Pass) -> None:
        self.this = this
        self._agent = agent
        self._leaves = leaves
        self._messages: list[tuple[int, Message]] = []
        self._batches: dict[int, GradientBatch] = {}  # by receiver
        self._lock = threading.RLock()  # of the batches: nodes of several devices run at the same time

    def carry_out(self, steps: Steps) -> None:
        """Sends messages and runs units, and goes on with what follows from these until nothing is left to do."""
        self._messages, jobs = steps
        if self._messages:
            self.send()
        while jobs and self.this.error is None:
            messages, jobs = self._run(jobs if len(jobs) == 1 else self._choose(jobs))
            self._messages += messages
        if self._messages or self._batches:
            self.send()

    def _choose(self, jobs: list[Job]) -> list[Job]:
        """Returns the units that this thread runs in one engine call; other threads get the others.

        Units share a call if each has all its gradients and the engine comes to its recvs last: a call costs more than
        a small unit, and small units on several threads would only contend for the GIL.
        """
        arrived = self.this.local.arrived
        together = [job for job in jobs if job.unit.recvs_last and arrived.issuperset(job.sources)] or jobs[:1]
        if len(together) < len(jobs):
            mine = set(together)
            self._submit(job for job in jobs if job not in mine)
        return together

    def _submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._agent.submit(Run(self._agent, self._leaves, self.this).carry_out, ([], [job]))

    def _run(self, jobs: list[Job]) -> Steps:
        """Runs units in one call of torch's engine."""
        this = self.this
        try:
            edges, gradients = entries(this, jobs)
            node = edges[0].node if len(edges) == 1 and self._leaves.after is None else None
            if type(node) is ACCUMULATE and takes_as_it_is(node, gradients[0]):  # torch's engine is not needed
                this.forget_gradients(jobs)
                only: list[Tensor | None] = [gradients.pop()]
                self._leaves.add(this, [node], only)
            elif edges:
                self._call_engine(jobs, edges, gradients)
            if this.reductions is not None:
                with this.lock:
                    ready = this.reductions.after(jobs)
                if ready:
                    self.send()  # other workers of the process group may wait for it
                    reduce(self._agent, self._leaves, this, ready)
            return this.step(this.local.done, jobs)
        except BaseException as error:
            this.fail(error)
            return [], []

    def _call_engine(self, jobs: list[Job], edges: list[GradientEdge], gradients: list[Tensor]) -> None:
        this = self.this
        unit, self._reached = jobs[0].unit, this.reached(jobs[0])
        leaves = unit.leaves
        if len(jobs) > 1:
            leaves = list(dict.fromkeys(leaf for job in jobs for leaf in job.unit.leaves))
            self._reached = {recv: parts for job in jobs for recv, parts in this.reached(job).items()}
        wanted = [GradientEdge(leaf, 0) for leaf in leaves]
        if self._reached:
            wanted.append(_ANCHOR_EDGE)
        if not wanted:
            return
        self._job = jobs[0]  # the only one that may have a gate
        self._at_once = this.head.create_graph or not unit.recvs_last
        self._parts: dict[Recv, dict[int, Tensor | None]] = {}  # of messages of which another tensor is to come
        entered = context_variable.set(this.context)
        outer_call, here.call = here.call, self
        carries = this.context.uses_device or in_engine_call()
        if carries:
            outer_carried = carried_by_engine()
            carry_in_engine(self)
        outer_wait = self._agent.before_waiting(self.send)  # a hook may wait for a worker that waits for a batch
        try:
            results: list[Tensor | None] = list(
                run_engine(
                    tuple(edges),
                    tuple(gradients),
                    this.head.retain_graph,
                    this.head.create_graph,
                    tuple(wanted),
                    True,  # allow unused
                    accumulate_grad=False,
                )
            )
            gradients.clear()
            this.forget_gradients(jobs)
            if leaves:
                self._leaves.add(this, leaves, results)
        finally:
            context_variable.reset(entered)
            self._agent.before_waiting(outer_wait)
            here.call = outer_call
            if carries:
                carry_in_engine(outer_carried)

    # --- called by nodes, on a thread of torch's engine ---------------------------------------------------------

    def gradient_for(self, message_id: int, part: int) -> Tensor | None:
        """The gradient of a sent tensor.  If it has not come, the unit waits for it: the send is a gate."""
        this = self.this
        if message_id not in this.gradients:
            messages, jobs = this.step(this.blocked, self._job, message_id)
            self._messages += messages
            self._submit(jobs)
            wait_for_gradient(self._agent, this, message_id)
        return gradient_or_zeros(this, message_id, part)

    def emit(self, recv: Recv, part: int, gradient: Tensor | None) -> None:
        """Takes the gradient of a received tensor.  When all of the message are there, they go into a batch."""
        this, to = self.this, recv.sender
        with self._lock:
            if recv not in self._reached:
                raise UsageError("a hook called backward() on a tensor that came from another worker")
            parts = self._parts.setdefault(recv, {})
            parts[part] = gradient
            if len(parts) < len(self._reached[recv]):
                return
            batch = self._batches.get(to)
            if batch is None:
                counted = this.sends_to(to)
                try:
                    tensors = self._agent.tensors_for(to, this.head.create_graph)
                except WorkerLostError:
                    raise lost_in_backward(self._agent, to) from None
                batch = self._batches[to] = GradientBatch(counted, tensors)
            for each in parts.values():
                if each is not None:
                    this.memory_in_use.add(address_of(each))
            del self._parts[recv]
            if this.head.create_graph:
                with Scope(this.context):  # in which the gradients are recorded; a device's thread has none
                    batch.add(recv.message_id, parts)
            else:
                batch.add(recv.message_id, parts)
            # Nothing can join the only gradients of a call, not even an answer: what goes to the parent is not counted.
            # On a device, other nodes run at the same time: little is left after the recvs on the CPU only.
            alone = batch.counted and len(self._reached) == 1
            if not (self._at_once or alone) and batch.may_grow and (gradient is None or gradient.is_cpu):
                return
            del self._batches[to]
        self._send_batch(to, batch)

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Sends what was collected.  An answer goes along with gradients for the same worker."""
        with self._lock:
            messages, self._messages = self._messages, []
            batches, self._batches = self._batches, {}
        for to, message in messages:
            batch = batches.get(to)
            if batch is not None and batch.finished is None and type(message) is Finished:
                batch.finished = message
            elif not self._agent.send_message(to, message):
                self.this.fail(lost_in_backward(self._agent, to))
        for to, batch in batches.items():
            self._send_batch(to, batch)

    def _send_batch(self, to: int, batch: GradientBatch) -> None:
        this = self.this
        message = Gradients(this.head, tuple(batch.messages), batch.counted, batch.finished)
        if this.error is None and not self._agent.send_message(to, message, tensors=batch.tensors):
            this.fail(lost_in_backward(self._agent, to))


def reduce(agent: Agent, leaves: Leaves, this: Pass, reductions: Iterable[Reduction]) -> None:
    """Gives gradients that were held back to the DDP modules that average them, and waits for their process groups."""
    for reduction in reductions:
        with agent.blocking():
            reduction.run(this.context, leaves.swapping)
