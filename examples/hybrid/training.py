"""What both trainers run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from clicks import Clicks
from model import TRAINERS, Dense, Recommender
from torch import Tensor, nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from telegrad import autograd, rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

TABLE_RATE, NET_RATE = 0.3, 0.05
GROUP_TIMEOUT = timedelta(seconds=70)  # longer than a call may take: if a call hangs, it is the call that says so

Parts = dict[tuple[str, str], Tensor]  # by worker and name


@dataclass
class Job:
    """What trainer 0 sends to trainer 1: handles on everything that they share."""

    shards: list[RemoteModule]
    top: RemoteModule
    optimizer: rpc.RRef[DistributedOptimizer]  # of shards and top; it lives on trainer 0
    store: tuple[str, int]  # where the trainers' own process group meets
    steps: int
    batch: int


@dataclass
class Outcome:
    losses: list[float]  # of each step, over the whole batch
    gradients: Parts  # of the last step
    values: Parts  # of all parameters, at the end


def train(trainer: int, job: Job, report: Callable[[float], None] | None = None) -> Outcome:
    store = dist.TCPStore(*job.store, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=trainer, world_size=TRAINERS, timeout=GROUP_TIMEOUT)
    try:
        return _train(trainer, job, report)
    finally:
        dist.destroy_process_group()  # if this one failed, the other learns of it now


def _train(trainer: int, job: Job, report: Callable[[float], None] | None) -> Outcome:
    clicks, dense = Clicks(), Dense()
    model = Recommender(job.shards, DistributedDataParallel(dense), job.top)
    own = DistributedOptimizer(optim.Adagrad, [rpc.RRef(each) for each in dense.parameters()], lr=NET_RATE)
    modules = [rpc.RRef(dense), *(remote.get_module_rref() for remote in (*job.shards, job.top))]
    outcome = Outcome([], {}, {})
    for step in range(job.steps):
        batch = clicks.batch(step, job.batch).part(trainer, TRAINERS)
        with autograd.context() as context_id:
            # 1. One backward, on all workers that had a part in the loss.  This is the trainer's share of it: what the
            #    trainers' contexts hold adds up to the gradient of the whole batch.
            loss = binary_cross_entropy_with_logits(model(batch), batch.clicked) / TRAINERS
            autograd.backward(context_id, [loss])
            # 2. On the servers and on top, keep these gradients for the step that both trainers take together.
            job.optimizer.rpc_sync().accumulate(context_id)
            # 3. Add up the loss.  This also waits for the other trainer, which has kept its gradients then.
            whole = loss.detach()
            dist.all_reduce(whole)
            # 4. Step: the dense net, of which DDP has made the gradients equal, on each trainer by itself …
            own.step(context_id)
            if step == job.steps - 1:
                outcome.gradients = ask(modules, gradients_of, context_id)
        # … and all the rest once, with the sum of what was kept.
        if trainer == 0:
            job.optimizer.rpc_sync().step()
        # 5. No trainer computes with weights that are being changed.
        dist.barrier()
        outcome.losses.append(whole.item())
        if report:
            report(whole.item())
    outcome.values = ask(modules, values_of)
    return outcome


# --- looking at what the owners hold ----------------------------------------------------------------------------------


def ask(modules: list[rpc.RRef[nn.Module]], function: Callable[..., dict[str, Tensor]], *more: int) -> Parts:
    """What the function says of each module, on the worker that has it."""
    return {
        (module.owner_name(), name): tensor
        for module in modules
        for name, tensor in rpc.rpc_sync(module.owner(), function, (module, *more)).items()
    }


def gradients_of(module: rpc.RRef[nn.Module], context_id: int) -> dict[str, Tensor]:
    gradients = autograd.get_gradients(context_id)
    return {name: gradients[each].to_dense() for name, each in module.local_value().named_parameters()}


def values_of(module: rpc.RRef[nn.Module]) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in module.local_value().named_parameters()}
