"""How a context ends on every worker that it touched.

    DropContext   creator → all      the context has ended
    TellMe        anyone → creator   the worker that told the sender of the context is lost: tell it of the end

DropContext goes from each worker to those that it told of the context, so it reaches all that know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._agent.agent import Agent
from telegrad._wire.messages import DropContext, TellMe
from telegrad.autograd.context import Context, Registry
from telegrad.autograd.graph import BigGraphs
from telegrad.errors import TelegradError

Open = Callable[[], Any]


class ContextEnd:
    def __init__(self, agent: Agent, registry: Registry) -> None:
        self._agent = agent
        self._registry = registry
        self._graphs = BigGraphs()
        agent.on_message(DropContext, self._on_drop, quick=True)
        agent.on_message(TellMe, self._on_tell_me)

    def drop(self, context_id: int, by: int | None = None) -> None:
        """Forgets a context here, and on all workers that this one told of it.  ``by``: see ``Registry.drop``."""
        context = self._registry.drop(context_id, by)
        if context is None:
            return
        _stop_passes(context)
        if context.graph is not None:
            self._free(context)
        self._graphs.free_unused()
        for worker in context.workers - {context.origin, self._agent.me.worker_id}:
            self._agent.send_message(worker, DropContext(context_id))

    def _free(self, context: Context) -> None:
        """A function of its own, as ``_stop_passes``: a variable that refers to a node would keep it in use."""
        taken = context.take_graph()
        if taken is not None:
            context.sends = {}
            self._graphs.add(*taken)

    def _on_drop(self, sender: int, message: DropContext, _: Open) -> None:
        self.drop(message.context_id, by=sender)

    def _on_tell_me(self, sender: int, message: TellMe, _: Open) -> None:
        context = self._registry.find(message.context_id)
        if context is not None:
            context.workers.add(sender)
        if context is None or context.ended:
            self._agent.send_message(sender, DropContext(message.context_id))

    def worker_lost(self, worker: int) -> None:
        """Drops the contexts of a lost creator; asks the creators of those that it told this worker of."""
        for context_id in self._registry.of_creator(worker):
            self.drop(context_id)
        for context in self._registry:
            if context.origin == worker:
                context.origin = context.creator
                self._agent.send_message(context.creator, TellMe(context.id))


def _stop_passes(context: Context) -> None:
    for this in list(context.passes.values()) if context.passes else ():
        if this is not None:
            this.stop(TelegradError(f"context {context.id} has ended"))
    context.passes.clear()
