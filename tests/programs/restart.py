"""Trains a model whose two halves live on two parameter servers, from its last checkpoint on if there is one.

``python restart.py FOLDER STEPS [FATAL]``, by ``telegrad run --workers 3``: in step FATAL a server is killed, between
the backward and the optimizer's step.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import Tensor, nn

from telegrad import autograd, checkpoint, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

EVERY = 5  # steps between two checkpoints


class Half(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(20, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.table(ids)))


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(20, (32,), generator=chance)
    return ids, torch.sin(ids.double())


def train(folder: str, steps: int, fatal: int | None) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 1)
    halves = [RemoteModule(f"worker{rank}", Half, (rank,)) for rank in (1, 2)]
    references = [rpc.RRef(parameter) for parameter in head.parameters()]
    for half in halves:
        references += half.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, references, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    things = {"head": head, "one": halves[0], "two": halves[1], "optimizer": optimizer, "scheduler": scheduler}
    start = 0
    if checkpoint.latest(folder) is not None:
        start = checkpoint.load(folder, things).step
    print(f"starts at step {start}")
    for step in range(start, steps):
        ids, target = batch(step)
        with autograd.context() as context_id:
            parts = torch.cat([future.wait() for future in [half.forward_async(ids) for half in halves]], dim=1)
            loss = (head(parts).squeeze(1) - target).square().mean()
            autograd.backward(context_id, [loss])
            if step == fatal:
                os.kill(rpc.rpc_sync("worker2", os.getpid), signal.SIGKILL)
            optimizer.step(context_id)
        scheduler.step()
        print(f"step {step}: {loss.item().hex()}")
        if (step + 1) % EVERY == 0:
            checkpoint.save(folder, things, step=step + 1)
    print("finished")


def main() -> None:
    folder, steps, *fatal = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        train(folder, int(steps), int(fatal[0]) if fatal else None)
    rpc.shutdown()


if __name__ == "__main__":
    main()
