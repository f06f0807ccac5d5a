"""The messages of a pass that other workers send: each is an event of the pass.

    Gradients     recvs → sends      gradients that torch's engine computed there
    Finished      sends → recvs      all that these caused is done (``termination``)
    Discover      recv → send        this send is live            } only if
    Explored      send → recv        all behind it is explored    } a worker
    PlanWanted    anyone → root      start the wave               } needs the plan
    PlanKnown     root → these       the wave has ended           } (``discovery``)

``failure`` handles PassFailed and EndPass, ``context_end`` DropContext and TellMe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._wire.messages import Discover, Explored, Finished, Gradients, PlanKnown, PlanWanted
from telegrad.autograd.backward_pass import Pass, Steps
from telegrad.autograd.passes import Passes
from telegrad.autograd.run import unpack
from telegrad.errors import ProtocolError

Open = Callable[[], Any]


class Handlers:
    """``carry_out`` sends the messages and runs the units that follow from an event."""

    def __init__(self, agent: Agent, passes: Passes, carry_out: Callable[[Pass, Steps], None]) -> None:
        self._passes = passes
        self._carry_out = carry_out
        agent.on_message(Gradients, self._on_gradients)
        agent.on_message(Finished, self._on_finished)
        agent.on_message(Discover, self._on_discover)
        agent.on_message(Explored, self._on_explored)
        agent.on_message(PlanWanted, self._on_plan_wanted)
        agent.on_message(PlanKnown, self._on_plan_known)

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
        self._carry_out(this, steps)

    def _on_finished(self, sender: int, message: Finished, _: Open) -> None:
        if (this := self._passes.find(message.pass_id)) is not None:
            self._carry_out(this, this.step(this.finished, sender, message))

    def _on_discover(self, sender: int, message: Discover, _: Open) -> None:
        if (this := self._passes.join(sender, message.head, message.sends)) is not None:
            self._carry_out(this, this.step(this.discovered, sender, message))

    def _on_explored(self, sender: int, message: Explored, _: Open) -> None:
        if (this := self._passes.find(message.pass_id)) is not None:
            self._carry_out(this, this.step(this.explored, sender, message))

    def _on_plan_wanted(self, sender: int, message: PlanWanted, _: Open) -> None:
        if (this := self._passes.find(message.pass_id)) is not None:
            if not this.is_root:
                raise ProtocolError("it asked for the plan of a pass whose root is another worker")
            self._carry_out(this, this.step(this.plan_wanted, sender))

    def _on_plan_known(self, sender: int, message: PlanKnown, _: Open) -> None:
        if (this := self._passes.find(message.pass_id)) is not None:
            if sender != message.pass_id.root:
                raise ProtocolError("it ended the discovery of a pass whose root is another worker")
            self._carry_out(this, this.step(this.plan_known))
