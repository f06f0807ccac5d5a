"""The two points at which autograd touches a message: one that goes out, and one that comes in.

What travels is ``[context id, message id, which tensors of the body]``.  A request carries its context always, for
what the callee computes with its own parameters may need a gradient; a message without such tensors has the id 0.
Outside of a context, a message with a tensor that had a history has the context id -1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad._torch import mark_as_parameter
from telegrad.autograd.context import Context, Registry, Scope, Send, creator_of, current_context
from telegrad.autograd.functions import Recv, receive, send_node
from telegrad.autograd.missing_context import thread_warning_given, warn_of_result, warn_of_thread
from telegrad.errors import ProtocolError

NO_MESSAGE = 0
NO_CONTEXT = -1  # a tensor of this message had a history, but the thread that sent it was in no context


class Interceptors:
    def __init__(
        self,
        registry: Registry,
        is_gone: Callable[[int], bool],
        name_of: Callable[[int], str],
        runs_requests: Callable[[], bool],
    ) -> None:
        """``runs_requests``: whether the calling thread is one that runs the requests of other workers."""
        self._registry = registry
        self._is_gone = is_gone
        self._name_of = name_of
        self._runs_requests = runs_requests
        # In the order of sending, which a pass relies on: see ``local_pass``.
        self._message_ids = itertools.count(1)

    def outgoing(self, to: int, tensors: list[Tensor]) -> Any:
        context = current_context()
        if not torch.is_grad_enabled():
            return None
        if context is None:
            return self._outgoing_outside(to, tensors)
        # First this and then that look: whoever ends the context does it the other way round, so one sees the other.
        context.workers.add(to)
        if context.ended:
            return None
        message_id = NO_MESSAGE
        indices: list[int] = []
        parts: list[Node] = []
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                if not indices:
                    message_id = next(self._message_ids)
                # Before it leaves: once it has come, another call may change these tensors in place.
                parts.append(send_node(message_id, len(parts), tensor))
                indices.append(index)
        if parts:
            context.sends[message_id] = Send(message_id, to, tuple(parts))
        return [context.id, message_id, indices]

    def _outgoing_outside(self, to: int, tensors: list[Tensor]) -> Any:
        indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if not indices:
            return None
        if not thread_warning_given() and self._registry.has_own and not self._runs_requests():
            warn_of_thread(self._name_of(to))
        return None if all(tensors[index].is_leaf for index in indices) else [NO_CONTEXT, NO_MESSAGE, indices]

    def answered(self, sender: int, extra: Any) -> None:
        """The answer of a call was opened: warns if its history was lost."""
        if extra[0] == NO_CONTEXT and torch.is_grad_enabled():
            if self._registry.has_own and not self._runs_requests():
                warn_of_thread(self._name_of(sender))
            else:
                warn_of_result(self._name_of(sender))

    def incoming(self, sender: int, extra: Any, tensors: list[Tensor]) -> Scope | None:
        """Replaces the tensors that need a gradient by such with a history; in a context that has ended, by leaves."""
        try:
            context_id, message_id, indices = extra
            if type(context_id) is not int or type(message_id) is not int:
                raise TypeError
            context = self._registry.find(context_id)
            if context is None and context_id != NO_CONTEXT:
                context = self._join(context_id, sender)
            if context is None:
                if torch.is_grad_enabled():
                    _make_leaves(tensors, indices)
                return None
            if message_id != NO_MESSAGE:
                recv = Recv(context_id, sender, message_id)
                if torch.is_grad_enabled():
                    _receive_all(recv, tensors, indices)
                else:
                    with torch.enable_grad():  # it was asked for with gradients on; where it is opened says nothing
                        _receive_all(recv, tensors, indices)
                context.recvs += 1
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"a message speaks of its context in a way that makes no sense: {extra!r}") from error
        return Scope(context)

    def _join(self, context_id: int, sender: int) -> Context | None:
        """A context that came here for the first time; None if it has ended meanwhile."""
        gone = self._is_gone(creator_of(context_id))  # first: it raises if no worker of this job can have made it
        context = self._registry.join(context_id, sender)
        if context is not None and (gone or self._is_gone(sender) or self._is_gone(context.creator)):
            self._registry.forget(context_id)  # a call that waited for long: nobody would tell us of its end
            return None
        return context


def _make_leaves(tensors: list[Tensor], indices: Sequence[int]) -> None:
    for index in indices:
        try:
            tensors[index].requires_grad_()
        except RuntimeError as error:
            raise ValueError(f"tensor {index} cannot have a gradient: {error}") from error


def _receive_all(recv: Recv, tensors: list[Tensor], indices: Sequence[int]) -> None:
    for part, index in enumerate(indices):
        tensor = tensors[index]
        received = tensors[index] = receive(recv, part, tensor)
        if type(tensor) is not Tensor and isinstance(tensor, torch.nn.Parameter):
            mark_as_parameter(received)
