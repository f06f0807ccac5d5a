"""The hybrid model: two tables, a dense net and a top net, and how one process trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

__all__ = ["RATE", "TABLES", "TRAINERS", "Batch", "Dense", "OneProcess", "Table", "Top", "batches", "loss_of"]

TABLES = 2
TRAINERS = 2
RATE = 0.05

_ROWS = 2000
_WIDTH = 16
_NUMBERS = 16
_SAMPLES = 64
_BAG = 4
_DISTINCT = 16


class Table(nn.Module):
    """Rows of which each sample takes some; their gradient is sparse."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bag = nn.EmbeddingBag(_ROWS, _WIDTH, mode="sum", sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)  # type: ignore[no-any-return]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        self.layers = nn.Sequential(nn.Linear(_NUMBERS, 64), nn.ReLU(), nn.Linear(64, _WIDTH))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layers(numbers)  # type: ignore[no-any-return]


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(nn.Linear((TABLES + 1) * _WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, vectors: Tensor) -> Tensor:
        return self.layers(vectors)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Batch:
    """A trainer's part of one step."""

    ids: list[Tensor]  # for each table
    numbers: Tensor
    target: Tensor


def batches(trainer: int) -> list[Batch]:
    """Made once and used in turn."""
    chance = torch.Generator().manual_seed(trainer)
    return [
        Batch(
            [torch.randint(_ROWS, (_SAMPLES, _BAG), generator=chance) for _ in range(TABLES)],
            torch.randn(_SAMPLES, _NUMBERS, generator=chance),
            torch.randn(_SAMPLES, 1, generator=chance),
        )
        for _ in range(_DISTINCT)
    ]


def loss_of(
    batch: Batch, look_up: Sequence[Callable[[Tensor], Callable[[], Tensor]]], dense: nn.Module, top: nn.Module
) -> Tensor:
    """``look_up`` starts to look a batch up; what it returns waits for the rows."""
    waits = [begin(ids) for begin, ids in zip(look_up, batch.ids, strict=True)]
    numbers = dense(batch.numbers)
    return mse_loss(top(torch.cat([*(wait() for wait in waits), numbers], dim=1)), batch.target)


class OneProcess:
    """All of it in this process, by plain torch; the trainers' parts one after the other."""

    def __init__(self) -> None:
        self.tables, self.dense, self.top = [Table(seed) for seed in range(TABLES)], Dense(), Top()
        self._batches = [batches(trainer) for trainer in range(TRAINERS)]
        self._look_up = [lambda ids, table=table: lambda: table(ids) for table in self.tables]
        remote = [parameter for module in (*self.tables, self.top) for parameter in module.parameters()]
        # DDP takes the mean over the trainers, everything else their sum.
        groups = [{"params": self.dense.parameters(), "lr": RATE / TRAINERS}, {"params": remote, "lr": RATE}]
        self._optimizer = torch.optim.SGD(groups)

    def step(self, index: int) -> None:
        self._optimizer.zero_grad()
        for own in self._batches:
            loss_of(own[index % _DISTINCT], self._look_up, self.dense, self.top).backward()
        self._optimizer.step()
