"""Hooks of a leaf's AccumulateGrad node, which a pass captures and would not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad.compat import node_hooks
from telegrad.testing import Cluster


@pytest.fixture
def pair(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(node_hooks, "_seen", [False])
    for worker in pair:
        node_hooks.watch(worker.autograd.leaves)
    return pair


def hooked(leaf: Tensor, seen: list[Any]) -> Any:
    """The node, which lives as long as somebody holds it."""
    node = leaf.expand_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda _, given: seen.append(given[0].tolist()))  # type: ignore[union-attr]
    return node


def test_it_fires_once_for_each_pass_and_nothing_else_changes(pair: Cluster) -> None:
    leaf, other, seen, tensor_hooks = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), [], []
    node = hooked(leaf, seen)
    leaf.register_hook(tensor_hooks.append)
    leaf.register_post_accumulate_grad_hook(lambda _: tensor_hooks.append(None))
    leaf.grad = torch.full((2,), 9.0)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("b", torch.mul, (leaf, 3.0)).sum() + other.sum()
        autograd.backward(context_id, [loss], retain_graph=True)
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    assert seen == [[3.0, 3.0], [3.0, 3.0]]
    assert found[leaf].tolist() == [6.0, 6.0]
    assert found[other].tolist() == [2.0, 2.0]
    assert leaf.grad.tolist() == [9.0, 9.0]
    assert other.grad is None
    assert len(tensor_hooks) == 4  # each of the two, for each pass
    del node


def test_without_one_no_node_runs(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_hooks, "fire", lambda *_: pytest.fail("a node was run"))
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: gradient)  # of the tensor: no matter
    with autograd.context() as context_id:
        autograd.backward(context_id, [(leaf * 2).sum()])
        assert autograd.get_gradients(context_id)[leaf].tolist() == [2.0, 2.0]


class _Remember(torch.autograd.Function):
    where = 0

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        return table

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Remember.where = gradient._values().data_ptr()
        return gradient


def test_a_sparse_gradient_that_nobody_else_has_is_not_copied(pair: Cluster) -> None:
    table = torch.ones(10, 3, requires_grad=True)
    rows = torch.tensor([1, 2, 4])
    with autograd.context() as context_id:
        rows_of = torch.nn.functional.embedding(rows, _Remember.apply(table), sparse=True)
        loss = (rows_of * torch.rand(3, 3)).sum()  # a sum alone would give one number, expanded
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[table]._values().data_ptr() == _Remember.where
