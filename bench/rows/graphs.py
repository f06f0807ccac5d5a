"""Graphs of any number of nodes on one worker, and the right gradients of them.

All values are 1 or -1, so products stay so however deep the graph is, and every gradient is a sum of ones: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["NODES", "Graph", "expected", "make_graph"]

NODES = 1600
_LEAVES = 4
_DISTINCT = 2
"""Graphs with different gradients are made in turn."""
_ENDS = 2 * _LEAVES
"""Nodes besides those of the strands: one for each leaf, and the sums of the strands and of their elements."""


@dataclass(frozen=True)
class Graph:
    """``loss`` is a scalar that depends on all leaves."""

    loss: Tensor
    leaves: list[Tensor]


def make_graph(nodes: int, index: int) -> Graph:
    """Four strands and their sum: each takes turns between a product, with every leaf in turn, and a negation."""
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0 - 2.0 * (index % _DISTINCT)], dtype=torch.float64)
    leaves = [signs.roll(turn).requires_grad_() for turn in range(_LEAVES)]
    strands = list(leaves)
    for step in range(nodes - _ENDS):
        turn, strand = divmod(step, _LEAVES)
        strands[strand] = -strands[strand] if turn % 2 else strands[strand] * leaves[(strand + turn // 2) % _LEAVES]
    total = strands[0]
    for other in strands[1:]:
        total = total + other
    return Graph(total.sum(), leaves)


def expected(nodes: int, index: int) -> tuple[Tensor, ...]:
    """The gradients of that graph, by torch alone."""
    return _gradients(nodes, index % _DISTINCT)


@lru_cache(maxsize=64)
def _gradients(nodes: int, index: int) -> tuple[Tensor, ...]:
    graph = make_graph(nodes, index)
    return torch.autograd.grad(graph.loss, graph.leaves)
