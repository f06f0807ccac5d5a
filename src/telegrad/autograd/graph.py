"""Reading torch's graph: what a worker's sources reach, and which of them meet.

A *source* is where gradients come in: the roots of a backward, or a message that was sent.  Sources that reach a
common node form one *unit*, since that node must run once, with the sum of their gradients.  A leaf adds gradients up
as they come, so it does not join sources, unless it has a hook, which must see the whole sum.

Every pass walks its graph, at about 1 us a node, so the walk is one loop without calls, except for a leaf that two
sources share.

torch frees a long chain of nodes in a loop, but not after Python has seen them: then each node frees the next inside
its own destructor, and a chain of about 20,000 overflows the stack.  So the nodes of a big graph are
kept, and freed one by one (:class:`BigGraphs`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from telegrad._torch import post_accumulate_hooks, sequence_number, tensor_hooks
from telegrad.autograd.functions import ANCHOR, RECV_NODE, SEND_NODE, Recv

Edge = tuple[Node | None, int]

ACCUMULATE = type(get_gradient_edge(ANCHOR).node)
_RECEIVE: Any = RECV_NODE
_SEND: Any = SEND_NODE
_FEW = 4_000  # nodes of a small graph


@dataclass(eq=False, slots=True)
class Unit:
    """Sources that meet, and what they reach."""

    sources: list[int]
    leaves: list[Node] = field(default_factory=list)
    recvs: dict[Recv, set[int]] = field(default_factory=dict)  # with the parts that are reached
    nodes: list[Node] = field(default_factory=list)  # all others; of a big graph only if sources meet
    recvs_last: bool = False  # the graph is small, and torch's engine comes to the recvs last: they are the oldest


def survey(sources: Sequence[tuple[int, Iterable[Edge]]]) -> tuple[list[Unit], Collection[Node]]:
    """The units of these sources, each given as its id and the edges at which its gradients enter; and all nodes.

    Leaves are not among the nodes.  The nodes may be kept for long, and a leaf's node must not be alive only because
    Python refers to it: then torch waits for the GIL while it holds the leaf's lock, and another thread may do it the
    other way round.
    """
    owner: dict[Node, int] = {}  # by node: the source that reached it first
    taker: dict[Recv, int] = {}  # by message, whose gradients go together
    holder: dict[Node, int] = {}  # by leaf, at which sources meet only if it has a hook
    meetings: list[tuple[int, int]] = []
    units: list[Unit] = []
    for index, (source, edges) in enumerate(sources):
        leaves: set[Node] = set()
        recvs: dict[Recv, set[int]] = {}
        nodes: list[Node] = []  # that no source reached before
        todo = list(edges)
        while todo:
            node: Any = todo.pop()[0]
            if node is None:
                continue
            kind = type(node)
            if kind is ACCUMULATE:
                if node not in leaves:
                    leaves.add(node)
                    first = holder.setdefault(node, index)
                    if first != index and has_hooks(node):
                        meetings.append((first, index))
                continue
            known = owner.get(node)
            if known is None:
                owner[node] = index
                nodes.append(node)
                if kind is not _RECEIVE:
                    todo.extend(node.next_functions)
                    continue
            elif kind is not _RECEIVE:
                if known != index:
                    meetings.append((known, index))
                continue
            recvs.setdefault(node.recv, set()).add(node.part)
            first = taker.setdefault(node.recv, index)
            if first != index:
                meetings.append((first, index))
        units.append(Unit([source], list(leaves), recvs, nodes))
    if meetings:
        units = _joined(units, meetings)
    is_small = len(owner) <= _FEW
    for unit in units:
        if is_small:
            recvs_made = [sequence_number(node) for node in unit.nodes if type(node) is _RECEIVE]
            others_made = [sequence_number(node) for node in unit.nodes if type(node) not in (_RECEIVE, _SEND)]
            unit.recvs_last = not recvs_made or not others_made or max(recvs_made) < min(others_made)
        elif len(unit.sources) == 1:
            unit.nodes = []
    return units, owner


def _joined(alone: Sequence[Unit], meetings: Iterable[tuple[int, int]]) -> list[Unit]:
    """Joins the units of sources that meet."""
    parent = list(range(len(alone)))
    for one, other in meetings:
        parent[_find(parent, one)] = _find(parent, other)
    units: dict[int, Unit] = {}
    known: dict[int, set[Node]] = {}  # the leaves of each unit
    for index, each in enumerate(alone):
        first = _find(parent, index)
        if first not in units:
            units[first], known[first] = each, set(each.leaves)
            continue
        unit, leaves = units[first], known[first]
        unit.sources += each.sources
        unit.leaves += [leaf for leaf in each.leaves if leaf not in leaves]
        leaves.update(each.leaves)
        unit.nodes += each.nodes
        for recv, parts in each.recvs.items():
            unit.recvs.setdefault(recv, set()).update(parts)
    return list(units.values())


def _find(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def takes_as_it_is(leaf: Any, gradient: Tensor) -> bool:
    """Whether a leaf takes a gradient that enters right at it unchanged.  Otherwise torch casts it, or raises."""
    variable = leaf.variable
    return variable.dtype is gradient.dtype and variable.device == gradient.device and not has_hooks(leaf)


def has_hooks(leaf: Any) -> bool:
    variable = leaf.variable
    return bool(tensor_hooks(variable)) or bool(post_accumulate_hooks(variable))


def walk(edges: Iterable[Edge], seen: set[Node] | None = None) -> Iterator[Any]:
    """The nodes that these edges lead to, down to leaves and recvs, without those that were ``seen``."""
    seen = set() if seen is None else seen
    todo = list(edges)
    while todo:
        node: Any = todo.pop()[0]
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if type(node) is not _RECEIVE:
            todo.extend(node.next_functions)


class Explorer:
    """What the live sources reach, as they become known one after the other."""

    def __init__(self) -> None:
        self.reached: dict[Recv, set[int]] = {}  # and which of their tensors
        self._seen: set[Node] = set()

    def explore(self, edges: Iterable[Edge]) -> dict[Recv, set[int]]:
        """Follows these edges; returns the recvs, and tensors of them, that were not known to be reached."""
        new: dict[Recv, set[int]] = {}
        for node in walk(edges, self._seen):
            if type(node) is _RECEIVE:
                self.reached.setdefault(node.recv, set()).add(node.part)
                new.setdefault(node.recv, set()).add(node.part)
        return new


DEEP = 4_000  # nodes: a smaller graph can be left to torch
_UNUSED = 3  # references to a node that only ``BigGraphs`` has: its set, a variable, and the argument of getrefcount
_UNUSED_TOP = _UNUSED + 1  # and the set of tops


class BigGraphs:
    """Big graphs whose contexts have ended.  Each is freed from its top, node by node, as far as nothing uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: list[tuple[set[Node], set[Node]]] = []

    def add(self, tops: Iterable[Node], nodes: set[Node]) -> None:
        """The caller keeps no reference to ``nodes``."""
        with self._lock:
            self._graphs.append((nodes.intersection(tops), nodes))

    def free_unused(self) -> None:
        if not self._graphs:
            return
        with self._lock:
            self._graphs = [(tops, nodes) for tops, nodes in self._graphs if _free_from_top(tops, nodes)]

    def __len__(self) -> int:
        return sum(len(nodes) for _, nodes in self._graphs)


def _free_from_top(tops: set[Node], nodes: set[Node]) -> bool:
    """Frees each node after all those above it; returns whether some are left, which something else uses."""
    if all(sys.getrefcount(top) > _UNUSED_TOP for top in tops):
        return True
    above = _count_above(nodes)
    todo = [top for top in tops if not above.get(id(top))]
    node: Any
    child: Any
    while todo:
        node = todo.pop()
        tops.discard(node)
        if node not in nodes:
            continue
        if sys.getrefcount(node) > _UNUSED:
            tops.add(node)  # in use: the next time goes on from here
            continue
        nodes.discard(node)
        for child, _ in node.next_functions:
            if child in nodes:
                above[id(child)] -= 1
                if not above[id(child)]:
                    todo.append(child)
        child = node = None  # these count as uses; a leaf's node first, which Python alone must not keep alive
    return bool(nodes)


def _count_above(nodes: set[Node]) -> dict[int, int]:
    """By the id of a node, how many edges lead to it from the others."""
    above = dict.fromkeys(map(id, nodes), 0)
    for node in nodes:
        for child, _ in node.next_functions:
            if child in nodes:
                above[id(child)] += 1
    return above
