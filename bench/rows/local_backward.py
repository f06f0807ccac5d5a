"""The backward pass of a graph that never leaves its worker: what a context costs where it is not needed."""

from __future__ import annotations

from torch import Tensor

from bench.library import Library
from bench.row import Near, Plan, Row, WrongReplyError
from bench.rows.graphs import NODES, expected, make_graph
from bench.rows.passes import BackwardOnly, Gradients, Task, same

__all__ = ["LOCAL_BACKWARD", "LocalGraph"]


class LocalGraph(Task):
    """A fresh graph for each pass."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._leaves: list[Tensor] = []

    def forward(self, index: int) -> Tensor:
        graph = make_graph(self._nodes, index)
        self._leaves = graph.leaves
        return graph.loss

    def verify(self, index: int, gradients: Gradients) -> None:
        if len(gradients) != len(self._leaves):
            raise WrongReplyError(f"pass {index}: {len(gradients)} gradients for {len(self._leaves)} leaves")
        for leaf, right in zip(self._leaves, expected(self._nodes, index), strict=True):
            same(gradients.get(leaf), right, f"pass {index}")


def _case(library: Library, peer: str) -> BackwardOnly:
    return BackwardOnly(library, LocalGraph(NODES))


LOCAL_BACKWARD = Row(
    name="local_backward",
    title=f"backward of {NODES:,} nodes",
    case=_case,
    plan=Plan(warmup=3, samples=20),
    quick=Plan(warmup=1, samples=3),
    near=Near("plain_backward", floor=1.3),
    modes=True,
)
