"""A net of three stages, and how one process trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

__all__ = ["MICRO_BATCHES", "RATE", "STAGES", "OneProcess", "batches", "layers"]

STAGES = 3
MICRO_BATCHES = 8
RATE = 0.05

_WIDTH = 128
_SAMPLES = 256
_DISTINCT = 16


def layers(stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))


def batches() -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Inputs and targets, in micro-batches; made once and used in turn."""
    chance = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(_SAMPLES, _WIDTH, generator=chance).chunk(MICRO_BATCHES) for _ in range(2))  # type: ignore[misc]
        for _ in range(_DISTINCT)
    ]


class OneProcess:
    """All stages in this process, by plain torch, in the same micro-batches."""

    def __init__(self) -> None:
        self.stages = [layers(stage) for stage in range(STAGES)]
        self._model = nn.Sequential(*self.stages)
        self._batches = batches()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)

    def step(self, index: int) -> Tensor:
        inputs, targets = self._batches[index % _DISTINCT]
        self._optimizer.zero_grad()
        losses = [mse_loss(self._model(some), target) for some, target in zip(inputs, targets, strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
        self._optimizer.step()
        return loss.detach()
