"""Where autograd sees messages: one interceptor for the tensors that go out, and one for those that come in.

Such a message carries ``[context id, message id, indices of the tensors that need a gradient]``.  A request inside a
context always carries it, since what the callee computes with its own parameters may need a gradient; without such
tensors the message id is 0.  Outside of a context, a message with a tensor that has a history has the context id -1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad._agent.agent import Agent
from telegrad._agent.peers import PeerState
from telegrad._torch import mark_as_parameter
from telegrad.autograd.context import Context, Registry, Scope, Send, creator_of, current_context
from telegrad.autograd.functions import Recv, receive, send_node
from telegrad.autograd.missing_context import thread_warning_given, warn_of_result, warn_of_thread
from telegrad.errors import ProtocolError

NO_MESSAGE = 0
NO_CONTEXT = -1  # a tensor of the message has a history, but the sending thread was in no context


class Interceptors:
    def __init__(self, agent: Agent, registry: Registry) -> None:
        self._agent = agent
        self._registry = registry
        # They grow in the order of sending, on which a pass relies (``local_pass``).
        self._message_ids = itertools.count(1)

    def outgoing(self, to: int, tensors: list[Tensor]) -> Any:
        context = current_context()
        if not torch.is_grad_enabled():
            return None
        if context is None:
            return self._outgoing_outside(to, tensors) if tensors else None
        # In this order: the thread that ends the context does it the other way round, so one sees the other.
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
                # Before it is sent: when it has arrived, another call may change these tensors in place.
                parts.append(send_node(message_id, len(parts), tensor))
                indices.append(index)
        if parts:
            context.sends[message_id] = Send(message_id, to, tuple(parts))
        return [context.id, message_id, indices]

    def _outgoing_outside(self, to: int, tensors: list[Tensor]) -> Any:
        indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if not indices:
            return None
        if not thread_warning_given() and self._registry.has_own and not self._agent.serves_here():
            warn_of_thread(self._agent.peer(to).name)
        return None if all(tensors[index].is_leaf for index in indices) else [NO_CONTEXT, NO_MESSAGE, indices]

    def answered(self, sender: int, extra: Any) -> None:
        """Warns if the answer of a call has lost its history."""
        if extra[0] == NO_CONTEXT and torch.is_grad_enabled():
            lost_by_thread = self._registry.has_own and not self._agent.serves_here()
            (warn_of_thread if lost_by_thread else warn_of_result)(self._agent.peer(sender).name)

    def incoming(self, sender: int, extra: Any, tensors: list[Tensor]) -> Scope | None:
        """Gives tensors that need a gradient a recv; in a context that has ended, makes them leaves."""
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
                    all_on_cpu = _receive_all(recv, tensors, indices)
                else:
                    with torch.enable_grad():  # grad mode is that of the sender
                        all_on_cpu = _receive_all(recv, tensors, indices)
                context.uses_device |= not all_on_cpu
                context.recvs += 1
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(
                f"malformed autograd metadata in a message from worker {self._agent.peer(sender).name!r}: expected "
                f"[context id, message id, tensor indices], got {extra!r}"
            ) from error
        return Scope(context)

    def _join(self, context_id: int, sender: int) -> Context | None:
        """A context that is new here; None if it has ended."""
        gone = self._is_gone(creator_of(context_id))  # raises if no worker of this job has that id
        context = self._registry.join(context_id, sender)
        if context is not None and (gone or self._is_gone(sender) or self._is_gone(context.creator)):
            self._registry.forget(context_id)  # no worker would tell this one of its end
            return None
        return context

    def _is_gone(self, worker: int) -> bool:
        return self._agent.peer(worker).state is not PeerState.KNOWN


def _make_leaves(tensors: list[Tensor], indices: Sequence[int]) -> None:
    for index in indices:
        try:
            tensors[index].requires_grad_()
        except RuntimeError as error:
            raise ValueError(f"tensor {index} cannot have a gradient: {error}") from error


def _receive_all(recv: Recv, tensors: list[Tensor], indices: Sequence[int]) -> bool:
    """Whether all of them are on the CPU."""
    all_on_cpu = True
    for part, index in enumerate(indices):
        tensor = tensors[index]
        received = tensors[index] = receive(recv, part, tensor)
        if type(tensor) is not Tensor and isinstance(tensor, torch.nn.Parameter):
            mark_as_parameter(received)
        all_on_cpu = all_on_cpu and tensor.is_cpu
    return all_on_cpu
