"""Drives the passes of one worker: torch's engine does the arithmetic, the agent carries the messages.

Everything between workers is a note, so it takes effect once, whatever the network does:

    Gradients     recvs → sends      what torch's engine computed here goes on there
    Finished      sends → recvs      all that it caused is done (``diffusion``)
    Discover      recv → send        this send is live            } only where
    Explored      send → recv        all behind it is explored    } some worker
    PlanWanted    anyone → root      start the wave               } is curious
    PlanKnown     root → the curious the wave has ended           } (``plan``)
    PassFailed    anyone → root      why it cannot end well
    EndPass       root → all         drop what is left of it
    DropContext   creator → all      the context has ended
    TellMe        anyone → creator   who told me of the context is lost: tell me when it ends
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._agent.agent import Agent
from telegrad._agent.failures import failure_of, rebuild
from telegrad._agent.peers import PeerState
from telegrad._ids import PassId, random_bits
from telegrad._text import printable_lines
from telegrad._wire.messages import (
    Discover,
    DropContext,
    EndPass,
    Explored,
    Failure,
    Finished,
    Gradients,
    PassFailed,
    PassHead,
    PlanKnown,
    PlanWanted,
    TellMe,
)
from telegrad._wire.values import PACKED_NONE
from telegrad.autograd.accumulate import Leaves
from telegrad.autograd.backward_pass import Notes, Pass
from telegrad.autograd.context import Context, Registry
from telegrad.autograd.ddp import watch
from telegrad.autograd.diagnostics import nothing_came, reduce_everywhere, too_late
from telegrad.autograd.graph import Graveyard
from telegrad.autograd.interceptors import Interceptors
from telegrad.autograd.local_pass import ROOT
from telegrad.autograd.runner import Runner
from telegrad.autograd.turn import unpack
from telegrad.errors import ProtocolError, TelegradError, WorkerLostError

log = logging.getLogger("telegrad.autograd")

_TOKEN_BITS = 63

Open = Callable[[], Any]


class Engine:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._me = agent.me.worker_id
        self.registry = Registry(self._me, guessable=agent.options.allow_pickle)
        self.attach = Interceptors(self.registry, self._is_gone, self._name, agent.serves_here)
        self._ddp_watch = watch()
        self.leaves = Leaves()
        self.swapping = self.leaves.swapping
        self._runner = Runner(agent, self._fail, self._lost, self.leaves)
        self._graveyard = Graveyard()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._running: set[int] = set()  # the numbers of the passes that this worker is the root of
        agent.marshal.incoming = self.attach.incoming
        agent.answer_opened = self.attach.answered
        agent.lost_handlers.append(self._worker_lost)
        agent.on_message(Gradients, self._on_gradients)
        agent.on_message(Finished, self._on_finished)
        agent.on_message(Discover, self._on_discover)
        agent.on_message(Explored, self._on_explored)
        agent.on_message(PlanWanted, self._on_plan_wanted)
        agent.on_message(PlanKnown, self._on_plan_known)
        agent.on_message(PassFailed, self._on_failed)
        agent.on_message(EndPass, self._on_end)
        agent.on_message(DropContext, self._on_drop, quick=True)
        agent.on_message(TellMe, self._on_tell_me)

    def close(self) -> None:
        """Undoes what was registered with torch."""
        self._ddp_watch.remove()

    # --- backward, on the worker that calls it ------------------------------------------------------------------

    def backward(
        self,
        context: Context,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        retain_graph: bool,
        create_graph: bool,
        fast: bool,
        timeout: float,
    ) -> None:
        """Returns when every worker has done its part; ``timeout`` 0: waits for as long as all are alive."""
        number = next(self._numbers)
        with self._lock:
            self._running.add(number)
            floor = min(self._running)
        pass_id = PassId(self._me, number, random_bits(_TOKEN_BITS))
        head = PassHead(pass_id, context.id, retain_graph, create_graph, fast, floor)
        this = Pass(self._me, head, context, self._name, roots, gradients)
        if timeout:
            this.timeout, this.deadline = timeout, time.monotonic() + timeout
        context.passes[this.id] = this
        try:
            with this.lock:
                this.survey()
                jobs = this.local.came([ROOT])
                notes, more = this.next_steps()
            self._runner.carry_out(this, notes, jobs + more)
            self._wait(this)
        except BaseException as error:
            self._fail(this, error)
            raise
        finally:
            context.passes.pop(this.id, None)
            with self._lock:
                self._running.discard(number)
            if this.error is not None:
                self._end_elsewhere(this, str(this.error))

    def _wait(self, this: Pass) -> None:
        def ended() -> bool:
            return this.over or this.error is not None

        def wait() -> bool:
            # For a moment the thread reads what it waits for itself: a hop to another costs more than a small pass.
            if (worker := this.awaited()) is not None:
                self._agent.attend(worker, ended)
            return ended() or this.wait_for(ended)

        if not ended() and not self._runner.blocking(wait):
            raise too_late(self._agent, this)
        if not this.over:
            assert this.error is not None
            raise this.error
        reports = this.local.reports.values()
        if not reports:
            return
        if any(report.missing for report in reports):
            raise nothing_came(self._agent, this)
        if any(report.reduces for report in reports):
            reduce_everywhere(self._agent, this, self._runner.reduce_rest)

    def _step(self, this: Pass, event: Callable[[], None]) -> None:
        """Takes in an event and does what follows from it."""
        with this.lock:
            if this.error is not None:
                return
            event()
            notes, jobs = this.next_steps()
        self._runner.carry_out(this, notes, jobs)

    # --- what the other workers say -----------------------------------------------------------------------------

    def _join(self, sender: int, head: PassHead, messages: Iterable[int]) -> Pass | None:
        """The pass of a message that came; None if it has failed, or its context has ended.

        ``messages``: what the sender speaks of, which must have been sent to it: only the worker that a tensor went to
        may give it a gradient.
        """
        context = self.registry.find(head.context_id)
        pass_id = head.pass_id
        if context is None:
            self._report_failure(pass_id, TelegradError(f"context {head.context_id} has ended on this worker"))
            return None
        sends = context.sends
        for message_id in messages:
            send = sends.get(message_id)
            if send is None or send.to != sender:
                raise ProtocolError(
                    f"a gradient for message {message_id} of a context, which did not go to that worker"
                )
        root, number, _ = pass_id
        known: Pass | None = context.passes.get(pass_id)
        if known is not None:
            known.told_by.add(sender)
        if root == self._me:
            return known  # None: it has failed, and this came late
        if known is not None:
            return known
        self._agent.peer(
            root
        )  # raises if there is no such worker: no worker could end the pass, or be told that it failed
        with self._lock:
            floor = context.floors[root] = max(head.floor, context.floors.get(root, 0))
            over = [old for old in list(context.passes) if old[0] == root and old[1] < floor]
            ended = [context.passes.pop(old) for old in over]
            if number >= floor and pass_id not in context.passes:
                context.passes[pass_id] = Pass(self._me, head, context, self._name)
            found: Pass | None = context.passes.get(pass_id)
            if found is not None:
                found.told_by.add(sender)
        for each in ended:
            if each is not None and each.is_at_work:  # it has failed, and the word of it is still on its way
                self._abort(each, TelegradError("the pass was ended: its root has begun another"))
        return found

    def reduce_rest(self, pass_id: PassId) -> None:
        """Asked for by the root, when the pass is over but for this."""
        this = self.find_pass(pass_id)
        if this is not None:
            self._runner.reduce_rest(this)

    def find_pass(self, pass_id: PassId) -> Pass | None:
        for context in self.registry:
            found: Pass | None = context.passes.get(pass_id)
            if found is not None:
                return found
        return None

    def _on_gradients(self, sender: int, payload: Gradients, open_value: Open) -> None:
        this = self._join(sender, payload.head, [message_id for message_id, _, _ in payload.messages])
        if this is None:
            return
        try:
            tensors = open_value() or []
            came = unpack(payload.messages, tensors)
            del tensors  # a leaf may take one of them over, if nobody else holds it
            with this.lock:
                if this.error is not None:
                    return
                this.survey()
                this.gradients.update(came)
                jobs = this.local.came(came)
                del came
                answers = this.local.flow.received(sender, payload.counted)
                if payload.finished is not None:
                    self._hear(this, sender, payload.finished)
                notes, more = this.next_steps()
                this.tell()
            for to, count, owed in answers:
                notes.append((to, Finished(this.id, count, owed, ())))
        except BaseException as error:
            self._fail(this, error)
            return
        self._runner.carry_out(this, notes, jobs + more)

    @staticmethod
    def _hear(this: Pass, sender: int, finished: Finished) -> None:
        this.local.heard(finished.reports)
        this.local.flow.answered(sender, finished.count, finished.owed)

    def _on_finished(self, sender: int, payload: Finished, _: Open) -> None:
        this = self.find_pass(payload.pass_id)
        if this is not None:
            self._step(this, lambda: self._hear(this, sender, payload))

    def _on_discover(self, sender: int, payload: Discover, _: Open) -> None:
        this = self._join(sender, payload.head, [message_id for message_id, _ in payload.sends])
        if this is None:
            return
        answers: Notes = []

        with this.lock:
            if this.error is not None:
                return
            this.survey()
            answers = [
                (to, Explored(this.id, count, owed, ()))
                for to, count, owed in this.plan.wave.received(sender, payload.counted)
            ]
            new = this.plan.discovered(payload.sends)
            if this.local.may_be_curious and not this.asked and not this.is_root:
                this.asked = True
                this.plan.curious.add(self._me)
            found = this.discover(this.explore(this.send_edges(new)))
            notes, jobs = this.next_steps()
        self._runner.carry_out(this, [*answers, *found, *notes], jobs)

    def _on_explored(self, sender: int, payload: Explored, _: Open) -> None:
        this = self.find_pass(payload.pass_id)
        if this is not None:
            self._step(this, lambda: this.plan.explored(sender, payload.count, payload.owed, payload.curious))

    def _on_plan_wanted(self, sender: int, payload: PlanWanted, _: Open) -> None:
        this = self.find_pass(payload.pass_id)
        if this is None:
            return
        if not this.is_root:
            raise ProtocolError("it asked for the plan of a pass whose root is another worker")
        with this.lock:
            if this.error is not None:
                return
            notes: Notes = []
            if this.plan.known:
                notes.append((sender, PlanKnown(this.id)))
            else:
                this.plan.curious.add(sender)
                if not this.plan.started:
                    notes += this.start_wave()
            more, jobs = this.next_steps()
        self._runner.carry_out(this, [*notes, *more], jobs)

    def _on_plan_known(self, sender: int, payload: PlanKnown, _: Open) -> None:
        this = self.find_pass(payload.pass_id)
        if this is not None:
            if sender != payload.pass_id.root:
                raise ProtocolError("it ended the discovery of a pass whose root is another worker")
            with this.lock:
                if this.error is not None:
                    return
                this.plan.known = True
                ready = this.local.plan_known(this.plan.live)
                notes, jobs = this.next_steps()
            self._runner.carry_out(this, notes, [*ready, *jobs])

    # --- failure ------------------------------------------------------------------------------------------------

    def _fail(self, this: Pass, error: BaseException) -> None:
        """The pass cannot end well.  The first reason counts; the root hears of it, and ends the pass everywhere."""
        with this.lock:
            if this.error is not None:
                return
            this.error = error
            this.tell()
        if not this.is_root:
            self._report_failure(this.id, error)

    def _report_failure(self, pass_id: PassId, error: BaseException) -> None:
        root = self._agent.peer(pass_id.root)
        details: list[Any] = []

        def pack(value: Any) -> Any:
            details.append(value)
            return PACKED_NONE

        failure, _ = failure_of(error, 0, self._agent.me.name, pack, tells_where=self._agent.options.allow_pickle)
        payload = PassFailed(pass_id, failure.worker, failure.type_name, failure.text, failure.traceback)
        try:
            self._agent.send_message(root.id, payload, details[0] if details else None)
        except Exception:  # a detail of the exception that cannot be sent
            self._agent.send_message(root.id, payload)

    def _on_failed(self, sender: int, payload: PassFailed, open_value: Open) -> None:
        this = self.find_pass(payload.pass_id)
        if this is None:
            return
        try:
            details = open_value()
        except TelegradError:
            details = None
        failure = Failure(0, payload.worker, payload.type_name, payload.text, payload.traceback)
        self._fail(this, rebuild(failure, details, self._agent.options.allow_pickle, self._agent.peer(sender).name))

    def _end_elsewhere(self, this: Pass, reason: str) -> None:
        for worker in this.told - {self._me}:
            self._agent.send_message(worker, EndPass(this.id, this.context.id, reason))

    def _on_end(self, sender: int, payload: EndPass, _: Open) -> None:
        context = self.registry.find(payload.context_id)
        if context is None:
            return
        pass_id = payload.pass_id
        with self._lock:
            this: Pass | None = context.passes.get(pass_id)
            if sender != pass_id.root and not self._may_tell(sender, context, this):
                raise ProtocolError("it ended a pass that it neither began nor told this worker of")
            context.passes[pass_id] = None  # so that a late message does not bring it back
        if this is not None:
            self._abort(this, TelegradError(f"the pass was ended: {printable_lines(payload.reason)}"))

    @staticmethod
    def _may_tell(sender: int, context: Context, this: Pass | None) -> bool:
        """Whether that worker drew this one into a pass; or, if the pass is not known here yet, may do so."""
        if this is not None:
            return sender in this.told_by
        return any(send.to == sender for send in list(context.sends.values()))

    def _abort(self, this: Pass, error: TelegradError) -> None:
        """Ends this worker's part of a pass whose root needs no telling."""
        for worker in this.stop(error) - {self._me, this.id.root}:
            self._agent.send_message(worker, EndPass(this.id, this.context.id, str(error)))

    def _lost(self, worker: int) -> WorkerLostError:
        peer = self._agent.peer(worker)
        reason = f": {peer.reason}" if peer.reason else ""
        return WorkerLostError(f"worker {peer.name!r} was lost in a backward{reason}")

    def _worker_lost(self, worker: int) -> None:
        for context_id in self.registry.of_creator(worker):
            self.drop(context_id)
        for context in self.registry:
            if context.origin == worker:  # nobody would tell us of its end now: its creator must
                context.origin = context.creator
                self._agent.send_message(context.creator, TellMe(context.id))
            for this in [each for each in list(context.passes.values()) if each is not None]:
                if this.id.root == worker:
                    self._abort(this, self._lost(worker))
                elif this.waits_for(worker):
                    self._fail(this, self._lost(worker))

    # --- the end of a context -----------------------------------------------------------------------------------

    def leave(self, context: Context) -> None:
        self.drop(context.id)

    def drop(self, context_id: int, when_idle: bool = False, by: int | None = None) -> None:
        """Forgets a context here, and on all workers that this one told of it.  ``by``: see ``Registry.drop``."""
        context = self.registry.drop(context_id, by)
        if context is None:
            return
        _stop_passes(context)
        if context.graph is not None:
            self._bury(context)
        self._graveyard.visit()
        for worker in context.workers - {context.origin, self._me}:
            self._agent.send_message(worker, DropContext(context_id), lazily=when_idle)

    def _bury(self, context: Context) -> None:
        """A function of its own, as ``_stop_passes``: a variable with the tops would seem to use them."""
        taken = context.take_graph()
        if taken is not None:
            context.sends = {}
            self._graveyard.bury(*taken)

    def _on_tell_me(self, sender: int, payload: TellMe, _: Open) -> None:
        context = self.registry.find(payload.context_id)
        if context is not None:
            context.workers.add(sender)
        if context is None or context.ended:
            self._agent.send_message(sender, DropContext(payload.context_id))

    def _on_drop(self, sender: int, payload: DropContext, _: Open) -> None:
        self.drop(payload.context_id, when_idle=True, by=sender)  # this runs where it is read

    def _is_gone(self, worker: int) -> bool:
        return self._agent.peer(worker).state is not PeerState.KNOWN

    # --- seeing it ----------------------------------------------------------------------------------------------

    def _name(self, worker: int) -> str:
        return repr(self._agent.peer(worker).name)

    def passes(self) -> Iterable[Pass]:
        return [this for context in self.registry for this in list(context.passes.values()) if this is not None]


def _stop_passes(context: Context) -> None:
    """Ends what is left of them; a function of its own, for a pass in a variable would keep its part of the graph."""
    for this in list(context.passes.values()) if context.passes else ():
        if this is not None:
            this.stop(TelegradError(f"context {context.id} has ended"))
    context.passes.clear()
