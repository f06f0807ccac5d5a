"""How a pass ends that cannot end well: an error on any worker, or the loss of one.

    PassFailed    anyone → root      why the pass cannot end well
    EndPass       root → all         drop what is left of the pass

The root raises the first error.  EndPass goes from each worker to those that it drew into the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._agent.failures import rebuild
from telegrad._text import printable_lines
from telegrad._wire.messages import EndPass, Failure, PassFailed
from telegrad.autograd.context import Registry
from telegrad.autograd.diagnostics import lost_in_backward
from telegrad.autograd.passes import Passes
from telegrad.errors import TelegradError

Open = Callable[[], Any]


class Failures:
    def __init__(self, agent: Agent, registry: Registry, passes: Passes) -> None:
        self._agent = agent
        self._registry = registry
        self._passes = passes
        agent.on_message(PassFailed, self._on_failed)
        agent.on_message(EndPass, self._on_end)

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
        context = self._registry.find(message.context_id)
        this = self._passes.mark_ended(sender, message.pass_id, context) if context is not None else None
        if this is not None:
            self._passes.abort(this, TelegradError(f"the pass was ended: {printable_lines(message.reason)}"))

    def worker_lost(self, worker: int) -> None:
        """Ends the passes whose root is lost, and fails those that wait for something from the lost worker."""
        for this in self._passes:
            if this.id.root == worker:
                self._passes.abort(this, lost_in_backward(self._agent, worker))
            elif this.waits_for(worker):
                this.fail(lost_in_backward(self._agent, worker))
