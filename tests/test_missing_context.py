"""A call that loses gradients because it was made outside of a context warns, once, and says what to do."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import PATIENCE
from telegrad import autograd, rpc
from telegrad.autograd import missing_context
from telegrad.testing import Cluster

LAYER = nn.Linear(3, 1)


@pytest.fixture
def pair(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Two workers; no warning was given yet."""
    monkeypatch.setattr(missing_context, "_given", set())
    return pair


def forward(tensor: Tensor) -> Tensor:
    return LAYER(tensor)


def forward_without_gradient(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return LAYER(tensor)


def detached(tensor: Tensor) -> Tensor:
    return LAYER(tensor).detach()


def weight() -> Tensor:
    return LAYER.weight


def plain_leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def warnings_of(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


BATCH = torch.ones(2, 3)

FORGOTTEN: dict[str, Callable[[], Any]] = {
    "rpc_sync": lambda: rpc.rpc_sync("b", forward, (BATCH,)),
    "rpc_async": lambda: rpc.rpc_async("b", forward, (BATCH,)).wait(),
    "to_here": lambda: rpc.remote("b", forward, (BATCH,)).to_here(),
    "to oneself": lambda: rpc.rpc_sync("a", forward, (BATCH,)),
    "in a list": lambda: rpc.rpc_sync("b", _in_a_list, (BATCH,)),
}


def _in_a_list(tensor: Tensor) -> list[Any]:
    return [1, {"result": LAYER(tensor)}]


@pytest.mark.parametrize("way", FORGOTTEN)
def test_a_result_that_requires_a_gradient_outside_of_any_context(pair: Cluster, way: str) -> None:
    (caught,) = warnings_of(FORGOTTEN[way])
    worker = "'a'" if way == "to oneself" else "'b'"
    assert caught.category is UserWarning
    assert str(caught.message).startswith(f"the result of a call to worker {worker} requires a gradient")
    assert "with telegrad.autograd.context() as context_id:" in str(caught.message)
    assert "torch.no_grad()" in str(caught.message)
    assert warnings_of(FORGOTTEN[way]) == []


def test_the_warning_names_the_line_of_the_call(pair: Cluster) -> None:
    (caught,) = warnings_of(lambda: rpc.rpc_sync("b", forward, (BATCH,)))
    assert caught.filename == __file__


def test_a_result_outside_of_any_context_is_a_leaf_as_before(pair: Cluster) -> None:
    result = rpc.rpc_sync("b", forward, (BATCH,))
    assert result.requires_grad
    assert result.is_leaf


@pytest.mark.parametrize("function", [forward_without_gradient, detached])
def test_a_result_that_requires_none(pair: Cluster, function: Any) -> None:
    assert warnings_of(lambda: rpc.rpc_sync("b", function, (BATCH,))) == []


@pytest.mark.parametrize("function", [weight, plain_leaf])
def test_a_leaf_that_is_fetched(pair: Cluster, function: Any) -> None:
    assert warnings_of(lambda: rpc.rpc_sync("b", function)) == []
    assert warnings_of(lambda: rpc.remote("b", function).to_here()) == []


def test_a_caller_that_wants_no_gradients(pair: Cluster) -> None:
    with torch.no_grad():
        assert warnings_of(lambda: rpc.rpc_sync("b", forward, (BATCH,))) == []
        assert warnings_of(lambda: rpc.rpc_async("b", forward, (BATCH,)).wait()) == []


def test_inside_a_context(pair: Cluster) -> None:
    def train() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("b", forward, (BATCH,)).sum()])

    assert warnings_of(train) == []


# --- thread pools -----------------------------------------------------------------------------------------------------


def in_a_pool(workers: Cluster, function: Callable[..., Any], *args: Any) -> Any:
    """What a program of one worker does: there, a new thread belongs to the worker too."""

    def act() -> Any:
        with workers.on("a"):
            return function(*args)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(act).result(PATIENCE)


def test_a_result_that_a_thread_outside_of_the_context_gets(pair: Cluster) -> None:
    with autograd.context():
        (caught,) = warnings_of(lambda: in_a_pool(pair, rpc.rpc_sync, "b", forward, (BATCH,)))
        assert str(caught.message).startswith("a call to worker 'b' has tensors that require a gradient")
        assert "executor.submit(contextvars.copy_context().run, function, ...)" in str(caught.message)
        assert warnings_of(lambda: in_a_pool(pair, rpc.rpc_sync, "b", forward, (BATCH,))) == []


@pytest.mark.parametrize("argument", [plain_leaf(), plain_leaf() * 2], ids=["leaf", "with history"])
def test_an_argument_that_a_thread_outside_of_the_context_sends(pair: Cluster, argument: Tensor) -> None:
    with autograd.context():
        (caught,) = warnings_of(lambda: in_a_pool(pair, rpc.rpc_sync, "b", shape_of, (argument,)))
        assert str(caught.message).startswith("a call to worker 'b' has tensors that require a gradient")


def test_a_thread_that_does_something_else(pair: Cluster) -> None:
    """Calls without gradients, of a thread that loads data say, while another trains."""

    def others() -> None:
        in_a_pool(pair, rpc.rpc_sync, "b", shape_of, (BATCH,))
        in_a_pool(pair, rpc.rpc_sync, "b", forward_without_gradient, (BATCH,))
        in_a_pool(pair, rpc.rpc_sync, "b", weight)
        with torch.no_grad():
            rpc.rpc_sync("b", forward, (BATCH,))

    with autograd.context():
        assert warnings_of(others) == []


def test_arguments_while_no_thread_is_in_a_context(pair: Cluster) -> None:
    assert warnings_of(lambda: rpc.rpc_sync("b", shape_of, (plain_leaf() * 2,))) == []


def test_a_context_can_be_taken_along_to_a_thread_pool(pair: Cluster) -> None:
    """What the warning says to do gives the gradients that one thread gets."""
    batches = [torch.full((2, 3), float(number)) for number in range(1, 4)]
    (expected,) = torch.autograd.grad(torch.stack([LAYER(batch) for batch in batches]).sum(), LAYER.weight)

    def train() -> Tensor:
        with autograd.context() as context_id, ThreadPoolExecutor(3) as executor:
            calls = [
                executor.submit(contextvars.copy_context().run, rpc.rpc_sync, "b", forward, (batch,))
                for batch in batches
            ]
            autograd.backward(context_id, [torch.stack([call.result(PATIENCE) for call in calls]).sum()])
            with pair.on("b"):
                return autograd.get_gradients(context_id)[LAYER.weight]

    found: list[Tensor] = []
    assert warnings_of(lambda: found.append(train())) == []
    torch.testing.assert_close(found[0], expected)
