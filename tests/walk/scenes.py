"""What is walked through: each scene prepares something and yields the one step that is recorded on both workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from telegrad import autograd, rpc

CALLER, CALLEE = "caller", "callee"

Scene = Callable[[], AbstractContextManager[Callable[[], object]]]


def nothing() -> None:
    """Called remotely."""


def double(tensor: Tensor) -> Tensor:
    """Called remotely."""
    return tensor * 2


@contextmanager
def empty_call() -> Iterator[Callable[[], object]]:
    def step() -> None:
        rpc.rpc_sync(CALLEE, nothing)

    yield step


@contextmanager
def tensor_call() -> Iterator[Callable[[], object]]:
    tensor = torch.ones(2, 2, requires_grad=True)

    def step() -> None:
        result = rpc.rpc_sync(CALLEE, double, args=(tensor,))
        assert result.requires_grad

    with autograd.context():
        yield step


@contextmanager
def backward() -> Iterator[Callable[[], object]]:
    tensor = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(CALLEE, double, args=(tensor,)).sum()

        def step() -> None:
            autograd.backward(context_id, [loss])

        yield step
        gradient = autograd.get_gradients(context_id)[tensor]
        assert torch.equal(gradient, torch.full((2, 2), 2.0)), gradient


SCENES: dict[str, Scene] = {"empty call": empty_call, "tensor call": tensor_call, "backward": backward}
TITLES = {
    "empty call": "One call of a function that does nothing",
    "tensor call": "One call with a 2x2 tensor in an autograd context",
    "backward": "The backward of one such call",
}
