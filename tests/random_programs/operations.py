"""What the programs compute: small double-precision tensors, through every shape that torch's graph can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

N = 4
ROWS = 6

Log = list[Tensor | None]
Here = Any  # machine.Home; it stands below


def constant(seed: int, *shape: int) -> Tensor:
    """The same numbers in any process, between -1 and 1."""
    count = 1
    for size in shape:
        count *= size
    return torch.sin(torch.arange(1, count + 1, dtype=torch.double) * (1.7 + seed * 0.37)).reshape(shape)


def remember(log: Log, gradient: Tensor | None) -> None:
    log.append(None if gradient is None else gradient.detach().clone())


class Tap(torch.autograd.Function):
    """The same again; its backward tells that it ran."""

    @staticmethod
    def forward(ctx: Any, log: Log, x: Tensor) -> Tensor:
        ctx.log = log
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        remember(ctx.log, gradient)
        return None, gradient


class FirstOnly(torch.autograd.Function):
    """Has a gradient for one of its inputs, and None for the other."""

    @staticmethod
    def forward(ctx: Any, log: Log, x: Tensor, y: Tensor) -> Tensor:
        ctx.log = log
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        remember(ctx.log, gradient)
        return None, gradient, None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log: Log, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.log = log
        return x * 2, x + 1

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:
        remember(ctx.log, one)
        remember(ctx.log, other)
        return None, one * 2 + other


def _change_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:3].mul_(0.5)
    return y


def _leaf(here: Here, number: int, rows: int = N) -> Tensor:
    """A leaf that is nobody's parameter."""
    leaf = constant(number, rows, N).requires_grad_(torch.is_grad_enabled())
    if leaf.requires_grad:
        here.leaves[number] = leaf
        here.keep(leaf)
    return leaf


class Operation(NamedTuple):
    ins: str
    outs: str
    run: Callable[..., Any]  # (here, number, *tensors)
    weight: float = 1.0


def _plain(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda here, number, *tensors: run(*tensors)


OPERATIONS: dict[str, Operation] = {
    # --- where values come from
    "param M": Operation("", "M", lambda here, number: here.parameters[number], 3),
    "param T": Operation("", "T", lambda here, number: here.parameters[number]),
    "const": Operation("", "M", lambda here, number: constant(number, N, N), 0.5),
    "leaf": Operation("", "M", _leaf, 0.5),
    # --- arithmetic
    "add": Operation("MM", "M", _plain(torch.add), 2),
    "sub": Operation("MM", "M", _plain(torch.sub)),
    "mul": Operation("MM", "M", _plain(torch.mul), 2),
    "matmul": Operation("MM", "M", _plain(lambda x, y: x @ y / N), 3),
    "tanh": Operation("M", "M", _plain(torch.tanh)),
    "sin": Operation("M", "M", _plain(torch.sin)),
    "scale": Operation("M", "M", lambda here, number, x: x * constant(number, N)),
    "module": Operation("M", "M", lambda here, number, x: here.module(x), 2),
    "mulH": Operation("HH", "H", _plain(torch.mul)),
    "mulV": Operation("VV", "V", _plain(torch.mul)),
    "outer": Operation("VV", "M", _plain(lambda x, y: x[:, None] * y)),
    # --- embeddings
    "lookup": Operation(
        "T",
        "M",
        lambda here, number, x: torch.nn.functional.embedding(
            torch.tensor([number % ROWS, 1, number % 3, 1]), x, sparse=True
        ),
        4,
    ),
    "rows": Operation("T", "M", _plain(lambda x: x[:N]), 0.5),
    # --- several results
    "chunk": Operation("M", "HH", _plain(lambda x: x.chunk(2)), 1.5),
    "unbind": Operation("M", "VVVV", _plain(lambda x: x.unbind()), 1.5),
    "two": Operation("M", "MM", lambda here, number, x: TwoResults.apply(here.log[number], x), 1.5),
    "cat": Operation("HH", "M", _plain(lambda x, y: torch.cat([x, y])), 1.5),
    "stack": Operation("VVVV", "M", _plain(lambda *x: torch.stack(x)), 1.5),
    # --- views
    "t": Operation("M", "M", _plain(lambda x: x.t())),
    "flat": Operation("M", "M", _plain(lambda x: x.reshape(-1).view(N, N))),
    "narrow": Operation("M", "H", _plain(lambda x: x[1:3])),
    "select": Operation("M", "V", _plain(lambda x: x[:, 2])),
    "expand": Operation("V", "M", _plain(lambda x: x.expand(N, N))),
    "widen": Operation("H", "M", _plain(lambda x: x.repeat(2, 1))),
    "sumH": Operation("H", "V", _plain(lambda x: x.sum(0))),
    # --- in place, on tensors that nobody else has
    "change": Operation("M", "M", _plain(lambda x: x.clone().mul_(2).add_(1))),
    "change view": Operation("M", "M", _plain(_change_view)),
    # --- and the rest
    "clone": Operation("M", "M", _plain(torch.clone)),
    "detach": Operation("M", "M", _plain(torch.detach)),
    "tap": Operation("M", "M", lambda here, number, x: Tap.apply(here.log[number], x), 2),
    "first only": Operation("MM", "M", lambda here, number, x, y: FirstOnly.apply(here.log[number], x, y)),
    # --- only where the generator says so: what is missing; a loss; what was received is changed in place
    "table": Operation("", "T", lambda here, number: _leaf(here, number, ROWS), 0),
    "total": Operation("M", "S", lambda here, number, x: (x * constant(number, N, N)).sum(), 0),
    "mul_": Operation("M", "M", _plain(lambda x: x.mul_(1.5)), 0),
}
