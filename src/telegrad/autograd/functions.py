"""The two ends of a tensor's way between workers, as nodes of torch's graph.

A *send* is a node above the tensor that was sent: torch's engine starts there, and the node hands it the gradient that
came from the other side, waiting for it if need be.  A *recv* is the node below the tensor that was received: when the
engine runs it, the gradient is complete, all hooks have fired, and it leaves for the send at the other end.

    sender                                   receiver
        x ◀── SendRpc   ◀ ─ ─ gradient ─ ─   RecvRpc ◀── y = f(x)
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad._torch import is_view
from telegrad.errors import UsageError


class Recv(NamedTuple):
    """Where a received tensor came from."""

    context_id: int
    sender: int
    message_id: int


class Run(Protocol):
    """One call of torch's engine, as the nodes that it runs see it."""

    def gradient_for(self, message_id: int, part: int) -> Tensor | None:
        """Waits for the gradient of a sent tensor."""

    def emit(self, recv: Recv, part: int, gradient: Tensor | None) -> None:
        """Sends the gradient of a received tensor on its way, with those of the same message."""


class _Here(threading.local):
    run: Run | None = None


#: The run that the calling thread drives.
here = _Here()

_EMPTY = torch.empty(())


class SendRpc(torch.autograd.Function):
    """One tensor of one message that went out.  The output is only there to name the node."""

    @staticmethod
    def forward(ctx: Any, message_id: int, part: int, tensor: Tensor) -> Tensor:
        ctx.sent = message_id, part
        return _EMPTY.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run = here.run
        assert run is not None, "a send is a root of telegrad's own passes only"
        return None, None, run.gradient_for(*ctx.sent)


class RecvRpc(torch.autograd.Function):
    """One tensor of one message that came in.  A node for each: torch fires the hooks of all outputs of a node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recv: Recv, part: int, tensor: Tensor) -> Tensor:
        ctx.recv, ctx.part = recv, part
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)  # so that torch returns the very tensor: a view of it could not be changed in place
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        run = here.run
        if run is None:
            raise UsageError(
                "this tensor came from another worker, so a plain backward() ends here: call "
                f"telegrad.autograd.backward({ctx.recv.context_id}, [loss]) inside the context, not loss.backward()"
            )
        run.emit(ctx.recv, ctx.part, gradient)
        return None, None, None, None


_apply_send: Any = SendRpc.apply  # untyped in torch
_apply_recv: Any = RecvRpc.apply

#: The input of every recv: it makes torch record the node, and asking for its gradient makes torch run it.
ANCHOR = torch.zeros((), requires_grad=True)


def send_node(message_id: int, part: int, tensor: Tensor) -> Node:
    """Records that a tensor is sent; the node from which its gradient will flow.

    A leaf's own node is made first, by an operation, which does not hold the GIL, and kept alive meanwhile: ``apply``
    would make it with the GIL in its hands, and torch deadlocks when another thread does the same at that moment.
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
