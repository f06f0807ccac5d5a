"""What sources reach and which of them meet, against the plainest computation of the same, on random graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from telegrad.autograd import graph
from telegrad.autograd.functions import Recv, receive, send_node
from telegrad.autograd.graph import BigGraphs, Edge, Explorer, Unit, has_hooks, survey

Source = tuple[int, list[Edge]]


def edge(tensor: Tensor) -> Edge:
    found = get_gradient_edge(tensor)
    return found.node, found.output_nr


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def received(number: int, parts: int = 1) -> list[Tensor]:
    return [receive(Recv(0, 1, number), part, torch.ones(2)) for part in range(parts)]


class TwoInTwoOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return one + other, one - other

    @staticmethod
    def backward(ctx: Any, one: Any, other: Any) -> Any:
        return one + other, one - other


# --- by brute force ---------------------------------------------------------------------------------------------


def is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def is_recv(node: Node) -> bool:
    return hasattr(node, "recv")


def reached(edges: Iterable[Edge]) -> set[Any]:
    """All nodes that gradients come to from here, down to leaves and recvs."""
    found: set[Any] = set()
    todo = [node for node, _ in edges]
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [child for child, _ in node.next_functions] if not is_recv(node) else []
    return found


def meeting_places(edges: Iterable[Edge]) -> set[Any]:
    """Nodes, leaves with hooks, and messages: the gradients of one go together."""
    nodes = reached(edges)
    return {node for node in nodes if not is_leaf(node) or has_hooks(node)} | set(recvs_of(edges))


def expected_units(sources: list[Source]) -> list[list[int]]:
    """Joins whichever two have a node in common until none have."""
    groups = [([name], meeting_places(edges)) for name, edges in sources]
    while True:
        pair = next(
            ((i, j) for i in range(len(groups)) for j in range(i + 1, len(groups)) if groups[i][1] & groups[j][1]), None
        )
        if pair is None:
            return sorted(sorted(names) for names, _ in groups)
        i, j = pair
        names, nodes = groups.pop(j)
        groups[i] = (groups[i][0] + names, groups[i][1] | nodes)


def recvs_of(edges: Iterable[Edge]) -> dict[Recv, set[int]]:
    recvs: dict[Recv, set[int]] = {}
    for node in filter(is_recv, reached(edges)):
        recvs.setdefault(node.recv, set()).add(node.part)
    return recvs


def recvs_are_oldest(nodes: Iterable[Any]) -> bool:
    """Whether torch's engine, which takes the newest that is ready, has nothing to do after them."""
    inner = [node for node in nodes if not is_leaf(node)]
    return all(
        recv._sequence_nr() < node._sequence_nr()
        for recv in inner
        if is_recv(recv)
        for node in inner
        if not is_recv(node)
    )


def check_survey(sources: list[Source]) -> list[Unit]:
    units, nodes = survey(sources)
    assert sorted(sorted(unit.sources) for unit in units) == expected_units(sources)
    by_name = dict(sources)
    for unit in units:
        assert [name for name, _ in sources if name in unit.sources] == unit.sources, "in the order given"
        edges = [edge for name in unit.sources for edge in by_name[name]]
        all_nodes = reached(edges)
        assert len(unit.leaves) == len(set(unit.leaves))
        assert set(unit.leaves) == {node for node in all_nodes if is_leaf(node)}
        assert unit.recvs == recvs_of(edges)
        assert unit.recvs_last == recvs_are_oldest(all_nodes)
        if len(unit.sources) > 1:
            assert len(unit.nodes) == len(set(unit.nodes))
            assert set(unit.nodes) == {node for node in all_nodes if not is_leaf(node)}
    assert {node for _, edges in sources for node in reached(edges) if not is_leaf(node)} <= set(nodes)
    return units


# --- random graphs ----------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> list[Source]:
    """Leaves, with hooks or without, received tensors, what was computed from them, and sources anywhere in it."""

    def pick() -> Tensor:
        return tensors[draw(st.integers(0, len(tensors) - 1))]

    tensors: list[Tensor] = []
    for hooks in draw(st.lists(st.sampled_from(["", "hook", "post"]), min_size=1, max_size=4)):
        tensors.append(leaf())
        if hooks == "hook":
            tensors[-1].register_hook(lambda gradient: None)
        elif hooks == "post":
            tensors[-1].register_post_accumulate_grad_hook(lambda tensor: None)
    for number, parts in enumerate(draw(st.lists(st.integers(1, 3), max_size=3))):
        tensors += received(number, parts)
    kinds = ["add", "mul", "exp", "two", "unbind", "view", "detach", "constant", "in place", "received"]
    for number, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=12)), 100):
        match kind:
            case "add":
                tensors.append(pick() + pick())
            case "mul":
                tensors.append(pick() * pick())
            case "exp":
                tensors.append(pick().exp())
            case "two":
                tensors += TwoInTwoOut.apply(pick(), pick())
            case "unbind":
                tensors += [half.expand(2) for half in pick().unbind()]
            case "view":
                tensors.append(pick().view(2, 1).squeeze(1))
            case "detach":
                tensors.append(pick().detach() + pick())
            case "constant":
                tensors.append(pick() * torch.ones(2))
            case "in place":
                tensors.append(pick().clone().mul_(pick()))
            case "received":
                tensors += received(number)
    starts = [tensor for tensor in tensors if tensor.requires_grad]
    sources = draw(st.lists(st.lists(st.sampled_from(starts), max_size=3), min_size=1, max_size=5))
    as_sends = draw(st.booleans())
    return [
        (
            100 + name,
            [(send_node(name, part, tensor), 0) if as_sends else edge(tensor) for part, tensor in enumerate(of_source)],
        )
        for name, of_source in enumerate(sources)
    ]


@settings(max_examples=300)
@given(sources=graphs())
def test_units_and_what_they_reach(sources: list[Source]) -> None:
    check_survey(sources)
    for source in sources:
        check_survey([source])


@settings(max_examples=200)
@given(sources=graphs())
def test_the_explorer_finds_each_part_of_each_recv_once(sources: list[Source]) -> None:
    explorer = Explorer()
    so_far: list[Edge] = []
    found: dict[Recv, set[int]] = {}
    for _, edges in sources:
        new = explorer.explore(edges)
        so_far += edges
        for recv, parts in new.items():
            assert parts
            assert not parts & found.get(recv, set())
            found.setdefault(recv, set()).update(parts)
        assert found == recvs_of(so_far)
        assert explorer.reached == found
        assert explorer.explore(edges) == {}


# --- one rule at a time -----------------------------------------------------------------------------------------


def units_of(*sources: list[Tensor]) -> list[list[int]]:
    units = check_survey([(name, [edge(tensor) for tensor in tensors]) for name, tensors in enumerate(sources)])
    return sorted(sorted(unit.sources) for unit in units)


def test_sources_that_share_a_computed_node_meet() -> None:
    shared = leaf().exp()
    assert units_of([shared * 2], [shared * 3], [leaf().exp()]) == [[0, 1], [2]]


def test_sources_that_share_only_a_leaf_do_not_meet() -> None:
    shared = leaf()
    assert units_of([shared * 2], [shared * 3]) == [[0], [1]]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_sources_meet_at_a_leaf_with_a_hook_and_not_when_it_is_removed(kind: str) -> None:
    shared = leaf()
    handle = getattr(shared, kind)(lambda _: None)
    assert units_of([shared * 2], [shared * 3], [shared * 4]) == [[0, 1, 2]]
    handle.remove()
    assert units_of([shared * 2], [shared * 3], [shared * 4]) == [[0], [1], [2]]


def test_sources_that_share_a_received_message_meet_whatever_tensor_of_it_they_use() -> None:
    one, other = received(1, 2)
    assert units_of([one * 2], [other * 2]) == [[0, 1]]
    (unit,), _ = survey([(0, [edge(one * 2)]), (1, [edge(other * 2)])])
    assert unit.recvs == {Recv(0, 1, 1): {0, 1}}


def test_the_nodes_of_sources_that_meet_include_what_was_received() -> None:
    """For all of them have to run before a send that waits."""
    tensor, shared = received(1)[0], leaf().exp()
    (unit,) = check_survey([(0, [edge(tensor * shared)]), (1, [edge(shared)])])
    assert tensor.grad_fn in unit.nodes


def test_sources_that_meet_through_a_third() -> None:
    one, other = leaf().exp(), leaf().exp()
    assert units_of([one * 2], [other * 2], [one * other]) == [[0, 1, 2]]


def test_outputs_of_one_node_are_one_node() -> None:
    one, other = leaf().exp().unbind()
    assert units_of([one * 2], [other * 2]) == [[0, 1]]


def test_a_part_that_was_not_used_is_not_reached() -> None:
    parts = received(1, 3)
    (unit,) = check_survey([(0, [edge(parts[0] * parts[2])])])
    assert unit.recvs == {Recv(0, 1, 1): {0, 2}}
    assert unit.leaves == []


def test_a_source_may_be_a_leaf_or_a_recv_itself() -> None:
    variable, (tensor,) = leaf(), received(1)
    units = check_survey([(0, [edge(variable)]), (1, [edge(tensor)])])
    assert [(len(unit.leaves), len(unit.recvs)) for unit in units] == [(1, 0), (0, 1)]


def test_what_was_detached_is_not_reached() -> None:
    (unit,) = check_survey([(0, [edge(leaf().exp().detach() * leaf())])])
    assert len(unit.leaves) == 1


def test_a_source_without_edges_reaches_nothing() -> None:
    assert survey([(7, [])])[0][0].leaves == []
    assert [unit.sources for unit in survey([(7, []), (8, [])])[0]] == [[7], [8]]
    assert [unit.sources for unit in survey([(7, [(None, 0)])])[0]] == [[7]]
    assert survey([])[0] == []


# --- what is quick ----------------------------------------------------------------------------------------------


def quick(*sources: list[Tensor]) -> list[bool]:
    """Of each source, which must not meet."""
    units = check_survey([(name, [edge(tensor) for tensor in tensors]) for name, tensors in enumerate(sources)])
    assert len(units) == len(sources)
    return [unit.recvs_last for unit in units]


# One walk is for a source that is alone, the other for several: a second one far from the first makes the difference.
both_walks = pytest.mark.parametrize("beside", [0, 1], ids=["one source", "several sources"])


def quick_of(beside: int, *tensors: Tensor) -> bool:
    return quick(list(tensors), *([leaf().exp()] for _ in range(beside)))[0]


@both_walks
def test_a_unit_is_quick_when_its_recvs_are_older_than_all_else(beside: int) -> None:
    one, other = received(1)[0], received(2)[0]
    assert quick_of(beside, one * other * leaf() + other.exp())


@both_walks
def test_a_unit_is_not_quick_when_a_node_is_older_than_a_recv(beside: int) -> None:
    before = leaf().exp()
    (tensor,) = received(1)
    assert not quick_of(beside, (tensor * before).sin())


@both_walks
def test_a_unit_is_not_quick_when_a_node_is_older_than_one_recv_of_several(beside: int) -> None:
    (one,) = received(1)
    between = one.exp()
    (other,) = received(2)
    assert not quick_of(beside, between * other)
    assert not quick_of(beside, between, other)
    assert quick_of(beside, between)


@both_walks
def test_a_unit_without_recvs_is_quick(beside: int) -> None:
    assert quick_of(beside, leaf().exp() * leaf())
    assert quick_of(beside, leaf())
    assert quick_of(beside)


@both_walks
def test_a_unit_of_recvs_and_leaves_alone_is_quick(beside: int) -> None:
    assert quick_of(beside, received(1)[0])
    assert quick_of(beside, leaf(), *received(1, 2))


@both_walks
def test_the_sends_above_do_not_count_against_it(beside: int) -> None:
    """Unless what they send was received after they were made, which cannot be."""
    (tensor,) = received(1)
    sources: list[Source] = [(0, [(send_node(1, 0, tensor * 2), 0)])]
    sources += [(1 + number, [(send_node(2 + number, 0, leaf()), 0)]) for number in range(beside)]
    assert all(unit.recvs_last for unit in check_survey(sources))


def test_each_of_several_units_is_judged_by_its_own_nodes() -> None:
    before = leaf().exp()
    one, other = received(1)[0], received(2)[0]
    assert quick([one.exp()], [other * before], [leaf().exp()]) == [True, False, True]


def test_sources_that_meet_are_quick_or_not_together() -> None:
    before = leaf().exp()
    (tensor,) = received(1)
    after = tensor.exp()
    (unit,) = check_survey([(0, [edge(after * 2)]), (1, [edge(after * before)])])
    assert not unit.recvs_last
    (unit,) = check_survey([(0, [edge(after * 2)]), (1, [edge(after * 3)])])
    assert unit.recvs_last


@both_walks
def test_a_unit_of_many_nodes_is_not_quick(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def unit_of(length: int) -> Unit:
        (tensor,) = received(1)
        for _ in range(length - 1):
            tensor = tensor + 1
        others: list[Source] = [(1 + number, []) for number in range(beside)]
        return survey([(0, [edge(tensor)]), *others])[0][0]

    monkeypatch.setattr(graph, "_FEW", 20)
    assert unit_of(20).recvs_last
    assert not unit_of(21).recvs_last


def test_of_many_nodes_in_all_no_unit_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at them would take long, whosoever they are."""
    monkeypatch.setattr(graph, "_FEW", 20)

    def units_of_chains(*lengths: int) -> list[bool]:
        sources = []
        for length in lengths:
            tensor = leaf()
            for _ in range(length):
                tensor = tensor + 1
            sources.append((length, [edge(tensor)]))
        return [unit.recvs_last for unit in survey(sources)[0]]

    assert units_of_chains(8, 12) == [True, True]
    assert units_of_chains(9, 12) == [False, False]


# --- freeing big graphs -----------------------------------------------------------------------------------------


def chain(length: int) -> tuple[Node, set[Node]]:
    tensor = leaf()
    for _ in range(length):
        tensor = tensor + 1
    top: Any = tensor.grad_fn
    node, nodes = top, set()
    while node is not None:
        nodes.add(node)
        node = node.next_functions[0][0] if node.next_functions else None
    return top, nodes


def test_a_graph_that_nobody_uses_is_freed() -> None:
    graphs = BigGraphs()
    top, nodes = chain(10)
    graphs.add([top], nodes)
    del nodes
    assert len(graphs) == 11
    graphs.free_unused()
    assert len(graphs) == 11, "somebody still holds the top"
    del top
    graphs.free_unused()
    assert len(graphs) == 0
    graphs.free_unused()


def test_what_is_still_in_use_is_freed_later() -> None:
    graphs = BigGraphs()
    top, nodes = chain(10)
    middle: Any = top
    for _ in range(5):
        middle = middle.next_functions[0][0]
    graphs.add([top], nodes)
    del top, nodes
    graphs.free_unused()
    assert len(graphs) == 6
    del middle
    graphs.free_unused()
    assert len(graphs) == 0


def test_a_graph_whose_paths_meet_is_freed_at_once() -> None:
    graphs = BigGraphs()
    tensor = leaf()
    for _ in range(20):
        tensor = tensor + tensor * 2
    top: Any = tensor.grad_fn
    nodes = {node for node in reached([(top, 0)]) if not is_leaf(node)}
    assert len(nodes) == 40
    graphs.add([top, top.next_functions[1][0]], nodes)  # of which the second lies below the first
    del tensor, top, nodes
    graphs.free_unused()
    assert len(graphs) == 0


@pytest.mark.parametrize("function", ["chain", "residual"])
def test_after_a_context_nothing_is_left_of_a_big_graph(function: str) -> None:
    """In another process: what goes wrong here ends in a crash."""
    program = f"""
import time, torch
from telegrad import autograd, rpc
from telegrad.testing import cluster

def chain(tensor):
    for _ in range(30_000):
        tensor = tensor + 1
    return tensor

def residual(tensor):
    for _ in range(10_000):
        tensor = tensor + tensor * 1e-6
    return tensor

with cluster("a", "b") as workers, workers.on("a"):
    for _ in range(2):
        with autograd.context() as context_id:
            x = torch.ones(1, requires_grad=True)
            autograd.backward(context_id, [{function}(rpc.rpc_sync("b", {function}, (x,))).sum()])
        end = time.monotonic() + 20
        while any(len(worker.autograd._context_end._graphs) for worker in workers) and time.monotonic() < end:
            time.sleep(0.01)
        print([len(worker.autograd._context_end._graphs) for worker in workers])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[0, 0]\n[0, 0]\n", (done.returncode, done.stderr)


def test_a_chain_of_very_many_nodes_does_not_overflow_the_stack() -> None:
    program = """
import torch
from telegrad import autograd, rpc
from telegrad.testing import cluster

def deep(tensor):
    for _ in range(40_000):
        tensor = tensor + 1
    return tensor

with cluster("a", "b") as workers, workers.on("a"):
    with autograd.context() as context_id:
        x = torch.ones(1, requires_grad=True)
        autograd.backward(context_id, [deep(rpc.rpc_sync("b", deep, (x,))).sum()])
        assert autograd.get_gradients(context_id)[x].item() == 1.0
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", (done.returncode, done.stderr)


def test_a_view_that_was_made_without_gradients_can_be_received() -> None:
    """As tensors of some types are, where they are opened inside no_grad; and changed in place then."""
    with torch.no_grad():
        tensor = torch.ones(4, dtype=torch.bfloat16).view(2, 2)
    got = receive(Recv(0, 1, 1), 0, tensor)
    assert got.grad_fn is not None
    assert got.grad_fn.name() == "RecvRpcBackward"
    got.mul_(2)
    assert got.requires_grad
