"""Generated clicks: a user sees a page of a few items, and clicks or does not.

Every user has a hidden taste and every item hidden qualities.  How likely a click is depends on how well they match,
and on a few numbers, such as the time of day.  So every part of the model has something to learn, and the least loss
that a model could reach is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

USERS = 600
ITEMS = 200
PAGE = 3  # items on a page
NUMBERS = 6
HIDDEN = 4  # what makes a taste


@dataclass
class Batch:
    users: Tensor  # [size, 1]
    items: Tensor  # [size, PAGE]
    numbers: Tensor  # [size, NUMBERS]
    clicked: Tensor  # [size], 0 or 1

    def part(self, index: int, count: int) -> Batch:
        """One of ``count`` equal parts."""
        return Batch(*(tensor[index::count] for tensor in (self.users, self.items, self.numbers, self.clicked)))


class Clicks:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tastes = _normal(generator, USERS, HIDDEN)
        self._qualities = _normal(generator, ITEMS, HIDDEN)
        self._weights = _normal(generator, NUMBERS)

    def batch(self, step: int, size: int) -> Batch:
        """The batch of a step; the same on every worker."""
        return self._draw(step, size)[0]

    def least_loss(self, steps: int, size: int) -> float:
        """The mean loss of a model that knows all tastes and qualities: what is left is chance."""
        drawn = [self._draw(step, size) for step in range(steps)]
        return fmean(binary_cross_entropy_with_logits(truth, batch.clicked).item() for batch, truth in drawn)

    def _draw(self, step: int, size: int) -> tuple[Batch, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        users = torch.randint(USERS, (size, 1), generator=generator)
        items = torch.randint(ITEMS, (size, PAGE), generator=generator)
        numbers = _normal(generator, size, NUMBERS)
        match = (self._tastes[users[:, 0]] * self._qualities[items].sum(1)).sum(1) / PAGE**0.5
        truth = match + torch.tanh(numbers @ self._weights)
        clicked = torch.bernoulli(truth.sigmoid(), generator=generator)
        return Batch(users, items, numbers, clicked), truth


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
