"""What other workers say of a pass.  Each message is an event of the pass, or ends it.

Gradients     recvs → sends      gradients that torch's engine computed there
Finished      sends → recvs      all that these caused is done (``termination``)
Discover      recv → send        this send is live            } only if
Explored      send → recv        all behind it is explored    } a worker
PlanWanted    anyone → root      start the wave               } needs the plan
PlanKnown     root → these       the wave has ended           } (``discovery``)
PassFailed    anyone → root      why the pass cannot end well; the root raises the first error
EndPass       root → all         drop what is left of the pass; from each worker to those that it drew in
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._agent.failures import rebuild
from telegrad._text import printable_lines
from telegrad._wire.messages import (
    Discover,
    EndPass,
    Explored,
    Failure,
    Finished,
    Gradients,
    PassFailed,
    PlanKnown,
    PlanWanted,
)
from telegrad.autograd.accumulate import Leaves
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.diagnostics import lost_in_backward
from telegrad.autograd.passes import Passes
from telegrad.autograd.run import Run, unpack
from telegrad.errors import TelegradError

Open = Callable[[], Any]

_EVENTS: dict[type[Any], Callable[..., None]] = {
    Finished: Pass.finished,
    Explored: Pass.explored,
    PlanWanted: Pass.plan_wanted,
    PlanKnown: Pass.plan_known,
}


class Handlers:
    def __init__(self, agent: Agent, passes: Passes, leaves: Leaves) -> None:
        self._agent = agent
        self._passes = passes
        self._leaves = leaves
        agent.on_message(Gradients, self._on_gradients)
        agent.on_message(Discover, self._on_discover)
        for kind in _EVENTS:
            agent.on_message(kind, self._on_event)
        agent.on_message(PassFailed, self._on_failed)
        agent.on_message(EndPass, self._on_end)

    def _on_gradients(self, sender: int, message: Gradients, open_value: Open) -> None:
        this = self._passes.join(sender, message.head, message.messages)
        if this is None:
            return
        try:
            # No variable refers to the tensors: a leaf may take one over if nothing else does.
            steps = this.step(this.came, sender, message, unpack(message.messages, open_value() or []))
        except BaseException as error:
            this.fail(error)
            return
        Run(self._agent, self._leaves, this).carry_out(steps)

    def _on_discover(self, sender: int, message: Discover, _: Open) -> None:
        if (this := self._passes.join(sender, message.head, message.sends)) is not None:
            Run(self._agent, self._leaves, this).carry_out(this.step(this.discovered, sender, message))

    def _on_event(self, sender: int, message: Any, _: Open) -> None:
        if (this := self._passes.find(message.pass_id)) is not None:
            steps = this.step(_EVENTS[type(message)], this, sender, message)
            Run(self._agent, self._leaves, this).carry_out(steps)

    def _on_failed(self, sender: int, message: PassFailed, open_value: Open) -> None:
        this = self._passes.find(message.pass_id)
        if this is None:
            return
        try:
            details = open_value()
        except TelegradError:
            details = None
        failure = Failure(0, message.worker, message.type_name, message.text, message.traceback)
        this.fail(rebuild(failure, details, self._agent.options.allow_pickle, self._agent.peer(sender).name))

    def _on_end(self, sender: int, message: EndPass, _: Open) -> None:
        this = self._passes.mark_ended(sender, message)
        if this is not None:
            self._passes.abort(this, TelegradError(f"the pass was ended: {printable_lines(message.reason)}"))

    def worker_lost(self, worker: int) -> None:
        """Ends the passes whose root is lost, and fails those that wait for something from the lost worker."""
        for this in self._passes:
            if this.id.root == worker:
                self._passes.abort(this, lost_in_backward(self._agent, worker))
            elif this.waits_for(worker):
                this.fail(lost_in_backward(self._agent, worker))
