"""The graph of a context, as torch's C++ would show it.

telegrad has a node for each tensor that crosses, torch one for each message.  A view joins the nodes of a message, and
gives them torch's names; everything else in the graph is as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.autograd.functions import RecvRpc, SendRpc

_Edge = tuple[Any, int]


class NodeView:
    """One node of torch's graph, or those of one message."""

    def __init__(self, nodes: Sequence[Any], message: object = None, kind: str = "") -> None:
        self._nodes = tuple(nodes)
        self._message = message
        self._kind = kind

    def name(self) -> str:
        return f"torch::distributed::autograd::{self._kind}" if self._kind else self._nodes[0].name()

    @property
    def next_functions(self) -> tuple[_Edge, ...]:
        if self._kind == "RecvRpcBackward":
            return ()  # in torch, the graph of this worker ends here
        edges = [edge for node in self._nodes for edge in node.next_functions]
        return tuple(
            (view_of(node), index) for node, index in edges if node is not None or self._kind != "SendRpcBackward"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nodes[0], name)

    def __eq__(self, other: object) -> bool:
        mine = self._message if self._message is not None else self._nodes
        if isinstance(other, NodeView):
            return mine == (other._message if other._message is not None else other._nodes)
        return any(other is node for node in self._nodes)

    def __hash__(self) -> int:
        return hash(self._message if self._message is not None else self._nodes)

    def __repr__(self) -> str:
        return f"<{self.name()}>"


def view_of(node: Any) -> Any:
    if node is None:
        return None
    if is_recv(node):
        return NodeView([node], node.recv, "RecvRpcBackward")
    return NodeView([node])


def is_recv(node: Any) -> bool:
    return getattr(type(node), "_forward_cls", None) is RecvRpc


def send_view(message_id: int, parts: Sequence[Any]) -> NodeView:
    assert all(getattr(type(part), "_forward_cls", None) is SendRpc for part in parts)
    return NodeView(parts, message_id, "SendRpcBackward")


def recv_view(nodes: Sequence[Any]) -> NodeView:
    return NodeView(nodes, nodes[0].recv, "RecvRpcBackward")
