"""How far two trainings are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from training import Outcome, Parts

TOLERANCE = 1e-9  # all is computed in double precision, but sums are taken in another order


@dataclass
class Row:
    """One parameter on one worker, against the same in one process."""

    worker: str
    part: str
    shape: tuple[int, ...]
    norm: float  # of its gradient
    norm_alone: float  # in one process
    difference: float  # the largest, of the gradients
    drift: float  # the largest, of the values after all steps

    @property
    def equal(self) -> bool:
        """What got no gradient was not trained, and that is no success."""
        return self.norm > 0 and self.difference <= TOLERANCE and self.drift <= TOLERANCE  # not so for nan


@dataclass
class Comparison:
    rows: list[Row]
    losses: float  # the largest difference of the losses

    @property
    def largest(self) -> float:
        differences = [self.losses, *(row.difference for row in self.rows), *(row.drift for row in self.rows)]
        return torch.tensor(differences, dtype=torch.float64).max().item()  # unlike max(), keeps nan

    @property
    def equal(self) -> bool:
        return self.losses <= TOLERANCE and all(row.equal for row in self.rows)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """What several trainers saw, as one: their shares of a gradient add up."""
    gradients: Parts = {}
    values: Parts = {}
    for outcome in outcomes:
        values |= outcome.values
        for key, share in outcome.gradients.items():
            gradients[key] = gradients[key] + share if key in gradients else share
    return Outcome(outcomes[0].losses, gradients, values)


def compare(distributed: Outcome, alone: Outcome) -> Comparison:
    if not distributed.gradients.keys() == distributed.values.keys() == alone.gradients.keys():
        raise ValueError(
            f"these parts were trained on some side only: {distributed.gradients.keys() ^ alone.gradients}"
        )
    rows = []
    for (worker, part), other in alone.gradients.items():
        gradient = distributed.gradients[worker, part]
        drift = distributed.values[worker, part] - alone.values[worker, part]
        rows.append(
            Row(
                worker,
                part,
                tuple(gradient.shape),
                gradient.norm().item(),
                other.norm().item(),
                (gradient - other).abs().max().item(),
                drift.abs().max().item(),
            )
        )
    losses = torch.tensor([distributed.losses, alone.losses], dtype=torch.float64)
    return Comparison(rows, (losses[0] - losses[1]).abs().max().item())
