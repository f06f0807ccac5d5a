"""The parts of the recommender, and how a trainer puts them together.

The first three do not use telegrad: the code that makes them decides where they live.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from clicks import ITEMS, NUMBERS, USERS, Batch
from torch import Tensor, nn

from telegrad.nn import RemoteModule

TRAINERS = 2
SHARDS = 2
WIDTH = 16


def table(rows: int, seed: int) -> Tensor:
    """What a table holds before any training."""
    return 0.1 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bag(weight: Tensor) -> nn.EmbeddingBag:
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns, in Adagrad, that it is not set
    return nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", sparse=True)


class Shard(nn.Module):
    """On a parameter server: every second row of both tables.  (For tables of real size, draw only these rows.)"""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.users = bag(table(USERS, seed=2)[number::SHARDS].clone())
        self.items = bag(table(ITEMS, seed=3)[number::SHARDS].clone())

    def forward(self, users: tuple[Tensor, Tensor], items: tuple[Tensor, Tensor]) -> Tensor:
        """Of each sample, the sum of those rows that are here: [batch, 2, WIDTH]."""
        return torch.stack([self.users(*users), self.items(*items)], dim=1)


def rows_on(shard: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What to look up on a shard, as EmbeddingBag takes it: the rows of all samples, and where each sample begins."""
    there = ids % SHARDS == shard
    counts = there.sum(dim=1)
    return ids[there] // SHARDS, counts.cumsum(0) - counts


class Dense(nn.Module):
    """On every trainer, under DDP: what the numbers say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.dense = nn.Sequential(nn.Linear(NUMBERS, 32), nn.Tanh(), nn.Linear(32, WIDTH)).double()

    def forward(self, numbers: Tensor) -> Tensor:
        return self.dense(numbers)


class Top(nn.Module):
    """On a worker of its own: how well user and items match, and what comes of it and the numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1)).double()

    def forward(self, vectors: Tensor, numbers: Tensor) -> Tensor:
        match = vectors[:, 0] * vectors[:, 1]
        return match.sum(dim=1) + self.top(torch.cat([match, numbers], dim=1)).squeeze(1)


class Recommender(nn.Module):
    """What a trainer sees: handles on the remote parts, and its own copy of the dense net."""

    def __init__(self, shards: Sequence[RemoteModule], dense: nn.Module, top: RemoteModule) -> None:
        super().__init__()
        self.shards = nn.ModuleList(shards)
        self.dense = dense
        self.top = top

    def forward(self, batch: Batch) -> Tensor:
        parts = [
            shard.forward_async(rows_on(number, batch.users), rows_on(number, batch.items))
            for number, shard in enumerate(self.shards)
        ]
        numbers = self.dense(batch.numbers)  # while the servers look up
        # DDP averages over the trainers, and everywhere else their gradients add up: undo its division.
        numbers.register_hook(lambda gradient: gradient * TRAINERS)
        return self.top(sum(part.wait() for part in parts), numbers)
