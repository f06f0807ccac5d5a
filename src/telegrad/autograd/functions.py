"""The two ends of a tensor that crosses workers, as nodes of torch's graph.

A *send* is a node above the tensor that was sent.  torch's engine starts there, and the node returns the gradient that
came from the other worker; it waits if the gradient has not come.  A *recv* is the node below the tensor that was
received.  When the engine runs it, the gradient is complete and all hooks have fired, and the node hands the gradient
over to be sent to the send at the other end.

    sender                                   receiver
        x ◀── SendRpc   ◀ ─ ─ gradient ─ ─   RecvRpc ◀── y = f(x)

A node finds the run that called the engine in ``here``, since nodes on the CPU run on the thread that called.  Nodes of
a device run on that device's thread, and those of an engine call inside of another may run on one of torch's: they find
it through torch's graph task (``_torch.carried_by_engine``).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad._torch import carried_by_engine, is_view
from telegrad.errors import UsageError


class Recv(NamedTuple):
    """Where a received tensor came from."""

    context_id: int
    sender: int
    message_id: int


class EngineCall(Protocol):
    """One call of torch's engine, as seen by the nodes that it runs."""

    def gradient_for(self, message_id: int, part: int) -> Tensor | None:
        """Returns the gradient of a sent tensor; waits for it if it has not come."""

    def emit(self, recv: Recv, part: int, gradient: Tensor | None) -> None:
        """Takes the gradient of a received tensor, to be sent with those of the same message."""


class _Here(threading.local):
    """A ``threading.local``, and no ``ContextVar``: a copy of a context may be entered on another thread, or later."""

    call: EngineCall | None = None  # the innermost that the calling thread has made and not ended


here = _Here()

_EMPTY = torch.empty(())


class SendRpc(torch.autograd.Function):
    """One tensor of one message that was sent.  The output exists only to have the node."""

    @staticmethod
    def forward(ctx: Any, message_id: int, part: int, tensor: Tensor) -> Tensor:
        ctx.sent = message_id, part
        return _EMPTY.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        call: EngineCall | None = carried_by_engine() or here.call
        assert call is not None, "a send is a root of telegrad's own engine calls only"
        return None, None, call.gradient_for(*ctx.sent)


class RecvRpc(torch.autograd.Function):
    """One tensor of one message that was received.  Each has a node: torch fires the hooks of all outputs of a node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recv: Recv, part: int, tensor: Tensor) -> Tensor:
        ctx.recv, ctx.part = recv, part
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)  # so that torch returns this very tensor: a view of it could not be changed in place
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        call: EngineCall | None = carried_by_engine() or here.call
        if call is None:
            raise UsageError(
                "this tensor came from another worker, so a plain backward() ends here: call "
                f"telegrad.autograd.backward({ctx.recv.context_id}, [loss]) inside the context, not loss.backward()"
            )
        call.emit(ctx.recv, ctx.part, gradient)
        return None, None, None, None


_apply_send: Any = SendRpc.apply  # untyped in torch
_apply_recv: Any = RecvRpc.apply

#: An input of every recv: it makes torch record the node, and asking for its gradient makes torch run the node.
ANCHOR = torch.zeros((), requires_grad=True)


def send_node(message_id: int, part: int, tensor: Tensor) -> Node:
    """Records that a tensor is sent; returns the node from which its gradient will flow.

    The AccumulateGrad node of a leaf is made first, by an operation that does not hold the GIL, and kept alive until
    ``apply`` has returned.  ``apply`` would make it while it holds the GIL, and torch deadlocks when another thread
    does the same at that moment.
    """
    keep = tensor.view_as(tensor) if tensor.is_leaf and tensor.layout is torch.strided else None
    sent: Tensor = _apply_send(message_id, part, tensor)
    node = sent.grad_fn
    del keep
    assert node is not None
    return node


def receive(recv: Recv, part: int, tensor: Tensor) -> Tensor:
    """Records that a tensor was received."""
    if tensor.requires_grad or is_view(tensor):
        # Neither a leaf nor a view can be marked as changed.  ``data``, and not ``detach``, which would be a view too.
        tensor = tensor.data
    received: Tensor = _apply_recv(ANCHOR, recv, part, tensor)
    return received


#: The types of the two nodes in torch's graph.
SEND_NODE: type[Node] = type(send_node(0, 0, ANCHOR))
RECV_NODE: type[Any] = type(receive(Recv(0, 0, 0), 0, torch.zeros(())).grad_fn)
