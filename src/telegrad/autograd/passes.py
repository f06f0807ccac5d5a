"""The passes that a worker takes part in.  They are kept in their contexts, and end with these."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._agent.agent import Agent
from telegrad._agent.failures import failure_of
from telegrad._ids import PassId, random_bits
from telegrad._wire.messages import EndPass, PassFailed, PassHead
from telegrad._wire.values import PACKED_NONE
from telegrad.autograd.backward_pass import Pass
from telegrad.autograd.context import Context, Registry
from telegrad.errors import ProtocolError, TelegradError

_TOKEN_BITS = 63


class Passes:
    def __init__(self, agent: Agent, registry: Registry) -> None:
        self._agent = agent
        self._me = agent.me.worker_id
        self._registry = registry
        self._numbers = itertools.count(1)
        self._running: set[int] = set()  # the numbers of the passes that this worker is the root of
        self._lock = threading.Lock()

    def begin(
        self,
        context: Context,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        retain_graph: bool,
        create_graph: bool,
        fast: bool,
        timeout: float,
    ) -> Pass:
        """A new pass, which this worker is the root of."""
        with self._lock:
            number = next(self._numbers)
            self._running.add(number)
            floor = min(self._running)
        pass_id = PassId(self._me, number, random_bits(_TOKEN_BITS))
        head = PassHead(pass_id, context.id, retain_graph, create_graph, fast, floor)
        this = Pass(self._me, head, context, self.name_of, self._tell_root, roots, gradients, timeout)
        context.passes[pass_id] = this
        return this

    def end(self, this: Pass) -> None:
        """On the root, ``backward`` returns: after a failure, the other workers drop what is left of the pass."""
        this.context.passes.pop(this.id, None)
        with self._lock:
            self._running.discard(this.id.number)
        if this.error is not None:
            self._end_elsewhere(this, this.drawn_in - {self._me}, this.error)

    def join(self, sender: int, head: PassHead, messages: Iterable[Sequence[Any]]) -> Pass | None:
        """The pass of a message that came, made if it is new here; None if it has failed, or its context has ended.

        ``messages`` begin with the ids of messages of this worker.  They must have gone to the sender: only the worker
        that received a tensor may give it a gradient.
        """
        pass_id, root = head.pass_id, head.pass_id.root
        context = self._registry.find(head.context_id)
        if context is None:
            self._tell_root(pass_id, TelegradError(f"context {head.context_id} has ended on this worker"))
            return None
        for message_id, *_ in messages:
            send = context.sends.get(message_id)
            if send is None or send.to != sender:
                raise ProtocolError(f"it sent a gradient for message {message_id}, which did not go to it")
        known: Pass | None = context.passes.get(pass_id)
        if known is None and root != self._me:  # on the root, an unknown pass is one that has ended
            self._agent.peer(root)  # raises if there is no such worker, which could end the pass
            with self._lock:
                floor = context.floors[root] = max(head.floor, context.floors.get(root, 0))
                ended = [old for old in list(context.passes) if old.root == root and old.number < floor]
                failed = [context.passes.pop(old, None) for old in ended]
                if pass_id.number >= floor and pass_id not in context.passes:
                    context.passes[pass_id] = Pass(self._me, head, context, self.name_of, self._tell_root)
                known = context.passes.get(pass_id)
            for each in failed:
                if each is not None and each.local.is_at_work:  # it has failed, and the EndPass is still on its way
                    self.abort(each, TelegradError("the pass was ended: its root has begun another"))
        if known is not None:
            known.drawn_in_by.add(sender)
        return known

    def mark_ended(self, sender: int, message: EndPass) -> Pass | None:
        """A worker says that a pass has failed; from now on a late message does not bring it back.

        Only its root may say so, and a worker that drew this one into it, or that may do so if it is not known here.
        """
        context, pass_id = self._registry.find(message.context_id), message.pass_id
        if context is None:
            return None
        with self._lock:
            this: Pass | None = context.passes.get(pass_id)
            may_draw_in = {send.to for send in list(context.sends.values())} if this is None else this.drawn_in_by
            if sender != pass_id.root and sender not in may_draw_in:
                raise ProtocolError("it ended a pass that it neither began nor drew this worker into")
            context.passes[pass_id] = None
        return this

    def abort(self, this: Pass, error: TelegradError) -> None:
        """Ends the pass on this worker and on those that it drew in.  The root knows, or is lost."""
        self._end_elsewhere(this, this.stop(error) - {self._me, this.id.root}, error)

    def _end_elsewhere(self, this: Pass, workers: Iterable[int], error: BaseException) -> None:
        for worker in workers:
            self._agent.send_message(worker, EndPass(this.id, this.context.id, str(error)))

    def _tell_root(self, pass_id: PassId, error: BaseException) -> None:
        """Says why a pass cannot end well."""
        root = self._agent.peer(pass_id.root)
        details: list[Any] = []

        def pack(value: Any) -> Any:
            details.append(value)
            return PACKED_NONE

        failure, _ = failure_of(error, 0, self._agent.me.name, pack, tells_where=self._agent.options.allow_pickle)
        message = PassFailed(pass_id, failure.worker, failure.type_name, failure.text, failure.traceback)
        try:
            self._agent.send_message(root.id, message, details[0] if details else None)
        except Exception:  # a detail of the exception cannot be sent
            self._agent.send_message(root.id, message)

    def find(self, pass_id: PassId) -> Pass | None:
        for context in self._registry:
            found: Pass | None = context.passes.get(pass_id)
            if found is not None:
                return found
        return None

    def name_of(self, worker: int) -> str:
        return repr(self._agent.peer(worker).name)

    def __iter__(self) -> Iterator[Pass]:
        for context in self._registry:
            yield from [this for this in list(context.passes.values()) if this is not None]
