"""The same training in one process, with whole tables, one optimizer, and nothing of telegrad."""

from __future__ import annotations

from collections.abc import Callable

import torch
from clicks import ITEMS, USERS, Clicks
from model import SHARDS, TRAINERS, Dense, Top, bag, table
from torch import Tensor, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from training import NET_RATE, TABLE_RATE, Outcome, Parts


def train(steps: int, size: int, report: Callable[[float], None]) -> Outcome:
    users, items = bag(table(USERS, seed=2)), bag(table(ITEMS, seed=3))
    dense, top = Dense(), Top()
    nets = [*dense.parameters(), *top.parameters()]
    groups = [{"params": [users.weight, items.weight], "lr": TABLE_RATE}, {"params": nets, "lr": NET_RATE}]
    optimizer = optim.Adagrad(groups)
    clicks = Clicks()
    losses = []
    for step in range(steps):
        batch = clicks.batch(step, size)
        vectors = torch.stack([users(batch.users), items(batch.items)], dim=1)
        loss = binary_cross_entropy_with_logits(top(vectors, dense(batch.numbers)), batch.clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report(loss.item())

    def parts(look: Callable[[Tensor], Tensor]) -> Parts:
        """By the worker that has them in the distributed run."""
        found: Parts = {}
        for trainer in range(TRAINERS):
            found |= {(f"trainer{trainer}", name): look(each) for name, each in dense.named_parameters()}
        for shard in range(SHARDS):
            found[f"ps{shard}", "users.weight"] = look(users.weight)[shard::SHARDS]
            found[f"ps{shard}", "items.weight"] = look(items.weight)[shard::SHARDS]
        return found | {("top", name): look(each) for name, each in top.named_parameters()}

    return Outcome(losses, parts(lambda each: each.grad.to_dense()), parts(Tensor.detach))
