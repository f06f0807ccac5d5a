"""The forward of a small RemoteModule, outside any context."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.library import Library
from bench.row import Case, Plan, Row, WrongReplyError

__all__ = ["REMOTE_MODULE"]

_FACTOR = 3.0


class Scale(nn.Module):
    """Runs on the callee; whole numbers, so that replies can be compared exactly."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * self.factor


class _Forward(Case[Tensor]):
    def __init__(self, library: Library, peer: str) -> None:
        self._module = library.nn.RemoteModule(f"{peer}/cpu", Scale, args=(_FACTOR,))
        self._inputs = [torch.arange(4.0).reshape(2, 2) + turn for turn in range(64)]

    def run(self, index: int) -> Tensor:
        return self._module.forward(self._inputs[index % 64])  # type: ignore[no-any-return]

    def check(self, index: int, reply: Tensor) -> None:
        if not torch.equal(reply, self._inputs[index % 64] * _FACTOR):
            raise WrongReplyError(f"forward {index} gave {reply}")


REMOTE_MODULE = Row(
    name="remote_module",
    title="forward of a RemoteModule",
    case=_Forward,
    plan=Plan(warmup=100, samples=400),
    quick=Plan(warmup=2, samples=10),
    floor=3.0,
)
