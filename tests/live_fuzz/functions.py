"""What runs on the workers: exported, under names that do not depend on how this package was imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from telegrad import autograd, rpc
from telegrad._current import current_worker
from telegrad.errors import TelegradError

WEIGHT = torch.tensor([2.0, 5.0], requires_grad=True)
VISIT_SECONDS = 2.0  # how long a visitor waits for an answer

_kept: dict[int, Tensor] = {}  # by context


@rpc.export(name="fuzz.echo")
def echo(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


@rpc.export(name="fuzz.scale")
def scale(tensor: Tensor) -> Tensor:
    return WEIGHT * tensor


@rpc.export(name="fuzz.fail")
def fail(text: str) -> None:
    raise ValueError(text)


@rpc.export(name="fuzz.broken_scale")
def broken_scale(tensor: Tensor) -> Tensor:
    """Its backward fails."""
    return _Broken.apply(WEIGHT * tensor)  # type: ignore[no-any-return]


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("this backward fails")


@rpc.export(name="fuzz.keep")
def keep(context_id: int, tensor: Tensor) -> Tensor:
    """Later calls in that context use the same part of the graph, so its sources meet there."""
    if len(_kept) > 1000:
        _kept.clear()
    _kept[context_id] = WEIGHT * tensor
    return _kept[context_id]


@rpc.export(name="fuzz.use_kept")
def use_kept(context_id: int, tensor: Tensor) -> Tensor:
    return _kept.pop(context_id) * tensor


@rpc.export(name="fuzz.relay")
def relay(to: str, tensor: Tensor) -> Tensor:
    return rpc.rpc_sync(to, "fuzz.scale", (tensor,), timeout=VISIT_SECONDS)  # type: ignore[no-any-return]


@rpc.export(name="fuzz.hold")
def hold(rref: Any) -> Any:
    """Holds a reference until the call is answered, and returns it."""
    return rref


@rpc.export(name="fuzz.pass_on")
def pass_on(to: str, rref: Any) -> None:
    rpc.rpc_sync(to, "fuzz.hold", (rref,), timeout=VISIT_SECONDS)


@rpc.export(name="fuzz.read")
def read(rref: Any) -> Any:
    return rref.to_here(VISIT_SECONDS)


@rpc.export(name="fuzz.visit")
def visit(kind: int, to: int) -> str:
    """Calls the worker that asked, which answers with whatever it likes; says what came of it."""
    name = current_worker().info(to).name
    try:
        return repr(_VISITS[kind % len(_VISITS)](name))[:100]
    except (TelegradError, ValueError, TypeError, RuntimeError, LookupError) as error:
        return type(error).__name__


def _call(to: str) -> Any:
    return [rpc.rpc_async(to, "fuzz.echo", (number,), timeout=VISIT_SECONDS) for number in range(3)][-1].wait()


def _call_with_tensor(to: str) -> Any:
    return rpc.rpc_sync(to, "fuzz.echo", (torch.ones(3),), timeout=VISIT_SECONDS)


def _make_reference(to: str) -> Any:
    rref = rpc.remote(to, "fuzz.echo", (1,), timeout=VISIT_SECONDS)
    return rref.to_here(VISIT_SECONDS)


def _lend_reference(to: str) -> Any:
    return rpc.rpc_sync(to, "fuzz.hold", (rpc.RRef(torch.ones(2)),), timeout=VISIT_SECONDS)


def _run_backward(to: str) -> Any:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(to, "fuzz.scale", (x,), timeout=VISIT_SECONDS).sum()
        autograd.backward(context_id, [loss], timeout=VISIT_SECONDS)
        return autograd.get_gradients(context_id)


_VISITS = (_call, _call_with_tensor, _make_reference, _lend_reference, _run_backward)
